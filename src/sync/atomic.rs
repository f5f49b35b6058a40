//! The atomics of the standard library, or those of loom where loom checks this module.

#[cfg(tensorwire_loom)]
pub(super) use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(tensorwire_loom))]
pub(super) use std::sync::atomic::{AtomicU32, Ordering};

/// Yields to other threads under loom, hints a spin otherwise.
#[cfg(tensorwire_loom)]
pub(super) fn spin_loop() {
    loom::thread::yield_now();
}
#[cfg(not(tensorwire_loom))]
pub(super) fn spin_loop() {
    std::hint::spin_loop();
}
