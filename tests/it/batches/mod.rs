//! Batches, with every member in this process and real shared memory.

mod callbacks;
mod cancels;
mod failures;
mod given;
mod limits;
mod many;
mod pollers;
mod walks;

use crate::common::{SOON, counting, run, until, values};
use std::time::Duration;
use tensorwire::{Counter, DType, Delivery, Edge, EdgeReport, EdgeSide, Error, Node, Step, Tensor, Value};

/// The names of `count` edges.
fn names(count: usize) -> impl Iterator<Item = String> + Clone {
    (0..count).map(|at| format!("g/{at}"))
}

fn edges_to(node: &Node, task: u32, count: usize) -> Vec<Edge> {
    names(count).map(|name| node.edge_to("w", task, &name).expect("an edge")).collect()
}

fn edges_from(node: &Node, task: u32, count: usize) -> Vec<Edge> {
    names(count).map(|name| node.edge_from("w", task, &name).expect("an edge")).collect()
}

fn borrowed(edges: &[Edge]) -> Vec<&Edge> {
    edges.iter().collect()
}

/// `count` tensors with two elements. The first element names the step and the edge.
fn tensors(node: &Node, step: u64, count: usize) -> Vec<Tensor> {
    (0..count).map(|at| counting(node, first_of(step, at), 2)).collect()
}

fn first_of(step: u64, at: usize) -> f32 {
    (step * 100_000 + at as u64) as f32
}

fn check(received: &[Delivery<Tensor>], step: u64) {
    for (at, delivery) in received.iter().enumerate() {
        let first = first_of(step, at);
        assert_eq!(values(&delivery.tensor), [first, first + 1.0], "edge {at} of step {step}");
    }
}

fn begin(node: &Node, n: u64) -> Step {
    node.step(n).expect("usable")
}

/// The control slots that a node has posted.
fn slots(node: &Node) -> u64 {
    let counted = node.counters();
    let [sent, packed, packs] =
        [Counter::MessagesSent, Counter::MessagesPacked, Counter::PacksSent].map(|it| counted.get(it));
    sent - packed + packs
}

#[test]
fn values_come_in_the_order_of_the_edges_whatever_was_sent_first() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        match task {
            0 => {
                let edges = edges_to(node, 1, 5);
                let values = tensors(node, 1, 5);
                step.send_all(edges.iter().zip(values).rev()).expect("sent");
            }
            _ => {
                let edges = edges_from(node, 0, 5);
                let received = step.recv_all(&borrowed(&edges), SOON).expect("received");
                assert_eq!(received.len(), 5);
                check(&received, 1);
            }
        }
    });
}

#[test]
fn a_batch_goes_to_several_peers_and_to_its_own_process() {
    run(3, &[], |node, task| {
        let step = begin(node, 1);
        let to: Vec<Edge> = (0..3).map(|to| node.edge_to("w", to, "x").expect("an edge")).collect();
        let from: Vec<Edge> = (0..3).map(|from| node.edge_from("w", from, "x").expect("an edge")).collect();
        let value = |to: usize| counting(node, first_of(u64::from(task), to), 2);
        let pending = step.receive_all(&borrowed(&from)).within(SOON).begin().expect("begun");
        step.send_all(to.iter().enumerate().map(|(at, edge)| (edge, value(at)))).expect("sent");
        for (from, delivery) in pending.wait().expect("received").iter().enumerate() {
            assert_eq!(values(&delivery.tensor)[0], first_of(from as u64, task as usize));
        }
    });
}

#[test]
fn an_edge_that_is_there_twice_takes_two_values_in_order() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        let own = node.edge_to("w", task, "own").expect("an edge");
        match task {
            0 => {
                let edge = node.edge_to("w", 1, "x").expect("an edge");
                let values = (0..4).map(|n| (&edge, counting(node, n as f32, 1)));
                step.send_all(values).expect("sent");
            }
            _ => {
                let edge = node.edge_from("w", 0, "x").expect("an edge");
                let received = step.recv_all(&[&edge, &edge, &edge, &edge], SOON).expect("received");
                let got: Vec<f32> = received.iter().map(|delivery| values(&delivery.tensor)[0]).collect();
                assert_eq!(got, [0.0, 1.0, 2.0, 3.0]);
            }
        }
        let twice = node.batch([own.clone(), own.clone()]).expect("usable");
        twice.send(&step, [counting(node, 7.0, 1), counting(node, 8.0, 1)]).expect("sent");
        let received = twice.recv(&step, SOON).expect("received");
        assert_eq!([0, 1].map(|at| values(&received[at].tensor)[0]), [7.0, 8.0], "within the process too");
    });
}

#[test]
fn dead_values_are_among_the_others() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            let edges = edges_to(node, 1, 3);
            let value = |at: usize| match at {
                1 => Value::Dead,
                _ => counting(node, first_of(1, at), 2).into(),
            };
            step.send_all(edges.iter().enumerate().map(|(at, edge)| (edge, value(at)))).expect("sent");
            step.send_all(edges.iter().enumerate().map(|(at, edge)| (edge, value(at)))).expect("sent");
        } else {
            let edges = edges_from(node, 0, 3);
            let received = step.recv_all(&borrowed(&edges), SOON).expect("received");
            assert_eq!([0, 1, 2].map(|at| received[at].is_dead), [false, true, false]);
            let error = step.fetch(&edges, SOON).expect_err("one is dead").to_string();
            assert!(error.contains("g/1") && error.contains("dead"), "{error}");
        }
    });
}

#[test]
fn a_batch_is_used_step_after_step_and_its_list_too() {
    run(2, &[], |node, task| {
        let (to, from) = (edges_to(node, 1 - task, 40), edges_from(node, 1 - task, 40));
        let (out, back) = (node.batch(to).expect("usable"), node.batch(from).expect("usable"));
        assert_eq!(back.edges().len(), 40);
        let mut received = Vec::new();
        for n in 0..30 {
            let step = begin(node, n);
            out.send(&step, tensors(node, n, 40)).expect("sent");
            back.recv_many(&step, SOON, &mut received).expect("received");
            assert_eq!(received.len(), 40);
            check(&received, n);
            if n > 0 {
                node.cleanup(n - 1);
            }
        }
    });
}

#[test]
fn large_tensors_of_a_batch_are_written_each_on_its_own() {
    run(2, &[("pool_size", "32MiB")], |node, task| {
        for n in 0..4 {
            let step = begin(node, n);
            if task == 0 {
                let edges = edges_to(node, 1, 8);
                let large = |at: usize| match at % 2 {
                    0 => counting(node, first_of(n, at), 20_000),
                    _ => counting(node, first_of(n, at), 2),
                };
                step.send_all(edges.iter().enumerate().map(|(at, edge)| (edge, large(at)))).expect("sent");
            } else {
                let edges = edges_from(node, 0, 8);
                for (at, delivery) in step.recv_all(&borrowed(&edges), SOON).expect("came").iter().enumerate()
                {
                    let got = values(&delivery.tensor);
                    let len = if at % 2 == 0 { 20_000 } else { 2 };
                    assert_eq!((got.len(), got[0]), (len, first_of(n, at)));
                    assert_eq!(got[len - 1], first_of(n, at) + (len - 1) as f32);
                }
            }
        }
    });
}

#[test]
fn batches_of_edges_with_a_standing_request_come_step_after_step() {
    const STEPS: u64 = 40;
    run(2, &[], |node, task| {
        let sequence = node.sequence(1 << 40);
        let from = edges_from(node, 0, 6);
        let _standing: Vec<_> = match task {
            0 => Vec::new(),
            _ => from.iter().map(|edge| node.standing(edge, sequence, 8).expect("new")).collect(),
        };
        let out = node.batch(edges_to(node, 1, 6)).expect("usable");
        for n in 0..STEPS {
            let step = begin(node, sequence.step(n).get());
            let go = node.edge_from("w", 1, "go");
            if task == 0 {
                out.send(&step, tensors(node, n, 6)).expect("sent");
                // The receiver is less than a window behind.
                step.recv(&go.expect("an edge"), SOON).expect("received");
            } else {
                check(&step.recv_all(&borrowed(&from), SOON).expect("received"), n);
                step.send(&node.edge_to("w", 0, "go").expect("an edge"), Tensor::empty()).expect("sent");
            }
            node.cleanup(sequence.step(n).get().saturating_sub(4));
        }
    });
}

#[test]
fn a_batch_stands_by_one_call_and_for_as_long_as_it_exists() {
    if crate::common::calls_for_each_value() {
        return;
    }
    const STEPS: u64 = 20;
    run(2, &[], |node, task| {
        let sequence = node.sequence(1 << 40);
        if task == 0 {
            let out = node.batch(edges_to(node, 1, 6)).expect("usable");
            let refused = node.batch(out.edges().to_vec()).expect("usable").standing(sequence, 8);
            assert!(matches!(refused, Err(Error::WrongEnd { .. })), "{refused:?}");
            for n in 0..STEPS {
                out.send(&begin(node, sequence.step(n).get()), tensors(node, n, 6)).expect("sent");
            }
            return;
        }
        let (mut edges, own) = (edges_from(node, 0, 6), node.edge_to("w", 1, "own").expect("an edge"));
        let taken = node.standing(&edges[4], sequence, 8).expect("new");
        let batch = || node.batch(edges.clone()).expect("usable");
        assert!(matches!(batch().standing(sequence, 8), Err(Error::StandingExists { .. })));
        drop(taken);
        assert!(matches!(batch().standing(sequence, 257), Err(Error::WindowTooLong { .. })));
        let weights = batch().standing(sequence, 8).expect("none of them stands any more");
        assert!(matches!(batch().standing(sequence, 8), Err(Error::StandingExists { .. })));
        let holds = |edge: &EdgeReport| edge.side == EdgeSide::Receiver && edge.held > 0;
        until(node, "values before any receive", || {
            node.edges(100).expect("usable").edges.iter().filter(|edge| holds(edge)).count() == 6
        });
        for n in 0..STEPS {
            let step = begin(node, sequence.step(n).get());
            check(&weights.recv(&step, SOON).expect("received"), n);
        }
        drop(weights);
        edges.extend([own.clone(), own]);
        let batch = || node.batch(edges.clone()).expect("usable");
        let once = batch().standing(sequence, 8).expect("an edge that is twice there");
        let next = node.sequence(1 << 41);
        let _both = once.standing(next, 8).expect("another sequence");
        for sequence in [sequence, next] {
            assert!(matches!(batch().standing(sequence, 8), Err(Error::StandingExists { .. })));
        }
    });
}

#[test]
fn dropping_pending_receives_cancels_them_and_what_comes_is_for_the_next() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        let go = node.edge_to("w", 0, "go").expect("an edge");
        if task == 1 {
            let edges = edges_from(node, 0, 20);
            let pending = step.receive_all(&borrowed(&edges)).within(SOON).begin().expect("begun");
            assert_eq!((pending.len(), pending.is_done(), pending.have_all_ended()), (20, false, false));
            drop(pending);
            step.send(&go, Tensor::empty()).expect("sent");
            check(&step.recv_all(&borrowed(&edges), SOON).expect("received"), 1);
        } else {
            let go = node.edge_from("w", 1, "go").expect("an edge");
            step.recv(&go, SOON).expect("received");
            let edges = edges_to(node, 1, 20);
            step.send_all(edges.iter().zip(tensors(node, 1, 20))).expect("sent");
        }
    });
}

#[test]
fn an_empty_batch_is_no_work() {
    run(1, &[], |node, _| {
        let step = begin(node, 1);
        step.send_all(std::iter::empty::<(&Edge, Tensor)>()).expect("nothing to send");
        assert!(step.recv_all::<Edge>(&[], Duration::ZERO).expect("nothing to wait for").is_empty());
        assert!(
            node.batch([]).expect("usable").receive(&step).within(SOON).begin().expect("begun").is_empty()
        );
    });
}
