//! One link: a peer on a fabric, with control messages under credits, routes, requests and grants.
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
mod receiving;
mod routes;
mod serving;
#[cfg(test)]
mod tests;
pub mod windows;

pub use handler::Handler;
pub use links::{LinkIdentity, LinkSettings, Links, RequestRefused, TensorProtocol};
pub(crate) use receiving::standing::{STANDING_POOL_SHARE, STANDING_SHARE};
pub use receiving::standing::{StandingCapacity, StandingPosted};
pub use receiving::stash::{RejectedValue, StashedValue};
pub(crate) use routes::announced::{RECENT_ARRIVALS, UNLENT_ARRIVALS};
pub(crate) use serving::serve::LOAN_SHARE;

use crate::fabric::{LinkFailure, LinkId};
use crate::memory::{PoolError, Tensor, TensorMut};
use crate::wire::message::{Placement, RequestId};
use crate::wire::{EdgeName, Status, TensorMeta};
use std::sync::Arc;

/// The name of a tensor without incarnations. Tables are keyed by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorKey {
    /// Source device, destination device and edge name.
    pub edge: Arc<EdgeName>,
    /// Step id.
    pub step: u64,
    /// Frame of the edge.
    pub frame: u64,
    /// Iteration of the edge.
    pub iteration: u64,
}

/// A [`TensorKey`] whose edge is not counted.
#[derive(Clone, Copy, Debug)]
pub struct TensorKeyRef<'a> {
    /// Source device, destination device and edge name.
    pub edge: &'a Arc<EdgeName>,
    /// Step id.
    pub step: u64,
    /// Frame of the edge.
    pub frame: u64,
    /// Iteration of the edge.
    pub iteration: u64,
}

impl TensorKeyRef<'_> {
    /// The same key, with an edge of its own.
    pub fn to_key(self) -> TensorKey {
        let TensorKeyRef { edge, step, frame, iteration } = self;
        TensorKey { edge: edge.clone(), step, frame, iteration }
    }
}

impl TensorKey {
    /// The same key, borrowed.
    #[inline]
    pub fn borrowed(&self) -> TensorKeyRef<'_> {
        let TensorKey { edge, step, frame, iteration } = self;
        TensorKeyRef { edge, step: *step, frame: *frame, iteration: *iteration }
    }
}

impl std::fmt::Display for TensorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}:{} of step {}", self.edge, self.frame, self.iteration, self.step)
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
    /// Requests of this side that the peers may still answer, cancelled and unclaimed standing ones
    /// included.
    pub requests: usize,
    /// The unclaimed standing requests among them.
    pub standing: usize,
    /// Requests of the peers that are not completely answered.
    pub peer_requests: usize,
    /// Routes with a request of this side.
    pub busy_routes: usize,
    /// Messages and writes that wait for credits or room in a queue.
    pub backlog: usize,
    /// Tensors on their way to a peer.
    pub leaving: usize,
    /// Values in the stash.
    pub stashed: usize,
    /// Keys with an unresolved receive: its waiter has left, and the outcome is not known.
    pub unresolved: usize,
}

/// Names a request of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerRequestId {
    /// The link that it came on.
    pub link: LinkId,
    /// Slot and generation at the peer.
    pub request: RequestId,
}

/// What became of a value that was matched with a request.
#[derive(Debug)]
pub enum ServeOutcome {
    /// The value was copied into its answer.
    Copied,
    /// The value is on its way. [`LinkEvent::SendComplete`] follows.
    Posted,
    /// The value is pinned until the re-request. [`LinkEvent::Resumed`] or [`LinkEvent::PutBack`]
    /// follows.
    Pinned,
    /// The value exceeds what the link carries in one write. The peer got an error.
    Refused,
    /// The request has ended. The value comes back.
    Gone(Value),
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

/// What to do with a request. The callback that decides may also take the waiter out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelDecision {
    /// The request continues.
    Keep,
    /// The request is cancelled. A waiter that is left in it gets its end later. If the waiter was
    /// taken out, a value that still comes is for the next receive of the key.
    Cancel,
    /// The request is cancelled, and a value that still comes is dropped: the step has ended.
    Abandon,
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

/// Why a request ended without a value.
#[derive(Debug)]
pub enum RequestError {
    /// The sender answered with an error.
    Remote(Status),
    /// The request was cancelled. A value, if there is one, is still with the sender.
    Cancelled,
    /// The pool had no room for the value. The value is in line again.
    NoRoom(PoolError),
    /// The link has no grant left. The value is in line again.
    NoGrant {
        /// Grants that the link can have at a time.
        limit: u32,
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

/// An event for the layer above. `C` is that layer's name for a waiter.
#[derive(Debug)]
pub enum LinkEvent<C> {
    /// A new link works in both directions.
    Up {
        /// Id at the port of this side.
        link: LinkId,
    },
    /// A link is gone, with all requests on it.
    Down {
        /// Id at the port of this side.
        link: LinkId,
        /// The reason.
        failure: LinkFailure,
        /// The waiters of the requests on it.
        waiters: Vec<C>,
    },
    /// A peer requests a tensor. Answer with [`Links::serve`] or [`Links::refuse`], now or later.
    Requested {
        /// Names the request in the answer.
        peer_request: PeerRequestId,
        /// As the receiver has named it: edge, incarnation and step.
        key: TensorKey,
        /// How long the peer waits, in ms; `u32::MAX` for ever.
        timeout_ms: u32,
        /// Whether it is a standing request.
        standing: bool,
    },
    /// A peer cancelled a request that was not answered yet.
    Withdrawn {
        /// Names the request in the answer.
        peer_request: PeerRequestId,
        /// As the receiver has named it: edge, incarnation and step.
        key: TensorKey,
    },
    /// A re-request has come, and the pinned value is on its way. [`LinkEvent::SendComplete`]
    /// follows.
    Resumed {
        /// Length of the value in bytes.
        bytes: u64,
    },
    /// A value has left this side for good: its memory may be reused.
    SendComplete,
    /// A matched value was not delivered, and takes its place in line again.
    PutBack {
        /// The key of the value.
        key: TensorKey,
        /// The tensor or dead value that was not delivered.
        value: Value,
        /// The place of the value in line.
        number: u64,
    },
    /// A value was not taken at the peer and is in the peer's stash. Its place in line comes back:
    /// the next request on this link is answered with [`Links::serve_stashed`].
    Returned {
        /// Id at the port of this side.
        link: LinkId,
        /// The key of the value.
        key: TensorKey,
        /// The id of the value in the peer's stash.
        stash_id: u32,
        /// The place of the value in line.
        number: u64,
    },
    /// A stashed value whose link is gone. It is for the next receive of the key.
    Orphaned {
        /// The key of the value.
        key: TensorKey,
        /// The tensor or dead value, as it arrived.
        value: StashedValue,
        /// The incarnation of the peer that sent it.
        incarnation: u64,
    },
    /// A receive got its value.
    Arrived {
        /// Given to the link with the request.
        waiter: C,
        /// The key of the value.
        key: TensorKey,
        /// The value.
        received: Received,
        /// The placement of the value at the sender.
        sender: Placement,
    },
    /// A request ended without a value.
    Failed {
        /// Given to the link with the request.
        waiter: C,
        /// As the receiver has named it: edge, incarnation and step.
        key: TensorKey,
        /// The reason.
        error: RequestError,
    },
}
