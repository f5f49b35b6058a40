//! The clock of a node: `CLOCK_MONOTONIC`.

use crate::engine::Clock;
use crate::wire::Time;
use std::time::Instant;

/// Nanoseconds since [`start`](MonotonicClock::start). `CLOCK_MONOTONIC` is read through the vDSO,
/// without a system call.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// A clock that reads 0 now.
    pub fn start() -> Self {
        MonotonicClock { origin: Instant::now() }
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
