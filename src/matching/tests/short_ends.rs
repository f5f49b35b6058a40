//! Receives that wait, and get the next message without an event.

use super::*;

impl Pair {
    /// Ends a receive by the next message.
    pub(super) fn end_short(&mut self, call: &mut Call) -> ShortTake<()> {
        let Side { matching, lanes, pool, .. } = &mut self.sides[RECEIVER];
        let mut receive = DirectReceive::Waiting(Destination::Alloc);
        let taken = matching.end_short(lanes, call.of, &mut receive);
        if let DirectReceive::Received(received, sender) = receive {
            assert!(call.result.is_done() && call.result.take().is_none(), "the value came once");
            call.direct = Some(Delivery::of(received, sender, pool).tensor);
        }
        taken
    }

    /// Sends a number, whose record becomes the next message of a short look.
    fn send_next(&mut self, name: &str, step: u64, number: u32) {
        self.send(name, step, number);
        let record = self.sides[SENDER].lanes.to_receiver.pop_back();
        assert!(matches!(record, Some(ToReceiver::Record(_))), "{record:?}");
        self.sides[RECEIVER].lanes.next = Some(self.tensor(RECEIVER, number, 8).freeze());
    }
}

#[test]
fn a_receive_that_waits_alone_gets_the_next_message() {
    let mut pair = Pair::new(8);
    let mut first = pair.receive("x", 1);
    pair.run();
    pair.send_next("x", 1, 5);
    assert_eq!(pair.end_short(&mut first), ShortTake::Taken(()));
    assert_eq!(first.number(), 5);
    assert_eq!(pair.end_short(&mut first), ShortTake::Other, "it has ended");
    // The edge counts the value as any other.
    let mut second = pair.receive("x", 1);
    pair.send("x", 1, 6);
    pair.run();
    assert_eq!(second.number(), 6);
    pair.end(1..=1);
}

#[test]
fn a_call_that_has_ended_cancels_no_later_receive() {
    let mut pair = Pair::new(8);
    for (is_short, is_listed) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut first = pair.receive("x", 1);
        let number = first.of.waiter;
        if is_listed {
            pair.sides[RECEIVER].matching.list(number.expect("it waits"));
            first.of = first.of.id.into();
        }
        pair.run();
        if is_short {
            pair.send_next("x", 1, 5);
            assert_eq!(pair.end_short(&mut first), ShortTake::Taken(()));
        } else {
            pair.send("x", 1, 5);
            pair.run();
        }
        assert_eq!(first.number(), 5);
        let mut second = pair.receive("x", 1);
        assert_eq!(second.of.waiter, number, "the number is used again");
        let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
        assert!(!matching.cancel(lanes, &Cancel { call: first.of, why: CancelReason::Dropped }));
        pair.send("x", 1, 6);
        pair.run();
        assert_eq!(second.number(), 6);
    }
    pair.end(1..=1);
}

#[test]
fn a_look_in_vain_leaves_the_receive_as_it_was() {
    let mut pair = Pair::new(8);
    let given = pair.tensor(RECEIVER, 0, 8);
    let mut into = pair.begin("x", 1, Destination::Into(given), SOON);
    pair.run();
    assert_eq!(pair.end_short(&mut into), ShortTake::Other);
    pair.sides[RECEIVER].lanes.is_silent = true;
    assert_eq!(pair.end_short(&mut into), ShortTake::Nothing);
    assert!(into.waits());
    pair.send("x", 1, 7);
    pair.run();
    assert!(matches!(into.outcome(), Some(Ok(Payload::Into(given))) if number_in(given.bytes()) == 7));
    pair.end(1..=1);
}

#[test]
fn a_receive_with_another_before_it_gets_no_message_of_its_own() {
    let mut pair = Pair::new(8);
    let mut calls = [pair.receive("x", 1), pair.receive("x", 1), pair.receive("x", 2)];
    pair.run();
    pair.sides[RECEIVER].lanes.is_silent = true;
    let looks = calls.each_mut().map(|call| pair.end_short(call));
    assert_eq!(looks, [ShortTake::Nothing, ShortTake::Other, ShortTake::Other]);
    pair.send_next("x", 1, 1);
    assert_eq!(pair.end_short(&mut calls[1]), ShortTake::Other);
    assert_eq!(pair.end_short(&mut calls[0]), ShortTake::Taken(()));
    pair.send("x", 2, 3);
    pair.send("x", 1, 2);
    pair.run();
    assert_eq!(calls.each_mut().map(Call::number), [1, 2, 3]);
    pair.end(1..=2);
}

#[test]
fn a_value_of_another_step_that_is_held_hinders_no_short_end() {
    let mut pair = Pair::new(8);
    let mut call = pair.receive("x", 2);
    pair.run();
    pair.send("x", 1, 1);
    pair.run();
    pair.send_next("x", 2, 2);
    assert_eq!(pair.end_short(&mut call), ShortTake::Taken(()));
    assert_eq!((call.number(), pair.receive("x", 1).number()), (2, 1));
    pair.end(1..=2);
}

#[test]
fn a_short_end_leaves_no_destination_granted() {
    let mut pair = Pair::offering(8);
    let mut large = pair.receive("x", 1);
    pair.run();
    pair.send("x", 1, 1);
    pair.run();
    assert_eq!(large.number(), 1);
    let mut small = pair.receive("x", 1);
    pair.run();
    assert!(pair.has_destination(), "for the next large tensor");
    pair.sides[RECEIVER].lanes.next = Some(pair.tensor(RECEIVER, 2, 8).freeze());
    assert_eq!(pair.end_short(&mut small), ShortTake::Taken(()));
    assert_eq!((small.number(), pair.has_destination()), (2, false));
}

#[test]
fn a_receive_whose_credit_is_due_takes_no_short_end() {
    // Each value that is taken has credit.
    let mut pair = Pair::new(1);
    let mut call = pair.receive("x", 1);
    pair.run();
    pair.sides[RECEIVER].lanes.is_silent = true;
    assert_eq!(pair.end_short(&mut call), ShortTake::Other);
    pair.send("x", 1, 3);
    pair.run();
    assert_eq!(call.number(), 3);
    pair.end(1..=1);
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, assert_found};
    assert_found(Mutant::DestinationLost, a_look_in_vain_leaves_the_receive_as_it_was);
}
