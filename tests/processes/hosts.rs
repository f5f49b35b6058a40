//! Clusters over several hosts. A host is a network namespace, and a bridge connects them. Only
//! root may make them.
//!
//! Members of one host share memory. Others reach each other over RDMA devices, or else over TCP.

mod network;

use crate::common::other::Other;
use crate::common::{SOON, counting, member, values};
use network::Network;
use std::io::Write;
use std::time::{Duration, Instant};
use tensorwire::{Error, FabricKind, LossCause, Node};

/// Members of each host.
const PER_HOST: u32 = 2;
/// The silence bound of clusters over TCP.
const SILENCE: Duration = Duration::from_secs(3);
/// The silence bound of clusters over soft-RoCE, whose emulated processes stand still now and then.
const LONG_SILENCE: Duration = Duration::from_secs(15);
const ROLE: &str = "hosts::role_member";

fn host_of(task: u32) -> u32 {
    task / PER_HOST
}

/// The members of a cluster over the hosts of a network.
struct Members {
    all: Vec<Other>,
    _secret: tempfile::NamedTempFile,
}

impl Members {
    /// Starts all of them, and waits until they have joined.
    fn joined(network: &Network) -> Members {
        Members::joined_with(network, &[])
    }

    /// As [`Members::joined`], with an RDMA device for each host.
    fn joined_with(network: &Network, devices: &[&str]) -> Members {
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
            let environment =
                [("TEST_ME", &*task.to_string()), ("TEST_SECRET", &*path), ("TEST_DEVICE", device)];
            Other::start_by(&starter.each_ref().map(String::as_str), ROLE, &cluster, &environment)
        };
        let mut members = Members { all: (0..count).map(start).collect(), _secret: secret };
        members.all.iter_mut().for_each(|other| drop(other.wait_for("joined")));
        members
    }

    /// Has these members do something, all at once. Returns what each has said.
    fn all_do(&mut self, who: impl Fn(u32) -> bool, what: &str) -> Vec<String> {
        let count = self.all.len() as u32;
        let who: Vec<u32> = (0..count).filter(|task| who(*task)).collect();
        who.iter().for_each(|task| self.all[*task as usize].say(what));
        let done = format!("done {what}");
        who.iter().map(|task| self.all[*task as usize].wait_for(&done)).collect()
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
    let (between, silence) = match &*device {
        "" => (FabricKind::Tcp, SILENCE),
        _ => (FabricKind::Verbs, LONG_SILENCE),
    };
    let mut builder = member(&variable("TEST_CLUSTER"), task)
        .set("fabric", "auto")
        .set("secret_file", variable("TEST_SECRET"))
        .set("silence_bound", format!("{}s", silence.as_secs()));
    if between == FabricKind::Verbs {
        builder = builder.set("rdma_device", device);
    }
    let node = builder.start().expect("the node starts");
    node.join().expect("the others come");
    println!("joined");
    for line in std::io::stdin().lines() {
        let line = line.expect("the test is there");
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().expect("a number")).collect();
        let began = Instant::now();
        match (words[0], &*numbers) {
            ("paths", []) => assert_paths(&node, task, between),
            ("exchange", [first, steps, floats]) => {
                let peers = (0..node.peers().len() as u32 + 1).filter(|peer| *peer != task).collect();
                exchange(&node, peers, *first, *steps, *floats as usize);
            }
            ("exchange_on_host", [first, steps, floats]) => {
                let peer = host_of(task) * PER_HOST + 1 - task % PER_HOST;
                exchange(&node, vec![peer], *first, *steps, *floats as usize);
            }
            ("lose", [host]) => lose(&node, task, *host as u32),
            ("rejoin", []) => {
                while let Err(error) = node.join() {
                    assert!(began.elapsed() < 2 * SOON, "{error}");
                }
            }
            ("stop", []) => return drop(node.stop().expect("it stops")),
            _ => panic!("what is {line:?}?"),
        }
        println!("done {line} in {:?}", began.elapsed());
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

/// A call that needs a member that is cut off ends with its loss; the others stay connected.
fn lose(node: &Node, task: u32, cut: u32) {
    let is_cut = |other: u32| (host_of(other) == cut) != (host_of(task) == cut);
    let all = || (0..node.peers().len() as u32 + 1).filter(|peer| *peer != task);
    let step = node.step(1 << 40 | u64::from(cut)).expect("new");
    let begin = |peer: u32| step.receive(&node.edge_from("w", peer, "never").expect("an edge")).begin();
    let pending: Vec<_> = all().filter(|peer| is_cut(*peer)).map(|peer| (peer, begin(peer))).collect();
    for (peer, pending) in pending {
        // It may be lost already when the call begins.
        let error = pending.and_then(|pending| pending.wait().map(drop)).expect_err("it is cut off");
        let Error::PeerLost { peer: lost, cause, .. } = &error else { panic!("{error}") };
        println!("{error}");
        assert_eq!(lost.task(), peer);
        let is_cause =
            matches!(cause, LossCause::Silent { .. } | LossCause::Network(_) | LossCause::Closed(_));
        assert!(is_cause, "it lives: {error}");
    }
    for peer in node.peers() {
        assert_eq!(peer.state.error().is_some(), is_cut(peer.task.task()), "{peer:?}");
    }
}

#[test]
fn members_of_four_hosts_share_memory_or_use_tcp() {
    let Some(network) = Network::of(4) else { return };
    let mut members = Members::joined(&network);
    members.all_do(|_| true, "paths");
    for line in members.all_do(|_| true, "exchange 0 20 1000") {
        println!("{line}");
    }
    members.all_do(|_| true, "exchange 100 3 50000");
    members.stop();
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_host_that_is_cut_off_is_lost_within_the_bound_and_comes_back() {
    let Some(network) = Network::of(4) else { return };
    let mut members = Members::joined(&network);
    members.all_do(|_| true, "exchange 0 5 5000");
    for (round, cut) in [(1, 3), (2, 0)] {
        network.cut(cut);
        let began = Instant::now();
        members.all_do(|_| true, &format!("lose {cut}"));
        println!("host {cut} was lost after {:?}", began.elapsed());
        assert!(began.elapsed() < 5 * SILENCE, "{:?}", began.elapsed());
        // The members of a host go on, cut off or not.
        members.all_do(|_| true, &format!("exchange_on_host {} 20 5000", 1000 * round));
        network.heal(cut);
        members.all_do(|_| true, "rejoin");
        println!("all are there again {:?} after the cut", began.elapsed());
        members.all_do(|_| true, "paths");
        members.all_do(|_| true, &format!("exchange {} 5 5000", 1000 * round + 500));
    }
    members.stop();
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_slow_host_slows_its_own_exchange_alone() {
    let Some(network) = Network::of(3) else { return };
    let mut members = Members::joined(&network);
    if let Err(why) = network.slow_down(2, "100mbit") {
        println!("skipped: no token bucket filter here: {why}");
        return members.stop();
    }
    let bytes = 3 * 4 * 100_000 * 4;
    let began = Instant::now();
    members.all_do(|_| true, "exchange 0 3 100000");
    let took = began.elapsed();
    println!("three steps with a host of 100 Mbit/s: {took:?}");
    // Four members send to each of two.
    assert!(took >= Duration::from_millis(bytes * 8 / 100_000), "it is not slow: {took:?}");
    for line in members.all_do(|task| host_of(task) < 2, "exchange_on_host 1000 20 100000") {
        println!("{line}");
    }
    members.all_do(|_| true, "paths");
    members.stop();
}

#[test]
#[ignore = "needs two RDMA devices: tests/rxe"]
fn members_of_two_hosts_share_memory_or_use_their_devices() {
    let devices = std::env::var("TENSORWIRE_TEST_DEVICES").expect("two devices");
    let devices: Vec<&str> = devices.split(',').collect();
    let network = Network::of(devices.len() as u32).expect("namespaces and a bridge");
    let mut members = Members::joined_with(&network, &devices);
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
