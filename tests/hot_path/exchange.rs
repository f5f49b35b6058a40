//! The exchanges of a trainer's steps, as both sides of them.

use std::time::{Duration, Instant};
use tensorwire::{Batch, DType, Delivery, Edge, Node, Pending, Standing, Tensor, TensorMut};

/// Timeout of anything that should come.
const SOON: Duration = Duration::from_secs(60);

/// What the two sides exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Tensors with this many f32, received into new tensors.
    Tensor(u64),
    /// The same, received into a given tensor.
    Into(u64),
    /// The same, borrowed from the peer.
    Borrowed(u64),
    /// Dead tensors.
    Dead,
    /// Several edges in flight at a time.
    Several(u64),
    /// A batch of edges.
    Batch(u64),
    /// A batch of edges of which only a few may be outstanding.
    Crowded(u64),
}

/// Number of edges in flight.
const EDGES: usize = 8;
/// Number of edges of a batch.
const BATCH: usize = 100;

impl What {
    fn edges(self) -> usize {
        match self {
            What::Several(_) => EDGES,
            What::Batch(_) | What::Crowded(_) => BATCH,
            _ => 1,
        }
    }

    fn floats(self) -> u64 {
        match self {
            What::Tensor(floats) | What::Into(floats) | What::Borrowed(floats) => floats,
            What::Several(floats) | What::Batch(floats) | What::Crowded(floats) => floats,
            What::Dead => 0,
        }
    }
}

/// One side of the exchange.
pub struct Side<'a> {
    node: &'a Node,
    what: What,
    starts: bool,
    out: Vec<Edge>,
    back: Vec<Edge>,
    pending: Vec<Pending<Tensor>>,
    batches: [Batch; 2],
    received: Vec<Delivery<Tensor>>,
    next: u64,
    ids: Ids,
    /// Whether values come before they are received.
    lets_values_come: bool,
    _standing: Vec<Standing>,
}

/// How step ids are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// Unrelated ids.
    Random,
    /// Ids of a sequence.
    Counted,
    /// Ids of a sequence, with standing requests.
    Standing,
}

/// Window of the standing requests.
const WINDOW: u32 = 16;

/// Steps in which one side or the other receives late, and how late.
const LATE_STEPS: u32 = 60;
const LATE: Duration = Duration::from_millis(2);

/// The first step of the sequence.
const BASE: u64 = 1 << 63;

impl<'a> Side<'a> {
    /// Task 0 starts each step, task 1 answers.
    pub fn new(node: &'a Node, task: u32, what: What, ids: Ids) -> Self {
        let sequence = (ids != Ids::Random).then(|| node.sequence(BASE));
        let names = (0..what.edges()).map(|at| format!("gradient/{at}"));
        let out = names.clone().map(|name| node.edge_to("w", 1 - task, &name).expect("edge"));
        let back = names.map(|name| node.edge_from("w", 1 - task, &name).expect("edge"));
        let (out, back): (Vec<_>, Vec<Edge>) = (out.collect(), back.collect());
        let standing = sequence.filter(|_| ids == Ids::Standing).into_iter().flat_map(|sequence| {
            back.iter().map(move |edge| node.standing(edge, sequence, WINDOW).expect("new"))
        });
        let standing = standing.collect();
        let pending = Vec::with_capacity(EDGES);
        let batches = [&out, &back].map(|edges| node.batch(edges.iter().cloned()).expect("usable"));
        let received = Vec::with_capacity(BATCH);
        Side {
            node,
            what,
            starts: task == 0,
            out,
            back,
            pending,
            batches,
            received,
            next: 0,
            ids,
            lets_values_come: false,
            _standing: standing,
        }
    }

    fn id(&self, n: u64) -> u64 {
        match self.ids {
            // An odd factor permutes the numbers, so no id comes twice; below the base of any
            // sequence.
            Ids::Random => n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 1,
            Ids::Counted | Ids::Standing => BASE + n,
        }
    }

    /// One step: begun, values both ways, and the step before it cleaned up.
    pub fn step(&mut self) {
        let n = self.next;
        self.next += 1;
        let step = self.node.step(self.id(n)).expect("a new step");
        if self.starts {
            self.send(&step, n);
            self.receive(&step, n);
        } else {
            self.receive(&step, n);
            self.send(&step, n);
        }
        if n > 0 {
            // The peer has sent a value of step n, so it is done with step n - 1.
            self.node.cleanup(self.id(n - 1));
        }
    }

    /// Steps before the counted ones. The timing of a later step may need what no earlier one did:
    /// so the most tensors that a step can hold are made once, and values come before they are
    /// received.
    pub fn warm_up(&mut self, steps: u32) {
        // On each edge: one that is sent, one whose loan the peer has ended, and one that came.
        let most: Vec<_> = (0..3 * self.what.edges()).map(|_| self.tensor()).collect();
        drop(most);
        for at in 0..steps {
            self.lets_values_come = at < LATE_STEPS && (at % 2 == 0) == self.starts;
            self.step();
        }
        self.lets_values_come = false;
    }

    fn let_values_come(&self) {
        let start = Instant::now();
        while start.elapsed() < LATE {
            self.node.progress().expect("the node runs");
        }
    }

    fn send(&self, step: &tensorwire::Step, n: u64) {
        if let What::Batch(_) | What::Crowded(_) = self.what {
            let tensors = self.out.iter().map(|_| self.filled(n));
            return self.batches[0].send(step, tensors).expect("sent");
        }
        for edge in &self.out {
            if self.what == What::Dead {
                step.send_dead(edge).expect("sent");
                continue;
            }
            step.send(edge, self.filled(n)).expect("sent");
        }
    }

    fn filled(&self, n: u64) -> Tensor {
        let mut tensor = self.tensor();
        tensor.as_mut_slice::<f32>().expect("f32").fill(n as f32);
        tensor.freeze()
    }

    fn receive(&mut self, step: &tensorwire::Step, n: u64) {
        if self.lets_values_come {
            self.let_values_come();
        }
        let edge = &self.back[0];
        match self.what {
            What::Dead => assert!(step.recv(edge, SOON).expect("received").is_dead),
            What::Tensor(_) => check(&step.recv(edge, SOON).expect("received").tensor, n),
            What::Borrowed(_) => {
                let got = step.recv(edge, SOON).expect("received").tensor;
                assert!(got.is_lent(), "it was copied");
                check(&got, n);
            }
            What::Into(_) => {
                let pending = step.receive(edge).into(self.tensor()).begin().expect("begun");
                check(&pending.wait().expect("received").tensor.freeze(), n);
            }
            What::Batch(_) | What::Crowded(_) => {
                self.batches[1].recv_many(step, SOON, &mut self.received).expect("received");
                self.received.drain(..).for_each(|delivery| check(&delivery.tensor, n));
            }
            What::Several(_) => {
                for edge in &self.back {
                    self.pending.push(step.receive(edge).begin().expect("begun"));
                }
                // All tensors are held at once, so that each round takes as many blocks.
                for pending in self.pending.drain(..) {
                    self.received.push(pending.wait().expect("received"));
                }
                self.received.drain(..).for_each(|delivery| check(&delivery.tensor, n));
            }
        }
    }

    fn tensor(&self) -> TensorMut {
        self.node.tensor(DType::F32, &[self.what.floats()]).expect("room")
    }
}

fn check(tensor: &Tensor, n: u64) {
    let values = tensor.as_slice::<f32>().expect("f32");
    assert_eq!((values.first(), values.last()), (Some(&(n as f32)), Some(&(n as f32))), "step {n}");
}
