//! An event count: threads sleep until an event, and the thread that makes the event takes no lock.
//!
//! A thread draws the [`key`](EventCount::key), looks for events, and then sleeps unless the key
//! has moved. A notifier makes its event visible, moves the key, and wakes the sleepers by a futex
//! if there are any.
//!
//! Two kinds of threads sleep: waiters, and the background thread of a poller. A notification wakes
//! the waiters. It wakes the background thread only if no waiter sleeps and none is [in its
//! wait](EventCount::enter_wait), since a waiter that is awake polls by itself.
//!
//! The words may lie in memory that other processes write: see [`ShareWords`]. A process that
//! changes them as it likes can delay a wake-up until the sleep's time limit.
//!
//! | word | content |
//! |---|---|
//! | 0 | the key, in the low half: it changes with every notification |
//! | 16, 17 | waiters that sleep; the futex that they sleep on |
//! | 18 | waiters in their wait, asleep or not |
//! | 32, 33 | background threads that sleep; the futex that they sleep on |

use super::words::ShareWords;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

/// The kinds of threads that sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// A thread that waits for the end of a call.
    Waiter,
    /// The background thread of a poller. Events wake it only while no thread is [in its
    /// wait](EventCount::enter_wait).
    Background,
}

/// Words of an event count.
pub(crate) const WORDS: usize = 34;

const KEY: usize = 0;
const WAITERS: usize = 16;
const IN_WAIT: usize = 18;
const BACKGROUND: usize = 32;

/// An event count in words that threads share.
#[derive(Debug)]
pub(crate) struct EventCount<W> {
    words: W,
}

/// The number of sleepers, and their futex.
fn of(who: Sleep) -> (usize, usize) {
    match who {
        Sleep::Waiter => (WAITERS, WAITERS + 1),
        Sleep::Background => (BACKGROUND, BACKGROUND + 1),
    }
}

impl<W: ShareWords> EventCount<W> {
    /// The event count in the first [`WORDS`] of these words.
    pub(crate) fn new(words: W) -> Self {
        debug_assert!(words.len() >= WORDS);
        EventCount { words }
    }

    /// All words, those behind the event count's own included.
    #[inline]
    pub(crate) fn words(&self) -> &W {
        &self.words
    }

    /// Forgets all sleepers, for a new owner.
    pub(crate) fn reset(&self) {
        for count in [WAITERS, IN_WAIT, BACKGROUND] {
            self.words.swap(count, 0);
        }
    }

    /// Wakes the sleeping waiters; the background thread if no waiter sleeps or is in its wait.
    pub(crate) fn notify(&self) {
        self.move_key();
        if self.sleeps(Sleep::Waiter) {
            self.wake_sleepers(Sleep::Waiter);
        } else if self.words.load(IN_WAIT, Relaxed) == 0 {
            self.wake_sleepers(Sleep::Background);
        }
    }

    /// Wakes all threads of one kind.
    pub(crate) fn wake(&self, who: Sleep) {
        self.move_key();
        self.wake_sleepers(who);
    }

    /// A waiter begins its wait: it polls or sleeps from now on.
    pub(crate) fn enter_wait(&self) {
        self.words.fetch_add(IN_WAIT, 1);
    }

    /// A waiter's wait is over. The caller looks for events after this call.
    pub(crate) fn exit_wait(&self) {
        self.words.fetch_add(IN_WAIT, u64::MAX);
        self.words.fence();
    }

    /// A thread that is about to sleep sees the new key, or is seen to sleep.
    fn move_key(&self) {
        self.words.fetch_add(KEY, 1);
        self.words.fence();
    }

    fn sleeps(&self, who: Sleep) -> bool {
        self.words.load(of(who).0, Relaxed) != 0
    }

    fn wake_sleepers(&self, who: Sleep) {
        if self.sleeps(who) {
            let (_, futex) = of(who);
            self.words.fetch_add(futex, 1);
            self.words.wake(futex);
        }
    }

    /// The present key.
    pub(crate) fn key(&self) -> u32 {
        self.words.load(KEY, Acquire) as u32
    }

    /// Sleeps until the key differs from `seen`, or for `timeout`. May return early.
    pub(crate) fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        let (count, futex) = of(who);
        // Drawn before the look at the key: a notifier that moves the key later, and sees this
        // thread sleep, changes the futex later still.
        let expected = self.words.load(futex, Acquire) as u32;
        self.words.fetch_add(count, 1);
        self.words.fence();
        if self.key() == seen {
            self.words.wait(futex, expected, timeout);
        }
        self.words.fetch_add(count, u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::words::LoadWords;
    use crate::sync::words::test::LoomShared;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use std::sync::Arc;

    const FOREVER: Duration = Duration::MAX;

    fn bounded(check: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(check);
    }

    fn counts() -> [EventCount<LoomShared>; 3] {
        let words = LoomShared::new(WORDS);
        [(); 3].map(|()| EventCount::new(words.clone()))
    }

    /// Sleeps until the key differs from `seen`.
    fn sleep(count: &EventCount<LoomShared>, who: Sleep, seen: u32) {
        while count.key() == seen {
            count.sleep(who, seen, FOREVER);
            loom::thread::yield_now();
        }
    }

    #[test]
    fn loom_a_wake_is_not_slept_through() {
        for who in [Sleep::Waiter, Sleep::Background] {
            loom::model(move || {
                let [count, same, _] = counts();
                let seen = count.key();
                let waker = loom::thread::spawn(move || same.wake(who));
                count.sleep(who, seen, FOREVER);
                waker.join().expect("the waker");
                assert_ne!(count.key(), seen);
            });
        }
    }

    #[test]
    fn loom_one_wake_ends_the_sleep_of_two() {
        bounded(|| {
            let [count, other, same] = counts();
            let seen = count.key();
            let other = loom::thread::spawn(move || sleep(&other, Sleep::Waiter, seen));
            let waker = loom::thread::spawn(move || same.wake(Sleep::Waiter));
            sleep(&count, Sleep::Waiter, seen);
            waker.join().expect("the waker");
            other.join().expect("the other wakes");
        });
    }

    /// A thread has seen a wake-up and waits for the next. Another sleeps since before the first.
    #[test]
    fn loom_a_sleeper_of_the_next_wake_up_does_not_take_this_one() {
        bounded(|| {
            let [count, other, same] = counts();
            let seen = count.key();
            let other = loom::thread::spawn(move || sleep(&other, Sleep::Waiter, seen));
            let waker = loom::thread::spawn(move || {
                same.wake(Sleep::Waiter);
                other.join().expect("the other wakes");
                same.wake(Sleep::Waiter);
            });
            loom::thread::yield_now();
            let last = count.key();
            if last != seen.wrapping_add(2) {
                sleep(&count, Sleep::Waiter, last);
            }
            waker.join().expect("the waker");
        });
    }

    /// An event that one notification tells is seen by both waiters.
    #[test]
    fn loom_one_notification_is_for_every_waiter() {
        bounded(|| {
            let event = Arc::new(AtomicU32::new(0));
            let wait = |count: &EventCount<LoomShared>, event: &AtomicU32| loop {
                let seen = count.key();
                if event.load(Ordering::SeqCst) != 0 {
                    return;
                }
                count.sleep(Sleep::Waiter, seen, FOREVER);
                loom::thread::yield_now();
            };
            let [count, other, notifier] = counts();
            let [theirs, made] = [Arc::clone(&event), Arc::clone(&event)];
            let other = loom::thread::spawn(move || wait(&other, &theirs));
            let notifier = loom::thread::spawn(move || {
                made.store(1, Ordering::SeqCst);
                notifier.notify();
            });
            wait(&count, &event);
            notifier.join().expect("the notifier");
            other.join().expect("the other wakes");
        });
    }

    /// An event that comes while a waiter ends its wait is seen by the waiter, or wakes the
    /// background thread.
    #[test]
    fn loom_no_event_falls_between_a_waiter_that_leaves_and_the_background_thread() {
        bounded(|| {
            let event = Arc::new(AtomicU32::new(0));
            let [count, background, notifier] = counts();
            count.enter_wait();
            let seen = count.key();
            let background = loom::thread::spawn(move || background.sleep(Sleep::Background, seen, FOREVER));
            let made = Arc::clone(&event);
            let notifier = loom::thread::spawn(move || {
                made.store(1, Ordering::SeqCst);
                notifier.notify();
            });
            count.exit_wait();
            if event.load(Ordering::SeqCst) != 0 {
                // The waiter handles it, which ends with a background thread that is awake.
                count.wake(Sleep::Background);
            }
            notifier.join().expect("the notifier");
            background.join().expect("the background thread wakes");
        });
    }

    #[test]
    fn loom_nobody_is_woken_if_nobody_sleeps_and_the_background_thread_only_if_no_waiter_waits() {
        loom::model(|| {
            let [count, ..] = counts();
            let futexes = |count: &EventCount<LoomShared>| {
                [WAITERS + 1, BACKGROUND + 1].map(|futex| count.words.load(futex, Relaxed))
            };
            count.notify();
            count.wake(Sleep::Waiter);
            assert_eq!(futexes(&count), [0, 0]);
            count.words.fetch_add(BACKGROUND, 1);
            count.notify();
            assert_eq!(futexes(&count), [0, 1]);
            count.enter_wait();
            count.notify();
            assert_eq!(futexes(&count), [0, 1], "a waiter polls by itself");
            count.words.fetch_add(WAITERS, 1);
            count.notify();
            assert_eq!(futexes(&count), [1, 1]);
            count.reset();
            count.notify();
            assert_eq!(futexes(&count), [1, 1]);
        });
    }
}
