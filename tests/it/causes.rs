//! The error of a join names the first cause, and ends at once if it can't change.

use crate::common::{SOON, cluster, member, over_grpc, until, writes_bulk};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use tensorwire::{Error, LossCause, Node, PeerState};

#[test]
fn a_disagreement_about_the_depth_ends_both_joins_at_once_and_names_the_setting() {
    if writes_bulk() || over_grpc() {
        return println!("skipped: queues of any depths connect");
    }
    let (cluster, started) = (cluster(2), Barrier::new(2));
    let join = |task: u32, depth: &'static str| {
        let node = member(&cluster, task).set("queue_depth", depth).start().expect("the node starts");
        started.wait();
        let began = Instant::now();
        let error = node.join().expect_err("the depths differ").to_string();
        // Kept until both have ended: a member that leaves is another error.
        (node, error, began.elapsed())
    };
    let ended = std::thread::scope(|scope| {
        let joins = [(0, "64"), (1, "128")].map(|(task, depth)| scope.spawn(move || join(task, depth)));
        joins.map(|join| join.join().expect("no panic"))
    });
    for (task, (_node, error, took)) in ended.iter().enumerate() {
        // The side that sees the disagreement first tells the other one.
        let of_each = ["64 at w/0 and 128 at w/1", "128 at w/1 and 64 at w/0"];
        let names = |values: &&str| error.contains(&format!("queue_depth is {values}"));
        assert!(of_each.iter().any(names), "{error}");
        assert!(error.contains(&format!("w/{task} can't link with w/{}", 1 - task)), "{error}");
        println!("after {took:?}: {error}");
        assert!(*took < SOON / 10, "the join took {took:?}: {error}");
    }
}

#[test]
fn members_with_different_clusters_end_their_joins_at_once_and_both_are_shown() {
    let long = cluster(3);
    let (short, _) = long.rsplit_once(',').expect("three addresses");
    let (short, started) = (short.to_owned(), Barrier::new(2));
    let join = |task: u32, cluster: &str| {
        let node = member(cluster, task).start().expect("the node starts");
        started.wait();
        let began = Instant::now();
        let error = node.join().expect_err("the clusters differ").to_string();
        (node, error, began.elapsed())
    };
    let ended = std::thread::scope(|scope| {
        let joins = [(0, &long), (1, &short)].map(|(task, cluster)| scope.spawn(move || join(task, cluster)));
        joins.map(|join| join.join().expect("no panic"))
    });
    for (task, (_node, error, took)) in ended.iter().enumerate() {
        println!("after {took:?}: {error}");
        assert!(error.contains(&format!("can't link with w/{}", 1 - task)), "{error}");
        assert!([&long, &short].iter().all(|cluster| error.contains(cluster.as_str())), "{error}");
        assert!(*took < SOON / 10, "the join took {took:?}: {error}");
    }
}

#[test]
fn a_member_that_comes_again_with_the_right_depth_is_linked() {
    if writes_bulk() || over_grpc() {
        return println!("skipped: queues of any depths connect");
    }
    let cluster = cluster(2);
    let start = |task, depth| member(&cluster, task).set("queue_depth", depth).start().expect("it starts");
    let (node, wrong) = (start(0, "64"), start(1, "128"));
    assert!(node.join().is_err());
    wrong.stop().expect("in time");
    let right = start(1, "64");
    right.join().expect("they agree");
    let began = Instant::now();
    while node.join().is_err() {
        assert!(began.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Members that are all linked, each on its own if a loss is no end of all calls.
fn joined(count: usize) -> Vec<Node> {
    let cluster = cluster(count);
    let join = |task| {
        let node = member(&cluster, task).start().expect("the node starts");
        node.join().expect("the others come");
        node
    };
    std::thread::scope(|scope| {
        let joins: Vec<_> = (0..count as u32).map(|task| scope.spawn(move || join(task))).collect();
        joins.into_iter().map(|join| join.join().expect("no panic")).collect()
    })
}

/// Why a receive of a member from the one before it has failed.
fn cause_of_failure(node: &Node, from: u32) -> LossCause {
    let step = node.step(1).expect("new");
    let edge = node.edge_from("w", from, "x").expect("an edge");
    match step.recv(&edge, SOON) {
        Err(Error::PeerLost { peer, cause, .. }) if peer.task() == from => cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn members_that_end_one_after_the_other_all_name_the_first_cause() {
    let mut nodes = joined(5).into_iter();
    let first = nodes.next().expect("five members");
    first.fail("the disk is full").expect("in time");
    for (from, node) in (0..).zip(nodes) {
        let cause = cause_of_failure(&node, from);
        println!("w/{}: {cause}", from + 1);
        assert!(!cause.is_clean() && cause.to_string().contains("the disk is full"), "{cause}");
        let begin = match from {
            0 => "the disk is full",
            1 => "it stopped, as peer w/0 ",
            _ => "it stopped, as w/1 did, which said: peer w/0 ",
        };
        assert!(cause.to_string().starts_with(begin), "{cause}");
        // As a program does that ends with its first error.
        drop(node);
    }
}

#[test]
fn a_member_whose_calls_have_not_failed_stops_cleanly_after_the_loss_of_another() {
    let nodes = joined(3);
    nodes[0].fail("the disk is full").expect("in time");
    let is_lost = || nodes[1].peers().iter().any(|peer| matches!(peer.state, PeerState::Lost(_)));
    until(&nodes[1], "the loss of w/0", is_lost);
    nodes[1].stop().expect("in time");
    let cause = cause_of_failure(&nodes[2], 1);
    assert!(cause.is_clean(), "{cause}");
}
