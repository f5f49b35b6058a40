//! Tests with real processes: deaths, and leftovers.
//!
//! The test program runs itself again as the peer: `child` is what runs there.

use crate::Shm;
use crate::expect;
use crate::harness::{
    End, Got, Harness, TIMEOUT, connect, immediate, loan_message, pattern, pool, tensor, tensor_mut,
};
use crate::many;
use crate::tcp;
use crate::verbs_network;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::shm::ShmFabric;
use tensorwire::internals::fabric::{
    Endpoint, Fabric, LinkFailure, LinkOptions, LoanPermit, Port, PostError, Role,
};
use tensorwire::internals::wire::Grant;
use tensorwire::{DType, Shape, TensorMeta};

const SCENARIO: &str = "TENSORWIRE_TEST_CHILD";
/// Bound for the report of a death: five times the expected time.
const BOUND: Duration = Duration::from_secs(5);

type ShmEnd = End<ShmFabric>;

fn options() -> LinkOptions {
    LinkOptions { depth: 64, receives: 0, generation: 0 }
}

/// The peer's process, as its parent sees it. Its drop kills it.
pub struct Peer {
    pub process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    pub fn start(scenario: &str) -> Peer {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "processes::child", "--ignored", "--nocapture"])
            .env(SCENARIO, scenario)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let stdin = process.stdin.take().expect("piped");
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        Peer { process, stdin, stdout }
    }

    /// Starts a peer and connects to it.
    fn connected(scenario: &str) -> (Peer, ShmEnd) {
        let mut peer = Peer::start(scenario);
        let pool = pool(8 << 20);
        let fabric = Shm::fabric(&pool);
        let endpoint = fabric.endpoint(0, &options()).expect("an endpoint");
        peer.say(endpoint.address());
        let address = peer.hear();
        let link = endpoint.connect(Role::Acceptor, &address, TIMEOUT).expect("connected");
        let mut end = End::new(pool, fabric, link);
        end.port.post_receives(end.link, 1_000_000);
        (peer, end)
    }

    pub fn say(&mut self, bytes: &[u8]) {
        writeln!(self.stdin, "{}", hex(bytes)).expect("the peer listens");
    }

    /// The next line of the peer. Output of the test framework is skipped.
    pub fn hear(&mut self) -> Vec<u8> {
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line).expect("readable");
            assert!(read > 0, "the peer ended without a word");
            if let Some((_, text)) = line.trim_end().split_once('@') {
                return unhex(text);
            }
        }
    }

    fn kill(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("ended");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|k| u8::from_str_radix(&text[2 * k..][..2], 16).expect("hex")).collect()
}

pub fn grant_to_bytes(grant: &Grant) -> Vec<u8> {
    let mut bytes = grant.offset.to_le_bytes().to_vec();
    bytes.extend(grant.len.to_le_bytes());
    bytes.extend(grant.key.to_le_bytes());
    bytes.extend(grant.region.to_le_bytes());
    bytes
}

pub fn grant_from_bytes(bytes: &[u8]) -> Grant {
    Grant {
        offset: u64::from_le_bytes(bytes[..8].try_into().expect("8")),
        len: u64::from_le_bytes(bytes[8..16].try_into().expect("8")),
        key: u32::from_le_bytes(bytes[16..20].try_into().expect("4")),
        region: u16::from_le_bytes(bytes[20..22].try_into().expect("2")),
    }
}

// Code of the child process.

/// Sends a line to the parent.
pub fn tell(bytes: &[u8]) {
    println!("@{}", hex(bytes));
}

/// Connects to the parent.
fn child_end() -> ShmEnd {
    let pool = pool(8 << 20);
    let fabric = Shm::fabric(&pool);
    let endpoint = fabric.endpoint(0, &options()).expect("an endpoint");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the parent speaks");
    tell(endpoint.address());
    let link = endpoint.connect(Role::Initiator, &unhex(line.trim()), TIMEOUT).expect("connected");
    let mut end = End::new(pool, fabric, link);
    end.port.post_receives(end.link, 1_000_000);
    end
}

#[test]
#[ignore = "what runs in the processes that the other tests start"]
fn child() {
    let scenario = std::env::var(SCENARIO).expect("started by another test");
    match scenario.as_str() {
        "echo" => child_echoes(),
        "idle" => child_idles(),
        "flood" => child_floods(),
        "last words" => child_says_last_words(),
        "survivor" => child_survives(),
        "verbs echo" => verbs_network::child_echoes(),
        "tcp flood" => tcp::child_floods(),
        "tcp last words" => tcp::child_says_last_words(),
        "few files" => many::child_has_few_files(),
        other => match other.strip_prefix("sleep on ").and_then(|links| links.parse().ok()) {
            Some(links) => many::child_sleeps(links),
            None => panic!("no scenario {other}"),
        },
    }
}

/// Exposes and grants a tensor, and answers each message with a write of the same bytes, until it
/// is stopped.
fn child_echoes() {
    let mut end = child_end();
    let exposed = {
        let source = tensor(&end.pool, &pattern(100_000, 1));
        end.port.expose(end.link, &source).expect("room")
    };
    end.port.send(end.link, &grant_to_bytes(&exposed)).expect("posted");
    let target = grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m));
    loop {
        match end.next_alone() {
            Got::Message(m) if m == b"stop" => return,
            Got::Message(m) => {
                let part = target.part(0, m.len() as u64).expect("inside");
                end.port.write_inline(end.link, &m, &part, Some(immediate(1))).expect("posted");
            }
            Got::Lent(message, bytes) => {
                let meta = TensorMeta::new(DType::U8, Shape::new(&[bytes.len() as u64]).expect("a shape"));
                let lent = tensorwire::Tensor::from_lent(&end.pool, &meta.expect("meta"), bytes)
                    .map_err(|(error, _)| error)
                    .expect("as long");
                let copy = tensor(&end.pool, lent.bytes());
                drop(lent);
                let part = target.part(0, copy.bytes().len() as u64).expect("inside");
                let len = part.len;
                let number = u32::from_le_bytes(message.try_into().expect("a number"));
                end.port.write(end.link, &copy, len, &part, Some(immediate(number))).expect("posted");
                expect!(end.next_alone(), Got::Done => ());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Reports that it is connected, and never polls.
fn child_idles() {
    let mut end = child_end();
    let target = tensor_mut(&end.pool, 4096);
    let grant = end.port.grant(end.link, target).expect("room");
    tell(&grant_to_bytes(&grant));
    std::thread::sleep(Duration::from_secs(600));
}

/// Writes and receives writes as fast as possible, until it is killed.
fn child_floods() {
    let mut end = child_end();
    let target = tensor_mut(&end.pool, 1 << 20);
    let grant = end.port.grant(end.link, target).expect("room");
    end.port.send(end.link, &grant_to_bytes(&grant)).expect("posted");
    let theirs = grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m));
    let source = tensor(&end.pool, &pattern(1 << 20, 7));
    loop {
        let _ = end.port.write(end.link, &source, 1 << 20, &theirs, Some(immediate(1)));
        end.poll();
        end.arrivals.clear();
    }
}

/// Sends, writes and lends, and ends at once.
fn child_says_last_words() {
    let mut end = child_end();
    let target = grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m));
    let source = tensor(&end.pool, &pattern(10_000, 5));
    for k in 0..20u8 {
        end.port.send(end.link, &[k]).expect("posted");
    }
    end.port.write(end.link, &source, 10_000, &target, Some(immediate(2))).expect("posted");
    end.port
        .lend(end.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(3))
        .expect("posted");
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL).expect("killed");
}

/// The only test of its process, so that it can count the resources of the process; see
/// `nothing_is_left_of_a_link`.
fn child_survives() {
    let before = Footprint::now();
    {
        // A link within this process, and one to a process that is killed.
        let (mut peer, mut end) = Peer::connected("idle");
        let target = grant_from_bytes(&peer.hear());
        let source = tensor(&end.pool, &[1; 64]);
        end.port.write(end.link, &source, 64, &target, None).expect("posted");
        end.port
            .lend(end.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(1))
            .expect("posted");
        let during = Footprint::now();
        assert!(during.segments >= 2 && during.threads == before.threads + 1, "{during:?}");
        peer.kill();
        assert_eq!(end.until_down().0, 2);
        end.port.detach(end.link);
        assert!(source.is_unique());
        let own = connect(&end.fabric, &end.fabric, &options());
        let (a, b) = (end.port.attach(own.0).expect("room"), end.port.attach(own.1).expect("room"));
        end.port.detach(a);
        end.port.detach(b);
        assert_eq!(Footprint::now().segments, 0, "a segment is still mapped");
    }
    // A thread that was joined is listed for a moment longer.
    let start = Instant::now();
    while Footprint::now() != before {
        assert!(start.elapsed() < TIMEOUT, "{:?}, before {before:?}", Footprint::now());
        std::thread::yield_now();
    }
    tell(b"fine");
}

/// Kernel resources of a process.
#[derive(Debug, PartialEq, Eq)]
struct Footprint {
    files: usize,
    segments: usize,
    threads: usize,
}

impl Footprint {
    fn now() -> Self {
        let count = |path: &str| std::fs::read_dir(path).expect("/proc").count();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
        Footprint {
            files: count("/proc/self/fd"),
            segments: maps.lines().filter(|line| line.contains("memfd:tensorwire-link")).count(),
            threads: count("/proc/self/task"),
        }
    }
}

// Tests.

#[test]
fn two_processes_write_read_send_and_lend_to_each_other() {
    let (_peer, mut end) = Peer::connected("echo");
    let exposed = grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m));
    let target = tensor_mut(&end.pool, 100_000);
    let grant = end.port.grant(end.link, target).expect("room");
    end.port.send(end.link, &grant_to_bytes(&grant)).expect("posted");

    let target = tensor_mut(&end.pool, 100_000);
    end.port.read(end.link, target, &exposed).expect("posted");
    let read = expect!(end.next_alone(), Got::ReadDone(target) => target);
    assert!(read.bytes() == pattern(100_000, 1), "the bytes differ");

    for k in 0..2000u64 {
        end.port.send(end.link, &k.to_le_bytes()).expect("room");
        expect!(end.next_alone(), Got::Immediate(_, 8) => ());
    }
    let source = tensor(&end.pool, &pattern(100_000, 9));
    end.port
        .lend(end.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(6))
        .expect("posted");
    let mut seen = (false, false);
    while seen != (true, true) {
        match end.next_alone() {
            Got::Done => seen.0 = true,
            Got::Immediate(imm, 100_000) if imm == immediate(6) => seen.1 = true,
            other => panic!("{other:?}"),
        }
    }
    let written = end.port.revoke(end.link, &grant).expect("granted");
    assert!(written.bytes() == source.bytes(), "the bytes differ");
    end.port.send(end.link, b"stop").expect("posted");
    expect!(end.next_alone(), Got::Down(LinkFailure::Closed) => ());
}

#[test]
fn the_death_of_an_idle_peer_fails_everything_outstanding_at_once() {
    let (mut peer, mut end) = Peer::connected("idle");
    let grant = grant_from_bytes(&peer.hear());
    let source = tensor(&end.pool, &[1; 64]);
    end.port.write(end.link, &source, 64, &grant, None).expect("posted");
    end.port.read(end.link, tensor_mut(&end.pool, 4096), &grant).expect("posted");
    end.port
        .lend(end.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(1))
        .expect("posted");
    for _ in 0..1000 {
        end.poll();
    }
    assert!(end.arrivals.is_empty());
    let start = Instant::now();
    peer.process.kill().expect("killed");
    let (failed, done, why) = end.until_down();
    println!("the death was told after {:?}", start.elapsed());
    assert!(start.elapsed() < BOUND);
    assert_eq!((failed, done), (3, 0));
    assert_eq!(why, LinkFailure::PeerDied { pid: peer.process.id() });
    assert_eq!(end.port.send(end.link, b"x"), Err(PostError::Down));
    // No process is left that could read it, so it is free.
    assert!(source.is_unique());
}

#[test]
fn a_death_in_the_middle_of_transfers_ends_each_operation_once() {
    for round in 0..5 {
        let (mut peer, mut end) = Peer::connected("flood");
        let theirs = grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m));
        let target = tensor_mut(&end.pool, 1 << 20);
        let mine = end.port.grant(end.link, target).expect("room");
        end.port.send(end.link, &grant_to_bytes(&mine)).expect("posted");
        let source = tensor(&end.pool, &pattern(1 << 20, 2));
        let (mut posted, mut ended, mut failed, mut arrived) = (0, 0, false, 0);
        let mut killed = None;
        let why = loop {
            if arrived >= 10 + round && killed.is_none() {
                peer.process.kill().expect("killed");
                killed = Some(Instant::now());
            }
            if end.port.write(end.link, &source, 1 << 20, &theirs, None).is_ok() {
                posted += 1;
            }
            end.poll();
            let mut down = None;
            for (_, got) in end.arrivals.drain(..) {
                match got {
                    Got::Done => {
                        assert!(!failed, "what was done is told before what failed");
                        ended += 1;
                    }
                    Got::Failed => {
                        failed = true;
                        ended += 1;
                    }
                    Got::Immediate(_, bytes) => arrived += u64::from(bytes == 1 << 20),
                    Got::Down(why) => down = Some(why),
                    other => panic!("{other:?}"),
                }
            }
            if let Some(why) = down {
                break why;
            }
            assert!(killed.is_none_or(|at| at.elapsed() < BOUND), "the death was not told");
        };
        let after = killed.expect("killed before").elapsed();
        println!("the death was told after {after:?}, {posted} writes out, {arrived} in");
        assert_eq!(why, LinkFailure::PeerDied { pid: peer.process.id() });
        assert_eq!(ended, posted);
        // Complete arrivals are intact.
        let target = end.port.revoke(end.link, &mine).expect("granted");
        assert!(arrived < 1 || target.bytes() == pattern(1 << 20, 7), "the bytes differ");
    }
}

#[test]
fn what_a_peer_said_before_it_died_still_arrives() {
    let (mut peer, mut end) = Peer::connected("last words");
    let target = tensor_mut(&end.pool, 10_000);
    let grant = end.port.grant(end.link, target).expect("room");
    end.port.send(end.link, &grant_to_bytes(&grant)).expect("posted");
    peer.process.wait().expect("ended");
    for k in 0..20 {
        assert_eq!(expect!(end.next_alone(), Got::Message(m) => m), [k]);
    }
    expect!(end.next_alone(), Got::Immediate(_, 10_000) => ());
    let lent = expect!(end.next_alone(), Got::Lent(_, bytes) => bytes);
    assert_eq!(end.until_down().2, LinkFailure::PeerDied { pid: peer.process.id() });
    let written = end.port.revoke(end.link, &grant).expect("granted");
    assert!(written.bytes() == pattern(10_000, 5), "the bytes differ");
    // The dead lender's pages stay while they are borrowed.
    let meta = TensorMeta::new(DType::U8, Shape::new(&[10_000]).expect("a shape")).expect("meta");
    let lent = tensorwire::Tensor::from_lent(&end.pool, &meta, lent).map_err(|(e, _)| e).expect("lent");
    end.port.detach(end.link);
    assert!(lent.bytes() == pattern(10_000, 5), "the bytes differ");
}

#[test]
fn nothing_is_left_of_a_link() {
    let mut peer = Peer::start("survivor");
    assert_eq!(peer.hear(), b"fine");
}
