//! Keeps the owners out of their magazines while another thread is at all of them.
//!
//! Each owner enters its own magazine for every tensor that it makes or drops. Another thread stops
//! the owners rarely: to collect cached blocks, and when the pool ends. Both sides store one word
//! and then load the other's, with an [asymmetric fence](crate::sync::light_fence) in between.

use crate::memory::sync::{AtomicU32, Ordering, yield_now};
use crate::sync::{heavy_fence, light_fence};

const OPEN: u32 = 0;
const PAUSED: u32 = 1;
const CLOSED: u32 = 2;

/// The word that owners load. One thread at a time may stop them; the callers see to that.
#[derive(Debug)]
pub(crate) struct Gate {
    state: AtomicU32,
    /// Whether the kernel makes the barriers.
    has_membarrier: bool,
}

/// Whether an owner is in its magazine.
#[derive(Debug)]
pub(crate) struct Presence(AtomicU32);

/// Why an owner was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// For a moment.
    Paused,
    /// For ever.
    Closed,
}

impl Gate {
    /// An open gate.
    pub(crate) fn new(has_membarrier: bool) -> Gate {
        Gate { state: AtomicU32::new(OPEN), has_membarrier }
    }

    /// Lets an owner in until [`Presence::leave`], unless the owners are stopped.
    ///
    /// Everything that the other thread did before [`Gate::resume`] happened before.
    #[inline]
    pub(crate) fn enter(&self, presence: &Presence) -> Result<(), Stopped> {
        self.enter_behind(presence, || light_fence(self.has_membarrier))
    }

    #[inline]
    fn enter_behind(&self, presence: &Presence, barrier: impl FnOnce()) -> Result<(), Stopped> {
        debug_assert_eq!(presence.0.load(Ordering::Relaxed), 0, "an owner enters once");
        presence.0.store(1, Ordering::Relaxed);
        // Either the load below sees that the owners are stopped, or the thread that stops them
        // sees the store above and waits.
        barrier();
        match self.state.load(Ordering::Acquire) {
            OPEN => Ok(()),
            state => self.refused(presence, state),
        }
    }

    #[cold]
    fn refused(&self, presence: &Presence, state: u32) -> Result<(), Stopped> {
        presence.leave();
        Err(if state == CLOSED { Stopped::Closed } else { Stopped::Paused })
    }

    /// Lets no owner in until [`Gate::resume`]. Owners that are inside must then be waited for:
    /// [`Presence::wait`]. `false` if the kernel refuses the barrier; nothing is stopped then.
    pub(crate) fn pause(&self) -> bool {
        self.stop(PAUSED)
    }

    /// As [`Gate::pause`], for ever.
    pub(crate) fn close(&self) -> bool {
        self.stop(CLOSED)
    }

    fn stop(&self, state: u32) -> bool {
        debug_assert_eq!(
            self.state.load(Ordering::Relaxed),
            OPEN,
            "one thread at a time, and none after close"
        );
        self.state.store(state, Ordering::Relaxed);
        let done = heavy_fence(self.has_membarrier);
        if !done {
            self.resume();
        }
        done
    }

    /// Lets owners in again.
    pub(crate) fn resume(&self) {
        // Release: an owner that comes in sees what was done in its magazine meanwhile.
        self.state.store(OPEN, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Relaxed) == CLOSED
    }
}

impl Presence {
    /// Of an owner that is outside.
    pub(crate) fn new() -> Presence {
        Presence(AtomicU32::new(0))
    }

    /// The owner goes out.
    #[inline]
    pub(crate) fn leave(&self) {
        // Release: what the owner did inside happened before.
        self.0.store(0, Ordering::Release);
    }

    /// Waits until the owner is outside, after the owners were stopped.
    pub(crate) fn wait(&self) {
        while self.0.load(Ordering::Acquire) != 0 {
            yield_now();
        }
    }
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;
    use crate::sync::register_membarrier;

    #[test]
    fn owners_come_in_while_nobody_stops_them() {
        for has_membarrier in [false, register_membarrier()] {
            let (gate, presence) = (Gate::new(has_membarrier), Presence::new());
            assert_eq!(gate.enter(&presence), Ok(()));
            presence.leave();
            assert!(gate.pause());
            presence.wait();
            assert_eq!(gate.enter(&presence), Err(Stopped::Paused));
            gate.resume();
            assert_eq!(gate.enter(&presence), Ok(()));
            presence.leave();
            assert!(gate.close() && gate.is_closed());
            assert_eq!(gate.enter(&presence), Err(Stopped::Closed));
            presence.wait();
        }
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use crate::memory::sync::fence;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    /// Loom fails the test if the owner and the thread that stopped it are at `held` at once.
    struct Shared {
        gate: Gate,
        presence: Presence,
        held: UnsafeCell<u32>,
    }

    impl Shared {
        fn add(&self) {
            // SAFETY: either the owner is inside, or it is stopped and was waited for; loom checks
            // that this excludes the other.
            self.held.with_mut(|held| unsafe { *held += 1 });
        }
    }

    /// An owner enters twice while another thread stops it, and possibly lets it in again.
    fn model(barrier: impl Fn() + Copy + Send + Sync + 'static) {
        loom::model(move || {
            let shared = Arc::new(Shared {
                gate: Gate::new(true),
                presence: Presence::new(),
                held: UnsafeCell::new(0),
            });
            let there = Arc::clone(&shared);
            let owner = loom::thread::spawn(move || {
                let mut entered = 0;
                for _ in 0..2 {
                    if there.gate.enter_behind(&there.presence, barrier).is_ok() {
                        there.add();
                        there.presence.leave();
                        entered += 1;
                    }
                }
                entered
            });
            assert!(shared.gate.pause());
            shared.presence.wait();
            shared.add();
            shared.gate.resume();
            let entered = owner.join().expect("the owner");
            // SAFETY: the owner has ended.
            shared.held.with(|held| assert_eq!(unsafe { *held }, entered + 1));
        });
    }

    #[test]
    fn loom_an_owner_and_the_thread_that_stops_it_are_never_inside_at_once() {
        model(|| fence(Ordering::SeqCst));
    }

    /// Without the owner's barrier the model must fail, or it proves nothing.
    #[test]
    #[should_panic]
    fn loom_the_barrier_of_the_owner_is_needed() {
        model(|| {});
    }
}
