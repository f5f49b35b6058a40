//! The parts of this module's lock-free code come from the standard library. Under `--cfg
//! tensorwire_loom` they are those of loom, whose model checker runs every interleaving.

#[cfg(tensorwire_loom)]
pub(super) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(tensorwire_loom))]
pub(super) use std::sync::atomic::{
    AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// As loom's cell, which checks that no two threads are in `with_mut` at once.
#[cfg(not(tensorwire_loom))]
#[derive(Debug)]
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(tensorwire_loom))]
impl<T> UnsafeCell<T> {
    pub(super) const fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(super) fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}

/// Lets other threads run.
pub(super) fn yield_now() {
    #[cfg(tensorwire_loom)]
    loom::thread::yield_now();
    #[cfg(not(tensorwire_loom))]
    std::thread::yield_now();
}
