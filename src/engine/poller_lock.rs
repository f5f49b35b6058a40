//! The owner token: at most one thread moves a poller, and nothing handed over to it is forgotten.

use super::sync::{AtomicU32, Ordering, spin_loop};

const FREE: u32 = 0;
const LOCKED: u32 = 1;
const POISONED: u32 = 2;

/// Gives one thread at a time the right to move a poller.
///
/// A thread that can't have the token leaves its work in a queue and goes on; the rule of
/// [`PollerLock::run`] makes sure that some owner does that work: the owner looks at the queue *after* it has
/// released the token, and the other thread tries the token *after* it has queued. Both are sequentially
/// consistent, so at least one of them sees the other.
#[derive(Debug)]
pub(super) struct PollerLock {
    state: AtomicU32,
}

/// How an attempt to own went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockOutcome {
    /// This thread was the owner, at least once.
    Ran,
    /// Another thread is the owner and will see what was queued before.
    Busy,
    /// An owner panicked; nobody owns any more.
    Poisoned,
}

impl PollerLock {
    pub fn new() -> Self {
        PollerLock { state: AtomicU32::new(FREE) }
    }

    /// Runs `body` as the owner, and again as long as `has_work` says that others left work behind.
    /// `body` returns `false` if it failed for good, which poisons the token.
    pub fn run(&self, mut body: impl FnMut() -> bool, has_work: impl Fn() -> bool) -> LockOutcome {
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
            // A swap, not a store: it must not be reordered with the look at the queue below.
            self.state.swap(FREE, Ordering::SeqCst);
            if !has_work() {
                return ran;
            }
            spin_loop();
        }
    }

    /// Whether an owner has failed.
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
    fn the_owner_runs_again_while_others_leave_work() {
        let token = PollerLock::new();
        let (left, runs) = (Cell::new(2), Cell::new(0));
        let owned = token.run(
            || {
                runs.set(runs.get() + 1);
                true
            },
            || {
                left.set(left.get() - 1);
                left.get() > 0
            },
        );
        assert_eq!((owned, runs.get()), (LockOutcome::Ran, 2));
    }

    #[test]
    fn an_owner_inside_an_owner_finds_the_token_busy() {
        let token = PollerLock::new();
        token.run(
            || {
                assert_eq!(token.run(|| unreachable!(), || false), LockOutcome::Busy);
                true
            },
            || false,
        );
    }

    #[test]
    fn a_failed_owner_is_the_last() {
        let token = PollerLock::new();
        assert_eq!(token.run(|| false, || false), LockOutcome::Poisoned);
        assert_eq!(token.run(|| unreachable!(), || false), LockOutcome::Poisoned);
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    struct Shared {
        token: PollerLock,
        queued: AtomicUsize,
        done: UnsafeCell<usize>,
    }

    fn submit(shared: &Shared) -> LockOutcome {
        shared.queued.fetch_add(1, Ordering::SeqCst);
        shared.token.run(
            || {
                let work = shared.queued.swap(0, Ordering::SeqCst);
                // loom fails the test if two threads are in here at once.
                shared.done.with_mut(|done| {
                    // SAFETY: only the owner of the token gets here.
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

    /// Every interleaving of two threads, one of which submits twice; and of three with up to two preemptions.
    #[test]
    fn loom_whatever_is_queued_is_done_by_some_owner() {
        submits(1, 2, None);
        submits(2, 1, Some(2));
    }

    fn submits(others: usize, own: usize, preemptions: Option<usize>) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            let shared = Arc::new(Shared {
                token: PollerLock::new(),
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
