//! The mark_idle of a cold link: the poller does not look at it and wants to hear the doorbell.
//!
//! It is a word in the poller's own segment. A sender looks at it after it has put something where
//! the poller would find it; while the link is busy the word does not change, and the look costs a
//! load of a line that is at hand.

use super::doorbell::PLACES;
use crate::fabric::shm::memory::words::{LoadWords, StoreWords};
use std::sync::atomic::Ordering::Relaxed;

/// The word of the state line with the mark_idle.
pub(crate) const IDLE_MARK: usize = 1;

/// What is written there while the link is busy.
const ACTIVE: u64 = 0;
const IDLE: u64 = 1 << 63;

/// Where to ring for a link: the number of its poller's doorbell, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DoorbellRef {
    pub bell: usize,
    pub place: usize,
}

/// The poller's side: marks a link cold. A heavy barrier has to come before the last look at what
/// is on it.
pub(crate) fn mark_idle(line: &impl StoreWords, pull: DoorbellRef) {
    line.store(IDLE_MARK, IDLE | (pull.bell as u64) << 16 | pull.place as u64, Relaxed);
}

/// The poller's side: takes the mark_idle away.
pub(crate) fn mark_active(line: &impl StoreWords) {
    line.store(IDLE_MARK, ACTIVE, Relaxed);
}

/// The sender's side, after it has put something there: where to ring, if the link is cold. `light`
/// is the barrier that goes with the poller's heavy one.
#[inline]
pub(crate) fn idle_doorbell(line: &impl LoadWords, light: impl FnOnce()) -> Option<DoorbellRef> {
    light();
    match line.load(IDLE_MARK, Relaxed) {
        ACTIVE => None,
        word => Some(parse(word)),
    }
}

#[cold]
fn parse(word: u64) -> DoorbellRef {
    // Whatever the peer has written: its own doorbell, and at most a wrong place in it.
    DoorbellRef { bell: (word >> 16) as u16 as usize, place: word as u16 as usize % PLACES }
}

#[cfg(test)]
mod tests {
    use super::super::doorbell::{Doorbell, WORDS};
    use super::*;
    use crate::fabric::Sleep;
    use crate::fabric::shm::memory::words::ShareWords;
    use crate::fabric::shm::memory::words::test::{HeapWords, LoomShared, LoomWords};
    use std::sync::atomic::Ordering::{Acquire, Release};
    use std::time::Duration;

    const PULL: DoorbellRef = DoorbellRef { bell: 3, place: 77 };

    fn fence() {
        loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// The race between a poller that marks a link and looks a last time, and a sender that puts
    /// something there and looks for the mark_idle. Fences stand for the membarrier, which makes
    /// one in the sender as well.
    #[test]
    fn loom_what_is_sent_while_a_link_goes_cold_is_found_or_rung_for() {
        loom::model(|| {
            let (slot, line, bell) = (LoomWords::new(1), LoomWords::new(2), LoomShared::new(WORDS));
            let sender = {
                let (slot, line, bell) = (slot.clone(), line.clone(), bell.clone());
                loom::thread::spawn(move || {
                    slot.store(0, 1, Release);
                    if let Some(pull) = idle_doorbell(&line, fence) {
                        assert_eq!(pull, PULL);
                        Doorbell::new(bell).ring(pull.place);
                    }
                })
            };
            let bell = Doorbell::new(bell);
            let seen = bell.seen();
            mark_idle(&line, PULL);
            fence();
            if slot.load(0, Acquire) == 0 {
                // Deadlocks if the sender has neither been seen nor rings.
                while !bell.is_rung() {
                    bell.sleep(Sleep::Waiter, seen, Duration::MAX);
                    loom::thread::yield_now();
                }
                bell.drain(|place| assert_eq!(place, PULL.place));
                assert_eq!(slot.load(0, Acquire), 1, "who rings has sent before");
            }
            sender.join().expect("the sender");
        });
    }

    /// The same without the barrier on one side must be caught, or the model shows nothing.
    #[test]
    #[should_panic(expected = "neither found nor rung for")]
    fn loom_the_barrier_is_needed() {
        loom::model(|| {
            let (slot, line, rung) = (LoomWords::new(1), LoomWords::new(2), LoomShared::new(1));
            let sender = {
                let (slot, line, rung) = (slot.clone(), line.clone(), rung.clone());
                loom::thread::spawn(move || {
                    slot.store(0, 1, Release);
                    if idle_doorbell(&line, || {}).is_some() {
                        rung.fetch_add(0, 1);
                    }
                })
            };
            mark_idle(&line, PULL);
            let found = slot.load(0, Acquire) == 1;
            sender.join().expect("the sender");
            assert!(found || rung.load(0, Acquire) == 1, "neither found nor rung for");
        });
    }

    #[test]
    fn a_mark_says_where_to_ring_and_a_wrong_one_stays_inside() {
        let line = HeapWords::new(2);
        assert_eq!(idle_doorbell(&line, || {}), None);
        mark_idle(&line, PULL);
        assert_eq!(idle_doorbell(&line, || {}), Some(PULL));
        mark_active(&line);
        assert_eq!(idle_doorbell(&line, || {}), None);
        line.store(IDLE_MARK, u64::MAX, Release);
        assert!(idle_doorbell(&line, || {}).is_some_and(|pull| pull.place < PLACES));
    }
}
