//! Fences of which the frequent side costs nothing.
//!
//! Two sides that store one word each, and then load the other's, need a fence in between. The rare
//! side pays for both: the kernel makes a barrier in every running thread of the process
//! (`membarrier(2)`). The frequent side then only keeps the compiler from reordering. Where the
//! kernel refuses, both sides have a fence.

#[cfg(tensorwire_loom)]
use loom::sync::atomic::{Ordering, fence};
#[cfg(not(tensorwire_loom))]
use rustix::thread::{MembarrierCommand, MembarrierQuery, membarrier, membarrier_query};
#[cfg(not(tensorwire_loom))]
use std::sync::atomic::{Ordering, fence};

/// Registers this process for barriers by the kernel. `false` if it refuses.
#[cfg(not(tensorwire_loom))]
pub(crate) fn register_membarrier() -> bool {
    let needed = MembarrierQuery::PRIVATE_EXPEDITED | MembarrierQuery::REGISTER_PRIVATE_EXPEDITED;
    membarrier_query().contains(needed) && membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// The fence of the frequent side.
#[cfg(not(tensorwire_loom))]
#[inline]
pub(crate) fn light_fence(has_membarrier: bool) {
    if has_membarrier {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The fence of the rare side. `false` if the kernel refuses, though the process was registered: a
/// filter of system calls may have been set since.
#[cfg(not(tensorwire_loom))]
pub(crate) fn heavy_fence(has_membarrier: bool) -> bool {
    fence(Ordering::SeqCst);
    !has_membarrier || membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// Loom has no `membarrier`: fences on both sides stand for it.
#[cfg(tensorwire_loom)]
pub(crate) fn register_membarrier() -> bool {
    true
}

#[cfg(tensorwire_loom)]
pub(crate) fn light_fence(_: bool) {
    fence(Ordering::SeqCst);
}

#[cfg(tensorwire_loom)]
pub(crate) fn heavy_fence(_: bool) -> bool {
    fence(Ordering::SeqCst);
    true
}
