//! The stash: values that have come and were not taken, because their receiver was gone or they did
//! not fit.
//!
//! The values stay here. `RETURN` puts their places back in line at the sender, and the next
//! receive of a key gets its value.

use crate::link::{Corruption, Received, RequestError, TensorKey};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::wire::TensorMeta;
use crate::wire::message::Placement;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// A value that was not taken.
#[derive(Debug)]
pub enum StashedValue {
    /// Whole, with its checksum compared.
    Tensor {
        /// The received tensor.
        tensor: Tensor,
        /// The placement of the value at the sender.
        sender: Placement,
    },
    /// A dead value: that of a branch not taken.
    Dead,
    /// A small tensor for which the pool had no room.
    Bytes {
        /// Element type and shape.
        meta: TensorMeta,
        /// The bytes of the tensor.
        bytes: Box<[u8]>,
        /// The placement of the value at the sender.
        sender: Placement,
    },
    /// A corrupted value. The next receive of the key gets the error.
    Corrupted(Corruption),
}

impl StashedValue {
    /// The value of a complete receive.
    pub fn of(received: Received, sender: Placement) -> Self {
        match received {
            Received::Tensor(tensor) => StashedValue::Tensor { tensor, sender },
            Received::Into(given) => StashedValue::Tensor { tensor: given.freeze(), sender },
            Received::Dead(_) => StashedValue::Dead,
        }
    }

    /// Gives the value to a receiver. `given` is the receiver's tensor; `into` says whether the
    /// value must be in it.
    ///
    /// # Errors
    /// Returns the value with the reason, if it does not fit `given` or the pool has no room.
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
            (StashedValue::Bytes { meta, bytes, sender }, None) => match pool.landing(&meta) {
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

    /// The value with the error that it does not fit a tensor with this meta-data.
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

/// A value that a receiver could not take, and the reason.
#[derive(Debug)]
pub struct RejectedValue {
    /// The arrival that no receive took.
    pub value: StashedValue,
    /// The reason.
    pub error: RequestError,
}

impl RejectedValue {
    /// The value for the next receive, and the error. A corrupted value ends with the first receive
    /// that gets its error.
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
    /// The number of the request that it answered, in the order in which they were made.
    pub asked: u64,
}

/// The stashed values of one link.
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

    /// Adds a value. Returns its id, which no other value has.
    pub fn keep(&mut self, entry: StashEntry) -> u32 {
        while self.values.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let name = self.next;
        self.next = name.wrapping_add(1);
        self.values.insert(name, entry);
        name
    }

    /// Removes the value with this id, if it has this key.
    pub fn take(&mut self, name: u32, key: &TensorKey) -> Option<StashEntry> {
        self.values.get(&name).filter(|entry| entry.key == *key)?;
        self.values.remove(&name)
    }

    /// Whether there is a value with this id and key.
    pub fn has(&self, name: u32, key: &TensorKey) -> bool {
        self.values.get(&name).is_some_and(|entry| entry.key == *key)
    }

    /// Removes the value of a key whose request was made first. Returns it with its id.
    pub fn take_any(&mut self, key: &TensorKey) -> Option<(u32, StashEntry)> {
        let of_key = self.values.iter().filter(|(_, entry)| entry.key == *key);
        let name = of_key.min_by_key(|(_, entry)| entry.asked).map(|(name, _)| *name)?;
        self.values.remove(&name).map(|entry| (name, entry))
    }

    /// Puts a value back under its old id.
    pub fn put_back(&mut self, name: u32, entry: StashEntry) {
        self.values.insert(name, entry);
    }

    /// Drops the values of these steps.
    pub fn end_steps(&mut self, steps: &RangeInclusive<u64>) {
        self.values.retain(|_, entry| !steps.contains(&entry.key.step));
    }

    /// Removes all values, in the order of their requests.
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
    fn a_value_is_taken_by_its_id_and_key() {
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
    fn values_leave_in_the_order_of_their_requests() {
        let mut table = Stash::default();
        for asked in [5, 2, 9, 1] {
            table.keep(entry(1, asked));
        }
        table.keep(entry(2, 0));
        assert_eq!(table.take_any(&entry(1, 0).key).map(|(_, entry)| entry.asked), Some(1));
        table.end_steps(&(2..=2));
        assert_eq!(table.drain().iter().map(|entry| entry.asked).collect::<Vec<_>>(), [2, 5, 9]);
    }

    #[test]
    fn an_id_in_use_is_not_given_again() {
        let mut table = Stash { values: BTreeMap::new(), next: u32::MAX };
        assert_eq!(table.keep(entry(1, 1)), u32::MAX);
        assert_eq!(table.keep(entry(1, 2)), 0);
        table.next = u32::MAX;
        assert_eq!(table.keep(entry(1, 3)), 1);
    }
}
