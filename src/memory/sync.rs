//! The parts of this module's lock-free code come from the standard library. Under `--cfg
//! tensorwire_loom` they are those of loom, whose model checker runs every interleaving.

pub(super) use crate::sync::UnsafeCell;
#[cfg(tensorwire_loom)]
pub(super) use loom::sync::atomic::{
    AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(tensorwire_loom))]
pub(super) use std::sync::atomic::{
    AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// Lets other threads run.
pub(super) fn yield_now() {
    #[cfg(tensorwire_loom)]
    loom::thread::yield_now();
    #[cfg(not(tensorwire_loom))]
    std::thread::yield_now();
}
