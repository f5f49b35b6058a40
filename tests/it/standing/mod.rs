//! Edges with a `Standing`, with every member in this process.

mod counts;
mod lives;
mod many;
mod shapes;

use crate::common::other::{Other, wait_to_be_told};
use crate::common::{SOON, cluster, counting, member, run, until, values};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tensorwire::{Code, Counter, DType, Edge, Error, Node, Sequence, Status, Step, Tensor};

const BASE: u64 = 1 << 40;
const WINDOW: u32 = 16;
const LARGE: usize = 10_000;

fn there(node: &Node, task: u32) -> Edge {
    node.edge_to("w", task, "x").expect("an edge")
}

fn here(node: &Node, task: u32) -> Edge {
    node.edge_from("w", task, "x").expect("an edge")
}

fn begin(node: &Node, sequence: Sequence, n: u64) -> Step {
    node.step(sequence.step(n)).expect("usable")
}

/// Sends a tensor of `elements` elements that count up from `n`.
fn send(node: &Node, sequence: Sequence, n: u64, elements: usize) {
    let step = begin(node, sequence, n);
    step.send(&there(node, 1), counting(node, n as f32, elements)).expect("sent");
}

/// Sends a tensor, and waits until it has left.
fn send_and_wait(node: &Node, sequence: Sequence, n: u64, elements: usize) {
    send(node, sequence, n, elements);
    until(node, "the tensor leaves", || node.counters().get(Counter::TensorsSent) > n);
}

/// Receives a tensor and checks it.
fn receive(node: &Node, sequence: Sequence, n: u64, elements: usize) {
    drop(received(node, sequence, n, elements));
}

/// Receives a tensor, checks it and returns it.
fn received(node: &Node, sequence: Sequence, n: u64, elements: usize) -> Tensor {
    let got = begin(node, sequence, n).recv(&here(node, 0), SOON);
    let tensor = got.unwrap_or_else(|e| panic!("step {n}: {e}")).tensor;
    let got = values(&tensor);
    assert_eq!((got.len(), got.first().copied()), (elements, (elements > 0).then_some(n as f32)), "step {n}");
    tensor
}

/// Waits until a sender has posted this many values, of which `tensors` are tensors. Each value is
/// a message, as are the two of the link's probe, meta-data and ends of steps.
fn until_posted(node: &Node, values: u64, tensors: u64) {
    let sum =
        |counters: [Counter; 2]| counters.map(|counter| node.counters().get(counter)).iter().sum::<u64>();
    let others = || sum([Counter::MetasSent, Counter::StepsOverSent]);
    let posted = || node.counters().get(Counter::MessagesSent) - others();
    until(node, "all messages leave", || posted() >= 2 + values);
    until_carried(node, tensors);
}

/// Waits until the bytes of this many tensors have left. A tensor that is offered is written once
/// its receive has granted a destination.
fn until_carried(node: &Node, tensors: u64) {
    const CARRIERS: [Counter; 3] = [Counter::SmallTensorsSent, Counter::LoansPosted, Counter::WritesPosted];
    let carried = || CARRIERS.map(|counter| node.counters().get(counter)).iter().sum::<u64>();
    until(node, "all tensors are carried", || carried() >= tensors);
}

/// Two members: the first sends, and the second has a `Standing`.
fn pair(
    settings: &[(&str, &str)],
    sender: impl Fn(&Node, Sequence) + Send + Sync + 'static,
    receiver: impl Fn(&Node, Sequence) + Send + Sync + 'static,
) {
    run(2, settings, move |node, task| {
        let sequence = node.sequence(BASE);
        if task == 0 { sender(node, sequence) } else { receiver(node, sequence) }
    });
}

#[test]
fn dead_values_come_to_their_steps() {
    pair(
        &[],
        |node, sequence| {
            for n in 0..40 {
                match n % 3 {
                    0 => begin(node, sequence, n).send_dead(&there(node, 1)).expect("sent"),
                    _ => send(node, sequence, n, LARGE),
                }
            }
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 4).expect("new");
            for n in 0..40 {
                match n % 3 {
                    0 => {
                        let got = begin(node, sequence, n).recv(&here(node, 0), SOON).expect("received");
                        assert!(got.is_dead, "step {n}");
                    }
                    _ => receive(node, sequence, n, LARGE),
                }
            }
        },
    );
}

#[test]
fn steps_that_are_skipped_or_aborted_harm_no_other() {
    pair(
        &[],
        |node, sequence| {
            for n in 0..60 {
                match n % 5 {
                    1 => {}
                    2 => {
                        let status = Status::new(Code::Internal, "no data");
                        begin(node, sequence, n).abort(status).expect("an error");
                    }
                    _ => send(node, sequence, n, LARGE),
                }
            }
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            for n in 0..60 {
                match n % 5 {
                    1 => {}
                    2 => {
                        let error = begin(node, sequence, n).recv(&here(node, 0), SOON).expect_err("aborted");
                        assert_eq!(error.code(), Code::Internal, "{error}");
                    }
                    _ => receive(node, sequence, n, LARGE),
                }
                node.cleanup(sequence.step(n));
            }
        },
    );
}

#[test]
fn a_step_that_is_aborted_here_ends_its_receive_and_frees_what_was_granted() {
    pair(
        &[],
        |node, sequence| {
            [0, 1, 3].into_iter().for_each(|n| send(node, sequence, n, LARGE));
        },
        |node, sequence| {
            let standing = node.standing(&here(node, 0), sequence, 4).expect("new");
            [0, 1].into_iter().for_each(|n| receive(node, sequence, n, LARGE));
            let step = begin(node, sequence, 2);
            let pending = step.receive(&here(node, 0)).begin().expect("begun");
            step.abort(Status::new(Code::Cancelled, "enough")).expect("an error");
            assert!(matches!(pending.wait(), Err(Error::Aborted { .. })));
            receive(node, sequence, 3, LARGE);
            (0..4).for_each(|n| node.cleanup(sequence.step(n)));
            drop(standing);
            until(node, "everything that is to happen", || node.pool().is_empty());
        },
    );
}

#[test]
fn a_sender_far_ahead_and_a_receiver_far_ahead_both_outrun_the_window() {
    pair(
        &[],
        |node, sequence| {
            (0..100).for_each(|n| send(node, sequence, n, 300));
            let told = begin(node, sequence, 99).recv(&node.edge_from("w", 1, "go").expect("edge"), SOON);
            told.expect("the receiver waits");
            (100..200).for_each(|n| send(node, sequence, n, 300));
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 4).expect("new");
            (0..100).for_each(|n| receive(node, sequence, n, 300));
            // All receives have begun before the first of these tensors is sent.
            let steps: Vec<_> = (100..200).map(|n| begin(node, sequence, n)).collect();
            let pending: Vec<_> =
                steps.iter().map(|step| step.receive(&here(node, 0)).begin().expect("begun")).collect();
            let go = node.edge_to("w", 0, "go").expect("edge");
            begin(node, sequence, 99).send(&go, counting(node, 0.0, 1)).expect("sent");
            for (n, pending) in (100..).zip(pending) {
                let got = pending.wait().expect("received");
                assert_eq!(values(&got.tensor)[0], n as f32);
            }
        },
    );
}

#[test]
fn steps_may_be_produced_and_received_in_any_order() {
    let order = |n: u64| n / 8 * 8 + (n * 5 + 3) % 8;
    pair(
        &[],
        move |node, sequence| (0..64).for_each(|n| send(node, sequence, order(n), LARGE)),
        move |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 16).expect("new");
            (0..64).rev().for_each(|n| receive(node, sequence, n, LARGE));
        },
    );
}

#[test]
fn a_window_gives_credit_before_any_receive_and_more_as_it_grows() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let (widened, has_widened) = std::sync::mpsc::channel();
    let (left, has_left) = std::sync::mpsc::channel();
    let [widened, left] = [widened, left].map(std::sync::Mutex::new);
    let [has_widened, has_left] = [has_widened, has_left].map(std::sync::Mutex::new);
    pair(
        &[],
        move |node, sequence| {
            let sent = || node.counters().get(Counter::TensorsSent);
            let has = || has_widened.lock().expect("no panic").try_recv().is_ok();
            (0..200).for_each(|n| send(node, sequence, n, LARGE));
            for window in [80, 160] {
                until(node, "a window", has);
                until(node, "as many values as the window has", || sent() == window);
                (0..100).for_each(|_| drop(node.progress()));
                assert_eq!(sent(), window, "no value leaves without credit");
                left.lock().expect("no panic").send(()).expect("somebody waits");
            }
        },
        move |node, sequence| {
            let widened = || widened.lock().expect("no panic").send(()).expect("somebody waits");
            let left = || has_left.lock().expect("no panic").try_recv().is_ok();
            let standing = node.standing(&here(node, 0), sequence, 80).expect("new");
            widened();
            until(node, "the first values", left);
            standing.set_window(160).expect("not too long");
            standing.set_window(0).expect("none");
            widened();
            until(node, "the other values", left);
            (0..200).for_each(|n| receive(node, sequence, n, LARGE));
        },
    );
}

#[test]
fn a_second_receive_of_a_step_gets_a_value_of_its_own() {
    pair(
        &[],
        |node, sequence| {
            for n in 0..20 {
                (0..2).for_each(|_| send(node, sequence, n, LARGE));
            }
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 4).expect("new");
            for n in 0..20 {
                let step = begin(node, sequence, n);
                let both = [0, 1].map(|_| step.receive(&here(node, 0)).begin().expect("begun"));
                for pending in both {
                    assert_eq!(values(&pending.wait().expect("received").tensor)[0], n as f32);
                }
            }
        },
    );
}

#[test]
fn the_end_of_a_standing_request_loses_nothing() {
    pair(
        &[],
        |node, sequence| (0..30).for_each(|n| send(node, sequence, n, LARGE)),
        |node, sequence| {
            let standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            (0..10).for_each(|n| receive(node, sequence, n, LARGE));
            // Some of the next tensors have arrived, others are on their way.
            drop(standing);
            (10..20).for_each(|n| receive(node, sequence, n, LARGE));
            let standing = node.standing(&here(node, 0), sequence, 3).expect("again");
            (20..25).for_each(|n| receive(node, sequence, n, LARGE));
            standing.set_window(12).expect("not too long");
            (25..30).for_each(|n| receive(node, sequence, n, LARGE));
            standing.set_window(0).expect("none");
            drop(standing);
            (0..60).for_each(|n| node.cleanup(sequence.step(n)));
            until(node, "everything that is to happen", || node.pool().is_empty());
        },
    );
}

#[test]
fn a_receive_into_memory_takes_a_value_that_came_before() {
    pair(
        &[],
        |node, sequence| (0..30).for_each(|n| send(node, sequence, n, LARGE)),
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            for n in 0..30 {
                let into = node.tensor(DType::F32, &[LARGE as u64]).expect("room");
                let place = into.as_ptr();
                let pending =
                    begin(node, sequence, n).receive(&here(node, 0)).into(into).begin().expect("begun");
                let got = pending.wait().expect("received").tensor;
                assert_eq!((got.as_ptr(), got.as_slice::<f32>().expect("f32")[0]), (place, n as f32));
            }
        },
    );
}

#[test]
fn a_receive_that_is_given_up_leaves_its_value_for_the_next() {
    pair(
        &[],
        |node, sequence| {
            (0..3).for_each(|n| send(node, sequence, n, LARGE));
            begin(node, sequence, 3).recv(&node.edge_from("w", 1, "go").expect("edge"), SOON).expect("told");
            send(node, sequence, 3, LARGE);
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 4).expect("new");
            (0..3).for_each(|n| receive(node, sequence, n, LARGE));
            let step = begin(node, sequence, 3);
            let error = step.recv(&here(node, 0), Duration::from_millis(50)).expect_err("nothing was sent");
            assert!(matches!(error, Error::DeadlineExceeded { .. }), "{error}");
            drop(step.receive(&here(node, 0)).begin().expect("begun"));
            let go = node.edge_to("w", 0, "go").expect("edge");
            step.send(&go, counting(node, 0.0, 1)).expect("sent");
            receive(node, sequence, 3, LARGE);
        },
    );
}

#[test]
fn a_sender_that_cleans_up_early_is_named_to_whoever_receives() {
    pair(
        &[],
        |node, sequence| {
            (0..2).for_each(|n| send(node, sequence, n, LARGE));
            until(node, "everything that is to happen", || node.counters().get(Counter::TensorsSent) == 2);
            node.cleanup(sequence.step(3));
            send(node, sequence, 2, LARGE);
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            (0..3).for_each(|n| receive(node, sequence, n, LARGE));
            let error = begin(node, sequence, 3).recv(&here(node, 0), SOON).expect_err("gone there");
            assert!(
                error.code() == Code::NotFound && error.to_string().contains("cleaned up at w/0"),
                "{error}"
            );
        },
    );
}

#[test]
fn sequences_of_one_edge_stand_beside_each_other() {
    // Training steps, and now and then evaluation.
    const LATER: u64 = 1 << 41;
    let order = || (0..64_u64).map(|n| if n % 8 == 7 { (1, n / 8) } else { (0, n - n / 8) });
    pair(
        &[],
        move |node, training| {
            let both = [training, node.sequence(LATER)];
            order().for_each(|(which, n)| send(node, both[which], n, LARGE));
        },
        move |node, training| {
            let both = [training, node.sequence(LATER)];
            let standing = both.map(|sequence| node.standing(&here(node, 0), sequence, 4).expect("new"));
            let error = node.standing(&here(node, 0), training, 4).expect_err("twice");
            assert_eq!(error.code(), Code::AlreadyExists);
            order().for_each(|(which, n)| receive(node, both[which], n, LARGE));
            drop(standing);
            let _again = node.standing(&here(node, 0), training, 4).expect("dropped before");
        },
    );
}

#[test]
fn threads_may_make_change_and_drop_what_others_made() {
    // In the dedicated mode each thread has a submission queue of its own, and the poller reads
    // them in any order.
    pair(
        &[("poll", "dedicated")],
        |node, sequence| (0..40).for_each(|n| send(node, sequence, n, 200)),
        |node, sequence| {
            (0..2).for_each(|n| receive(node, sequence, n, 200));
            let (give, given) = std::sync::mpsc::sync_channel(0);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for standing in given {
                        let standing: tensorwire::Standing = standing;
                        standing.set_window(3).expect("not too long");
                        drop(standing);
                    }
                });
                for _ in 0..300 {
                    // The other thread may still hold the previous `Standing`.
                    let standing = loop {
                        match node.standing(&here(node, 0), sequence, 2) {
                            Ok(standing) => break standing,
                            Err(error) => assert_eq!(error.code(), Code::AlreadyExists),
                        }
                    };
                    give.send(standing).expect("somebody drops it");
                }
                drop(give);
            });
            (2..40).for_each(|n| receive(node, sequence, n, 200));
        },
    );
}

#[test]
fn a_standing_request_that_cannot_be_made_is_refused_by_name() {
    run(2, &[], |node, task| {
        let sequence = node.sequence(BASE);
        let error = node.standing(&there(node, 1 - task), sequence, 4).expect_err("it ends there");
        assert!(matches!(error, Error::WrongEnd { .. }), "{error}");
        let edge = here(node, 1 - task);
        let error = node.standing(&edge, sequence, 257).expect_err("too long");
        assert!(matches!(error, Error::WindowTooLong { window: 257, max: 256 }), "{error}");
        let standing = node.standing(&edge, sequence, 4).expect("new");
        let error = node.standing(&edge, sequence, 4).expect_err("twice");
        assert!(error.code() == Code::AlreadyExists && error.to_string().contains("'x'"), "{error}");
        assert_eq!(standing.set_window(300).expect_err("too long").code(), Code::InvalidArgument);
        let _other = node.standing(&edge.at(1, 0), sequence, 4).expect("another iteration");
        drop(standing);
        let _again = node.standing(&edge, sequence, 4).expect("dropped before");
    });
}

#[test]
fn an_edge_within_the_process_can_stand_as_well() {
    run(1, &[], |node, _| {
        let sequence = node.sequence(BASE);
        let edge = node.edge(&node.device(), &node.device(), "own").expect("edge");
        let _standing = node.standing(&edge, sequence, 4).expect("new");
        for n in 0..5 {
            let step = begin(node, sequence, n);
            step.send(&edge, counting(node, n as f32, 10)).expect("sent");
            assert_eq!(values(&step.recv(&edge, SOON).expect("received").tensor)[0], n as f32);
        }
    });
}

#[test]
fn a_wide_window_of_large_tensors_takes_no_room_in_the_pool() {
    // A pool of 8 MiB, and tensors of 400 KiB.
    const BIG: usize = 100_000;
    const STEPS: u64 = 30;
    /// Steps that the sender is ahead of the receiver.
    const AHEAD: u64 = 8;
    let taken = Arc::new(AtomicU64::new(0));
    let counts = taken.clone();
    pair(
        &[],
        move |node, sequence| {
            for n in 0..STEPS {
                send_and_wait(node, sequence, n, BIG);
                until(node, "the receiver", || taken.load(Ordering::Relaxed) + AHEAD > n);
                if n >= AHEAD {
                    node.cleanup(sequence.step(n - AHEAD));
                }
            }
        },
        move |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 64).expect("new");
            // Values stay with their sender until they are taken.
            const MOST: u64 = 1 << 20;
            for n in 0..STEPS {
                receive(node, sequence, n, BIG);
                node.cleanup(sequence.step(n));
                counts.fetch_add(1, Ordering::Relaxed);
                assert!(node.pool().stats().allocated <= MOST, "{:?}", node.pool().stats());
            }
        },
    );
}

/// Sends ten steps, from the step in the environment on, and serves until it is stopped.
#[test]
#[ignore = "a role, not a test"]
fn role_sender() {
    let given = |name: &str| std::env::var(name).expect("started by a test");
    let node = member(&given("TEST_CLUSTER"), 0).start().expect("starts");
    node.join().expect("joined");
    let sequence = node.sequence(BASE);
    let first: u64 = given("TEST_FIRST").parse().expect("a number");
    let orders = std::thread::spawn(wait_to_be_told);
    (first..first + 10).for_each(|n| send(&node, sequence, n, LARGE));
    until(&node, "the tensors leave", || node.counters().get(Counter::TensorsSent) == 10);
    println!("all have left");
    until(&node, "an order", || orders.is_finished());
    node.stop().expect("stopped");
}

#[test]
fn a_sender_that_comes_back_gets_the_credit_of_a_standing_request_again() {
    if crate::common::calls_for_each_value() {
        return;
    }
    if crate::common::lacks_processes() {
        return;
    }
    let cluster = cluster(2);
    let start = |first: u64| {
        Other::start_with("standing::role_sender", &cluster, &[("TEST_FIRST", &first.to_string())])
    };
    let mut sender = start(0);
    let node = member(&cluster, 1).start().expect("starts");
    node.join().expect("joined");
    let sequence = node.sequence(BASE);
    let _standing = node.standing(&here(&node, 0), sequence, 12).expect("new");
    receive(&node, sequence, 0, LARGE);
    // The credit of a wide window suffices.
    sender.wait_for("all have left");
    (1..10).for_each(|n| receive(&node, sequence, n, LARGE));
    sender.kill();
    let error = begin(&node, sequence, 10).recv(&here(&node, 0), SOON).expect_err("nobody is there");
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    (0..10).for_each(|n| node.cleanup(sequence.step(n)));
    let mut sender = start(10);
    until(&node, "its return", || node.join().is_ok());
    receive(&node, sequence, 10, LARGE);
    sender.wait_for("all have left");
    (11..20).for_each(|n| receive(&node, sequence, n, LARGE));
    sender.say("stop");
    assert!(sender.ends_well());
}
