//! The atomics of the standard library, or those of loom where loom checks this module.

#[cfg(tensorwire_loom)]
pub(crate) use loom::cell::UnsafeCell;
#[cfg(tensorwire_loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
#[cfg(not(tensorwire_loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// As loom's cell, which checks that no two threads are in `with_mut` at once.
#[cfg(not(tensorwire_loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(tensorwire_loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}

/// Yields to other threads under loom, hints a spin otherwise.
#[cfg(tensorwire_loom)]
pub(super) fn spin_loop() {
    loom::thread::yield_now();
}
#[cfg(not(tensorwire_loom))]
pub(super) fn spin_loop() {
    std::hint::spin_loop();
}
