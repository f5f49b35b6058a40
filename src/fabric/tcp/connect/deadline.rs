//! The end of a wait, while a link is made, and how often something may happen.

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The end of a wait.
#[derive(Clone, Copy)]
pub(crate) struct ConnectDeadline {
    at: Option<Instant>,
    /// The timeout from which the deadline was made, for errors.
    pub after: Duration,
}

impl ConnectDeadline {
    /// The deadline after a timeout. A timeout that is too long for the clock never ends.
    pub(crate) fn after(after: Duration) -> Self {
        ConnectDeadline { at: Instant::now().checked_add(after), after }
    }

    /// The time that is left: zero after the deadline. A day if it never comes.
    pub(crate) fn left(self) -> Duration {
        let never = Duration::from_secs(24 * 3600);
        self.at.map_or(never, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether it is over.
    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// The earlier of two.
    pub(crate) fn or_earlier(self, other: ConnectDeadline) -> ConnectDeadline {
        if other.left() < self.left() { other } else { self }
    }

    /// Sleeps until one of `fds` is ready, or until the deadline. Returns `false` at the deadline.
    pub(crate) fn wait(self, fds: &mut [PollFd<'_>]) -> rustix::io::Result<bool> {
        loop {
            let left = Timespec::try_from(self.left()).ok();
            match poll(fds, left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Counts what may happen a few times in a period, whichever thread does it.
#[derive(Debug)]
pub(crate) struct PeriodCount {
    begun: Instant,
    period: Duration,
    /// The number of the period, and in the low 16 bits what has happened in it.
    counted: AtomicU64,
}

impl PeriodCount {
    pub(crate) fn new(period: Duration) -> Self {
        PeriodCount { begun: Instant::now(), period, counted: AtomicU64::new(0) }
    }

    /// Counts one more, unless `most` have happened in this period.
    pub(crate) fn add(&self, most: u16) -> bool {
        self.add_at(self.begun.elapsed(), most)
    }

    fn add_at(&self, elapsed: Duration, most: u16) -> bool {
        let number = (elapsed.as_nanos() / self.period.as_nanos()) as u64;
        // Relaxed: no other memory depends on the count.
        let added = self.counted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |counted| {
            let count = if counted >> 16 == number { counted as u16 } else { 0 };
            (count < most).then_some(number << 16 | u64::from(count + 1))
        });
        added.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_has_as_many_as_it_may_have() {
        let count = PeriodCount::new(Duration::from_secs(10));
        let added = |seconds| (0..100).filter(|_| count.add_at(Duration::from_secs(seconds), 16)).count();
        assert_eq!([0, 9, 10, 19, 1000].map(added), [16, 0, 16, 0, 16]);
    }
}
