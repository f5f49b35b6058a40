//! Batches that are received into tensors of the caller.

use super::*;
use crate::common::until;
use std::sync::mpsc::channel;
use std::time::Instant;
use tensorwire::TensorMut;

/// `count` tensors with two elements, which are -1.
pub(super) fn given(node: &Node, count: usize) -> Vec<TensorMut> {
    let one = |_| {
        let mut tensor = node.tensor(DType::F32, &[2]).expect("room");
        tensor.as_mut_slice::<f32>().expect("f32").fill(-1.0);
        tensor
    };
    (0..count).map(one).collect()
}

pub(super) fn contents(tensor: &TensorMut) -> Vec<f32> {
    tensor.as_slice::<f32>().expect("f32").to_vec()
}

#[test]
fn each_tensor_is_filled_from_its_edge_and_comes_back_step_after_step() {
    const COUNT: usize = 20;
    // A batch may have more receives than `max_requests`.
    for settings in [&[][..], &[("max_requests", "3")]] {
        run(2, settings, |node, task| {
            let own = node.edge_to("w", 1, "own").expect("an edge");
            if task == 0 {
                let out = node.batch(edges_to(node, 1, COUNT)).expect("usable");
                (0..5).for_each(|n| out.send(&begin(node, n), tensors(node, n, COUNT)).expect("sent"));
                return;
            }
            let mut edges = edges_from(node, 0, COUNT);
            edges.push(own.clone());
            let batch = node.batch(edges).expect("usable");
            let mut mine = given(node, COUNT + 1);
            for n in 0..5 {
                let step = begin(node, n);
                step.send(&own, counting(node, first_of(n, COUNT), 2)).expect("sent");
                let lie = |tensors: &[TensorMut]| -> Vec<_> {
                    tensors.iter().map(|tensor| tensor.as_slice::<f32>().expect("f32").as_ptr()).collect()
                };
                let before = lie(&mine);
                let filled = batch.receive(&step).within(SOON).into(mine).wait().expect("received");
                mine = filled.into_iter().map(|delivery| delivery.tensor).collect();
                assert_eq!(lie(&mine), before, "they are the same tensors in the same order");
                for (at, tensor) in mine.iter().enumerate() {
                    assert_eq!(contents(tensor), [first_of(n, at), first_of(n, at) + 1.0]);
                }
            }
        });
    }
}

#[test]
fn a_misfit_fails_alone_and_both_tensors_go_back() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            step.send_all(edges_to(node, 1, 4).iter().zip(tensors(node, 1, 4))).expect("sent");
            return;
        }
        let mut edges = edges_from(node, 0, 4);
        let own = node.edge_to("w", 1, "own").expect("an edge");
        edges.push(own.clone());
        step.send(&own, counting(node, first_of(1, 4), 2)).expect("sent");
        let batch = node.batch(edges.clone()).expect("usable");
        let mut mine = given(node, 5);
        for at in [1, 4] {
            mine[at] = node.tensor(DType::F32, &[3]).expect("room");
        }
        let pending = batch.receive(&step).within(SOON).into(mine).begin().expect("begun");
        for (at, end) in pending.wait_each().into_iter().enumerate() {
            match at {
                1 | 4 => {
                    let error = end.expect_err("three elements for two");
                    let named = error.to_string();
                    assert!(matches!(error, Error::ShapeMismatch { .. }), "{named}");
                    assert!(named.contains(edges[at].name()), "{named}");
                }
                _ => assert_eq!(contents(&end.expect("received").tensor)[0], first_of(1, at)),
            }
        }
        for at in [1, 4] {
            let next = step.recv(&edges[at], SOON).expect("the value is kept for the next receive");
            assert_eq!(values(&next.tensor), [first_of(1, at), first_of(1, at) + 1.0]);
        }
        until(node, "no tensor is left", || node.pool().stats().live_tensors == 0);
    });
}

#[test]
fn one_tensor_for_each_edge_or_no_receive_begins() {
    run(1, &[], |node, _| {
        let step = begin(node, 1);
        let batch = node.batch(edges_from(node, 0, 3)).expect("usable");
        for count in [0, 2, 4] {
            let refused = batch.receive(&step).into(given(node, count)).begin();
            let error = refused.expect_err("another number").to_string();
            assert!(error.contains(&format!("of 3 edges was given {count} values")), "{error}");
            let refused =
                batch.receive(&step).into(given(node, count)).then(|_| panic!("no receive has begun"));
            assert!(matches!(refused, Err(Error::WrongCount { .. })), "{refused:?}");
        }
        assert!(node.pool().is_empty(), "the tensors are dropped");
        batch.send(&step, tensors(node, 1, 3)).expect("sent");
        check(&batch.recv(&step, SOON).expect("received"), 1);
    });
}

#[test]
fn a_callback_gets_the_tensors_and_a_dead_value_leaves_its_tensor_alone() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            let values = [Value::Dead, counting(node, 7.0, 2).into()];
            step.send_all(edges_to(node, 1, 2).iter().zip(values)).expect("sent");
            return;
        }
        let (told, called) = channel();
        let edges = edges_from(node, 0, 2);
        let receive = step.receive_all(&edges).within(SOON).into(given(node, 2));
        receive.then(move |filled| told.send(filled).expect("open")).expect("begun");
        let end = Instant::now() + SOON;
        let filled = loop {
            assert!(Instant::now() < end, "it is not called");
            let _ = node.progress();
            if let Ok(filled) = called.try_recv() {
                break filled.expect("received");
            }
        };
        assert_eq!([0, 1].map(|at| filled[at].is_dead), [true, false]);
        assert_eq!([0, 1].map(|at| contents(&filled[at].tensor)), [[-1.0, -1.0], [7.0, 8.0]]);
    });
}
