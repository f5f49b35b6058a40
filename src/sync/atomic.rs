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

    /// As `with_mut`, without a closure, which the compiler may turn into a call.
    #[inline]
    pub(crate) fn get_mut(&self) -> MutPtr<T> {
        MutPtr(self.0.get())
    }
}

/// A pointer as of loom, where no other thread may be in the cell until its drop.
#[cfg(not(tensorwire_loom))]
pub(crate) struct MutPtr<T>(*mut T);

#[cfg(not(tensorwire_loom))]
impl<T> MutPtr<T> {
    /// # Safety
    /// As for a dereference of the pointer that `with_mut` passes.
    #[inline]
    #[allow(unsafe_code, clippy::mut_from_ref)] // as loom's
    pub(crate) unsafe fn deref(&self) -> &mut T {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.0 }
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
