//! The atomics that this room's own lock-free code is written over: the standard ones, or loom's under
//! `--cfg tensorwire_loom`, so that its model checker can run every interleaving.

#[cfg(tensorwire_loom)]
pub(super) use loom::sync::atomic::{AtomicUsize, Ordering, fence};
#[cfg(not(tensorwire_loom))]
pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
