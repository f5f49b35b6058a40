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
    /// Lines that were left out since the last one.
    left_out: AtomicU64,
}

impl Default for LogRateLimit {
    fn default() -> Self {
        LogRateLimit { begun: Instant::now(), counted: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }
}

impl LogRateLimit {
    /// Whether to write a line now, and how many were left out since the last one.
    pub(super) fn line(&self) -> Option<u64> {
        self.line_at(self.begun.elapsed())
    }

    fn line_at(&self, elapsed: Duration) -> Option<u64> {
        let number = (elapsed.as_nanos() / LOG_PERIOD.as_nanos()) as u64;
        // Relaxed: no other memory depends on the counts.
        let added = self.counted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |counted| {
            let count = if counted >> 16 == number { counted as u16 } else { 0 };
            (count < LOG_LINES).then_some(number << 16 | u64::from(count + 1))
        });
        if added.is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_has_sixteen_lines_and_the_next_one_says_how_many_were_left_out() {
        let limit = LogRateLimit::default();
        let lines = |seconds| -> Vec<u64> {
            (0..100).filter_map(|_| limit.line_at(Duration::from_secs(seconds))).collect()
        };
        assert_eq!(lines(0), [0; 16]);
        assert_eq!(lines(9), [0; 0]);
        assert_eq!(lines(10)[..], [&[84 + 100][..], &[0; 15]].concat());
        assert_eq!(lines(1000)[..], [&[84][..], &[0; 15]].concat());
    }
}
