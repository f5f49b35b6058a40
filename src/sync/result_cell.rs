//! A result that one thread puts and another takes, without a lock.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Room for one result.
pub(super) struct ResultCell<R> {
    /// Set after the result was written.
    done: AtomicBool,
    result: UnsafeCell<Option<R>>,
}

// SAFETY: `result` is written once, by the only caller of `put`, before `done` is set with release
// ordering. It is touched again only after `done` was seen with acquire ordering, by the only
// caller of `take`. `R: Send` moves between them.
#[allow(unsafe_code)]
unsafe impl<R: Send> Sync for ResultCell<R> {}

impl<R> ResultCell<R> {
    pub(super) fn new() -> Self {
        ResultCell { done: AtomicBool::new(false), result: UnsafeCell::new(None) }
    }

    /// Empties the cell for its next use. `&mut` shows that neither side holds it.
    pub(super) fn reset(&mut self) {
        *self.done.get_mut() = false;
        *self.result.get_mut() = None;
    }

    /// Whether the result was put. Stays `true` after it was taken.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Puts the result.
    ///
    /// # Safety
    /// `put` is called at most once between two resets of the cell.
    #[allow(unsafe_code)]
    pub(super) unsafe fn put(&self, result: R) {
        // SAFETY: by the contract above this is the only write, and `take` reads only after `done`
        // is set.
        unsafe {
            *self.result.get() = Some(result);
        }
        self.done.store(true, Ordering::Release);
    }

    /// Takes the result, if it was put and not taken before.
    ///
    /// # Safety
    /// No two calls of `take` on one cell overlap.
    #[allow(unsafe_code)]
    pub(super) unsafe fn take(&self) -> Option<R> {
        if !self.is_done() {
            return None;
        }
        // SAFETY: `done` was seen, so the write is over and there is no other. By the contract
        // above no other call takes the result now.
        unsafe { (*self.result.get()).take() }
    }
}
