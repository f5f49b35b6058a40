//! The standing requests of the edges whose peers belong to one poller.

use super::PeerIndex;
use crate::link::{EdgeKey, TensorKey};
use foldhash::HashMap;
use std::collections::BTreeMap;

/// An edge whose window is wide from the start.
#[derive(Debug)]
pub struct StandingWindow {
    pub peer: PeerIndex,
    pub key: TensorKey,
    pub window: u32,
}

/// The standing requests. Trainers have thousands, so a change looks at none of the others.
#[derive(Default)]
pub struct StandingWindows {
    /// By id, which is the order of their begins.
    all: BTreeMap<u64, StandingWindow>,
    /// Standing requests of each edge that has any: one for each sequence.
    of_edge: HashMap<(PeerIndex, EdgeKey), usize>,
}

impl StandingWindows {
    /// Adds a standing request with a new id.
    pub fn begin(&mut self, id: u64, standing: StandingWindow) {
        *self.of_edge.entry((standing.peer, standing.key.edge.clone())).or_default() += 1;
        self.all.insert(id, standing);
    }

    pub fn get(&self, id: u64) -> Option<&StandingWindow> {
        self.all.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut StandingWindow> {
        self.all.get_mut(&id)
    }

    /// Those of the edges from a peer.
    pub fn from(&self, peer: PeerIndex) -> impl Iterator<Item = &StandingWindow> {
        self.all.values().filter(move |standing| standing.peer == peer)
    }

    /// Removes a standing request. Returns it, and whether its edge has no other.
    pub fn end(&mut self, id: u64) -> Option<(StandingWindow, bool)> {
        let ended = self.all.remove(&id)?;
        let edge = (ended.peer, ended.key.edge.clone());
        let left = self.of_edge.get_mut(&edge).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            self.of_edge.remove(&edge);
        }
        Some((ended, left == 0))
    }
}
