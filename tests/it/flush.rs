//! Waits until what was sent is taken.

use crate::common::{SOON, counting, run, run_each, until, values};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tensorwire::{Counter, Error, Node, Status, Untaken};

const BRIEF: Duration = Duration::from_millis(20);

/// The name of each edge, with the values that wait and that left.
fn counts(untaken: &Untaken) -> Vec<(&str, u64, u64)> {
    untaken.edges.iter().map(|edge| (edge.name(), edge.waiting, edge.left)).collect()
}

fn untaken_of(node: &Node) -> Untaken {
    node.flush(Duration::ZERO).expect("it looks")
}

fn say(node: &Node, said: &AtomicU64, what: u64) {
    said.store(what, Ordering::SeqCst);
    let _ = node.progress();
}

fn hear(node: &Node, said: &AtomicU64, what: u64) {
    until(node, "the other's word", || said.load(Ordering::SeqCst) >= what);
}

#[test]
fn a_flush_waits_until_every_value_is_taken() {
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    const VALUES: u64 = 30;
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 1 {
            let edges = ["x", "y"].map(|name| node.edge_from("w", 0, name).expect("edge"));
            for n in 0..VALUES {
                std::thread::sleep(Duration::from_micros(n * 50));
                let got = edges.each_ref().map(|edge| step.recv(edge, SOON).expect("sent").tensor);
                assert!(got.iter().all(|got| values(got)[0] == n as f32));
                TAKEN.store(n + 1, Ordering::SeqCst);
            }
            return;
        }
        assert!(node.flush(SOON).expect("nothing was sent").is_empty());
        for round in 0..3 {
            for n in 0..VALUES / 3 {
                for name in ["x", "y"] {
                    let edge = node.edge_to("w", 1, name).expect("edge");
                    let len = [9, 60_000][(n % 2) as usize];
                    let value = counting(node, (round * VALUES / 3 + n) as f32, len);
                    step.send(&edge, value).expect("sent");
                }
            }
            let untaken = node.flush(SOON).expect("flushed");
            assert!(untaken.is_empty(), "{untaken}");
            until(node, "the other's count", || TAKEN.load(Ordering::SeqCst) >= (round + 1) * VALUES / 3);
        }
        assert!(node.stop().expect("stopped").is_empty(), "nothing was dropped");
    });
}

#[test]
fn a_flush_that_ends_early_names_the_edges_with_their_values() {
    if crate::common::calls_for_each_value() {
        return;
    }
    static SAID: AtomicU64 = AtomicU64::new(0);
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 1 {
            let x = node.edge_from("w", 0, "x").expect("edge");
            step.recv(&x, SOON).expect("sent");
            say(node, &SAID, 1);
            hear(node, &SAID, 2);
            (0..3).for_each(|_| drop(step.recv(&x, SOON).expect("sent")));
            return hear(node, &SAID, 3);
        }
        let send = |name: &str, count: usize| {
            let edge = node.edge_to("w", 1, name).expect("edge");
            (0..count).for_each(|_| step.send(&edge, counting(node, 0.0, 9)).expect("sent"));
        };
        send("x", 4);
        send("never", 2);
        hear(node, &SAID, 1);
        let began = Instant::now();
        drop(node.flush(BRIEF).expect("it looks"));
        assert!(began.elapsed() >= BRIEF);
        until(node, "the answer of the other", || untaken_of(node).waiting() + untaken_of(node).left() == 5);
        let untaken = untaken_of(node);
        let of_x = untaken.edges.iter().find(|edge| edge.name() == "x").expect("three values are untaken");
        assert_eq!((of_x.waiting + of_x.left, untaken.moving), (3, 0), "{untaken}");
        assert!(of_x.left > 0, "the others have left within the credit: {untaken}");
        assert_eq!(counts(&untaken)[0], ("never", 2, 0));
        assert!(untaken.edges.iter().all(|edge| edge.is_linked && edge.peer().task() == 1), "{untaken}");
        assert_eq!((untaken.waiting() + untaken.left(), untaken.lost()), (5, 0));
        assert!(untaken.to_string().contains("'never' 0:0: 2 wait, 0 left"), "{untaken}");
        let local = node.edge_to("w", 0, "local").expect("edge");
        step.send(&local, counting(node, 0.0, 9)).expect("sent");
        say(node, &SAID, 2);
        until(node, "the end of x", || counts(&untaken_of(node)) == [("local", 1, 0), ("never", 2, 0)]);
        let other = node.step(2).expect("new");
        other.send(&node.edge_to("w", 1, "other").expect("edge"), counting(node, 0.0, 9)).expect("sent");
        step.cleanup();
        let untaken = node.flush(BRIEF).expect("it looks");
        assert_eq!(counts(&untaken), [("other", 1, 0)], "the values of step 1 went with it");
        other.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 9)).expect("sent");
        let dropped = node.stop().expect("stopped");
        assert_eq!(counts(&dropped), [("other", 1, 0), ("x", 0, 1)], "the stop drops both");
        assert!(node.stop().expect("again").is_empty());
        assert!(matches!(node.flush(SOON), Err(Error::Stopped)));
        SAID.store(3, Ordering::SeqCst);
    });
}

#[test]
fn a_flush_reports_the_values_of_a_peer_that_ends_as_lost_and_waits_no_longer() {
    if crate::common::calls_for_each_value() {
        return;
    }
    static SAID: AtomicU64 = AtomicU64::new(0);
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 1 {
            let x = node.edge_from("w", 0, "x").expect("edge");
            step.recv(&x, SOON).expect("sent");
            hear(node, &SAID, 1);
            until(node, "the flush", || node.counters().get(Counter::EdgeCreditsSent) > 0);
            return drop(node.fail("on purpose").expect("ended"));
        }
        let x = node.edge_to("w", 1, "x").expect("edge");
        (0..9).for_each(|_| step.send(&x, counting(node, 0.0, 9)).expect("sent"));
        say(node, &SAID, 1);
        let began = Instant::now();
        let untaken = node.flush(SOON).expect("flushed");
        assert!(began.elapsed() < SOON / 2, "it waits for nobody");
        let [edge] = &untaken.edges[..] else { panic!("{untaken}") };
        assert!(!edge.is_linked && edge.left == 0 && edge.lost >= 1, "{untaken}");
        assert_eq!(edge.lost + edge.waiting, 8, "{untaken}");
        assert!(!untaken.is_empty(), "{untaken}");
        let dropped = node.fail("it is over").expect("ended");
        assert_eq!(dropped.waiting(), edge.waiting, "the losses were told");
    });
}

#[test]
fn a_flush_does_not_wait_for_aborted_steps() {
    run(2, &[], |node, task| {
        let sequence = node.sequence(1 << 40);
        if task == 1 {
            return;
        }
        let steps = [0, 1].map(|n| node.step(sequence.step(n)).expect("new"));
        let x = node.edge_to("w", 1, "x").expect("edge");
        steps.iter().for_each(|step| step.send(&x, counting(node, 0.0, 9)).expect("sent"));
        sequence.abort_from(&steps[0], Status::new(tensorwire::Code::Internal, "no")).expect("aborted");
        let untaken = node.flush(SOON).expect("flushed");
        assert!(untaken.is_empty(), "{untaken}");
    });
}

/// The receiver has posted receives for some of the values, and polls again after the stop has
/// begun.
#[test]
fn what_waits_in_a_link_leaves_before_a_stop() {
    static SAID: AtomicU64 = AtomicU64::new(0);
    const EDGES: usize = 60;
    let depth = if crate::common::over_verbs() { "rdma_qp_queue_depth" } else { "queue_depth" };
    let inline_receiver = |task| match task {
        0 => vec![(depth, "16"), ("stop_timeout", "10s")],
        _ => vec![(depth, "16"), ("poll", "inline"), ("pollers", "1")],
    };
    run_each(2, inline_receiver, |node, task| {
        let step = node.step(1).expect("new");
        let names: Vec<_> = (0..EDGES).map(|at| format!("x/{at}")).collect();
        if task == 1 {
            let edges = names.iter().map(|name| node.edge_from("w", 0, name).expect("edge"));
            let edges: Vec<_> = edges.collect();
            // All edges are announced then.
            edges.iter().for_each(|edge| drop(step.recv(edge, SOON).expect("sent")));
            say(node, &SAID, 1);
            let began = Instant::now();
            while SAID.load(Ordering::SeqCst) < 2 {
                assert!(began.elapsed() < SOON);
                std::thread::sleep(BRIEF);
            }
            std::thread::sleep(10 * BRIEF);
            for (at, edge) in edges.iter().enumerate() {
                let got = step.recv(edge, SOON).unwrap_or_else(|error| panic!("value {at}: {error}"));
                assert_eq!(values(&got.tensor)[0], at as f32);
            }
            return;
        }
        let edges: Vec<_> = names.iter().map(|name| node.edge_to("w", 1, name).expect("edge")).collect();
        let send_all = || {
            for (at, edge) in edges.iter().enumerate() {
                // As long that records share no slot.
                step.send(edge, counting(node, at as f32, 30)).expect("sent");
            }
        };
        send_all();
        hear(node, &SAID, 1);
        send_all();
        if !crate::common::over_grpc() {
            until(node, "more values than receives", || node.counters().get(Counter::PostsQueued) > 0);
        }
        SAID.store(2, Ordering::SeqCst);
        node.stop().expect("stopped");
    });
}

#[test]
fn a_stop_does_not_wait_for_the_return_of_a_peer_that_is_gone() {
    static SAID: AtomicU64 = AtomicU64::new(0);
    let timeout = Duration::from_secs(10);
    run(3, &[("stop_timeout", "10s")], move |node, task| {
        let is_gone = |peer: u32| {
            let peers = node.peers();
            let report = peers.iter().find(|report| report.task.task() == peer).expect("a peer");
            report.state.error().is_some()
        };
        match task {
            0 => {
                let step = node.step(1).expect("new");
                let edge = node.edge_to("w", 2, "never").expect("edge");
                (0..3).for_each(|_| step.send(&edge, counting(node, 0.0, 9)).expect("sent"));
                say(node, &SAID, 1);
                until(node, "the loss of the receiver", || is_gone(2));
                let began = Instant::now();
                let dropped = node.stop().expect("stopped");
                assert!(began.elapsed() < timeout / 2, "{:?}: {dropped}", began.elapsed());
                assert_eq!(counts(&dropped), [("never", 3, 0)]);
            }
            1 => until(node, "the stop of the sender", || is_gone(0)),
            _ => {
                // A send to a peer that is gone is an error.
                hear(node, &SAID, 1);
                drop(node.fail("on purpose").expect("ended"));
            }
        }
    });
}
