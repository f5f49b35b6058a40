//! A node whose poll mode nobody has set.

use crate::common::{SOON, counting, run, values};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tensorwire::{DType, Error};

/// Values of an edge that one send after the other puts there: more than its window holds.
const SMALL: usize = 300;
/// Floats of a tensor that its receiver copies, or grants a destination for.
const LARGE: usize = 250_000;
/// The time that the receiver has from the last send on. The tests assert five times as much.
const BOUND: Duration = Duration::from_millis(400);

/// Computes without a call, until `done` or for as long as a test may take.
fn compute_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() && start.elapsed() < SOON {
        spin_loop();
    }
}

#[test]
fn a_sender_that_computes_without_a_call_delivers_at_once() {
    let received = Arc::new(AtomicUsize::new(0));
    let sent_at: Arc<Mutex<Option<Instant>>> = Arc::default();
    run(2, &[("poll", "auto")], move |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            // The receiver has announced the edges, and waits.
            let ready = node.edge_from("w", 1, "ready").expect("edge");
            step.recv(&ready, SOON).expect("received");
            let small = node.edge_to("w", 1, "small").expect("edge");
            for number in 0..SMALL {
                step.send(&small, counting(node, number as f32, 1)).expect("sent");
            }
            let large = node.edge_to("w", 1, "large").expect("edge");
            for number in 0..3 {
                step.send(&large, counting(node, number as f32, LARGE)).expect("sent");
            }
            *sent_at.lock().expect("unpoisoned") = Some(Instant::now());
            compute_until(|| received.load(Ordering::SeqCst) == SMALL + 3);
            return;
        }
        step.send(&node.edge_to("w", 0, "ready").expect("edge"), counting(node, 0.0, 1)).expect("sent");
        let small = node.edge_from("w", 0, "small").expect("edge");
        for number in 0..SMALL {
            let got = step.recv(&small, SOON).expect("received");
            assert_eq!(values(&got.tensor), [number as f32]);
            received.fetch_add(1, Ordering::SeqCst);
        }
        let large = node.edge_from("w", 0, "large").expect("edge");
        for number in 0..3 {
            let got = step.recv(&large, SOON).expect("received");
            assert_eq!(values(&got.tensor)[LARGE - 1], (number + LARGE - 1) as f32);
            received.fetch_add(1, Ordering::SeqCst);
        }
        // The last one may have come before the sender has noted the time.
        let took = sent_at.lock().expect("unpoisoned").map_or(Duration::ZERO, |at| at.elapsed());
        println!("the last of {SMALL} small and 3 large tensors came {took:?} after the last send");
        assert!(took < 5 * BOUND, "{took:?}");
    });
}

#[test]
fn a_tensor_that_is_sent_between_computations_arrives_during_the_next_one() {
    const STEPS: usize = 20;
    const COMPUTES: Duration = Duration::from_millis(50);
    let received = Arc::new(AtomicUsize::new(0));
    let sent_at: Arc<[Mutex<Option<Instant>>]> = (0..STEPS).map(|_| Mutex::default()).collect();
    run(2, &[("poll", "auto")], move |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let edge = node.edge_to("w", 1, "x").expect("edge");
            for (number, sent_at) in sent_at.iter().enumerate() {
                let tensor = counting(node, number as f32, LARGE);
                *sent_at.lock().expect("unpoisoned") = Some(Instant::now());
                step.send(&edge, tensor).expect("sent");
                let start = Instant::now();
                compute_until(|| start.elapsed() >= COMPUTES);
            }
            compute_until(|| received.load(Ordering::SeqCst) == STEPS);
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        let sent = |number: usize| *sent_at[number].lock().expect("unpoisoned");
        let mut took: Vec<_> = (0..STEPS)
            .map(|number| {
                let got = step.recv(&edge, SOON).expect("received");
                let is_during = number + 1 == STEPS || sent(number + 1).is_none();
                assert_eq!(values(&got.tensor)[0], number as f32);
                received.fetch_add(1, Ordering::SeqCst);
                (sent(number).expect("it was sent").elapsed(), is_during)
            })
            .collect();
        took.sort_unstable();
        let (median, most) = (took[STEPS / 2].0, took[STEPS - 1].0);
        let during = took.iter().filter(|(_, is_during)| *is_during).count();
        println!("a tensor came {median:?} after its send in the median, {most:?} at most");
        println!("{during} of {STEPS} tensors came before the next send");
        assert!(during > STEPS / 2, "the others left with the next call: {took:?}");
    });
}

#[test]
fn the_pool_of_a_sender_that_computes_does_not_run_dry() {
    const STEPS: usize = 40;
    let received = Arc::new(AtomicUsize::new(0));
    run(2, &[("poll", "auto")], move |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let edge = node.edge_to("w", 1, "x").expect("edge");
            // The pool of 8 MiB holds eight of these tensors.
            for number in 0..STEPS {
                let tensor = node.tensor(DType::F32, &[LARGE as u64]).expect("the earlier ones were taken");
                step.send(&edge, tensor.freeze()).expect("sent");
                // As long as the receiver keeps up, and no longer.
                compute_until(|| received.load(Ordering::SeqCst) + 2 > number);
            }
            compute_until(|| received.load(Ordering::SeqCst) == STEPS);
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        for _ in 0..STEPS {
            step.recv(&edge, SOON).expect("received");
            received.fetch_add(1, Ordering::SeqCst);
        }
    });
}

#[test]
fn a_cleanup_is_told_while_its_process_computes() {
    let told = Arc::new(AtomicUsize::new(0));
    run(2, &[("poll", "auto")], move |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let ready = node.edge_from("w", 1, "ready").expect("edge");
            step.recv(&ready, SOON).expect("received");
            // The background poller sleeps, after a call and after none.
            for id in [1, 2] {
                std::thread::sleep(Duration::from_millis(20));
                node.step(id).expect("live");
                node.cleanup(id);
                compute_until(|| told.load(Ordering::SeqCst) >= id as usize);
            }
            return;
        }
        let second = node.step(2).expect("new");
        let waits = second.receive(&node.edge_from("w", 0, "never").expect("edge")).begin().expect("begun");
        let first = step.receive(&node.edge_from("w", 0, "never").expect("edge")).begin().expect("begun");
        step.send(&node.edge_to("w", 0, "ready").expect("edge"), counting(node, 0.0, 1)).expect("sent");
        for pending in [first, waits] {
            let start = Instant::now();
            let error = pending.wait_timeout(SOON / 2).expect_err("the step ends at the sender");
            assert!(
                !matches!(error, Error::DeadlineExceeded { .. }),
                "not told within {:?}",
                start.elapsed()
            );
            told.fetch_add(1, Ordering::SeqCst);
        }
    });
}
