//! Matches the values and the waiters of each key.

use super::fifo::Fifo;
use crate::link::TensorKey;
use crate::protocol::StepCounts;
use foldhash::HashMap;
use foldhash::fast::RandomState;

/// The initial capacity, in key queues. A hash table that is less than half full never grows.
const KEY_QUEUES: usize = 256;

/// Values and waiters by whole key. A key has values or waiters, never both.
///
/// Each value gets a number when it is offered, and keeps the number. A value that was matched and
/// is put back takes its old place by the number. So the values of a key are always in the order in
/// which they were sent.
#[derive(Debug)]
pub(crate) struct Table<V, W> {
    queues: HashMap<TensorKey, KeyQueue<V, W>>,
    /// The queues of each step. Many steps at a time allocate: see [`StepCounts`].
    counts: StepCounts,
    next_number: u64,
}

/// A value with its number among all offered values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbered<V> {
    /// Grows with each offer to the table.
    pub number: u64,
    /// The offered value.
    pub value: V,
}

#[derive(Debug)]
enum KeyQueue<V, W> {
    Values(Fifo<Numbered<V>>),
    Waiters(Fifo<W>),
}

impl<V, W> Default for Table<V, W> {
    fn default() -> Self {
        let queues = HashMap::with_capacity_and_hasher(KEY_QUEUES, RandomState::default());
        Table { queues, counts: StepCounts::default(), next_number: 0 }
    }
}

/// The outcome of [`Table::offer`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OfferOutcome<V, W> {
    /// The first waiter gets the value.
    Matched(W, Numbered<V>),
    /// No waiter: the value is queued.
    Queued,
}

/// The outcome of [`Table::ask`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AskOutcome<V, W> {
    /// The waiter gets the first value.
    Matched(W, Numbered<V>),
    /// No value: the waiter is queued.
    Queued,
}

impl<V, W> Table<V, W> {
    /// Matches a value with the first waiter, or queues it behind the others.
    pub fn offer(&mut self, key: &TensorKey, value: V) -> OfferOutcome<V, W> {
        let number = self.next_number;
        self.next_number += 1;
        self.put(key, Numbered { number, value })
    }

    /// Offers a value again that was matched before: it is queued at its old place.
    pub fn put_back(&mut self, key: &TensorKey, value: Numbered<V>) -> OfferOutcome<V, W> {
        self.put(key, value)
    }

    fn put(&mut self, key: &TensorKey, value: Numbered<V>) -> OfferOutcome<V, W> {
        match self.queues.get_mut(key) {
            None => {
                self.insert(key, KeyQueue::Values(Fifo::one(value)));
                OfferOutcome::Queued
            }
            Some(KeyQueue::Values(values)) => {
                let number = value.number;
                if values.last().is_none_or(|last| last.number < number) {
                    values.push(value);
                } else {
                    values.insert_before(value, |other| other.number > number);
                }
                OfferOutcome::Queued
            }
            Some(KeyQueue::Waiters(waiters)) => {
                let waiter = waiters.pop();
                if waiters.is_empty() {
                    self.remove(key);
                }
                match waiter {
                    Some(waiter) => OfferOutcome::Matched(waiter, value),
                    // Unreachable: the table holds no empty queue.
                    None => self.put(key, value),
                }
            }
        }
    }

    /// Matches a waiter with the first value, or queues it behind the others.
    pub fn ask(&mut self, key: &TensorKey, waiter: W) -> AskOutcome<V, W> {
        match self.queues.get_mut(key) {
            None => {
                self.insert(key, KeyQueue::Waiters(Fifo::one(waiter)));
                AskOutcome::Queued
            }
            Some(KeyQueue::Waiters(waiters)) => {
                waiters.push(waiter);
                AskOutcome::Queued
            }
            Some(KeyQueue::Values(values)) => {
                let value = values.pop();
                if values.is_empty() {
                    self.remove(key);
                }
                match value {
                    Some(value) => AskOutcome::Matched(waiter, value),
                    // Unreachable: the table holds no empty queue.
                    None => self.ask(key, waiter),
                }
            }
        }
    }

    /// The number of waiters of a key.
    pub fn waiting(&self, key: &TensorKey) -> usize {
        match self.queues.get(key) {
            Some(KeyQueue::Waiters(waiters)) => waiters.len(),
            Some(KeyQueue::Values(_)) | None => 0,
        }
    }

    /// Removes the first waiter of a key that `fits`.
    pub fn remove_waiter(&mut self, key: &TensorKey, fits: impl FnMut(&W) -> bool) -> Option<W> {
        let Some(KeyQueue::Waiters(waiters)) = self.queues.get_mut(key) else { return None };
        let waiter = waiters.remove(fits);
        if waiters.is_empty() {
            self.remove(key);
        }
        waiter
    }

    fn insert(&mut self, key: &TensorKey, queue: KeyQueue<V, W>) {
        self.counts.add(key.step);
        self.queues.insert(key.clone(), queue);
    }

    fn remove(&mut self, key: &TensorKey) {
        self.counts.remove(key.step);
        self.queues.remove(key);
    }

    /// Removes every waiter that `fits`, in the order of the keys, then of each key's queue.
    pub fn remove_waiters(&mut self, mut fits: impl FnMut(&TensorKey, &W) -> bool) -> Vec<(TensorKey, W)> {
        let mut removed = Vec::new();
        self.queues.retain(|key, queue| {
            let KeyQueue::Waiters(waiters) = queue else { return true };
            let of_key = waiters.remove_all(|waiter| fits(key, waiter));
            removed.extend(of_key.into_iter().map(|waiter| (key.clone(), waiter)));
            if waiters.is_empty() {
                self.counts.remove(key.step);
            }
            !waiters.is_empty()
        });
        removed.sort_by(|(a, _), (b, _)| a.cmp(b));
        removed
    }

    /// As [`Table::remove_steps`], for one step. Without values or waiters of the step no key is
    /// looked at.
    pub fn remove_step(&mut self, step: u64) -> (Vec<V>, Vec<(TensorKey, W)>) {
        if self.counts.is_empty(step) {
            return (Vec::new(), Vec::new());
        }
        self.remove_steps(|kept| kept == step)
    }

    /// Removes the values and waiters of the steps that `fits` selects. The order is the order of
    /// the keys: the order of the hashes would make runs differ.
    pub fn remove_steps(&mut self, mut fits: impl FnMut(u64) -> bool) -> (Vec<V>, Vec<(TensorKey, W)>) {
        let mut queues: Vec<_> = self.queues.extract_if(|key, _| fits(key.step)).collect();
        queues.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let (mut values, mut waiters) = (Vec::new(), Vec::new());
        for (key, queue) in queues {
            self.counts.remove(key.step);
            match queue {
                KeyQueue::Values(mut kept) => {
                    values.extend(std::iter::from_fn(|| kept.pop()).map(|kept| kept.value));
                }
                KeyQueue::Waiters(mut kept) => {
                    waiters.extend(std::iter::from_fn(|| kept.pop()).map(|waiter| (key.clone(), waiter)));
                }
            }
        }
        (values, waiters)
    }

    /// The values, in no order.
    pub fn values(&self) -> impl Iterator<Item = (&TensorKey, &V)> {
        self.queues.iter().flat_map(|(key, queue)| {
            let values = match queue {
                KeyQueue::Values(values) => Some(values.iter()),
                KeyQueue::Waiters(_) => None,
            };
            values.into_iter().flatten().map(move |kept| (key, &kept.value))
        })
    }

    /// The waiters, in no order.
    pub fn waiters(&self) -> impl Iterator<Item = (&TensorKey, &W)> {
        self.queues.iter().flat_map(|(key, queue)| {
            let waiters = match queue {
                KeyQueue::Waiters(waiters) => Some(waiters.iter()),
                KeyQueue::Values(_) => None,
            };
            waiters.into_iter().flatten().map(move |waiter| (key, waiter))
        })
    }

    /// Whether there is neither a value nor a waiter.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::EdgeKey;
    use crate::wire::EdgeName;
    use proptest::prelude::*;
    use std::hash::BuildHasher;
    use std::sync::Arc;

    fn key(name: &str, step: u64) -> TensorKey {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        let edge = Arc::new(EdgeName::new(device, device, name).expect("edge"));
        TensorKey { edge: EdgeKey { name: edge, frame: 0, iteration: 0 }, step }
    }

    fn given<W>(waiter: W, number: u64, value: i32) -> AskOutcome<i32, W> {
        AskOutcome::Matched(waiter, Numbered { number, value })
    }

    #[test]
    fn values_and_waiters_meet_in_order() {
        let mut table = Table::default();
        let key = key("a", 1);
        assert_eq!(table.offer(&key, 1), OfferOutcome::Queued);
        assert_eq!(table.offer(&key, 2), OfferOutcome::Queued);
        assert_eq!(table.ask(&key, 'a'), given('a', 0, 1));
        assert_eq!(table.ask(&key, 'b'), given('b', 1, 2));
        assert_eq!(table.ask(&key, 'c'), AskOutcome::Queued);
        assert_eq!(table.ask(&key, 'd'), AskOutcome::Queued);
        assert_eq!(table.offer(&key, 3), OfferOutcome::Matched('c', Numbered { number: 2, value: 3 }));
        assert_eq!(table.offer(&key, 4), OfferOutcome::Matched('d', Numbered { number: 3, value: 4 }));
        assert!(table.is_empty());
    }

    /// All permutations.
    fn orders(of: &[u64]) -> Vec<Vec<u64>> {
        if of.is_empty() {
            return vec![Vec::new()];
        }
        let without = |at: usize| [&of[..at], &of[at + 1..]].concat();
        let each = (0..of.len())
            .flat_map(|at| orders(&without(at)).into_iter().map(move |rest| [vec![of[at]], rest].concat()));
        each.collect()
    }

    #[test]
    fn values_that_come_back_take_their_places_in_whatever_order_they_come() {
        for back in orders(&[0, 1, 2, 3]) {
            let mut table = Table::<i32, char>::default();
            let key = key("a", 1);
            for value in 0..6 {
                table.offer(&key, value);
            }
            for value in 0..4 {
                assert_eq!(table.ask(&key, 'x'), given('x', value, value as i32));
            }
            for number in &back {
                table.put_back(&key, Numbered { number: *number, value: *number as i32 });
            }
            for value in 0..6 {
                assert_eq!(table.ask(&key, 'y'), given('y', value, value as i32), "after {back:?}");
            }
            assert!(table.is_empty());
        }
    }

    #[test]
    fn a_value_that_comes_back_goes_to_whoever_waits() {
        let mut table = Table::<i32, char>::default();
        let key = key("a", 1);
        table.offer(&key, 5);
        assert_eq!(table.ask(&key, 'a'), given('a', 0, 5));
        table.ask(&key, 'b');
        let back = Numbered { number: 0, value: 5 };
        assert_eq!(table.put_back(&key, back), OfferOutcome::Matched('b', back));
        assert!(table.is_empty());
    }

    #[test]
    fn names_steps_frames_and_iterations_keep_values_apart() {
        let mut table = Table::<i32, char>::default();
        let base = key("a", 1);
        let others = [
            key("b", 1),
            key("a", 2),
            TensorKey { edge: EdgeKey { frame: 1, ..base.edge.clone() }, step: 1 },
            TensorKey { edge: EdgeKey { iteration: 1, ..base.edge.clone() }, step: 1 },
        ];
        table.offer(&base, 1);
        for other in &others {
            assert_eq!(table.ask(other, 'x'), AskOutcome::Queued);
        }
        assert_eq!(table.ask(&key("a", 1), 'y'), given('y', 0, 1), "equal, not the same");
    }

    #[test]
    fn keys_of_equal_hashes_are_kept_apart() {
        let mut table = Table::<i32, char>::default();
        let colliding = |name: &str| {
            let TensorKey { edge, step } = key(name, 1);
            let name = Arc::new(EdgeName::clone(&edge.name).with_hash(7));
            TensorKey { edge: EdgeKey { name, ..edge }, step }
        };
        let (one, other) = (colliding("a"), colliding("b"));
        let hasher = RandomState::default();
        assert_eq!(hasher.hash_one(&one), hasher.hash_one(&other), "the hashes collide");
        assert_eq!(table.offer(&one, 1), OfferOutcome::Queued);
        assert_eq!(table.ask(&other, 'x'), AskOutcome::Queued, "the value is not its own");
        assert_eq!(table.offer(&other, 2), OfferOutcome::Matched('x', Numbered { number: 1, value: 2 }));
        assert_eq!(table.ask(&colliding("a"), 'y'), given('y', 0, 1));
        assert!(table.is_empty());
    }

    #[test]
    fn a_step_is_emptied_and_the_others_stay() {
        let mut table = Table::default();
        table.offer(&key("a", 1), 1);
        table.offer(&key("a", 1), 2);
        table.ask(&key("b", 1), 'w');
        table.offer(&key("a", 2), 3);
        let (values, waiters) = table.remove_step(1);
        assert_eq!((values, waiters.len()), (vec![1, 2], 1));
        assert_eq!(table.remove_step(1), (vec![], vec![]));
        assert_eq!(table.ask(&key("a", 2), 'x'), given('x', 2, 3));
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

    proptest! {
        #[test]
        fn the_steps_with_values_or_waiters_are_known(
            changes in prop::collection::vec((0..7_u8, 0..3_usize, 0..4_u64), 0..200),
        ) {
            let (mut table, mut waiters) = (Table::default(), 0..);
            for (change, name, step) in changes {
                // The counts of these steps share a place.
                let key = key(["a", "b", "c"][name], step << 32);
                match change {
                    0 => drop(table.offer(&key, ())),
                    1 => drop(table.put_back(&key, Numbered { number: 0, value: () })),
                    2 => drop(table.ask(&key, waiters.next().expect("endless"))),
                    3 => drop(table.remove_waiter(&key, |waiter| waiter % 2 == 0)),
                    4 => drop(table.remove_waiters(|_, waiter| waiter % 3 == 0)),
                    5 => drop(table.remove_step(key.step)),
                    _ => drop(table.remove_steps(|of| of > key.step)),
                }
                for step in (0..4).map(|step| step << 32) {
                    let queues = table.queues.keys().filter(|key| key.step == step).count();
                    prop_assert_eq!(table.counts.clone().take(&(step..=step)), queues);
                    prop_assert_eq!(table.counts.is_empty(step), queues == 0);
                }
            }
        }
    }
}
