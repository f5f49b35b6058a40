//! Ten thousand random steps, after which nothing is left.

use crate::common::{run, until};
use tensorwire::{Counter, DType, Edge, Node, Pending, Step, Tensor, TensorMut};

const STEPS: u64 = 10_000;

/// splitmix64: both sides draw the same numbers from the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// One transfer between the two sides in a step.
#[derive(Clone)]
struct Transfer {
    from: u32,
    edge: u64,
    dims: Vec<u64>,
    dead: bool,
    into: bool,
    fill: u8,
}

/// The plan of a step, which both sides draw alike. Each direction has at least one transfer, so a
/// side that has finished step n + 1 knows that the other has finished step n.
fn plan(step: u64) -> Vec<Transfer> {
    let mut random = Random(step ^ 0xD1CE);
    let count = 2 + random.below(4);
    (0..count)
        .map(|at| Transfer {
            from: if at < 2 { at as u32 } else { random.below(2) as u32 },
            edge: at,
            dims: match random.below(6) {
                0 => vec![],
                1 => vec![random.below(30)],
                2 => vec![random.below(4), random.below(400)],
                3 => vec![1; random.below(20) as usize],
                4 => vec![100, 1 + random.below(3)],
                _ => vec![random.below(20_000)],
            },
            dead: random.below(10) == 0,
            into: random.below(2) == 0,
            fill: random.next() as u8,
        })
        .collect()
}

enum Waiting {
    Fresh(Transfer, Pending<Tensor>),
    Into(Transfer, Pending<TensorMut>),
}

impl Waiting {
    fn check(self) {
        let (transfer, is_dead, dims, bytes) = match self {
            Waiting::Fresh(transfer, pending) => {
                let got = pending.wait().expect("received");
                (transfer, got.is_dead, got.tensor.shape().dims().to_vec(), got.tensor.bytes().to_vec())
            }
            Waiting::Into(transfer, pending) => {
                let got = pending.wait().expect("received");
                (transfer, got.is_dead, got.tensor.shape().dims().to_vec(), got.tensor.bytes().to_vec())
            }
        };
        assert_eq!(is_dead, transfer.dead);
        if !is_dead {
            assert_eq!(dims, transfer.dims);
            assert!(bytes.iter().all(|byte| *byte == transfer.fill), "wrong bytes in {dims:?}");
        }
    }
}

fn begin(node: &Node, step: &Step, edge: &Edge, transfer: Transfer) -> Waiting {
    if !transfer.into {
        return Waiting::Fresh(transfer, step.receive(edge).begin().expect("begun"));
    }
    let given = node.tensor(DType::U8, &transfer.dims).expect("room");
    Waiting::Into(transfer, step.receive(edge).into(given).begin().expect("begun"))
}

fn send(node: &Node, step: &Step, edge: &Edge, transfer: &Transfer) {
    if transfer.dead {
        return step.send_dead(edge).expect("sent");
    }
    let mut tensor = node.tensor(DType::U8, &transfer.dims).expect("room");
    tensor.bytes_mut().fill(transfer.fill);
    step.send(edge, tensor.freeze()).expect("sent");
}

fn ten_thousand_steps(settings: &[(&str, &str)]) {
    run(2, settings, |node, task| {
        let other = 1 - task;
        let edges: Vec<_> = (0..6)
            .map(|edge| {
                let name = format!("x/{edge}");
                (
                    node.edge_to("w", other, &name).expect("edge"),
                    node.edge_from("w", other, &name).expect("edge"),
                )
            })
            .collect();
        let base = node.sequence(1 << 32);
        let mut order = Random(u64::from(task) + 99);
        for n in 0..STEPS {
            let step = node.step(base.step(n)).expect("new");
            let mut waiting = Vec::new();
            let mut transfers = plan(n);
            while !transfers.is_empty() {
                let transfer = transfers.swap_remove(order.below(transfers.len() as u64) as usize);
                let (to, from) = &edges[transfer.edge as usize];
                if transfer.from == task {
                    send(node, &step, to, &transfer);
                } else {
                    waiting.push(begin(node, &step, from, transfer));
                }
            }
            waiting.into_iter().for_each(Waiting::check);
            if n > 0 {
                node.cleanup(base.step(n - 1));
            }
        }
        let expected: u64 =
            (0..STEPS).map(|n| plan(n).iter().filter(|plan| plan.from != task).count() as u64).sum();
        assert_eq!(node.counters().get(Counter::TensorsReceived), expected);
        until(node, "an empty pool", || node.pool().is_empty());
    });
}

#[test]
fn ten_thousand_steps_with_random_shapes_and_arming_order_leave_the_pool_empty() {
    ten_thousand_steps(&[("queue_depth", "16")]);
}

#[test]
fn ten_thousand_steps_of_borrowed_tensors_leave_the_pool_empty() {
    ten_thousand_steps(&[("bulk_receive", "borrow"), ("small_tensor_bytes", "0")]);
}
