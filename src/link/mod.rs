//! One peer on one fabric: control messages under credits, routes, the slot table of requests, grants.
//!
//! [`Links`] holds the links of one poller together with the port that they complete on. It turns completions
//! into [`LinkEvent`]s for the layer above, and that layer's calls into operations. It runs the machines of
//! [`crate::protocol`] and decides nothing that they can decide.
//!
//! What may not be done here: block, ask for the time, look a key up, call user code.

mod arrivals;
mod incoming;
mod links;
mod outbox;
mod requests;
mod routes;
mod table;
#[cfg(test)]
mod tests;

pub use links::{LinkIdentity, LinkSettings, Links, RequestRefused};

use crate::fabric::{LinkFailure, LinkId, PostError};
use crate::memory::{PoolError, Tensor, TensorMut};
use crate::wire::message::{RequestId, Side};
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

/// How much the links of a poller have to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Requests of this side that the peers may still answer, those that were given up included.
    pub requests: usize,
    /// Requests of the peers that have not been answered whole.
    pub served: usize,
    /// Routes with a request of this side.
    pub busy_routes: usize,
    /// What waits for credits or room in a queue.
    pub backlog: usize,
    /// Tensors on their way to a peer.
    pub leaving: usize,
}

/// A request that a peer sent, as the serving side names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incoming {
    /// The link that it came on.
    pub link: LinkId,
    /// The peer's request.
    pub request: RequestId,
}

/// What became of a value that was handed to a request.
#[derive(Debug)]
pub enum Served {
    /// It was copied into its answer.
    Copied,
    /// It is on its way: [`LinkEvent::Finished`] follows.
    Posted,
    /// It is kept until the peer asks again: [`LinkEvent::Answered`] or [`LinkEvent::PutBack`] follows.
    Kept,
    /// The request is not there any more.
    Gone(Value),
}

/// What a receiver wants.
#[derive(Debug)]
pub enum Want {
    /// A tensor of its own.
    Fresh,
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
    /// A value that does not fit the tensor that was given. It is whole, and still somebody's.
    Misfit {
        /// The value.
        value: Tensor,
        /// What was given.
        given: TensorMeta,
    },
    /// A small value for which the pool has no room. It is whole, and still somebody's.
    Unplaced {
        /// Its element type and shape.
        meta: TensorMeta,
        /// Its bytes.
        bytes: Box<[u8]>,
        /// Why there is no room.
        error: PoolError,
    },
}

/// Why a request ended without a value.
#[derive(Debug)]
pub enum RequestError {
    /// The sender's side said so.
    Remote(Status),
    /// The waiter gave up, and the value, if there is one, is still with the sender.
    GivenUp,
    /// There was no room for it here; the value is still with the sender.
    NoRoom(PoolError),
    /// No more can be granted on this link; the value is still with the sender.
    NoGrant(PostError),
    /// It does not fit the tensor that was given; the value is still with the sender.
    Misfit {
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
    Asked {
        /// The request.
        incoming: Incoming,
        /// What it asks for.
        key: TensorKey,
        /// How long the peer waits, in ms; `u32::MAX` for ever.
        timeout_ms: u32,
    },
    /// A peer gave up a request that was not answered yet.
    Withdrawn {
        /// The request.
        incoming: Incoming,
        /// What it had asked for.
        key: TensorKey,
    },
    /// A peer has asked again, and the value that was kept for it is on its way: [`LinkEvent::Finished`] follows.
    Answered {
        /// Bytes of the value.
        bytes: u64,
    },
    /// A value that was on its way has left this side for good: its memory may be reused.
    Finished,
    /// A value that had been matched comes back and must be first in line again.
    PutBack {
        /// Its name.
        key: TensorKey,
        /// The value.
        value: Value,
    },
    /// A value came. Without a waiter it came too late, and belongs to whoever asks next.
    Arrived {
        /// Who waits for it.
        waiter: Option<C>,
        /// Its name.
        key: TensorKey,
        /// The value.
        received: Received,
        /// Where it lay at the sender.
        sender: Side,
    },
    /// A request ended without a value.
    Failed {
        /// Who waits for it.
        waiter: Option<C>,
        /// What was asked for.
        key: TensorKey,
        /// Why.
        error: RequestError,
    },
}
