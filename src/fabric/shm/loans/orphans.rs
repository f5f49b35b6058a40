//! Loans that outlive their link.
//!
//! A link can end while the peer's process lives on and still reads what it was lent. To the
//! lender's caller the loan has failed, but the bytes must not change under the borrower. So the
//! tensor is kept here until the borrower gives it back, or has left the link without ever taking
//! the loan, or its process ends.
//!
//! When the lender's fabric goes first, the tensor is surrendered: its bytes are not used again as
//! long as its pool is there, and the pool goes when the program lets go of it. The borrower has
//! mapped the memory by itself, and nobody else can write to it then: the mapping that could is
//! gone, and the seals of the file let nobody make another.
#![allow(clippy::disallowed_types)] // tried, never waited for

use crate::fabric::shm::link::LinkLoans;
use crate::fabric::shm::liveness::ProcessWatch;
use crate::fabric::shm::memory::ring::TAIL;
use crate::fabric::shm::memory::segment::PeerWords;
use crate::fabric::shm::memory::state;
use crate::fabric::shm::memory::words::LoadWords;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

/// What is left of one link.
pub(crate) struct OrphanedLink {
    pub loans: LinkLoans,
    /// The peer's consumer line.
    pub line: PeerWords,
    pub peer_state: PeerWords,
    pub watch: ProcessWatch,
}

/// What is left of all links of a fabric.
#[derive(Default)]
pub(crate) struct OrphanedLoans {
    links: Mutex<Vec<OrphanedLink>>,
    count: AtomicUsize,
}

impl OrphanedLoans {
    /// Takes what is left of a link, if anything is.
    pub(crate) fn add(&self, mut link: OrphanedLink) {
        if !link.is_held() {
            return;
        }
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.push(link);
        self.count.store(links.len(), Ordering::Relaxed);
    }

    /// Lets go of what the peers no longer read. Without links it is one load; it waits for nobody.
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
    /// Lets go of what the peer no longer reads; whether anything is left.
    fn is_held(&mut self) -> bool {
        if self.watch.is_dead() {
            return false;
        }
        self.loans.returned(usize::MAX, drop);
        // In this order: a peer that has left has said before how many slots it took.
        if state::of_peer(&self.peer_state).is_some() {
            let line = &self.line;
            self.loans.retain(|loan| {
                let tail = line.load(TAIL, Ordering::Acquire) as u32;
                // Kept if it was taken: its position is before the tail.
                (loan.position as u32).wrapping_sub(tail) > u32::MAX / 2
            });
        }
        !self.loans.is_empty()
    }
}

impl Drop for OrphanedLoans {
    /// The fabric is gone, and nobody will learn what peers give back. But the pool may stay, with
    /// the program's own tensors and handles: what a living peer still reads is not used again in
    /// it. That does not keep the pool.
    fn drop(&mut self) {
        self.sweep();
        let links = self.links.get_mut().unwrap_or_else(PoisonError::into_inner);
        for link in links {
            link.loans.take_all().for_each(|loan| loan.tensor.leak());
        }
    }
}
