//! The table for tensors whose source and destination are this process: no fabric is touched (SPEC 2.6).

use super::steps::{StepState, Steps};
use super::table::{Asked, Offered, Table};
use super::waiter::{Delivery, GiveUp, Payload, Waiter};
use super::{Error, path::Cancel};
use crate::link::{TensorKey, Value};
use crate::memory::{Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::wire::Time;
use crate::wire::message::Side;

/// A waiter with the tensor that it gave, if it gave one.
#[derive(Debug)]
pub(super) struct LocalWaiter {
    pub waiter: Waiter,
    pub into: Option<TensorMut>,
}

/// What a call found out, to be told outside every lock.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct Told(Vec<Telling>);

#[derive(Debug)]
enum Telling {
    Value { key: TensorKey, waiter: LocalWaiter, value: Value },
    GaveUp { key: TensorKey, waiter: Waiter },
    Failed { waiter: Waiter, error: Error },
}

/// Values and waiters of this process.
#[derive(Debug)]
pub(super) struct Local {
    table: Table<Value, LocalWaiter>,
    next_deadline: Time,
}

impl Default for Local {
    fn default() -> Self {
        Local { table: Table::default(), next_deadline: Time::NEVER }
    }
}

impl Local {
    /// Hands a value to a waiter, or keeps it.
    pub fn send(&mut self, key: TensorKey, value: Value) -> Told {
        match self.table.offer(&key, value) {
            Offered::Matched(waiter, value) => Told(vec![Telling::Value { key, waiter, value }]),
            Offered::Kept => Told::default(),
        }
    }

    /// Puts a value back, first in line.
    pub fn put_back(&mut self, key: TensorKey, value: Value) -> Told {
        match self.table.put_back(&key, value) {
            Offered::Matched(waiter, value) => Told(vec![Telling::Value { key, waiter, value }]),
            Offered::Kept => Told::default(),
        }
    }

    /// Gives a waiter its value, or keeps the waiter.
    pub fn receive(&mut self, key: TensorKey, waiter: LocalWaiter) -> Told {
        let deadline = waiter.waiter.deadline;
        match self.table.ask(&key, waiter) {
            Asked::Matched(waiter, value) => Told(vec![Telling::Value { key, waiter, value }]),
            Asked::Kept => {
                self.next_deadline = self.next_deadline.min(deadline);
                Told::default()
            }
        }
    }

    /// Ends a call that still waits.
    pub fn cancel(&mut self, cancel: &Cancel) -> Told {
        let found = self.table.remove_waiters(|_, kept| kept.waiter.id == cancel.id);
        Told(found.into_iter().map(|(key, kept)| gave_up(key, kept.waiter, cancel.why.clone())).collect())
    }

    /// Ends what has waited until now.
    pub fn expire(&mut self, now: Time) -> Told {
        let late = self.table.remove_waiters(|_, kept| kept.waiter.deadline <= now);
        let deadlines = self.table.waiters().map(|(_, kept)| kept.waiter.deadline);
        self.next_deadline = deadlines.min().unwrap_or(Time::NEVER);
        Told(late.into_iter().map(|(key, kept)| gave_up(key, kept.waiter, GiveUp::Deadline(None))).collect())
    }

    /// The earliest time at which something may have waited too long.
    pub fn next_deadline(&self) -> Time {
        self.next_deadline
    }

    /// Drops a step's values and fails its waiters.
    pub fn end_step(&mut self, step: u64, error: &Error) -> Told {
        let (_, waiters) = self.table.remove_steps(|kept| kept == step);
        Told(waiters.into_iter().map(|(_, kept)| failed(kept.waiter, error)).collect())
    }

    /// Fails every waiter and drops every value.
    pub fn fail_all(&mut self, error: &Error) -> Told {
        let (_, waiters) = self.table.remove_steps(|_| true);
        Told(waiters.into_iter().map(|(_, kept)| failed(kept.waiter, error)).collect())
    }
}

fn gave_up(key: TensorKey, mut waiter: Waiter, why: GiveUp) -> Telling {
    waiter.gave_up = Some(why);
    Telling::GaveUp { key, waiter }
}

fn failed(waiter: Waiter, error: &Error) -> Telling {
    Telling::Failed { waiter, error: error.clone() }
}

impl Told {
    /// Adds what another call found out.
    pub fn append(&mut self, mut other: Told) {
        self.0.append(&mut other.0);
    }

    /// Tells everybody. Returns the values that did not fit what was given for them: they go back.
    pub fn tell(self) -> Vec<(TensorKey, Value)> {
        self.0.into_iter().filter_map(Telling::tell).collect()
    }
}

impl Telling {
    fn tell(self) -> Option<(TensorKey, Value)> {
        match self {
            Telling::GaveUp { key, waiter } => waiter.given_up(&key),
            Telling::Failed { waiter, error } => waiter.complete(Err(error)),
            Telling::Value { key, waiter, value } => return deliver(key, waiter, value),
        }
        None
    }
}

fn deliver(key: TensorKey, local: LocalWaiter, value: Value) -> Option<(TensorKey, Value)> {
    let LocalWaiter { waiter, into } = local;
    let (payload, is_dead) = match (value, into) {
        (Value::Tensor(tensor), None) => (Payload::Tensor(tensor), false),
        (Value::Tensor(tensor), Some(mut given)) if tensor.meta() == given.meta() => {
            given.bytes_mut().copy_from_slice(tensor.bytes());
            (Payload::Into(given), false)
        }
        (Value::Tensor(tensor), Some(given)) => {
            let (sent, given) = (Box::new(tensor.meta().clone()), Box::new(given.meta().clone()));
            waiter.complete(Err(Error::Misfit { key: key.to_string(), sent, given }));
            return (!is_on(Mutant::LocalMisfitLost)).then_some((key, Value::Tensor(tensor)));
        }
        (Value::Dead, None) => (Payload::Tensor(Tensor::empty()), true),
        (Value::Dead, Some(given)) => (Payload::Into(given), true),
    };
    let side = if is_dead { Side::HEAP } else { Side::POOL };
    waiter.complete(Ok(Delivery { tensor: payload, is_dead, sender: side, receiver: side }));
    None
}

/// The error of a call on a step that is not live, or `Ok`.
pub(super) fn check_live(steps: &Steps, step: u64) -> Result<(), Error> {
    if steps.is_live(step) {
        return Ok(());
    }
    match steps.state(step) {
        StepState::Live | StepState::NotBegun => Ok(()),
        StepState::Aborted(status) => Err(Error::Aborted { step, status }),
        StepState::Gone => Err(Error::StepGone { step }),
    }
}
