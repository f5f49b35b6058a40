//! How a thread waits while nothing comes.
#![allow(clippy::disallowed_methods)] // a thread that waits in vain sleeps for moments

use std::time::Duration;

/// How a thread that waits pauses between two polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitStrategy {
    /// Polls again at once: for threads with a CPU of their own.
    Spin,
    /// Gives the CPU to other threads first, and sleeps for moments if that goes on: for hosts with
    /// more waiting threads than CPUs.
    Yield,
}

/// Times in a row that a thread yields its CPU before it sleeps.
const YIELDS: u32 = 16;
/// Length of one sleep.
const SLEEP_TIME: Duration = Duration::from_micros(20);

impl WaitStrategy {
    /// The strategy for `waiters` busy threads on `cpus` CPUs.
    pub(crate) fn choose(waiters: usize, cpus: usize) -> WaitStrategy {
        if waiters > cpus { WaitStrategy::Yield } else { WaitStrategy::Spin }
    }

    /// Polls that a thread makes before it pauses and lets another thread lock the poller.
    pub(super) fn polls(self) -> u32 {
        match self {
            WaitStrategy::Spin => 64,
            WaitStrategy::Yield => 4,
        }
    }

    /// Pauses for the `round`th time in a row.
    pub(super) fn pause(self, round: u32) {
        match self {
            WaitStrategy::Spin => std::hint::spin_loop(),
            WaitStrategy::Yield if round < YIELDS => std::thread::yield_now(),
            // A scheduler with time slices lets a thread that only yields wait for whole slices of
            // threads that compute. A thread that slept runs at once.
            WaitStrategy::Yield => std::thread::sleep(SLEEP_TIME),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_waiters_than_cpus_yield() {
        assert_eq!(WaitStrategy::choose(2, 2), WaitStrategy::Spin);
        assert_eq!(WaitStrategy::choose(3, 2), WaitStrategy::Yield);
    }
}
