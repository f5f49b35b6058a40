//! When a slower part is polled beside a faster one.

use crate::wire::Time;
use std::time::Duration;

/// The longest time between two polls of a slower part, as long as the port is told the time.
const LONGEST: Duration = Duration::from_micros(5);

/// The turns of a part that is not polled each time.
#[derive(Debug)]
pub(super) struct PollTurns {
    /// Polls of the port from one poll of the part to the next, at most.
    every: u32,
    /// Polls of the port that are left until then.
    left: u32,
    /// The time at which it is its turn, whatever is left.
    due: Time,
}

impl PollTurns {
    pub fn new(every: u32) -> Self {
        PollTurns { every, left: 0, due: Time::ZERO }
    }

    /// Counts a poll of the port. Returns whether it is the part's turn.
    #[inline]
    pub fn take(&mut self, now: Time) -> bool {
        match self.left.checked_sub(1) {
            Some(left) if now < self.due => {
                self.left = left;
                false
            }
            _ => {
                self.left = self.every - 1;
                self.due = now + LONGEST;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_comes_after_so_many_polls_or_after_the_time() {
        let mut turns = PollTurns::new(4);
        let at = |micros: u64| Time::from_nanos(1_000 * micros);
        let taken: Vec<bool> = (0..9).map(|_| turns.take(at(1))).collect();
        assert_eq!(taken, [true, false, false, false, true, false, false, false, true]);
        assert!(!turns.take(at(5)));
        assert!(turns.take(at(6)), "5 us after the last one");
        assert!(!turns.take(at(6)));
    }
}
