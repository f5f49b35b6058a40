//! Tensors without a fixed size: any length, another one in each step, wherever a flat tensor may
//! be used.

use crate::common::{SOON, lends_nothing, over_verbs, run, until};
use std::time::Duration;
use tensorwire::internals::memory::FlatTensor;
use tensorwire::{
    Counter, DType, Edge, Error, NestedTensor, Node, Shape, StringTensor, Tensor, TensorMeta, Variant,
    VariantTensor,
};

const BASE: u64 = 1 << 40;

fn words(values: impl IntoIterator<Item = Vec<u8>>) -> StringTensor {
    let values: Vec<Vec<u8>> = values.into_iter().collect();
    let shape = Shape::new(&[values.len() as u64]).expect("shape");
    StringTensor::new(shape, values).expect("as many as the shape has")
}

/// The strings of step `n`. Their number and lengths differ from step to step.
fn of_step(n: u64) -> StringTensor {
    words((0..n * 7 % 40).map(|at| vec![n as u8; (n * 31 + at * 17) as usize % 300]))
}

fn tensor(node: &Node, strings: &StringTensor) -> Tensor {
    strings.to_tensor(node.pool()).expect("room")
}

fn there(node: &Node) -> Edge {
    node.edge_to("w", 1, "words").expect("edge")
}

fn here(node: &Node) -> Edge {
    node.edge_from("w", 0, "words").expect("edge")
}

/// Sends string tensors, each in a step of its own, and receives them.
fn travel(settings: &[(&str, &str)], cases: fn() -> Vec<StringTensor>) {
    run(2, settings, move |node, task| {
        for (id, case) in cases().into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                step.send(&there(node), tensor(node, &case)).expect("sent");
            } else {
                let got = step.recv(&here(node), SOON).expect("received").tensor;
                assert_eq!(got.dtype(), DType::String);
                assert!(StringTensor::from_tensor(&got).expect("strings") == case, "case {id}");
            }
        }
    });
}

/// No strings, empty strings, bytes that are not UTF-8, and a string longer than any message.
fn odd_ones() -> Vec<StringTensor> {
    let scalar = StringTensor::new(Shape::SCALAR, ["one"]).expect("one");
    let grid = StringTensor::new(Shape::new(&[2, 2]).expect("shape"), ["a", "", "ccc", ""]).expect("four");
    let bytes = words([(0..=255).collect()]);
    vec![words([]), scalar, grid, words([vec![]]), bytes, words([vec![0xc3; 300_000]]), words([])]
}

#[test]
fn strings_travel_copied() {
    travel(&[("bulk_receive", "copy")], odd_ones);
}

#[test]
fn strings_travel_borrowed() {
    if !lends_nothing() {
        travel(&[("bulk_receive", "borrow")], odd_ones);
    }
}

#[test]
fn a_string_of_100_mib_travels() {
    if over_verbs() {
        println!("skipped: 100 MiB take long where the device is emulated");
        return;
    }
    for receive in ["copy", "borrow"] {
        travel(&[("pool_size", "160MiB"), ("bulk_receive", receive)], || vec![words([vec![7; 100 << 20]])]);
    }
}

#[test]
fn a_hundred_thousand_tiny_strings_travel() {
    travel(&[], || vec![words((0..100_000_u32).map(|n| n.to_string().into_bytes()))]);
}

#[test]
fn strings_go_from_a_process_to_itself() {
    run(1, &[], |node, _| {
        let step = node.step(1).expect("new");
        let edge = node.edge_to("w", 0, "words").expect("edge");
        step.send(&edge, tensor(node, &of_step(5))).expect("sent");
        let got = step.recv(&edge, SOON).expect("received").tensor;
        assert_eq!(StringTensor::from_tensor(&got), Ok(of_step(5)));
    });
}

#[test]
fn a_dead_value_comes_where_strings_came() {
    run(2, &[], |node, task| {
        for id in 0..6 {
            let step = node.step(id).expect("new");
            match (task, id % 2) {
                (0, 0) => step.send(&there(node), tensor(node, &of_step(id + 1))).expect("sent"),
                (0, _) => step.send_dead(&there(node)).expect("sent"),
                (_, odd) => {
                    let got = step.recv(&here(node), SOON).expect("received");
                    assert_eq!(got.is_dead, odd == 1);
                    if odd == 0 {
                        assert_eq!(StringTensor::from_tensor(&got.tensor), Ok(of_step(id + 1)));
                    }
                }
            }
        }
    });
}

#[test]
fn a_new_length_each_step_is_a_new_meta_data_each_step() {
    if crate::common::calls_for_each_value() {
        return;
    }
    run(2, &[("bulk_receive", "copy")], |node, task| {
        // The first tensor makes the length known, the second has the same, and each later one
        // another.
        let lengths = [900, 900, 901, 902, 903];
        for (id, len) in lengths.into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            let case = words([vec![1; len]]);
            if task == 0 {
                step.send(&there(node), tensor(node, &case)).expect("sent");
            } else {
                let got = step.recv(&here(node), SOON).expect("received").tensor;
                assert_eq!(StringTensor::from_tensor(&got), Ok(case));
            }
        }
        if task == 0 {
            // A poller counts a tensor before its meta-data.
            let sent =
                || [Counter::TensorsSent, Counter::MetasSent].map(|counter| node.counters().get(counter));
            until(node, "all are sent", || sent()[0] == 5 && sent()[1] >= 4);
            assert_eq!(sent(), [5, 4]);
        }
    });
}

fn standing(settings: &'static [(&str, &str)], window: u32) {
    run(2, settings, move |node, task| {
        let sequence = node.sequence(BASE);
        let _standing = (task == 1).then(|| node.standing(&here(node), sequence, window).expect("new"));
        for n in 0..120 {
            let step = node.step(sequence.step(n)).expect("usable");
            if task == 0 {
                step.send(&there(node), tensor(node, &of_step(n))).expect("sent");
            } else {
                let got = step.recv(&here(node), SOON).expect("received").tensor;
                assert_eq!(StringTensor::from_tensor(&got), Ok(of_step(n)), "step {n}");
                node.cleanup(step.id());
            }
        }
    });
}

#[test]
fn standing_requests_take_strings_of_another_length_each_step() {
    standing(&[("bulk_receive", "copy")], 8);
}

#[test]
fn standing_requests_borrow_strings_of_another_length_each_step() {
    if !lends_nothing() {
        standing(&[("bulk_receive", "borrow")], 8);
    }
}

#[test]
fn strings_are_received_into_a_tensor_of_just_their_length() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        let case = words([vec![5; 2000]]);
        if task == 0 {
            step.send(&there(node), tensor(node, &case)).expect("sent");
            return;
        }
        let meta = tensor(node, &case).meta().clone();
        let given = |len| {
            let meta = TensorMeta::serialized(DType::String, meta.shape().clone(), len).expect("meta");
            node.pool().tensor(meta).expect("room")
        };
        // A given tensor of another length does not fit, and the value goes to the next receive.
        let mismatch = step.receive(&here(node)).into(given(meta.bytes() + 1)).begin().expect("begun").wait();
        assert!(matches!(&mismatch, Err(Error::ShapeMismatch { .. })), "{mismatch:?}");
        let fits = step
            .receive(&here(node))
            .into(given(meta.bytes()))
            .begin()
            .expect("begun")
            .wait()
            .expect("received");
        assert_eq!(StringTensor::from_tensor(&fits.tensor.freeze()), Ok(case));
    });
}

#[test]
fn variants_with_tensors_of_every_kind_travel() {
    run(2, &[], |node, task| {
        let flat = |first: f32| {
            let mut flat = node.tensor(DType::F32, &[2]).expect("room");
            flat.fill_from(&[first, -first]).expect("two");
            NestedTensor::Flat(FlatTensor::new(&flat.freeze()).expect("flat"))
        };
        let variants = |n: u64| {
            let strings = NestedTensor::Strings(of_step(n));
            let inner =
                Variant { type_name: "inner".into(), metadata: vec![n as u8].into(), tensors: vec![strings] };
            let inner = NestedTensor::Variants(VariantTensor::new(Shape::SCALAR, vec![inner]).expect("one"));
            let outer = Variant {
                type_name: "outer".into(),
                tensors: vec![flat(n as f32), inner],
                ..Default::default()
            };
            let shape = Shape::new(&[2]).expect("shape");
            VariantTensor::new(shape, vec![outer, Variant::default()]).expect("two")
        };
        for n in 0..20 {
            let step = node.step(n).expect("new");
            if task == 0 {
                let tensor = variants(n).to_tensor(node.pool()).expect("room");
                step.send(&there(node), tensor).expect("sent");
                continue;
            }
            let got = step.recv(&here(node), SOON).expect("received").tensor;
            let read = VariantTensor::from_tensor(&got).expect("variants");
            assert_eq!(read, variants(n));
            let NestedTensor::Flat(flat) = &read.values()[0].tensors[0] else { panic!("{read:?}") };
            let viewed = flat.to_tensor(node.pool()).expect("room");
            assert_eq!(viewed.as_slice::<f32>(), Ok(&[n as f32, -(n as f32)][..]));
        }
    });
}

#[test]
fn strings_that_were_received_go_on_to_another_task_as_they_are() {
    run(3, &[("bulk_receive", "copy")], |node, task| {
        let step = node.step(1).expect("new");
        match task {
            0 => step.send(&there(node), tensor(node, &of_step(9))).expect("sent"),
            1 => {
                let got = step.recv(&here(node), SOON).expect("received").tensor;
                step.send(&node.edge_to("w", 2, "on").expect("edge"), got).expect("sent");
            }
            _ => {
                let edge = node.edge_from("w", 1, "on").expect("edge");
                let got = step.recv(&edge, SOON + Duration::from_secs(5)).expect("received").tensor;
                assert_eq!(StringTensor::from_tensor(&got), Ok(of_step(9)));
            }
        }
    });
}
