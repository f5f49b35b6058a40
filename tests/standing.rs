//! What trainers may expect of standing requests, with every member in this process and real shared memory.

mod common;

use common::other::{Other, wait_to_be_told};
use common::{SOON, cluster, counting, lends_nothing, member, run, until, values};
use std::sync::mpsc::channel;
use std::time::Duration;
use tensorwire::telemetry::{Counter, Snapshot};
use tensorwire::{Code, DType, Edge, Error, Node, Sequence, Status, Step};

const BASE: u64 = 1 << 40;
const WINDOW: u32 = 16;
const LARGE: usize = 2000;

fn there(node: &Node, task: u32) -> Edge {
    node.edge_to("w", task, "x").expect("an edge")
}

fn here(node: &Node, task: u32) -> Edge {
    node.edge_from("w", task, "x").expect("an edge")
}

fn begin(node: &Node, sequence: Sequence, n: u64) -> Step {
    node.step(sequence.step(n)).expect("usable")
}

/// Sends a tensor of so many elements, all counted on from `n`.
fn send(node: &Node, sequence: Sequence, n: u64, elements: usize) {
    let step = begin(node, sequence, n);
    step.send(&there(node, 1), counting(node, n as f32, elements)).expect("sent");
}

/// Sends it, and waits until it is on its way.
fn send_and_wait(node: &Node, sequence: Sequence, n: u64, elements: usize) {
    send(node, sequence, n, elements);
    until(node, "the tensor leaves", || node.counters().get(Counter::TensorsSent) > n);
}

/// Receives it and checks it.
fn receive(node: &Node, sequence: Sequence, n: u64, elements: usize) {
    let got = begin(node, sequence, n).recv(&here(node, 0), SOON).unwrap_or_else(|e| panic!("step {n}: {e}"));
    let got = values(&got.tensor);
    assert_eq!((got.len(), got.first().copied()), (elements, (elements > 0).then_some(n as f32)), "step {n}");
}

/// Two members, the first of which sends and the second of which has a `Standing`.
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

/// What the two sides of a route have counted.
#[derive(Debug)]
struct Counted {
    data: u64,
    control: u64,
}

/// Counts `steps` steps, after as many that make everything known. Each side counts what it posts.
fn count(settings: &[(&str, &str)], elements: usize, steps: u64) -> Counted {
    let cluster = cluster(2);
    let (tell, told) = channel();
    let threads: Vec<_> = (0..2)
        .map(|task| {
            let (cluster, tell) = (cluster.clone(), tell.clone());
            let settings: Vec<(String, String)> =
                settings.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
            std::thread::spawn(move || {
                let builder = settings
                    .into_iter()
                    .fold(member(&cluster, task), |builder, (key, value)| builder.set(&key, value));
                let node = builder.start().expect("starts");
                node.join().expect("joined");
                let sequence = node.sequence(BASE);
                let _standing =
                    (task == 1).then(|| node.standing(&here(&node, 0), sequence, WINDOW).expect("new"));
                let mut before = Snapshot::ZERO;
                for n in 0..2 * steps {
                    if n == steps {
                        before = node.counters();
                    }
                    match task {
                        0 => send_and_wait(&node, sequence, n, elements),
                        _ => receive(&node, sequence, n, elements),
                    }
                    if n > 0 {
                        node.cleanup(sequence.step(n - 1));
                    }
                }
                tell.send(node.counters().since(&before)).expect("somebody counts");
                node.stop().expect("stopped");
            })
        })
        .collect();
    let counts: Vec<Snapshot> = told.iter().take(2).collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let sum = |counter| counts.iter().map(|counts| counts.get(counter)).sum::<u64>();
    let small = sum(Counter::SmallResponses);
    Counted {
        data: sum(Counter::WritesPosted) + sum(Counter::LoansPosted) + small,
        control: sum(Counter::MessagesSent) - small,
    }
}

const STEPS: u64 = 160;

fn check_counts(settings: &[(&str, &str)], elements: usize) {
    let counted = count(settings, elements, STEPS);
    println!("{elements} elements, {STEPS} steps, a window of {WINDOW}: {counted:?}");
    assert_eq!(counted.data, STEPS);
    assert!(counted.control <= 2 * STEPS / u64::from(WINDOW), "{counted:?}");
}

#[test]
fn a_step_is_one_write_and_a_window_two_control_messages() {
    check_counts(&[], LARGE);
}

#[test]
fn a_step_with_a_small_tensor_is_one_message_and_a_window_two_more() {
    check_counts(&[], 2);
}

#[test]
fn a_step_is_one_loan_where_tensors_are_borrowed() {
    if !lends_nothing() {
        // Where loans that were not given back yet fill half of the queue, the next tensor is written.
        check_counts(&[("bulk_receive", "borrow"), ("queue_depth", "1024")], LARGE);
    }
}

#[test]
fn meta_data_may_change_at_any_step_whether_it_fits_or_not() {
    const SIZES: [usize; 9] = [1000, 1000, 700, 1000, 1500, 2, 0, 1501, 300];
    let steps = || (0..90_u64).map(|n| (n, SIZES[(n / 5) as usize % SIZES.len()]));
    pair(
        &[],
        move |node, sequence| {
            steps().for_each(|(n, size)| send(node, sequence, n, size));
            until(node, "all are sent", || node.counters().get(Counter::TensorsSent) == 90);
        },
        move |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            for (n, size) in steps() {
                receive(node, sequence, n, size);
                node.cleanup(sequence.step(n));
            }
            assert!(node.counters().get(Counter::RequestsClaimed) > 60);
        },
    );
}

#[test]
fn a_change_that_fits_costs_no_round_trip() {
    pair(
        &[],
        |node, sequence| {
            (0..4).for_each(|n| send_and_wait(node, sequence, n, 1000));
            let before = node.counters();
            // The last, short batch of an epoch, and what was before.
            [(4, 600), (5, 1000)].into_iter().for_each(|(n, size)| send_and_wait(node, sequence, n, size));
            let since = node.counters().since(&before);
            assert_eq!(since.get(Counter::MetaResponses), 1, "one for what was not known");
            assert_eq!(since.get(Counter::ReRequests), 0);
            assert_eq!(since.get(Counter::WritesPosted), 2);
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            for (n, size) in [(0, 1000), (1, 1000), (2, 1000), (3, 1000), (4, 600), (5, 1000)] {
                receive(node, sequence, n, size);
            }
        },
    );
}

/// Sends tensors of so many elements each, in turns with their receiver, whose window is 16. Returns what the sender counted
/// from step `from` on.
fn sizes(steps: u64, from: u64, size: impl Fn(u64) -> usize + Copy + Send + Sync + 'static) -> Snapshot {
    let (tell, told) = channel();
    pair(
        &[],
        move |node, sequence| {
            let mut before = Snapshot::ZERO;
            for n in 0..steps {
                if n == from {
                    before = node.counters();
                }
                send_and_wait(node, sequence, n, size(n));
                if n >= 4 {
                    // No further ahead than the receiver has come.
                    let back = begin(node, sequence, n - 4).recv(&here(node, 1), SOON).expect("told");
                    assert!(back.is_dead);
                    node.cleanup(sequence.step(n - 4));
                }
            }
            tell.send(node.counters().since(&before)).expect("somebody counts");
        },
        move |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, WINDOW).expect("new");
            for n in 0..steps {
                receive(node, sequence, n, size(n));
                begin(node, sequence, n).send_dead(&there(node, 0)).expect("sent");
            }
        },
    );
    told.recv().expect("counted")
}

#[test]
fn a_short_batch_in_each_epoch_costs_one_message_once() {
    let counted = sizes(160, 0, |n| if n % 20 == 19 { 1000 } else { LARGE });
    // The first tensor and the first short one are told of and, as nothing was asked for in advance, the first is asked again.
    assert!(counted.get(Counter::MetaResponses) <= 2, "{counted}");
    assert!(counted.get(Counter::ReRequests) <= 1, "{counted}");
}

#[test]
fn shapes_that_take_turns_cost_nothing_after_the_first_round() {
    for shapes in [2, 4] {
        let counted = sizes(160, 80, move |n| 1000 - 100 * (n as usize % shapes));
        assert_eq!(counted.get(Counter::MetaResponses), 0, "{shapes} shapes: {counted}");
        assert_eq!(counted.get(Counter::ReRequests), 0, "{shapes} shapes: {counted}");
        assert_eq!(counted.get(Counter::WritesPosted), 80, "{shapes} shapes: {counted}");
    }
}

#[test]
fn a_window_asked_for_while_tensors_are_small_has_room_for_the_large_ones() {
    // Twelve of one kind, twelve of the other: each half of a window is asked for while either is the last that came.
    let counted = sizes(160, 48, |n| if n / 12 % 2 == 0 { 2 } else { LARGE });
    assert_eq!(counted.get(Counter::MetaResponses), 0, "{counted}");
    assert_eq!(counted.get(Counter::ReRequests), 0, "{counted}");
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
            let counters = node.counters();
            assert!(counters.get(Counter::RequestsClaimed) >= 40, "{counters}");
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
            let pending = step.recv_pending(&here(node, 0)).expect("begun");
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
            // All receives are there before the first of these tensors is.
            let steps: Vec<_> = (100..200).map(|n| begin(node, sequence, n)).collect();
            let pending: Vec<_> =
                steps.iter().map(|step| step.recv_pending(&here(node, 0)).expect("begun")).collect();
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
                let both = [0, 1].map(|_| step.recv_pending(&here(node, 0)).expect("begun"));
                for pending in both {
                    assert_eq!(values(&pending.wait().expect("received").tensor)[0], n as f32);
                }
            }
        },
    );
}

#[test]
fn who_stops_asking_in_advance_loses_nothing() {
    pair(
        &[],
        |node, sequence| (0..30).for_each(|n| send(node, sequence, n, LARGE)),
        |node, sequence| {
            let standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            (0..10).for_each(|n| receive(node, sequence, n, LARGE));
            // Some of the next ones have come, and some are on their way.
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
fn a_receive_into_memory_takes_what_was_asked_for_in_advance() {
    pair(
        &[],
        |node, sequence| (0..30).for_each(|n| send(node, sequence, n, LARGE)),
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            for n in 0..30 {
                let into = node.tensor(DType::F32, &[LARGE as u64]).expect("room");
                let place = into.as_ptr();
                let pending = begin(node, sequence, n).recv_into(&here(node, 0), into).expect("begun");
                let got = pending.wait().expect("received").tensor;
                assert_eq!((got.as_ptr(), got.as_slice::<f32>().expect("f32")[0]), (place, n as f32));
            }
            assert!(node.counters().get(Counter::RequestsClaimed) > 20);
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
            drop(step.recv_pending(&here(node, 0)).expect("begun"));
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
fn steps_may_begin_late_at_the_sender_as_many_as_there_are() {
    // More than the requests that may wait for their steps.
    pair(
        &[("max_deferred", "2")],
        |node, sequence| {
            send(node, sequence, 0, LARGE);
            let told = begin(node, sequence, 0).recv(&node.edge_from("w", 1, "go").expect("edge"), SOON);
            told.expect("told");
            (1..16).for_each(|n| send(node, sequence, n, LARGE));
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 16).expect("new");
            receive(node, sequence, 0, LARGE);
            let first = begin(node, sequence, 1);
            until(node, "everything that is to happen", || node.counters().get(Counter::RequestsArmed) >= 16);
            begin(node, sequence, 0)
                .send(&node.edge_to("w", 0, "go").expect("edge"), counting(node, 0.0, 1))
                .expect("sent");
            drop(first);
            (1..16).for_each(|n| receive(node, sequence, n, LARGE));
        },
    );
}

#[test]
fn what_can_not_be_asked_for_in_advance_is_refused_by_name() {
    run(2, &[], |node, task| {
        let sequence = node.sequence(BASE);
        let error = node.standing(&there(node, 1 - task), sequence, 4).expect_err("it ends there");
        assert!(matches!(error, Error::WrongEnd { .. }), "{error}");
        let edge = here(node, 1 - task);
        let error = node.standing(&edge, sequence, 257).expect_err("too long");
        assert!(matches!(error, Error::ResourceExhausted { limit: 256, .. }), "{error}");
        let standing = node.standing(&edge, sequence, 4).expect("new");
        let error = node.standing(&edge, sequence, 4).expect_err("twice");
        assert!(error.code() == Code::AlreadyExists && error.to_string().contains("'x'"), "{error}");
        assert!(standing.set_window(300).is_err());
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
fn edges_that_would_take_the_whole_pool_leave_room_for_the_rest() {
    // 8 MiB of pool, tensors of 400 KiB.
    const BIG: usize = 100_000;
    pair(
        &[],
        |node, sequence| {
            for n in 0..20 {
                send(node, sequence, n, BIG);
                until(node, "everything that is to happen", || {
                    node.counters().get(Counter::TensorsSent) == n + 1
                });
                node.cleanup(sequence.step(n));
            }
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 64).expect("new");
            for n in 0..20 {
                receive(node, sequence, n, BIG);
                node.cleanup(sequence.step(n));
                assert!(node.pool().stats().allocated <= 3 << 20, "{:?}", node.pool().stats());
            }
            assert!(node.counters().get(Counter::RequestsClaimed) >= 10);
        },
    );
}

/// Sends ten steps from the one that the environment says, and goes on to serve until it is told to stop.
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
    until(&node, "an order", || orders.is_finished());
    node.stop().expect("stopped");
}

#[test]
fn a_sender_that_comes_back_is_asked_in_advance_again() {
    let cluster = cluster(2);
    let start = |first: u64| Other::start_with("sender", &cluster, &[("TEST_FIRST", &first.to_string())]);
    let mut sender = start(0);
    let node = member(&cluster, 1).start().expect("starts");
    node.join().expect("joined");
    let sequence = node.sequence(BASE);
    let _standing = node.standing(&here(&node, 0), sequence, 8).expect("new");
    (0..10).for_each(|n| receive(&node, sequence, n, LARGE));
    let claimed = node.counters().get(Counter::RequestsClaimed);
    assert!(claimed >= 8, "{claimed}");
    sender.kill();
    let error = begin(&node, sequence, 10).recv(&here(&node, 0), SOON).expect_err("nobody is there");
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    (0..10).for_each(|n| node.cleanup(sequence.step(n)));
    let mut sender = start(10);
    until(&node, "its return", || node.join().is_ok());
    (10..20).for_each(|n| receive(&node, sequence, n, LARGE));
    let again = node.counters().get(Counter::RequestsClaimed) - claimed;
    assert!(again >= 8, "{again} of the steps of the second life");
    sender.say("stop");
    assert!(sender.ends_well());
}
