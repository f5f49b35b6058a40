//! The atomics of this module's lock-free code: those of the standard library, or those of loom
//! under `--cfg tensorwire_loom`, whose model checker runs every interleaving.

#[cfg(tensorwire_loom)]
pub(super) use loom::sync::atomic::{AtomicUsize, Ordering, fence};
#[cfg(not(tensorwire_loom))]
pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
