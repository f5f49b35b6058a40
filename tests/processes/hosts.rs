//! Clusters over several hosts or containers. Each is a network namespace, and a bridge connects
//! them. Only root may make them.
//!
//! Members of one host share memory, and so do containers with one /dev/shm. Others reach each
//! other over RDMA devices, or else over TCP.

mod load;
mod network;

use crate::common::other::Other;
use crate::common::{SOON, counting, member, values};
use load::Load;
use network::Network;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tensorwire::{Error, FabricKind, LossCause, Node, PeerReport, Pending, Tensor, UntakenEdge};

/// Members of each host.
const PER_HOST: u32 = 2;
/// The silence bound of clusters over TCP.
const SILENCE: Duration = Duration::from_secs(3);
/// The time in which a host that can be reached again is linked: a few attempts of calls.
const RETURN: Duration = Duration::from_secs(2);
/// The silence bound where processes stand still now and then: over soft-RoCE, which is emulated,
/// and on full CPUs.
const LONG_SILENCE: Duration = Duration::from_secs(15);
/// How long a call may take to end once the peer that it needs is lost.
const AT_ONCE: Duration = Duration::from_secs(1);
/// How long a join waits for the members that lack.
const JOIN: Duration = Duration::from_secs(5);
const ROLE: &str = "hosts::role_member";

fn host_of(task: u32) -> u32 {
    task / PER_HOST
}

fn members_of(host: u32) -> std::ops::Range<u32> {
    host * PER_HOST..(host + 1) * PER_HOST
}

/// The members of a cluster over the hosts of a network.
struct Members {
    all: Vec<Other>,
    _secret: tempfile::NamedTempFile,
}

impl Members {
    /// Starts all of them, and waits until they have joined.
    fn joined(network: &Network) -> Members {
        Members::joined_with(network, &[], SILENCE)
    }

    /// As [`Members::joined`], with an RDMA device for each host, if any, and a silence bound.
    fn joined_with(network: &Network, devices: &[&str], silence: Duration) -> Members {
        Members::joined_in(network, devices, silence, &[])
    }

    /// As [`Members::joined_with`], with more variables.
    fn joined_in(
        network: &Network,
        devices: &[&str],
        silence: Duration,
        variables: &[(&str, &str)],
    ) -> Members {
        let count = network.hosts() * PER_HOST;
        let address = |task: u32| format!("{}:{}", Network::address(host_of(task)), 4000 + task);
        let cluster = format!("w={}", (0..count).map(address).collect::<Vec<_>>().join(","));
        // Only its owner may read a temporary file.
        let mut secret = tempfile::NamedTempFile::new().expect("a file");
        write!(secret, "{:032x}{:032x}", std::process::id(), 7).expect("written");
        let path = secret.path().to_str().expect("text").to_owned();
        let start = |task: u32| {
            let starter = network.starter(host_of(task));
            let device = devices.get(host_of(task) as usize).copied().unwrap_or_default();
            let environment = [
                ("TEST_ME", &*task.to_string()),
                ("TEST_SECRET", &*path),
                ("TEST_DEVICE", device),
                ("TEST_SILENCE", &*format!("{}s", silence.as_secs())),
            ];
            let environment = [&environment, variables].concat();
            let starter: Vec<&str> = starter.iter().map(String::as_str).collect();
            Other::start_by(&starter, ROLE, &cluster, &environment)
        };
        let mut members = Members { all: (0..count).map(start).collect(), _secret: secret };
        members.all.iter_mut().for_each(|other| drop(other.wait_for("joined")));
        members
    }

    /// Has these members do something, all at once. Returns what each has said.
    fn all_do(&mut self, who: impl Fn(u32) -> bool, what: &str) -> Vec<String> {
        self.each_does(|task| who(task).then(|| what.to_owned()))
    }

    /// Has each member do what is its own, all at once. Returns what each has said.
    fn each_does(&mut self, what: impl Fn(u32) -> Option<String>) -> Vec<String> {
        let tasks = (0..self.all.len() as u32).filter_map(|task| Some((task as usize, what(task)?)));
        let tasks: Vec<(usize, String)> = tasks.collect();
        tasks.iter().for_each(|(task, what)| self.all[*task].say(what));
        tasks.iter().map(|(task, what)| self.all[*task].wait_for(&format!("done {what}"))).collect()
    }

    /// Ends the load of all members. Returns the bytes that the slow host has received.
    fn ends_load(&mut self) -> u64 {
        self.all.iter_mut().for_each(|other| other.say("unload"));
        let received = self.all.iter_mut().map(|other| {
            let line = other.wait_for("received ");
            other.wait_for("done unload");
            line.rsplit(' ').next().expect("a word").parse::<u64>().expect("a number")
        });
        received.sum()
    }

    fn stop(mut self) {
        self.all.iter_mut().for_each(|other| other.say("stop"));
        assert!(self.all.iter_mut().all(Other::ends_well), "a member has failed");
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_member() {
    let variable = |name| std::env::var(name).expect("started by a test");
    let task: u32 = variable("TEST_ME").parse().expect("a number");
    let device = variable("TEST_DEVICE");
    let between = if device.is_empty() { FabricKind::Tcp } else { FabricKind::Verbs };
    let mut builder = member(&variable("TEST_CLUSTER"), task)
        .set("fabric", "auto")
        .set("secret_file", variable("TEST_SECRET"))
        .set("join_timeout", format!("{}s", JOIN.as_secs()))
        .set("silence_bound", variable("TEST_SILENCE"));
    if between == FabricKind::Verbs {
        builder = builder.set("rdma_device", device);
    }
    let node = builder.start().expect("the node starts");
    join_again(&node);
    println!("joined");
    let node = Arc::new(node);
    let (mut load, mut across) = (None, Vec::new());
    for line in std::io::stdin().lines() {
        let line = line.expect("the test is there");
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().expect("a number")).collect();
        let began = Instant::now();
        match (words[0], &*numbers) {
            ("paths", []) => assert_paths(&node, task, between),
            ("share", []) => assert_memory_is_shared(&node),
            ("died", [peer]) => wait_for_death(&node, *peer as u32),
            ("exchange", [first, steps, floats]) => {
                let peers = (0..node.peers().len() as u32 + 1).filter(|peer| *peer != task).collect();
                exchange(&node, peers, *first, *steps, *floats as usize);
            }
            ("exchange_on_host", [first, steps, floats]) => {
                let peer = host_of(task) * PER_HOST + 1 - task % PER_HOST;
                exchange(&node, vec![peer], *first, *steps, *floats as usize);
            }
            ("exchange_with_host", [host, first, steps, floats]) => {
                let peers = members_of(*host as u32).collect();
                exchange(&node, peers, *first, *steps, *floats as usize);
            }
            ("load", [host]) => load = Some(Load::begin(&node, *host as u32)),
            ("loaded", []) => load.as_ref().expect("begun").wait_for_a_round(),
            ("unload", []) => println!("{}", load.take().expect("begun").end()),
            ("begin_across", [host]) => across = begin_across(&node, task, *host as u32),
            ("lose", [host]) => lose(&node, task, *host as u32, std::mem::take(&mut across)),
            ("refused", [host]) => wait_for_losses(&node, task, *host as u32),
            ("lack", [host]) => lack(&node, task, *host as u32),
            ("rejoin", []) => join_again(&node),
            ("take", [peer, count, floats]) => take(&node, *peer as u32, *count, *floats as usize),
            ("send_and_stop", [peer, count, floats]) => {
                send_all(&node, *peer as u32, *count, *floats as usize);
                let dropped = node.stop().expect("it stops");
                assert_eq!(dropped.waiting(), 0, "{dropped}");
            }
            ("stop", []) => return drop(node.stop().expect("it stops")),
            _ => panic!("what is {line:?}?"),
        }
        println!("done {line} in {:?}", began.elapsed());
    }
}

/// Joins until all are there. A join ends early where members lack.
fn join_again(node: &Node) {
    let began = Instant::now();
    while let Err(error) = node.join() {
        assert!(began.elapsed() < 2 * SOON, "{error}");
    }
}

/// Shared memory within a host and this fabric between two, each with its reasons.
fn assert_paths(node: &Node, task: u32, between: FabricKind) {
    for peer in node.peers() {
        let same = host_of(peer.task.task()) == host_of(task);
        println!("{} by {:?}: {}", peer.task, peer.fabric, peer.why);
        match same {
            true => {
                assert_eq!(peer.fabric, Some(FabricKind::Shm), "{peer:?}");
                assert_eq!(&*peer.why, "same host: shared memory");
            }
            false => {
                assert_eq!(peer.fabric, Some(between), "{peer:?}");
                let parts: &[_] = match between {
                    FabricKind::Verbs => {
                        &["both have an RDMA device; not shm: w/", "another network namespace"]
                    }
                    _ => &["TCP connections; not shm: w/", "another network namespace", "; not verbs: w/"],
                };
                for part in parts {
                    assert!(peer.why.contains(part), "{part}: {peer:?}");
                }
            }
        }
    }
}

fn assert_memory_is_shared(node: &Node) {
    for peer in node.peers() {
        assert_eq!(peer.fabric, Some(FabricKind::Shm), "{peer:?}");
    }
}

/// Waits until this peer is lost, as its process has ended.
fn wait_for_death(node: &Node, of: u32) {
    let began = Instant::now();
    let error = || node.peers().into_iter().find(|peer| peer.task.task() == of)?.state.error().cloned();
    let error = loop {
        match error() {
            Some(error) => break error,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(began.elapsed() < AT_ONCE, "w/{of} lives");
    };
    assert!(matches!(&error, Error::PeerLost { cause: LossCause::Died(_), .. }), "{error}");
}

/// A tensor to and from each of these peers in each step.
fn exchange(node: &Node, peers: Vec<u32>, first: u64, steps: u64, floats: usize) {
    for id in first..first + steps {
        let step = node.step(id).expect("new");
        let me = node.task().task();
        for peer in &peers {
            let edge = node.edge_to("w", *peer, "x").expect("an edge");
            step.send(&edge, counting(node, (id + u64::from(me)) as f32, floats)).expect("sent");
        }
        for peer in &peers {
            let edge = node.edge_from("w", *peer, "x").expect("an edge");
            let got = step.recv(&edge, SOON).expect("received");
            let wanted = (id + u64::from(*peer)) as f32;
            let is_right = values(&got.tensor).iter().zip(0..).all(|(is, at)| *is == wanted + at as f32);
            assert!(is_right && values(&got.tensor).len() == floats, "step {id} from w/{peer}");
        }
        // Every peer of the exchange has begun this step, so it has all tensors of the one before.
        (id > first).then(|| node.cleanup(id - 1));
    }
}

/// The step of [`send_all`].
const LAST: u64 = 1 << 42;

/// Sends tensors that travel in their messages.
fn send_all(node: &Node, peer: u32, count: u64, floats: usize) {
    let (step, edge) = (node.step(LAST).expect("new"), node.edge_to("w", peer, "x").expect("an edge"));
    (0..count).for_each(|at| step.send(&edge, counting(node, at as f32, floats)).expect("sent"));
}

/// Receives what a member has sent before it stopped.
fn take(node: &Node, peer: u32, count: u64, floats: usize) {
    let (step, edge) = (node.step(LAST).expect("new"), node.edge_from("w", peer, "x").expect("an edge"));
    for at in 0..count {
        let got = step.recv(&edge, SOON).unwrap_or_else(|error| panic!("{at} of {count}: {error}")).tensor;
        assert_eq!((values(&got)[0], values(&got).len()), (at as f32, floats));
    }
}

/// Whether one of the two is on this host, and the other is not.
fn is_between(task: u32, other: u32, host: u32) -> bool {
    (host_of(other) == host) != (host_of(task) == host)
}

fn peers_across(node: &Node, task: u32, host: u32) -> Vec<u32> {
    let all = 0..node.peers().len() as u32 + 1;
    all.filter(|peer| *peer != task && is_between(task, *peer, host)).collect()
}

/// The steps of [`begin_across`].
const ACROSS: u64 = 1 << 41;

/// Begins a tensor to and from each member that is on the other side of what goes to this host.
fn begin_across(node: &Node, task: u32, host: u32) -> Vec<(u32, Pending<Tensor>)> {
    let step = node.step(ACROSS + u64::from(host)).expect("new");
    let peers = peers_across(node, task, host);
    let begin = |peer: &u32| {
        let edge = node.edge_from("w", *peer, "bulk").expect("an edge");
        (*peer, step.receive(&edge).begin().expect("it begins"))
    };
    let pending = peers.iter().map(begin).collect();
    for peer in &peers {
        let edge = node.edge_to("w", *peer, "bulk").expect("an edge");
        step.send(&edge, counting(node, 0.0, 100_000)).expect("sent");
    }
    pending
}

/// A call that needs a member that is cut off ends with its loss, and so do the receives `across`.
/// The others stay connected.
fn lose(node: &Node, task: u32, cut: u32, across: Vec<(u32, Pending<Tensor>)>) {
    let step = node.step(1 << 40 | u64::from(cut)).expect("new");
    let lost = peers_across(node, task, cut);
    // Nobody asks for these values, so they wait here. A peer may be lost already.
    let send = |peer: u32| {
        step.send(&node.edge_to("w", peer, "untaken").expect("an edge"), counting(node, 0.0, 10_000))
    };
    let waiting: Vec<u32> = lost.iter().copied().filter(|peer| send(*peer).is_ok()).collect();
    let begin = |peer: u32| step.receive(&node.edge_from("w", peer, "never").expect("an edge")).begin();
    let pending: Vec<_> = lost.iter().map(|peer| (*peer, begin(*peer))).collect();
    for (peer, pending) in across {
        assert_is_loss(&pending.wait().expect_err("most of it is to come"), peer);
    }
    // What it has sent across and nobody has asked for goes.
    node.cleanup(ACROSS + u64::from(cut));
    for (peer, pending) in pending {
        // It may be lost already when the call begins.
        let error = pending.and_then(|pending| pending.wait().map(drop)).expect_err("it is cut off");
        println!("{error}");
        assert_is_loss(&error, peer);
    }
    for peer in node.peers() {
        let is_lost = is_between(task, peer.task.task(), cut);
        assert_eq!(peer.state.error().is_some(), is_lost, "{peer:?}");
    }
    for peer in &lost {
        let began = Instant::now();
        let edge = node.edge_to("w", *peer, "never").expect("an edge");
        assert_is_loss(&step.send(&edge, counting(node, 0.0, 9)).expect_err("it is cut off"), *peer);
        let late = step.receive(&node.edge_from("w", *peer, "late").expect("an edge")).begin();
        let late = late.and_then(|late| late.wait().map(drop));
        assert_is_loss(&late.expect_err("it is cut off"), *peer);
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    }
    assert_flush_names_their_values(node, &waiting);
    step.cleanup();
}

/// Waits until the members across are lost, and no others.
fn wait_for_losses(node: &Node, task: u32, host: u32) {
    let (began, is_lost) = (Instant::now(), |peer: &PeerReport| peer.state.error().is_some());
    while !node.peers().iter().all(|peer| is_lost(peer) == is_between(task, peer.task.task(), host)) {
        assert!(began.elapsed() < 5 * SILENCE, "{:?}", node.peers());
        std::thread::sleep(Duration::from_millis(10));
    }
    for peer in node.peers().iter().filter(|peer| is_lost(peer)) {
        println!("{}: {}", peer.task, peer.state.error().expect("lost"));
    }
}

/// The peer is lost, as nothing was heard from it.
fn assert_is_loss(error: &Error, of: u32) {
    let Error::PeerLost { peer, cause, .. } = error else { panic!("{error}") };
    assert_eq!(peer.task(), of);
    assert!(matches!(cause, LossCause::Silent { .. }), "no FIN came: {error}");
}

/// A flush ends when only values for lost peers are left, and names them.
fn assert_flush_names_their_values(node: &Node, of: &[u32]) {
    let began = Instant::now();
    let untaken = node.flush(SOON).expect("the node goes on");
    println!("a flush took {:?}: {untaken}", began.elapsed());
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    let waits = |edge: &UntakenEdge| (edge.peer().task(), edge.waiting, edge.is_linked);
    let named: Vec<_> = untaken.edges.iter().map(waits).collect();
    assert_eq!(named, of.iter().map(|peer| (*peer, 1, false)).collect::<Vec<_>>());
}

/// A join waits its time for members that are cut off, and then names each of them.
fn lack(node: &Node, task: u32, cut: u32) {
    let began = Instant::now();
    let error = node.join().expect_err("they are cut off").to_string();
    println!("a join took {:?}: {error}", began.elapsed());
    assert!(began.elapsed() < 5 * JOIN, "{:?}", began.elapsed());
    for peer in (0..node.peers().len() as u32 + 1).filter(|peer| *peer != task) {
        let is_lacking = is_between(task, peer, cut);
        assert_eq!(error.contains(&format!("w/{peer}")), is_lacking, "{error}");
    }
}

#[test]
fn members_of_four_hosts_share_memory_or_use_tcp() {
    let Some(network) = Network::of(4) else { return };
    // Eight members share the CPUs with other tests.
    let mut members = Members::joined_with(&network, &[], LONG_SILENCE);
    members.all_do(|_| true, "paths");
    for line in members.all_do(|_| true, "exchange 0 20 1000") {
        println!("{line}");
    }
    members.all_do(|_| true, "exchange 100 3 50000");
    members.stop();
}

#[test]
fn containers_with_namespaces_of_their_own_share_memory_where_they_share_files() {
    let Some(network) = Network::of_containers(2) else { return };
    let mut members = Members::joined_with(&network, &[], LONG_SILENCE);
    members.all_do(|_| true, "share");
    members.all_do(|_| true, "exchange 0 20 1000");
    assert_eq!(network.files(1), "", "nothing is left in /dev/shm");
    // A kill ends it, and its peers see the death.
    members.all.pop().expect("the last of the second container").kill();
    for line in members.all_do(|_| true, "died 3") {
        println!("{line}");
    }
    members.stop();
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_host_that_is_cut_off_is_lost_within_the_bound_and_comes_back() {
    let Some(network) = Network::of(4) else { return };
    let mut members = Members::joined(&network);
    members.all_do(|_| true, "exchange 0 5 10000");
    for (round, cut, length) in [(1, 3, Duration::ZERO), (2, 0, Duration::from_secs(40))] {
        // Tensors are on their way when the packets stop: one alone takes 0.6 s at this rate.
        let slow = network.slow_down(cut, "5mbit");
        match &slow {
            Ok(()) => {
                members.all_do(|_| true, &format!("begin_across {cut}"));
            }
            Err(why) => println!("no tensor is on its way at the cut: no token bucket filter here: {why}"),
        }
        if let Err(why) = network.cut(cut) {
            println!("skipped: no host can be cut off here, which takes nft(8): {why}");
            return members.stop();
        }
        let began = Instant::now();
        members.all_do(|_| true, &format!("lose {cut}"));
        println!("host {cut} was lost after {:?}", began.elapsed());
        assert!(began.elapsed() < 5 * SILENCE, "{:?}", began.elapsed());
        for line in members.all_do(|_| true, &format!("lack {cut}")) {
            println!("{line}");
        }
        // The members of a host go on, cut off or not.
        members.all_do(|_| true, &format!("exchange_on_host {} 20 10000", 1000 * round));
        // Longer than the kernel of a member waits before it sends again.
        std::thread::sleep(length.saturating_sub(began.elapsed()));
        network.heal(cut);
        let healed = Instant::now();
        slow.into_iter().for_each(|()| network.speed_up(cut));
        members.all_do(|_| true, "rejoin");
        println!("all are there again {:?} after {:?} without host {cut}", healed.elapsed(), healed - began);
        assert!(healed.elapsed() < 5 * RETURN, "{:?}", healed.elapsed());
        members.all_do(|_| true, "paths");
        members.all_do(|_| true, &format!("exchange {} 5 10000", 1000 * round + 500));
    }
    members.stop();
}

#[test]
fn what_was_sent_before_a_stop_arrives_over_a_slow_link() {
    let Some(network) = Network::of(2) else { return };
    let mut members = Members::joined_in(&network, &[], SILENCE, &[("TENSORWIRE_TEST_STOP", "10s")]);
    members.all_do(|_| true, "exchange 0 20 1000");
    if let Err(why) = network.slow_down_links(0, "1mbit") {
        println!("skipped: no link can be slowed down here, which takes tc(8) and nft(8): {why}");
        return members.stop();
    }
    // They leave at once, within the window of the edge, and take 0.4 s. A goodbye is faster.
    let [from, to] = [0, PER_HOST];
    let said = members.each_does(|task| match task {
        _ if task == from => Some(format!("send_and_stop {to} 4 6000")),
        _ if task == to => Some(format!("take {from} 4 6000")),
        _ => None,
    });
    said.iter().for_each(|line| println!("{line}"));
    members.stop();
}

/// The one side sees resets and refusals, and the other silence. All processes live.
#[test]
#[ignore = "takes long: tests/nightly"]
fn a_host_whose_firewall_refuses_connections_for_a_time_comes_back() {
    let Some(network) = Network::of(2) else { return };
    let mut members = Members::joined(&network);
    members.all_do(|_| true, "exchange 0 5 10000");
    if let Err(why) = network.refuse(1) {
        println!("skipped: no firewall can refuse here, which takes nft(8): {why}");
        return members.stop();
    }
    let began = Instant::now();
    members.all_do(|_| true, "refused 1");
    println!("each side has lost the other after {:?}", began.elapsed());
    members.all_do(|_| true, "exchange_on_host 1000 20 10000");
    network.accept(1);
    members.all_do(|_| true, "rejoin");
    println!("all are there again after {:?}", began.elapsed());
    members.all_do(|_| true, "paths");
    members.all_do(|_| true, "exchange 2000 5 10000");
    members.stop();
}

/// An exchange of this length is not slow, whatever one without load takes. At the rate of the slow
/// host it would take five times as long.
const FLOOR: Duration = Duration::from_millis(1000);
/// What [`SLOW`] is in bits a second.
const SLOW_BITS: f64 = 50e6;
const SLOW: &str = "50mbit";
/// The host that is slow.
const SLOW_HOST: u32 = 2;

/// The shortest time of a few exchanges between the two hosts that are not slow, over TCP.
fn fast_exchange(members: &mut Members, first: u64) -> Duration {
    let times = (0..3).map(|round| {
        let began = Instant::now();
        let first = first + 100 * round;
        // Each of the two has the members of the other as peers.
        let what = |host: u32| format!("exchange_with_host {} {first} 20 100000", 1 - host);
        members.each_does(|task| (host_of(task) != SLOW_HOST).then(|| what(host_of(task))));
        began.elapsed()
    });
    times.min().expect("some rounds")
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_slow_host_slows_its_own_exchange_alone() {
    let Some(network) = Network::of(SLOW_HOST + 1) else { return };
    let mut members = Members::joined(&network);
    if let Err(why) = network.slow_down(SLOW_HOST, SLOW) {
        println!("skipped: no token bucket filter here: {why}");
        return members.stop();
    }
    let unloaded = fast_exchange(&mut members, 0);
    let began = Instant::now();
    let load = format!("load {SLOW_HOST}");
    members.all_do(|_| true, &load);
    // The load is on while the others exchange: it has begun, and ends when it is told.
    members.all_do(|task| host_of(task) != SLOW_HOST, "loaded");
    let loaded = fast_exchange(&mut members, 1000);
    let bytes = members.ends_load();
    let took = began.elapsed();
    let rate = bytes as f64 * 8.0 / took.as_secs_f64();
    println!("the slow host received {:.0} Mbit/s for {took:?}", rate / 1e6);
    println!("an exchange of the others took {unloaded:?}, and {loaded:?} beside it");
    assert!(rate < 1.5 * SLOW_BITS, "it is not slow");
    assert!(loaded < (5 * unloaded).max(FLOOR), "the slow host slows others");
    members.all_do(|_| true, "paths");
    members.stop();
}

#[test]
#[ignore = "needs two RDMA devices: tests/rxe"]
fn members_of_two_hosts_share_memory_or_use_their_devices() {
    let devices = std::env::var("TENSORWIRE_TEST_DEVICES").expect("two devices");
    let devices: Vec<&str> = devices.split(',').collect();
    let network = Network::of(devices.len() as u32).expect("namespaces and a bridge");
    let mut members = Members::joined_with(&network, &devices, LONG_SILENCE);
    members.all_do(|_| true, "paths");
    for line in members.all_do(|_| true, "exchange 0 20 1000") {
        println!("{line}");
    }
    members.all_do(|_| true, "exchange 100 3 50000");
    for line in members.all_do(|_| true, "exchange_on_host 1000 20 1000") {
        println!("{line}");
    }
    members.stop();
}
