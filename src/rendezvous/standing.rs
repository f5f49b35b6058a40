//! Receives that are known before their steps begin.

use super::Error;
use super::edge::{Edge, End};
use super::manager::{Rendezvous, Sequence, Shared};
use super::path::{PeerIndex, StandingChange};
use crate::wire::message::MAX_ARMED;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An edge whose tensors are asked for before their steps begin, as long as this is there.
///
/// A trainer receives the same edges each step. With this the sender knows it: it is told once for many steps where their
/// tensors go, and sends each the moment it is produced. In steady state a tensor is then one one-sided write and nothing
/// else, and `window` steps cost two control messages. Receives stay as they are: one of a step that was asked for
/// in advance takes what was asked for. The first one tells what the tensors are like; until it has, nothing more
/// is asked for.
///
/// What it costs: the destinations of up to `window` steps to come are allocated, though never more than a quarter of the
/// pool for all edges of a poller, and they count among `max_requests`, of which they take half at most. Steps for which
/// there is no room are received as without it.
///
/// Skipped steps must be [cleaned up](Rendezvous::cleanup) like others: until then what was asked for is kept for them.
/// When a peer is lost and comes back, its edges are asked for again. Dropping this gives back what no receive has taken;
/// a value that has come already is for whoever receives it.
#[must_use = "dropping it ends it"]
pub struct Standing {
    shared: Arc<Shared>,
    edge: Edge,
    id: u64,
    /// `None` for an edge within the process, of which nothing is ever asked.
    peer: Option<PeerIndex>,
}

impl Rendezvous {
    /// Asks for the tensors of an edge in advance: for those of up to `window` steps of a sequence that are still to come.
    /// 0 asks for none, until [`Standing::set_window`] says otherwise.
    ///
    /// # Errors
    /// If the edge does not end here, the window is too long, or the edge has a [`Standing`] already.
    pub fn standing(&self, edge: &Edge, sequence: Sequence, window: u32) -> Result<Standing, Error> {
        self.shared.check_usable()?;
        self.shared.check_destination(edge)?;
        check_window(window)?;
        let peer = match edge.source {
            End::Here => None,
            End::Peer(peer) => Some(peer),
        };
        if !self.shared.tables().standing.insert(edge.key(0)) {
            return Err(Error::StandsAlready { edge: edge.to_string() });
        }
        let id = self.shared.next_call.fetch_add(1, Ordering::Relaxed);
        let standing = Standing { shared: self.shared.clone(), edge: edge.clone(), id, peer };
        if let Some(peer) = peer {
            let (key, borrow) = (edge.key(sequence.step(0)), self.shared.settings.borrow);
            standing.tell(StandingChange::Begun { id, peer, key, window, borrow });
        }
        Ok(standing)
    }
}

impl Standing {
    /// Asks for so many steps in advance from now on. What was asked for already stays.
    ///
    /// # Errors
    /// If the window is too long, or the node can be used no more.
    pub fn set_window(&self, window: u32) -> Result<(), Error> {
        self.shared.check_usable()?;
        check_window(window)?;
        self.tell(StandingChange::Window { id: self.id, window });
        Ok(())
    }

    fn tell(&self, change: StandingChange) {
        if let Some(peer) = self.peer {
            self.shared.paths.of(peer).standing(change);
        }
    }
}

fn check_window(window: u32) -> Result<(), Error> {
    if window as usize <= MAX_ARMED {
        return Ok(());
    }
    Err(Error::ResourceExhausted {
        what: "the number of steps to ask for in advance",
        limit: MAX_ARMED as u64,
        remedy: "ask for fewer: a window of 16 costs one control message in eight steps",
    })
}

impl Drop for Standing {
    fn drop(&mut self) {
        if self.shared.check_home().is_err() {
            return;
        }
        self.shared.tables().standing.remove(&self.edge.key(0));
        self.tell(StandingChange::Ended { id: self.id });
    }
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standing").field("edge", &self.edge).finish_non_exhaustive()
    }
}
