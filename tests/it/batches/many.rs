//! Ten thousand small tensors per step, and their cost in slots and doorbells.

use super::*;
use crate::common::writes_bulk;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const MANY: usize = 10_000;

/// Default settings, with a pool that holds the tensors of a few steps.
#[test]
fn ten_thousand_small_tensors_each_step_come_right_and_leave_nothing() {
    if crate::common::calls_for_each_value() {
        return;
    }
    const STEPS: u64 = 12;
    run(2, &[("pool_size", "64MiB")], |node, task| {
        let (to, from) = (edges_to(node, 1 - task, MANY), edges_from(node, 1 - task, MANY));
        let (out, back) = (node.batch(to).expect("usable"), node.batch(from).expect("usable"));
        let mut received = Vec::new();
        let mut most = 0;
        for n in 0..STEPS {
            let step = begin(node, n);
            out.send(&step, tensors(node, n, MANY)).expect("sent");
            back.recv_many(&step, SOON, &mut received).expect("received");
            check(&received, n);
            if n > 0 {
                node.cleanup(n - 1);
            }
            let allocated = node.pool().stats().allocated;
            // The tensors of both sides in two steps, in blocks of 64 bytes and more.
            most = most.max(allocated);
        }
        received.clear();
        let counted = node.counters();
        assert_eq!(counted.get(Counter::TensorsReceived), STEPS * MANY as u64);
        assert!(most < 16 << 20, "{most} bytes were in use at a time");
        println!("{} slots for {} messages", slots(node), counted.get(Counter::MessagesSent));
        assert!(slots(node) < counted.get(Counter::MessagesSent) / 4);
    });
}

/// The receiver makes no progress meanwhile. Each value takes a record, and a loan or an
/// offer.
#[test]
fn a_sender_may_run_ahead_by_every_window_of_a_thousand_edges() {
    const EDGES: usize = 1000;
    /// Steps in which the windows grow, one after the other.
    const FIRST: u64 = 20;
    /// Steps that are sent before any of them is received.
    const AHEAD: u64 = 16;
    let is_sent = Arc::new(AtomicU64::new(0));
    let settings = [("pool_size", "128MiB"), ("max_outstanding_sends", "100000"), ("max_requests", "100")];
    run(2, &settings, move |node, task| {
        if task == 0 {
            let back = node.edge_from("w", 1, "received").expect("an edge");
            let out = node.batch(edges_to(node, 1, EDGES)).expect("usable");
            for n in 0..FIRST + AHEAD {
                let step = begin(node, n);
                out.send(&step, (0..EDGES).map(|_| filled(node, n))).expect("sent");
                if n < FIRST {
                    step.recv(&back, SOON).expect("the word");
                }
            }
            is_sent.store(1, Ordering::SeqCst);
            return;
        }
        let back = node.edge_to("w", 0, "received").expect("an edge");
        let all = node.batch(edges_from(node, 0, EDGES)).expect("usable");
        let mut received = Vec::new();
        for n in 0..FIRST + AHEAD {
            while n == FIRST && is_sent.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let step = begin(node, n);
            all.recv_many(&step, SOON, &mut received).expect("received");
            assert!(received.iter().all(|value| value.tensor.bytes() == [n as u8; 256]), "step {n}");
            received.clear();
            step.send_dead(&back).expect("sent");
        }
    });
}

/// A tensor of 256 bytes.
fn filled(node: &Node, byte: u64) -> Tensor {
    let mut tensor = node.tensor_within(DType::U8, &[256], SOON).expect("room");
    tensor.bytes_mut().fill(byte as u8);
    tensor.freeze()
}

/// Bytes of the message of a control slot.
const SLOT: u64 = 224 - 1;
/// Bytes of a packed record with a small tensor.
const RECORD: u64 = 1 + 2 + 6 + 2 + 8 + 2 + 8;

/// Runs `body` in `steps` steps, each time when `count` receives of task 1, with known shapes,
/// wait.
fn when_asked(
    settings: &[(&str, &str)],
    steps: u64,
    count: usize,
    body: impl Fn(&Node, &Step, &[Edge]) + Send + Sync + 'static,
) {
    run(2, settings, move |node, task| {
        let counter = |counter| node.counters().get(counter);
        let known = begin(node, 1);
        if task == 0 {
            let edges = edges_to(node, 1, count);
            known.send_all(edges.iter().zip(tensors(node, 1, count))).expect("sent");
            until(node, "the first step", || counter(Counter::TensorsSent) == count as u64);
            for n in 2..2 + steps {
                let step = begin(node, n);
                let ready = node.edge_from("w", 1, "ready").expect("an edge");
                step.recv(&ready, SOON).expect("received");
                // It was sent behind the credit of the step before.
                body(node, &step, &edges);
                until(node, "all leave", || counter(Counter::TensorsSent) >= n * count as u64);
            }
        } else {
            let edges = edges_from(node, 0, count);
            check(&known.recv_all(&borrowed(&edges), SOON).expect("received"), 1);
            for n in 2..2 + steps {
                let step = begin(node, n);
                let pending = step.receive_all(&borrowed(&edges)).within(SOON).begin().expect("begun");
                step.send(&node.edge_to("w", 0, "ready").expect("an edge"), Tensor::empty()).expect("sent");
                check(&pending.wait().expect("received"), n);
            }
        }
    });
}

#[test]
fn small_tensors_of_a_batch_share_slots() {
    if crate::common::calls_for_each_value() {
        return;
    }
    const COUNT: usize = 500;
    when_asked(&[("poll", "inline"), ("pollers", "1")], 3, COUNT, |node, step, edges| {
        let (before, values) = (slots(node), tensors(node, step.id().get(), COUNT));
        step.send_all(edges.iter().zip(values)).expect("sent");
        assert_eq!(slots(node) - before, (COUNT as u64).div_ceil(SLOT / RECORD));
    });
}

#[test]
fn edges_of_a_batch_get_their_credit_together() {
    if crate::common::calls_for_each_value() {
        return;
    }
    const COUNT: usize = 200;
    /// Steps after which each edge is announced, and its window is no small one.
    const FIRST: u64 = 20;
    // A window holds 64 values at most, so each edge needs credit in any 64 steps.
    const STEPS: u64 = 150;
    run(2, &[("poll", "inline"), ("pollers", "1")], |node, task| {
        let other = 1 - task;
        let out = node.batch(edges_to(node, other, COUNT)).expect("usable");
        let back = node.batch(edges_from(node, other, COUNT)).expect("usable");
        // Messages beside records, and credits.
        let counts = || {
            let counted = node.counters();
            let others = counted.get(Counter::MessagesSent) - counted.get(Counter::TensorsSent);
            (others, counted.get(Counter::EdgeCreditsSent))
        };
        let mut before = (0, 0);
        for n in 0..STEPS {
            let step = begin(node, n);
            out.send(&step, tensors(node, n, COUNT)).expect("sent");
            check(&back.recv(&step, SOON).expect("received"), n);
            // The other side has taken the values of the step before.
            if n > 0 {
                node.cleanup(n - 1);
            }
            if n == FIRST {
                before = counts();
            }
        }
        let (messages, credits) = (counts().0 - before.0, counts().1 - before.1);
        println!("{messages} messages for {credits} credits");
        assert!(credits >= 2 * COUNT as u64);
        assert!(messages * 4 <= credits, "{messages} messages for {credits} credits");
    });
}

#[test]
fn a_peer_that_sleeps_is_woken_once_for_a_batch() {
    if crate::common::calls_for_each_value() {
        return;
    }
    const COUNT: usize = 500;
    const STEPS: u64 = 6;
    if writes_bulk() {
        return println!("skipped: of shared memory");
    }
    let woken = Arc::new(AtomicU64::new(0));
    let settings = [("poll", "adaptive"), ("spin_budget", "10us")];
    let sum = woken.clone();
    when_asked(&settings, STEPS, COUNT, move |node, step, edges| {
        let values = tensors(node, step.id().get(), COUNT);
        // Long enough to fall asleep, and less than the 100 ms of a sleep.
        std::thread::sleep(Duration::from_millis(40));
        let before = node.counters().get(Counter::Doorbells);
        step.send_all(edges.iter().zip(values)).expect("sent");
        let rung = node.counters().get(Counter::Doorbells) - before;
        assert!(rung <= 1, "a batch has rung {rung} times");
        sum.fetch_add(rung, Ordering::Relaxed);
    });
    // A sleeper may be polling, or not asleep yet.
    let woken = woken.load(Ordering::Relaxed);
    println!("it slept {woken} times of {STEPS}");
    assert!(woken > 0, "it never slept");
}
