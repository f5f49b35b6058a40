//! Tensors by gRPC calls: values of every kind, errors, connections that break, and peers that die
//! and come back.

use crate::common::other::{Other, holdings_after_joins, wait_to_be_told};
use crate::common::{SOON, cluster, member, until};
use rustix::net::{Shutdown, getpeername, shutdown};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::net::SocketAddr;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use tensorwire::{Code, DType, Delivery, Error, FabricKind, Node, PeerState, Status, Tensor};

const GRPC: (&str, &str) = ("TENSORWIRE_TEST_FABRIC", "grpc");
/// Bytes of a tensor that takes many parts.
const LARGE: u64 = 64 << 20;

fn start(cluster: &str, task: u32) -> Node {
    let node = member(cluster, task).set("fabric", "grpc").set("pool_size", "256MiB");
    node.set("silence_bound", "1s").set("heartbeat_interval", "100ms").start().expect("the node starts")
}

fn join(node: &Node) {
    let began = Instant::now();
    while let Err(error) = node.join() {
        assert!(began.elapsed() < SOON, "{error}");
    }
}

#[test]
fn a_peer_that_returns_many_times_is_a_new_life_each_time() {
    Other::run_alone("returns::role_survivor", &cluster(2), &[GRPC]);
}

#[test]
fn after_a_stop_nothing_is_left() {
    let cluster = cluster(2);
    let mut other = Other::start_with("lifecycle::role_tidy", &cluster, &[GRPC]);
    let node = start(&cluster, 0);
    join(&node);
    let step = node.step(0).expect("new");
    step.send_dead(&node.edge_to("w", 1, "x").expect("an edge")).expect("sent");
    step.recv(&node.edge_from("w", 1, "x").expect("an edge"), SOON).expect("received");
    other.wait_for("nothing is left");
    assert!(other.ends_well());
}

#[test]
#[ignore = "a role, not a test"]
fn role_can_not_start() {
    let node = member(&std::env::var("TEST_CLUSTER").expect("started by a test"), 0).set("fabric", "grpc");
    // Not a secret. The bootstrap service refuses it after the thread of the deadlines has started.
    let error = node.set("auth", "secret").set("secret_file", "/dev/null").start().map(drop);
    assert!(error.expect_err("no secret").to_string().contains("/dev/null"));
    assert_eq!(holdings_after_joins(), Default::default(), "something of the node is left");
}

#[test]
fn a_start_that_fails_leaves_no_thread() {
    Other::run_alone("calls::role_can_not_start", &cluster(2), &[GRPC]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_large_sender() {
    let node = start(&std::env::var("TEST_CLUSTER").expect("started by a test"), 1);
    join(&node);
    let orders = std::thread::spawn(wait_to_be_told);
    let edge = node.edge_to("w", 0, "x").expect("an edge");
    let step = node.step(1).expect("new");
    println!("sends");
    while !orders.is_finished() {
        // A full pool, or the end of the other side, is no failure.
        match node.tensor_within(DType::U8, &[LARGE], Duration::from_millis(10)) {
            Ok(tensor) => drop(step.send(&edge, tensor.freeze())),
            Err(error) => drop(error),
        }
    }
    node.stop().expect("stopped");
}

#[test]
fn a_sender_that_dies_in_the_middle_of_a_tensor_ends_its_receive_and_the_next_life_goes_on() {
    let cluster = cluster(2);
    let mut sender = Other::start("calls::role_large_sender", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    sender.wait_for("sends");
    assert_eq!(node.peers()[0].fabric, Some(FabricKind::Grpc));
    assert_eq!(&*node.peers()[0].why, "fabric = grpc");
    let edge = node.edge_from("w", 1, "x").expect("an edge");
    let step = node.step(1).expect("new");
    step.recv(&edge, SOON).expect("a whole tensor");
    let killed = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        sender.kill();
    });
    let began = Instant::now();
    let error = loop {
        assert!(began.elapsed() < SOON, "it died and nobody noticed");
        if let Err(error) = step.recv(&edge, SOON) {
            break error;
        }
    };
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    println!("known after {:?}: {error}", began.elapsed());
    killed.join().expect("no panic");
    let mut sender = Other::start("calls::role_large_sender", &cluster);
    join(&node);
    step.recv(&edge, SOON).expect("a tensor of the next life");
    sender.say("stop");
    assert!(sender.ends_well());
    until(&node, "nothing is left of it", || node.pool().is_empty());
}

/// The answers that wait for room must not keep the others from coming.
#[test]
fn tensors_with_more_bytes_than_the_pool_come_one_after_the_other() {
    // More than HTTP/2 connections bear by default, of answers that are given up.
    const TENSORS: usize = 300;
    const BYTES: u64 = 1 << 20;
    let cluster = cluster(2);
    let nodes = [0, 1].map(|task| {
        let node = member(&cluster, task).set("fabric", "grpc").set("pool_size", "16MiB");
        node.start().expect("the node starts")
    });
    std::thread::scope(|scope| nodes.iter().for_each(|node| drop(scope.spawn(|| join(node)))));
    let [from, to] = nodes.each_ref().map(|node| node.step(1).expect("new"));
    let [sender, receiver] = &nodes;
    let tensor = sender.tensor(DType::U8, &[BYTES]).expect("room").freeze();
    let (done, ended) = std::sync::mpsc::channel();
    let began = Instant::now();
    for name in (0..TENSORS).map(|at| format!("x/{at}")) {
        from.send(&sender.edge_to("w", 1, &name).expect("an edge"), tensor.clone()).expect("sent");
        let done = done.clone();
        let received = move |got: Result<Delivery<Tensor>, Error>| {
            let _ = done.send(got.map(|got| got.tensor.bytes().len()));
        };
        let edge = receiver.edge_from("w", 0, &name).expect("an edge");
        to.receive(&edge).within(SOON).then(received).expect("begun");
    }
    for _ in 0..TENSORS {
        let got = ended.recv_timeout(2 * SOON).expect("an end").expect("received");
        assert_eq!(got as u64, BYTES);
    }
    println!("{TENSORS} tensors of {BYTES} bytes came after {:?}", began.elapsed());
}

#[test]
#[ignore = "a role, not a test"]
fn role_receiver() {
    let node = start(&std::env::var("TEST_CLUSTER").expect("started by a test"), 1);
    join(&node);
    let edge = node.edge_from("w", 0, "x").expect("an edge");
    let got = node.step(1).expect("new").recv(&edge, SOON).expect("received").tensor;
    println!("got {}", got.bytes()[0]);
    wait_to_be_told();
    node.stop().expect("stopped");
}

#[test]
fn what_a_receiver_did_not_take_before_it_died_is_for_its_next_life() {
    let cluster = cluster(2);
    let mut receiver = Other::start("calls::role_receiver", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    let edge = node.edge_to("w", 1, "x").expect("an edge");
    let step = node.step(1).expect("new");
    for value in 1..=3 {
        let mut tensor = node.tensor(DType::U8, &[1]).expect("room");
        tensor.bytes_mut()[0] = value;
        step.send(&edge, tensor.freeze()).expect("sent");
    }
    receiver.wait_for("got 1");
    until(&node, "the word that it is taken", || node.pool().stats().live_tensors == 2);
    receiver.kill();
    until(&node, "the news", || matches!(node.peers()[0].state, PeerState::Lost(_)));
    let mut receiver = Other::start("calls::role_receiver", &cluster);
    join(&node);
    receiver.wait_for("got 2");
    receiver.say("stop");
    assert!(receiver.ends_well());
    let dropped = node.stop().expect("stopped");
    assert_eq!((dropped.waiting(), dropped.left()), (1, 0), "{dropped}");
}

/// Sends all values in step 1, aborts step 2 and cleans step 3 up.
#[test]
#[ignore = "a role, not a test"]
fn role_sender() {
    let node = start(&std::env::var("TEST_CLUSTER").expect("started by a test"), 1);
    join(&node);
    let edge = node.edge_to("w", 0, "x").expect("an edge");
    let step = node.step(1).expect("new");
    for value in 0..VALUES {
        match bytes_of(value) {
            None => step.send_dead(&edge).expect("sent"),
            Some(len) => {
                let mut tensor = node.tensor_within(DType::U8, &[len], SOON).expect("room");
                tensor.bytes_mut().fill(value as u8);
                step.send(&edge, tensor.freeze()).expect("sent");
            }
        }
    }
    node.step(2).expect("new").abort(failure()).expect("aborted");
    node.step(3).expect("new");
    node.cleanup(3);
    println!("sent");
    wait_to_be_told();
    node.flush(SOON).expect("all is taken");
    node.stop().expect("stopped");
}

const VALUES: u64 = 200;

/// Each third value is dead, others are empty, small, or of several parts.
fn bytes_of(value: u64) -> Option<u64> {
    (!value.is_multiple_of(3)).then(|| [0, 1, 5_000, 400_000][value as usize % 4])
}

fn failure() -> Status {
    Status::new(Code::OutOfRange, "the reader has no more").with_details(vec![1, 2, 3])
}

/// Checks that the values come once, in order and whole.
fn receive_all(node: &Node) {
    let edge = node.edge_from("w", 1, "x").expect("an edge");
    let step = node.step(1).expect("new");
    for value in 0..VALUES {
        let got = step.recv(&edge, SOON).unwrap_or_else(|error| panic!("value {value}: {error}"));
        let len = (!got.is_dead).then(|| got.tensor.bytes().len() as u64);
        assert_eq!(len, bytes_of(value), "value {value}");
        assert!(got.tensor.bytes().iter().all(|byte| u64::from(*byte) == value), "value {value}");
    }
    assert!(step.try_recv(&edge).expect("usable").is_none(), "nothing comes twice");
}

#[test]
fn dead_values_and_errors_come_as_they_were_sent() {
    let cluster = cluster(2);
    let mut sender = Other::start("calls::role_sender", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    sender.wait_for("sent");
    receive_all(&node);
    let edge = node.edge_from("w", 1, "x").expect("an edge");
    let error = |step| node.step(step).expect("new").recv(&edge, SOON).expect_err("the step has ended");
    let Error::Remote { status, .. } = error(2) else { panic!("not an error of the sender") };
    assert_eq!(status, failure().into_derived());
    let Error::Remote { status, .. } = error(3) else { panic!("not an error of the sender") };
    assert_eq!(status.code, Code::NotFound, "{status}");
    sender.say("stop");
    assert!(sender.ends_well());
}

/// Shuts the TCP connections of this process with a port down, as a network that resets them.
fn cut_connections(port: u16) -> usize {
    let me = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd");
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten();
    let numbers = open.filter_map(|file| file.file_name().to_str()?.parse().ok());
    let cut = |number: i32| {
        // A copy of the descriptor: it may be closed meanwhile.
        let socket = pidfd_getfd(&me, number, PidfdGetfdFlags::empty()).ok()?;
        let peer = SocketAddr::try_from(getpeername(&socket).ok()??).ok()?;
        (peer.port() == port).then(|| shutdown(&socket, Shutdown::Both).ok()).flatten()
    };
    numbers.filter_map(cut).count()
}

#[test]
fn calls_on_connections_that_break_are_repeated_and_bring_each_value_once() {
    let cluster = cluster(2);
    let port = cluster.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let mut sender = Other::start("calls::role_sender", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    sender.wait_for("sent");
    let (done, ends) = std::sync::mpsc::channel::<()>();
    let cutting = std::thread::spawn(move || {
        let mut cut = 0;
        while ends.recv_timeout(Duration::from_millis(15)) == Err(RecvTimeoutError::Timeout) {
            cut += cut_connections(port);
        }
        cut
    });
    receive_all(&node);
    drop(done);
    let cut = cutting.join().expect("no panic");
    println!("{cut} connections were cut");
    assert!(cut > 10, "{cut} connections were cut");
    sender.say("stop");
    assert!(sender.ends_well());
}
