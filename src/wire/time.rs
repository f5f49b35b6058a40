//! A point in time as the engine sees it: given from outside, never asked for.

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nanoseconds since an origin that the clock chose. Only differences mean anything.
///
/// It saturates instead of wrapping, so a deadline "for ever" is [`Time::NEVER`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The origin of the clock.
    pub const ZERO: Time = Time(0);
    /// Later than every other time.
    pub const NEVER: Time = Time(u64::MAX);

    /// A time `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Time(nanos)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not later.
    pub const fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, after: Duration) -> Time {
        let nanos = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
        Time(self.0.saturating_add(nanos))
    }
}

/// A time that several threads read and write. It orders nothing else.
#[derive(Debug)]
pub struct AtomicTime(AtomicU64);

impl AtomicTime {
    /// Begins with this time.
    pub const fn new(time: Time) -> Self {
        AtomicTime(AtomicU64::new(time.0))
    }

    /// The time that some thread has set last.
    #[inline]
    pub fn get(&self) -> Time {
        Time(self.0.load(Ordering::Relaxed))
    }

    /// Replaces the time.
    #[inline]
    pub fn set(&self, time: Time) {
        self.0.store(time.0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adding_saturates_at_never() {
        assert_eq!(Time::from_nanos(5) + Duration::MAX, Time::NEVER);
        assert_eq!(Time::NEVER + Duration::from_secs(1), Time::NEVER);
    }

    #[test]
    fn a_difference_is_never_negative() {
        let (a, b) = (Time::from_nanos(3), Time::from_nanos(10));
        assert_eq!(b.since(a), Duration::from_nanos(7));
        assert_eq!(a.since(b), Duration::ZERO);
    }
}
