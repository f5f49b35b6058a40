//! Floods on the ports of members: an established link goes on, and another member joins.

use crate::common::other::{Other, other_user, wait_to_be_told};
use crate::common::{cluster, counting, member, until, values};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{HashSet, VecDeque};
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tensorwire::internals::bootstrap::Prover;
use tensorwire::{AuthSettings, Edge, Node, PeerState, TaskId};

/// A flood shares the processors with a round trip. The median of that is at most twice the one
/// before the flood, and so much longer.
const LONGER: Duration = Duration::from_micros(20);
/// What is measured is compared with so many times that bound.
const MARGIN: u32 = 5;
/// While a member joins, the median is at most so many times the one before the flood, or
/// [`ROUND_TRIP`] if that is longer.
const SLOWER: u32 = 20;
const ROUND_TRIP: Duration = Duration::from_millis(1);
/// Bound for a member to start and join during a flood: five times what it takes.
const JOINED: Duration = Duration::from_secs(5);
/// For how long the round trips of one line are measured, at least.
const MEASURED: Duration = Duration::from_millis(800);
/// Connections that the flood keeps open at a time, to all ports together.
const OPEN: usize = 400;
/// Time between two looks for new ports of links.
const LOOK: Duration = Duration::from_millis(100);
/// Pause between two connections of the flood. A host has some 28,000 ports for them, and keeps
/// each for a minute.
const PAUSE: Duration = Duration::from_micros(200);

/// A flood on the bootstrap ports. `PROOFS` is one of whole handshakes of TLS with a wrong secret.
/// `MIXED` has `PARALLEL` of them at a time, beside silent connections. The flood on the sockets of
/// the handshakes of links is `RENDEZVOUS`, and that on the ports of links over TCP `LINKS`.
const PORTS: [&str; 4] = ["silent", "pings", "garbage", "calls"];
const PROOFS: &str = "proofs";
const MIXED: &str = "mixed";
const PARALLEL: usize = 2;
const RENDEZVOUS: &str = "rendezvous";
const LINKS: &str = "links";

/// A cluster of three, and the file of the secret by which its members prove their names. Without
/// one they prove them by their user.
struct Guarded {
    cluster: String,
    /// Ports that are no links': those of the cluster, and those at which others listened before.
    known: String,
    secret: Option<tempfile::NamedTempFile>,
}

impl Guarded {
    fn new(cluster: String, auth: &str) -> Self {
        let secret = (auth == "secret").then(|| {
            let mut secret = tempfile::NamedTempFile::new().expect("a file that no other user may read");
            secret.write_all(&b"0123456789abcdef".repeat(4)).expect("written");
            secret
        });
        let of_cluster = cluster.split(',').filter_map(|address| address.rsplit(':').next());
        let known = listening().into_iter().map(|port| port.to_string());
        let known: Vec<String> = known.chain(of_cluster.map(str::to_owned)).collect();
        Guarded { known: known.join(","), cluster, secret }
    }

    fn path(&self) -> &str {
        let secret = self.secret.as_ref();
        secret.map_or("", |secret| secret.path().to_str().expect("UTF-8"))
    }

    /// Starts a flood, by another user if there is one.
    fn flood(&self, kind: &str, user: Option<u32>) -> Other {
        let environment = [("TEST_KIND", kind), ("TEST_KNOWN", &self.known)];
        match user {
            Some(user) => Other::start_as(user, "floods::role_flood", &self.cluster, &environment),
            None => Other::start_with("floods::role_flood", &self.cluster, &environment),
        }
    }

    fn other(&self, role: &str, more: (&str, &str)) -> Other {
        let role = format!("floods::{role}");
        Other::start_with(&role, &self.cluster, &[("TEST_SECRET", self.path()), more])
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).expect("started by a test")
}

fn start(cluster: &str, task: u32, secret: &str) -> Node {
    let builder = member(cluster, task);
    let builder = if secret.is_empty() { builder } else { builder.set("secret_file", secret) };
    builder.start().expect("the node starts")
}

/// Waits for the link with w/`task`, whoever else is missing.
fn until_linked(node: &Node, task: u32) {
    let is_up = || {
        let peers = node.peers();
        peers.iter().any(|peer| peer.task.task() == task && matches!(peer.state, PeerState::Connected))
    };
    until(node, "the link", is_up);
}

#[test]
#[ignore = "a role, not a test"]
fn role_echo() {
    let node = start(&variable("TEST_CLUSTER"), 1, &variable("TEST_SECRET"));
    until_linked(&node, 0);
    println!("ready");
    let (ask, answer) = (edge(&node, true), edge(&node, false));
    let orders = std::thread::spawn(wait_to_be_told);
    for id in 0.. {
        let step = node.step(id).expect("new");
        let asked = step.receive(&ask).begin().expect("begun");
        while !asked.is_done() {
            if orders.is_finished() {
                return;
            }
            node.progress().expect("usable");
        }
        step.send(&answer, asked.wait().expect("asked").tensor).expect("sent");
        // Over gRPC the cleanup of a step drops its values that were not asked for yet.
        if id >= 8 {
            node.cleanup(id - 8);
        }
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_late() {
    let node = start(&variable("TEST_CLUSTER"), 2, &variable("TEST_SECRET"));
    let began = Instant::now();
    node.join().expect("within join_timeout");
    println!("joined after {:?}", began.elapsed());
    wait_to_be_told();
}

/// The edge of the questions of w/0, or that of the answers of w/1.
fn edge(node: &Node, asks: bool) -> Edge {
    let device = |task| format!("/job:w/replica:0/task:{task}/device:CPU:0");
    let (from, to, name) = if asks { (0, 1, "ask") } else { (1, 0, "answer") };
    node.edge(&device(from), &device(to), name).expect("an edge")
}

/// Round trips of a small tensor between w/0 and w/1.
struct Exchange {
    node: Node,
    edges: (Edge, Edge),
    id: u64,
}

impl Exchange {
    /// Exchanges for `MEASURED`, and until `done`. Returns the median, and the number of exchanges.
    fn median(&mut self, done: impl Fn() -> bool) -> (Duration, usize) {
        let (begin, mut took) = (Instant::now(), Vec::new());
        while begin.elapsed() < MEASURED || !done() {
            let since = Instant::now();
            let step = self.node.step(self.id).expect("new");
            step.send(&self.edges.0, counting(&self.node, self.id as f32, 4)).expect("sent");
            let got = step.recv(&self.edges.1, crate::common::SOON).expect("answered").tensor;
            assert_eq!(values(&got)[3], self.id as f32 + 3.0);
            self.node.cleanup(self.id);
            self.id += 1;
            took.push(since.elapsed());
        }
        took.sort();
        (took[took.len() / 2], took.len())
    }
}

/// One flood at a time.
fn flooded(environment: &[(&str, &str)]) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Other::run_alone("floods::role_flooded", &cluster(3), environment);
}

/// The same over TCP alone, and over gRPC alone. The ports of links over TCP are those at which
/// somebody listens later on, and which the cluster does not have. Tensors over gRPC travel by the
/// bootstrap ports.
fn flooded_over(fabric: &str, user: &str) {
    flooded(&[("TEST_AUTH", "secret"), ("TEST_USER", user), ("TENSORWIRE_TEST_FABRIC", fabric)]);
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_flood_on_any_port_stops_no_link_and_keeps_no_member_out() {
    flooded(&[("TEST_AUTH", "secret"), ("TEST_USER", "")]);
    flooded_over("tcp", "");
    flooded_over("grpc", "");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_flood_by_another_user_stops_no_link_and_keeps_no_member_out() {
    let Some(user) = other_user() else { return };
    for auth in ["uid", "secret"] {
        flooded(&[("TEST_AUTH", auth), ("TEST_USER", &user.to_string())]);
    }
    flooded_over("tcp", &user.to_string());
    flooded_over("grpc", &user.to_string());
}

/// In a process of its own: the flood finds the sockets of its handshakes.
#[test]
#[ignore = "a role, not a test"]
fn role_flooded() {
    let (auth, user) = (variable("TEST_AUTH"), variable("TEST_USER").parse().ok());
    let guarded = Guarded::new(variable("TEST_CLUSTER"), &auth);
    let mut echo = guarded.other("role_echo", ("TEST_NOTHING", ""));
    let node = start(&guarded.cluster, 0, guarded.path());
    echo.wait_for("ready");
    until_linked(&node, 1);
    let edges = (edge(&node, true), edge(&node, false));
    let mut exchange = Exchange { node, edges, id: 0 };
    let (before, count) = exchange.median(|| true);
    println!("auth = {auth}, by user {user:?}. Before: p50 {before:?} of {count} round trips");
    let kinds: Vec<&str> = match std::env::var("TENSORWIRE_TEST_FABRIC").as_deref() {
        Ok("tcp") => vec![LINKS],
        Ok("grpc" | "verbs") => PORTS.into(),
        _ => {
            let proofs: &[&str] = if auth == "secret" { &[PROOFS, MIXED] } else { &[] };
            PORTS.into_iter().chain(proofs.iter().copied()).chain([RENDEZVOUS]).collect()
        }
    };
    for kind in kinds {
        let mut flood = guarded.flood(kind, user);
        flood.wait_for("flooding");
        let (during, count) = exchange.median(|| true);
        let started = Instant::now();
        let mut late = guarded.other("role_late", ("TEST_NOTHING", ""));
        let (joining, more, (joined, took)) = std::thread::scope(|scope| {
            let joined = scope.spawn(|| (late.wait_for("joined"), started.elapsed()));
            let (joining, more) = exchange.median(|| joined.is_finished());
            (joining, more, joined.join().expect("it joins"))
        });
        println!(
            "{kind}: p50 {during:?} of {count}, and {joining:?} of {more} while a member joins, before \
             {before:?}; the member {joined}, {took:?} after its start"
        );
        flood.say("stop");
        println!("{kind}: {}", flood.wait_for("flooded with"));
        let bounds = [(before * 2 + LONGER) * MARGIN, ROUND_TRIP.max(before * SLOWER)];
        assert!(during < bounds[0] && joining < bounds[1], "{kind}: {during:?}, {joining:?}, not {bounds:?}");
        assert!(took < JOINED, "{kind}: joined {took:?} after its start");
        late.kill();
    }
    echo.say("stop");
    assert!(echo.ends_well());
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [&len[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// What a connection of the flood says.
fn opening(kind: &str) -> Vec<u8> {
    let preface = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &frame(4, 0, 0, &[])].concat();
    match kind {
        "silent" => Vec::new(),
        "pings" => [preface, frame(6, 0, 0, b"tensors?").repeat(50)].concat(),
        "garbage" => (0..4096_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect(),
        "calls" => {
            let literal = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
            let headers = [
                vec![0x83, 0x86, 0x04], // POST, http, and the path
                literal("/tensorwire.v1.Bootstrap/Hello"),
                vec![0x01], // the authority
                literal("w"),
                vec![0x0f, 0x10], // the type of the content
                literal("application/grpc"),
            ];
            // An empty message.
            let hello = frame(0, 1, 1, &[0; 5]);
            [preface, frame(1, 4, 1, &headers.concat()), hello].concat()
        }
        other => panic!("{other}"),
    }
}

/// Connects with the ports of all members in turns, or with each port of a link, or with each
/// socket of a handshake: those of w/0, or all if it is another user.
#[test]
#[ignore = "a role, not a test"]
fn role_flood() {
    let (cluster, kind) = (variable("TEST_CLUSTER"), variable("TEST_KIND"));
    let orders = std::thread::spawn(wait_to_be_told);
    println!("flooding");
    let begin = Instant::now();
    let count = match kind.as_str() {
        RENDEZVOUS => flood_handshakes(|| orders.is_finished()),
        LINKS => flood_links(&variable("TEST_KNOWN"), || orders.is_finished()),
        PROOFS => flood_proofs(&cluster, || orders.is_finished()),
        MIXED => flood_mixed(&cluster, || orders.is_finished()),
        port => flood_ports(&cluster, &opening(port), PAUSE, || orders.is_finished()),
    };
    println!("flooded with {count} connections in {:?}", begin.elapsed());
    assert!(count > 0, "no flood");
}

fn flood_ports(cluster: &str, bytes: &[u8], pause: Duration, is_over: impl Fn() -> bool) -> usize {
    let addresses: Vec<&str> = cluster.trim_start_matches("w=").split(',').collect();
    let (mut open, mut count) = (VecDeque::new(), 0);
    for address in addresses.iter().cycle() {
        if is_over() {
            return count;
        }
        // Nobody may listen there yet, and the other side closes most of them.
        if let Ok(mut stream) = TcpStream::connect(address) {
            drop(stream.write_all(bytes));
            open.push_back(stream);
            count += 1;
        }
        if open.len() > OPEN {
            open.pop_front();
        }
        std::thread::sleep(pause);
    }
    unreachable!("there are addresses");
}

/// A stranger who knows the names of members and not their secret, without a pause. One thread of
/// it keeps a processor busy with the handshakes of its own side.
fn flood_proofs(cluster: &str, is_over: impl Fn() -> bool) -> usize {
    let mut secret = tempfile::NamedTempFile::new().expect("a file that no other user may read");
    secret.write_all(&b"fedcba9876543210".repeat(4)).expect("written");
    let name = |task| TaskId::new("w", task).expect("a job name");
    let settings = AuthSettings::Secret(secret.path().to_owned());
    let prover = Prover::open(&settings, &name(2)).expect("a secret");
    let members = cluster.trim_start_matches("w=").split(',').take(2).zip(0..).cycle();
    let mut failed = 0;
    for (address, task) in members.take_while(|_| !is_over()) {
        let Ok(stream) = TcpStream::connect(address) else { continue };
        prover.connect(stream, &name(task), JOINED).expect_err("a wrong secret");
        failed += 1;
    }
    failed
}

/// Half as many silent connections as a flood of these alone.
fn flood_mixed(cluster: &str, is_over: impl Fn() -> bool + Sync) -> usize {
    std::thread::scope(|scope| {
        let proofs: Vec<_> = (0..PARALLEL).map(|_| scope.spawn(|| flood_proofs(cluster, &is_over))).collect();
        let silent = flood_ports(cluster, &[], 2 * PAUSE, &is_over);
        silent + proofs.into_iter().map(|thread| thread.join().expect("it ends")).sum::<usize>()
    })
}

/// The ports on loopback at which somebody listens, as the kernel lists them.
fn listening() -> Vec<u16> {
    const LISTEN: &str = "0A";
    let table = std::fs::read_to_string("/proc/net/tcp").expect("procfs");
    let port = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, _, state) = (words.next()?, words.next()?, words.next()?);
        let port = local.strip_prefix("0100007F:").filter(|_| state == LISTEN)?;
        u16::from_str_radix(port, 16).ok()
    };
    table.lines().filter_map(port).collect()
}

/// Silent connections to every port but the known ones.
fn flood_links(known: &str, is_over: impl Fn() -> bool) -> usize {
    let known: HashSet<u16> = known.split(',').filter_map(|port| port.parse().ok()).collect();
    let (mut open, mut count) = (VecDeque::new(), 0);
    while !is_over() {
        let found: Vec<u16> = listening().into_iter().filter(|port| !known.contains(port)).collect();
        // A look at all connections takes the kernel's time.
        let looked = Instant::now();
        for port in found.iter().cycle().take_while(|_| looked.elapsed() < LOOK && !is_over()) {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", *port)) {
                open.push_back(stream);
                count += 1;
            }
            if open.len() > OPEN {
                open.pop_front();
            }
            std::thread::sleep(PAUSE);
        }
    }
    count
}

/// The sockets of this process's parent, as the kernel names them. `None` if another user is not
/// told.
fn sockets_of_parent() -> Option<HashSet<String>> {
    let parent = rustix::process::getppid().expect("it lives").as_raw_nonzero();
    let files = std::fs::read_dir(format!("/proc/{parent}/fd")).ok()?.filter_map(Result::ok);
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    let inode = |target: &str| Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned());
    Some(targets.filter_map(|target| inode(target.to_str()?)).collect())
}

fn connected(name: &SocketAddrUnix) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.expect("a descriptor");
    rustix::net::connect(&socket, name).is_ok().then_some(socket)
}

fn flood_handshakes(is_over: impl Fn() -> bool) -> usize {
    const PREFIX: &str = "tensorwire-shm-";
    let (mut open, mut count): (VecDeque<OwnedFd>, _) = (VecDeque::new(), 0);
    while !is_over() {
        let sockets = std::fs::read_to_string("/proc/net/unix").expect("procfs");
        let named = sockets.lines().filter_map(|line| {
            let (start, token) = line.split_once(&format!(" @{PREFIX}"))?;
            Some((start.rsplit(' ').next()?, token))
        });
        let parents = sockets_of_parent();
        let is_parents = |inode: &str| parents.as_ref().is_none_or(|sockets| sockets.contains(inode));
        for (_, token) in named.filter(|(inode, _)| is_parents(inode)) {
            let name = SocketAddrUnix::new_abstract_name(format!("{PREFIX}{token}").as_bytes());
            let name = name.expect("short");
            // Until the handshake is over, or no more connections may wait.
            while let Some(socket) = connected(&name).filter(|_| !is_over()) {
                open.push_back(socket);
                count += 1;
                if open.len() > OPEN {
                    open.pop_front();
                }
            }
        }
        std::thread::sleep(PAUSE);
    }
    count
}
