//! The table in which values and waiters of a key meet.

use super::fifo::Fifo;
use crate::link::TensorKey;
use foldhash::HashMap;
use foldhash::fast::RandomState;

/// Channels that find room before anything is allocated. A hash table that is less than half full never grows.
const CHANNELS: usize = 256;

/// Values and waiters by whole key. A key has values or waiters, never both.
#[derive(Debug)]
pub(super) struct Table<V, W> {
    channels: HashMap<TensorKey, Channel<V, W>>,
}

#[derive(Debug)]
enum Channel<V, W> {
    Values(Fifo<V>),
    Waiters(Fifo<W>),
}

impl<V, W> Default for Table<V, W> {
    fn default() -> Self {
        Table { channels: HashMap::with_capacity_and_hasher(CHANNELS, RandomState::default()) }
    }
}

/// What became of a value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Offered<V, W> {
    /// Somebody waited for it.
    Matched(W, V),
    /// It is kept.
    Kept,
}

/// What became of a waiter.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked<V, W> {
    /// The value was there.
    Matched(W, V),
    /// The waiter is kept.
    Kept,
}

impl<V, W> Table<V, W> {
    /// Hands a value to the first waiter, or keeps it behind the others.
    pub fn offer(&mut self, key: &TensorKey, value: V) -> Offered<V, W> {
        self.put(key, value, Fifo::push)
    }

    /// The same, with the value first in line.
    pub fn put_back(&mut self, key: &TensorKey, value: V) -> Offered<V, W> {
        self.put(key, value, Fifo::push_front)
    }

    fn put(&mut self, key: &TensorKey, value: V, keep: fn(&mut Fifo<V>, V)) -> Offered<V, W> {
        match self.channels.get_mut(key) {
            None => {
                self.channels.insert(key.clone(), Channel::Values(Fifo::one(value)));
                Offered::Kept
            }
            Some(Channel::Values(values)) => {
                keep(values, value);
                Offered::Kept
            }
            Some(Channel::Waiters(waiters)) => {
                let waiter = waiters.pop();
                if waiters.is_empty() {
                    self.channels.remove(key);
                }
                match waiter {
                    Some(waiter) => Offered::Matched(waiter, value),
                    // An empty channel is never left in the table.
                    None => self.put(key, value, keep),
                }
            }
        }
    }

    /// Gives a waiter the first value, or keeps it behind the others.
    pub fn ask(&mut self, key: &TensorKey, waiter: W) -> Asked<V, W> {
        match self.channels.get_mut(key) {
            None => {
                self.channels.insert(key.clone(), Channel::Waiters(Fifo::one(waiter)));
                Asked::Kept
            }
            Some(Channel::Waiters(waiters)) => {
                waiters.push(waiter);
                Asked::Kept
            }
            Some(Channel::Values(values)) => {
                let value = values.pop();
                if values.is_empty() {
                    self.channels.remove(key);
                }
                match value {
                    Some(value) => Asked::Matched(waiter, value),
                    // An empty channel is never left in the table.
                    None => self.ask(key, waiter),
                }
            }
        }
    }

    /// Takes out one waiter of a key.
    pub fn remove_waiter(&mut self, key: &TensorKey, fits: impl FnMut(&W) -> bool) -> Option<W> {
        let Some(Channel::Waiters(waiters)) = self.channels.get_mut(key) else { return None };
        let waiter = waiters.remove(fits);
        if waiters.is_empty() {
            self.channels.remove(key);
        }
        waiter
    }

    /// Takes out every waiter that fits, whatever its key: in the order of the keys, and of each key's line.
    pub fn remove_waiters(&mut self, mut fits: impl FnMut(&TensorKey, &W) -> bool) -> Vec<(TensorKey, W)> {
        let mut removed = Vec::new();
        self.channels.retain(|key, channel| {
            let Channel::Waiters(waiters) = channel else { return true };
            while let Some(waiter) = waiters.remove(|waiter| fits(key, waiter)) {
                removed.push((key.clone(), waiter));
            }
            !waiters.is_empty()
        });
        removed.sort_by(|(a, _), (b, _)| a.cmp(b));
        removed
    }

    /// Takes out everything of the steps that fit: how many values were dropped, and the waiters. In the order of the
    /// keys, so that neither the waiters nor the pool's blocks come back in an order that the hashes make.
    pub fn remove_steps(&mut self, mut fits: impl FnMut(u64) -> bool) -> (usize, Vec<(TensorKey, W)>) {
        let mut channels: Vec<_> = self.channels.extract_if(|key, _| fits(key.step)).collect();
        channels.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let (mut values, mut waiters) = (0, Vec::new());
        for (key, channel) in channels {
            match channel {
                Channel::Values(kept) => values += kept.len(),
                Channel::Waiters(mut kept) => {
                    waiters.extend(std::iter::from_fn(|| kept.pop()).map(|waiter| (key.clone(), waiter)));
                }
            }
        }
        (values, waiters)
    }

    /// The waiters, in no order.
    pub fn waiters(&self) -> impl Iterator<Item = (&TensorKey, &W)> {
        self.channels.iter().flat_map(|(key, channel)| {
            let waiters = match channel {
                Channel::Waiters(waiters) => Some(waiters.iter()),
                Channel::Values(_) => None,
            };
            waiters.into_iter().flatten().map(move |waiter| (key, waiter))
        })
    }

    /// The waiters, in no order, to be changed where they are.
    pub fn waiters_mut(&mut self) -> impl Iterator<Item = (&TensorKey, &mut W)> {
        self.channels.iter_mut().flat_map(|(key, channel)| {
            let waiters = match channel {
                Channel::Waiters(waiters) => Some(waiters.iter_mut()),
                Channel::Values(_) => None,
            };
            waiters.into_iter().flatten().map(move |waiter| (key, waiter))
        })
    }

    /// How many values and waiters there are.
    pub fn len(&self) -> (usize, usize) {
        let (mut values, mut waiters) = (0, 0);
        for channel in self.channels.values() {
            match channel {
                Channel::Values(kept) => values += kept.len(),
                Channel::Waiters(kept) => waiters += kept.len(),
            }
        }
        (values, waiters)
    }

    /// Whether there is neither a value nor a waiter.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.channels.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::EdgeName;
    use std::hash::BuildHasher;
    use std::sync::Arc;

    fn key(name: &str, step: u64) -> TensorKey {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        let edge = Arc::new(EdgeName::new(device, device, name).expect("edge"));
        TensorKey { edge, step, frame: 0, iteration: 0 }
    }

    #[test]
    fn values_and_waiters_meet_in_order() {
        let mut table = Table::default();
        let key = key("a", 1);
        assert_eq!(table.offer(&key, 1), Offered::Kept);
        assert_eq!(table.offer(&key, 2), Offered::Kept);
        assert_eq!(table.ask(&key, 'a'), Asked::Matched('a', 1));
        assert_eq!(table.ask(&key, 'b'), Asked::Matched('b', 2));
        assert_eq!(table.ask(&key, 'c'), Asked::Kept);
        assert_eq!(table.ask(&key, 'd'), Asked::Kept);
        assert_eq!(table.offer(&key, 3), Offered::Matched('c', 3));
        assert_eq!(table.offer(&key, 4), Offered::Matched('d', 4));
        assert!(table.is_empty());
    }

    #[test]
    fn a_value_that_is_put_back_is_first_in_line() {
        let mut table = Table::<i32, char>::default();
        let key = key("a", 1);
        table.offer(&key, 2);
        table.put_back(&key, 1);
        assert_eq!(table.ask(&key, 'a'), Asked::Matched('a', 1));
    }

    #[test]
    fn names_steps_frames_and_iterations_keep_values_apart() {
        let mut table = Table::<i32, char>::default();
        let base = key("a", 1);
        let others = [
            key("b", 1),
            key("a", 2),
            TensorKey { frame: 1, ..base.clone() },
            TensorKey { iteration: 1, ..base.clone() },
        ];
        table.offer(&base, 1);
        for other in &others {
            assert_eq!(table.ask(other, 'x'), Asked::Kept);
        }
        assert_eq!(table.ask(&key("a", 1), 'y'), Asked::Matched('y', 1), "equal, not the same");
    }

    #[test]
    fn keys_of_equal_hashes_are_kept_apart() {
        let mut table = Table::<i32, char>::default();
        let colliding = |name: &str| {
            let TensorKey { edge, .. } = key(name, 1);
            let edge = Arc::new(EdgeName::clone(&edge).with_hash(7));
            TensorKey { edge, step: 1, frame: 0, iteration: 0 }
        };
        let (one, other) = (colliding("a"), colliding("b"));
        let hasher = RandomState::default();
        assert_eq!(hasher.hash_one(&one), hasher.hash_one(&other), "they do collide");
        assert_eq!(table.offer(&one, 1), Offered::Kept);
        assert_eq!(table.ask(&other, 'x'), Asked::Kept, "the value is not its own");
        assert_eq!(table.offer(&other, 2), Offered::Matched('x', 2));
        assert_eq!(table.ask(&colliding("a"), 'y'), Asked::Matched('y', 1));
        assert!(table.is_empty());
    }

    #[test]
    fn a_step_is_emptied_and_the_others_stay() {
        let mut table = Table::default();
        table.offer(&key("a", 1), 1);
        table.offer(&key("a", 1), 2);
        table.ask(&key("b", 1), 'w');
        table.offer(&key("a", 2), 3);
        let (values, waiters) = table.remove_steps(|step| step == 1);
        assert_eq!((values, waiters.len()), (2, 1));
        assert_eq!(table.ask(&key("a", 2), 'x'), Asked::Matched('x', 3));
        assert!(table.is_empty());
    }

    #[test]
    fn one_waiter_can_leave_the_line() {
        let mut table = Table::<i32, char>::default();
        let key = key("a", 1);
        for waiter in ['a', 'b', 'c'] {
            table.ask(&key, waiter);
        }
        assert_eq!(table.remove_waiter(&key, |waiter| *waiter == 'b'), Some('b'));
        assert_eq!(table.remove_waiter(&key, |waiter| *waiter == 'b'), None);
        assert_eq!(table.waiters().map(|(_, waiter)| *waiter).collect::<Vec<_>>(), ['a', 'c']);
        assert_eq!(table.remove_waiters(|_, _| true).len(), 2);
        assert!(table.is_empty());
    }
}
