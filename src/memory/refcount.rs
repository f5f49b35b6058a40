//! How many handles a tensor has. The same protocol as `std::sync::Arc`, without weak handles.

use super::sync::{AtomicUsize, Ordering, fence};

/// More handles than any program has: twice as many as this can never be reached before the check below
/// has ended the process.
const MAX: usize = isize::MAX as usize;

/// A count of handles that starts at one.
#[derive(Debug)]
pub(super) struct RefCount(AtomicUsize);

impl RefCount {
    pub(super) fn one() -> Self {
        RefCount(AtomicUsize::new(1))
    }

    /// One handle more. Only a holder of a handle may call this.
    ///
    /// Aborts the process when a loop that forgets handles has made `isize::MAX` of them: one more round
    /// and the count would wrap to zero under a live handle.
    pub(super) fn add(&self) {
        // Relaxed: the caller's own handle keeps the count above zero, and whoever is given the new handle
        // gets it by some means that orders memory itself.
        if self.0.fetch_add(1, Ordering::Relaxed) > MAX {
            std::process::abort();
        }
    }

    /// One handle fewer; true if it was the last, and then everything that other handles did to the tensor
    /// happened before this returned.
    pub(super) fn remove(&self) -> bool {
        // Release: what this handle's owner did comes before the count goes down.
        if self.0.fetch_sub(1, Ordering::Release) != 1 {
            return false;
        }
        // Acquire: pairs with the release of every other handle, so that their reads are over before the
        // last one writes or frees.
        fence(Ordering::Acquire);
        true
    }

    /// Whether the caller's handle is the only one. It stays so until the caller clones it, as handles are
    /// made only from handles.
    pub(super) fn is_one(&self) -> bool {
        // Acquire: as in `remove`.
        self.0.load(Ordering::Acquire) == 1
    }

    /// The number of handles at some moment: for reports only.
    pub(super) fn snapshot(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}
