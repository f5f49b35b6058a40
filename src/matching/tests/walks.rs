//! Walks over the edges of a batch.

use super::*;
use crate::link::Received;
use crate::matching::{BatchWalk, ReceivesInOrder, WalkEnd};
use crate::wire::message::Placement;

/// Receives of one step.
struct Receives {
    keys: Vec<TensorKey>,
    numbers: Vec<u32>,
}

impl ReceivesInOrder for Receives {
    fn edge(&self, at: usize) -> Option<(PeerIndex, TensorKeyRef<'_>)> {
        Some((TO_SENDER, self.keys.get(at)?.borrowed()))
    }

    fn destination(&mut self) -> Destination {
        Destination::Alloc
    }

    fn deliver(&mut self, received: Received, _: Placement) {
        let Received::Tensor(tensor) = received else { panic!("no tensor was given") };
        self.numbers.push(number_in(tensor.bytes()));
    }
}

/// A pair of which the receiver has announced some edges, and receives of these edges.
fn announced(names: &[&str]) -> (Pair, Receives) {
    let mut pair = Pair::new(4);
    for name in names {
        pair.send(name, 1, 0);
        let mut first = pair.receive(name, 1);
        pair.run();
        assert_eq!(first.number(), 0);
    }
    pair.sides[RECEIVER].lanes.is_silent = true;
    let keys = names.iter().map(|name| key(name, 1)).collect();
    (pair, Receives { keys, numbers: Vec::new() })
}

impl Pair {
    /// Some looks of a walk.
    fn look(&mut self, walk: &mut BatchWalk<'_>) -> Option<WalkEnd> {
        let Side { matching, lanes, .. } = &mut self.sides[RECEIVER];
        let looks = (0..10).map(|_| matching.walk_short(lanes, walk));
        looks.into_iter().find_map(|look| match look {
            ShortTake::Taken(end) => Some(end),
            ShortTake::Nothing | ShortTake::Other => None,
        })
    }

    fn walk(&mut self, walk: &mut BatchWalk<'_>) -> Option<WalkEnd> {
        let Side { matching, lanes, .. } = &mut self.sides[RECEIVER];
        matching.walk(lanes, walk)
    }
}

#[test]
fn a_walk_takes_what_has_come_and_waits_for_the_next() {
    let (mut pair, mut receives) = announced(&["a", "b", "c"]);
    pair.send("a", 1, 1);
    pair.send("b", 1, 2);
    pair.run();
    let mut walk = BatchWalk::new(&mut receives);
    assert!(pair.walk(&mut walk).is_none() && pair.look(&mut walk).is_none());
    pair.send("c", 1, 3);
    pair.run();
    assert!(matches!(pair.walk(&mut walk), Some(WalkEnd::Done)));
    assert_eq!(receives.numbers, [1, 2, 3]);
    pair.end(1..=1);
}

#[test]
fn a_walk_leaves_off_if_something_comes_for_a_later_edge() {
    let (mut pair, mut receives) = announced(&["a", "b", "c"]);
    let mut walk = BatchWalk::new(&mut receives);
    assert!(pair.walk(&mut walk).is_none() && pair.look(&mut walk).is_none());
    pair.send("c", 1, 3);
    pair.run();
    assert!(matches!(pair.look(&mut walk), Some(WalkEnd::LeftOff)));
    assert!(receives.numbers.is_empty());
    pair.end(1..=1);
}

#[test]
fn a_walk_leaves_off_before_an_edge_that_is_not_announced() {
    let (mut pair, mut receives) = announced(&["a"]);
    receives.keys.push(key("new", 1));
    let mut walk = BatchWalk::new(&mut receives);
    assert!(pair.walk(&mut walk).is_none());
    assert!(matches!(pair.look(&mut walk), Some(WalkEnd::LeftOff)));
}

/// As receives that begin in the general way.
#[test]
fn a_long_error_is_cut_in_many_walks_that_begin_after_it_came() {
    const TEXT: usize = 16 << 20;
    let (mut pair, mut receives) = announced(&["a"]);
    let status = Status::new(Code::Internal, "e".repeat(TEXT));
    pair.step(SENDER, StepChange::Aborted { steps: 1..=1, status });
    pair.run();
    let lens: Vec<_> = (0..6)
        .map(|_| match pair.walk(&mut BatchWalk::new(&mut receives)) {
            Some(WalkEnd::Failed(error)) => match *error {
                Error::Remote { status, .. } => status.message.len(),
                error => panic!("{error}"),
            },
            end => panic!("{end:?}"),
        })
        .collect();
    assert_eq!(lens, [TEXT, TEXT, TEXT, TEXT, 4096, 4096]);
}

#[test]
fn a_walk_fails_with_its_step_or_its_peer() {
    let (mut pair, mut receives) = announced(&["a", "b"]);
    let mut walk = BatchWalk::new(&mut receives);
    assert!(pair.walk(&mut walk).is_none());
    pair.lose();
    let end = pair.walk(&mut walk);
    assert!(matches!(&end, Some(WalkEnd::Failed(error)) if matches!(**error, Error::Stopped)), "{end:?}");
    pair.up();
    let mut walk = BatchWalk::new(&mut receives);
    pair.step(RECEIVER, StepChange::CleanedUp { step: 1 });
    let end = pair.walk(&mut walk);
    assert!(
        matches!(&end, Some(WalkEnd::Failed(error)) if matches!(**error, Error::StepGone { .. })),
        "{end:?}"
    );
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, assert_found};
    assert_found(Mutant::LaterEdgesIgnored, a_walk_leaves_off_if_something_comes_for_a_later_edge);
}
