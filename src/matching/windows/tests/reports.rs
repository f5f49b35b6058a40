//! What is counted of edges.

use super::*;

#[test]
fn values_that_had_left_for_a_lost_peer_are_counted() {
    let mut pair = Pair::new(2);
    pair.begin_steps(1..=2);
    let mut call = pair.receive("x", 1);
    pair.run();
    (1..=5).for_each(|number| pair.send("x", 1, number));
    pair.run();
    assert_eq!(call.number(), 1);
    pair.run();
    // Two values have left that were not taken, and two wait.
    assert_eq!(pair.sides[SENDER].lanes.counters.counters().get(Counter::SendsWaited), 3);
    let Pair { sides: [sender, receiver], .. } = &mut pair;
    assert_eq!(sender.matching.lost(TO_RECEIVER, &Error::Stopped), 2);
    assert_eq!(receiver.matching.lost(TO_SENDER, &Error::Stopped), 0, "it has sent nothing");
    assert_eq!(receiver.matching.drop_held(TO_SENDER), 2);
    assert_eq!(sender.matching.lost(TO_RECEIVER, &Error::Stopped), 0, "they are lost once");
    pair.end(1..=2);
}
