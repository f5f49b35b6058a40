//! A receiver with a standing request that dies and comes back while its sender goes on.

use super::{BASE, LARGE, begin, here, receive, send, there};
use crate::common::other::{Other, wait_to_be_told};
use crate::common::{cluster, counting, lacks_processes, lends_nothing, member, until};
use std::time::{Duration, Instant};
use tensorwire::{Code, Counter, Error, Gauge, Node, Sequence};

const WINDOW: u32 = 8;
/// Steps that the first life receives.
const FIRST: u64 = 10;
/// Steps beyond the largest credit when the receiver dies.
const KEPT: u64 = 12;
/// The largest window that an edge grows to by itself.
const USUAL: u64 = 64;
/// Steps that begin in the receiver's second life.
const LATER: u64 = 20;

fn given(name: &str) -> String {
    std::env::var(name).expect("started by a test")
}

/// A receiver with a `Standing`, which reports the end of its part.
#[test]
#[ignore = "a role, not a test"]
fn role_receiver() {
    let node = member(&given("TEST_CLUSTER"), 1).set("bulk_receive", given("TEST_BULK"));
    let node = node.start().expect("starts");
    node.join().expect("joined");
    let orders = std::thread::spawn(wait_to_be_told);
    let sequence = node.sequence(BASE);
    let _standing = node.standing(&here(&node, 0), sequence, WINDOW).expect("new");
    match given("TEST_LEFT").parse() {
        Ok(left) => {
            let kept: u64 = given("TEST_KEPT").parse().expect("a number");
            second_life(&node, sequence, left, left + kept);
        }
        Err(_) => (0..FIRST).for_each(|n| receive(&node, sequence, n, LARGE)),
    }
    println!("all has come");
    until(&node, "an order", || orders.is_finished());
    node.stop().expect("stopped");
}

/// The receiver of the second life. Values before `left` left for the first life, and those before
/// `kept` were sent then.
fn second_life(node: &Node, sequence: Sequence, left: u64, kept: u64) {
    let fails = |n, timeout| begin(node, sequence, n).recv(&here(node, 0), timeout).expect_err("it is lost");
    let gone = fails(FIRST, crate::common::SOON);
    assert!(gone.code() == Code::NotFound && gone.to_string().contains("cleaned up at w/0"), "{gone}");
    for n in FIRST + 1..left {
        let lost = fails(n, Duration::from_millis(30));
        assert!(matches!(lost, Error::DeadlineExceeded { .. }), "step {n}: {lost}");
    }
    (left..kept).for_each(|n| receive(node, sequence, n, LARGE));
    println!("all that was kept has come");
    (kept..kept + LATER).for_each(|n| receive(node, sequence, n, LARGE));
}

/// Sends more values than the stopped receiver has given credit for. Returns the numbers of the
/// first step that did not leave, and of the first that was not sent.
fn send_too_much(node: &Node, sequence: Sequence) -> (u64, u64) {
    let sent = || node.counters().get(Counter::TensorsSent);
    let end = FIRST + USUAL + KEPT;
    (FIRST..end).for_each(|n| send(node, sequence, n, LARGE));
    // The window has doubled once with the first steps, and half of it at least is credit.
    until(node, "what has credit", || sent() >= FIRST + u64::from(WINDOW));
    let enough = Instant::now() + Duration::from_millis(50);
    until(node, "more", || Instant::now() > enough);
    assert!(sent() <= FIRST + USUAL, "{} values have left", sent());
    (sent(), end)
}

/// Waits until the receiver says this. The node makes progress meanwhile: over verbs it writes what
/// the receiver takes.
fn hear(node: &Node, receiver: &mut Other, text: &str) {
    std::thread::scope(|scope| {
        let heard = scope.spawn(|| receiver.wait_for(text));
        until(node, text, || heard.is_finished());
    });
}

fn a_receiver_dies(bulk: &str) {
    let cluster = cluster(2);
    let start = |left: &str, kept: &str| {
        Other::start_with(
            "standing::lives::role_receiver",
            &cluster,
            &[("TEST_BULK", bulk), ("TEST_LEFT", left), ("TEST_KEPT", kept)],
        )
    };
    let mut receiver = start("none", "none");
    let node = member(&cluster, 0).start().expect("starts");
    node.join().expect("joined");
    let sequence = node.sequence(BASE);
    let sent = || node.counters().get(Counter::TensorsSent);
    (0..FIRST).for_each(|n| send(&node, sequence, n, LARGE));
    until(&node, "the first steps", || sent() == FIRST);
    hear(&node, &mut receiver, "all has come");
    receiver.suspend();
    let (left, end) = send_too_much(&node, sequence);
    let kept = end - left;
    receiver.kill();
    until(&node, "the news", || node.peers()[0].state.error().is_some());
    let late = begin(&node, sequence, end).send(&there(&node, 1), counting(&node, 0.0, LARGE));
    assert!(matches!(late, Err(Error::PeerLost { .. })), "while it is gone a send says so: {late:?}");
    assert_eq!(sent(), left, "what had no credit has not left");
    let gauges = || Gauge::ALL.iter().map(|gauge| node.counters().gauge(*gauge)).sum::<u64>();
    until(&node, "the end of what was on its way", || {
        node.pool().stats().live_tensors == kept as usize && gauges() == 0
    });
    node.cleanup(sequence.step(FIRST));
    let mut receiver = start(&left.to_string(), &kept.to_string());
    until(&node, "its return", || node.join().is_ok());
    until(&node, "what was kept", || sent() == end);
    hear(&node, &mut receiver, "all that was kept has come");
    (end..end + LATER).for_each(|n| send(&node, sequence, n, LARGE));
    until(&node, "the later steps", || sent() == end + LATER);
    hear(&node, &mut receiver, "all has come");
    receiver.say("stop");
    assert!(receiver.ends_well());
    (0..end + LATER).for_each(|n| node.cleanup(sequence.step(n)));
    until(&node, "nothing is left of it", || node.pool().is_empty() && gauges() == 0);
}

#[test]
fn a_receiver_that_dies_gets_the_values_without_credit_in_its_next_life() {
    if crate::common::calls_for_each_value() {
        return;
    }
    if !lacks_processes() {
        a_receiver_dies("copy");
    }
}

#[test]
fn a_borrower_that_dies_gives_everything_back() {
    if !lends_nothing() && !lacks_processes() {
        a_receiver_dies("borrow");
    }
}
