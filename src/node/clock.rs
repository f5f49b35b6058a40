//! The system's monotonic clock.

use crate::engine::Clock;
use crate::wire::Time;
use std::time::Instant;

/// Time since the clock was made, as `CLOCK_MONOTONIC` counts it (read without a system call).
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// A clock that starts now.
    pub fn start() -> Self {
        MonotonicClock { origin: Instant::now() }
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
