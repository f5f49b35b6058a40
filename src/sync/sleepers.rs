//! Counts the threads that sleep in calls, so that a thread that completes something knows whether
//! to wake any.

use super::atomic::{AtomicU32, Ordering};

/// Counts the waiters that sleep or are about to.
///
/// A waiter counts itself, then checks once more whether it is done, then sleeps. A thread that
/// completes something does so first and then reads the count. Both are sequentially consistent, so
/// one of them sees the other.
#[derive(Debug)]
pub(crate) struct Sleepers {
    count: AtomicU32,
}

impl Sleepers {
    pub fn new() -> Self {
        Sleepers { count: AtomicU32::new(0) }
    }

    /// Sleeps unless `done`. `sleep` must return at once if a wake-up has come since before this
    /// call.
    pub fn sleep_unless(&self, done: impl FnOnce() -> bool, sleep: impl FnOnce()) {
        self.count.fetch_add(1, Ordering::SeqCst);
        // A read-modify-write: `done` is not evaluated before other threads can see the count.
        if !done() {
            sleep();
        }
        self.count.fetch_sub(1, Ordering::SeqCst);
    }

    /// Calls `wake` if a thread sleeps. Used after something was completed.
    #[inline]
    pub fn wake(&self, wake: impl FnOnce()) {
        if self.fenced_count() > 0 {
            wake();
        }
    }

    /// The count, read after this thread's earlier writes are visible to other threads.
    #[inline]
    fn fenced_count(&self) -> u32 {
        self.count.fetch_add(0, Ordering::SeqCst)
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
