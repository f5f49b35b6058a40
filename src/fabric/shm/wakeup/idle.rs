//! The idle mark of a link: its poller does not look at it, and wants the doorbell to be rung.
//!
//! The mark is a word in the poller's own segment. A sender reads it after it has put something
//! where the poller would find it. While the link is active the word does not change, so the read
//! hits the sender's cache.

use super::doorbell::PLACES;
use crate::fabric::words::{LoadWords, StoreWords};
use std::sync::atomic::Ordering::Relaxed;

/// The word of the state line with the mark.
pub(crate) const IDLE_MARK: usize = 1;

/// Value of the mark while the link is active.
const ACTIVE: u64 = 0;
const IDLE: u64 = 1 << 63;

/// What to ring for a link: the number of its poller's doorbell, and the link's place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DoorbellRef {
    pub doorbell: usize,
    pub place: usize,
}

/// The poller marks a link idle. A heavy barrier must come between the mark and its last look at
/// the link.
pub(crate) fn mark_idle(line: &impl StoreWords, to: DoorbellRef) {
    line.store(IDLE_MARK, IDLE | (to.doorbell as u64) << 16 | to.place as u64, Relaxed);
}

/// The poller removes the mark.
pub(crate) fn mark_active(line: &impl StoreWords) {
    line.store(IDLE_MARK, ACTIVE, Relaxed);
}

/// The doorbell to ring if the link is idle. The sender calls this after it has put something
/// there. `light` is the barrier that goes with the poller's heavy one.
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
    // Whatever the peer has written, the sender rings one of the peer's own doorbells, at a place
    // in range.
    DoorbellRef { doorbell: (word >> 16) as u16 as usize, place: word as u16 as usize % PLACES }
}

#[cfg(test)]
mod tests {
    use super::super::doorbell::{Doorbell, WORDS};
    use super::*;
    use crate::fabric::Sleep;
    use crate::fabric::words::ShareWords;
    use crate::fabric::words::test::{HeapWords, LoomShared, LoomWords};
    use std::sync::atomic::Ordering::{Acquire, Release};
    use std::time::Duration;

    const REF: DoorbellRef = DoorbellRef { doorbell: 3, place: 77 };

    fn fence() {
        loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// A poller marks a link idle and looks a last time, while a sender puts something there and
    /// reads the mark. Fences stand for the membarrier, which makes one in the sender as well.
    #[test]
    fn loom_a_slot_sent_while_a_link_becomes_idle_is_found_or_rung_for() {
        loom::model(|| {
            let (slot, line, doorbell) = (LoomWords::new(1), LoomWords::new(2), LoomShared::new(WORDS));
            let sender = {
                let (slot, line, doorbell) = (slot.clone(), line.clone(), doorbell.clone());
                loom::thread::spawn(move || {
                    slot.store(0, 1, Release);
                    if let Some(to) = idle_doorbell(&line, fence) {
                        assert_eq!(to, REF);
                        Doorbell::new(doorbell).ring(to.place);
                    }
                })
            };
            let doorbell = Doorbell::new(doorbell);
            let seen = doorbell.events.key();
            mark_idle(&line, REF);
            fence();
            if slot.load(0, Acquire) == 0 {
                // Deadlocks if the poller has not seen the slot and the sender does not ring.
                while !doorbell.is_rung() {
                    doorbell.events.sleep(Sleep::Waiter, seen, Duration::MAX);
                    loom::thread::yield_now();
                }
                doorbell.drain(|place| assert_eq!(place, REF.place));
                assert_eq!(slot.load(0, Acquire), 1, "who rings has sent before");
            }
            sender.join().expect("the sender");
        });
    }

    /// Without the barrier on one side the model must fail, or it proves nothing.
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
            mark_idle(&line, REF);
            let found = slot.load(0, Acquire) == 1;
            sender.join().expect("the sender");
            assert!(found || rung.load(0, Acquire) == 1, "neither found nor rung for");
        });
    }

    #[test]
    fn a_mark_names_the_doorbell_and_a_wrong_one_stays_in_range() {
        let line = HeapWords::new(2);
        assert_eq!(idle_doorbell(&line, || {}), None);
        mark_idle(&line, REF);
        assert_eq!(idle_doorbell(&line, || {}), Some(REF));
        mark_active(&line);
        assert_eq!(idle_doorbell(&line, || {}), None);
        line.store(IDLE_MARK, u64::MAX, Release);
        assert!(idle_doorbell(&line, || {}).is_some_and(|to| to.place < PLACES));
    }
}
