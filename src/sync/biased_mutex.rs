//! A mutex without locked instructions for a thread that takes it alone.

use super::atomic::{UnsafeCell, spin_loop};
use super::combining_lock::this_thread;
use super::{CombiningLock, LockGuard, LockOutcome};
use std::time::Duration;

/// Tries that spin before a thread yields its CPU between tries.
const SPINS: u32 = 64;
/// Tries that spin or yield before a thread sleeps between tries: a thread with a real-time
/// priority may keep the holder from its CPU.
const YIELDS: u32 = 1000;

/// A value that one thread uses at a time, briefly. A thread that finds the mutex taken spins, and
/// then yields its CPU.
///
/// The lock is a [`CombiningLock`] without work: a thread that uses the value again and again gets
/// its bias.
#[derive(Debug)]
pub(crate) struct BiasedMutex<T> {
    lock: CombiningLock,
    value: UnsafeCell<T>,
}

// SAFETY: `with` touches the value only under the lock, which orders the uses of different threads.
// The value moves between threads this way, for which it is `Send`.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    pub fn new(value: T) -> Self {
        BiasedMutex { lock: CombiningLock::new(), value: UnsafeCell::new(value) }
    }

    /// Calls `body` with the value. A panic of `body` goes on, and the value stays as it is. `body`
    /// must not use the mutex, which would wait for itself.
    #[inline]
    pub fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.with_as(this_thread(), body)
    }

    #[inline]
    fn with_as<R>(&self, thread: u32, body: impl FnOnce(&mut T) -> R) -> R {
        let held = self.lock.enter_as(thread).unwrap_or_else(|| self.wait(thread));
        // SAFETY: this thread alone holds the lock, so there is no other reference to the value.
        // The reference ends with `body`.
        #[allow(unsafe_code)]
        let result = self.value.with_mut(|value| body(unsafe { &mut *value }));
        held.leave_as(|| thread, true);
        result
    }

    /// Takes the lock for a thread without the bias.
    #[cold]
    fn wait(&self, thread: u32) -> LockGuard<'_> {
        let mut round = 0;
        loop {
            match self.lock.acquire_as(thread, &|| false) {
                Ok(held) => return held,
                Err(why) => debug_assert_ne!(why, LockOutcome::Poisoned, "no run fails"),
            }
            pause(round);
            round = (round + 1).min(YIELDS);
        }
    }
}

#[cold]
#[allow(clippy::disallowed_methods)] // sleeps only where a spin could last for ever
fn pause(round: u32) {
    match round {
        ..SPINS => spin_loop(),
        SPINS..YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(50)),
    }
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::thread;

    #[test]
    fn threads_that_take_turns_and_threads_alone_count_together() {
        const ROUNDS: usize = 2000;
        let (mutex, barrier) = (BiasedMutex::new(0_usize), Barrier::new(3));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    // Alone at first, so that a bias comes and is revoked.
                    mutex.with(|count| (0..ROUNDS).for_each(|_| *count += 1));
                    (0..ROUNDS).for_each(|_| mutex.with(|count| *count += 1));
                    barrier.wait();
                    (0..ROUNDS).for_each(|_| mutex.with(|count| *count += 1));
                });
            }
        });
        (0..ROUNDS).for_each(|_| mutex.with(|count| *count += 1));
        assert_eq!(mutex.with(|count| *count), 10 * ROUNDS);
    }

    #[test]
    fn a_panic_inside_leaves_the_mutex_usable() {
        let mutex = BiasedMutex::new(1);
        // With the bias and without it.
        for _ in 0..200 {
            let panicked = catch_unwind(AssertUnwindSafe(|| mutex.with(|_| panic!("on purpose"))));
            assert!(panicked.is_err());
            mutex.with(|value| *value += 1);
        }
        assert_eq!(thread::scope(|scope| scope.spawn(|| mutex.with(|value| *value)).join()).ok(), Some(201));
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// In each model thread 0 has the bias at first. Then thread 0 takes the mutex `own` times and
    /// thread 1 `others` times. Returns how many of the interleavings ended with the bias at thread
    /// 0, at thread 1, and at neither.
    fn shared(own: usize, others: usize, preemptions: Option<usize>) -> [usize; 3] {
        let ends: std::sync::Arc<[AtomicUsize; 3]> = Default::default();
        let counted = ends.clone();
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            let mutex = Arc::new(BiasedMutex { lock: CombiningLock::with(2, 1), value: UnsafeCell::new(0) });
            mutex.with_as(0, |count| *count += 1);
            assert_eq!(mutex.lock.biased_thread(), Some(0));
            let other = {
                let mutex = mutex.clone();
                // Loom fails the test if both threads are at the value at once.
                loom::thread::spawn(move || (0..others).for_each(|_| mutex.with_as(1, |count| *count += 1)))
            };
            (0..own).for_each(|_| mutex.with_as(0, |count| *count += 1));
            other.join().expect("no panic");
            let end = mutex.lock.biased_thread().map_or(2, |thread| thread as usize);
            counted[end].fetch_add(1, Ordering::Relaxed);
            assert_eq!(mutex.with_as(0, |count| *count), 1 + own + others);
        });
        ends.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    #[test]
    fn loom_no_update_is_lost_while_the_bias_is_revoked() {
        let ends = shared(1, 1, None);
        assert_eq!((ends[0], ends[1]), (0, 0), "revoked");
        shared(2, 1, Some(4));
    }

    #[test]
    fn loom_no_update_is_lost_while_the_bias_moves() {
        let [_, moved, _] = shared(1, 2, Some(4));
        assert!(moved > 0);
        let [back, moved, _] = shared(4, 2, Some(2));
        assert!(back > 0 && moved > 0);
    }
}
