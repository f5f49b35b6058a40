//! The errors of specification 3.5 between whole nodes: the right waiter gets the code, the message
//! and the details, complete.
//!
//! Errors that a whole node cannot cause (a key that is not the peer's, an earlier life of it) are
//! tested in `src/link/windows/tests.rs`.

use crate::common::{SOON, cluster, counting, member, run, until, values};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tensorwire::internals::wire::message::MAX_STATUS_TEXT;
use tensorwire::{CancelToken, Code, Counter, Edge, Error, Node, Status, Step};

const LONG: usize = 64 << 10;
const BASE: u64 = 1 << 40;

fn there(node: &Node, name: &str) -> Edge {
    node.edge_to("w", 1, name).expect("an edge")
}

fn here(node: &Node, name: &str) -> Edge {
    node.edge_from("w", 0, name).expect("an edge")
}

/// Bytes of every value, in no particular order.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// One status of each code, with texts and details from empty to long.
fn statuses() -> Vec<Status> {
    let codes = (1..=16).map(|number| Code::from_number(number).expect("a code"));
    let mut all: Vec<_> = codes
        .map(|code| Status::new(code, format!("the user's own {code:?}: ä, \0, \u{10FFFF}")))
        .enumerate()
        .map(|(n, status)| status.with_details(noise(37 * n)))
        .collect();
    all.push(Status::new(Code::DataLoss, ""));
    all.push(Status::new(Code::Unknown, "x".repeat(LONG)));
    all.push(Status::new(Code::Unknown, "").with_details(vec![0; LONG]));
    all.push(Status::new(Code::Aborted, "é".repeat(LONG / 2)).with_details(noise(LONG)));
    all
}

/// The error of a receive from task 0.
fn remote(error: &Error, name: &str) -> Status {
    match error {
        Error::Remote { peer, key, status } => {
            assert!(peer.to_string() == "w/0" && key.contains(&format!("'{name}'")), "{peer}, {key}");
            status.clone()
        }
        other => panic!("not an error of the peer's: {other}"),
    }
}

/// A barrier between the two sides.
struct Turns([AtomicU64; 2]);

impl Turns {
    const fn new() -> Self {
        Turns([const { AtomicU64::new(0) }; 2])
    }

    fn say(&self, node: &Node, so_far: u64) {
        self.0[node_task(node)].store(so_far, Ordering::SeqCst);
    }

    fn wait(&self, node: &Node, so_far: u64) {
        until(node, "the other's turn", || self.0[1 - node_task(node)].load(Ordering::SeqCst) >= so_far);
    }
}

fn node_task(node: &Node) -> usize {
    node.task().task() as usize
}

#[test]
fn an_abort_reaches_who_waits_already_and_who_comes_later_whole_and_marked_as_derived() {
    static TURNS: Turns = Turns::new();
    run(2, &[], |node, task| {
        for (n, status) in (0..).zip(statuses()) {
            let (first, second) = (node.step(2 * n).expect("usable"), node.step(2 * n + 1).expect("usable"));
            if task == 0 {
                TURNS.wait(node, 2 * n + 1);
                // The announcement has arrived or is on its way.
                let came = node.counters().get(Counter::MessagesReceived);
                (0..100).for_each(|_| drop(node.progress()));
                assert!(node.counters().get(Counter::MessagesReceived) >= came);
                first.abort(status.clone()).expect("aborted");
                second.abort(status.clone()).expect("aborted");
                TURNS.say(node, 2 * n + 1);
                TURNS.wait(node, 2 * n + 2);
            } else {
                let waiting = first.receive(&here(node, "x")).begin().expect("asked");
                TURNS.say(node, 2 * n + 1);
                TURNS.wait(node, 2 * n + 1);
                let later = second.recv(&here(node, "y"), SOON).expect_err("aborted there");
                let derived = status.into_derived();
                assert!(remote(&waiting.wait().expect_err("aborted there"), "x") == derived, "of {n}");
                assert!(later.is_derived() && later.code() == derived.code);
                assert!(remote(&later, "y") == derived, "of {n}");
                TURNS.say(node, 2 * n + 2);
            }
            node.cleanup(2 * n);
            node.cleanup(2 * n + 1);
        }
    });
}

#[test]
fn an_abort_reaches_receives_with_a_standing_request_that_wait_and_those_that_come_later() {
    if crate::common::calls_for_each_value() {
        return;
    }
    static TURNS: Turns = Turns::new();
    run(2, &[], |node, task| {
        let sequence = node.sequence(BASE);
        let statuses = statuses();
        let steps = 2 + 2 * statuses.len() as u64;
        let standing = (task == 1).then(|| node.standing(&here(node, "x"), sequence, 8).expect("new"));
        for n in 0..steps {
            let step = node.step(sequence.step(n)).expect("usable");
            let status = n.checked_sub(2).map(|at| statuses[at as usize / 2].clone());
            match (task, status) {
                (0, None) => step.send(&there(node, "x"), counting(node, n as f32, 999)).expect("sent"),
                (0, Some(status)) => {
                    TURNS.wait(node, n);
                    step.abort(status).expect("aborted");
                }
                (_, None) => {
                    let got = step.recv(&here(node, "x"), SOON).expect("sent");
                    assert_eq!(values(&got.tensor)[0], n as f32);
                }
                (_, Some(status)) => {
                    let received = node.counters().get(Counter::ErrorsReceived);
                    let outcome = if n % 2 == 0 {
                        let waiting = step.receive(&here(node, "x")).begin().expect("begun");
                        TURNS.say(node, n);
                        waiting.wait()
                    } else {
                        TURNS.say(node, n);
                        until(node, "the error comes", || {
                            node.counters().get(Counter::ErrorsReceived) > received
                        });
                        step.recv(&here(node, "x"), SOON)
                    };
                    let error = outcome.expect_err("aborted there");
                    assert!(remote(&error, "x") == status.into_derived(), "step {n}");
                }
            }
        }
        drop(standing);
    });
}

#[test]
fn of_two_waiters_the_one_gets_the_error_and_the_other_its_value() {
    static TURNS: Turns = Turns::new();
    run(2, &[], |node, task| {
        let [good, bad] = [7, 8].map(|id| node.step(id).expect("usable"));
        let status = Status::new(Code::OutOfRange, "only this one").with_details(noise(5000));
        if task == 0 {
            TURNS.wait(node, 1);
            bad.abort(status).expect("aborted");
            TURNS.wait(node, 2);
            good.send(&there(node, "x"), counting(node, 3.0, 500)).expect("sent");
            good.send(&there(node, "z"), counting(node, 4.0, 2)).expect("sent");
        } else {
            let waits = |step: &Step, name| step.receive(&here(node, name)).begin().expect("asked");
            let (other, lost, third) = (waits(&good, "x"), waits(&bad, "x"), waits(&good, "z"));
            let cancelled = waits(&good, "w");
            TURNS.say(node, 1);
            assert!(remote(&lost.wait().expect_err("aborted"), "x") == status.into_derived());
            assert!(!other.is_done() && !third.is_done() && !cancelled.is_done());
            cancelled.cancel_token().cancel();
            let error = cancelled.wait().expect_err("cancelled");
            assert!(matches!(&error, Error::Cancelled { key } if key.contains("'w'")), "{error}");
            assert!(!other.is_done() && !third.is_done() && error.code() == Code::Cancelled);
            TURNS.say(node, 2);
            assert_eq!(values(&other.wait().expect("sent").tensor)[0], 3.0);
            assert_eq!(values(&third.wait().expect("sent").tensor)[0], 4.0);
        }
    });
}

#[test]
fn a_step_that_the_sender_has_cleaned_up_is_named() {
    static TURNS: Turns = Turns::new();
    run(2, &[], |node, task| {
        if task == 0 {
            node.step(1).expect("usable");
            node.cleanup(1);
            TURNS.say(node, 1);
            TURNS.wait(node, 1);
            return;
        }
        TURNS.wait(node, 1);
        let gone = node.step(1).expect("usable").recv(&here(node, "x"), SOON).expect_err("cleaned up there");
        let status = remote(&gone, "x");
        assert_eq!((status.code, status.derived), (Code::NotFound, false));
        assert!(status.message == "step 1 was cleaned up at w/0", "{status}");
        TURNS.say(node, 1);
    });
}

#[test]
fn within_a_process_an_error_is_whole_whatever_its_size_and_none_of_its_own_is_derived() {
    run(1, &[], |node, _| {
        let step = node.step(1).expect("usable");
        let edge = node.edge_to("w", 0, "x").expect("an edge");
        let waiting = step.receive(&edge).begin().expect("asked");
        let endless = 2 * MAX_STATUS_TEXT;
        let status = Status::new(Code::Internal, "é".repeat(endless)).with_details(noise(endless));
        step.abort(status.clone()).expect("aborted");
        for error in [waiting.wait().expect_err("aborted"), step.recv(&edge, SOON).expect_err("aborted")] {
            assert!(!error.is_derived());
            assert!(
                matches!(&error, Error::Aborted { step, status: told } if step.get() == 1 && *told == status)
            );
        }
    });
}

#[test]
fn a_text_beyond_what_travels_is_cut_and_the_text_says_so() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("usable");
        if task == 0 {
            let status = Status::new(Code::Internal, "x".repeat(MAX_STATUS_TEXT + 1));
            step.abort(status.with_details(noise(MAX_STATUS_TEXT + 1))).expect("aborted");
            return;
        }
        let status = remote(&step.recv(&here(node, "x"), SOON).expect_err("aborted"), "x");
        assert!(status.message.starts_with("xxx") && status.details.is_empty());
        assert!(status.message.ends_with(
            "[262145 bytes of details were left out: 262144 travel at most] [cut from 262145 bytes]"
        ));
    });
}

#[test]
fn many_waiters_get_a_long_error_each() {
    static TURNS: Turns = Turns::new();
    const WAITERS: u64 = 40;
    // More fragments than the send queue permits: each error counts once there. The ring of the
    // link holds a part of one error.
    run(2, &[("queue_depth", "64")], |node, task| {
        let step = node.step(1).expect("usable");
        let status = Status::new(Code::Internal, "y".repeat(LONG)).with_details(noise(LONG));
        if task == 0 {
            TURNS.wait(node, 1);
            step.abort(status).expect("aborted");
            return;
        }
        let ask = |n| step.receive(&here(node, &format!("e{n}"))).begin().expect("asked");
        let waiting: Vec<_> = (0..WAITERS).map(ask).collect();
        TURNS.say(node, 1);
        for (n, pending) in waiting.into_iter().enumerate() {
            let error = pending.wait().expect_err("aborted");
            assert!(remote(&error, &format!("e{n}")) == status.clone().into_derived());
        }
    });
}

#[test]
fn a_job_whose_name_begins_with_a_digit_is_a_job_from_the_settings_to_the_edge() {
    let cluster = cluster(1).replace("w=", "7up=");
    let node = member(&cluster, 0).member("7up", 0).start().expect("a node");
    node.join().expect("joined");
    assert_eq!(node.task().to_string(), "7up/0");
    let edge = node.edge_to("7up", 0, "itself").expect("an edge");
    node.step(1).expect("a step").send(&edge, counting(&node, 0.0, 4)).expect("sent");
}

#[test]
fn an_edge_of_another_node_is_refused_and_harms_neither() {
    let [small, large] = [1, 3].map(|members| member(&cluster(members), 0).start().expect("it starts"));
    let (to, from) = (large.edge_to("w", 2, "x").expect("edge"), large.edge_from("w", 2, "x").expect("edge"));
    let step = small.step(1).expect("new");
    let tensor = || counting(&small, 0.0, 10);
    let sends = [
        step.send(&to, tensor()),
        step.send_dead(&to),
        step.send_within(&to, tensor(), SOON).map_err(|failed| failed.error),
        step.send_all([(&to, tensor())]),
        small.batch([to.clone()]).expect("usable").send(&step, [tensor()]),
        large.batch([to]).expect("usable").send(&step, [tensor()]),
    ];
    let sequence = small.sequence(1 << 40);
    let receives = [
        step.recv(&from, SOON).map(drop),
        step.try_recv(&from).map(drop),
        step.receive(&from).begin().map(drop),
        step.recv_all(&[&from], SOON).map(drop),
        small.standing(&from, sequence, 4).map(drop),
        small.batch([from.clone()]).expect("usable").recv(&step, SOON).map(drop),
        large.batch([from.clone()]).expect("usable").recv(&step, SOON).map(drop),
        small.batch([from]).expect("usable").recv(&large.step(1).expect("new"), SOON).map(drop),
    ];
    for refused in sends.into_iter().chain(receives) {
        let error = refused.expect_err("it is the other node's");
        assert!(matches!(error, Error::WrongEnd { .. }), "{error}");
        assert!(error.to_string().contains("of another task or cluster"), "{error}");
    }
    let own = small.edge_to("w", 0, "own").expect("edge");
    step.send(&own, tensor()).expect("sent");
    step.recv(&own, SOON).expect("received");
    for node in [small, large] {
        node.progress().expect("its pollers are well");
    }
}

/// A peer of the node that made the edge is the node that uses it.
#[test]
fn an_edge_of_another_node_of_the_cluster_is_refused_for_that() {
    let cluster = cluster(2);
    let [first, second] = [0, 1].map(|task| member(&cluster, task).start().expect("it starts"));
    let (to, from) =
        (first.edge_to("w", 1, "x").expect("edge"), second.edge_from("w", 0, "x").expect("edge"));
    let refused = [
        first.step(1).expect("new").send_dead(&from),
        second.step(1).expect("new").recv(&to, SOON).map(drop),
    ];
    for (task, refused) in refused.into_iter().enumerate() {
        let error = refused.expect_err("it is the other node's").to_string();
        let expected =
            format!(" is of a node of another task or cluster than this node, which is w/{task}: ");
        assert!(error.contains(&expected), "{error}");
    }
}

/// In inline mode the thread that waits holds the poller.
#[test]
fn another_thread_ends_a_wait_by_a_cancellation_an_abort_or_a_cleanup() {
    type End = (fn(&Step, &CancelToken), fn(&Error) -> bool);
    const ENDS: [End; 3] = [
        (|_, token| token.cancel(), |error| matches!(error, Error::Cancelled { .. })),
        (
            |step, _| step.abort(Status::new(Code::Internal, "enough")).expect("an error"),
            |error| matches!(error, Error::Aborted { .. }),
        ),
        (|step, _| step.cleanup(), |error| matches!(error, Error::StepGone { .. })),
    ];
    for mode in ["inline", "adaptive", "dedicated"] {
        run(2, &[("poll", mode), ("pollers", "1")], |node, task| {
            if task == 1 {
                return;
            }
            let edge = node.edge_from("w", 1, "x").expect("an edge");
            for (id, (end, is_it)) in (1..).zip(ENDS) {
                let step = node.step(id).expect("new");
                let pending = step.receive(&edge).within(SOON).begin().expect("begun");
                let token = pending.cancel_token();
                let began = Instant::now();
                let error = std::thread::scope(|scope| {
                    let waiting = scope.spawn(move || pending.wait().expect_err("nothing was sent"));
                    std::thread::sleep(Duration::from_millis(50));
                    end(&step, &token);
                    waiting.join().expect("no panic")
                });
                assert!(is_it(&error), "{error}");
                assert!(began.elapsed() < SOON / 4, "{:?}", began.elapsed());
            }
        });
    }
}
