//! Shared memory as numbered 64-bit words, behind two small traits.
//!
//! The ring and the lease table are written over these traits, so that the same code runs on a mapped
//! segment and, in the loom tests, on loom's atomics. What a peer owns is only [`Load`]: there is no way to
//! write to it, in the types as in the page tables.

use std::sync::atomic::Ordering;

/// Words that this process may read.
pub(super) trait Load {
    /// How many there are.
    fn len(&self) -> usize;

    /// Reads one.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn load(&self, index: usize, order: Ordering) -> u64;
}

/// Words that this process, and nobody else, may write.
pub(super) trait Store: Load {
    /// Writes one.
    ///
    /// # Panics
    /// If there is no word `index`.
    fn store(&self, index: usize, value: u64, order: Ordering);

    /// Asks for the cache line of one, which is about to be written. A hint: it may do nothing.
    fn prefetch(&self, index: usize);
}

#[cfg(test)]
pub(super) mod test {
    //! Words that are not in a segment.

    use super::{Load, Store};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    macro_rules! words {
        ($(#[$doc:meta])* $name:ident, $atomic:ty) => {
            $(#[$doc])*
            #[derive(Clone)]
            pub(in super::super) struct $name(Arc<Vec<$atomic>>);

            impl $name {
                /// `len` words, all zero.
                pub(in super::super) fn new(len: usize) -> Self {
                    $name(Arc::new((0..len).map(|_| <$atomic>::new(0)).collect()))
                }
            }

            impl Load for $name {
                fn len(&self) -> usize {
                    self.0.len()
                }

                fn load(&self, index: usize, order: Ordering) -> u64 {
                    self.0[index].load(order)
                }
            }

            impl Store for $name {
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
