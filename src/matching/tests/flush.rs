//! A sender that asks which of its values were taken.

use super::*;

/// The values that wait, those that left, and those that were lost, of each edge.
type Counts = Vec<(String, u64, u64, u64)>;

impl Pair {
    /// What the sender knows. Asks the receiver, whose answer has not come yet.
    fn flush(&mut self) -> Counts {
        self.flush_since(None)
    }

    fn flush_since(&mut self, since: Option<u64>) -> Counts {
        let Side { matching, lanes, .. } = &mut self.sides[SENDER];
        matching.flush(lanes);
        let mut untaken = matching.untaken(since);
        untaken.sort();
        assert_eq!(untaken.is_empty(), untaken.edges.is_empty());
        let counts = untaken.edges.iter();
        counts.map(|edge| (edge.name().to_owned(), edge.waiting, edge.left, edge.lost)).collect()
    }

    /// Messages from the receiver that have not arrived.
    fn answers(&self) -> usize {
        self.sides[RECEIVER].lanes.to_sender.len()
    }
}

fn counts(counts: &[(&str, u64, u64, u64)]) -> Counts {
    counts.iter().map(|(name, waiting, left, lost)| ((*name).to_owned(), *waiting, *left, *lost)).collect()
}

#[test]
fn a_sender_that_flushes_hears_of_each_value_that_is_taken_at_once() {
    let mut pair = Pair::new(8);
    let mut first = pair.receive("x", 1);
    pair.run();
    assert_eq!(pair.flush(), counts(&[]));
    (1..=4).for_each(|number| pair.send("x", 1, number));
    pair.run();
    assert_eq!(first.number(), 1);
    pair.run();
    assert_eq!(pair.flush(), counts(&[("x", 0, 4, 0)]), "credit for one value does not come back alone");
    pair.run();
    for left in (1..=3).rev() {
        assert_eq!(pair.flush(), counts(&[("x", 0, left, 0)]));
        assert!(pair.sides[SENDER].lanes.to_receiver.is_empty(), "it has asked");
        let number = pair.receive("x", 1).number();
        assert_eq!((u64::from(number), pair.answers()), (5 - left, 1));
        pair.run();
    }
    assert_eq!(pair.flush(), counts(&[]));
    // The receiver is not asked any more.
    pair.send("x", 1, 5);
    pair.run();
    assert_eq!((pair.receive("x", 1).number(), pair.answers()), (5, 0));
    assert_eq!(pair.flush(), counts(&[("x", 0, 1, 0)]));
    pair.run();
    assert_eq!(pair.flush(), counts(&[]));
    pair.end(1..=1);
}

#[test]
fn values_that_wait_are_told_apart_from_those_that_left() {
    let mut pair = Pair::new(2);
    (0..3).for_each(|number| pair.send("new", 1, number));
    assert_eq!(pair.flush(), counts(&[("new", 3, 0, 0)]), "nobody has announced it");
    let mut calls = ["new", "x"].map(|name| pair.receive(name, 9));
    pair.run();
    assert_eq!(pair.flush(), counts(&[("new", 1, 2, 0)]));
    (0..5).for_each(|number| pair.send("x", 1 + u64::from(number), number));
    pair.run();
    assert_eq!(pair.flush(), counts(&[("new", 1, 2, 0), ("x", 3, 2, 0)]));
    // A value that is needed leaves outside the window.
    let needed = pair.receive("x", 5);
    assert!(needed.waits());
    pair.run();
    assert_eq!(pair.flush(), counts(&[("new", 1, 2, 0), ("x", 2, 3, 0)]));
    pair.run();
    drop(needed);
    assert_eq!(pair.flush(), counts(&[("new", 1, 2, 0), ("x", 2, 2, 0)]));
    // The end of a step drops its values, here or there.
    pair.step(RECEIVER, StepChange::CleanedUp { step: 1 });
    pair.step(SENDER, StepChange::CleanedUp { step: 2 });
    pair.run();
    // The last value of the other edge has left by the credit that came back.
    assert_eq!(pair.flush(), counts(&[("new", 0, 1, 0), ("x", 0, 2, 0)]));
    pair.run();
    assert_eq!(pair.flush(), counts(&[("x", 0, 2, 0)]));
    (3..=4).for_each(|step| assert_eq!(u64::from(pair.receive("x", step).number()), step - 1));
    pair.run();
    assert_eq!(pair.flush(), counts(&[]));
    calls.iter_mut().for_each(|call| assert!(call.waits()));
    drop(calls);
    pair.end(3..=9);
}

#[test]
fn values_that_left_for_a_life_that_ended_are_lost_and_the_others_wait() {
    let mut pair = Pair::new(2);
    let mut call = pair.receive("x", 9);
    pair.run();
    (1..=3).for_each(|number| pair.send("x", 1, number));
    pair.run();
    let losses = pair.sides[SENDER].matching.losses();
    assert_eq!(pair.flush_since(Some(losses)), counts(&[("x", 1, 2, 0)]));
    pair.lose();
    assert_eq!(pair.flush_since(Some(losses)), counts(&[("x", 1, 0, 2)]));
    let unlinked = pair.sides[SENDER].matching.untaken(None);
    assert!(unlinked.is_final() && !unlinked.is_empty() && unlinked.edges.iter().all(|edge| !edge.is_linked));
    let losses = pair.sides[SENDER].matching.losses();
    assert_eq!(pair.flush_since(Some(losses)), counts(&[("x", 1, 0, 0)]), "an earlier loss does not count");
    let _ = call.error();
    // The next life.
    pair.sides[RECEIVER].matching.drop_held(TO_SENDER);
    pair.up();
    assert_eq!(pair.receive("x", 2).outcome().map(|_| ()), None);
    pair.run();
    assert_eq!(pair.flush(), counts(&[("x", 0, 1, 0)]));
    pair.run();
    assert_eq!(pair.receive("x", 1).number(), 3);
    pair.run();
    assert_eq!(pair.flush(), counts(&[]));
    pair.end(1..=9);
}

#[test]
fn an_edge_that_gives_its_number_back_has_no_values_that_are_not_known() {
    // More edges than keep their numbers.
    let mut pair = Pair::new(2);
    for n in 0..40 {
        let name = format!("{n}");
        let mut call = pair.receive(&name, 1);
        pair.run();
        pair.send(&name, 1, n);
        pair.send(&name, 2, n);
        pair.run();
        assert_eq!(call.number(), n);
        assert_eq!(pair.receive(&name, 2).number(), n);
    }
    pair.run();
    let _ = pair.flush();
    pair.run();
    assert_eq!(pair.flush(), counts(&[]));
    pair.end(1..=2);
}
