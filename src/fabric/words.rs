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

    /// A function that writes one of the `N` words from `index` on, by its place among them.
    ///
    /// # Panics
    /// If there are no `N` words. The function panics if there is no such place.
    #[inline]
    fn writer<const N: usize>(&self, index: usize) -> impl Fn(usize, u64, Ordering) {
        assert!(index <= self.len() && N <= self.len() - index);
        move |place, value, order| {
            assert!(place < N);
            self.store(index + place, value, order);
        }
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
