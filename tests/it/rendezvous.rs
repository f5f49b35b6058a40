//! The rendezvous, with every member in this process and real shared memory.

use crate::common::{SOON, counting, over_grpc, over_verbs, run, until, values, writes_bulk};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tensorwire::{Code, Counter, DType, EdgeSide, Error, Shape, Status, Step, Tensor, Value};

const SHORT: Duration = Duration::from_millis(200);

/// Elements that travel in the record, and that do not.
const SIZES: [usize; 3] = [2, 1000, 100_000];

#[test]
fn a_tensor_sent_is_received_whole_whatever_its_size() {
    run(2, &[], |node, task| {
        let edge =
            node.edge("/job:w/replica:0/task:0/device:CPU:0", "/job:w/replica:0/task:1/device:CPU:0", "x");
        let edge = edge.expect("an edge");
        for (id, size) in SIZES.into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                step.send(&edge, counting(node, 1.0, size)).expect("sent");
            } else {
                let got = step.recv(&edge, SOON).expect("received");
                assert!(!got.is_dead);
                assert_eq!(values(&got.tensor), values(&counting(node, 1.0, size)));
            }
        }
    });
}

#[test]
fn every_element_type_travels() {
    run(2, &[], |node, task| {
        let flat = DType::ALL.into_iter().filter(|dtype| dtype.size().is_some());
        for (id, dtype) in flat.enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                let mut tensor = node.tensor(dtype, &[3, 50]).expect("room");
                tensor.bytes_mut().fill(1);
                step.send(&node.edge_to("w", 1, "typed").expect("edge"), tensor.freeze()).expect("sent");
            } else {
                let edge = node.edge_from("w", 0, "typed").expect("edge");
                let got = step.recv(&edge, SOON).expect("received").tensor;
                assert_eq!((got.dtype(), got.shape().dims()), (dtype, [3, 50].as_slice()));
                assert!(got.bytes().iter().all(|byte| *byte == 1), "{dtype}");
            }
        }
    });
}

#[test]
fn scalars_empty_tensors_and_the_highest_rank_travel() {
    run(2, &[], |node, task| {
        let shapes = [vec![], vec![0], vec![4, 0, 7], vec![1; 254], [vec![1; 253], vec![1000]].concat()];
        for (id, dims) in shapes.iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                let mut tensor = node.tensor(DType::U64, dims).expect("room");
                tensor.as_mut_slice::<u64>().expect("u64").fill(7);
                step.send(&node.edge_to("w", 1, "odd").expect("edge"), tensor.freeze()).expect("sent");
            } else {
                let got = step.recv(&node.edge_from("w", 0, "odd").expect("edge"), SOON).expect("received");
                assert_eq!(got.tensor.shape(), &Shape::new(dims).expect("shape"));
                assert!(got.tensor.as_slice::<u64>().expect("u64").iter().all(|value| *value == 7));
            }
        }
    });
}

#[test]
fn values_under_one_key_come_in_the_order_in_which_they_were_sent() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        for round in 0..20 {
            if task == 0 {
                let edge = node.edge_to("w", 1, "x").expect("edge");
                step.send(&edge, counting(node, round as f32, 300)).expect("sent");
            } else {
                let edge = node.edge_from("w", 0, "x").expect("edge");
                let got = step.recv(&edge, SOON).expect("received");
                assert_eq!(values(&got.tensor)[0], round as f32);
            }
        }
    });
}

#[test]
fn a_dead_value_travels_and_carries_nothing() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let edge = node.edge_to("w", 1, "branch").expect("edge");
            for _ in 0..3 {
                step.send_dead(&edge).expect("sent");
            }
            return;
        }
        let edge = node.edge_from("w", 0, "branch").expect("edge");
        let got = step.recv(&edge, SOON).expect("received");
        assert!(got.is_dead && got.tensor.bytes().is_empty());
        let given = node.tensor(DType::F32, &[9]).expect("room");
        let got = step.receive(&edge).into(given).begin().expect("begun").wait().expect("received");
        assert!(got.is_dead);
        assert_eq!(got.tensor.shape().dims(), [9]);
        let error = step.fetch(&[edge], SOON).expect_err("dead");
        assert!(matches!(&error, Error::Dead { key } if key.contains("'branch'")), "{error}");
    });
}

#[test]
fn a_tensor_is_received_into_the_memory_that_was_given() {
    run(2, &[], |node, task| {
        for id in 0..6 {
            let step = node.step(id).expect("new");
            let size = SIZES[id as usize % 3];
            if task == 0 {
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 5.0, size))
                    .expect("sent");
                continue;
            }
            let given = node.tensor(DType::F32, &[size as u64]).expect("room");
            let address = given.as_ptr();
            let edge = node.edge_from("w", 0, "x").expect("edge");
            let mut got =
                step.receive(&edge).into(given).begin().expect("begun").wait().expect("received").tensor;
            assert_eq!(got.as_ptr(), address);
            got.as_mut_slice::<f32>().expect("still ours to write")[0] += 1.0;
            assert_eq!(got.as_slice::<f32>().expect("f32")[..2], [6.0, 6.0]);
        }
    });
}

#[test]
fn a_value_that_does_not_fit_what_was_given_is_an_error_and_is_kept() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        for size in SIZES {
            if task == 0 {
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, size))
                    .expect("sent");
                continue;
            }
            let edge = node.edge_from("w", 0, "x").expect("edge");
            let given = node.tensor(DType::I32, &[3]).expect("room");
            let error =
                step.receive(&edge).into(given).begin().expect("begun").wait().expect_err("shape mismatch");
            let text = error.to_string();
            assert!(text.contains("i32[3]") && text.contains(&format!("f32[{size}]")), "{text}");
            let got = step.recv(&edge, SOON).expect("the value was kept");
            assert_eq!(got.tensor.shape().dims(), [size as u64]);
        }
    });
}

#[test]
fn meta_data_may_change_from_step_to_step() {
    run(2, &[], |node, task| {
        for id in 0..30 {
            let size = [1000, 1000, 64, 5, 2000, 5][id as usize % 6];
            let step = node.step(id).expect("new");
            if task == 0 {
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, size))
                    .expect("sent");
            } else {
                let got = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
                assert_eq!(values(&got.tensor).len(), size);
                node.cleanup(id);
            }
        }
    });
}

#[test]
fn known_meta_data_travel_once() {
    if crate::common::calls_for_each_value() {
        return;
    }
    run(2, &[], |node, task| {
        let before = node.counters();
        for id in 0..50 {
            let step = node.step(id).expect("new");
            if task == 0 {
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 10_000))
                    .expect("sent");
            } else {
                step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
            }
        }
        if task == 0 {
            until(node, "all 50 writes", || node.counters().get(Counter::WritesPosted) == 50);
            let grown = node.counters().since(&before);
            let counts = [Counter::WritesPosted, Counter::MetasSent].map(|of| grown.get(of));
            assert_eq!(counts, [50, 1]);
        }
    });
}

/// Whether a peer has announced an edge.
fn has_announced(node: &tensorwire::Node) -> bool {
    let edges = node.edges(100).expect("usable").edges;
    edges.iter().any(|edge| edge.side == EdgeSide::Sender && (edge.number.is_some() || edge.needed > 0))
}

#[test]
fn a_receive_may_begin_before_the_sender_has_begun_the_step() {
    run(2, &[], |node, task| {
        if task == 1 {
            let step = node.step(9).expect("new");
            let got = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
            assert_eq!(values(&got.tensor)[0], 3.0);
            return;
        }
        until(node, "the early announcement", || has_announced(node));
        let step = node.step(9).expect("new");
        step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 3.0, 400)).expect("sent");
    });
}

#[test]
fn a_receive_that_gets_nothing_ends_at_its_deadline_and_the_value_stays() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let (edge, back) = (node.edge_to("w", 1, "x").expect("edge"), node.edge_from("w", 1, "now"));
            step.recv(&back.expect("edge"), SOON).expect("the other has given up once");
            step.send(&edge, counting(node, 8.0, 500)).expect("sent");
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        let started = Instant::now();
        let error = step.recv(&edge, SHORT).expect_err("nothing was sent");
        let waited = started.elapsed();
        assert!(matches!(error, Error::DeadlineExceeded { .. }), "{error}");
        println!("a deadline of {SHORT:?} was kept after {waited:?}");
        assert!(waited >= SHORT && waited < SHORT * 5);
        step.send(&node.edge_to("w", 0, "now").expect("edge"), counting(node, 0.0, 1)).expect("sent");
        assert_eq!(values(&step.recv(&edge, SOON).expect("it was not lost").tensor)[0], 8.0);
    });
}

#[test]
fn a_cancelled_receive_brings_its_value_or_the_cancellation_and_never_both() {
    run(2, &[], |node, task| {
        let (mut brought, mut cancelled) = (0, 0);
        for id in 0..200 {
            let step = node.step(id).expect("new");
            if task == 0 {
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, id as f32, 600))
                    .expect("sent");
                step.recv(&node.edge_from("w", 1, "done").expect("edge"), SOON).expect("the other is done");
                node.cleanup(id);
                continue;
            }
            let edge = node.edge_from("w", 0, "x").expect("edge");
            let outcome = Arc::new(Mutex::new(Vec::new()));
            let told = outcome.clone();
            let token = step
                .receive(&edge)
                .within(SOON)
                .then(move |result| {
                    told.lock().expect("no panic").push(result.map(|got| values(&got.tensor)[0]))
                })
                .expect("begun");
            for _ in 0..id % 40 {
                let _ = node.progress();
            }
            token.cancel();
            until(node, "an outcome", || !outcome.lock().expect("no panic").is_empty());
            match outcome.lock().expect("no panic").as_slice() {
                [Ok(value)] => {
                    brought += 1;
                    assert_eq!(*value, id as f32);
                }
                [Err(Error::Cancelled { .. })] => {
                    cancelled += 1;
                    let got = step.recv(&edge, SOON).expect("the value stayed");
                    assert_eq!(values(&got.tensor)[0], id as f32);
                }
                other => panic!("outcomes {other:?}"),
            }
            step.send(&node.edge_to("w", 0, "done").expect("edge"), counting(node, 0.0, 1)).expect("sent");
        }
        if task == 1 {
            println!("{brought} receives brought their value, {cancelled} were cancelled");
            assert!(cancelled > 0, "no cancel was ever in time");
        }
    });
}

#[test]
fn a_pending_receive_that_is_dropped_gives_its_memory_back() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            step.recv(&node.edge_from("w", 1, "done").expect("edge"), SOON).expect("the other is done");
            return;
        }
        let given = node.tensor(DType::F32, &[1000]).expect("room");
        drop(
            step.receive(&node.edge_from("w", 0, "never").expect("edge")).into(given).begin().expect("begun"),
        );
        until(node, "an empty pool", || node.pool().is_empty());
        step.send(&node.edge_to("w", 0, "done").expect("edge"), counting(node, 0.0, 1)).expect("sent");
    });
}

#[test]
fn an_abort_ends_all_calls_of_its_step_here_and_at_the_peer() {
    run(2, &[], |node, task| {
        let (step, other) = (node.step(1).expect("new"), node.step(2).expect("new"));
        if task == 0 {
            until(node, "the announcement", || has_announced(node));
            step.abort(Status::new(Code::Internal, "the loss is NaN")).expect("aborted");
            let _ = step.abort(Status::new(Code::Internal, "too late"));
            let error = step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 1));
            let error = error.expect_err("aborted");
            assert!(matches!(&error, Error::Aborted { step, status }
                if step.get() == 1 && status.message == "the loss is NaN"));
            other.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 1)).expect("sent");
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        let error = step.recv(&edge, SOON).expect_err("aborted there");
        assert!(error.to_string().contains("the loss is NaN"), "{error}");
        assert!(error.is_derived(), "the abort was the peer's");
        other.recv(&edge, SOON).expect("other steps go on");
    });
}

#[test]
fn a_handle_of_an_aborted_step_stays_unusable_when_its_abort_is_forgotten() {
    const REMEMBERED: u64 = 256;
    /// Handles share their flags with those of the steps that begin so much later.
    const FLAGS: u64 = 1024;
    run(2, &[], |node, task| {
        let (to, from) = (node.edge_to("w", 1 - task, "x"), node.edge_from("w", 1 - task, "x"));
        let (to, from) = (to.expect("edge"), from.expect("edge"));
        let ended = |id: u64| {
            let step = node.step(id).expect("new");
            step.abort(Status::new(Code::Internal, id.to_string())).expect("aborted");
            step.cleanup();
            step
        };
        let all = |step: &Step, fits: fn(&Error) -> bool| {
            let sent = step.send(&to, counting(node, 0.0, 1)).expect_err("ended");
            let batch = node.batch([from.clone()]).expect("a batch");
            let begun = step.receive(&from).begin().expect_err("ended");
            let received = [step.recv(&from, SHORT).map(drop), batch.recv(step, SHORT).map(drop)];
            let received = received.map(|received| received.expect_err("ended"));
            assert!([sent, begun].iter().chain(&received).all(fits), "{received:?}");
        };
        let step = ended(0);
        let others: Vec<Step> = (1..REMEMBERED).map(ended).collect();
        all(&step, |error| matches!(error, Error::Aborted { status, .. } if status.message == "0"));
        ended(REMEMBERED);
        let is_gone = |error: &Error| matches!(error, Error::StepGone { step } if step.get() == 0);
        all(&step, is_gone);
        all(&others[0], |error| matches!(error, Error::Aborted { status, .. } if status.message == "1"));
        let live: Vec<Step> = (0..FLAGS).map(|n| node.step(REMEMBERED + 1 + n).expect("new")).collect();
        all(&step, is_gone);
        live.iter().for_each(|step| step.send(&to, counting(node, 0.0, 1)).expect("sent"));
        live.iter().for_each(|step| drop(step.recv(&from, SOON).expect("received")));
    });
}

#[test]
fn an_abort_here_ends_receives_that_wait_for_a_peer() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            return;
        }
        let pending = step.receive(&node.edge_from("w", 0, "x").expect("edge")).begin().expect("begun");
        step.abort(Status::new(Code::Aborted, "enough")).expect("aborted");
        let error = pending.wait().expect_err("aborted");
        assert!(matches!(&error, Error::Aborted { status, .. } if status.message == "enough"), "{error}");
        let ok = Status::new(Code::Ok, "");
        assert!(matches!(step.abort(ok), Err(Error::AbortWithOk { step }) if step.get() == 1));
    });
}

#[test]
fn a_cleaned_step_stays_gone_and_a_late_receive_of_it_gets_an_error() {
    run(2, &[], |node, task| {
        let (gone, next) = (node.step(1).expect("new"), node.step(2).expect("new"));
        if task == 0 {
            gone.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 10_000)).expect("sent");
            node.cleanup(1);
            assert!(matches!(node.step(1), Err(Error::StepGone { step }) if step.get() == 1));
            assert!(matches!(
                gone.send_dead(&node.edge_to("w", 1, "x").expect("edge")),
                Err(Error::StepGone { .. })
            ));
            until(node, "the end of the value with its step", || node.pool().is_empty());
            next.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 1)).expect("sent");
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        next.recv(&edge, SOON).expect("the peer has cleaned step 1 up");
        let error = gone.recv(&edge, SOON).expect_err("gone there");
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.to_string().contains("step 1 was cleaned up at w/0"), "{error}");
    });
}

#[test]
fn a_step_that_another_thread_cleans_up_ends_the_receives_that_wait() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            return;
        }
        let edges =
            [node.edge_from("w", 0, "x"), node.edge_to("w", 1, "self")].map(|edge| edge.expect("edge"));
        let waits = |edge: &tensorwire::Edge| step.receive(edge).begin().expect("begun");
        let pending = edges.each_ref().map(waits);
        std::thread::scope(|scope| scope.spawn(|| step.cleanup()).join()).expect("no panic");
        for pending in pending {
            let error = pending.wait().expect_err("gone");
            assert!(matches!(&error, Error::StepGone { step } if step.get() == 1), "{error}");
        }
        let error = step.recv(&edges[0], SOON).expect_err("gone");
        assert!(matches!(error, Error::StepGone { .. }), "{error}");
    });
}

#[test]
fn a_step_keeps_its_end_however_many_others_begin() {
    run(1, &[], |node, _| {
        let edge = node.edge_to("w", 0, "self").expect("edge");
        let (gone, aborted, live) = (node.step(1), node.step(2), node.step(3));
        let (gone, aborted, live) = (gone.expect("new"), aborted.expect("new"), live.expect("new"));
        aborted.abort(Status::new(Code::Internal, "no")).expect("aborted");
        [&gone, &aborted].into_iter().for_each(tensorwire::Step::cleanup);
        // More than there are flags of steps.
        for id in 10..3010 {
            let step = node.step(id).expect("new");
            step.send_dead(&edge).expect("sent");
            step.recv(&edge, SOON).expect("received");
            step.cleanup();
        }
        let error = |step: &tensorwire::Step| step.send_dead(&edge).expect_err("ended");
        assert!(matches!(error(&gone), Error::StepGone { step } if step.get() == 1));
        assert!(matches!(error(&aborted), Error::Aborted { step, .. } if step.get() == 2));
        live.send_dead(&edge).expect("sent");
        assert!(node.step(3).expect("its worker's") == live);
        assert_eq!(node.live_steps().len(), 1);
    });
}

#[test]
fn steps_of_threads_that_begin_them_at_once_are_kept_apart() {
    run(2, &[], |node, task| {
        let edge = |n: u64| match task {
            0 => node.edge_to("w", 1, &n.to_string()),
            _ => node.edge_from("w", 0, &n.to_string()),
        };
        let steps = |n: u64| {
            let edge = edge(n).expect("edge");
            for id in (0..200).map(|id| 1_000_000 * n + id) {
                let step = node.step(id).expect("new");
                match task {
                    0 => step.send_dead(&edge).expect("sent"),
                    _ => assert!(step.recv(&edge, SOON).expect("received").is_dead),
                }
                if task == 1 {
                    step.cleanup();
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|n| _ = scope.spawn(move || steps(n))));
        assert_eq!(node.live_steps().len(), if task == 1 { 0 } else { 800 });
    });
}

#[test]
fn a_step_belongs_to_one_worker() {
    run(1, &[], |node, _| {
        node.step_of(5, "a").expect("new");
        let error = node.step_of(5, "b").map(|_| ()).expect_err("taken");
        assert!(error.to_string().contains("worker 'a'") && error.to_string().contains("'b'"), "{error}");
    });
}

#[test]
fn source_and_destination_in_one_process_touch_no_fabric() {
    run(1, &[], |node, _| {
        let edge = node.edge_to("w", 0, "self").expect("edge");
        let step = node.step(1).expect("new");
        step.send(&edge, counting(node, 4.0, 100)).expect("sent");
        let got = step.recv(&edge, SOON).expect("received");
        assert_eq!(values(&got.tensor)[0], 4.0);
        let error = step.recv(&edge, SHORT).expect_err("nothing more");
        assert!(matches!(error, Error::DeadlineExceeded { .. }), "{error}");
        let pending = step.receive(&edge).begin().expect("begun");
        step.send_dead(&edge).expect("sent");
        assert!(pending.wait().expect("received").is_dead);
        let given = node.tensor(DType::F32, &[2]).expect("room");
        let pending = step.receive(&edge).into(given).begin().expect("begun");
        step.send(&edge, counting(node, 1.0, 3)).expect("sent");
        assert!(matches!(pending.wait(), Err(Error::ShapeMismatch { .. })));
        assert_eq!(values(&step.recv(&edge, SOON).expect("it was kept").tensor).len(), 3);
        assert_eq!(node.counters().get(Counter::MessagesReceived), 0);
    });
}

#[test]
fn an_edge_is_used_only_at_its_ends_and_only_between_members() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let away = node.edge_from("w", 1, "x").expect("edge");
            let error = step.send(&away, counting(node, 0.0, 1)).expect_err("its source is the other");
            assert!(error.to_string().contains("w/0"), "{error}");
            let own = node.edge_to("w", 1, "x").expect("edge");
            assert!(matches!(step.recv(&own, SHORT), Err(Error::WrongEnd { .. })));
            let error = node.edge_to("w", 7, "x").expect_err("no such task");
            assert!(error.to_string().contains("w/7") && error.to_string().contains("w/1"), "{error}");
            assert!(matches!(node.edge_to("w", 1, "a;b"), Err(Error::EdgeName(_))));
        }
    });
}

#[test]
fn frames_and_iterations_keep_values_apart() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        for iteration in 0..4 {
            if task == 0 {
                let edge = node.edge_to("w", 1, "loop").expect("edge").at(1, iteration);
                step.send(&edge, counting(node, iteration as f32, 300)).expect("sent");
            } else {
                let edge = node.edge_from("w", 0, "loop").expect("edge").at(1, 3 - iteration);
                let got = step.recv(&edge, SOON).expect("received");
                assert_eq!(values(&got.tensor)[0], (3 - iteration) as f32);
            }
        }
    });
}

#[test]
fn two_hundred_receives_may_be_in_flight() {
    run(2, &[("queue_depth", "16")], |node, task| {
        let step = node.step(1).expect("new");
        let edges = |number: usize| format!("x/{number}");
        if task == 0 {
            for number in (0..200).rev() {
                let edge = node.edge_to("w", 1, &edges(number)).expect("edge");
                step.send(&edge, counting(node, number as f32, SIZES[number % 2])).expect("sent");
            }
            return;
        }
        let pending: Vec<_> = (0..200)
            .map(|number| {
                step.receive(&node.edge_from("w", 0, &edges(number)).expect("edge")).begin().expect("begun")
            })
            .collect();
        for (number, pending) in pending.into_iter().enumerate() {
            assert_eq!(values(&pending.wait().expect("received").tensor)[0], number as f32);
        }
    });
}

#[test]
fn both_directions_work_at_once() {
    run(2, &[("queue_depth", "16")], |node, task| {
        let (to, from) = (
            node.edge_to("w", 1 - task, "x").expect("edge"),
            node.edge_from("w", 1 - task, "x").expect("edge"),
        );
        for id in 0..500 {
            let step = node.step(id).expect("new");
            let pending = step.receive(&from).begin().expect("begun");
            step.send(&to, counting(node, id as f32, SIZES[id as usize % 2])).expect("sent");
            assert_eq!(values(&pending.wait().expect("received").tensor)[0], id as f32);
        }
        if over_grpc() {
            // A cleanup drops what the peer has not asked for yet.
            node.flush(SOON).expect("all is taken");
        }
        for id in 0..500 {
            node.cleanup(id);
        }
        until(node, "an empty pool", || node.pool().is_empty());
    });
}

#[test]
fn a_borrowed_tensor_lies_at_its_sender_until_it_is_dropped() {
    if crate::common::lends_nothing() {
        return;
    }
    run(2, &[("bulk_receive", "borrow")], |node, task| {
        for id in 0..20 {
            let step = node.step(id).expect("new");
            if task == 0 {
                let tensor = counting(node, id as f32, 10_000);
                step.send(&node.edge_to("w", 1, "x").expect("edge"), tensor.clone()).expect("sent");
                let mut tensor = Some(tensor);
                until(node, "the give-back", || tensor.as_ref().is_some_and(Tensor::is_unique));
                drop(tensor.take());
                assert!(node.pool().is_empty());
            } else {
                let got = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
                assert!(got.tensor.is_lent());
                assert_eq!(node.pool().stats().allocated, 0, "a borrowed tensor takes no room");
                assert_eq!(values(&got.tensor), (0..10_000).map(|at| (id + at) as f32).collect::<Vec<_>>());
            }
        }
        assert_eq!(node.counters().get(Counter::LoansPosted), if task == 0 { 20 } else { 0 });
    });
}

#[test]
fn a_borrowed_tensor_can_be_sent_on_and_made_writable_by_a_copy() {
    run(2, &[("bulk_receive", "borrow")], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 1.0, 10_000)).expect("sent");
            let back = step.recv(&node.edge_from("w", 1, "back").expect("edge"), SOON).expect("received");
            assert_eq!(values(&back.tensor)[9999], 10_000.0);
            return;
        }
        let got = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received").tensor;
        step.send(&node.edge_to("w", 0, "back").expect("edge"), got.clone()).expect("sent");
        // A fabric that does not lend has a tensor of this node, which is free once it is sent.
        let _other = (!got.is_lent()).then(|| got.clone());
        let got = got.try_into_mut().expect_err("it is the peer's, or has another user");
        let mut own = got.make_mut(node.pool()).expect("copied");
        own.as_mut_slice::<f32>().expect("f32")[0] = 9.0;
    });
}

#[test]
fn a_receive_for_which_the_pool_has_no_room_fails_and_loses_nothing() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        let elements = 3 << 18; // 3 MiB of the pool's 8
        if task == 0 {
            step.send(&node.edge_to("w", 1, "big").expect("edge"), counting(node, 2.0, elements))
                .expect("sent");
            step.recv(&node.edge_from("w", 1, "done").expect("edge"), SOON).expect("the other is done");
            return;
        }
        let full = node.tensor(DType::U8, &[6 << 20]).expect("room");
        let edge = node.edge_from("w", 0, "big").expect("edge");
        let error = step.recv(&edge, SOON).expect_err("no room");
        assert_eq!(error.code(), Code::ResourceExhausted);
        let text = error.to_string();
        assert!(text.contains("3145728") && text.contains("free"), "{text}");
        drop(full);
        assert_eq!(values(&step.recv(&edge, SOON).expect("it was kept").tensor)[1], 3.0);
        step.send(&node.edge_to("w", 0, "done").expect("edge"), counting(node, 0.0, 1)).expect("sent");
    });
}

#[test]
fn a_tensor_larger_than_the_pool_is_refused_with_both_sizes() {
    run(1, &[], |node, _| {
        let error = node.tensor(DType::U8, &[9 << 20]).map(|_| ()).expect_err("too large").to_string();
        assert!(error.contains("9437184") && error.contains("8 MiB"), "{error}");
    });
}

#[test]
fn a_link_has_a_limit_of_requests_and_says_so() {
    run(2, &[("max_requests", "4")], |node, task| {
        if task == 0 {
            return;
        }
        let step = node.step(1).expect("new");
        let edge = node.edge_from("w", 0, "x").expect("edge");
        let kept: Vec<_> = (0..4).map(|_| step.receive(&edge).begin().expect("begun")).collect();
        let error = step.recv(&edge, SOON).expect_err("one too many");
        assert!(
            error.to_string().contains("limit of 4") && error.to_string().contains("max_requests"),
            "{error}"
        );
        drop(kept);
    });
}

#[test]
fn who_waits_for_room_in_the_pool_gets_it_when_peers_have_taken_what_was_sent() {
    // The pool of 8 MiB holds three or four of these tensors.
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        let dims = [1 << 19];
        if task == 1 {
            for _ in 0..12 {
                step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
            }
            return;
        }
        for number in 0..12 {
            let mut tensor = node.tensor_within(DType::F32, &dims, SOON).expect("room in time");
            tensor.as_mut_slice::<f32>().expect("f32").fill(number as f32);
            step.send(&node.edge_to("w", 1, "x").expect("edge"), tensor.freeze()).expect("sent");
        }
        until(node, "an empty pool", || node.pool().is_empty());
        let held: Vec<_> = std::iter::from_fn(|| node.tensor(DType::F32, &dims).ok()).collect();
        assert!(held.len() > 1);
        let brief = Duration::from_millis(20);
        let error = node.tensor_within(DType::F32, &dims, brief).expect_err("nobody gives any back");
        assert!(
            error.to_string().starts_with("there was no room within 20ms: the pool is exhausted"),
            "{error}"
        );
        let error = node.tensor_within(DType::F32, &[1 << 30], SOON).expect_err("never");
        assert!(error.to_string().contains("raise pool_size"), "{error}");
        drop(held);
        let ring = node.ring(DType::F32, &[4], 1).expect("room");
        let _buffer = ring.acquire().expect("the only one");
        let error = node.acquire_within(&ring, brief).expect_err("nobody gives it back");
        assert!(error.to_string().starts_with("no buffer was free within 20ms: "), "{error}");
    });
}

#[test]
fn sends_that_nobody_asks_for_are_limited() {
    run(2, &[("max_outstanding_sends", "5")], |node, task| {
        if task == 1 {
            return;
        }
        let step = node.step(1).expect("new");
        let edge = node.edge_to("w", 1, "x").expect("edge");
        for _ in 0..5 {
            step.send(&edge, counting(node, 0.0, 1)).expect("within the limit");
        }
        let error = step.send(&edge, counting(node, 0.0, 1)).expect_err("one too many");
        assert!(error.to_string().contains("max_outstanding_sends"), "{error}");
        node.cleanup(1);
        until(node, "the end of the values with their step", || node.pool().is_empty());
        node.step(2).expect("new").send(&edge, counting(node, 0.0, 1)).expect("room again");
        // Otherwise the stop would wait for a receive.
        node.cleanup(2);
    });
}

/// Over verbs and TCP a large tensor stays here until a receive takes it, also if it has credit.
#[test]
fn large_tensors_with_credit_are_limited_where_they_stay_at_their_sender() {
    if !writes_bulk() {
        return;
    }
    // Set once a third send was refused. Until then no value is taken.
    let is_refused = AtomicBool::new(false);
    run(2, &[("max_outstanding_sends", "2")], move |node, task| {
        let sequence = node.sequence(1 << 40);
        let step = node.step(sequence.step(0)).expect("new");
        if task == 1 {
            let edge = node.edge_from("w", 0, "x").expect("edge");
            let _standing = node.standing(&edge, sequence, 16).expect("new");
            until(node, "the values", || node.edges(9).expect("usable").edges.iter().any(|e| e.held == 2));
            until(node, "the refusal of a third", || is_refused.load(Ordering::SeqCst));
            for n in 0..2 {
                assert_eq!(values(&step.recv(&edge, SOON).expect("sent").tensor)[0], n as f32);
            }
            return;
        }
        let edge = node.edge_to("w", 1, "x").expect("edge");
        until(node, "the announcement", || has_announced(node));
        for n in 0..2 {
            step.send(&edge, counting(node, n as f32, 10_000)).expect("within the limit");
        }
        let error = step.send(&edge, counting(node, 9.0, 10_000)).expect_err("one too many");
        assert!(error.to_string().contains("max_outstanding_sends"), "{error}");
        is_refused.store(true, Ordering::SeqCst);
        until(node, "the end of the writes", || node.flush(Duration::ZERO).expect("usable").is_empty());
        step.send(&node.edge_to("w", 1, "y").expect("edge"), counting(node, 0.0, 1)).expect("room again");
        node.cleanup(sequence.step(0));
    });
}

#[test]
fn a_send_waits_for_room_and_gives_the_value_back_if_there_is_none() {
    const VALUES: u32 = 40;
    run(2, &[("max_outstanding_sends", "3")], |node, task| {
        let step = node.step(1).expect("new");
        if task == 1 {
            let edge = node.edge_from("w", 0, "x").expect("edge");
            for n in 0..VALUES {
                std::thread::sleep(Duration::from_millis(u64::from(n % 3)));
                let got = step.recv(&edge, SOON).expect("sent").tensor;
                assert_eq!(values(&got)[0], n as f32, "in the order of the sends");
            }
            return;
        }
        let edge = node.edge_to("w", 1, "x").expect("edge");
        for n in 0..VALUES {
            step.send_within(&edge, counting(node, n as f32, 9), SOON).expect("there is room soon");
        }
        let other = node.edge_to("w", 1, "never received").expect("edge");
        assert!(node.flush(SOON).expect("it waits").is_empty(), "the last value is taken");
        for n in 0..3 {
            step.send_within(&other, counting(node, n as f32, 9), Duration::ZERO).expect("room at once");
        }
        let (brief, since) = (Duration::from_millis(20), std::time::Instant::now());
        let failed = step.send_within(&other, counting(node, 7.0, 9), brief).expect_err("no room");
        assert!(since.elapsed() >= brief);
        assert!(matches!(failed.error, Error::ResourceExhausted { limit: 3, .. }), "{failed}");
        assert!(failed.to_string().contains("max_outstanding_sends"), "{failed}");
        assert_eq!(values(&failed.value), values(&counting(node, 7.0, 9)));
        let dead = step.send_within(&other, Value::Dead, Duration::ZERO).expect_err("no room");
        assert!(matches!(dead.value, Value::Dead));
        let wrong = node.edge_from("w", 1, "x").expect("edge");
        let failed = step.send_within(&wrong, failed.value, SOON).expect_err("it starts elsewhere");
        assert!(matches!(failed.error, Error::WrongEnd { .. }), "at once");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(brief);
                step.abort(Status::new(Code::Internal, "enough")).expect("an error");
            });
            let failed = step.send_within(&other, failed.value, SOON).expect_err("aborted meanwhile");
            assert!(matches!(failed.error, Error::Aborted { .. }), "{failed}");
        });
        node.cleanup(1);
    });
}

#[test]
fn a_callback_runs_on_its_own_thread_and_a_panic_in_it_hurts_nobody() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            for _ in 0..2 {
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 1)).expect("sent");
            }
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        let caller = std::thread::current().id();
        let calls = Arc::new(AtomicU32::new(0));
        let first = calls.clone();
        step.receive(&edge)
            .within(SOON)
            .then(move |_| {
                first.fetch_add(1, Ordering::SeqCst);
                // Without the panic hook: a backtrace takes seconds where many threads spin.
                std::panic::resume_unwind(Box::new("on purpose"));
            })
            .expect("begun");
        let second = calls.clone();
        step.receive(&edge)
            .within(SOON)
            .then(move |result| {
                assert!(result.is_ok() && std::thread::current().id() != caller);
                second.fetch_add(1, Ordering::SeqCst);
            })
            .expect("begun");
        until(node, "both callbacks", || calls.load(Ordering::SeqCst) == 2);
    });
}

#[test]
fn a_stopped_node_fails_every_call_and_stops_again_without_effect() {
    run(2, &[], |node, task| {
        if task == 0 {
            return;
        }
        let step = node.step(1).expect("new");
        let pending = step.receive(&node.edge_from("w", 0, "x").expect("edge")).begin().expect("begun");
        node.stop().expect("stopped");
        node.stop().expect("stopped already");
        assert!(matches!(pending.wait(), Err(Error::Stopped)));
        assert!(matches!(node.step(2), Err(Error::Stopped)));
        assert!(matches!(step.send_dead(&node.edge_to("w", 0, "x").expect("edge")), Err(Error::Stopped)));
        assert!(node.progress().is_err());
    });
}

#[test]
fn a_stop_that_waits_in_vain_leaves_the_cpu_to_others() {
    run(2, &[("stop_timeout", "1s")], |node, task| {
        if task == 1 {
            // Connected, and never receives.
            return until(node, "the stop of the sender", || node.peers()[0].state.error().is_some());
        }
        let step = node.step(1).expect("new");
        step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 0.0, 1)).expect("sent");
        let on_cpu = || {
            let text =
                std::fs::read_to_string("/proc/thread-self/schedstat").expect("the scheduler's figures");
            Duration::from_nanos(text.split(' ').next().expect("a first one").parse().expect("a number"))
        };
        let (began, before) = (Instant::now(), on_cpu());
        node.stop().expect("stopped");
        let (took, used) = (began.elapsed(), on_cpu() - before);
        println!("{used:?} on the CPU in {took:?}");
        assert!(took >= Duration::from_secs(1) && used < took / 2, "{used:?} on the CPU in {took:?}");
    });
}

#[test]
fn a_peer_that_stops_fails_the_calls_that_need_it_and_is_named() {
    run(3, &[], |node, task| {
        if task == 0 {
            node.fail("out of coffee").expect("stopped");
            return;
        }
        let step = node.step(1).expect("new");
        let error = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect_err("it stopped");
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.to_string() == "w/0"), "{error}");
        until(node, "the reason", || {
            node.peers()[0].state.error().is_some_and(|error| error.to_string().contains("out of coffee"))
        });
        let error = step.send(&node.edge_to("w", 0, "x").expect("edge"), counting(node, 0.0, 1));
        assert!(matches!(error, Err(Error::PeerLost { .. })));
        let other = 3 - task;
        step.send(&node.edge_to("w", other, "y").expect("edge"), counting(node, 0.0, 1)).expect("sent");
        step.recv(&node.edge_from("w", other, "y").expect("edge"), SOON).expect("others go on");
    });
}

#[test]
fn threads_of_one_process_share_a_node() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let step = &step;
                scope.spawn(move || {
                    for round in 0..if over_verbs() { 20 } else { 200 } {
                        let (name, back) = (format!("t/{thread}/{round}"), format!("b/{thread}/{round}"));
                        if task == 0 {
                            step.send(&node.edge_to("w", 1, &name).expect("edge"), counting(node, 0.0, 400))
                                .expect("sent");
                            step.recv(&node.edge_from("w", 1, &back).expect("edge"), SOON).expect("received");
                        } else {
                            let got = step
                                .recv(&node.edge_from("w", 0, &name).expect("edge"), SOON)
                                .expect("received");
                            step.send(&node.edge_to("w", 0, &back).expect("edge"), got.tensor).expect("sent");
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn a_tensor_of_another_pool_is_copied_and_arrives() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let options = tensorwire::internals::memory::RegionOptions::new(1 << 20);
            let region = tensorwire::internals::memory::Region::create(0, &options).expect("1 MiB");
            let elsewhere = tensorwire::Pool::new(region, Default::default()).expect("a pool");
            let meta = counting(node, 0.0, 1000).meta().clone();
            let mut tensor = elsewhere.tensor(meta).expect("room");
            tensor.as_mut_slice::<f32>().expect("f32").fill(6.0);
            step.send(&node.edge_to("w", 1, "x").expect("edge"), tensor.freeze()).expect("sent");
        } else {
            let got = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
            assert!(values(&got.tensor).iter().all(|value| *value == 6.0));
        }
    });
}

#[test]
fn loans_that_are_held_do_not_stop_other_tensors() {
    if crate::common::lends_nothing() {
        return;
    }
    run(
        2,
        &[("bulk_receive", "borrow"), ("queue_depth", "16"), ("small_tensor_bytes", "0")],
        |node, task| {
            let step = node.step(1).expect("new");
            let mut held = Vec::new();
            for number in 0..50 {
                let name = format!("x/{number}");
                if task == 0 {
                    step.send(&node.edge_to("w", 1, &name).expect("edge"), counting(node, 0.0, 100))
                        .expect("sent");
                } else {
                    held.push(
                        step.recv(&node.edge_from("w", 0, &name).expect("edge"), SOON).expect("received"),
                    );
                }
            }
            assert!(held.iter().all(|got| got.tensor.is_lent()), "places do not depend on the queue");
        },
    );
}

#[test]
fn a_callback_for_a_wrong_edge_is_refused_and_not_called() {
    run(2, &[], |node, task| {
        if task == 1 {
            return;
        }
        let calls = Arc::new(AtomicU32::new(0));
        let called = calls.clone();
        let step = node.step(1).expect("new");
        let begun = step.receive(&node.edge_to("w", 1, "x").expect("edge")).within(SOON).then(move |_| {
            called.fetch_add(1, Ordering::SeqCst);
        });
        assert!(matches!(begun.map(|_| ()), Err(Error::WrongEnd { .. })));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(calls.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_deadline_holds_beside_calls_that_return_at_once() {
    for mode in ["inline", "adaptive", "dedicated"] {
        run(2, &[("poll", mode), ("pollers", "1")], move |node, task| {
            if task == 1 {
                return;
            }
            let step = node.step(1).expect("new");
            let [silent, tried] = ["silent", "tried"].map(|name| node.edge_from("w", 1, name).expect("edge"));
            let (started, ended) = (Instant::now(), Arc::new(Mutex::new(None)));
            let told = ended.clone();
            let note = move |result: Result<_, _>| {
                assert!(matches!(result.map(drop), Err(Error::DeadlineExceeded { .. })));
                *told.lock().expect("no panic") = Some(started.elapsed());
            };
            step.receive(&silent).within(SHORT).then(note).expect("begun");
            let is_told = || ended.lock().expect("no panic").is_some();
            while !is_told() && started.elapsed() < SHORT * 20 {
                step.recv(&tried, Duration::ZERO).expect_err("nothing is sent");
            }
            let ended = ended.lock().expect("no panic").expect("it was told");
            println!("{mode}: a deadline of {SHORT:?} was kept after {ended:?}");
            assert!(ended >= SHORT && ended < SHORT * 5);
        });
    }
}

#[test]
fn a_fatal_loss_ends_receives_within_the_process_that_no_thread_waits_for() {
    for mode in ["adaptive", "dedicated"] {
        run(2, &[("poll", mode), ("peer_loss", "fail_all")], move |node, task| {
            let step = node.step(1).expect("new");
            if task == 1 {
                step.recv(&node.edge_from("w", 0, "go").expect("edge"), SOON).expect("received");
                drop(node.fail("on purpose").expect("stopped"));
                return;
            }
            let own = node.edge_to("w", 0, "own").expect("edge");
            let (told, heard) = std::sync::mpsc::channel();
            step.receive(&own).then(move |result| told.send(result.map(drop)).expect("open")).expect("begun");
            step.send_dead(&node.edge_to("w", 1, "go").expect("edge")).expect("sent");
            let error = heard.recv_timeout(SOON / 2).expect("the callback runs").expect_err("no value");
            assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        });
    }
}

#[test]
fn a_local_deadline_holds_while_another_call_blocks() {
    run(1, &[], |node, _| {
        let edge = node.edge_to("w", 0, "self").expect("edge");
        let step = node.step(1).expect("new");
        let started = Instant::now();
        let ended = Arc::new(Mutex::new(None));
        let told = ended.clone();
        step.receive(&edge)
            .within(SHORT)
            .then(move |result| {
                assert!(matches!(result, Err(Error::DeadlineExceeded { .. })));
                *told.lock().expect("no panic") = Some(started.elapsed());
            })
            .expect("begun");
        step.recv(&edge.at(1, 1), SHORT * 20).expect_err("nothing is sent");
        let ended = ended.lock().expect("no panic").expect("it was told");
        println!("a deadline of {SHORT:?} was kept after {ended:?}");
        assert!(ended >= SHORT && ended < SHORT * 5);
    });
}

#[test]
fn a_local_deadline_that_begins_during_another_threads_wait_holds() {
    // In adaptive mode threads sleep, and `wait` can't be set.
    for (mode, wait) in [("inline", "spin"), ("inline", "yield"), ("adaptive", "auto"), ("dedicated", "auto")]
    {
        run(2, &[("poll", mode), ("pollers", "1"), ("wait", wait)], move |node, task| {
            let step = node.step(1).expect("new");
            let (from_peer, local) = (node.edge_from("w", 1, "x"), node.edge_to("w", 0, "self"));
            if task == 1 {
                return;
            }
            let (from_peer, local) = (from_peer.expect("edge"), local.expect("edge"));
            let ended = Arc::new(Mutex::new(None));
            std::thread::scope(|scope| {
                scope.spawn(|| step.recv(&from_peer, SHORT * 8).expect_err("nothing is sent"));
                std::thread::sleep(SHORT);
                let (started, told) = (Instant::now(), ended.clone());
                let note = move |_| *told.lock().expect("no panic") = Some(started.elapsed());
                step.receive(&local).within(SHORT).then(note).expect("begun");
            });
            let ended = ended.lock().expect("no panic").expect("it was told");
            println!("{mode}: a deadline of {SHORT:?} was kept after {ended:?}");
            assert!(ended >= SHORT && ended < SHORT * 5);
        });
    }
}
