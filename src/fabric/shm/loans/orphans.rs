//! Orphaned loans: loans that outlive their link.
//!
//! A link can end while the peer's process lives on and still reads a borrowed tensor. The loan has
//! failed for the lender's caller, but the bytes must not change under the borrower.
//! [`OrphanedLoans`] holds the tensor until the borrower gives it back, has left the link without
//! taking the loan, or has died.
//!
//! If the lender's fabric ends first, the tensor is leaked: the pool does not reuse its bytes, and
//! ends when the program drops it. The borrower has a mapping of its own. Nobody can write to the
//! memory then: the writable mapping is gone, and the seals of the file forbid another.
#![allow(clippy::disallowed_types)] // waited for where links begin and end alone

use crate::fabric::shm::link::LinkLoans;
use crate::fabric::shm::loans::reclaim::PeerProcess;
use crate::fabric::shm::memory::ring::TAIL;
use crate::fabric::shm::memory::segment::PeerWords;
use crate::fabric::shm::memory::state;
use crate::fabric::words::LoadWords;
use crate::fabric::{FabricError, FabricKind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

/// Ended links of a process that may have loans out before another link with it is refused. Each
/// has a mapping and a descriptor, and takes time of each sweep.
pub(crate) const MAX_LINKS: usize = 64;

/// The outstanding loans of a link that has ended.
pub(crate) struct OrphanedLink {
    pub loans: LinkLoans,
    /// The peer is known to have taken all orders before this position.
    pub acked: u64,
    /// The peer's consumer line.
    pub line: PeerWords,
    pub peer_state: PeerWords,
    /// Asked at each sweep: the watcher's thread may end before the loans.
    pub process: PeerProcess,
}

/// The orphaned loans of a fabric.
#[derive(Default)]
pub(crate) struct OrphanedLoans {
    links: Mutex<Vec<OrphanedLink>>,
    count: AtomicUsize,
}

impl OrphanedLoans {
    /// Adds the loans of a link, if any is still held.
    pub(crate) fn add(&self, mut link: OrphanedLink) {
        if !link.is_held() {
            return;
        }
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.push(link);
        self.count.store(links.len(), Ordering::Relaxed);
    }

    /// Checks that a process has not kept what it was lent by too many links.
    ///
    /// # Errors
    /// If it has.
    pub(crate) fn check(&self, process: &PeerProcess) -> Result<(), FabricError> {
        self.sweep();
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if links.iter().filter(|link| link.process.is(process)).count() < MAX_LINKS {
            return Ok(());
        }
        let pid = process.pid;
        let why = format!(
            "process {pid} (0: one of another PID namespace) still has what {MAX_LINKS} links lent to \
             it before they ended: drop borrowed tensors, or start it again"
        );
        Err(FabricError::Peer { fabric: FabricKind::Shm, why })
    }

    /// Takes the peers of all ended links for dead.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn forget(&self) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.count.store(0, Ordering::Relaxed);
    }

    /// Drops tensors that no peer reads any more. Without loans it is one load; it never waits.
    pub(crate) fn sweep(&self) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut links = match self.links.try_lock() {
            Ok(links) => links,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        links.retain_mut(OrphanedLink::is_held);
        self.count.store(links.len(), Ordering::Relaxed);
    }
}

impl OrphanedLink {
    /// Drops tensors that the peer no longer reads. Returns whether any is left.
    fn is_held(&mut self) -> bool {
        self.loans.returned(usize::MAX, drop);
        // The state before the tail: a peer that has left has first published how many slots it
        // took.
        if state::of_peer(&self.peer_state).is_some() {
            let (line, acked) = (&self.line, self.acked);
            self.loans.retain(|loan| {
                let tail = line.load(TAIL, Ordering::Acquire) as u32;
                // Still lent if the peer took its slot.
                was_taken(loan.position, acked, tail)
            });
        }
        !self.loans.is_empty() && !self.process.has_ended()
    }
}

/// Whether the peer has taken the order at a position. `tail` is the number of all orders that it
/// has taken, modulo 2^32. Only positions from `acked` on are near enough to compare.
fn was_taken(position: u64, acked: u64, tail: u32) -> bool {
    position < acked || (position as u32).wrapping_sub(tail) > u32::MAX / 2
}

impl Drop for OrphanedLoans {
    /// The fabric ends, so give-backs can't be seen any more. The pool may live on with tensors and
    /// handles of the program, and must not reuse bytes that a living peer still reads. Leaked
    /// bytes do not keep the pool.
    fn drop(&mut self) {
        self.sweep();
        let links = self.links.get_mut().unwrap_or_else(PoisonError::into_inner);
        for link in links {
            link.loans.take_all().for_each(|loan| loan.tensor.leak());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_counts_as_taken_however_many_orders_followed_it() {
        let position = (1 << 32) - 5;
        for orders in [1, 100, 1 << 31, (1 << 31) + 1, 1 << 32, 1 << 40] {
            let acked = position + orders;
            assert!(was_taken(position, acked, acked as u32), "{orders}");
            // The peer took some more, of which this side did not hear.
            assert!(was_taken(acked + 3, acked, (acked + 4) as u32), "{orders}");
            assert!(!was_taken(acked + 4, acked, (acked + 4) as u32), "{orders}");
        }
    }
}
