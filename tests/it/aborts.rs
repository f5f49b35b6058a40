//! Aborts of the steps of a sequence from one on.

use crate::common::{SOON, counting, run, until};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tensorwire::{Code, Edge, Error, Node, Status, Step, StepId};

const BASE: u64 = 1 << 40;
const CAUSE: &str = "the loss is NaN";

fn to(node: &Node, task: u32, name: &str) -> Edge {
    node.edge_to("w", task, name).expect("an edge")
}

fn from(node: &Node, task: u32, name: &str) -> Edge {
    node.edge_from("w", task, name).expect("an edge")
}

fn cause() -> Status {
    Status::new(Code::DataLoss, CAUSE)
}

/// Whether a call on a step of this process failed by the abort.
fn is_ours(error: &Error, id: StepId) -> bool {
    matches!(error, Error::Aborted { step, status } if *step == id && status.message == CAUSE)
}

/// Whether a receive failed by the abort of its sender.
fn is_theirs(error: &Error) -> bool {
    error.is_derived() && matches!(error, Error::Remote { status, .. } if status.message == CAUSE)
}

/// Waits until every other member says as much.
fn meet(node: &Node, said: &AtomicU64, count: u64) {
    said.fetch_add(1, Ordering::SeqCst);
    until(node, "the others", || said.load(Ordering::SeqCst) >= count);
}

#[test]
fn an_abort_from_a_step_on_ends_each_later_step_of_the_sequence_here_and_at_all_peers() {
    static SAID: AtomicU64 = AtomicU64::new(0);
    run(3, &[], |node, task| {
        let (sequence, next) = (node.sequence(BASE), node.sequence(2 * BASE));
        let steps: Vec<Step> = (0..4).map(|n| node.step(sequence.step(n)).expect("new")).collect();
        if task != 0 {
            let edge = from(node, 0, "x");
            let begin = |step: &Step| step.receive(&edge).begin().expect("begun");
            let waiting: Vec<_> = steps.iter().map(begin).collect();
            // Their own exchange goes on.
            let (other, step) = (3 - task, &steps[3]);
            step.send(&to(node, other, "ours"), counting(node, 5.0, 9)).expect("sent");
            step.recv(&from(node, other, "ours"), SOON).expect("received");
            meet(node, &SAID, 3);
            let mut ended = waiting.into_iter().map(|pending| pending.wait());
            assert!(ended.next().is_some_and(|first| first.is_ok()), "it is before the range");
            ended.for_each(|ended| assert!(is_theirs(&ended.expect_err("aborted"))));
            for n in [1, 3, 4, 1_000_000] {
                let step = node.step(sequence.step(n)).expect("it goes on here");
                assert!(is_theirs(&step.recv(&edge, SOON).expect_err("aborted")), "step {n}");
                assert!(is_theirs(&step.recv(&from(node, 0, "new"), SOON).expect_err("aborted")));
            }
            node.step(next.step(0)).expect("new").recv(&edge, SOON).expect("another sequence");
            return meet(node, &SAID, 6);
        }
        // A receive of this process, within it and from a peer.
        let here = steps[2].receive(&from(node, 0, "own")).begin().expect("begun");
        let there = steps[3].receive(&from(node, 1, "never")).begin().expect("begun");
        meet(node, &SAID, 3);
        sequence.abort_from(&steps[1], cause()).expect("aborted");
        let other = Status::new(Code::Internal, "too late");
        sequence.abort_from(&steps[2], other.clone()).expect("it changes nothing");
        for pending in [here, there] {
            assert!(matches!(pending.wait(), Err(Error::Aborted { status, .. }) if status == cause()));
        }
        let later: Vec<Step> = (4..7).map(|n| node.step(sequence.step(n)).expect("it begins")).collect();
        for step in steps[1..].iter().chain(&later) {
            step.abort(other.clone()).expect("it changes nothing");
            let sent = [1, 2, 0].map(|task| step.send(&to(node, task, "x"), counting(node, 0.0, 9)));
            assert!(sent.into_iter().all(|sent| is_ours(&sent.expect_err("aborted"), step.id())));
            let edges = [from(node, 1, "y"), from(node, 0, "own")];
            let received = edges.map(|edge| step.recv(&edge, SOON).map(drop));
            assert!(received.into_iter().all(|error| is_ours(&error.expect_err("aborted"), step.id())));
        }
        for task in [1, 2] {
            steps[0].send(&to(node, task, "x"), counting(node, 0.0, 9)).expect("it is before the range");
            let next = node.step(next.step(0)).expect("new");
            next.send(&to(node, task, "x"), counting(node, 1.0, 9)).expect("another sequence");
        }
        meet(node, &SAID, 6);
        for step in steps.iter().chain(&later) {
            step.cleanup();
            assert!(matches!(node.step(step.id()), Err(Error::StepGone { .. })));
        }
    });
}

#[test]
fn a_sequence_that_the_node_of_the_step_has_not_declared_aborts_nothing() {
    let declared = Arc::new(OnceLock::new());
    let sequence = declared.clone();
    run(1, &[], move |node, _| sequence.set(node.sequence(BASE)).expect("once"));
    let sequence = *declared.get().expect("of another node");
    run(1, &[], move |node, _| {
        let step = node.step(BASE + 50).expect("new");
        let error = sequence.abort_from(&step, cause()).expect_err("it was not declared here");
        assert!(matches!(error, Error::UndeclaredSequence { .. }) && error.code() == Code::InvalidArgument);
        assert!(error.to_string().contains("Node::sequence"), "{error}");
        let later = node.step(BASE + 51).expect("new");
        for step in [step, later] {
            step.send_dead(&to(node, 0, "x")).expect("it is live");
        }
    });
}

#[test]
fn a_step_of_another_sequence_aborts_nothing() {
    run(1, &[], |node, _| {
        let (sequence, next) = (node.sequence(BASE), node.sequence(2 * BASE));
        let steps = [1, BASE, 2 * BASE].map(|id| node.step(id).expect("new"));
        for step in [&steps[0], &steps[2]] {
            let error = sequence.abort_from(step, cause()).expect_err("of another sequence");
            let text = error.to_string();
            assert!(matches!(error, Error::NotOfSequence { .. }) && error.code() == Code::InvalidArgument);
            let bounds = [BASE, 2 * BASE - 1].map(|step| format!("{step}"));
            assert!(bounds.iter().all(|bound| text.contains(bound)), "{text}");
        }
        let ok = Status::new(Code::Ok, "");
        assert!(matches!(sequence.abort_from(&steps[1], ok), Err(Error::AbortWithOk { .. })));
        let send = |step: &Step| step.send(&to(node, 0, "x"), counting(node, 0.0, 9));
        steps.iter().for_each(|step| send(step).expect("live"));
        next.abort_from(&steps[2], cause()).expect("its last step is 2^64-1");
        assert!(send(&steps[0]).is_ok() && send(&steps[1]).is_ok());
        assert!(is_ours(&send(&steps[2]).expect_err("aborted"), steps[2].id()));
        let last = node.step(u64::MAX).expect("it begins");
        assert!(is_ours(&send(&last).expect_err("aborted"), last.id()));
    });
}

#[test]
fn peers_that_ask_only_later_hear_of_the_abort_of_their_sender() {
    static SAID: AtomicU64 = AtomicU64::new(0);
    run(3, &[], |node, task| {
        let sequence = node.sequence(BASE);
        let step = node.step(sequence.step(3)).expect("new");
        match task {
            0 => {
                let alone = node.step(7).expect("new");
                alone.abort(cause()).expect("aborted");
                sequence.abort_from(&step, cause()).expect("aborted");
                meet(node, &SAID, 3);
                until(node, "the answers", || SAID.load(Ordering::SeqCst) >= 5);
            }
            // Neither has announced an edge before.
            _ => {
                meet(node, &SAID, 3);
                for id in [7, BASE + 3, BASE + 9] {
                    let step = node.step(id).expect("usable");
                    assert!(is_theirs(&step.recv(&from(node, 0, "x"), SOON).expect_err("aborted")));
                }
                // Steps of others go on.
                let other = 3 - task;
                step.send(&to(node, other, "ours"), counting(node, 5.0, 9)).expect("sent");
                step.recv(&from(node, other, "ours"), SOON).expect("received");
                meet(node, &SAID, 5);
            }
        }
    });
}
