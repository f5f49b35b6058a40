//! Data validation (specification 3.8) of whole nodes. Wrong checksums are tested by a scripted
//! peer in `src/link`, and by flipped bits in the simulation.

use crate::common::{SOON, counting, lends_nothing, run, run_each, values};
use tensorwire::{Counter, DType, Edge, Node, Snapshot};

const BASE: u64 = 1 << 40;
/// Elements of tensors: in a message, written, and without bytes.
const SIZES: [usize; 5] = [2, 5_000, 0, 5_000, 30];

fn there(node: &Node, task: u32) -> Edge {
    node.edge_to("w", task, "x").expect("an edge")
}

fn here(node: &Node, task: u32) -> Edge {
    node.edge_from("w", task, "x").expect("an edge")
}

/// Sends each kind of tensor in several steps. `check` gets the receiver's counters and the number
/// of tensors.
fn exchange(
    settings: fn(u32) -> Vec<(&'static str, &'static str)>,
    standing: bool,
    into: bool,
    check: fn(Snapshot, u64),
) {
    run_each(2, settings, move |node, task| {
        let sequence = node.sequence(BASE);
        let stands =
            (standing && task == 1).then(|| node.standing(&here(node, 0), sequence, 4).expect("new"));
        let mut count = 0;
        for (n, len) in (0..).zip(SIZES.into_iter().cycle().take(40)) {
            let step = node.step(sequence.step(n)).expect("usable");
            let first = n as f32;
            if task == 0 {
                step.send(&there(node, 1), counting(node, first, len)).expect("sent");
                continue;
            }
            count += 1;
            let edge = here(node, 0);
            let got = if into {
                let given = node.tensor(DType::F32, &[len as u64]).expect("room");
                step.receive(&edge).into(given).begin().expect("asked").wait().expect("sent").tensor.freeze()
            } else {
                step.recv(&edge, SOON).expect("sent").tensor
            };
            assert!(values(&got).iter().enumerate().all(|(at, value)| *value == first + at as f32));
            assert_eq!(values(&got).len(), len);
        }
        drop(stands);
        if task == 1 {
            check(node.counters(), count);
        }
    });
}

fn all_checked(counted: Snapshot, received: u64) {
    assert_eq!(counted.get(Counter::ChecksumsVerified), received, "{counted}");
    assert_eq!(counted.get(Counter::ChecksumMismatches), 0, "{counted}");
}

fn only_receiver(task: u32) -> Vec<(&'static str, &'static str)> {
    if task == 1 { vec![("validate", "true")] } else { Vec::new() }
}

fn only_sender(task: u32) -> Vec<(&'static str, &'static str)> {
    if task == 0 { vec![("validate", "true")] } else { Vec::new() }
}

fn borrowing(_task: u32) -> Vec<(&'static str, &'static str)> {
    vec![("validate", "true"), ("bulk_receive", "borrow")]
}

#[test]
fn every_tensor_is_checked_if_its_receiver_alone_wishes_it() {
    exchange(only_receiver, false, false, all_checked);
    exchange(only_receiver, false, true, all_checked);
}

#[test]
fn tensors_with_a_standing_request_are_checked() {
    exchange(only_receiver, true, false, all_checked);
    exchange(only_receiver, true, true, all_checked);
}

#[test]
fn borrowed_tensors_are_checked_where_they_lie() {
    if lends_nothing() {
        return;
    }
    exchange(borrowing, false, false, all_checked);
    exchange(borrowing, true, false, all_checked);
}

#[test]
fn who_does_not_wish_it_pays_nothing() {
    exchange(only_sender, false, false, |counted, _| {
        assert_eq!(counted.get(Counter::ChecksumsVerified), 0, "{counted}");
    });
}

#[test]
fn within_a_process_there_is_nothing_to_check_and_dead_values_have_no_bytes() {
    run(2, &[("validate", "true")], |node, task| {
        let step = node.step(1).expect("usable");
        let own = node.edge_to("w", task, "own").expect("an edge");
        step.send(&own, counting(node, 1.0, 10)).expect("sent");
        assert_eq!(values(&step.recv(&own, SOON).expect("sent").tensor)[0], 1.0);
        if task == 0 {
            step.send_dead(&there(node, 1)).expect("sent");
        } else {
            assert!(step.recv(&here(node, 0), SOON).expect("sent").is_dead);
        }
        assert_eq!(node.counters().get(Counter::ChecksumsVerified), 0);
    });
}
