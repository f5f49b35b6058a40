//! What dead peers have left: pools of which something is still borrowed here.
//!
//! One borrowed tensor keeps the whole mapping of a dead process's pool, and with it all of that
//! memory. So a grace period after the death what is still borrowed is copied, at the same
//! addresses, and the rest goes back to the system. The watcher's thread tells when it is time, and
//! a thread of its own does it; holders notice nothing.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types)] // when links end, on the watcher's thread, and on the one that settles

use super::borrowed::LoanTable;
use crate::fabric::{LoanLimiter, TICKS_PER_GRACE};
use crate::memory::{ForkGuard, PeerRegion, merge_spans};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A peer's process: its pidfd and its id.
#[derive(Clone)]
pub(crate) struct PeerProcess {
    pub pidfd: Arc<OwnedFd>,
    pub pid: u32,
}

impl PeerProcess {
    /// Whether it has ended, as the kernel says. Its memory can't be written by it any more then.
    fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)) == Ok(1)
    }
}

/// A region of a peer to which no link leads any more, and of which something is borrowed.
pub(crate) struct ReclaimCandidate {
    pub region: Weak<PeerRegion>,
    /// Every table in which a borrowed part of the region can have its place.
    pub tables: Vec<Weak<LoanTable>>,
    pub process: PeerProcess,
    /// Ticks since its process was seen dead, or since the last attempt; it is dead if there are
    /// any.
    dead_for: u64,
    has_failed: bool,
}

/// All of a fabric.
pub(crate) struct Reclaimer {
    list: Mutex<Vec<ReclaimCandidate>>,
    limiter: Arc<LoanLimiter>,
    /// In a forked child they are the parent's.
    fork_guard: ForkGuard,
}

impl Reclaimer {
    /// None yet.
    pub(crate) fn new(limiter: Arc<LoanLimiter>) -> Self {
        Reclaimer { list: Mutex::default(), limiter, fork_guard: ForkGuard::new() }
    }

    /// Sees to what is left, if its process dies.
    pub(crate) fn add(&self, candidate: ReclaimCandidate) {
        if !self.fork_guard.in_child() {
            self.list().push(candidate);
        }
    }

    /// A part of a grace period has passed. Returns whether there is something to reclaim.
    pub(crate) fn tick(&self) -> bool {
        self.limiter.tick();
        let mut is_due = false;
        self.list().retain_mut(|candidate| {
            is_due |= candidate.ages() > TICKS_PER_GRACE;
            candidate.region.strong_count() > 0
        });
        is_due
    }

    /// Settles what was left by those who have been dead for a grace period. Takes as long as it
    /// takes to copy that.
    pub(crate) fn reclaim(&self) {
        self.reclaim_if(|candidate| candidate.dead_for > TICKS_PER_GRACE);
    }

    fn reclaim_if(&self, is_due: impl Fn(&ReclaimCandidate) -> bool) {
        // Copied without the lock, as a poller that parts from a link takes it.
        let mut due: Vec<ReclaimCandidate> =
            self.list().extract_if(.., |candidate| is_due(candidate)).collect();
        due.retain_mut(|candidate| !candidate.try_reclaim(&self.limiter));
        self.list().append(&mut due);
    }

    fn list(&self) -> MutexGuard<'_, Vec<ReclaimCandidate>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reclaimer {
    /// Nobody sees to them later.
    fn drop(&mut self) {
        if !self.fork_guard.in_child() {
            self.reclaim_if(|candidate| candidate.process.has_ended());
        }
    }
}

impl ReclaimCandidate {
    /// One whose process may live.
    pub(crate) fn new(region: Weak<PeerRegion>, tables: Vec<Weak<LoanTable>>, process: PeerProcess) -> Self {
        ReclaimCandidate { region, tables, process, dead_for: 0, has_failed: false }
    }

    /// One tick more; for how many its process has been dead.
    fn ages(&mut self) -> u64 {
        if self.dead_for > 0 || self.process.has_ended() {
            self.dead_for += 1;
        }
        self.dead_for
    }

    /// Settles it, if that can be done now. Its process has ended.
    fn try_reclaim(&mut self, limiter: &LoanLimiter) -> bool {
        let Some(region) = self.region.upgrade() else { return true };
        let mut spans = Vec::new();
        let tables = self.tables.iter().filter_map(Weak::upgrade);
        tables.for_each(|table| table.held_in(&region, &mut spans));
        let (pid, tensors) = (self.process.pid, spans.len() as u64);
        // Several loans may be of the same bytes.
        let (spans, bytes) = merge_spans(spans);
        // SAFETY: its maker has ended, and nobody else can map it for writing (its seals).
        // Reclaimer are made when the last way to the region is gone, so nothing is pulled from it
        // or borrowed of it from then on. What was borrowed before has its place in one of
        // `tables`, which it keeps alive, until it is not read any more.
        match unsafe { region.relocate(&spans) } {
            Ok(()) => {
                limiter.relocated(tensors, bytes);
                tracing::info!(
                    pid,
                    tensors,
                    bytes,
                    "what is borrowed of a dead peer was copied out of its pool"
                );
                true
            }
            Err(error) => {
                limiter.relocation_failed();
                self.dead_for = 0;
                if !std::mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(pid, tensors, bytes, %error, "a dead peer's pool stays, as something of it is borrowed: it is tried again");
                }
                false
            }
        }
    }
}
