//! The event count of a port. The thread that watches the device notifies it when the port's
//! completion channel has an event.

use crate::fabric::words::{LoadWords, ShareWords};
use crate::fabric::{Sleep, Sleeper};
use crate::sync::event_count::{EventCount, WORDS};
use rustix::thread::futex;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The longest sleep. A completion that an arming on a broken device misses is found after it.
const LIMIT: Duration = Duration::from_millis(100);

/// The event count of a port.
pub(super) type PortEvents = EventCount<ProcessWords>;

/// Words of this process alone.
#[derive(Debug)]
pub(super) struct ProcessWords(Box<[AtomicU64; WORDS]>);

impl Default for ProcessWords {
    fn default() -> Self {
        ProcessWords(Box::new([const { AtomicU64::new(0) }; WORDS]))
    }
}

impl ProcessWords {
    /// The low half of a word, for the kernel.
    fn low_half(&self, index: usize) -> &AtomicU32 {
        let halves = ptr::from_ref(&self.0[index]).cast::<AtomicU32>();
        // SAFETY: half of a word that lives as long as `self`, and aligned. Only the kernel looks
        // at it.
        unsafe { &*halves.add(usize::from(cfg!(target_endian = "big"))) }
    }
}

impl LoadWords for ProcessWords {
    fn len(&self) -> usize {
        WORDS
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.0[index].load(order)
    }
}

impl ShareWords for ProcessWords {
    fn fetch_add(&self, index: usize, value: u64) -> u64 {
        self.0[index].fetch_add(value, Ordering::SeqCst)
    }

    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.0[index].fetch_or(bits, Ordering::SeqCst)
    }

    fn swap(&self, index: usize, value: u64) -> u64 {
        self.0[index].swap(value, Ordering::SeqCst)
    }

    fn fence(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    fn wait(&self, index: usize, seen: u32, timeout: Duration) {
        // An error is a changed word, a signal, or the end of the time.
        let timeout = futex::Timespec::try_from(timeout).ok();
        let _ = futex::wait(self.low_half(index), futex::Flags::PRIVATE, seen, timeout.as_ref());
    }

    fn wake(&self, index: usize) {
        // The word is ours and aligned, so there is no error.
        let _ = futex::wake(self.low_half(index), futex::Flags::PRIVATE, i32::MAX as u32);
    }
}

/// Blocks threads while nothing arrives on a port's links: a futex. A sleep ends after 100 ms at
/// the latest. See [`Sleeper`].
#[derive(Clone)]
pub struct VerbsSleeper {
    pub(super) events: Arc<PortEvents>,
}

impl Sleeper for VerbsSleeper {
    fn seen(&self) -> u32 {
        self.events.key()
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        self.events.sleep(who, seen, timeout.min(LIMIT));
    }

    fn wake(&self, who: Sleep) {
        self.events.wake(who);
    }

    fn enter_wait(&self) {
        self.events.enter_wait();
    }

    fn exit_wait(&self) {
        self.events.exit_wait();
    }
}

impl fmt::Debug for VerbsSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
