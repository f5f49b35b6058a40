//! Standing requests for tensors whose shape changes from step to step.

use super::{LARGE, WINDOW, begin, here, pair, receive, send, send_and_wait, there, until_carried};
use crate::common::{SOON, until};
use std::sync::mpsc::channel;
use tensorwire::{Counter, Snapshot};

#[test]
fn meta_data_may_change_at_any_step_whether_it_fits_or_not() {
    const SIZES: [usize; 9] = [10_000, 10_000, 9400, 10_000, 11_000, 2, 0, 11_002, 8600];
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
        },
    );
}

#[test]
fn a_new_shape_costs_one_message_and_a_known_one_none() {
    if crate::common::calls_for_each_value() {
        return;
    }
    pair(
        &[],
        |node, sequence| {
            (0..4).for_each(|n| send_and_wait(node, sequence, n, LARGE));
            until_carried(node, 4);
            let before = node.counters();
            // The short last batch of an epoch, and full ones.
            [(4, 9200), (5, LARGE)].into_iter().for_each(|(n, size)| send_and_wait(node, sequence, n, size));
            until_carried(node, 6);
            let since = node.counters().since(&before);
            assert_eq!(since.get(Counter::MetasSent), 1, "one for what was not known");
            assert_eq!(since.get(Counter::WritesPosted), 2);
        },
        |node, sequence| {
            let _standing = node.standing(&here(node, 0), sequence, 8).expect("new");
            for (n, size) in [(0, LARGE), (1, LARGE), (2, LARGE), (3, LARGE), (4, 9200), (5, LARGE)] {
                receive(node, sequence, n, size);
            }
        },
    );
}

/// Sends tensors of the given numbers of elements, in turns with a receiver whose window is 16.
/// Returns the counters of the sender from step `from` on.
fn sizes(steps: u64, from: u64, size: impl Fn(u64) -> usize + Copy + Send + Sync + 'static) -> Snapshot {
    let (tell, told) = channel();
    pair(
        &[],
        move |node, sequence| {
            let mut before = Snapshot::ZERO;
            for n in 0..steps {
                if n == from {
                    until_carried(node, n);
                    before = node.counters();
                }
                send_and_wait(node, sequence, n, size(n));
                if n >= 4 {
                    // The sender is never ahead of the receiver.
                    let back = begin(node, sequence, n - 4).recv(&here(node, 1), SOON).expect("told");
                    assert!(back.is_dead);
                    node.cleanup(sequence.step(n - 4));
                }
            }
            until_carried(node, steps);
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
    if crate::common::calls_for_each_value() {
        return;
    }
    let counted = sizes(160, 0, |n| if n % 20 == 19 { 9000 } else { LARGE });
    assert_eq!(counted.get(Counter::MetasSent), 2, "{counted}");
}

#[test]
fn shapes_that_take_turns_cost_nothing_after_the_first_round() {
    if crate::common::calls_for_each_value() {
        return;
    }
    for shapes in [2, 4] {
        let counted = sizes(160, 80, move |n| LARGE - 200 * (n as usize % shapes));
        assert_eq!(counted.get(Counter::MetasSent), 0, "{shapes} shapes: {counted}");
        assert_eq!(counted.get(Counter::WritesPosted), 80, "{shapes} shapes: {counted}");
    }
}
