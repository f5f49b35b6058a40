//! [`Standing`]: edges whose tensors may come before their receives.

use super::context::Context;
use super::edge::{Edge, EdgeEnd};
use super::sequence::Sequence;
use crate::link::TensorKey;
use crate::matching::{CallId, Error, PeerIndex, StandingChange, WINDOWS};
use std::sync::Arc;

/// An edge whose tensors may be sent before their receives begin, for as long as this handle
/// exists.
///
/// A trainer receives the same edges in each step. The handle lets the sender of an edge send the
/// tensors of `window` coming steps without a message from the receiver. Receives stay as they are.
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
/// # Windows
///
/// Each edge has a window: the number of tensors that its sender may send before their receives. An
/// edge is announced to its sender with its first receive. Its window begins with 2 tensors and
/// grows to 64. The handle announces the edge at once, and makes the window as large as its own.
/// Windows beyond 64 tensors are for few edges: together they have 16,384 for each peer, and
/// further handles get a window of 64. In steady state a tensor is one record of the sender, and
/// the tensors of a window cost two messages of the receiver.
///
/// A tensor that has arrived stays in its sender's memory until a receive takes it. Only a tensor
/// of at most `small_tensor_bytes` takes a block of the receiver's pool. Over verbs the next large
/// tensor of the edge has a block, too. A window does not shrink:
/// neither [`Standing::set_window`] nor the end of the handle takes credit back.
///
/// Tensors may change their shape. Each shape that is new to a link costs one message, whichever
/// edge has it. Skipped steps must be [cleaned up](crate::Node::cleanup) like others. When a peer
/// is lost and comes back, its edges get their windows again. A value that has come is for the next
/// receive.
#[must_use = "dropping it ends it"]
pub struct Standing {
    context: Arc<Context>,
    /// The key of the edge, at the first step of the sequence.
    key: TensorKey,
    id: u64,
    /// The sender; `None` for an edge within the process, which needs no window.
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
            EdgeEnd::Here(_) => None,
            EdgeEnd::Peer(peer) => Some(peer),
        };
        let key = edge.key(sequence.step(0).get());
        if !self.with_tables(|tables| tables.standing.insert(key.clone())) {
            return Err(Error::StandingExists { edge: edge.to_string() });
        }
        let CallId(id) = CallId::take(1);
        let standing = Standing { context: self.clone(), key: key.clone(), id, peer };
        if let Some(peer) = peer {
            tell(self, Some(peer), StandingChange::Begun { id, peer, key, window });
        }
        Ok(standing)
    }
}

impl Standing {
    /// Changes the window: 0 to 256 coming steps. A window grows and does not shrink.
    ///
    /// # Errors
    /// If the window is too long, or the node has stopped.
    pub fn set_window(&self, window: u32) -> Result<(), Error> {
        self.context.check_usable()?;
        check_window(window)?;
        tell(&self.context, self.peer, StandingChange::Window { id: self.id, window });
        Ok(())
    }
}

fn tell(context: &Context, peer: Option<PeerIndex>, change: StandingChange) {
    if let Some(peer) = peer {
        context.paths.of(peer).standing(change);
    }
}

fn check_window(window: u32) -> Result<(), Error> {
    const MAX: u32 = WINDOWS.largest_window as u32;
    if window > MAX { Err(Error::WindowTooLong { window, max: MAX }) } else { Ok(()) }
}

impl Drop for Standing {
    fn drop(&mut self) {
        if self.context.check_home().is_err() {
            return;
        }
        let (context, key, id, peer) = (self.context.clone(), self.key.clone(), self.id, self.peer);
        self.context.outside_pollers(move || {
            // In this order: a new `Standing` of the edge reaches the poller after the end of this
            // one.
            tell(&context, peer, StandingChange::Ended { id });
            context.with_tables(|tables| tables.standing.remove(&key));
        });
    }
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standing").field("first", &self.key).finish_non_exhaustive()
    }
}
