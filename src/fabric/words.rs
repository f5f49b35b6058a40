//! Shared memory as numbered 64-bit words: those of [`crate::sync::words`], and words with one
//! writer.
//!
//! Rings and loan tables are generic over these traits. The same code runs on a mapped segment and,
//! in the loom tests, on loom's atomics.

use std::sync::atomic::Ordering;

pub(crate) use crate::sync::words::{LoadWords, ShareWords};

/// Words that only this process may write.
pub(crate) trait StoreWords: LoadWords {
    /// Writes a word.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn store(&self, index: usize, value: u64, order: Ordering);

    /// Writes `count` words behind word `index`, without an order among them. No more than `N`.
    /// Then writes that word itself, with release.
    ///
    /// # Panics
    /// If one of the words is missing. Perhaps also if there are no `N` words behind `index`.
    #[inline]
    fn publish<const N: usize>(&self, index: usize, first: u64, count: usize, word: impl Fn(usize) -> u64) {
        for k in 0..count.min(N) {
            self.store(index + 1 + k, word(k), Ordering::Relaxed);
        }
        self.store(index, first, Ordering::Release);
    }

    /// Fetches the cache line of a word that is about to be written. A hint, which may do nothing.
    fn prefetch(&self, index: usize);
}

#[cfg(test)]
pub(crate) mod test {
    //! Words outside of segments.

    use super::{LoadWords, StoreWords};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    pub(crate) use crate::sync::words::test::LoomShared;

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
}
