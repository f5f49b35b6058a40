//! Counters of operations on the program's own threads.

use super::{Counter, Counters, Snapshot};
use std::sync::atomic::Ordering;

/// Counters with any number of writers, for rare or expensive operations.
#[derive(Debug)]
pub struct SharedCounters(Counters);

impl SharedCounters {
    /// New counters, all 0.
    pub fn new() -> Self {
        SharedCounters(Counters::new())
    }

    /// Counts `amount`; after 2^64-1 it starts again at 0.
    pub fn add(&self, counter: Counter, amount: u64) {
        // Relaxed: a counter publishes nothing but itself.
        self.0.values[counter as usize].fetch_add(amount, Ordering::Relaxed);
    }

    /// All values, as [`Counters::snapshot`].
    pub fn snapshot(&self) -> Snapshot {
        self.0.snapshot()
    }
}

impl Default for SharedCounters {
    fn default() -> Self {
        SharedCounters::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_between_threads() {
        let counters = SharedCounters::new();
        let count = || (0..10_000).for_each(|_| counters.add(Counter::BytesStaged, 3));
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(count))));
        assert_eq!(counters.snapshot().get(Counter::BytesStaged), 120_000);
    }
}
