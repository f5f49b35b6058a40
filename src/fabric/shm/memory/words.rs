//! Shared memory as numbered 64-bit words, behind two small traits.
//!
//! The ring and the lease table are written over these traits, so that the same code runs on a
//! mapped segment and, in the loom tests, on loom's atomics. What a peer owns is only
//! [`LoadWords`]: there is no way to write to it, in the types as in the page tables. What several
//! processes write is [`ShareWords`]d.

use std::sync::atomic::Ordering;
use std::time::Duration;

/// Words that this process may read.
pub(crate) trait LoadWords {
    /// How many there are.
    fn len(&self) -> usize;

    /// Reads one.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn load(&self, index: usize, order: Ordering) -> u64;
}

/// Words that this process, and nobody else, may write.
pub(crate) trait StoreWords: LoadWords {
    /// Writes one.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn store(&self, index: usize, value: u64, order: Ordering);

    /// Asks for the cache line of one, which is about to be written. A hint: it may do nothing.
    fn prefetch(&self, index: usize);
}

/// Words that this process and others write. Each change is sequentially consistent.
pub(crate) trait ShareWords: LoadWords {
    /// Adds to one, modulo 2^64. Returns what it was.
    ///
    /// # Panics
    /// If there is no word `index`; so do the others.
    fn fetch_add(&self, index: usize, value: u64) -> u64;

    /// Sets bits of one. Returns what it was.
    fn fetch_or(&self, index: usize, bits: u64) -> u64;

    /// Puts a value into one. Returns what it was.
    fn swap(&self, index: usize, value: u64) -> u64;

    /// Orders what this thread did before against what it does after, as threads see it that do the
    /// same.
    fn fence(&self);

    /// Sleeps until a [`ShareWords::wake`] of the word, or for `timeout`; not at all if its low
    /// endpoint is not `seen`. May return early.
    fn wait(&self, index: usize, seen: u32, timeout: Duration);

    /// Wakes all who sleep on a word.
    fn wake(&self, index: usize);
}

#[cfg(test)]
pub(crate) mod test {
    //! Words that are not in a segment.

    use super::{LoadWords, ShareWords, StoreWords};
    use loom::sync::{Condvar, Mutex};
    use std::sync::Arc;
    use std::sync::atomic::Ordering::{self, SeqCst};
    use std::time::Duration;

    macro_rules! words {
        ($(#[$doc:meta])* $name:ident, $atomic:ty) => {
            $(#[$doc])*
            #[derive(Clone)]
            pub(crate) struct $name(Arc<Vec<$atomic>>);

            impl $name {
                /// `len` words, all zero.
                pub(crate) fn new(len: usize) -> Self {
                    $name(Arc::new((0..len).map(|_| <$atomic>::new(0)).collect()))
                }
            }

            impl LoadWords for $name {
                fn len(&self) -> usize {
                    self.0.len()
                }

                fn load(&self, index: usize, order: Ordering) -> u64 {
                    self.0[index].load(order)
                }
            }

            impl StoreWords for $name {
                fn store(&self, index: usize, value: u64, order: Ordering) {
                    self.0[index].store(value, order);
                }

                fn prefetch(&self, _index: usize) {}
            }
        };
    }

    words! {
        /// For tests of one thread.
        HeapWords, std::sync::atomic::AtomicU64
    }
    words! {
        /// For loom's threads: only inside a loom model.
        LoomWords, loom::sync::atomic::AtomicU64
    }

    /// For loom's threads: words that all of them write, and a kernel in which they sleep on these.
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

        /// The kernel looks at the word and puts the thread to sleep under one lock. It never ends
        /// early here, so a wake-up that is lost ends in a deadlock, which loom reports.
        fn wait(&self, index: usize, seen: u32, _timeout: Duration) {
            let mut lock = self.0.1.lock().expect("not poisoned");
            // By a change, as that sees the newest value, and the kernel does.
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
