//! The combining lock: at most one thread has it, and no submitted command is forgotten.

use super::atomic::{AtomicU32, Ordering, spin_loop};
use super::{MAX_THREADS, heavy_fence, light_fence, register_membarrier, thread_index};

const FREE: u32 = 0;
const LOCKED: u32 = 1;
const POISONED: u32 = 2;

// Where a thread is that has the bias, or had it. Only that thread changes it.
const OUTSIDE: u32 = 0;
const INSIDE: u32 = 1;

/// No thread.
const NOBODY: u32 = u32::MAX;
/// Runs of one thread, without another thread in between, after which it gets the bias.
const FIRST_RUNS: u32 = 64;
/// The most runs that are waited for. The number doubles with each bias that is revoked.
const MOST_RUNS: u32 = 1 << 20;

/// Spins in place of a fence that the kernel refuses: some milliseconds.
const SPINS_FOR_FENCE: u32 = 100_000;

/// Lets one thread at a time work, and has it carry out what the other threads have submitted.
///
/// A thread that finds the lock taken leaves its command in a queue and continues.
/// [`CombiningLock::try_run`] makes sure that a lock holder runs that command. A holder looks at
/// the queue *after* it has released the lock. The other thread tries the lock *after* it has
/// queued. Both are sequentially consistent, so at least one of them sees the other.
///
/// A thread that runs again and again without another one in between gets the *bias*: its runs
/// then take no locked instruction. Another thread revokes the bias, for which it pays an
/// [asymmetric fence](heavy_fence). Only the holder of `state` gives and revokes the bias. A holder
/// that fails takes the bias away for good.
#[derive(Debug)]
pub(crate) struct CombiningLock {
    state: AtomicU32,
    /// The index of the thread that has the bias, or [`NOBODY`].
    bias: AtomicU32,
    /// Where each thread is, as far as it enters by the bias, by its index.
    presences: Box<[AtomicU32]>,
    /// The thread that has the bias, or that may still be inside since it had it. Guarded by
    /// `state`.
    biased: AtomicU32,
    /// The thread that has run last, and its runs in a row. Guarded by `state`.
    last: AtomicU32,
    runs: AtomicU32,
    /// Runs in a row after which a thread gets the bias. Guarded by `state`.
    bias_after: AtomicU32,
    /// 1 as long as the kernel makes the barriers of a revocation, else 0.
    may_bias: AtomicU32,
}

/// A thread that holds the lock. Dropped when it goes out, also by a panic.
#[derive(Debug)]
pub(crate) struct LockGuard<'a> {
    lock: &'a CombiningLock,
    /// The presence of a thread that is inside by its bias. `None`: the thread holds `state`.
    presence: Option<&'a AtomicU32>,
}

impl LockGuard<'_> {
    /// Releases the lock after a run. With `may_bias` the run counts for the bias. The caller then
    /// looks for work that others left.
    #[inline]
    pub fn leave(self, may_bias: bool) {
        self.leave_as(this_thread, may_bias);
    }

    /// As [`LockGuard::leave`], as the thread with this index.
    #[inline]
    pub(super) fn leave_as(self, thread: impl FnOnce() -> u32, may_bias: bool) {
        if self.presence.is_none() {
            self.lock.count_run(thread(), may_bias);
        }
    }

    /// Poisons the lock after a run that failed.
    pub fn poison(self) {
        // Release: a thread that has taken `state`, and finds no bias, sees what was done inside.
        self.lock.bias.store(NOBODY, Ordering::Release);
        self.lock.state.store(POISONED, Ordering::SeqCst);
    }
}

impl Drop for LockGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(presence) = self.presence else {
            self.lock.release();
            return;
        };
        // Release: the next holder sees what was done inside.
        presence.store(OUTSIDE, Ordering::Release);
        // Either this thread then sees what another thread has queued, or that thread sees the
        // store above after its fence.
        light_fence(true);
    }
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
        CombiningLock::with(MAX_THREADS, FIRST_RUNS)
    }

    pub(super) fn with(threads: usize, bias_after: u32) -> Self {
        CombiningLock {
            state: AtomicU32::new(FREE),
            bias: AtomicU32::new(NOBODY),
            presences: (0..threads).map(|_| AtomicU32::new(OUTSIDE)).collect(),
            biased: AtomicU32::new(NOBODY),
            last: AtomicU32::new(NOBODY),
            runs: AtomicU32::new(0),
            bias_after: AtomicU32::new(bias_after),
            may_bias: AtomicU32::new(register_membarrier().into()),
        }
    }

    /// Runs `body` under the lock if the lock is free, and again as long as `has_work` finds work
    /// that other threads left. `body` returns `false` if it failed for good, which poisons the
    /// lock. A panic of `body` releases the lock and goes on; work that others left may stay. With
    /// `may_bias` the run counts for the bias.
    #[inline]
    pub fn try_run(
        &self,
        mut body: impl FnMut() -> bool,
        has_work: impl Fn() -> bool,
        may_bias: bool,
    ) -> LockOutcome {
        self.try_run_on(this_thread(), &mut body, &has_work, may_bias)
    }

    /// As [`CombiningLock::try_run`], as the thread with this index.
    #[inline]
    pub(super) fn try_run_on(
        &self,
        thread: u32,
        body: &mut impl FnMut() -> bool,
        has_work: &impl Fn() -> bool,
        may_bias: bool,
    ) -> LockOutcome {
        let mut ran = LockOutcome::Busy;
        loop {
            let held = match self.enter_as(thread) {
                Some(held) => held,
                None => match self.acquire_as(thread, has_work) {
                    Ok(held) => held,
                    Err(LockOutcome::Poisoned) => return LockOutcome::Poisoned,
                    Err(_) => return ran,
                },
            };
            ran = LockOutcome::Ran;
            if !body() {
                held.poison();
                return LockOutcome::Poisoned;
            }
            held.leave_as(|| thread, may_bias);
            if !has_work() {
                return ran;
            }
        }
    }

    /// Lets this thread in if it has the bias and is not inside yet.
    #[inline]
    pub fn enter(&self) -> Option<LockGuard<'_>> {
        self.enter_as(this_thread())
    }

    /// As [`CombiningLock::enter`], as the thread with this index.
    #[inline]
    pub(super) fn enter_as(&self, thread: u32) -> Option<LockGuard<'_>> {
        if self.bias.load(Ordering::Relaxed) != thread {
            return None;
        }
        let presence = self.presences.get(thread as usize)?;
        if presence.load(Ordering::Relaxed) != OUTSIDE {
            return None;
        }
        presence.store(INSIDE, Ordering::Relaxed);
        // Either the load below sees that the bias was revoked, or the thread that revoked it sees
        // the store above after its fence.
        light_fence(true);
        let held = LockGuard { lock: self, presence: Some(presence) };
        // If not, the drop of `held` precedes the try of the lock that follows. Either that try
        // finds the lock released, or the thread that releases it sees this thread outside.
        (self.bias.load(Ordering::Acquire) == thread).then_some(held)
    }

    /// Takes the lock for a thread without the bias, if the lock is free.
    ///
    /// # Errors
    /// If the lock is poisoned; or busy, and its holder sees the work that `has_work` finds now.
    #[inline(always)] // within the call of `Engine::acquire`, which is cold
    pub fn acquire(&self, has_work: impl Fn() -> bool) -> Result<LockGuard<'_>, LockOutcome> {
        self.acquire_as(this_thread(), &has_work)
    }

    /// As [`CombiningLock::acquire`], as the thread with this index.
    #[cold]
    pub(super) fn acquire_as(
        &self,
        thread: u32,
        has_work: &impl Fn() -> bool,
    ) -> Result<LockGuard<'_>, LockOutcome> {
        let presence = self.presences.get(thread as usize);
        // Code that runs inside came back here.
        if presence.is_some_and(|presence| presence.load(Ordering::Relaxed) != OUTSIDE) {
            return Err(LockOutcome::Busy);
        }
        loop {
            match self.try_acquire() {
                LockOutcome::Ran => {}
                refused => return Err(refused),
            }
            if self.keeps_out_others(thread) {
                // The thread with the bias may have failed meanwhile.
                let held = LockGuard { lock: self, presence: None };
                return if self.is_poisoned() { Err(LockOutcome::Poisoned) } else { Ok(held) };
            }
            if self.release() == LockOutcome::Poisoned {
                return Err(LockOutcome::Poisoned);
            }
            // Work may have been left by this thread, or by others that found `state` taken. The
            // thread that is inside looks at the queue after this fence, unless it has gone out.
            // Without work no fence is needed. A thread that leaves work later tries the lock
            // again.
            if !has_work() {
                return Err(LockOutcome::Busy);
            }
            self.heavy_fence();
            if self.is_any_inside() {
                return Err(LockOutcome::Busy);
            }
        }
    }

    /// Revokes the bias of another thread. Returns whether no thread is inside by the bias. A
    /// thread that is looks at the queue when it goes out. The caller holds `state`.
    fn keeps_out_others(&self, thread: u32) -> bool {
        let biased = self.biased.load(Ordering::Relaxed);
        let Some(presence) = self.presences.get(biased as usize) else { return true };
        if biased == thread {
            return presence.load(Ordering::Relaxed) == OUTSIDE;
        }
        // Acquire: the bias may have gone with a run that failed, without a fence.
        if self.bias.load(Ordering::Acquire) != NOBODY {
            self.bias.store(NOBODY, Ordering::Release);
            let bias_after = self.bias_after.load(Ordering::Relaxed);
            self.bias_after.store((2 * bias_after).min(MOST_RUNS), Ordering::Relaxed);
            // The thread does not enter by the bias after this fence, or its presence shows here.
            self.heavy_fence();
        }
        let is_outside = presence.load(Ordering::Acquire) == OUTSIDE;
        if is_outside {
            self.biased.store(NOBODY, Ordering::Relaxed);
        }
        is_outside
    }

    /// Whether a thread is inside by the bias, this one included.
    fn is_any_inside(&self) -> bool {
        let presence = self.presences.get(self.biased.load(Ordering::Relaxed) as usize);
        presence.is_some_and(|presence| presence.load(Ordering::Acquire) != OUTSIDE)
    }

    fn heavy_fence(&self) {
        if !heavy_fence(true) {
            // A filter of system calls was set since the process was registered. No thread gets the
            // bias again. Meanwhile the CPU of the other thread completes its stores.
            self.may_bias.store(0, Ordering::Relaxed);
            (0..SPINS_FOR_FENCE).for_each(|_| spin_loop());
        }
    }

    /// Counts a run of a thread, which gets the bias after many. The caller holds `state`.
    fn count_run(&self, thread: u32, may_bias: bool) {
        let is_same = self.last.load(Ordering::Relaxed) == thread && may_bias;
        let runs = if is_same { self.runs.load(Ordering::Relaxed).saturating_add(1) } else { 1 };
        self.last.store(thread, Ordering::Relaxed);
        let is_due = runs >= self.bias_after.load(Ordering::Relaxed) && thread != NOBODY;
        if is_due && may_bias && self.may_bias.load(Ordering::Relaxed) == 1 {
            // Release: a thread that enters by its bias sees what it and others did before.
            self.biased.store(thread, Ordering::Relaxed);
            self.bias.store(thread, Ordering::Release);
        }
        self.runs.store(if is_due { 0 } else { runs }, Ordering::Relaxed);
    }

    fn release(&self) -> LockOutcome {
        // An exchange, not a store: it must not be reordered with `has_work` afterwards, which
        // reads the queue. It leaves the poison of a thread with the bias.
        match self.state.compare_exchange(LOCKED, FREE, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => LockOutcome::Ran,
            Err(_) => LockOutcome::Poisoned,
        }
    }

    /// The thread that has the bias.
    #[cfg(all(test, tensorwire_loom))]
    pub(super) fn biased_thread(&self) -> Option<u32> {
        Some(self.bias.load(Ordering::Relaxed)).filter(|thread| *thread != NOBODY)
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

/// The index of the calling thread, or [`NOBODY`].
#[inline]
pub(super) fn this_thread() -> u32 {
    thread_index().map_or(NOBODY, |index| index as u32)
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
            false,
        );
        assert_eq!((outcome, runs.get()), (LockOutcome::Ran, 2));
    }

    #[test]
    fn a_second_attempt_by_the_holder_finds_the_lock_busy() {
        let lock = CombiningLock::new();
        lock.try_run(
            || {
                assert_eq!(lock.try_run(|| unreachable!(), || false, false), LockOutcome::Busy);
                true
            },
            || false,
            false,
        );
    }

    fn run(lock: &CombiningLock, thread: u32) -> LockOutcome {
        lock.try_run_on(thread, &mut || true, &|| false, true)
    }

    fn has_bias(lock: &CombiningLock, thread: u32) -> bool {
        lock.bias.load(Ordering::Relaxed) == thread
    }

    #[test]
    fn a_thread_that_runs_alone_gets_the_bias_and_another_one_revokes_it() {
        let lock = CombiningLock::with(2, 3);
        if lock.may_bias.load(Ordering::Relaxed) == 0 {
            return;
        }
        for _ in 0..2 {
            run(&lock, 0);
            assert!(!has_bias(&lock, 0));
        }
        for _ in 0..4 {
            assert_eq!(run(&lock, 0), LockOutcome::Ran);
            assert!(has_bias(&lock, 0));
        }
        assert_eq!(run(&lock, 1), LockOutcome::Ran);
        assert!(has_bias(&lock, NOBODY), "revoked");
        // The next bias takes twice as many runs.
        for _ in 0..4 {
            run(&lock, 1);
        }
        assert!(has_bias(&lock, NOBODY));
        run(&lock, 1);
        assert!(has_bias(&lock, 1));
    }

    #[test]
    fn runs_that_may_not_bias_do_not() {
        let lock = CombiningLock::with(2, 2);
        for _ in 0..5 {
            lock.try_run_on(0, &mut || true, &|| false, false);
        }
        assert!(has_bias(&lock, NOBODY));
    }

    #[test]
    fn the_thread_with_the_bias_keeps_others_and_itself_out_and_runs_what_they_left() {
        let lock = CombiningLock::with(2, 1);
        run(&lock, 0);
        assert_eq!(has_bias(&lock, 0), lock.may_bias.load(Ordering::Relaxed) == 1);
        let (left, runs) = (Cell::new(0), Cell::new(0));
        let mut body = || {
            if runs.replace(runs.get() + 1) == 0 {
                left.set(1);
                assert_eq!(run(&lock, 0), LockOutcome::Busy, "within itself");
                assert_eq!(run(&lock, 1), LockOutcome::Busy, "another one");
            } else {
                left.set(0);
            }
            true
        };
        let outcome = lock.try_run_on(0, &mut body, &|| left.get() > 0, true);
        assert_eq!((outcome, runs.get()), (LockOutcome::Ran, 2));
        assert_eq!(run(&lock, 1), LockOutcome::Ran);
    }

    #[test]
    fn a_failed_thread_with_the_bias_is_the_last() {
        let lock = CombiningLock::with(2, 1);
        run(&lock, 0);
        let outcome = lock.try_run_on(0, &mut || false, &|| false, true);
        assert_eq!(outcome, LockOutcome::Poisoned);
        assert!(lock.is_poisoned());
        assert_eq!((run(&lock, 0), run(&lock, 1)), (LockOutcome::Poisoned, LockOutcome::Poisoned));
    }

    #[test]
    fn a_failed_holder_is_the_last() {
        let lock = CombiningLock::new();
        assert_eq!(lock.try_run(|| false, || false, false), LockOutcome::Poisoned);
        assert_eq!(lock.try_run(|| unreachable!(), || false, false), LockOutcome::Poisoned);
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

    /// Submits a command as the thread with this index.
    fn submit(shared: &Shared, thread: u32) -> LockOutcome {
        submit_and(shared, thread, true)
    }

    /// As [`submit`]. The run fails for good if `succeeds` is not set.
    fn submit_and(shared: &Shared, thread: u32, succeeds: bool) -> LockOutcome {
        shared.queued.fetch_add(1, Ordering::SeqCst);
        shared.lock.try_run_on(
            thread,
            &mut || {
                let work = shared.queued.swap(0, Ordering::SeqCst);
                // loom fails the test if two threads are in here at once.
                shared.done.with_mut(|done| {
                    // SAFETY: only the holder of the lock gets here.
                    #[allow(unsafe_code)]
                    unsafe {
                        *done += work
                    }
                });
                succeeds
            },
            &|| shared.queued.load(Ordering::SeqCst) > 0,
            true,
        )
    }

    /// Every interleaving of two threads, one of which submits several times; and of three with up
    /// to two preemptions. A thread gets the bias after `bias_after` runs.
    #[test]
    fn loom_every_queued_command_is_run_by_a_lock_holder() {
        submits(1, 2, 9, None);
        submits(2, 1, 9, Some(2));
    }

    #[test]
    fn loom_every_queued_command_is_run_while_the_bias_comes_and_goes() {
        submits(1, 3, 1, Some(4));
        submits(2, 2, 1, Some(2));
    }

    #[test]
    fn loom_what_a_thread_with_the_bias_did_before_it_failed_is_seen_by_the_next_holder() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = None;
        model.check(|| {
            let shared = shared(1);
            submit(&shared, 0);
            assert_eq!(shared.lock.biased_thread(), Some(0));
            let other = shared.clone();
            let other = loom::thread::spawn(move || submit(&other, 1));
            submit_and(&shared, 0, false);
            other.join().expect("no panic");
        });
    }

    fn shared(bias_after: u32) -> Arc<Shared> {
        Arc::new(Shared {
            lock: CombiningLock::with(3, bias_after),
            queued: AtomicUsize::new(0),
            done: UnsafeCell::new(0),
        })
    }

    fn submits(others: u32, own: usize, bias_after: u32, preemptions: Option<usize>) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            let shared = shared(bias_after);
            let threads: Vec<_> = (1..=others)
                .map(|thread| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || submit(&shared, thread))
                })
                .collect();
            for _ in 0..own {
                submit(&shared, 0);
            }
            for thread in threads {
                thread.join().expect("no panic");
            }
            assert_eq!(shared.queued.load(Ordering::SeqCst), 0);
            // SAFETY: every other thread has ended.
            #[allow(unsafe_code)]
            let done = shared.done.with(|done| unsafe { *done });
            assert_eq!(done, others as usize + own);
        });
    }
}
