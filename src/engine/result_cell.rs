//! A result that one side brings and the other takes, without a lock.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Room for one result.
pub(super) struct ResultCell<R> {
    /// Set after the result was written.
    done: AtomicBool,
    result: UnsafeCell<Option<R>>,
}

// SAFETY: `result` is written once, by the only caller of `put`, before `done` is set with release ordering; it is touched
// again only after `done` was seen with acquire ordering, by the only caller of `take`. `R: Send` moves between them.
#[allow(unsafe_code)]
unsafe impl<R: Send> Sync for ResultCell<R> {}

impl<R> ResultCell<R> {
    pub(super) fn new() -> Self {
        ResultCell { done: AtomicBool::new(false), result: UnsafeCell::new(None) }
    }

    /// As new. Nobody else holds it.
    pub(super) fn reset(&mut self) {
        *self.done.get_mut() = false;
        *self.result.get_mut() = None;
    }

    /// Whether the result is there, or was taken.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Brings the result.
    ///
    /// # Safety
    /// No other call of this on the same cell since it was new.
    #[allow(unsafe_code)]
    pub(super) unsafe fn put(&self, result: R) {
        // SAFETY: as the caller says, this is the only write, and nobody looks before `done` is set.
        unsafe {
            *self.result.get() = Some(result);
        }
        self.done.store(true, Ordering::Release);
    }

    /// The result, if it is there and was not taken before.
    ///
    /// # Safety
    /// No other call of this on the same cell at the same time.
    #[allow(unsafe_code)]
    pub(super) unsafe fn take(&self) -> Option<R> {
        if !self.is_done() {
            return None;
        }
        // SAFETY: `done` was seen, so the result is written and will not be again; as the caller says, nobody else takes it.
        unsafe { (*self.result.get()).take() }
    }
}
