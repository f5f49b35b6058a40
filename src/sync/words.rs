//! Memory that threads and processes share, as numbered 64-bit words behind traits.
//!
//! Code that is generic over these traits runs on a mapped segment and, in the loom tests, on
//! loom's atomics. A peer's words are only [`LoadWords`]: neither the types nor the page tables
//! allow a write. [`ShareWords`] are written by several threads or processes.

use std::sync::atomic::Ordering;
use std::time::Duration;

/// Words that this process may read.
pub(crate) trait LoadWords {
    /// Number of words.
    fn len(&self) -> usize;

    /// Reads a word.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn load(&self, index: usize, order: Ordering) -> u64;

    /// A function that reads word `k` of the `N` from `index` on. The function panics if `k` is not
    /// below `N`.
    ///
    /// # Panics
    /// If there are not so many words.
    #[inline]
    fn words<const N: usize>(&self, index: usize) -> impl Fn(usize, Ordering) -> u64 {
        assert!(index < self.len() && N <= self.len() - index);
        move |k, order| {
            assert!(k < N);
            self.load(index + k, order)
        }
    }

    /// Fetches the cache line of a word that is about to be read. A hint, which may do nothing.
    #[inline]
    fn prefetch_load(&self, index: usize) {
        let _ = index;
    }
}

/// Words that this process and others write. Each change is sequentially consistent.
pub(crate) trait ShareWords: LoadWords {
    /// Adds to a word, modulo 2^64. Returns the old value.
    ///
    /// # Panics
    /// If there is no word `index`; so do the others.
    fn fetch_add(&self, index: usize, value: u64) -> u64;

    /// Sets bits of a word. Returns the old value.
    fn fetch_or(&self, index: usize, bits: u64) -> u64;

    /// Replaces a word. Returns the old value.
    fn swap(&self, index: usize, value: u64) -> u64;

    /// A sequentially consistent fence.
    fn fence(&self);

    /// Sleeps until a [`ShareWords::wake`] of the word, or for `timeout`. Does not sleep if the
    /// word's low half is not `seen`. May return early.
    fn wait(&self, index: usize, seen: u32, timeout: Duration);

    /// Wakes all threads that sleep on a word.
    fn wake(&self, index: usize);
}

#[cfg(test)]
pub(crate) mod test {
    //! Words outside of segments.

    use super::{LoadWords, ShareWords};
    use loom::sync::{Condvar, Mutex};
    use std::sync::Arc;
    use std::sync::atomic::Ordering::{self, SeqCst};
    use std::time::Duration;

    /// For loom's threads: words that all of them write, and a model of the kernel's futex.
    #[derive(Clone)]
    pub(crate) struct LoomShared(Arc<(Vec<loom::sync::atomic::AtomicU64>, Mutex<()>, Condvar)>);

    impl LoomShared {
        /// `len` words, all zero.
        pub(crate) fn new(len: usize) -> Self {
            let words = (0..len).map(|_| loom::sync::atomic::AtomicU64::new(0)).collect();
            LoomShared(Arc::new((words, Mutex::new(()), Condvar::new())))
        }
    }

    impl LoadWords for LoomShared {
        fn len(&self) -> usize {
            self.0.0.len()
        }

        fn load(&self, index: usize, order: Ordering) -> u64 {
            self.0.0[index].load(order)
        }
    }

    impl ShareWords for LoomShared {
        fn fetch_add(&self, index: usize, value: u64) -> u64 {
            self.0.0[index].fetch_add(value, SeqCst)
        }

        fn fetch_or(&self, index: usize, bits: u64) -> u64 {
            self.0.0[index].fetch_or(bits, SeqCst)
        }

        fn swap(&self, index: usize, value: u64) -> u64 {
            self.0.0[index].swap(value, SeqCst)
        }

        fn fence(&self) {
            loom::sync::atomic::fence(SeqCst);
        }

        /// The kernel checks the word and puts the thread to sleep under one lock. The model never
        /// returns early, so a lost wake-up ends in a deadlock, which loom reports.
        fn wait(&self, index: usize, seen: u32, _timeout: Duration) {
            let mut lock = self.0.1.lock().expect("not poisoned");
            // A read-modify-write sees the newest value, as the kernel does.
            while self.0.0[index].fetch_add(0, SeqCst) as u32 == seen {
                lock = self.0.2.wait(lock).expect("not poisoned");
            }
        }

        fn wake(&self, _index: usize) {
            drop(self.0.1.lock().expect("not poisoned"));
            self.0.2.notify_all();
        }
    }
}
