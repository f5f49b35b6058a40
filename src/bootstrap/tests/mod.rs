//! Several members in one process, each with a peering that only pretends to make links.

mod addresses;
pub(super) mod certificates;
mod early_deaths;
mod lifecycle;
mod limits;
mod losses;
mod lying_member;
mod lying_sender;
mod meeting;
mod proof_floods;
mod proofs;
mod protocol;
mod refusals;
mod store;
mod strangers;
mod tensors;

use super::*;
use crate::bootstrap::service::PROTOCOL_VERSION;
use crate::wire::{Cluster, Code, HostPort, Incarnation, LossCause, Status, TaskId};
use std::collections::HashMap;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Timeout of each wait, and the cost of a hang.
const LONG: Duration = Duration::from_secs(20);

/// Loopback addresses that no other test uses: each test has an IP address of its own in 127/8.
fn addresses(count: usize) -> Vec<String> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id();
    let ip = format!("127.{}.{}.{}", 1 + process % 250, process / 250 % 250, 1 + number % 250);
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind((ip.as_str(), 0)).expect("a free port")).collect();
    held.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect()
}

fn name(job: &str, task: u32) -> TaskId {
    TaskId::new(job, task).unwrap()
}

/// A cluster of `count` workers.
pub(super) fn workers(count: usize) -> Cluster {
    cluster(&[("worker", &addresses(count))])
}

fn cluster(jobs: &[(&str, &[String])]) -> Cluster {
    let jobs: Vec<_> = jobs.iter().map(|(job, list)| format!("{job}={}", list.join(","))).collect();
    jobs.join(";").parse().unwrap()
}

/// The address of a member, which is in the cluster.
fn address(cluster: &Cluster, job: &str, task: u32) -> String {
    cluster.address(&name(job, task)).map(HostPort::to_string).unwrap()
}

/// Options with short times for worker `task`.
pub(super) fn options(cluster: &Cluster, task: u32) -> BootstrapOptions {
    let incarnation = Incarnation::random().unwrap();
    BootstrapOptions::for_tests(name("worker", task), cluster.clone(), incarnation)
}

/// An event that a peering was told.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Ready(TaskId, u64),
    Lost(TaskId, LossCause),
    Abandoned(TaskId, u64),
    Gone(TaskId, LossCause),
}

/// The state of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ticket {
    Prepared,
    Connected,
    Failed,
    Abandoned,
    Ready,
}

/// A peering that makes nothing, checks the order of the calls, and remembers them.
#[derive(Default)]
pub(super) struct Pretender {
    told: Mutex<Vec<Told>>,
    turned: Condvar,
    tickets: Mutex<HashMap<u64, Ticket>>,
    next: AtomicU64,
    prepared: Mutex<Vec<PeerInfo>>,
    /// Offers that were connected to, with the role.
    connected: Mutex<Vec<(PeerInfo, String, bool)>>,
    /// How many of the next connects fail.
    failing: AtomicU32,
    /// Connects fail, as settings of the two disagree.
    disagrees: AtomicBool,
    /// The next prepare panics.
    panicking: AtomicBool,
    /// How long a connect takes.
    delay: Mutex<Duration>,
    /// Bytes that an offer is filled up to.
    offer_len: AtomicU64,
}

impl Pretender {
    fn tell(&self, told: Told) {
        self.told.lock().unwrap().push(told);
        self.turned.notify_all();
    }

    fn told(&self) -> Vec<Told> {
        self.told.lock().unwrap().clone()
    }

    /// Waits until something was told that `wanted` takes.
    fn await_told<R>(&self, wanted: impl Fn(&Told) -> Option<R>) -> R {
        let begin = Instant::now();
        let mut told = self.told.lock().unwrap();
        loop {
            if let Some(found) = told.iter().find_map(&wanted) {
                return found;
            }
            assert!(begin.elapsed() < LONG, "never told; only {told:?}");
            told = self.turned.wait_timeout(told, Duration::from_millis(100)).unwrap().0;
        }
    }

    fn await_loss(&self) -> (TaskId, LossCause) {
        self.await_told(|told| match told {
            Told::Lost(name, cause) => Some((name.clone(), cause.clone())),
            _ => None,
        })
    }

    fn await_ready(&self, peer: &TaskId, generation: u64) {
        self.await_told(|told| (*told == Told::Ready(peer.clone(), generation)).then_some(()));
    }

    fn becomes(&self, ticket: u64, from: &[Ticket], to: Ticket) {
        let before = self.tickets.lock().unwrap().insert(ticket, to);
        assert!(before.is_some_and(|before| from.contains(&before)), "ticket {ticket}: {before:?} to {to:?}");
    }

    /// Every endpoint came to one of its ends.
    fn assert_no_endpoint_is_left(&self) {
        for (ticket, state) in self.tickets.lock().unwrap().iter() {
            let ended = matches!(state, Ticket::Failed | Ticket::Abandoned | Ticket::Ready);
            assert!(ended, "ticket {ticket} is left {state:?}");
        }
    }
}

impl Peering for Pretender {
    fn prepare(&self, peer: &PeerInfo, theirs: Option<&[u8]>) -> Result<Prepared, Status> {
        // The side that does not start knows the offer of the other one.
        if let Some(theirs) = theirs {
            let theirs = String::from_utf8(theirs.to_vec()).unwrap();
            assert!(theirs.contains(&format!("generation {}", peer.generation)), "{theirs} for {peer:?}");
        }
        self.prepared.lock().unwrap().push(peer.clone());
        assert!(!self.panicking.swap(false, Ordering::SeqCst), "the peering has a bug");
        let ticket = self.next.fetch_add(1, Ordering::SeqCst);
        self.tickets.lock().unwrap().insert(ticket, Ticket::Prepared);
        let mut offer = format!("for {} generation {}", peer.name, peer.generation).into_bytes();
        offer.resize(offer.len().max(self.offer_len.load(Ordering::SeqCst) as usize), b'.');
        Ok(Prepared { ticket, offer })
    }

    fn connect(
        &self,
        peer: &PeerInfo,
        ticket: u64,
        offer: &[u8],
        initiator: bool,
        timeout: Duration,
    ) -> Result<(), Status> {
        assert!(timeout > Duration::ZERO);
        let offer = String::from_utf8(offer.to_vec()).unwrap();
        assert!(offer.contains(&format!("generation {}", peer.generation)), "{offer} for {peer:?}");
        self.connected.lock().unwrap().push((peer.clone(), offer, initiator));
        let delay = *self.delay.lock().unwrap();
        std::thread::sleep(delay);
        let fails = self.failing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if fails.is_ok() {
            self.becomes(ticket, &[Ticket::Prepared], Ticket::Failed);
            return Err(Status::new(Code::Unavailable, "the cable is cut"));
        }
        if self.disagrees.load(Ordering::SeqCst) {
            self.becomes(ticket, &[Ticket::Prepared], Ticket::Failed);
            return Err(Status::new(Code::FailedPrecondition, "queue_depth is 64 and 128"));
        }
        self.becomes(ticket, &[Ticket::Prepared], Ticket::Connected);
        Ok(())
    }

    fn abandon(&self, peer: &PeerInfo, ticket: u64) {
        self.becomes(ticket, &[Ticket::Prepared, Ticket::Connected], Ticket::Abandoned);
        self.tell(Told::Abandoned(peer.name.clone(), ticket));
    }

    fn ready(&self, peer: &PeerInfo, ticket: u64) {
        self.becomes(ticket, &[Ticket::Connected], Ticket::Ready);
        self.tell(Told::Ready(peer.name.clone(), peer.generation));
    }

    fn lost(&self, peer: &PeerInfo, cause: LossCause) {
        self.tell(Told::Lost(peer.name.clone(), cause));
    }

    fn gone(&self, peer: &PeerInfo, cause: LossCause) {
        self.tell(Told::Gone(peer.name.clone(), cause));
    }
}

/// This test again, in a process of its own or in one of that user, with `part` to play.
fn run_again(test: &str, part: &str, user: Option<u32>) -> String {
    // By its descriptor, as another user may not enter the folder.
    let this = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let mut child = Command::new(format!("/proc/self/fd/{}", this.as_raw_fd()));
    child.args([&format!("bootstrap::tests::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    child.env(PART, part).current_dir("/");
    if let Some(user) = user {
        child.uid(user).gid(user);
    }
    let child = child.output().expect("it starts");
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    println!("{said}");
    assert!(child.status.success() && said.contains("1 passed"), "the other process failed");
    said
}

/// What a test is to do that runs again.
const PART: &str = "TENSORWIRE_TEST_PART";

/// The lines that this thread logs in `run`.
pub(super) fn logged(run: impl FnOnce()) -> String {
    let log = Log::of("tensorwire");
    tracing::subscriber::with_default(log.clone(), run);
    log.text()
}

/// Keeps what programs log whose names begin so.
#[derive(Clone)]
struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    target: &'static str,
}

impl Log {
    fn of(target: &'static str) -> Self {
        Log { lines: Arc::default(), target }
    }

    fn text(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with(self.target)
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                match field.name() {
                    "message" => self.0 += &format!("{value:?}"),
                    name => self.0 += &format!(" {name}={value:?}"),
                }
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.lines.lock().unwrap().push(text.0);
    }

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

/// A started member with its peering.
struct Member {
    service: Bootstrap,
    peering: Arc<Pretender>,
    incarnation: Incarnation,
}

impl Member {
    fn new(options: BootstrapOptions) -> Self {
        Self::speaking(PROTOCOL_VERSION, options)
    }

    fn speaking(version: u32, options: BootstrapOptions) -> Self {
        let incarnation = options.incarnation;
        let peering = Arc::new(Pretender::default());
        let service = Bootstrap::speaking(version, options, peering.clone()).expect("good options");
        Member { service, peering, incarnation }
    }

    fn start(options: BootstrapOptions) -> Self {
        let member = Member::new(options);
        member.listen();
        member
    }

    /// Starts. A child that another test starts has the socket of an earlier member until its exec.
    fn listen(&self) {
        let began = Instant::now();
        loop {
            match self.service.start() {
                Err(BootstrapError::Bind { source, .. })
                    if source.kind() == std::io::ErrorKind::AddrInUse && began.elapsed() < LONG =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                started => return started.expect("it starts"),
            }
        }
    }

    fn join(&self) {
        self.service.join(LONG).expect("everybody is there");
    }

    fn missing(&self, timeout: Duration) -> String {
        let error = self.service.join(timeout).expect_err("somebody is missing");
        assert!(matches!(error, BootstrapError::Missing { .. }), "{error}");
        error.to_string()
    }

    /// Joins with a short timeout until the error contains `part`.
    fn await_missing(&self, part: &str) -> String {
        let begin = Instant::now();
        loop {
            let error = self.missing(Duration::from_millis(20));
            if error.contains(part) {
                return error;
            }
            assert!(begin.elapsed() < LONG, "no \"{part}\" in: {error}");
        }
    }

    fn await_missing_without(&self, part: &str) {
        let begin = Instant::now();
        while self.missing(Duration::from_millis(20)).contains(part) {
            assert!(begin.elapsed() < LONG, "\"{part}\" stays");
        }
    }

    fn stop(&self) {
        self.service.stop("the test is over", LONG).expect("it stops");
    }
}

/// Starts and joins these members of a cluster, and all stop at the end of the test.
fn linked(cluster: &Cluster, count: u32) -> Vec<Member> {
    let members: Vec<Member> = (0..count).map(|task| Member::start(options(cluster, task))).collect();
    members.iter().for_each(Member::join);
    members
}
