//! The sending side of doorbells: rings the peer's if it does not look at the link.

use super::doorbells::{OwnDoorbell, PeerDoorbells};
use super::fence;
use super::idle::{self, DoorbellRef};
use crate::fabric::shm::memory::segment::PeerWords;
use std::sync::Arc;

/// What rings for one link. Clones are the same.
#[derive(Clone)]
pub(crate) struct Ringer {
    /// The peer's state line.
    line: PeerWords,
    bells: Arc<PeerDoorbells>,
    /// Of the port that posts: where it is counted how often it rang.
    by: Option<Arc<OwnDoorbell>>,
}

impl Ringer {
    /// For the link whose peer has this state line and these doorbells.
    pub(crate) fn new(line: PeerWords, bells: Arc<PeerDoorbells>) -> Self {
        Ringer { line, bells, by: None }
    }

    /// Has a port count how often this rings.
    pub(crate) fn count_on(&mut self, port: &Arc<OwnDoorbell>) {
        self.by = Some(Arc::clone(port));
    }

    /// Called after anything was put where the peer's poll finds it, or where it lets go on what
    /// waits there: slots, how far they were taken, credits, loans given back, this side's leaving.
    #[inline]
    pub(crate) fn ring_if_idle(&self) {
        if let Some(pull) = idle::idle_doorbell(&self.line, fence::light) {
            self.ring(pull);
        }
    }

    #[cold]
    #[inline(never)]
    fn ring(&self, pull: DoorbellRef) {
        self.bells.ring(pull);
        if let Some(by) = &self.by {
            by.count_ring();
        }
    }
}
