//! The number of handles of a tensor. The same protocol as `std::sync::Arc`, without weak handles.

use crate::memory::sync::{AtomicUsize, Ordering, fence};

/// Above this the process is aborted. The count cannot reach twice this number before the check
/// below runs.
const MAX: usize = isize::MAX as usize;

/// A count of handles that starts at one.
#[derive(Debug)]
pub(crate) struct RefCount(AtomicUsize);

impl RefCount {
    pub(crate) fn one() -> Self {
        RefCount(AtomicUsize::new(1))
    }

    /// Adds a handle. Only a holder of a handle may call this.
    ///
    /// Aborts the process when a loop that forgets handles has made `isize::MAX` of them. One more
    /// round would wrap the count to zero under a live handle.
    pub(crate) fn add(&self) {
        // Relaxed: the caller's own handle keeps the count above zero, and the new handle reaches
        // another thread by means that order memory themselves.
        if self.0.fetch_add(1, Ordering::Relaxed) > MAX {
            std::process::abort();
        }
    }

    /// Removes a handle. Returns whether it was the last; if so, everything that other handles did
    /// to the tensor happened before, and the count is one again.
    #[inline]
    pub(crate) fn remove(&self) -> bool {
        // The only handle needs no locked instruction: nobody can clone it meanwhile.
        self.is_one() || self.remove_shared()
    }

    fn remove_shared(&self) -> bool {
        // Release: the uses through this handle come before the count goes down.
        if self.0.fetch_sub(1, Ordering::Release) != 1 {
            return false;
        }
        // Acquire: pairs with the release of every other handle, so that their reads are over
        // before the last one writes or frees.
        fence(Ordering::Acquire);
        // Relaxed: nobody else has a handle.
        self.0.store(1, Ordering::Relaxed);
        true
    }

    /// Whether the caller's handle is the only one. The answer holds until the caller clones it,
    /// since handles are made only from handles.
    #[inline]
    pub(crate) fn is_one(&self) -> bool {
        // Acquire: as in `remove`.
        self.0.load(Ordering::Acquire) == 1
    }

    /// The number of handles at some moment, for reports only.
    pub(crate) fn snapshot(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;

    #[test]
    fn removing_the_last_of_three_handles_returns_true() {
        let count = RefCount::one();
        count.add();
        count.add();
        assert_eq!((count.is_one(), count.snapshot()), (false, 3));
        assert_eq!([count.remove(), count.remove()], [false, false]);
        assert!(count.is_one());
        assert!(count.remove());
    }
}

/// Every interleaving, under loom: `tests/nightly` builds the crate with `--cfg tensorwire_loom`
/// for it.
#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// Loom's cell panics if a write is not ordered after every read, as a tensor's bytes require.
    struct Shared {
        refs: RefCount,
        bytes: UnsafeCell<u32>,
    }

    fn shared() -> Arc<Shared> {
        let shared = Shared { refs: RefCount::one(), bytes: UnsafeCell::new(7) };
        shared.refs.add();
        Arc::new(shared)
    }

    fn read(shared: &Shared) {
        // SAFETY: a handle is held; loom checks that nobody writes.
        shared.bytes.with(|bytes| assert_eq!(unsafe { *bytes }, 7));
    }

    fn write(shared: &Shared) {
        // SAFETY: the only handle is held; loom checks that nobody reads.
        shared.bytes.with_mut(|bytes| unsafe { *bytes = 0 });
    }

    #[test]
    fn the_last_handle_writes_after_all_others_have_read_and_there_is_one_last() {
        loom::model(|| {
            let here = shared();
            let there = Arc::clone(&here);
            let drop_handle = |shared: &Shared| {
                read(shared);
                let last = shared.refs.remove();
                if last {
                    write(shared);
                }
                last
            };
            let other = thread::spawn(move || drop_handle(&there));
            let last = drop_handle(&here);
            assert!(last != other.join().unwrap());
        });
    }

    #[test]
    fn the_only_handle_may_write() {
        loom::model(|| {
            let here = shared();
            let there = Arc::clone(&here);
            let other = thread::spawn(move || {
                read(&there);
                there.refs.remove();
            });
            read(&here);
            if here.refs.is_one() {
                write(&here);
            }
            other.join().unwrap();
        });
    }
}
