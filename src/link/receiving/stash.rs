//! Values that have come and that nobody took: their receiver was gone, or did not want them as they are.
//!
//! They stay here, and `RETURN` puts their places back in line at the sender: whoever is next in that line gets them.

use crate::link::{Corruption, Received, RequestError, TensorKey};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::wire::TensorMeta;
use crate::wire::message::Placement;
use std::collections::BTreeMap;

/// A value that nobody took.
#[derive(Debug)]
pub enum StashedValue {
    /// A tensor.
    Tensor {
        /// It.
        tensor: Tensor,
        /// Where it lay at the sender.
        sender: Placement,
    },
    /// The value of a branch not taken.
    Dead,
    /// A small tensor for which the pool had no room.
    Bytes {
        /// Its element type and shape.
        meta: TensorMeta,
        /// Its bytes.
        bytes: Box<[u8]>,
        /// Where it lay at the sender.
        sender: Placement,
    },
    /// What is left of a value whose bytes were not those that were sent: whoever is next in line is told.
    Corrupted(Corruption),
}

impl StashedValue {
    /// What was received, if it was received into `given` or to nowhere in particular.
    pub fn of(received: Received, sender: Placement) -> Self {
        match received {
            Received::Tensor(tensor) => StashedValue::Tensor { tensor, sender },
            Received::Into(given) => StashedValue::Tensor { tensor: given.freeze(), sender },
            Received::Dead(_) => StashedValue::Dead,
        }
    }

    /// Gives the value to a receiver: `given` is what it gave for it, `into` whether that must be what comes back.
    ///
    /// # Errors
    /// The value comes back with the reason, if it does not fit what was given, or there is no room for it.
    pub fn place(
        self,
        pool: &Pool,
        given: Option<TensorMut>,
        into: bool,
    ) -> Result<(Received, Placement), Box<RejectedValue>> {
        let given = given.filter(|_| into);
        match (self, given) {
            (StashedValue::Corrupted(corruption), _) => {
                let error = RequestError::Corrupted(corruption);
                Err(Box::new(RejectedValue { value: StashedValue::Corrupted(corruption), error }))
            }
            (StashedValue::Dead, given) => Ok((Received::Dead(given), Placement::HEAP)),
            (StashedValue::Tensor { tensor, sender }, None) => Ok((Received::Tensor(tensor), sender)),
            (StashedValue::Tensor { tensor, sender }, Some(mut given)) if given.meta() == tensor.meta() => {
                given.bytes_mut().copy_from_slice(tensor.bytes());
                Ok((Received::Into(given), sender))
            }
            (StashedValue::Bytes { meta, bytes, sender }, Some(mut given)) if *given.meta() == meta => {
                given.bytes_mut().copy_from_slice(&bytes);
                Ok((Received::Into(given), sender))
            }
            (value, Some(given)) => Err(Box::new(value.rejected_for(given.meta()))),
            (StashedValue::Bytes { meta, bytes, sender }, None) => match pool.tensor(meta.clone()) {
                Ok(mut tensor) => {
                    tensor.bytes_mut().copy_from_slice(&bytes);
                    Ok((Received::Tensor(tensor.freeze()), sender))
                }
                Err(error) => {
                    let value = StashedValue::Bytes { meta, bytes, sender };
                    Err(Box::new(RejectedValue { value, error: RequestError::NoRoom(error) }))
                }
            },
        }
    }

    /// The value, which does not fit what was given for it.
    pub(in crate::link) fn rejected_for(self, given: &TensorMeta) -> RejectedValue {
        let sent = match &self {
            StashedValue::Tensor { tensor, .. } => tensor.meta().clone(),
            StashedValue::Bytes { meta, .. } => meta.clone(),
            StashedValue::Dead | StashedValue::Corrupted(_) => Tensor::empty().meta().clone(),
        };
        let error = RequestError::ShapeMismatch { sent: Box::new(sent), given: Box::new(given.clone()) };
        RejectedValue { value: self, error }
    }
}

/// A value that a receiver can't have as it is, and why.
#[derive(Debug)]
pub struct RejectedValue {
    /// The value.
    pub value: StashedValue,
    /// Why.
    pub error: RequestError,
}

impl RejectedValue {
    /// What the next in line may still get: nothing, once somebody has been told that it is corrupted.
    pub fn into_remaining(self) -> (Option<StashedValue>, RequestError) {
        let RejectedValue { value, error } = self;
        let is_over = matches!(error, RequestError::Corrupted(_));
        ((!is_over).then_some(value), error)
    }
}

/// A stashed value.
#[derive(Debug)]
pub(in crate::link) struct StashEntry {
    pub key: TensorKey,
    pub value: StashedValue,
    /// When the request that it answered was made, counted in requests.
    pub asked: u64,
}

/// The values of one link that nobody took.
#[derive(Debug, Default)]
pub(in crate::link) struct Stash {
    values: BTreeMap<u32, StashEntry>,
    next: u32,
}

impl Stash {
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    #[cfg(any(test, feature = "sim"))]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Keeps a value, under a name that no other has.
    pub fn keep(&mut self, entry: StashEntry) -> u32 {
        while self.values.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let name = self.next;
        self.next = name.wrapping_add(1);
        self.values.insert(name, entry);
        name
    }

    /// The value with this name, if it is one of that key.
    pub fn take(&mut self, name: u32, key: &TensorKey) -> Option<StashEntry> {
        self.values.get(&name).filter(|entry| entry.key == *key)?;
        self.values.remove(&name)
    }

    /// Whether there is a value with this name for that key.
    pub fn has(&self, name: u32, key: &TensorKey) -> bool {
        self.values.get(&name).is_some_and(|entry| entry.key == *key)
    }

    /// The value of that key that was asked for first, with its name.
    pub fn take_any(&mut self, key: &TensorKey) -> Option<(u32, StashEntry)> {
        let of_key = self.values.iter().filter(|(_, entry)| entry.key == *key);
        let name = of_key.min_by_key(|(_, entry)| entry.asked).map(|(name, _)| *name)?;
        self.values.remove(&name).map(|entry| (name, entry))
    }

    /// Keeps a value under the name that it had.
    pub fn put_back(&mut self, name: u32, entry: StashEntry) {
        self.values.insert(name, entry);
    }

    /// Drops what belongs to a step.
    pub fn end_step(&mut self, step: u64) {
        self.values.retain(|_, entry| entry.key.step != step);
    }

    /// Takes everything out, what was asked for first first.
    pub fn drain(&mut self) -> Vec<StashEntry> {
        let mut all: Vec<_> = std::mem::take(&mut self.values).into_values().collect();
        all.sort_by_key(|entry| entry.asked);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::EdgeName;
    use std::sync::Arc;

    fn entry(step: u64, asked: u64) -> StashEntry {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        let edge = Arc::new(EdgeName::new(device, device, "e").expect("edge"));
        StashEntry { key: TensorKey { edge, step, frame: 0, iteration: 0 }, value: StashedValue::Dead, asked }
    }

    #[test]
    fn a_value_is_taken_by_its_name_and_for_its_key_alone() {
        let mut table = Stash::default();
        let (first, second) = (table.keep(entry(1, 7)), table.keep(entry(1, 3)));
        assert!(table.take(first, &entry(2, 0).key).is_none(), "another key");
        assert!(table.has(first, &entry(1, 0).key) && !table.has(first, &entry(2, 0).key));
        assert!(table.take(first + 10, &entry(1, 0).key).is_none());
        assert_eq!(table.take(first, &entry(1, 0).key).map(|entry| entry.asked), Some(7));
        assert!(table.take(first, &entry(1, 0).key).is_none(), "twice");
        assert!(table.take(second, &entry(1, 0).key).is_some() && table.is_empty());
    }

    #[test]
    fn what_was_asked_for_first_leaves_first() {
        let mut table = Stash::default();
        for asked in [5, 2, 9, 1] {
            table.keep(entry(1, asked));
        }
        table.keep(entry(2, 0));
        assert_eq!(table.take_any(&entry(1, 0).key).map(|(_, entry)| entry.asked), Some(1));
        table.end_step(2);
        assert_eq!(table.drain().iter().map(|entry| entry.asked).collect::<Vec<_>>(), [2, 5, 9]);
    }

    #[test]
    fn a_name_in_use_is_not_given_again() {
        let mut table = Stash { values: BTreeMap::new(), next: u32::MAX };
        assert_eq!(table.keep(entry(1, 1)), u32::MAX);
        assert_eq!(table.keep(entry(1, 2)), 0);
        table.next = u32::MAX;
        assert_eq!(table.keep(entry(1, 3)), 1);
    }
}
