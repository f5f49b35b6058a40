//! What is counted and reported of edges.

use super::*;
use crate::link::windows::LinkFigures;
use crate::matching::{EdgeReports, EdgeWait};

impl Pair {
    /// The reports of the edges of one side, those that wait first.
    fn reports(&self, side: usize) -> EdgeReports {
        let mut reports = EdgeReports::default();
        let peer = if side == SENDER { TO_RECEIVER } else { TO_SENDER };
        self.sides[side].matching.report(peer, &LinkFigures::default(), usize::MAX, &mut reports);
        reports.cut(usize::MAX);
        reports
    }
}

#[test]
fn values_that_had_left_for_a_lost_peer_are_counted() {
    let mut pair = Pair::new(2);
    let mut call = pair.receive("x", 1);
    pair.run();
    (1..=5).for_each(|number| pair.send("x", 1, number));
    pair.run();
    assert_eq!(call.number(), 1);
    pair.run();
    // Two values have left, of which one was taken; its credit has not come back. Three wait.
    assert_eq!(pair.sides[SENDER].lanes.counters.counters().get(Counter::SendsWaited), 3);
    let Pair { sides: [sender, receiver], .. } = &mut pair;
    assert_eq!(sender.matching.lost(TO_RECEIVER, &Error::Stopped), 2);
    assert_eq!(receiver.matching.lost(TO_SENDER, &Error::Stopped), 0, "it has sent nothing");
    assert_eq!(receiver.matching.drop_held(TO_SENDER), 1);
    assert_eq!(sender.matching.lost(TO_RECEIVER, &Error::Stopped), 0, "they are lost once");
    pair.end(1..=2);
}

#[test]
fn a_receive_without_a_number_and_a_value_without_a_link_say_why_they_wait() {
    let mut pair = Pair::new(1);
    let calls: Vec<_> = (0..9).map(|n| pair.receive(&n.to_string(), 1)).collect();
    pair.run();
    let reports = pair.reports(RECEIVER);
    let waits = |wait| reports.edges.iter().filter(|edge| edge.wait == Some(wait)).count();
    assert_eq!(
        (waits(EdgeWait::NoValue), waits(EdgeWait::NoNumber)),
        (8, 1),
        "eight have a number\n{reports}"
    );
    drop(calls);
    (0..2).for_each(|number| pair.send("0", 1, number));
    pair.lose();
    let reports = pair.reports(SENDER);
    assert_eq!((reports.waiting, reports.edges[0].wait), (1, Some(EdgeWait::NoLink)), "{reports}");
    pair.end(1..=1);
}

#[test]
fn calls_that_fail_at_once_leave_no_edge_behind() {
    let mut pair = Pair::new(1);
    let value = Value::Dead;
    let Side { matching, lanes, .. } = &mut pair.sides[SENDER];
    let full = matching.send_now(lanes, (TO_RECEIVER, key("full", 1).borrowed()), value, 0);
    assert!(full.is_err(), "no value may wait");
    pair.lose();
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    for n in 0..100 {
        let key = key(&n.to_string(), 1);
        let result = matching.receive_now(
            lanes,
            (TO_SENDER, key.borrowed(), true),
            &mut DirectReceive::Waiting(Destination::Alloc),
            &mut None,
        );
        assert!(matches!(result, Some(Err(error)) if matches!(*error, Error::Stopped)), "{n}");
    }
    for side in [SENDER, RECEIVER] {
        assert!(pair.reports(side).edges.is_empty(), "{}", pair.reports(side));
    }
    pair.end(1..=1);
}

#[test]
fn receives_that_give_up_leave_their_numbers_to_edges_that_wait() {
    let mut pair = Pair::new(2);
    let calls = (0..8).map(|n| pair.receive(&n.to_string(), 1)).collect::<Vec<_>>();
    let mut late = pair.receive("late", 1);
    pair.run();
    for call in &calls {
        let cancel = Cancel { call: call.of, why: CancelReason::Cancelled };
        let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
        assert!(matching.cancel(lanes, &cancel));
    }
    pair.send("late", 1, 7);
    pair.run();
    assert_eq!(late.number(), 7);
    pair.end(1..=1);
}
