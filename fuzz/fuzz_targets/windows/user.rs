//! The user of the node, and the invariants of its calls.

use crate::input::Input;
use crate::node::Node;
use crate::{HOSTILE, LAST_STEP, NODE};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tensorwire::{
    Code, DType, Delivery, Edge, Error, Pending, PendingBatch, Shape, Standing, Status, Step, Tensor,
    TensorMeta, TensorMut, Value,
};

/// Delivered tensors that are held at a time.
const MAX_HELD: usize = 8;
/// Receives and batches that are open at a time.
const MAX_OPEN: usize = 40;
/// Steps that a program uses.
const STEPS: u64 = 6;

/// The open calls and held tensors of a user.
#[derive(Default)]
pub struct User {
    open: Vec<Open>,
    /// A delivered tensor, with a copy of its bytes at delivery.
    held: Vec<(Tensor, Vec<u8>)>,
    standing: Vec<Standing>,
    /// Callbacks that were begun, and those that were called.
    callbacks: usize,
    called: Arc<AtomicUsize>,
}

enum Open {
    Fresh(Pending<Tensor>),
    Into(Pending<TensorMut>),
    Batch(PendingBatch),
}

impl Open {
    fn is_done(&self) -> bool {
        match self {
            Open::Fresh(pending) => pending.is_done(),
            Open::Into(pending) => pending.is_done(),
            Open::Batch(pending) => pending.have_all_ended(),
        }
    }

    fn cancel(&self) {
        match self {
            Open::Fresh(pending) => pending.cancel_token().cancel(),
            Open::Into(pending) => pending.cancel_token().cancel(),
            Open::Batch(pending) => pending.cancel(),
        }
    }
}

fn step_id(input: &mut Input<'_>) -> u64 {
    input.number() % STEPS
}

fn name(input: &mut Input<'_>) -> &'static str {
    [
        "x",
        "y",
        "z",
        "a longer name that does not fit into the message's first slot, as one hundred bytes and so on",
    ][input.below(4)]
}

impl User {
    pub fn act(&mut self, node: &Node, command: u8, input: &mut Input<'_>) {
        match command {
            1 | 2 => self.send(node, input),
            3 => self.send_all(node, input),
            4 | 5 => self.receive(node, input),
            6 => self.receive_all(node, input),
            7 => self.receive_now(node, input),
            8 => self.give_up(input),
            9 => self.stand(node, input),
            10 => self.end_step(node, input),
            11 => self.held.truncate(input.below(MAX_HELD)),
            12 => node.clock().advance(Duration::from_millis(input.u8().into())),
            _ => self.then(node, input),
        }
    }

    fn call(node: &Node, input: &mut Input<'_>, is_send: bool) -> Option<(Step, Edge)> {
        let step = node.step(step_id(input)).ok()?;
        let (from, to) = if is_send { (NODE, HOSTILE) } else { (HOSTILE, NODE) };
        let edge = node.edge(to, from, name(input));
        Some((step, edge.at(u64::from(input.u8() > 240), 0)))
    }

    fn tensor(node: &Node, input: &mut Input<'_>) -> Option<TensorMut> {
        let dtype = [DType::U8, DType::F32, DType::Bool, DType::Complex128][input.below(4)];
        let dims = [u64::from(input.u8() % 4), u64::from(input.u8())];
        let meta = TensorMeta::new(dtype, Shape::new(&dims).expect("a shape")).expect("small");
        let mut tensor = node.pool().zeroed(meta).ok()?;
        tensor.bytes_mut().fill(1);
        Some(tensor)
    }

    fn send(&mut self, node: &Node, input: &mut Input<'_>) {
        let Some((step, edge)) = Self::call(node, input, true) else { return };
        if input.u8() > 220 {
            return drop(step.send_dead(&edge));
        }
        if let Some(tensor) = Self::tensor(node, input) {
            let _ = step.send(&edge, tensor.freeze());
        }
    }

    fn send_all(&mut self, node: &Node, input: &mut Input<'_>) {
        let mut values = Vec::new();
        let Some((step, _)) = Self::call(node, input, true) else { return };
        for _ in 0..=input.below(6) {
            let Some((_, edge)) = Self::call(node, input, true) else { return };
            let value =
                Self::tensor(node, input).map_or(Value::Dead, |tensor| Value::Tensor(tensor.freeze()));
            values.push((edge, value));
        }
        let _ = step.send_all(values.iter().map(|(edge, value)| (edge, value.clone())));
    }

    fn receive(&mut self, node: &Node, input: &mut Input<'_>) {
        let Some((step, edge)) = Self::call(node, input, false) else { return };
        let receive = step.receive(&edge).within(Duration::from_millis(input.u8().into()));
        let given = if input.u8() > 160 { Self::tensor(node, input) } else { None };
        let begun = match given {
            Some(given) => receive.into(given).begin().map(Open::Into),
            None => receive.begin().map(Open::Fresh),
        };
        self.open(begun);
    }

    fn receive_all(&mut self, node: &Node, input: &mut Input<'_>) {
        let Some((step, _)) = Self::call(node, input, false) else { return };
        let edges: Vec<Edge> = Self::edges(node, input).collect();
        let timeout = Duration::from_millis(input.u8().into());
        self.open(step.receive_all(&edges).within(timeout).begin().map(Open::Batch));
    }

    /// Edges from the hostile peer.
    fn edges(node: &Node, input: &mut Input<'_>) -> impl Iterator<Item = Edge> {
        let all = (0..=input.below(20)).filter_map(|_| Self::call(node, input, false));
        all.map(|(_, edge)| edge)
    }

    fn open(&mut self, begun: Result<Open, Error>) {
        self.open.extend(begun);
        if self.open.len() > MAX_OPEN {
            self.open.remove(0);
        }
    }

    fn receive_now(&mut self, node: &Node, input: &mut Input<'_>) {
        let Some((step, edge)) = Self::call(node, input, false) else { return };
        match input.below(4) {
            0 => {
                if let Ok(Some(delivery)) = step.try_recv(&edge) {
                    self.keep(Ok(delivery));
                }
            }
            // The wait reads the clock with each 256 polls.
            1 => self.keep(step.recv(&edge, Duration::ZERO)),
            2 => {
                let Some(given) = Self::tensor(node, input) else { return };
                let received = step.receive(&edge).within(Duration::ZERO).into(given).wait();
                self.keep_tensor(received.map(|got| got.tensor.freeze()));
            }
            _ => self.receive_batch_now(node, &step, input),
        }
    }

    fn receive_batch_now(&mut self, node: &Node, step: &Step, input: &mut Input<'_>) {
        let edges: Vec<Edge> = Self::edges(node, input).collect();
        let has_given = input.u8() > 160;
        let given = edges.iter().map(|_| Self::tensor(node, input).filter(|_| has_given));
        let given: Option<Vec<TensorMut>> = given.collect();
        let batch = node.context().batch(edges).expect("usable");
        let receive = batch.receive(step).within(Duration::ZERO);
        let received: Result<Vec<Tensor>, Error> = match given {
            Some(given) => {
                let received = receive.into(given).wait();
                received.map(|all| all.into_iter().map(|got| got.tensor.freeze()).collect())
            }
            None => receive.wait().map(|all| all.into_iter().map(|got| got.tensor).collect()),
        };
        let Ok(tensors) = received else { return };
        assert_eq!(tensors.len(), batch.edges().len(), "each edge has one value");
        tensors.into_iter().for_each(|tensor| self.keep_tensor(Ok(tensor)));
    }

    fn then(&mut self, node: &Node, input: &mut Input<'_>) {
        let Some((step, edge)) = Self::call(node, input, false) else { return };
        let called = self.called.clone();
        let receive = step.receive(&edge).within(Duration::from_millis(input.u8().into()));
        let begun = receive.then(move |_: Result<Delivery<Tensor>, Error>| {
            called.fetch_add(1, Ordering::Relaxed);
        });
        self.callbacks += usize::from(begun.is_ok());
    }

    fn give_up(&mut self, input: &mut Input<'_>) {
        if self.open.is_empty() {
            return;
        }
        let at = input.below(self.open.len());
        match input.flag() {
            true => self.open[at].cancel(),
            false => drop(self.open.swap_remove(at)),
        }
    }

    fn stand(&mut self, node: &Node, input: &mut Input<'_>) {
        if input.u8() > 160 {
            return drop(self.standing.pop());
        }
        let window = input.u8().into();
        if let (true, Some(standing)) = (input.flag(), self.standing.last()) {
            return drop(standing.set_window(window));
        }
        let edge = node.edge(NODE, HOSTILE, name(input));
        let sequence = node.context().sequence(input.number() % STEPS);
        self.standing.extend(node.context().standing(&edge, sequence, window));
    }

    fn end_step(&mut self, node: &Node, input: &mut Input<'_>) {
        let id = step_id(input);
        if input.flag() {
            return node.context().cleanup(id);
        }
        if let Ok(step) = node.step(id) {
            let _ = step.abort(Status::new(Code::Internal, "a".repeat(input.u8().into())));
        }
    }

    /// Takes the results of the calls that have ended.
    pub fn take_ended(&mut self) {
        for open in self.open.extract_if(.., |open| open.is_done()).collect::<Vec<_>>() {
            match open {
                Open::Fresh(pending) => self.keep(pending.wait()),
                Open::Into(pending) => {
                    let frozen = |got: Delivery<TensorMut>| got.tensor.freeze();
                    self.keep_tensor(pending.wait().map(frozen));
                }
                Open::Batch(pending) => pending.wait_each().into_iter().for_each(|one| self.keep(one)),
            }
        }
    }

    fn keep(&mut self, received: Result<Delivery<Tensor>, Error>) {
        self.keep_tensor(received.map(|got| got.tensor));
    }

    /// The peer may not change a delivered tensor any more.
    fn keep_tensor(&mut self, received: Result<Tensor, Error>) {
        let Ok(tensor) = received else { return };
        assert_eq!(tensor.bytes().len() as u64, tensor.meta().bytes());
        let bytes = tensor.bytes().to_vec();
        self.held.push((tensor, bytes));
        if self.held.len() > MAX_HELD {
            self.check_held();
            self.held.remove(0);
        }
    }

    fn check_held(&self) {
        for (tensor, bytes) in &self.held {
            assert_eq!(tensor.bytes(), bytes, "a tensor that was delivered has changed");
        }
    }

    /// Ends all steps. Every call has ended then.
    pub fn end(&mut self, node: &Node) {
        (0..STEPS).chain([LAST_STEP]).for_each(|step| node.context().cleanup(step));
        node.progress();
        assert!(self.open.iter().all(Open::is_done), "a receive outlives its step");
        self.take_ended();
        assert_eq!(self.called.load(Ordering::Relaxed), self.callbacks, "callbacks are called once");
        self.check_held();
        self.held.clear();
    }
}
