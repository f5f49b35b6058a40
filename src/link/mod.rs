//! One link: a peer on a fabric, with messages under credits, and tensors that travel by them, by
//! loans and by writes.
//!
//! [`Links`] holds the links of one poller and the port that they complete on. It turns completions
//! into [`LinkEvent`]s for the layer above, and calls of that layer into operations. Decisions of
//! the exchange are made by the machines of [`crate::protocol`].
//!
//! Code in this module may not block, read a clock, look up a key or call user code.

mod control;
mod handler;
mod link_table;
mod links;
#[cfg(test)]
mod tests;
pub mod windows;

pub use handler::Handler;
pub use links::{LinkIdentity, LinkSettings, Links};

use crate::fabric::{LinkFailure, LinkId};
use crate::memory::{PoolError, Tensor, TensorMut};
use crate::telemetry::FlightRecord;
use crate::wire::message::Placement;
use crate::wire::{EdgeName, Status, TensorMeta};
use std::sync::Arc;

/// The name of an edge without incarnations and without its step. In tables the keys have the order
/// of their hashes, so that a search compares few names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EdgeKey {
    /// Source device, destination device and edge name.
    pub name: Arc<EdgeName>,
    /// Number of the loop, 0 outside of loops.
    pub frame: u64,
    /// Pass of the loop, from 0.
    pub iteration: u64,
}

impl EdgeKey {
    /// Whether the other key has the same name in memory, the same frame and the same iteration.
    #[inline]
    pub fn is(&self, other: &EdgeKey) -> bool {
        let EdgeKey { name, frame, iteration } = other;
        Arc::ptr_eq(&self.name, name) && self.frame == *frame && self.iteration == *iteration
    }
}

impl Ord for EdgeKey {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let place = |key: &EdgeKey| (key.name.hash_of_names(), key.frame, key.iteration);
        place(self).cmp(&place(other)).then_with(|| self.name.cmp(&other.name))
    }
}

impl PartialOrd for EdgeKey {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The name of a tensor without incarnations. Tables are keyed by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorKey {
    /// Where the tensor goes.
    pub edge: EdgeKey,
    /// Step id.
    pub step: u64,
}

/// A [`TensorKey`] whose edge is not counted.
#[derive(Clone, Copy, Debug)]
pub struct TensorKeyRef<'a> {
    /// Where the tensor goes.
    pub edge: &'a EdgeKey,
    /// Step id.
    pub step: u64,
}

impl TensorKeyRef<'_> {
    /// The same key, with an edge of its own.
    pub fn to_key(self) -> TensorKey {
        TensorKey { edge: self.edge.clone(), step: self.step }
    }
}

impl TensorKey {
    /// The same key, borrowed.
    #[inline]
    pub fn borrowed(&self) -> TensorKeyRef<'_> {
        TensorKeyRef { edge: &self.edge, step: self.step }
    }
}

impl std::fmt::Display for TensorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let EdgeKey { name, frame, iteration } = &self.edge;
        write!(f, "{name} {frame}:{iteration} of step {}", self.step)
    }
}

/// A value to send.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::{DType, Value};
/// let edges = [node.edge_to("worker", 0, "then")?, node.edge_to("worker", 0, "else")?];
/// // Of two branches one was taken.
/// let values = [Value::from(node.tensor(DType::F32, &[4])?.freeze()), Value::Dead];
/// node.step(1)?.send_all(edges.iter().zip(values))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Value {
    /// Elements, or the serialised form.
    Tensor(Tensor),
    /// A dead value: that of a branch not taken.
    Dead,
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Self {
        Value::Tensor(tensor)
    }
}

impl Value {
    /// The tensor; `None` for a dead value.
    #[inline]
    pub(crate) fn into_tensor(self) -> Option<Tensor> {
        match self {
            Value::Tensor(tensor) => Some(tensor),
            Value::Dead => None,
        }
    }

    /// The value that [`Value::into_tensor`] was called on.
    #[inline]
    pub(crate) fn of_tensor(tensor: Option<Tensor>) -> Self {
        tensor.map_or(Value::Dead, Value::Tensor)
    }
}

/// The placement of a tensor (specification 2.3).
pub fn placement_of(tensor: &Tensor) -> Placement {
    match () {
        () if tensor.is_in_pool() => Placement::POOL,
        () if tensor.is_lent() => Placement::BORROWED,
        () => Placement::HEAP,
    }
}

/// The placement of a tensor that can be written.
pub fn placement_of_mut(tensor: &TensorMut) -> Placement {
    if tensor.is_in_pool() { Placement::POOL } else { Placement::HEAP }
}

/// How much the links of a poller have to do, for tests that wait until nothing is left.
#[cfg(any(test, feature = "sim"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Destinations that peers may write to.
    pub landings: usize,
    /// Messages and writes that wait for credits or room in a queue.
    pub backlog: usize,
    /// Tensors on their way to a peer.
    pub leaving: usize,
}

/// Where a receive wants its tensor.
#[derive(Debug)]
pub enum Destination {
    /// In a tensor of the pool, which the link allocates.
    Alloc,
    /// Borrowed from the peer if the fabric can, otherwise as `Alloc`.
    Borrow,
    /// In this tensor.
    Into(TensorMut),
}

/// What a receive got.
#[derive(Debug)]
pub enum Received {
    /// In memory of this process, or borrowed from the peer.
    Tensor(Tensor),
    /// The given tensor, filled.
    Into(TensorMut),
    /// A dead value, with the given tensor untouched.
    Dead(Option<TensorMut>),
}

/// A receive of the thread that holds the poller. The value is written in place: a return through
/// all layers would copy it in each.
#[derive(Debug)]
pub enum DirectReceive {
    /// Wants a tensor.
    Waiting(Destination),
    /// Has got it. The second field tells where it lay at the sender.
    Received(Received, Placement),
}

impl DirectReceive {
    /// The destination of a receive that still waits. The receive itself is of no use any more.
    pub fn take_destination(&mut self) -> Option<Destination> {
        match std::mem::replace(self, DirectReceive::Waiting(Destination::Alloc)) {
            DirectReceive::Waiting(destination) => Some(destination),
            DirectReceive::Received(..) => None,
        }
    }
}

/// A value whose checksum is not the sender's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// Length of the value in bytes.
    pub bytes: u64,
    /// The sender's checksum.
    pub sent: u64,
    /// The checksum of the received bytes.
    pub actual: u64,
}

/// Why a receive ended without a value.
#[derive(Debug)]
pub enum ReceiveError {
    /// The sender failed to send the value, or the step has ended there.
    Remote(Status),
    /// The pool had no room for the value. The value is in line again.
    NoRoom(PoolError),
    /// The link has no grant left. The value is in line again.
    NoGrant {
        /// Grants that the link can have at a time.
        limit: u32,
    },
    /// The value is longer than the longest grant of the link. The value is in line again.
    TooLong {
        /// Bytes of the longest grant.
        limit: u64,
    },
    /// The value was corrupted on its way, and is lost.
    Corrupted(Corruption),
    /// The value does not fit the given tensor. The value is in line again.
    ShapeMismatch {
        /// The meta-data of the value.
        sent: Box<TensorMeta>,
        /// The meta-data of the given tensor.
        given: Box<TensorMeta>,
    },
}

/// An event for the layer above.
#[derive(Debug)]
pub enum LinkEvent {
    /// A new link works in both directions.
    Up {
        /// Id at the port of this side.
        link: LinkId,
    },
    /// A link is gone.
    Down {
        /// Id at the port of this side.
        link: LinkId,
        /// The reason.
        failure: LinkFailure,
        /// Its flight records, and how many older ones there were.
        records: (Vec<FlightRecord>, u64),
    },
    /// A poll could not post all that waits in the send queue of a link.
    Backlogged,
}
