//! The cost of edges with a `Standing`, in messages.

use super::{LARGE, begin, here, received, send, there, until_posted};
use crate::common::{SOON, calls_for_each_value, cluster, lends_nothing, member, until, writes_bulk};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use tensorwire::{Code, Counter, Node, Snapshot, Status};

/// How a step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Tensor,
    Dead,
    /// Neither side sends or receives, and both clean it up.
    Skipped,
    /// Its sender aborts it.
    Aborted,
}

/// A counted series of steps.
#[derive(Clone, Copy)]
struct Program {
    settings: &'static [(&'static str, &'static str)],
    window: u32,
    elements: usize,
    what: fn(u64) -> What,
    order: fn(u64) -> u64,
    /// How many of the newest tensors the receiver holds.
    holds: usize,
}

const PLAIN: Program =
    Program { settings: &[], window: 16, elements: LARGE, what: |_| What::Tensor, order: |n| n, holds: 0 };

/// The counters once all messages are sent that the node's values so far made due. A poller hands
/// a value to its receive first and sends the credit then, and reports its edges after both.
pub fn settled(node: &Node) -> Snapshot {
    node.edges(0).expect("a report");
    node.counters()
}

/// The counters of both sides in the second half of the steps. In the first half all shapes become
/// known. Each side counts its own posts.
fn run(program: Program, steps: u64) -> Snapshot {
    let cluster = cluster(2);
    let (tell, told) = channel();
    let ended = Arc::new(AtomicU64::new(0));
    let steps_received = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..2)
        .map(|task| {
            let (cluster, tell, ended) = (cluster.clone(), tell.clone(), ended.clone());
            let steps_received = steps_received.clone();
            std::thread::spawn(move || {
                let settings = program.settings.iter();
                let builder =
                    settings.fold(member(&cluster, task), |builder, (key, value)| builder.set(*key, *value));
                let node = builder.start().expect("starts");
                node.join().expect("joined");
                let sequence = node.sequence(super::BASE);
                let standing = || node.standing(&here(&node, 0), sequence, program.window).expect("new");
                let _standing = (task == 1).then(standing);
                let (mut before, mut sent, mut tensors) = (Snapshot::ZERO, 0, 0);
                let mut held = VecDeque::new();
                for nth in 0..2 * steps {
                    if nth == steps {
                        if task == 0 {
                            until_posted(&node, sent, tensors);
                        }
                        before = settled(&node);
                    }
                    let n = (program.order)(nth);
                    match ((program.what)(n), task) {
                        (What::Tensor, 0) => send(&node, sequence, n, program.elements),
                        (What::Tensor, _) => {
                            held.push_back(received(&node, sequence, n, program.elements));
                            held.drain(..held.len().saturating_sub(program.holds));
                        }
                        (What::Dead, 0) => {
                            begin(&node, sequence, n).send_dead(&there(&node, 1)).expect("sent");
                        }
                        (What::Dead, _) => {
                            let got = begin(&node, sequence, n).recv(&here(&node, 0), SOON).expect("dead");
                            assert!(got.is_dead);
                        }
                        (What::Skipped, _) => drop(begin(&node, sequence, n)),
                        (What::Aborted, 0) => {
                            let status = Status::new(Code::Internal, "no data");
                            begin(&node, sequence, n).abort(status).expect("an error");
                        }
                        (What::Aborted, _) => {
                            let got = begin(&node, sequence, n).recv(&here(&node, 0), SOON);
                            assert_eq!(got.expect_err("aborted").code(), Code::Internal);
                        }
                    }
                    let what = (program.what)(n);
                    sent += u64::from(matches!(what, What::Tensor | What::Dead));
                    tensors += u64::from(what == What::Tensor);
                    if task == 0 {
                        until(&node, "it leaves", || node.counters().get(Counter::TensorsSent) >= sent);
                    }
                    steps_received.fetch_add(u64::from(task), Ordering::Relaxed);
                    // Cleaned up a block of eight steps later: the steps of a block end in any
                    // order. A cleanup at the sender drops values that were not received.
                    if nth % 8 == 7 && nth > 8 {
                        let received = || steps_received.load(Ordering::Relaxed);
                        until(&node, "the receiver", || received() >= nth - 7);
                        (nth - 15..nth - 7).for_each(|n| node.cleanup(sequence.step(n)));
                    }
                }
                if task == 0 {
                    until_posted(&node, sent, tensors);
                    let told = || node.counters().since(&before).get(Counter::StepsOverSent);
                    until(&node, "an end is told", || told() > 0);
                }
                tell.send(settled(&node).since(&before)).expect("somebody counts");
                // A value that has arrived and was not taken is an orphan once its sender leaves,
                // and a receiver that has left hears no ends of steps.
                ended.fetch_add(1, Ordering::Relaxed);
                until(&node, "both ends", || ended.load(Ordering::Relaxed) == 2);
                node.stop().expect("stopped");
            })
        })
        .collect();
    let mut sum = Snapshot::ZERO;
    drop(tell);
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    told.iter().for_each(|counts| sum += &counts);
    sum
}

/// In N steps with windows of W steps, each value costs its record, each tensor its data operation,
/// and each offered tensor a grant. All windows together cost at most 2 N / W messages.
fn check(program: Program, steps: u64) {
    if calls_for_each_value() {
        return;
    }
    let counts = run(program, steps);
    let of = |what| (steps..2 * steps).filter(|n| (program.what)(*n) == what).count() as u64;
    let get = |counter| counts.get(counter);
    let data = get(Counter::WritesPosted) + get(Counter::LoansPosted) + get(Counter::SmallTensorsSent);
    assert_eq!(data, of(What::Tensor), "{counts:?}");
    let aborted = of(What::Aborted);
    // The receiver hears once of each abort. It hears once of each cleanup, with others or alone;
    // those of the first half may be told in the second, and those of the second later.
    assert_eq!(get(Counter::ErrorsSent), aborted, "{counts:?}");
    let (records, ends) = (of(What::Tensor) + of(What::Dead), get(Counter::StepsOverSent));
    assert!((1..=steps + aborted + 16).contains(&ends), "{counts:?}");
    let grants = if writes_bulk() { get(Counter::WritesPosted) } else { 0 };
    let control = get(Counter::MessagesSent) - records - ends - grants;
    println!("{steps} steps with a window of {}: {data} data operations, {control} messages", program.window);
    // A destination is granted ahead by the thread that polls. So the receiver may count the one of
    // its first value, and always counts the one behind its last.
    let ahead = u64::from(writes_bulk());
    let most = (2 * steps).div_ceil(u64::from(program.window)) + ahead;
    assert!(control <= most, "{control} messages, not {most}");
}

#[test]
fn a_step_is_one_write_and_a_window_two_messages() {
    for (window, steps) in [(1, 40), (2, 80), (16, 160), (64, 256), (256, 512)] {
        check(Program { window, ..PLAIN }, steps);
    }
}

#[test]
fn a_step_with_a_small_tensor_is_one_message_and_a_window_two_more() {
    for (window, steps) in [(1, 40), (16, 160), (256, 512)] {
        check(Program { window, elements: 2, ..PLAIN }, steps);
    }
}

#[test]
fn a_step_is_one_loan_where_tensors_are_borrowed() {
    if !lends_nothing() {
        let settings = &[("bulk_receive", "borrow")];
        check(Program { settings, ..PLAIN }, 160);
    }
}

#[test]
fn what_would_be_borrowed_and_is_not_lent_is_written_for_as_few_messages() {
    check(Program { settings: &[("bulk_receive", "borrow"), ("max_lent_bytes", "0")], ..PLAIN }, 160);
    // Places for four loans while ten are held: some tensors are lent, others are not.
    let settings = &[("bulk_receive", "borrow"), ("max_lent_bytes", "32000")];
    check(Program { settings, holds: 10, ..PLAIN }, 160);
}

#[test]
fn dead_values_cost_no_more() {
    check(Program { what: |n| if n % 3 == 0 { What::Dead } else { What::Tensor }, ..PLAIN }, 160);
}

#[test]
fn aborted_steps_cost_their_errors_and_skipped_ones_nothing() {
    let what = |n| match n % 8 {
        2 => What::Aborted,
        5 => What::Skipped,
        _ => What::Tensor,
    };
    check(Program { what, ..PLAIN }, 160);
}

#[test]
fn steps_out_of_order_cost_no_more() {
    let order = |n: u64| n / 8 * 8 + (n * 5 + 3) % 8;
    for window in [16, 64] {
        check(Program { window, order, ..PLAIN }, 256);
    }
}
