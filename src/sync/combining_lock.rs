//! The combining lock: at most one thread has it, and no submitted command is forgotten.

use super::atomic::{AtomicU32, Ordering, spin_loop};

const FREE: u32 = 0;
const LOCKED: u32 = 1;
const POISONED: u32 = 2;

/// Lets one thread at a time work, and has it carry out what the other threads have submitted.
///
/// A thread that finds the lock taken leaves its command in a queue and continues.
/// [`CombiningLock::try_run`] makes sure that a lock holder runs that command. A holder looks at
/// the queue *after* it has released the lock. The other thread tries the lock *after* it has
/// queued. Both are sequentially consistent, so at least one of them sees the other.
#[derive(Debug)]
pub(crate) struct CombiningLock {
    state: AtomicU32,
}

/// The outcome of an attempt to run under the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockOutcome {
    /// This thread held the lock, at least once.
    Ran,
    /// Another thread holds the lock and will see what was queued before the attempt.
    Busy,
    /// A lock holder panicked. The lock is never free again.
    Poisoned,
}

impl CombiningLock {
    pub fn new() -> Self {
        CombiningLock { state: AtomicU32::new(FREE) }
    }

    /// Runs `body` under the lock if the lock is free, and again as long as `has_work` finds work
    /// that other threads left. `body` returns `false` if it failed for good, which poisons the
    /// lock.
    pub fn try_run(&self, mut body: impl FnMut() -> bool, has_work: impl Fn() -> bool) -> LockOutcome {
        let mut ran = LockOutcome::Busy;
        loop {
            match self.try_acquire() {
                LockOutcome::Ran => {}
                LockOutcome::Poisoned => return LockOutcome::Poisoned,
                LockOutcome::Busy => return ran,
            }
            ran = LockOutcome::Ran;
            if !body() {
                self.state.store(POISONED, Ordering::SeqCst);
                return LockOutcome::Poisoned;
            }
            // A swap, not a store: it must not be reordered with `has_work` below, which reads the
            // queue.
            self.state.swap(FREE, Ordering::SeqCst);
            if !has_work() {
                return ran;
            }
            spin_loop();
        }
    }

    /// Whether a lock holder has failed.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.state.load(Ordering::Relaxed) == POISONED
    }

    fn try_acquire(&self) -> LockOutcome {
        // SeqCst also on failure: this load must come after the caller's push to the queue.
        match self.state.compare_exchange(FREE, LOCKED, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => LockOutcome::Ran,
            Err(POISONED) => LockOutcome::Poisoned,
            Err(_) => LockOutcome::Busy,
        }
    }
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn the_holder_runs_again_while_others_leave_work() {
        let lock = CombiningLock::new();
        let (left, runs) = (Cell::new(2), Cell::new(0));
        let outcome = lock.try_run(
            || {
                runs.set(runs.get() + 1);
                true
            },
            || {
                left.set(left.get() - 1);
                left.get() > 0
            },
        );
        assert_eq!((outcome, runs.get()), (LockOutcome::Ran, 2));
    }

    #[test]
    fn a_second_attempt_by_the_holder_finds_the_lock_busy() {
        let lock = CombiningLock::new();
        lock.try_run(
            || {
                assert_eq!(lock.try_run(|| unreachable!(), || false), LockOutcome::Busy);
                true
            },
            || false,
        );
    }

    #[test]
    fn a_failed_holder_is_the_last() {
        let lock = CombiningLock::new();
        assert_eq!(lock.try_run(|| false, || false), LockOutcome::Poisoned);
        assert_eq!(lock.try_run(|| unreachable!(), || false), LockOutcome::Poisoned);
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    struct Shared {
        lock: CombiningLock,
        queued: AtomicUsize,
        done: UnsafeCell<usize>,
    }

    fn submit(shared: &Shared) -> LockOutcome {
        shared.queued.fetch_add(1, Ordering::SeqCst);
        shared.lock.try_run(
            || {
                let work = shared.queued.swap(0, Ordering::SeqCst);
                // loom fails the test if two threads are in here at once.
                shared.done.with_mut(|done| {
                    // SAFETY: only the holder of the lock gets here.
                    #[allow(unsafe_code)]
                    unsafe {
                        *done += work
                    }
                });
                true
            },
            || shared.queued.load(Ordering::SeqCst) > 0,
        )
    }

    /// Every interleaving of two threads, one of which submits twice; and of three with up to two
    /// preemptions.
    #[test]
    fn loom_every_queued_command_is_run_by_a_lock_holder() {
        submits(1, 2, None);
        submits(2, 1, Some(2));
    }

    fn submits(others: usize, own: usize, preemptions: Option<usize>) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            let shared = Arc::new(Shared {
                lock: CombiningLock::new(),
                queued: AtomicUsize::new(0),
                done: UnsafeCell::new(0),
            });
            let threads: Vec<_> = (0..others)
                .map(|_| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || submit(&shared))
                })
                .collect();
            for _ in 0..own {
                submit(&shared);
            }
            for thread in threads {
                thread.join().expect("no panic");
            }
            assert_eq!(shared.queued.load(Ordering::SeqCst), 0);
            // SAFETY: every other thread has ended.
            #[allow(unsafe_code)]
            let done = shared.done.with(|done| unsafe { *done });
            assert_eq!(done, others + own);
        });
    }
}
