//! A poller's doorbell: how a peer whose link is not looked at says that there is something to look
//! at.
//!
//! A sender that finds a link marked cold (`cold`) sets the link's bit here, then a bit in the
//! summary, which the poller reads on each poll, then moves the ring, and wakes whoever sleeps.
//! Peers write to it as they like: a wrong bit costs a needless look; one that was cleared, or a
//! count that was changed, delays something until the sleep's limit and the poller's look at its
//! cold links in turn.
//!
//! | word | content |
//! |---|---|
//! | 0 | the ring: its low endpoint changes with every wake-up |
//! | 16, 17 | waiters that sleep; what they sleep on |
//! | 18 | waiters that attend, asleep or not |
//! | 32, 33 | keepers that sleep; what they sleep on |
//! | 48 | summary: one bit for each of the words behind it |
//! | 64..128 | one bit for each link |

use crate::fabric::Sleep;
use crate::fabric::shm::memory::words::ShareWords;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

/// Words of a doorbell: 1 KiB.
pub(crate) const WORDS: usize = 128;
/// Links that a doorbell has a bit for.
pub(crate) const PLACES: usize = 64 * 64;

const RING: usize = 0;
const WAITERS: usize = 16;
const ATTENDING: usize = 18;
const KEEPERS: usize = 32;
const SUMMARY: usize = 48;
const BITS: usize = 64;

/// One poller's doorbell. Any number of threads and processes ring it; only the poller answers.
#[derive(Debug)]
pub(crate) struct Doorbell<W> {
    words: W,
}

/// Words of those who sleep: how many they are, and what they sleep on.
fn of(who: Sleep) -> (usize, usize) {
    match who {
        Sleep::Waiter => (WAITERS, WAITERS + 1),
        Sleep::Background => (KEEPERS, KEEPERS + 1),
    }
}

impl<W: ShareWords> Doorbell<W> {
    /// The doorbell in these [`WORDS`].
    pub(crate) fn new(words: W) -> Self {
        debug_assert_eq!(words.len(), WORDS);
        Doorbell { words }
    }

    /// Makes it fit for another poller: nothing is rung and nobody sleeps.
    pub(crate) fn reset(&self) {
        for count in [WAITERS, ATTENDING, KEEPERS] {
            self.words.swap(count, 0);
        }
        self.drain(|_| {});
    }

    /// Says that there is something on a link, after it was put there.
    ///
    /// # Panics
    /// If the place is not below [`PLACES`].
    pub(crate) fn ring(&self, place: usize) {
        assert!(place < PLACES);
        // All of it each time: whoever set the bit before may have died before it did the rest.
        self.words.fetch_or(BITS + place / 64, 1 << (place % 64));
        self.words.fetch_or(SUMMARY, 1 << (place / 64));
        self.rouse();
    }

    /// Ends a sleep: of the waiters if there are any, else of the keepers unless a waiter attends.
    pub(crate) fn rouse(&self) {
        self.turn();
        if self.sleeps(Sleep::Waiter) {
            self.wake_sleepers(Sleep::Waiter);
        } else if self.words.load(ATTENDING, Relaxed) == 0 {
            self.wake_sleepers(Sleep::Background);
        }
    }

    /// A waiter polls, or sleeps, from now on.
    pub(crate) fn enter_wait(&self) {
        self.words.fetch_add(ATTENDING, 1);
    }

    /// A waiter that attended does no more, and looks at the doorbell after this.
    pub(crate) fn exit_wait(&self) {
        self.words.fetch_add(ATTENDING, u64::MAX);
        self.words.fence();
    }

    /// Ends the sleep of every thread of that kind.
    pub(crate) fn wake(&self, who: Sleep) {
        self.turn();
        self.wake_sleepers(who);
    }

    /// Moves the ring. One who is about to sleep sees that, or is seen to sleep.
    fn turn(&self) {
        self.words.fetch_add(RING, 1);
        self.words.fence();
    }

    fn sleeps(&self, who: Sleep) -> bool {
        self.words.load(of(who).0, Relaxed) != 0
    }

    fn wake_sleepers(&self, who: Sleep) {
        if self.sleeps(who) {
            let (_, bed) = of(who);
            self.words.fetch_add(bed, 1);
            self.words.wake(bed);
        }
    }

    /// Whether anybody has rung: one load of a line that changes only then.
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        self.words.load(SUMMARY, Relaxed) != 0
    }

    /// Takes down who has rung: each place once, to be looked at after this.
    pub(crate) fn drain(&self, mut stir: impl FnMut(usize)) {
        // In this order: a bit that is set behind our back has its summary set after that.
        let mut summary = self.words.swap(SUMMARY, 0);
        while summary != 0 {
            let word = summary.trailing_zeros() as usize;
            summary &= summary - 1;
            let mut bits = self.words.swap(BITS + word, 0);
            while bits != 0 {
                stir(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// A number that changes with every wake-up.
    pub(crate) fn seen(&self) -> u32 {
        self.words.load(RING, Acquire) as u32
    }

    /// Sleeps until there was a wake-up since `seen` was drawn, or for `timeout`. May return early.
    pub(crate) fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        let (count, bed) = of(who);
        // Drawn before the look at the ring: whoever moves that later, and sees us, changes this
        // later still.
        let undisturbed = self.words.load(bed, Acquire) as u32;
        self.words.fetch_add(count, 1);
        self.words.fence();
        if self.seen() == seen {
            self.words.wait(bed, undisturbed, timeout);
        }
        self.words.fetch_add(count, u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::shm::memory::words::LoadWords;
    use crate::fabric::shm::memory::words::test::LoomShared;

    const FOREVER: Duration = Duration::MAX;

    fn doorbell() -> Doorbell<LoomShared> {
        Doorbell::new(LoomShared::new(WORDS))
    }

    fn drained(bell: &Doorbell<LoomShared>) -> Vec<usize> {
        let mut places = Vec::new();
        bell.drain(|place| places.push(place));
        places
    }

    /// What is rung while the poller goes to sleep either keeps it awake or wakes it.
    #[test]
    fn loom_no_ring_is_slept_through() {
        for who in [Sleep::Waiter, Sleep::Background] {
            loom::model(move || {
                let words = LoomShared::new(WORDS);
                let bell = Doorbell::new(words.clone());
                let ringer = loom::thread::spawn(move || Doorbell::new(words).ring(70));
                let mut places = Vec::new();
                while places.is_empty() {
                    let seen = bell.seen();
                    if !bell.is_rung() {
                        bell.sleep(who, seen, FOREVER);
                    }
                    places = drained(&bell);
                }
                assert_eq!(places, [70]);
                ringer.join().expect("the ringer");
            });
        }
    }

    /// What is rung while a waiter stops attending is seen by it, or wakes the keeper.
    #[test]
    fn loom_no_ring_falls_between_a_waiter_that_leaves_and_the_keeper() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let words = LoomShared::new(WORDS);
            let bell = Doorbell::new(words.clone());
            bell.enter_wait();
            let seen = bell.seen();
            let keeper = loom::thread::spawn({
                let words = words.clone();
                move || Doorbell::new(words).sleep(Sleep::Background, seen, FOREVER)
            });
            let ringer = loom::thread::spawn(move || Doorbell::new(words).ring(70));
            bell.exit_wait();
            if bell.is_rung() {
                // What it does about a ring ends with a keeper that is awake.
                bell.wake(Sleep::Background);
            }
            ringer.join().expect("the ringer");
            keeper.join().expect("the keeper wakes");
        });
    }

    /// Two that ring at once, one of them while the poller answers the other: both are heard.
    #[test]
    fn loom_every_ring_is_drained() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let words = LoomShared::new(WORDS);
            let bell = Doorbell::new(words.clone());
            let ringers = [3, 5].map(|place| {
                let words = words.clone();
                loom::thread::spawn(move || Doorbell::new(words).ring(place))
            });
            let mut heard = Vec::new();
            while heard.len() < 2 {
                let seen = bell.seen();
                let places = drained(&bell);
                if places.is_empty() {
                    bell.sleep(Sleep::Waiter, seen, FOREVER);
                }
                heard.extend(places);
            }
            heard.sort_unstable();
            assert_eq!(heard, [3, 5]);
            let [(), ()] = ringers.map(|ringer| ringer.join().expect("a ringer"));
        });
    }

    /// One thread wakes another of its process.
    #[test]
    fn loom_a_wake_is_not_slept_through() {
        loom::model(|| {
            let words = LoomShared::new(WORDS);
            let bell = Doorbell::new(words.clone());
            let seen = bell.seen();
            let waker = loom::thread::spawn(move || Doorbell::new(words).wake(Sleep::Background));
            bell.sleep(Sleep::Background, seen, FOREVER);
            waker.join().expect("the waker");
            assert_ne!(bell.seen(), seen);
        });
    }

    #[test]
    fn loom_each_place_is_drained_once_and_in_its_own_name() {
        loom::model(|| {
            let bell = doorbell();
            assert!(!bell.is_rung());
            for place in [PLACES - 1, 0, 63, 64, 0] {
                bell.ring(place);
            }
            assert!(bell.is_rung());
            assert_eq!(drained(&bell), [0, 63, 64, PLACES - 1]);
            assert!(!bell.is_rung());
            assert!(drained(&bell).is_empty());
        });
    }

    #[test]
    fn loom_nobody_is_woken_if_nobody_sleeps_and_a_keeper_only_if_no_waiter_does() {
        loom::model(|| {
            let bell = doorbell();
            let beds = |bell: &Doorbell<LoomShared>| {
                [WAITERS + 1, KEEPERS + 1].map(|bed| bell.words.load(bed, Relaxed))
            };
            bell.rouse();
            bell.wake(Sleep::Waiter);
            assert_eq!(beds(&bell), [0, 0]);
            bell.words.fetch_add(KEEPERS, 1);
            bell.rouse();
            assert_eq!(beds(&bell), [0, 1]);
            bell.enter_wait();
            bell.rouse();
            assert_eq!(beds(&bell), [0, 1], "a waiter looks by itself");
            bell.words.fetch_add(WAITERS, 1);
            bell.rouse();
            assert_eq!(beds(&bell), [1, 1]);
            bell.reset();
            bell.rouse();
            assert_eq!(beds(&bell), [1, 1]);
        });
    }
}
