//! How a thread waits while nothing comes.
#![allow(clippy::disallowed_methods)] // who waits in vain sleeps for moments

use std::time::Duration;

/// What a waiter does between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Looks again at once: for waiters with a CPU of their own.
    Spin,
    /// Gives the CPU to other threads first, and sleeps for moments if that goes on: where there are more waiters
    /// than CPUs.
    Yield,
}

/// How often a waiter gives its CPU away before it sleeps.
const YIELDS: u32 = 16;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(20);

impl Waiting {
    /// The right way for `waiters` busy waiters on `cpus` CPUs.
    pub fn choose(waiters: usize, cpus: usize) -> Waiting {
        if waiters > cpus { Waiting::Yield } else { Waiting::Spin }
    }

    /// How many looks a waiter takes before it pauses and lets others own the poller.
    pub(super) fn looks(self) -> u32 {
        match self {
            Waiting::Spin => 64,
            Waiting::Yield => 4,
        }
    }

    /// Pauses for the `round`th time in a row.
    pub(super) fn pause(self, round: u32) {
        match self {
            Waiting::Spin => std::hint::spin_loop(),
            Waiting::Yield if round < YIELDS => std::thread::yield_now(),
            // A scheduler that shares by slices lets a thread that only yields wait for whole slices of those
            // that compute; one that slept is let in at once.
            Waiting::Yield => std::thread::sleep(NAP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_waiters_than_cpus_yield() {
        assert_eq!(Waiting::choose(2, 2), Waiting::Spin);
        assert_eq!(Waiting::choose(3, 2), Waiting::Yield);
    }
}
