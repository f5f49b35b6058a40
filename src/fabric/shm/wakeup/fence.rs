//! A barrier that one side pays for.
//!
//! Whoever stores first and then looks at what another stores needs a barrier between the two, and so does the other,
//! or each may miss what the other did. Senders do it for every message, pollers when they go to sleep; so
//! senders have no barrier ([`light`]), and pollers let the kernel make one in every thread that runs ([`heavy`]:
//! `membarrier(2)`), in all processes that have asked to take part ([`join`]).

use rustix::thread::{MembarrierCommand, MembarrierQuery, membarrier, membarrier_query};
use std::sync::atomic::{Ordering, compiler_fence};

/// Takes part in the barriers of others. `false` where the kernel has none for several processes: then a store may
/// be seen late, and whoever sleeps has to look again before long.
pub(crate) fn join() -> bool {
    let needed = MembarrierQuery::GLOBAL_EXPEDITED | MembarrierQuery::REGISTER_GLOBAL_EXPEDITED;
    membarrier_query().contains(needed) && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
}

/// The sender's endpoint: keeps only the compiler from changing the order.
#[inline]
pub(crate) fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// The poller's endpoint: a system call. Whether it was made.
pub(crate) fn heavy() -> bool {
    std::sync::atomic::fence(Ordering::SeqCst); // does for this thread, whatever the kernel says
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}
