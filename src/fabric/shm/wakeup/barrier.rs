//! An asymmetric barrier: one side pays for both.
//!
//! Two threads that each store and then read what the other stores need a barrier between the two
//! steps. Otherwise each may miss the other's store. Senders do this for every message, pollers
//! only when they mark links idle. Senders therefore have no barrier instruction ([`light`]).
//! Pollers let the kernel make one in every running thread ([`heavy`]: `membarrier(2)`), in all
//! processes that have registered ([`join`]).

use rustix::thread::{MembarrierCommand, MembarrierQuery, membarrier, membarrier_query};
use std::sync::atomic::{Ordering, compiler_fence};

/// Registers this process for the barriers of others. `false` if the kernel has no barriers for
/// several processes: a store may then be seen late, and a sleeper must look again soon.
pub(crate) fn join() -> bool {
    let needed = MembarrierQuery::GLOBAL_EXPEDITED | MembarrierQuery::REGISTER_GLOBAL_EXPEDITED;
    membarrier_query().contains(needed) && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
}

/// The sender's part: keeps only the compiler from reordering.
#[inline]
pub(crate) fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// The poller's part: a system call. Returns whether it was made.
pub(crate) fn heavy() -> bool {
    std::sync::atomic::fence(Ordering::SeqCst); // orders this thread, whatever the kernel returns
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}
