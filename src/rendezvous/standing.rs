//! [`Standing`]: requests for steps that have not begun.

use super::context::Context;
use super::edge::{Edge, EdgeEnd};
use super::sequence::Sequence;
use crate::link::TensorKey;
use crate::matching::{Error, PeerIndex, StandingChange};
use crate::wire::message::MAX_STANDING_STEPS;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An edge whose tensors are requested before their steps begin, for as long as this handle exists.
///
/// A trainer receives the same edges in each step. One message tells the sender the destinations of
/// many steps, and the sender writes each tensor the moment it is produced. In steady state a
/// tensor is one one-sided write, and `window` steps cost two control messages. Receives stay as
/// they are: the receive of a step takes the value of its standing request. The first receive gives
/// the element type and the size of the tensors. No standing request is sent before it.
///
/// ```
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let node = tensorwire::internals::doc_node();
/// let sequence = node.sequence(1 << 40);
/// let edge = node.edge_to("worker", 0, "weights")?;
/// let standing = node.standing(&edge, sequence, 16)?;
/// for n in 0..3 {
///     let step = node.step(sequence.step(n))?;
///     step.send(&edge, node.tensor(DType::F32, &[4])?.freeze())?;
///     step.recv(&edge, Duration::from_secs(1))?;
///     step.cleanup();
/// }
/// drop(standing);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Costs
///
/// The destinations of up to `window` coming steps are allocated. They take at most a quarter of
/// the pool for all edges, in equal parts for the edges of each poller. The requests count among
/// `max_requests`, of which the standing requests of one peer take half at most. Where all edges
/// together would need more, their windows are shorter. The counter `standing_steps_missed` counts
/// steps that began without a standing request for want of space; they are received as usual.
/// Messages for windows of more than 22 steps or so travel in fragments, which take more than one
/// control slot.
///
/// # Shapes
///
/// Tensors may change their shape. Both ends remember the last four shapes. A tensor of one of
/// these shapes that is no longer than the longest of them comes as before. One of a new shape that
/// is no longer costs one message more. A longer tensor is announced and requested again, as
/// without a standing request. So is each tensor that was requested before the change was known: at
/// most one and a half windows of them.
///
/// # Ends
///
/// Skipped steps must be [cleaned up](crate::Node::cleanup) like others: until then their
/// destinations are kept. When a peer is lost and comes back, its edges are requested again.
/// Dropping the handle frees the destinations that no receive has taken. A value that has come is
/// for the next receive.
#[must_use = "dropping it ends it"]
pub struct Standing {
    context: Arc<Context>,
    /// The key of the edge, at the first step of the sequence.
    key: TensorKey,
    id: u64,
    /// The sender; `None` for an edge within the process, which needs no request.
    peer: Option<PeerIndex>,
}

impl Context {
    /// See [`Node::standing`](crate::Node::standing).
    pub fn standing(
        self: &Arc<Self>,
        edge: &Edge,
        sequence: Sequence,
        window: u32,
    ) -> Result<Standing, Error> {
        self.check_usable()?;
        self.check_destination(edge)?;
        check_window(window)?;
        let peer = match edge.source {
            EdgeEnd::Here => None,
            EdgeEnd::Peer(peer) => Some(peer),
        };
        let key = edge.key(sequence.step(0).get());
        if !self.tables().standing.insert(key.clone()) {
            return Err(Error::StandingExists { edge: edge.to_string() });
        }
        let id = self.next_call.fetch_add(1, Ordering::Relaxed);
        let standing = Standing { context: self.clone(), key: key.clone(), id, peer };
        if let Some(peer) = peer {
            let borrow = self.settings.borrow;
            standing.tell(StandingChange::Begun { id, peer, key, window, borrow });
        }
        Ok(standing)
    }
}

impl Standing {
    /// Changes the number of coming steps that are requested: 0 to 256. Requests that were made
    /// stay.
    ///
    /// # Errors
    /// If the window is too long, or the node has stopped.
    pub fn set_window(&self, window: u32) -> Result<(), Error> {
        self.context.check_usable()?;
        check_window(window)?;
        self.tell(StandingChange::Window { id: self.id, window });
        Ok(())
    }

    fn tell(&self, change: StandingChange) {
        if let Some(peer) = self.peer {
            self.context.paths.of(peer).standing(change);
        }
    }
}

fn check_window(window: u32) -> Result<(), Error> {
    const MAX: u32 = MAX_STANDING_STEPS as u32;
    if window > MAX { Err(Error::WindowTooLong { window, max: MAX }) } else { Ok(()) }
}

impl Drop for Standing {
    fn drop(&mut self) {
        if self.context.check_home().is_err() {
            return;
        }
        // In this order: a new `Standing` of the edge reaches the poller after the end of this one.
        self.tell(StandingChange::Ended { id: self.id });
        self.context.tables().standing.remove(&self.key);
    }
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standing").field("first", &self.key).finish_non_exhaustive()
    }
}
