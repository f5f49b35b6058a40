//! What many edges with a `Standing`, and those of large tensors, cost in messages.

use super::counts::settled;
use super::{BASE, begin, until_posted};
use crate::common::{SOON, calls_for_each_value, cluster, member, over_tcp, until, values, writes_bulk};
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
}

/// The counters of sender and receiver in the second half of the steps.
fn run(program: Edges) -> [Snapshot; 2] {
    let Edges { edges, elements, steps } = program;
    let cluster = cluster(2);
    let (tell, told) = channel();
    let ended = Arc::new(AtomicU64::new(0));
    let steps_received = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..2_usize)
        .map(|task| {
            let (cluster, tell, ended) = (cluster.clone(), tell.clone(), ended.clone());
            let steps_received = steps_received.clone();
            std::thread::spawn(move || {
                let node = member(&cluster, task as u32).start().expect("starts");
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
                            until_posted(&node, n * edges as u64, n * edges as u64);
                        }
                        before = settled(&node);
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
                    let all = 2 * steps * edges as u64;
                    until_posted(&node, all, all);
                }
                tell.send((task, settled(&node).since(&before))).expect("somebody counts");
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

/// Each tensor costs its record and its data operation, and an offered one its grant. The windows
/// begin with 16 values and hold 64 after the first credit.
fn check(program: Edges) {
    if calls_for_each_value() {
        return;
    }
    let [sender, receiver] = run(program);
    let tensors = program.edges as u64 * program.steps;
    assert_eq!(sender.get(Counter::WritesPosted), tensors, "{sender}");
    // The ends of the steps are told one by one or together. Those of the first half may be told in
    // the second.
    let ends = sender.get(Counter::StepsOverSent);
    assert_eq!(sender.get(Counter::MessagesSent), tensors + ends, "{sender}");
    assert!((1..=program.steps + 8).contains(&ends), "{sender}");
    let grants = if writes_bulk() { tensors } else { 0 };
    let credits = receiver.get(Counter::MessagesSent) - grants;
    println!("{} edges: {credits} messages of credit for {tensors} tensors", program.edges);
    let most = program.edges as u64 * (2 * program.steps).div_ceil(32);
    assert!(credits <= most, "{credits} messages of credit");
}

#[test]
fn two_hundred_edges_cost_few_messages() {
    // Over TCP shorter tensors are in their records.
    let elements = if over_tcp() { 8400 } else { 100 };
    check(Edges { edges: 200, elements, steps: 24 });
}

#[test]
fn eight_edges_of_64_kib_cost_few_messages() {
    check(Edges { edges: 8, elements: 16_384, steps: 48 });
}

#[test]
fn an_edge_of_400_kb_costs_few_messages() {
    check(Edges { edges: 1, elements: 100_000, steps: 48 });
}
