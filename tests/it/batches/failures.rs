//! Failures in a batch, and their effect on its other edges.

use super::*;
use crate::common::over_grpc;
use std::time::Instant;
use tensorwire::{Code, Error, Status};

#[test]
fn one_bad_edge_and_nothing_is_sent() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            let mut edges = edges_to(node, 1, 4);
            let own = node.edge_to("w", 0, "own").expect("an edge");
            // An edge of the peer, which does not start here.
            edges.insert(2, node.edge_from("w", 1, "theirs").expect("an edge"));
            edges.insert(0, own.clone());
            let error = step.send_all(edges.iter().zip(tensors(node, 9, 6))).expect_err("refused");
            assert!(matches!(&error, Error::WrongEnd { edge, .. } if edge.contains("theirs")), "{error}");
            let none = step.recv(&own, Duration::from_millis(50)).expect_err("nothing");
            assert_eq!(none.code(), Code::DeadlineExceeded, "{none}");
            step.send_all(edges_to(node, 1, 4).iter().zip(tensors(node, 1, 4))).expect("sent");
        } else {
            let edges = edges_from(node, 0, 4);
            check(&step.recv_all(&borrowed(&edges), SOON).expect("received"), 1);
            let wrong = node.edge_to("w", 0, "out").expect("an edge");
            let error = step.recv_all(&[&edges[0], &wrong], SOON).expect_err("refused");
            assert!(matches!(&error, Error::WrongEnd { edge, .. } if edge.contains("out")), "{error}");
        }
    });
}

#[test]
fn as_many_values_as_edges_or_nothing() {
    run(1, &[], |node, _| {
        let step = begin(node, 1);
        let batch = node.batch(edges_to(node, 0, 3)).expect("usable");
        for count in [0, 2, 4] {
            let error = batch.send(&step, tensors(node, 1, count)).expect_err("refused").to_string();
            assert!(error.contains(&format!("of 3 edges was given {count} values")), "{error}");
        }
        assert!(batch.recv(&step, Duration::ZERO).is_err(), "nothing was sent");
    });
}

#[test]
fn the_deadline_is_told_of_the_first_edge_and_what_comes_later_is_for_the_next() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        let go = node.edge_to("w", 0, "go").expect("an edge");
        if task == 1 {
            let edges = edges_from(node, 0, 6);
            let patience = Duration::from_millis(80);
            let start = Instant::now();
            let error = step.recv_all(&borrowed(&edges), patience).expect_err("nothing was sent");
            assert!(start.elapsed() >= patience, "{error}");
            assert!(matches!(&error, Error::DeadlineExceeded { key, .. } if key.contains("g/0")), "{error}");
            step.send(&go, Tensor::empty()).expect("sent");
            check(&step.recv_all(&borrowed(&edges), SOON).expect("received"), 1);
        } else {
            let go = node.edge_from("w", 1, "go").expect("an edge");
            step.recv(&go, SOON).expect("received");
            step.send_all(edges_to(node, 1, 6).iter().zip(tensors(node, 1, 6))).expect("sent");
        }
    });
}

/// One peer aborts the step. Another one sends later.
#[test]
fn a_failure_ends_the_wait_at_once_and_the_others_values_are_for_the_next() {
    run(3, &[], |node, task| {
        let (step, later) = (begin(node, 1), begin(node, 2));
        let meet = |from: u32, to: u32| match task {
            _ if task == from => {
                let edge = node.edge_to("w", to, "meet").expect("an edge");
                later.send(&edge, Tensor::empty()).expect("sent");
            }
            _ if task == to => {
                let edge = node.edge_from("w", from, "meet").expect("an edge");
                later.recv(&edge, SOON).expect("received");
            }
            _ => {}
        };
        let good = || node.edge_from("w", 1, "good").expect("an edge");
        if task == 0 {
            let bad =
                [node.edge_from("w", 2, "bad/0"), node.edge_from("w", 2, "bad/1")].map(|e| e.expect("ok"));
            let pending = step.receive_all(&[&good(), &bad[0], &bad[1]]).within(SOON).begin().expect("begun");
            meet(0, 2);
            let start = Instant::now();
            let error = pending.wait().expect_err("aborted there");
            assert!(start.elapsed() < SOON / 2, "it waited for the others");
            // Each is a call of its own over gRPC, and either answer may come first.
            let first = if over_grpc() { "bad/" } else { "bad/0" };
            assert!(matches!(&error, Error::Remote { key, .. } if key.contains(first)), "{error}");
            meet(0, 1);
            step.recv(&good(), SOON).expect("for whoever asks next");
        }
        if task == 1 {
            meet(0, 1);
            step.send(&node.edge_to("w", 0, "good").expect("an edge"), Tensor::empty()).expect("sent");
        }
        if task == 2 {
            meet(0, 2);
            step.abort(Status::new(Code::Internal, "of no use")).expect("an error");
        }
    });
}

#[test]
fn who_waits_for_each_hears_of_each() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            let edges = edges_to(node, 1, 4);
            let come = [0, 2].map(|at| (&edges[at], counting(node, first_of(1, at), 2)));
            step.send_all(come).expect("sent");
        } else {
            let edges = edges_from(node, 0, 4);
            let patience = Duration::from_millis(200);
            let pending = step.receive_all(&borrowed(&edges)).within(patience).begin().expect("begun");
            let ends = pending.wait_each();
            let came: Vec<bool> = ends.iter().map(Result::is_ok).collect();
            assert_eq!(came, [true, false, true, false]);
            for (at, end) in ends.iter().enumerate().filter(|(_, end)| end.is_err()) {
                let error = end.as_ref().expect_err("those that failed").to_string();
                assert!(error.contains(&format!("g/{at}")), "{error}");
            }
            let cancelled = step.receive_all(&borrowed(&edges)).within(SOON).begin().expect("begun");
            cancelled.cancel();
            let codes: Vec<_> =
                cancelled.wait_each().iter().map(|end| end.as_ref().err().map(Error::code)).collect();
            assert_eq!(codes, [Some(Code::Cancelled); 4]);
        }
    });
}

/// A value or an error that was taken is not returned again.
#[test]
fn what_was_taken_is_left_out_of_what_is_waited_for() {
    run(2, &[], |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            let edges = edges_to(node, 1, 4);
            let last = node.edge_to("w", 1, "last").expect("an edge");
            for _ in 0..2 {
                let come = [0, 2].map(|at| (&edges[at], counting(node, first_of(1, at), 2)));
                step.send_all(come).expect("sent");
                step.send(&last, Tensor::empty()).expect("sent");
            }
            return;
        }
        let edges = edges_from(node, 0, 4);
        let last = node.edge_from("w", 0, "last").expect("an edge");
        let begin_and_take_first = || {
            let mut pending = step.receive_all(&borrowed(&edges)).within(SOON).begin().expect("begun");
            // It arrives behind the others.
            step.recv(&last, SOON).expect("received");
            let first = pending.take(0).expect("it has come").expect("a value");
            assert_eq!(values(&first.tensor)[0], first_of(1, 0));
            pending.cancel();
            pending
        };
        let ends = begin_and_take_first().wait_each();
        let codes: Vec<_> = ends.iter().map(|end| end.as_ref().err().map(Error::code)).collect();
        assert_eq!(codes, [Some(Code::Cancelled), None, Some(Code::Cancelled)]);
        let mut pending = begin_and_take_first();
        for at in [1, 3] {
            let late = Instant::now() + SOON;
            let end = loop {
                let _ = node.progress();
                if let Some(end) = pending.take(at) {
                    break end;
                }
                assert!(Instant::now() < late, "it is not cancelled");
            };
            assert_eq!(end.expect_err("cancelled").code(), Code::Cancelled);
        }
        let left = pending.wait().expect("the failures were taken");
        assert_eq!((left.len(), values(&left[0].tensor)[0]), (1, first_of(1, 2)));
    });
}

#[test]
fn the_end_of_a_step_ends_its_batches() {
    run(2, &[], |node, task| {
        if task == 0 {
            return;
        }
        let own = node.edge_to("w", 1, "own").expect("an edge");
        let mut edges = edges_from(node, 0, 3);
        edges.push(own.clone());
        let batch = node.batch(edges).expect("usable");
        let aborted = begin(node, 1);
        let pending = batch.receive(&aborted).within(SOON).begin().expect("begun");
        aborted.abort(Status::new(Code::Internal, "enough")).expect("an error");
        crate::common::until(node, "the end of each", || pending.have_all_ended());
        let error = pending.wait().expect_err("aborted");
        assert!(matches!(error, Error::Aborted { .. }), "{error}");
        let gone = begin(node, 2);
        let pending = batch.receive(&gone).within(SOON).begin().expect("begun");
        node.cleanup(2);
        let error = pending.wait().expect_err("gone");
        assert!(matches!(error, Error::StepGone { step } if step.get() == 2), "{error}");
        let error = batch.receive(&gone).within(SOON).begin().expect_err("refused");
        assert!(matches!(error, Error::StepGone { step } if step.get() == 2), "{error}");
        let out = node.batch(edges_to(node, 0, 2)).expect("usable");
        let error = out.send(&gone, tensors(node, 2, 2)).expect_err("refused");
        assert!(matches!(error, Error::StepGone { step } if step.get() == 2), "{error}");
    });
}
