//! The sending side of doorbells: rings the peer's if it does not look at the link.

use super::cold::{self, Bellpull};
use super::doorbells::PeerDoorbells;
use super::fence;
use super::segment::PeerWords;
use std::sync::Arc;

/// What rings for one link. Clones are the same.
#[derive(Clone)]
pub(super) struct Announcer {
    /// The peer's state line.
    line: PeerWords,
    bells: Arc<PeerDoorbells>,
}

impl Announcer {
    /// For the link whose peer has this state line and these doorbells.
    pub(super) fn new(line: PeerWords, bells: Arc<PeerDoorbells>) -> Self {
        Announcer { line, bells }
    }

    /// Called after anything was put where the peer's poll finds it, or where it lets go on what waits there: slots,
    /// how far they were taken, credits, loans given back, this side's leaving.
    #[inline]
    pub(super) fn announce(&self) {
        if let Some(pull) = cold::marked(&self.line, fence::light) {
            self.ring(pull);
        }
    }

    #[cold]
    #[inline(never)]
    fn ring(&self, pull: Bellpull) {
        self.bells.ring(pull);
    }
}
