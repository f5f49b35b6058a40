//! Peers that die and come back while tensors travel by gRPC calls.

use crate::common::other::{Other, wait_to_be_told};
use crate::common::{SOON, cluster, member, until};
use std::time::{Duration, Instant};
use tensorwire::{DType, Error, FabricKind, Node, PeerState};

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
