//! The errors of specification 3.5 that a whole node cannot cause, between two real handlers. Each
//! reaches the waiter of its request and no other.

use super::pair::{Call, Pair, RECEIVER, SENDER, over_shm, over_sim, over_sim_stale};
use crate::fabric::Port;
use crate::link::{Destination, TensorKey, Value};
use crate::matching::{Error, Outcome};
use crate::wire::{Code, EdgeName, Status};
use std::sync::Arc;
use std::time::Duration;

const ENDLESS: Duration = Duration::from_secs(1_000_000);
const HERE: &str = "/job:b/replica:0/task:0/device:CPU:0";
const THERE: &str = "/job:a/replica:0/task:0/device:CPU:0";
const ELSEWHERE: &str = "/job:c/replica:0/task:3/device:CPU:0";

fn key(source: &str, destination: &str, name: &str) -> TensorKey {
    let edge = Arc::new(EdgeName::new(source, destination, name).expect("an edge"));
    TensorKey { edge, step: 1, frame: 0, iteration: 0 }
}

/// The status with which the sender refused a receive.
fn told(call: &mut Call) -> Status {
    match call.receiver.as_mut().and_then(|receiver| receiver.take()) {
        Some(Outcome(Err(Error::Remote { status, .. }))) => status,
        other => panic!("{other:?}"),
    }
}

fn is_waiting(call: &Call) -> bool {
    call.receiver.as_ref().is_some_and(|receiver| !receiver.is_done())
}

/// A refused receive between two that succeed. Only the keys of the pair are wrong.
fn refused<P: Port>(pair: &mut Pair<P>, bad: &TensorKey, code: Code, part: &str) {
    for side in [SENDER, RECEIVER] {
        pair.begin(side, 1);
    }
    let [first, last] = ["first", "last"].map(|name| key(THERE, HERE, name));
    let mut before = pair.receive(&first, Destination::Alloc, ENDLESS);
    let mut wrong = pair.receive(bad, Destination::Alloc, ENDLESS);
    let mut after = pair.receive(&last, Destination::Alloc, ENDLESS);
    pair.run();
    let status = told(&mut wrong);
    assert_eq!((status.code, status.derived, status.details.len()), (code, false, 0));
    assert!(status.message.contains(part), "{status}");
    for (call, key, fill) in [(&mut before, &first, 1), (&mut after, &last, 2)] {
        assert!(is_waiting(call), "it is none of theirs");
        let value = pair.value(300, fill);
        pair.send(key, Value::Tensor(value));
        pair.run();
        let outcome = call.receiver.as_mut().and_then(|receiver| receiver.take());
        assert!(matches!(outcome, Some(Outcome(Ok(_)))), "{outcome:?}");
    }
}

#[test]
fn a_key_of_another_sender_or_receiver_is_refused_by_name() {
    for (source, destination, code, part) in [
        (ELSEWHERE, HERE, Code::InvalidArgument, "does not start at a/0, which b/0 asked for it"),
        (THERE, ELSEWHERE, Code::PermissionDenied, "does not end at b/0, which asked for it"),
    ] {
        let bad = key(source, destination, "bad");
        refused(&mut over_sim(true), &bad, code, part);
        refused(&mut over_shm(), &bad, code, part);
    }
}

#[test]
fn a_request_for_an_earlier_incarnation_is_refused_with_both_numbers() {
    let mut pair = over_sim_stale();
    for side in [SENDER, RECEIVER] {
        pair.begin(side, 1);
    }
    let mut call = pair.receive(&key(THERE, HERE, "x"), Destination::Alloc, ENDLESS);
    pair.run();
    let status = told(&mut call);
    assert_eq!(status.code, Code::FailedPrecondition);
    for part in ["incarnation 0000000000000063 of a/0, which is gone", "it is 0000000000000001 now"] {
        assert!(status.message.contains(part), "{status}");
    }
}

#[test]
fn a_receive_that_reaches_its_poller_late_ends_by_its_own_deadline() {
    let timeout = Duration::from_millis(15);
    let mut pair = over_sim(true);
    for side in [SENDER, RECEIVER] {
        pair.begin(side, 1);
    }
    let deadline = pair.sides[RECEIVER].now + timeout;
    pair.pass(RECEIVER, timeout);
    let mut call = pair.receive_until(&key(THERE, HERE, "x"), Destination::Alloc, (timeout, deadline));
    pair.run();
    assert!(is_waiting(&call), "the sender must not answer as it does a request with timeout 0");
    pair.pass(RECEIVER, Duration::from_millis(1));
    pair.run();
    let outcome = call.receiver.as_mut().and_then(|receiver| receiver.take());
    assert!(matches!(outcome, Some(Outcome(Err(Error::DeadlineExceeded { .. })))), "{outcome:?}");
}

#[test]
fn the_sender_s_answer_to_a_stalled_receiver_is_the_receiver_s_own_deadline() {
    let mut pair = over_sim(true);
    for side in [SENDER, RECEIVER] {
        pair.begin(side, 1);
    }
    let mut call = pair.receive(&key(THERE, HERE, "x"), Destination::Alloc, Duration::from_millis(15));
    pair.run();
    pair.pass(SENDER, Duration::from_secs(1));
    pair.run();
    let outcome = call.receiver.as_mut().and_then(|receiver| receiver.take());
    assert!(matches!(outcome, Some(Outcome(Err(Error::DeadlineExceeded { .. })))), "{outcome:?}");
}
