//! A result that one thread puts and another takes, without a lock.

use super::atomic::{AtomicBool, Ordering, UnsafeCell};

/// Room for one result.
pub(super) struct ResultCell<R> {
    /// Set after the result was written, or by [`ResultCell::close`].
    done: AtomicBool,
    result: UnsafeCell<Option<R>>,
}

// SAFETY: `result` is written once, by the only caller of `put`, before `done` is set with release
// ordering; or never, if `close` sets `done`. It is touched again only after `done` was seen with
// acquire ordering, by the only caller of `take`. `R: Send` moves between them. `reset` and
// `reopen` have the cell to themselves.
#[allow(unsafe_code)]
unsafe impl<R: Send> Sync for ResultCell<R> {}

impl<R> ResultCell<R> {
    pub(super) fn new() -> Self {
        ResultCell { done: AtomicBool::new(false), result: UnsafeCell::new(None) }
    }

    /// Empties the cell for its next use. `&mut` shows that neither side holds it.
    pub(super) fn reset(&mut self) {
        // SAFETY: `&mut self` is the only reference.
        #[allow(unsafe_code)]
        unsafe {
            self.reopen();
        }
    }

    /// As [`ResultCell::reset`].
    ///
    /// # Safety
    /// No other thread uses the cell, and its earlier uses happened before.
    #[allow(unsafe_code)]
    pub(super) unsafe fn reopen(&self) {
        self.done.store(false, Ordering::Relaxed);
        // SAFETY: nobody else uses the cell, by the contract above.
        self.result.with_mut(|result| unsafe { *result = None });
    }

    /// Whether the result was put, or the cell closed. Stays `true` after the result was taken.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Puts the result.
    ///
    /// # Safety
    /// `put` is called at most once in each use of the cell, and not after `close`.
    #[allow(unsafe_code)]
    pub(super) unsafe fn put(&self, result: R) {
        // SAFETY: by the contract above this is the only write, and `take` reads only after `done`
        // is set.
        self.result.with_mut(|room| unsafe { *room = Some(result) });
        self.done.store(true, Ordering::Release);
    }

    /// Ends the use of the cell without a result, in place of [`ResultCell::put`].
    pub(super) fn close(&self) {
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
        self.result.with_mut(|result| unsafe { (*result).take() })
    }
}

/// Every interleaving, under loom.
#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    #[allow(unsafe_code)] // the cell's contract
    fn loom_a_result_is_seen_whole_by_the_thread_that_waits_for_it() {
        loom::model(|| {
            let cell = Arc::new(ResultCell::new());
            let sender = Arc::clone(&cell);
            // SAFETY: the only put.
            let thread = loom::thread::spawn(move || unsafe { sender.put(Box::new(7)) });
            // SAFETY: no other thread takes; loom checks that the put is over.
            let early = unsafe { cell.take() };
            while !cell.is_done() {
                loom::thread::yield_now();
            }
            // SAFETY: as above.
            let late = unsafe { cell.take() };
            assert!(early.is_some() != late.is_some(), "taken once");
            assert_eq!(early.or(late), Some(Box::new(7)));
            thread.join().expect("no panic");
        });
    }
}
