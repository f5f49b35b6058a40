//! The doorbell of a poller: words that a peer sets when an idle link has something.
//!
//! A sender that finds a link marked idle (`idle`) sets the link's bit, then a bit of the summary.
//! The poller reads the summary in each poll. Then it notifies the event count, on which the
//! poller's threads sleep. Any peer can write to a doorbell. A wrong bit costs a needless poll of a
//! link. A cleared bit or a changed count delays something until a sleep ends and the poller checks
//! its idle links.
//!
//! | word | content |
//! |---|---|
//! | 0..34 | the event count |
//! | 48 | summary: one bit for each of the words behind it |
//! | 64..128 | one bit for each link |

use crate::fabric::words::ShareWords;
use crate::sync::event_count::EventCount;
use std::sync::atomic::Ordering::Relaxed;

/// Words of a doorbell: 1 KiB.
pub(crate) const WORDS: usize = 128;
/// Links that a doorbell has a bit for.
pub(crate) const PLACES: usize = 64 * 64;

const SUMMARY: usize = 48;
const BITS: usize = 64;

/// One poller's doorbell. Any thread or process rings it; only the poller drains it.
#[derive(Debug)]
pub(crate) struct Doorbell<W> {
    /// The event count that the poller's threads sleep on.
    pub events: EventCount<W>,
}

impl<W: ShareWords> Doorbell<W> {
    /// The doorbell in these [`WORDS`].
    pub(crate) fn new(words: W) -> Self {
        debug_assert_eq!(words.len(), WORDS);
        Doorbell { events: EventCount::new(words) }
    }

    fn words(&self) -> &W {
        self.events.words()
    }

    /// Clears the doorbell for another poller.
    pub(crate) fn reset(&self) {
        self.events.reset();
        self.drain(|_| {});
    }

    /// Reports that a link has something, after it was put there.
    ///
    /// # Panics
    /// If the place is not below [`PLACES`].
    pub(crate) fn ring(&self, place: usize) {
        assert!(place < PLACES);
        // All three steps each time: the process that set the bit before may have died before the
        // next step.
        self.words().fetch_or(BITS + place / 64, 1 << (place % 64));
        self.words().fetch_or(SUMMARY, 1 << (place / 64));
        self.events.notify();
    }

    /// Whether a peer has rung: one load of a line that changes only then.
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        self.words().load(SUMMARY, Relaxed) != 0
    }

    /// Clears the rung places, and passes each to `found` once.
    pub(crate) fn drain(&self, mut found: impl FnMut(usize)) {
        // The summary first: a bit that is set meanwhile has its summary set after it.
        let mut summary = self.words().swap(SUMMARY, 0);
        while summary != 0 {
            let word = summary.trailing_zeros() as usize;
            summary &= summary - 1;
            let mut bits = self.words().swap(BITS + word, 0);
            while bits != 0 {
                found(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::Sleep;
    use crate::fabric::words::test::LoomShared;
    use std::time::Duration;

    const FOREVER: Duration = Duration::MAX;

    fn doorbell() -> Doorbell<LoomShared> {
        Doorbell::new(LoomShared::new(WORDS))
    }

    fn drained(doorbell: &Doorbell<LoomShared>) -> Vec<usize> {
        let mut places = Vec::new();
        doorbell.drain(|place| places.push(place));
        places
    }

    /// A ring while the poller goes to sleep keeps it awake or wakes it.
    #[test]
    fn loom_no_ring_is_slept_through() {
        for who in [Sleep::Waiter, Sleep::Background] {
            loom::model(move || {
                let words = LoomShared::new(WORDS);
                let doorbell = Doorbell::new(words.clone());
                let ringer = loom::thread::spawn(move || Doorbell::new(words).ring(70));
                let mut places = Vec::new();
                while places.is_empty() {
                    let seen = doorbell.events.key();
                    if !doorbell.is_rung() {
                        doorbell.events.sleep(who, seen, FOREVER);
                    }
                    places = drained(&doorbell);
                }
                assert_eq!(places, [70]);
                ringer.join().expect("the ringer");
            });
        }
    }

    /// A ring while a waiter stops is seen by the waiter, or wakes the background poller.
    #[test]
    fn loom_no_ring_is_lost_between_a_waiter_that_stops_and_the_background_poller() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let words = LoomShared::new(WORDS);
            let doorbell = Doorbell::new(words.clone());
            doorbell.events.enter_wait();
            let seen = doorbell.events.key();
            let background = loom::thread::spawn({
                let words = words.clone();
                move || Doorbell::new(words).events.sleep(Sleep::Background, seen, FOREVER)
            });
            let ringer = loom::thread::spawn(move || Doorbell::new(words).ring(70));
            doorbell.events.exit_wait();
            if doorbell.is_rung() {
                // The waiter passes the ring on to the background poller.
                doorbell.events.wake(Sleep::Background);
            }
            ringer.join().expect("the ringer");
            background.join().expect("the background poller wakes");
        });
    }

    /// Two threads ring at once while the poller drains: both rings are seen.
    #[test]
    fn loom_every_ring_is_drained() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let words = LoomShared::new(WORDS);
            let doorbell = Doorbell::new(words.clone());
            let ringers = [3, 5].map(|place| {
                let words = words.clone();
                loom::thread::spawn(move || Doorbell::new(words).ring(place))
            });
            let mut heard = Vec::new();
            while heard.len() < 2 {
                let seen = doorbell.events.key();
                let places = drained(&doorbell);
                if places.is_empty() {
                    doorbell.events.sleep(Sleep::Waiter, seen, FOREVER);
                }
                heard.extend(places);
            }
            heard.sort_unstable();
            assert_eq!(heard, [3, 5]);
            let [(), ()] = ringers.map(|ringer| ringer.join().expect("a ringer"));
        });
    }

    #[test]
    fn loom_each_rung_place_is_drained_once() {
        loom::model(|| {
            let doorbell = doorbell();
            assert!(!doorbell.is_rung());
            for place in [PLACES - 1, 0, 63, 64, 0] {
                doorbell.ring(place);
            }
            assert!(doorbell.is_rung());
            assert_eq!(drained(&doorbell), [0, 63, 64, PLACES - 1]);
            assert!(!doorbell.is_rung());
            assert!(drained(&doorbell).is_empty());
        });
    }
}
