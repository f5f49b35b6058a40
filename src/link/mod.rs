//! One peer on one fabric: control messages under credits, routes, the slot table of requests, grants.
//!
//! [`Links`] holds the links of one poller together with the port that they complete on. It turns completions
//! into [`LinkEvent`]s for the layer above, and that layer's calls into operations. It runs the machines of
//! [`crate::protocol`] and decides nothing that they can decide.
//!
//! What may not be done here: block, ask for the time, look a key up, call user code.

mod control;
mod link_table;
mod links;
mod receiving;
mod routes;
mod serving;
#[cfg(test)]
mod tests;

pub use links::{LinkIdentity, LinkSettings, Links, RequestRefused};
pub use receiving::standing::{StandingCapacity, StandingPosted};
pub use receiving::stash::{RejectedValue, StashedValue};

use crate::fabric::{LinkFailure, LinkId};
use crate::memory::{PoolError, Tensor, TensorMut};
use crate::wire::message::{Placement, RequestId};
use crate::wire::{EdgeName, Status, TensorMeta};
use std::sync::Arc;

/// A tensor's name without its incarnations: what a table is keyed by.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorKey {
    /// Source, destination, name.
    pub edge: Arc<EdgeName>,
    /// Step id.
    pub step: u64,
    /// Frame of the edge.
    pub frame: u64,
    /// Iteration of the edge.
    pub iteration: u64,
}

impl std::fmt::Display for TensorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}:{} of step {}", self.edge, self.frame, self.iteration, self.step)
    }
}

/// What a sender hands over.
#[derive(Clone, Debug)]
pub enum Value {
    /// A tensor.
    Tensor(Tensor),
    /// The value of a branch not taken.
    Dead,
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Self {
        Value::Tensor(tensor)
    }
}

/// Where a tensor lies (specification 2.3).
pub fn placement_of(tensor: &Tensor) -> Placement {
    match (tensor.is_lent(), tensor.span().is_some()) {
        (true, _) => Placement::BORROWED,
        (false, true) => Placement::POOL,
        (false, false) => Placement::HEAP,
    }
}

/// Where a tensor that can be written lies.
pub fn placement_of_mut(tensor: &TensorMut) -> Placement {
    if tensor.span().is_some() { Placement::POOL } else { Placement::HEAP }
}

/// How much the links of a poller have to do, for tests that wait until nothing is left.
#[cfg(any(test, feature = "sim"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Requests of this side that the peers may still answer, those that were given up included, and standing ones that
    /// nobody has claimed.
    pub requests: usize,
    /// Those of them that are standing and that nobody has claimed.
    pub standing: usize,
    /// Requests of the peers that have not been answered whole.
    pub peer_requests: usize,
    /// Routes with a request of this side.
    pub busy_routes: usize,
    /// What waits for credits or room in a queue.
    pub backlog: usize,
    /// Tensors on their way to a peer.
    pub leaving: usize,
    /// Values that have come and that nobody took.
    pub stashed: usize,
    /// Keys with a receive of which it is not known yet whether it got a value, after its waiter had left.
    pub unresolved: usize,
}

/// A request that a peer sent, as the serving side names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerRequestId {
    /// The link that it came on.
    pub link: LinkId,
    /// The peer's request.
    pub request: RequestId,
}

/// What became of a value that was handed to a request.
#[derive(Debug)]
pub enum ServeOutcome {
    /// It was copied into its answer.
    Copied,
    /// It is on its way: [`LinkEvent::SendComplete`] follows.
    Posted,
    /// It is kept until the peer asks again: [`LinkEvent::Resumed`] or [`LinkEvent::PutBack`] follows.
    Pinned,
    /// It is more than the link carries in one write: the peer was told so.
    Refused,
    /// The request is not there any more.
    Gone(Value),
}

/// What a receiver wants.
#[derive(Debug)]
pub enum Destination {
    /// A tensor of its own.
    Alloc,
    /// A tensor of the peer where it lies, if the fabric can; otherwise one of its own.
    Borrow,
    /// The bytes in this tensor.
    Into(TensorMut),
}

/// What a receiver got.
#[derive(Debug)]
pub enum Received {
    /// A tensor.
    Tensor(Tensor),
    /// The tensor that was given, filled.
    Into(TensorMut),
    /// A dead value, with the tensor that was given, untouched.
    Dead(Option<TensorMut>),
}

/// What is to become of a request, and of its waiter, who may have been taken away and told something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelDecision {
    /// It goes on.
    Keep,
    /// It is given up. A waiter that was left hears of its end later. If it was taken away, a value that comes all the
    /// same is for whoever is next in line.
    Cancel,
    /// It is given up, and with it whatever still comes for it: its step has ended.
    Abandon,
}

/// Bytes that came with another sum than they were sent with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// How many bytes there are.
    pub bytes: u64,
    /// The sender's sum of them.
    pub sent: u64,
    /// The sum of what came.
    pub actual: u64,
}

/// Why a request ended without a value.
#[derive(Debug)]
pub enum RequestError {
    /// The sender's side said so.
    Remote(Status),
    /// The waiter gave up, and the value, if there is one, is still with the sender.
    Cancelled,
    /// There was no room for it here; the value is in line again.
    NoRoom(PoolError),
    /// No more can be granted on this link; the value is in line again.
    NoGrant {
        /// How much can be granted at a time.
        limit: u32,
    },
    /// The bytes that came are not those that were sent. The value is lost: nobody gets it.
    Corrupted(Corruption),
    /// It does not fit the tensor that was given; the value is in line again.
    ShapeMismatch {
        /// What the sender has.
        sent: Box<TensorMeta>,
        /// What was given.
        given: Box<TensorMeta>,
    },
}

/// Something that the layer above must know. `C` is its own name for a waiter.
#[derive(Debug)]
pub enum LinkEvent<C> {
    /// Both directions of a link have been tried and work.
    Up {
        /// Which.
        link: LinkId,
    },
    /// A link is gone, with everything that was asked on it.
    Down {
        /// Which.
        link: LinkId,
        /// Why.
        failure: LinkFailure,
        /// Whoever still waited on it.
        waiters: Vec<C>,
    },
    /// A peer asks for a tensor: answer with [`Links::serve`] or [`Links::refuse`], now or later.
    Requested {
        /// The request.
        peer_request: PeerRequestId,
        /// What it asks for.
        key: TensorKey,
        /// How long the peer waits, in ms; `u32::MAX` for ever.
        timeout_ms: u32,
        /// Whether the peer asks in advance.
        standing: bool,
    },
    /// A peer gave up a request that was not answered yet.
    Withdrawn {
        /// The request.
        peer_request: PeerRequestId,
        /// What it had asked for.
        key: TensorKey,
    },
    /// A peer has asked again, and the value that was kept for it is on its way: [`LinkEvent::SendComplete`] follows.
    Resumed {
        /// Bytes of the value.
        bytes: u64,
    },
    /// A value that was on its way has left this side for good: its memory may be reused.
    SendComplete,
    /// A value that had been matched comes back, and takes its place in line again.
    PutBack {
        /// Its name.
        key: TensorKey,
        /// The value.
        value: Value,
        /// Its place.
        number: u64,
    },
    /// A peer has got a value that nobody there took. The peer holds it, and its place is in line again: whoever asks
    /// on this link gets [`Links::serve_stashed`].
    Returned {
        /// The link.
        link: LinkId,
        /// The value's name.
        key: TensorKey,
        /// The peer's name for the value.
        stash_id: u32,
        /// Its place.
        number: u64,
    },
    /// A value that nobody took, and whose link is gone: it is for whoever asks next.
    Orphaned {
        /// Its name.
        key: TensorKey,
        /// The value.
        value: StashedValue,
        /// The life of the peer that had sent it.
        incarnation: u64,
    },
    /// A value came.
    Arrived {
        /// Who waits for it.
        waiter: C,
        /// Its name.
        key: TensorKey,
        /// The value.
        received: Received,
        /// Where it lay at the sender.
        sender: Placement,
    },
    /// A request ended without a value.
    Failed {
        /// Who waits for it.
        waiter: C,
        /// What was asked for.
        key: TensorKey,
        /// Why.
        error: RequestError,
    },
}
