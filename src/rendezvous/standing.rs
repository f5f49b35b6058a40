//! Receives that are known before their steps begin.

use super::Error;
use super::edge::{Edge, End};
use super::manager::{Rendezvous, Shared};
use super::path::{PeerIndex, StandingChange};
use super::sequence::Sequence;
use crate::link::TensorKey;
use crate::wire::message::MAX_STANDING_STEPS;
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
/// pool, in equal parts for the edges of each poller, and they count among `max_requests`, of which those of one peer take half at most. Where
/// all edges together would need more than that, their windows are as much shorter; with the counter `standing_steps_missed` it is
/// found out how often even so a step began for which there had been no room. Such steps are received as without it. Messages
/// for windows of more than some 22 steps travel in fragments, which take more than one slot of the queue.
///
/// Tensors may change their shape. Both ends remember the last four shapes, and a tensor that has one of these and is no longer
/// than the longest of them comes as before; one with a new shape that is no longer comes with one message more. A longer one is
/// told of and asked for again, as without this, and so is each one that was asked for before that was known: of these
/// there are at most one and a half windows.
///
/// Skipped steps must be [cleaned up](crate::Node::cleanup) like others: until then what was asked for is kept for them.
/// When a peer is lost and comes back, its edges are asked for again. Dropping this gives back what no receive has taken;
/// a value that has come already is for whoever receives it.
#[must_use = "dropping it ends it"]
pub struct Standing {
    shared: Arc<Shared>,
    /// The edge, with the first step of the sequence.
    key: TensorKey,
    id: u64,
    /// `None` for an edge within the process, of which nothing is ever asked.
    peer: Option<PeerIndex>,
}

impl Rendezvous {
    /// Asks for the tensors of an edge in advance: for those of up to `window` steps of a sequence that are still to come, 256 at
    /// most. 0 asks for none, until [`Standing::set_window`] says otherwise.
    ///
    /// # Errors
    /// If the edge does not end here, the window is too long, or the edge has a [`Standing`] for this sequence already.
    pub fn standing(&self, edge: &Edge, sequence: Sequence, window: u32) -> Result<Standing, Error> {
        self.shared.check_usable()?;
        self.shared.check_destination(edge)?;
        check_window(window)?;
        let peer = match edge.source {
            End::Here => None,
            End::Peer(peer) => Some(peer),
        };
        let key = edge.key(sequence.step(0).get());
        if !self.shared.tables().standing.insert(key.clone()) {
            return Err(Error::StandingExists { edge: edge.to_string() });
        }
        let id = self.shared.next_call.fetch_add(1, Ordering::Relaxed);
        let standing = Standing { shared: self.shared.clone(), key: key.clone(), id, peer };
        if let Some(peer) = peer {
            let borrow = self.shared.settings.borrow;
            standing.tell(StandingChange::Begun { id, peer, key, window, borrow });
        }
        Ok(standing)
    }
}

impl Standing {
    /// Asks for so many steps in advance from now on: 0 to 256. What was asked for already stays.
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
    const MAX: u32 = MAX_STANDING_STEPS as u32;
    if window > MAX { Err(Error::WindowTooLong { window, max: MAX }) } else { Ok(()) }
}

impl Drop for Standing {
    fn drop(&mut self) {
        if self.shared.check_home().is_err() {
            return;
        }
        // In this order, so that whoever makes it anew is heard later, if both are heard in order.
        self.tell(StandingChange::Ended { id: self.id });
        self.shared.tables().standing.remove(&self.key);
    }
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standing").field("first", &self.key).finish_non_exhaustive()
    }
}
