//! Which threads of a process sleep until something comes, so that a thread that completes something
//! knows whether to wake any.

use super::atomic::{AtomicU32, AtomicU64, Ordering};

/// Counts the waiters that sleep or are about to, and knows whether the background poller sleeps.
///
/// A waiter counts itself, then checks once more whether it is done, then sleeps. A thread that
/// completes something does so first and then reads the count. Both are sequentially consistent, so
/// one of them sees the other.
///
/// A sleeper also arms the port, under a lock. It counts itself before it releases that lock. So
/// the holder of the lock sees each thread that sleeps on the armed port without any fence:
/// [`Sleepers::any`].
#[derive(Debug)]
pub(crate) struct Sleepers {
    waiters: AtomicU32,
    /// The time at which the sleep of the background poller ends at the latest, in ns. 0 if it does
    /// not sleep on the armed port.
    background_until: AtomicU64,
}

impl Sleepers {
    pub fn new() -> Self {
        Sleepers { waiters: AtomicU32::new(0), background_until: AtomicU64::new(0) }
    }

    /// Sleeps unless `done`, which arms the port. `sleep` must return at once if a wake-up has come
    /// since before this call.
    pub fn sleep_unless(&self, done: impl FnOnce() -> bool, sleep: impl FnOnce()) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // A read-modify-write: `done` is not evaluated before other threads can see the count.
        if !done() {
            sleep();
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Calls `wake` if a waiter sleeps. Used after something was completed.
    #[inline]
    pub fn wake(&self, wake: impl FnOnce()) {
        if self.fenced_count() > 0 {
            wake();
        }
    }

    /// The count, read after this thread's earlier writes are visible to other threads.
    #[inline]
    fn fenced_count(&self) -> u32 {
        self.waiters.fetch_add(0, Ordering::SeqCst)
    }

    /// Whether a waiter or the background poller sleeps on the armed port. The caller holds the
    /// lock under which they arm it.
    #[inline]
    pub fn any(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) != 0 || self.is_background_asleep()
    }

    /// The background poller sleeps until this time, in ns. It holds the lock and has armed the
    /// port.
    pub fn set_background_until(&self, time: u64) {
        self.background_until.store(time.max(1), Ordering::SeqCst);
    }

    /// Notes that the background poller does not sleep on the armed port any more. Returns whether
    /// it did until now. The background poller itself gets `false` if a call has woken it.
    pub fn end_background_sleep(&self) -> bool {
        self.background_until.swap(0, Ordering::SeqCst) != 0
    }

    /// Whether the background poller sleeps on the armed port.
    #[inline]
    pub fn is_background_asleep(&self) -> bool {
        self.background_until.load(Ordering::Relaxed) != 0
    }

    /// Whether the background poller may sleep past this time, in ns.
    pub fn background_sleeps_past(&self, time: u64) -> bool {
        self.background_until.load(Ordering::SeqCst) > time
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::sync::atomic::AtomicBool;
    use loom::sync::{Arc, Condvar, Mutex};

    /// The completion is stored with release ordering, as one-shot channels do. A lock and a
    /// condition stand for the futex. A lost wake-up is a deadlock, which loom finds.
    #[test]
    fn loom_a_waiter_that_goes_to_sleep_misses_no_completion() {
        loom::model(|| {
            let sleepers = Arc::new(Sleepers::new());
            let done = Arc::new(AtomicBool::new(false));
            let word = Arc::new((Mutex::new(0), Condvar::new()));
            let sender = loom::thread::spawn({
                let (sleepers, done, word) = (sleepers.clone(), done.clone(), word.clone());
                move || {
                    done.store(true, Ordering::Release);
                    sleepers.wake(|| {
                        *word.0.lock().expect("unpoisoned") += 1;
                        word.1.notify_all();
                    });
                }
            });
            while !done.load(Ordering::Acquire) {
                let seen = *word.0.lock().expect("unpoisoned");
                let sleep = || {
                    let mut now = word.0.lock().expect("unpoisoned");
                    while *now == seen {
                        now = word.1.wait(now).expect("unpoisoned");
                    }
                };
                sleepers.sleep_unless(|| done.load(Ordering::Acquire), sleep);
            }
            sender.join().expect("no panic");
        });
    }
}
