//! Two processes with a thousand links, and processes that sleep.

use crate::Shm;
use crate::harness::{Harness, TIMEOUT, pool};
use crate::processes::{Peer, tell, unhex};
use std::time::{Duration, Instant};
use tensorwire::Pool;
use tensorwire::internals::fabric::shm::{ShmFabric, ShmPort};
use tensorwire::internals::fabric::{
    Completions, Endpoint, Event, Fabric, LinkFailure, LinkId, LinkOptions, Port, Role, Sleep, Sleeper,
};

const LINKS: usize = 1024;
const OPTIONS: LinkOptions = LinkOptions { depth: 16, receives: 0, generation: 0 };
/// The message that asks a process for its resources. All others are echoed.
const REPORT: &[u8] = b"report";

/// A port with many links.
struct Many {
    port: ShmPort,
    links: Vec<LinkId>,
    completions: Completions,
    /// Whether the other side has left.
    closed: bool,
    _fabric: ShmFabric,
    _pool: Pool,
}

/// Resources of a process.
#[derive(Clone, Copy, Debug)]
struct Used {
    files: u64,
    resident_kib: u64,
    /// CPU time of this thread.
    cpu: Duration,
}

impl Used {
    fn now() -> Used {
        let read = |path| std::fs::read_to_string(path).expect("/proc");
        let status = read("/proc/self/status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|rest| rest.trim().split(' ').next()?.parse().ok());
        let schedule = read("/proc/thread-self/schedstat");
        let cpu = schedule.split(' ').next().and_then(|nanos| nanos.parse().ok());
        Used {
            files: std::fs::read_dir("/proc/self/fd").expect("/proc").count() as u64,
            resident_kib: resident.expect("VmRSS in kB"),
            cpu: Duration::from_nanos(cpu.expect("nanoseconds")),
        }
    }

    fn to_bytes(self) -> Vec<u8> {
        let words = [self.files, self.resident_kib, self.cpu.as_nanos() as u64];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Used {
        let mut words =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
        let mut next = || words.next().expect("three words");
        Used { files: next(), resident_kib: next(), cpu: Duration::from_nanos(next()) }
    }
}

impl Many {
    /// Makes `count` links; `meet` exchanges addresses with the other side.
    fn new(links: usize, role: Role, mut meet: impl FnMut(&[u8]) -> Vec<u8>) -> Many {
        let pool = pool(8 << 20);
        let fabric = Shm::fabric(&pool);
        let mut port = fabric.port().expect("a port");
        let links = (0..links).map(|_| {
            let endpoint = fabric.endpoint(0, &OPTIONS).expect("an endpoint");
            let theirs = meet(endpoint.address());
            let link = endpoint.connect(role, &theirs, TIMEOUT).expect("connected");
            let link = port.attach(link).expect("room");
            port.post_receives(link, 1_000_000);
            link
        });
        let links = links.collect();
        let completions = Completions::with_capacity(LINKS);
        Many { port, links, completions, closed: false, _fabric: fabric, _pool: pool }
    }

    /// Polls, and handles each message.
    fn poll(&mut self, mut message: impl FnMut(&mut ShmPort, LinkId, &[u8])) -> usize {
        let count = self.port.poll(&mut self.completions);
        for (completion, bytes) in self.completions.drain() {
            match completion.event {
                Event::Message(_) => message(&mut self.port, completion.link, bytes),
                Event::Down(LinkFailure::Closed) => self.closed = true,
                other => panic!("{other:?}"),
            }
        }
        self.completions.clear();
        count
    }

    /// Sends on each link, and receives each echo.
    fn round(&mut self, word: &[u8]) {
        for &link in &self.links {
            self.port.send(link, word).expect("room");
        }
        let mut missing: std::collections::HashSet<_> = self.links.iter().copied().collect();
        let start = Instant::now();
        while !missing.is_empty() {
            self.poll(|_, link, bytes| assert!(bytes == word && missing.remove(&link)));
            assert!(start.elapsed() < 3 * TIMEOUT, "{} echoes are missing", missing.len());
        }
    }

    /// The resources of the other process.
    fn ask(&mut self) -> Used {
        self.port.send(self.links[0], REPORT).expect("room");
        let (start, mut used) = (Instant::now(), None);
        loop {
            self.poll(|_, _, bytes| used = Some(Used::from_bytes(bytes)));
            if let Some(used) = used {
                return used;
            }
            assert!(start.elapsed() < TIMEOUT, "no answer");
        }
    }

    /// Sleeps until something arrives or the timeout is over. Returns the number of events of the
    /// poll after it.
    fn sleep_for(&mut self, time: Duration) -> usize {
        let (sleeper, start) = (self.port.sleeper(), Instant::now());
        loop {
            let seen = sleeper.seen();
            let armed = self.port.arm();
            let count = self.port.poll(&mut self.completions);
            let left = time.saturating_sub(start.elapsed());
            if count > 0 || left.is_zero() {
                return count;
            }
            if armed {
                sleeper.sleep(Sleep::Waiter, seen, left);
            }
        }
    }

    /// Duration of an empty poll.
    fn poll_time(&mut self) -> Duration {
        // Polls until all quiet links are idle. Then the best of several measurements, because the
        // CPU is shared.
        (0..100_000).for_each(|_| assert_eq!(self.poll(|_, _, _| {}), 0));
        let times = (0..20).map(|_| {
            let start = Instant::now();
            (0..5000).for_each(|_| assert_eq!(self.poll(|_, _, _| {}), 0));
            start.elapsed() / 5000
        });
        times.min().expect("20 times")
    }
}

// Code of the child processes.

/// Makes the requested number of links, and echoes. Sleeps in between.
pub fn child_sleeps(links: usize) {
    let before = Used::now();
    let mut many = Many::new(links, Role::Initiator, |address| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).expect("the parent speaks");
        tell(address);
        unhex(line.trim())
    });
    let sleeper = many.port.sleeper();
    while !many.closed {
        let seen = sleeper.seen();
        let armed = many.port.arm();
        let count = many.poll(|port, link, bytes| {
            let report = || {
                let now = Used::now();
                let (files, resident) = (now.files - before.files, now.resident_kib - before.resident_kib);
                Used { files, resident_kib: resident, cpu: now.cpu }.to_bytes()
            };
            let answer = if bytes == REPORT { report() } else { bytes.to_vec() };
            port.send(link, &answer).expect("room");
        });
        if count == 0 && armed && !many.closed {
            sleeper.sleep(Sleep::Waiter, seen, TIMEOUT);
        }
    }
}

/// Reaches the limit of open files, and reports the error.
pub fn child_has_few_files() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let pool = pool(1 << 20);
    let fabric = Shm::fabric(&pool);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: Some(64) }).expect("lowered");
    let mut rest: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    let mut refusals = Vec::new();
    let last = rest.pop(); // leaves room for the socket, and none for the segment
    drop(last);
    refusals.extend(fabric.endpoint(0, &OPTIONS).err().map(|error| error.to_string()));
    rest.extend(std::fs::File::open("/dev/null"));
    refusals.extend(fabric.endpoint(0, &OPTIONS).err().map(|error| error.to_string()));
    refusals.extend(ShmFabric::new(&pool, Default::default()).err().map(|error| error.to_string()));
    tell(refusals.join("\n").as_bytes());
}

// Tests.

fn connected(links: usize) -> (Peer, Many) {
    let mut peer = Peer::start(&format!("sleep on {links}"));
    let many = Many::new(links, Role::Acceptor, |address| {
        peer.say(address);
        peer.hear()
    });
    (peer, many)
}

#[test]
fn a_thousand_links_between_two_processes_work_go_cold_come_back_and_die_together() {
    let start = Instant::now();
    let (mut peer, mut many) = connected(LINKS);
    println!("{LINKS} links were made in {:?}", start.elapsed());
    many.round(b"first");
    let used = many.ask();
    println!("{LINKS} links cost the peer {} files and {} KiB", used.files, used.resident_kib);
    assert!(used.files <= 8, "files for each link: {used:?}");
    // A segment of each side, 12 KiB in all, and heap memory.
    assert!(used.resident_kib < 5 * 64 * LINKS as u64, "{used:?}");

    let (_other, mut one) = connected(1);
    let (alone, among) = (one.poll_time(), many.poll_time());
    println!("a poll takes {among:?} with {LINKS} idle links, {alone:?} with one");
    assert!(among < 5 * alone.mul_f64(1.2), "polls cost the more, the more links there are");

    many.round(b"again");
    let (own, theirs) = (Used::now(), many.ask());
    const IDLE: Duration = Duration::from_secs(2);
    assert_eq!(many.sleep_for(IDLE), 0);
    let (own, theirs) = (Used::now().cpu - own.cpu, many.ask().cpu - theirs.cpu);
    println!("{IDLE:?} asleep cost {own:?} and the peer {theirs:?} of CPU");
    assert!(own < IDLE / 20 && theirs < IDLE / 20, "5 times 1 %");

    many.round(b"awake");
    let killed = Instant::now();
    peer.process.kill().expect("killed");
    let pid = peer.process.id();
    let mut down = 0;
    while down < LINKS {
        many.sleep_for(TIMEOUT);
        assert!(killed.elapsed() < 3 * TIMEOUT, "{down} of {LINKS} are down");
        for (completion, _) in many.completions.drain() {
            assert!(
                matches!(completion.event, Event::Down(LinkFailure::PeerDied { pid: dead }) if dead == pid)
            );
            many.port.detach(completion.link);
            down += 1;
        }
        many.completions.clear();
    }
    println!("{LINKS} links were down {:?} after the kill", killed.elapsed());
    assert!(many.sleep_for(Duration::from_millis(10)) == 0, "each once");
}

#[test]
fn one_who_sleeps_costs_nothing_and_is_woken_by_a_message_and_by_a_death() {
    let (mut peer, mut one) = connected(1);
    let before = one.ask();
    const IDLE: Duration = Duration::from_secs(3);
    std::thread::sleep(IDLE);
    let used = one.ask().cpu - before.cpu;
    println!("{IDLE:?} asleep cost {used:?} of CPU");
    assert!(used < IDLE / 20, "5 times 1 %");
    let mut times: Vec<_> = (0..21)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(30));
            let start = Instant::now();
            one.round(b"wake up");
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("a sleeper answered after {:?}, {:?} at most", times[10], times[20]);
    // A lost ring of the doorbell would cost 100 ms.
    assert!(times[10] < 5 * Duration::from_millis(10));

    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        let at = Instant::now();
        peer.process.kill().expect("killed");
        (peer, at)
    });
    assert_eq!(one.sleep_for(TIMEOUT), 1);
    let told = Instant::now();
    let (_peer, at) = killer.join().expect("no panic");
    println!("a sleeper heard of its peer's death after {:?}", told - at);
    assert!(told - at < 5 * Duration::from_millis(50));
    let (completion, _) = one.completions.drain().next().expect("one");
    assert!(matches!(completion.event, Event::Down(LinkFailure::PeerDied { .. })));
}

#[test]
fn without_room_for_a_file_the_limit_is_named() {
    let mut peer = Peer::start("few files");
    let refusals = String::from_utf8(peer.hear()).expect("text");
    println!("{refusals}");
    let lines: Vec<_> = refusals.lines().collect();
    assert!(lines.len() == 3 && lines.iter().all(|line| line.contains("raise the limit of open files")));
}
