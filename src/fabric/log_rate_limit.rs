//! How often a line is written to the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The period in which [`LOG_LINES`] are written.
pub(super) const LOG_PERIOD: Duration = Duration::from_secs(10);
const LOG_LINES: u16 = 16;

/// Counts the lines of one kind, whichever thread writes them. It is for lines that a peer or a
/// stranger can cause: a peer can have its link made again and again.
#[derive(Debug)]
pub(super) struct LogRateLimit {
    begun: Instant,
    /// The number of the period, and in the low 16 bits the lines in it.
    counted: AtomicU64,
}

impl Default for LogRateLimit {
    fn default() -> Self {
        LogRateLimit { begun: Instant::now(), counted: AtomicU64::new(0) }
    }
}

impl LogRateLimit {
    /// Whether the line is written. Then it counts.
    pub(super) fn may_log(&self) -> bool {
        self.may_log_at(self.begun.elapsed())
    }

    fn may_log_at(&self, elapsed: Duration) -> bool {
        let number = (elapsed.as_nanos() / LOG_PERIOD.as_nanos()) as u64;
        // Relaxed: no other memory depends on the count.
        let added = self.counted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |counted| {
            let count = if counted >> 16 == number { counted as u16 } else { 0 };
            (count < LOG_LINES).then_some(number << 16 | u64::from(count + 1))
        });
        added.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_has_sixteen_lines() {
        let count = LogRateLimit::default();
        let added = |seconds| (0..100).filter(|_| count.may_log_at(Duration::from_secs(seconds))).count();
        assert_eq!([0, 9, 10, 19, 1000].map(added), [16, 0, 16, 0, 16]);
    }
}
