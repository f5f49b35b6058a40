//! Which requests of a peer have ended.

use std::collections::BTreeSet;

/// The numbers of ended requests. A late copy of an ended request would take a value for nobody.
#[derive(Debug, Default)]
pub(super) struct FinishedRequests {
    /// Every request below has ended.
    below: u64,
    /// Those that have ended before earlier ones.
    early: BTreeSet<u64>,
}

/// Early requests that are remembered. A peer that finishes more has none open below the last.
const MAX_EARLY: usize = 1 << 17;

impl FinishedRequests {
    pub fn contains(&self, id: u64) -> bool {
        id < self.below || self.early.contains(&id)
    }

    /// A request has ended.
    pub fn insert(&mut self, id: u64) {
        if id < self.below {
            return;
        }
        self.early.insert(id);
        if self.early.len() > MAX_EARLY
            && let Some(first) = self.early.first()
        {
            self.below = *first;
        }
        while self.early.remove(&self.below) {
            self.below = self.below.saturating_add(1);
        }
    }

    /// Every request below `id` has ended.
    pub fn insert_below(&mut self, id: u64) {
        self.below = self.below.max(id);
        self.early = self.early.split_off(&self.below);
        while self.early.remove(&self.below) {
            self.below = self.below.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_requests_are_known_in_any_order_and_take_bounded_memory() {
        let mut finished = FinishedRequests::default();
        for id in [0, 2, 1, 4] {
            assert!(!finished.contains(id));
            finished.insert(id);
        }
        assert_eq!((finished.below, finished.early.len()), (3, 1));
        assert!([0, 1, 2, 4].into_iter().all(|id| finished.contains(id)) && !finished.contains(3));
        finished.insert_below(4);
        assert_eq!((finished.below, finished.early.len()), (5, 0));
        (0..3 * MAX_EARLY as u64).for_each(|n| finished.insert(10 + 2 * n));
        assert!(finished.early.len() <= MAX_EARLY);
        finished.insert(u64::MAX);
        finished.insert_below(u64::MAX);
        assert!(finished.contains(u64::MAX - 1));
    }
}
