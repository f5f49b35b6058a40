//! Reclaims dead-peer regions: pools of dead processes of which something is still borrowed here.
//!
//! One borrowed tensor keeps the whole mapping of a dead process's pool, and so all of its memory.
//! A grace period after the death, the borrowed parts are copied, at the same addresses, and the
//! rest goes back to the system. The watcher's thread decides when, and another thread copies.
//! Borrowers notice nothing.
#![allow(unsafe_code)]
// Locks: when links end, on the watcher's thread, and on the thread that reclaims.
#![allow(clippy::disallowed_types)]

use super::borrowed::LoanTable;
use crate::fabric::{LoanLimiter, TICKS_PER_GRACE};
use crate::memory::{ForkGuard, PeerRegion, merge_spans};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::fstat;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The process of a peer: its pidfd and its id.
#[derive(Clone)]
pub(crate) struct PeerProcess {
    pub pidfd: Arc<OwnedFd>,
    /// 0 if the process is in another PID namespace.
    pub pid: u32,
}

impl PeerProcess {
    /// Whether the kernel reports that the process has ended. It can't write to its memory any more
    /// then.
    pub(crate) fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)) == Ok(1)
    }

    /// Whether both are one process. Before Linux 6.9 all processes of other PID namespaces are
    /// taken for one: their pidfds have one inode.
    pub(crate) fn is(&self, other: &PeerProcess) -> bool {
        let inode = |process: &PeerProcess| fstat(&process.pidfd).map(|file| (file.st_dev, file.st_ino));
        self.pid == other.pid && inode(self) == inode(other)
    }
}

/// A peer's region to which no link leads any more, and of which something is borrowed.
pub(crate) struct ReclaimCandidate {
    pub region: Weak<PeerRegion>,
    /// Every loan table that can hold a loan of the region.
    pub tables: Vec<Weak<LoanTable>>,
    pub process: PeerProcess,
    /// Ticks since the process was seen dead, or since the last attempt. The process is dead if
    /// this is not 0.
    dead_for: u64,
    has_failed: bool,
}

/// The candidates of a fabric, and how long their processes have been dead.
pub(crate) struct Reclaimer {
    list: Mutex<Vec<ReclaimCandidate>>,
    limiter: Arc<LoanLimiter>,
    /// In a forked child the regions belong to the parent.
    fork_guard: ForkGuard,
}

impl Reclaimer {
    /// No candidates.
    pub(crate) fn new(limiter: Arc<LoanLimiter>) -> Self {
        Reclaimer { list: Mutex::default(), limiter, fork_guard: ForkGuard::of_this_process() }
    }

    /// Adds a region. It is reclaimed if its process dies.
    pub(crate) fn add(&self, candidate: ReclaimCandidate) {
        if !self.fork_guard.in_child() {
            self.list().push(candidate);
        }
    }

    /// Counts a quarter of a grace period. Returns whether a region is due.
    pub(crate) fn tick(&self) -> bool {
        self.limiter.tick();
        let mut is_due = false;
        self.list().retain_mut(|candidate| {
            is_due |= candidate.age() > TICKS_PER_GRACE;
            candidate.region.strong_count() > 0
        });
        is_due
    }

    /// Reclaims the regions whose processes have been dead for a grace period. Blocks while their
    /// borrowed parts are copied.
    pub(crate) fn reclaim(&self) {
        self.reclaim_if(|candidate| candidate.dead_for > TICKS_PER_GRACE);
    }

    fn reclaim_if(&self, is_due: impl Fn(&ReclaimCandidate) -> bool) {
        // Copied without the lock, which a poller takes when it drops a link.
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
    /// The last chance to reclaim regions of dead processes.
    fn drop(&mut self) {
        if !self.fork_guard.in_child() {
            self.reclaim_if(|candidate| candidate.process.has_ended());
        }
    }
}

impl ReclaimCandidate {
    /// A candidate whose process may still live.
    pub(crate) fn new(region: Weak<PeerRegion>, tables: Vec<Weak<LoanTable>>, process: PeerProcess) -> Self {
        ReclaimCandidate { region, tables, process, dead_for: 0, has_failed: false }
    }

    /// Counts one tick. Returns for how many ticks the process has been dead.
    fn age(&mut self) -> u64 {
        if self.dead_for > 0 || self.process.has_ended() {
            self.dead_for += 1;
        }
        self.dead_for
    }

    /// Reclaims the region, whose process has ended. Returns `false` if that failed.
    fn try_reclaim(&mut self, limiter: &LoanLimiter) -> bool {
        let Some(region) = self.region.upgrade() else { return true };
        let mut spans = Vec::new();
        let tables = self.tables.iter().filter_map(Weak::upgrade);
        tables.for_each(|table| table.held_in(&region, &mut spans));
        let (pid, tensors) = (self.process.pid, spans.len() as u64);
        // Several loans may be of the same bytes.
        let (spans, bytes) = merge_spans(spans);
        // SAFETY: the process that sent it has ended. An honest one was its maker, and nobody else
        // can map it for writing (its seals). One that sent the region of another process lent
        // bytes that change under their readers at any time, before the copy as after it. A
        // candidate is made when the last `LazyRegion` of the region is gone. From then on nothing
        // is pulled from the region or borrowed of it. Earlier loans have their places in `tables`;
        // each loan keeps its table alive until its bytes are not read any more.
        match unsafe { region.relocate(&spans) } {
            Ok(()) => {
                limiter.relocated(tensors, bytes);
                tracing::info!(
                    pid,
                    tensors,
                    bytes,
                    "reclaimed a dead peer's pool: the borrowed parts were copied"
                );
                true
            }
            Err(error) => {
                limiter.relocation_failed();
                self.dead_for = 0;
                if !std::mem::replace(&mut self.has_failed, true) {
                    let what = "reclaiming a dead peer's pool failed, and will be tried again";
                    tracing::warn!(pid, tensors, bytes, %error, "{what}");
                }
                false
            }
        }
    }
}
