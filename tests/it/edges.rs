//! Reports of edges: which of them wait, why, and what memory they take.

use crate::common::{SOON, counting, two_members, until};
use std::time::Duration;
use tensorwire::{EdgeReport, EdgeReports, EdgeSide, EdgeWait, Node};

fn edges(node: &Node) -> EdgeReports {
    node.edges(100).expect("usable")
}

/// The report of an edge that exists.
fn report(node: &Node, side: EdgeSide, name: &str) -> EdgeReport {
    let found = edges(node).edges.into_iter().find(|edge| edge.side == side && edge.name() == name);
    found.unwrap_or_else(|| panic!("no edge {name} in\n{}", edges(node)))
}

#[test]
fn an_edge_without_credit_is_named_with_its_reason() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let [sender, receiver] = two_members(&[]);
    let out = sender.edge_to("w", 1, "x").expect("an edge");
    let here = receiver.edge_from("w", 0, "x").expect("an edge");
    let [sending, receiving] = [&sender, &receiver].map(|node| node.step(1).expect("new"));
    let send = || sending.send(&out, counting(&sender, 0.0, 100)).expect("sent");
    send();
    let waits = report(&sender, EdgeSide::Sender, "x");
    assert_eq!((waits.wait, waits.waiting, waits.number), (Some(EdgeWait::NotAnnounced), 1, None), "{waits}");
    assert_eq!((waits.tensor_bytes, waits.peer().task()), (400, 1));
    assert_eq!(receiving.try_recv(&here).expect("usable").map(drop), None, "the edge is announced");
    (0..4).for_each(|_| send());
    let credit = || report(&sender, EdgeSide::Sender, "x").wait == Some(EdgeWait::NoCredit);
    until(&sender, "the announcement", credit);
    // Two values have left, as the first window has two cells.
    let waits = report(&sender, EdgeSide::Sender, "x");
    assert_eq!((waits.wait, waits.waiting, waits.values), (Some(EdgeWait::NoCredit), 3, 2), "{waits}");
    assert!(waits.to_string().contains("'x' 0:0: 3 wait (the edge is out of credit), credit 0, 2 sent"));
    until(&receiver, "both", || report(&receiver, EdgeSide::Receiver, "x").held == 2);
    let held = report(&receiver, EdgeSide::Receiver, "x");
    assert_eq!((held.wait, held.held, held.window), (None, 2, Some(2)), "{held}");
    for _ in 0..5 {
        let pending = receiving.receive(&here).begin().expect("begun");
        until(&receiver, "each value", || sender.progress().is_ok() && pending.is_done());
        drop(pending.wait().expect("it has come"));
    }
    sender.progress().expect("usable");
    let idle = report(&sender, EdgeSide::Sender, "x");
    assert_eq!((idle.wait, idle.waiting, idle.tensor_bytes), (None, 0, 0), "{idle}");
    assert_eq!(edges(&sender).waiting, 0);
    let asked = receiving.receive(&here).begin().expect("begun");
    let waits = report(&receiver, EdgeSide::Receiver, "x");
    assert_eq!((waits.wait, waits.waiting), (Some(EdgeWait::NoValue), 1), "{waits}");
    drop(asked);
}

#[test]
fn values_that_the_peer_has_no_room_for_wait_in_the_queue_of_the_link() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let [sender, receiver] = two_members(&[("queue_depth", "16"), ("rdma_qp_queue_depth", "16")]);
    let sequence = receiver.sequence(1 << 40);
    let here = receiver.edge_from("w", 0, "x").expect("an edge");
    let _standing = receiver.standing(&here, sequence, 64).expect("new");
    sender.progress().expect("usable");
    let (step, out) = (sender.step(1).expect("new"), sender.edge_to("w", 1, "x").expect("an edge"));
    (0..64).for_each(|n| step.send(&out, counting(&sender, n as f32, 2)).expect("sent"));
    // The announcement of the edge may take a while.
    let waits = || report(&sender, EdgeSide::Sender, "x");
    until(&sender, "no room", || waits().wait == Some(EdgeWait::NoRoom));
    let waits = waits();
    assert_eq!(waits.waiting, 0, "{waits}");
    assert!((1..64).contains(&waits.queued), "{waits}");
    let receiving = receiver.step(1).expect("new");
    for _ in 0..64 {
        sender.progress().expect("usable");
        drop(receiving.recv(&here, SOON).expect("each value comes"));
    }
    assert_eq!(report(&sender, EdgeSide::Sender, "x").wait, None);
}

#[test]
fn the_memory_of_edges_grows_and_shrinks_and_few_are_shown() {
    let [sender, receiver] = two_members(&[]);
    let step = sender.step(1).expect("new");
    let before = edges(&sender);
    for n in 0..200 {
        let edge = sender.edge_to("w", 1, &format!("edge {n}")).expect("an edge");
        step.send(&edge, counting(&sender, 0.0, if n == 77 { 1000 } else { 10 })).expect("sent");
    }
    let all = sender.edges(3).expect("usable");
    assert_eq!((all.edges.len(), all.left_out, all.waiting), (3, 197, 200));
    assert_eq!(all.edges[0].name(), "edge 77", "it has the most memory");
    assert_eq!(all.tensor_bytes, 199 * 40 + 4000);
    assert!(all.bytes > before.bytes + 200 * 100, "{all}");
    assert!(all.to_string().contains("200 edges, 197 of them not shown: 200 wait"), "{all}");
    step.cleanup();
    let after = edges(&sender);
    assert_eq!((after.edges.len(), after.bytes, after.tensor_bytes), (0, before.bytes, 0));
    drop(receiver);
    let lost = || sender.peers()[0].state.error().is_some();
    until(&sender, "the loss", lost);
    let step = sender.step(2).expect("new");
    let error = step.recv(&sender.edge_from("w", 1, "y").expect("an edge"), Duration::from_secs(1));
    assert!(error.is_err() && edges(&sender).waiting == 0);
    sender.stop().expect("in time");
    assert!(sender.edges(1).is_err(), "the node has stopped");
}
