//! Edges with a `Standing` whose requests together exceed a limit.

use super::{BASE, begin, until_posted};
use crate::common::{SOON, cluster, lacks_requests, member, over_verbs, pollers, until, values};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use tensorwire::{Counter, DType, Edge, Node, Snapshot};

/// Several edges with a window of 16, received in each step.
#[derive(Clone, Copy)]
struct Edges {
    edges: usize,
    elements: usize,
    steps: u64,
    /// `max_requests` of the sender and of the receiver, if set.
    max_requests: [&'static str; 2],
}

const EDGES: Edges = Edges { edges: 1, elements: 100, steps: 48, max_requests: ["4096"; 2] };

/// The counters of sender and receiver, in all and in the second half of the steps.
fn run(program: Edges) -> [[Snapshot; 2]; 2] {
    let Edges { edges, elements, steps, max_requests } = program;
    let cluster = cluster(2);
    let (tell, told) = channel();
    let ended = Arc::new(AtomicU64::new(0));
    let steps_received = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..2_usize)
        .map(|task| {
            let (cluster, tell, ended) = (cluster.clone(), tell.clone(), ended.clone());
            let steps_received = steps_received.clone();
            std::thread::spawn(move || {
                let builder = member(&cluster, task as u32).set("max_requests", max_requests[task]);
                let node = builder.start().expect("starts");
                node.join().expect("joined");
                let sequence = node.sequence(BASE);
                let edge = |e| match task {
                    0 => node.edge_to("w", 1, &format!("x{e}")),
                    _ => node.edge_from("w", 0, &format!("x{e}")),
                };
                let all: Vec<Edge> = (0..edges).map(|e| edge(e).expect("an edge")).collect();
                let standing = |edge| node.standing(edge, sequence, 16).expect("new");
                let _standing: Vec<_> = all.iter().filter(|_| task == 1).map(standing).collect();
                let mut before = Snapshot::ZERO;
                for n in 0..2 * steps {
                    if n == steps {
                        if task == 0 {
                            until_posted(&node, n * edges as u64);
                        }
                        before = node.counters();
                    }
                    match task {
                        0 => send_all(&node, &all, n, elements),
                        _ => receive_all(&node, &all, n, elements),
                    }
                    steps_received.fetch_add(task as u64, Ordering::Relaxed);
                    if n > 0 {
                        // A cleanup at the sender drops values that were not received.
                        until(&node, "the receiver", || steps_received.load(Ordering::Relaxed) >= n);
                        node.cleanup(sequence.step(n - 1));
                    }
                }
                if task == 0 {
                    until_posted(&node, 2 * steps * edges as u64);
                }
                let in_all = node.counters();
                let late = in_all.since(&before);
                tell.send((task, [in_all, late])).expect("somebody counts");
                // A value that has arrived and was not taken is an orphan once its sender leaves,
                // and a receiver that has left hears no ends of steps.
                ended.fetch_add(1, Ordering::Relaxed);
                until(&node, "both ends", || ended.load(Ordering::Relaxed) == 2);
                node.stop().expect("stopped");
            })
        })
        .collect();
    drop(tell);
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let mut counts: Vec<_> = told.iter().collect();
    counts.sort_by_key(|(task, _)| *task);
    [counts.remove(0).1, counts.remove(0).1]
}

fn send_all(node: &Node, edges: &[Edge], n: u64, elements: usize) {
    let step = begin(node, node.sequence(BASE), n);
    for edge in edges {
        // A sender that runs ahead of its receiver waits for its memory.
        let mut tensor = node.tensor_within(DType::F32, &[elements as u64], SOON).expect("room");
        tensor.as_mut_slice::<f32>().expect("f32").fill(n as f32);
        step.send(edge, tensor.freeze()).expect("sent");
    }
    let all = (n + 1) * edges.len() as u64;
    until(node, "they leave", || node.counters().get(Counter::TensorsSent) >= all);
}

fn receive_all(node: &Node, edges: &[Edge], n: u64, elements: usize) {
    let step = begin(node, node.sequence(BASE), n);
    for edge in edges {
        let got = step.recv(edge, SOON).unwrap_or_else(|error| panic!("step {n} of {edge}: {error}"));
        let got = values(&got.tensor);
        assert_eq!((got.len(), got[0]), (elements, n as f32), "step {n} of {edge}");
    }
}

/// In the end each edge has a window of `window` requests, its share of the limit. Edge windows
/// have no such limit: they begin with 16 values and hold 64 after the first credit.
fn check(program: Edges, window: u64) {
    let [[_, sender], [_, receiver]] = run(program);
    let tensors = program.edges as u64 * program.steps;
    println!(
        "{} edges: {} messages for {tensors} tensors, {} windows, {} standing requests",
        program.edges,
        receiver.get(Counter::MessagesSent) + sender.get(Counter::MessagesSent),
        receiver.get(Counter::StandingMessages),
        receiver.get(Counter::StandingRequests),
    );
    assert_eq!(receiver.get(Counter::StandingStepsMissed), 0, "{receiver}");
    assert_eq!(sender.get(Counter::WritesPosted), tensors, "{sender}");
    let window = match over_verbs() {
        true => {
            assert_eq!(receiver.get(Counter::StandingClaimed), tensors, "each edge has its part: {receiver}");
            // The receiver may end, and cancel its standing requests, at the same time as its
            // sender.
            assert_eq!(sender.get(Counter::MessagesSent), sender.get(Counter::CancelsReceived), "{sender}");
            window
        }
        false => {
            // A record for each tensor, and the ends of the steps, one by one or together. Those of
            // the first half may be told in the second.
            let ends = sender.get(Counter::StepsOverSent);
            assert_eq!(sender.get(Counter::MessagesSent), tensors + ends, "{sender}");
            assert!((1..=program.steps + 8).contains(&ends), "{sender}");
            32
        }
    };
    let messages = receiver.get(Counter::MessagesSent);
    let most = program.edges as u64 * (2 * program.steps).div_ceil(window);
    assert!(messages <= most, "{messages} messages");
}

#[test]
fn two_hundred_edges_share_the_requests_of_a_link() {
    // Half of `max_requests` (4,096).
    check(Edges { edges: 200, steps: 24, ..EDGES }, 10);
}

#[test]
fn edges_share_the_pool() {
    // A quarter of 8 MiB, shared among the pollers: eight tensors of 64 KB per edge.
    check(Edges { edges: 8, elements: 16_384, ..EDGES }, 4 / pollers() as u64);
}

#[test]
fn an_edge_with_room_for_a_few_steps_has_a_window_of_as_many() {
    // A quarter of 8 MiB, shared among the pollers: five tensors of 400 KB with one poller.
    check(Edges { elements: 100_000, ..EDGES }, (2 << 20) / pollers() as u64 / 400_000);
}

#[test]
fn an_edge_without_room_is_received_as_any_other_and_counted() {
    if lacks_requests() {
        return;
    }
    // A quarter of 8 MiB is less than one tensor.
    let [_, [_, receiver]] = run(Edges { elements: 600_000, steps: 10, ..EDGES });
    assert_eq!(receiver.get(Counter::StandingStepsMissed), 10, "{receiver}");
    assert_eq!(receiver.get(Counter::StandingRequests), 0, "{receiver}");
    assert_eq!(receiver.get(Counter::MessagesSent), 10, "{receiver}");
}

#[test]
fn a_sender_with_little_room_fails_no_receive() {
    if lacks_requests() {
        return;
    }
    let [[in_all, sender], [_, receiver]] = run(Edges { edges: 4, max_requests: ["16", "4096"], ..EDGES });
    assert!(in_all.get(Counter::ErrorsSent) > 0, "nothing was refused: {in_all}");
    assert!(sender.get(Counter::ErrorsSent) <= 16, "it is asked for too much for ever: {sender}");
    assert!(receiver.get(Counter::StandingClaimed) > 100, "{receiver}");
}
