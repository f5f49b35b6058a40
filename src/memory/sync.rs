//! The atomics that this room's own lock-free code is written over: the standard ones, or loom's under
//! `--cfg loom`, so that its model checker can run every interleaving.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
