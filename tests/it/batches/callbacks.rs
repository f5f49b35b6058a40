//! `receive_all` and `Batch::receive` with a callback.

use super::{begin, check, edges_from, edges_to, tensors};
use crate::common::{SOON, counting, run, until, values};
use std::sync::mpsc::{Receiver, channel};
use tensorwire::{Code, Delivery, Edge, Error, Node, Status, Step, Tensor};

type Called = Receiver<Result<Vec<Delivery<Tensor>>, Error>>;

/// Begins to receive with a callback.
fn receive(step: &Step, edges: &[Edge]) -> (tensorwire::CancelToken, Called) {
    let (done, called) = channel();
    let told = move |received| done.send(received).expect("open");
    (step.receive_all(edges).within(SOON).then(told).expect("begun"), called)
}

/// What the callback was called with. In the inline mode this thread makes the progress.
fn heard(node: &Node, called: &Called) -> Result<Vec<Delivery<Tensor>>, Error> {
    let received = std::cell::Cell::new(None);
    until(node, "the callback", || {
        let told = called.try_recv().ok();
        let is_told = told.is_some();
        received.set(told);
        is_told
    });
    assert!(called.try_recv().is_err(), "it is called once");
    received.into_inner().expect("called")
}

#[test]
fn the_callback_gets_all_values_in_the_order_of_the_edges() {
    run(2, &[], |node, task| {
        for n in 1..4 {
            let step = begin(node, n);
            if task == 0 {
                step.send_all(edges_to(node, 1, 6).iter().zip(tensors(node, n, 6)).rev()).expect("sent");
                continue;
            }
            let (token, called) = receive(&step, &edges_from(node, 0, 6));
            check(&heard(node, &called).expect("received"), n);
            token.cancel();
        }
        let (_token, called) = receive(&begin(node, 9), &[]);
        assert!(heard(node, &called).expect("nothing to wait for").is_empty());
    });
}

#[test]
fn a_batch_calls_back_within_the_process_too() {
    run(1, &[], |node, _| {
        let step = begin(node, 1);
        let batch = node.batch(edges_to(node, 0, 3)).expect("usable");
        let (done, called) = channel();
        let told = move |received| done.send(received).expect("open");
        let _token = batch.receive(&step).within(SOON).then(told).expect("begun");
        batch.send(&step, tensors(node, 1, 3)).expect("sent");
        check(&heard(node, &called).expect("received"), 1);
    });
}

#[test]
fn the_first_failure_is_called_back_and_values_that_come_later_are_for_the_next() {
    run(1, &[], |node, _| {
        let step = begin(node, 1);
        let (first, second) =
            (node.edge_to("w", 0, "x").expect("an edge"), node.edge_to("w", 0, "y").expect("an edge"));
        let (token, called) = receive(&step, &[first.clone(), second.clone()]);
        step.send(&first, counting(node, 1.0, 1)).expect("sent");
        token.cancel();
        let error = heard(node, &called).map(|_| ()).expect_err("cancelled");
        assert!(matches!(&error, Error::Cancelled { key } if key.contains("'y'")), "{error}");
        step.send(&second, counting(node, 2.0, 1)).expect("sent");
        assert_eq!(values(&step.recv(&second, SOON).expect("received").tensor), [2.0]);

        let (_token, called) = receive(&step, &[first, second]);
        step.abort(Status::new(Code::Internal, "enough")).expect("aborted");
        let error = heard(node, &called).map(|_| ()).expect_err("aborted");
        assert!(matches!(error, Error::Aborted { .. }), "{error}");
    });
}

#[test]
fn a_deadline_and_a_cancellation_end_the_receives_from_a_peer() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            return;
        }
        let edges = edges_from(node, 0, 3);
        let (done, called) = channel();
        let told = move |received| done.send(received).expect("open");
        let soon = std::time::Duration::from_millis(20);
        let _token = step.receive_all(&edges).within(soon).then(told).expect("begun");
        let error = heard(node, &called).map(|_| ()).expect_err("nothing was sent");
        assert!(matches!(error, Error::DeadlineExceeded { after, .. } if after == soon), "{error}");
        let (token, called) = receive(&step, &edges);
        token.cancel();
        let error = heard(node, &called).map(|_| ()).expect_err("cancelled");
        assert!(matches!(error, Error::Cancelled { .. }), "{error}");
        let away = edges_to(node, 0, 1);
        let refused = step.receive_all(&away).then(|_| panic!("it has not begun"));
        assert!(matches!(refused, Err(Error::WrongEnd { .. })));
    });
}
