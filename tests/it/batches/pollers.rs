//! Batches whose edges belong to two pollers and to the local table. Waits, cancels and failures
//! involve all of them.
//!
//! Each test has three members. Task 0 serves task 2 with its first poller and task 1 with its
//! second.

use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tensorwire::{Code, Error, Status};

const MEMBERS: u32 = 3;
/// Number of edges between two tasks.
const EACH: usize = 5;

/// Runs `body` with pollers that sleep, and with pollers that spin.
fn on_two_pollers(body: impl Fn(&Node, u32) + Clone + Send + Sync + 'static) {
    for mode in ["adaptive", "dedicated"] {
        println!("{mode}");
        run(MEMBERS as usize, &[("poll", mode), ("pollers", "2")], body.clone());
    }
}

/// A barrier for the members. A member that fails delays the others only for a timeout.
#[derive(Clone, Default)]
struct Meeting(Arc<AtomicUsize>);

impl Meeting {
    fn meet(&self, node: &Node) {
        let all = MEMBERS as usize;
        let goal = (self.0.fetch_add(1, Ordering::SeqCst) + 1).next_multiple_of(all);
        until(node, "the others' coming", || self.0.load(Ordering::SeqCst) >= goal);
    }
}

/// An edge from each task to task 0.
fn to_first(node: &Node, me: u32) -> Edge {
    node.edge_to("w", 0, &format!("x/{me}")).expect("an edge")
}

fn from_each(node: &Node) -> Vec<Edge> {
    (0..MEMBERS).map(|from| node.edge_from("w", from, &format!("x/{from}")).expect("an edge")).collect()
}

/// The edges of this task, in turns over the other ends.
fn interleaved(edge: impl Fn(u32, &str) -> Result<Edge, Error>) -> Vec<Edge> {
    let ends = |name: String| (0..MEMBERS).map(move |task| (task, name.clone()));
    names(EACH).flat_map(ends).map(|(task, name)| edge(task, &name).expect("an edge")).collect()
}

fn edges_to_all(node: &Node) -> Vec<Edge> {
    interleaved(|task, name| node.edge_to("w", task, name))
}

fn edges_from_all(node: &Node) -> Vec<Edge> {
    interleaved(|task, name| node.edge_from("w", task, name))
}

/// The first element of a tensor: step, sender, and index among the edges.
fn first(step: u64, from: u32, at: usize) -> f32 {
    (step * 10_000 + u64::from(from) * 1000 + at as u64) as f32
}

fn values_of(node: &Node, step: u64, from: u32) -> Vec<Tensor> {
    (0..EACH * MEMBERS as usize).map(|at| counting(node, first(step, from, at), 2)).collect()
}

/// Asserts that each peer's edges have its values, in order.
fn check_all(received: &[Delivery<Tensor>], step: u64, me: u32) {
    assert_eq!(received.len(), EACH * MEMBERS as usize);
    for (at, delivery) in received.iter().enumerate() {
        let (from, nth) = (at as u32 % MEMBERS, at / MEMBERS as usize);
        let sent_at = nth * MEMBERS as usize + me as usize;
        assert_eq!(values(&delivery.tensor)[0], first(step, from, sent_at), "edge {at} of step {step}");
    }
}

#[test]
fn a_batch_over_two_pollers_and_the_process_itself_comes_whole_step_after_step() {
    if crate::common::calls_for_each_value() {
        return;
    }
    const STEPS: u64 = 20;
    on_two_pollers(|node, me| {
        let out = node.batch(edges_to_all(node)).expect("usable");
        let back = node.batch(edges_from_all(node)).expect("usable");
        let mut received = Vec::new();
        let before = node.counters();
        for n in 0..STEPS {
            let step = begin(node, n);
            out.send(&step, values_of(node, n, me)).expect("sent");
            back.recv_many(&step, SOON, &mut received).expect("received");
            check_all(&received, n, me);
            if n > 1 {
                node.cleanup(n - 2);
            }
        }
        // All edges of task 1 belong to one poller. Those of the others belong to two, each with a
        // part of the batch.
        let parts = if me == 1 { 2 } else { 4 };
        until(node, "each part", || node.counters().since(&before).get(Counter::Batches) == parts * STEPS);
    });
}

#[test]
fn edges_with_a_standing_request_come_over_both_pollers() {
    const STEPS: u64 = 30;
    on_two_pollers(|node, me| {
        let sequence = node.sequence(1 << 40);
        let from = edges_from_all(node);
        let standing = |edge| node.standing(edge, sequence, 8).expect("new");
        let _standing: Vec<_> = from.iter().map(standing).collect();
        let out = node.batch(edges_to_all(node)).expect("usable");
        let back = node.batch(from).expect("usable");
        for n in 0..STEPS {
            let step = begin(node, sequence.step(n).get());
            out.send(&step, values_of(node, n, me)).expect("sent");
            check_all(&back.recv(&step, SOON).expect("received"), n, me);
            if n > 1 {
                node.cleanup(sequence.step(n - 2));
            }
        }
    });
}

/// The deadline reaches both pollers and the local table at the same time. Each edge has its own
/// result.
#[test]
fn who_waits_for_each_hears_which_edges_were_late_wherever_they_are() {
    const ROUNDS: u64 = 24;
    let meeting = Meeting::default();
    on_two_pollers(move |node, me| {
        let (from, to_first) = (from_each(node), to_first(node, me));
        let mut came = [0; MEMBERS as usize];
        for round in 0..ROUNDS {
            let step = begin(node, round);
            // In turns one, two or all of them are late.
            let is_late = |task: u32| (round % 7 + 1) & (1 << task) != 0;
            if !is_late(me) {
                step.send(&to_first, counting(node, first(round, me, 0), 2)).expect("sent");
            }
            meeting.meet(node);
            if me == 0 {
                let patience = Duration::from_millis(15);
                let start = Instant::now();
                let pending = step.receive_all(&borrowed(&from)).within(patience).begin().expect("begun");
                let ends = pending.wait_each();
                assert!(start.elapsed() >= patience, "round {round}");
                assert_eq!(ends.len(), MEMBERS as usize, "round {round}");
                for (task, end) in (0..).zip(ends) {
                    let named = format!("'x/{task}'");
                    match end {
                        Ok(got) => {
                            assert_eq!(values(&got.tensor)[0], first(round, task, 0));
                            came[task as usize] += 1;
                        }
                        // On a busy machine a sent value may be late too.
                        Err(Error::DeadlineExceeded { key, .. }) => assert!(key.contains(&named), "{key}"),
                        Err(error) => panic!("round {round}, task {task}: {error}"),
                    }
                }
            }
            meeting.meet(node);
        }
        assert!(me != 0 || came.iter().all(|came| *came > 0), "what was sent came in no round: {came:?}");
    });
}

#[test]
fn a_failure_on_one_poller_ends_the_wait_while_the_others_values_are_still_to_come() {
    // The task that fails, and the task that sends later: first the second poller's fails, then the
    // first one's.
    for (bad, good) in [(1, 2), (2, 1)] {
        let meeting = Meeting::default();
        on_two_pollers(move |node, me| {
            let step = begin(node, 1);
            if me == 0 {
                let from = from_each(node);
                let pending = step.receive_all(&borrowed(&from)).within(SOON).begin().expect("begun");
                meeting.meet(node);
                let start = Instant::now();
                let error = pending.wait().expect_err("aborted there");
                assert!(start.elapsed() < SOON / 2, "it waited for the others");
                let named = format!("'x/{bad}'");
                assert!(matches!(&error, Error::Remote { key, .. } if key.contains(&named)), "{error}");
                meeting.meet(node);
                let others = [0, good].map(|task| &from[task as usize]);
                step.send(&from[0], counting(node, first(1, 0, 0), 2)).expect("sent");
                let received = step.recv_all(&others, SOON).expect("for whoever asks next");
                let got = [0, 1].map(|at: usize| values(&received[at].tensor)[0]);
                assert_eq!(got, [first(1, 0, 0), first(1, good, 0)]);
                return;
            }
            meeting.meet(node);
            if me == bad {
                step.abort(Status::new(Code::Internal, "of no use")).expect("an error");
            }
            meeting.meet(node);
            if me == good {
                step.send(&to_first(node, me), counting(node, first(1, good, 0), 2)).expect("sent");
            }
        });
    }
}

#[test]
fn dropping_a_batch_cancels_its_receives_on_both_pollers() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let meeting = Meeting::default();
    on_two_pollers(move |node, me| {
        let step = begin(node, 1);
        if me == 0 {
            let from = edges_from_all(node);
            let pending = step.receive_all(&borrowed(&from)).within(SOON).begin().expect("begun");
            // The announcements have reached the peers.
            meeting.meet(node);
            assert!(!pending.is_done());
            drop(pending);
            // What is sent from now on is not for this batch.
            meeting.meet(node);
            let to = edges_to_all(node);
            step.send_all(to.iter().zip(values_of(node, 1, 0))).expect("sent");
            check_all(&step.recv_all(&borrowed(&from), SOON).expect("for whoever asks next"), 1, 0);
            return;
        }
        let received = || node.counters().get(Counter::MessagesReceived);
        until(node, "the announcements", || received() >= EACH as u64);
        meeting.meet(node);
        meeting.meet(node);
        let to = edges_to_all(node);
        step.send_all(to.iter().zip(values_of(node, 1, me))).expect("sent");
    });
}
