//! Tensors whose source and destination are this process: no fabric is used (specification 2.6).

use crate::link::{TensorKey, Value, placement_of, placement_of_mut};
use crate::matching::{
    AskOutcome, Cancel, CancelReason, Delivery, Error, Numbered, OfferOutcome, Payload, Table, Waiter,
};
use crate::memory::{Tensor, TensorMut, copy};
use crate::mutants::{Mutant, is_on};
use crate::wire::message::Placement;
use crate::wire::{AtomicTime, Time};
use std::sync::Arc;

/// A waiter of this process, with the tensor of its caller that the value is copied into.
#[derive(Debug)]
pub(super) struct LocalWaiter {
    pub waiter: Waiter,
    pub into: Option<TensorMut>,
}

/// Waiters that have ended. The caller wakes them after it has released the tables.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct DeferredWakeups(Vec<DeferredWakeup>);

#[derive(Debug)]
enum DeferredWakeup {
    Value { waiter: LocalWaiter, value: Value },
    GaveUp { key: TensorKey, waiter: Waiter },
    Failed { waiter: Waiter, error: Error },
}

/// Values and waiters of this process.
#[derive(Debug)]
pub(super) struct Local {
    table: Table<Value, LocalWaiter>,
    /// Waiters in the table.
    waiting: usize,
    next_deadline: Arc<AtomicTime>,
}

impl Default for Local {
    fn default() -> Self {
        let next_deadline = Arc::new(AtomicTime::new(Time::NEVER));
        Local { table: Table::default(), waiting: 0, next_deadline }
    }
}

impl Local {
    /// Gives a value to the first waiter with a fitting shape, or queues it. Earlier waiters fail
    /// with [`Error::ShapeMismatch`].
    pub fn send(&mut self, key: &TensorKey, value: Value) -> DeferredWakeups {
        let mut wakeups = DeferredWakeups::default();
        let mut offered = self.table.offer(key, value);
        while let OfferOutcome::Matched(waiter, matched) = offered {
            self.ended(1);
            let back = match waiter.is_dropped() {
                true => Some(wakeups.pass_over(key, waiter, matched)),
                false => wakeups.deliver(key, waiter, matched),
            };
            let Some(back) = back else { break };
            offered = self.table.put_back(key, back);
        }
        wakeups
    }

    /// Gives a waiter the first value, or queues the waiter. A value of another shape stays.
    pub fn receive(&mut self, key: &TensorKey, waiter: LocalWaiter) -> DeferredWakeups {
        let mut wakeups = DeferredWakeups::default();
        let deadline = waiter.waiter.deadline;
        match self.table.ask(key, waiter) {
            AskOutcome::Matched(waiter, matched) => {
                if let Some(back) = wakeups.deliver(key, waiter, matched) {
                    // A key with a value has no waiter, so the value is queued.
                    let _ = self.table.put_back(key, back);
                }
            }
            AskOutcome::Queued => {
                self.waiting += 1;
                self.next_deadline.set(self.next_deadline.get().min(deadline));
            }
        }
        wakeups
    }

    /// Ends a call, if it still waits.
    pub fn cancel(&mut self, key: &TensorKey, cancel: &Cancel) -> DeferredWakeups {
        let found = self.table.remove_waiter(key, |kept| kept.waiter.id == cancel.call.id);
        self.ended(found.iter().len());
        DeferredWakeups(
            found.into_iter().map(|kept| gave_up(key.clone(), kept.waiter, cancel.why.clone())).collect(),
        )
    }

    /// Ends the calls whose deadline has passed.
    pub fn expire(&mut self, now: Time) -> DeferredWakeups {
        let late = self.table.remove_waiters(|_, kept| kept.waiter.deadline <= now);
        self.ended(late.len());
        let deadlines = self.table.waiters().map(|(_, kept)| kept.waiter.deadline);
        self.next_deadline.set(deadlines.min().unwrap_or(Time::NEVER));
        DeferredWakeups(
            late.into_iter()
                .map(|(key, kept)| gave_up(key, kept.waiter, CancelReason::Deadline(None)))
                .collect(),
        )
    }

    /// Whether there is neither a value nor a waiter.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// A lower bound of the deadlines of all waiters, from now on. [`Time::NEVER`] if none waits.
    pub fn next_deadline(&self) -> Arc<AtomicTime> {
        self.next_deadline.clone()
    }

    /// Notes that waiters have left the table.
    fn ended(&mut self, count: usize) {
        self.waiting -= count;
        if self.waiting == 0 {
            self.next_deadline.set(Time::NEVER);
        }
    }

    /// Drops a step's values and fails its waiters.
    pub fn end_step(&mut self, step: u64, error: &Error) -> DeferredWakeups {
        let (_, waiters) = self.table.remove_step(step);
        self.ended(waiters.len());
        DeferredWakeups(waiters.into_iter().map(|(_, kept)| failed(kept.waiter, error)).collect())
    }

    /// The receives that wait, with the begin of each.
    pub fn waits(&self) -> impl Iterator<Item = (&TensorKey, Time)> {
        self.table.waiters().map(|(key, kept)| (key, kept.waiter.begun))
    }

    /// The values that no receive has taken.
    pub fn values(&self) -> impl Iterator<Item = (&TensorKey, &Value)> {
        self.table.values()
    }

    /// Fails every waiter and drops every value.
    pub fn fail_all(&mut self, error: &Error) -> DeferredWakeups {
        let (_, waiters) = self.table.remove_steps(|_| true);
        self.ended(waiters.len());
        DeferredWakeups(waiters.into_iter().map(|(_, kept)| failed(kept.waiter, error)).collect())
    }
}

fn gave_up(key: TensorKey, mut waiter: Waiter, why: CancelReason) -> DeferredWakeup {
    waiter.cancel_reason = Some(why);
    DeferredWakeup::GaveUp { key, waiter }
}

fn failed(waiter: Waiter, error: &Error) -> DeferredWakeup {
    DeferredWakeup::Failed { waiter, error: error.clone() }
}

impl LocalWaiter {
    /// Whether its handle was dropped. The cancellation may come later.
    fn is_dropped(&self) -> bool {
        self.waiter.sender.is_abandoned()
    }
}

impl DeferredWakeups {
    /// Ends a waiter whose handle was dropped. Returns the value, which is for the next one.
    fn pass_over(
        &mut self,
        key: &TensorKey,
        LocalWaiter { waiter, .. }: LocalWaiter,
        matched: Numbered<Value>,
    ) -> Numbered<Value> {
        self.0.push(gave_up(key.clone(), waiter, CancelReason::Dropped));
        matched
    }

    /// Adds a value for its waiter. If the value does not fit the waiter's tensor, adds the error
    /// and returns the value.
    fn deliver(
        &mut self,
        key: &TensorKey,
        waiter: LocalWaiter,
        matched: Numbered<Value>,
    ) -> Option<Numbered<Value>> {
        if let (Value::Tensor(tensor), Some(given)) = (&matched.value, &waiter.into)
            && tensor.meta() != given.meta()
        {
            let (sent, given) = (Box::new(tensor.meta().clone()), Box::new(given.meta().clone()));
            let error = Error::ShapeMismatch { key: key.to_string(), sent, given };
            self.0.push(DeferredWakeup::Failed { waiter: waiter.waiter, error });
            return (!is_on(Mutant::LocalShapeMismatchLost)).then_some(matched);
        }
        self.0.push(DeferredWakeup::Value { waiter, value: matched.value });
        None
    }

    /// Adds the wake-ups of another call.
    pub fn append(&mut self, mut other: DeferredWakeups) {
        self.0.append(&mut other.0);
    }

    /// Wakes all waiters.
    pub fn wake(self) {
        self.0.into_iter().for_each(DeferredWakeup::wake);
    }
}

impl DeferredWakeup {
    fn wake(self) {
        match self {
            DeferredWakeup::GaveUp { key, waiter } => waiter.fail_cancelled(&key),
            DeferredWakeup::Failed { waiter, error } => waiter.complete(Err(error)),
            DeferredWakeup::Value { waiter, value } => complete(waiter, value),
        }
    }
}

fn complete(local: LocalWaiter, value: Value) {
    let LocalWaiter { waiter, into } = local;
    let (tensor, is_dead, sender, receiver) = match (value, into) {
        (Value::Tensor(tensor), None) => {
            let placement = placement_of(&tensor);
            (Payload::Tensor(tensor), false, placement, placement)
        }
        // `DeferredWakeups::deliver` has compared type and shape.
        (Value::Tensor(tensor), Some(mut given)) => {
            copy(given.bytes_mut(), tensor.bytes());
            let (sender, receiver) = (placement_of(&tensor), placement_of_mut(&given));
            (Payload::Into(given), false, sender, receiver)
        }
        (Value::Dead, None) => (Payload::Tensor(Tensor::empty()), true, Placement::HEAP, Placement::HEAP),
        (Value::Dead, Some(given)) => {
            let receiver = placement_of_mut(&given);
            (Payload::Into(given), true, Placement::HEAP, receiver)
        }
    };
    waiter.complete(Ok(Delivery { tensor, is_dead, sender, receiver }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::EdgeKey;
    use crate::matching::{CallId, Outcome};
    use crate::sync::{OneshotPool, OneshotSender};
    use crate::wire::EdgeName;
    use std::time::Duration;

    fn key(name: &str) -> TensorKey {
        let device = "/job:w/replica:0/task:0/device:CPU:0";
        let name = Arc::new(EdgeName::new(device, device, name).expect("a name"));
        TensorKey { edge: EdgeKey { name, frame: 0, iteration: 0 }, step: 1 }
    }

    fn waiter(id: u64, deadline: u64) -> LocalWaiter {
        let (begun, timeout) = (Time::ZERO, Duration::from_nanos(deadline));
        let waiter = Waiter {
            permit: None,
            id: CallId(id),
            sender: OneshotSender::callback(|_| {}),
            begun,
            deadline: begun + timeout,
            timeout,
            cancel_reason: None,
            is_logged: false,
        };
        LocalWaiter { waiter, into: None }
    }

    #[test]
    fn a_value_passes_over_receives_whose_handles_are_dropped() {
        let (mut local, pool) = (Local::default(), OneshotPool::<Outcome>::new(4));
        let receive = |local: &mut Local, id| {
            let (receiver, sender) = pool.channel();
            let LocalWaiter { waiter, into } = waiter(id, 10);
            local.receive(&key("a"), LocalWaiter { waiter: Waiter { sender, ..waiter }, into }).wake();
            receiver
        };
        let [first, second] = [1, 2].map(|id| receive(&mut local, id));
        let mut third = receive(&mut local, 3);
        drop((first, second));
        local.send(&key("a"), Value::Dead).wake();
        assert!(third.take().is_some_and(|outcome| outcome.0.is_ok()));
        drop(third);
        drop(receive(&mut local, 4));
        local.send(&key("a"), Value::Dead).wake();
        assert!(receive(&mut local, 5).take().is_some_and(|outcome| outcome.0.is_ok()), "it was kept");
        assert!(local.is_empty());
    }

    #[test]
    fn no_deadline_is_left_once_nothing_waits_however_the_waits_end() {
        let ends: [fn(&mut Local); 5] = [
            |local| ["a", "b"].iter().for_each(|name| local.send(&key(name), Value::Dead).wake()),
            |local| {
                for (id, name) in [(1, "a"), (2, "b")] {
                    let cancel = Cancel { call: CallId(id).into(), why: CancelReason::Cancelled };
                    local.cancel(&key(name), &cancel).wake();
                }
            },
            |local| local.expire(Time::from_nanos(20)).wake(),
            |local| local.end_step(1, &Error::Stopped).wake(),
            |local| local.fail_all(&Error::Stopped).wake(),
        ];
        for end in ends {
            let mut local = Local::default();
            let next = local.next_deadline();
            assert_eq!(next.get(), Time::NEVER);
            local.receive(&key("a"), waiter(1, 20)).wake();
            local.receive(&key("b"), waiter(2, 10)).wake();
            assert_eq!(next.get(), Time::from_nanos(10), "the earlier one");
            end(&mut local);
            assert_eq!(next.get(), Time::NEVER);
        }
    }
}
