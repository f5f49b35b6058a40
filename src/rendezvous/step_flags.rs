//! Whether a step is live, as the handles of the step see it without the tables.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of flags. Live steps beyond it have none.
const FLAGS: usize = 1024;

/// One flag for each of the last steps that have begun: the number of the step while the step is
/// live. Only the holder of the tables changes a flag.
pub(super) struct StepFlags(Box<[AtomicU64; FLAGS]>);

impl Default for StepFlags {
    fn default() -> Self {
        StepFlags(Box::new([const { AtomicU64::new(0) }; FLAGS]))
    }
}

impl StepFlags {
    #[inline]
    fn of(&self, number: u64) -> &AtomicU64 {
        &self.0[number as usize % FLAGS]
    }

    /// Sets the flag of a step, unless an earlier step that is live has it.
    #[inline]
    pub fn set(&self, number: u64) {
        let flag = self.of(number);
        if flag.load(Ordering::Relaxed) == 0 {
            flag.store(number, Ordering::Release);
        }
    }

    /// Whether the flag of a step is set: then the step is live. Of a step without a flag the
    /// tables know it.
    #[inline]
    pub fn is_set(&self, number: u64) -> bool {
        self.of(number).load(Ordering::Acquire) == number
    }

    /// Clears the flag of a step, if the step has one.
    #[inline]
    pub fn clear(&self, number: u64) {
        let flag = self.of(number);
        if flag.load(Ordering::Relaxed) == number {
            flag.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_of_one_step_at_a_time() {
        let flags = StepFlags::default();
        let (first, second) = (1, 1 + FLAGS as u64);
        flags.set(first);
        flags.set(second);
        assert!(flags.is_set(first) && !flags.is_set(second), "the earlier step has it");
        flags.clear(second);
        assert!(flags.is_set(first));
        flags.clear(first);
        assert!(!flags.is_set(first) && !flags.is_set(second));
        flags.set(second);
        assert!(!flags.is_set(first) && flags.is_set(second));
    }
}
