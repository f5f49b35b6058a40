//! The sender's side of doorbells: rings for a peer that does not poll the link.

use super::barrier;
use super::doorbells::{OwnDoorbell, PeerDoorbells};
use super::idle::{self, DoorbellRef};
use crate::fabric::shm::memory::segment::PeerWords;
use std::sync::Arc;

/// Rings for one link. Clones are the same.
#[derive(Clone)]
pub(crate) struct Ringer {
    /// The peer's state line.
    line: PeerWords,
    doorbells: Arc<PeerDoorbells>,
    /// The port that counts the rings.
    port: Option<Arc<OwnDoorbell>>,
}

impl Ringer {
    /// A ringer for the link whose peer has this state line and these doorbells.
    pub(crate) fn new(line: PeerWords, doorbells: Arc<PeerDoorbells>) -> Self {
        Ringer { line, doorbells, port: None }
    }

    /// Lets a port count the rings.
    pub(crate) fn count_on(&mut self, port: &Arc<OwnDoorbell>) {
        self.port = Some(Arc::clone(port));
    }

    /// Rings if the peer has marked the link idle. To be called after each change that the peer's
    /// poll must see. Changes are slots, the number of consumed slots, credits, returned loans, and
    /// the end of this side.
    #[inline(always)] // on the short path
    pub(crate) fn ring_if_idle(&self) {
        if let Some(to) = idle::idle_doorbell(&self.line, barrier::light) {
            self.ring(to);
        }
    }

    #[cold]
    #[inline(never)]
    fn ring(&self, to: DoorbellRef) {
        self.doorbells.ring(to);
        if let Some(port) = &self.port {
            port.count_ring();
        }
    }
}
