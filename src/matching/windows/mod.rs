//! Matching by edge windows: what one poller keeps of the tensors that go to and come from its
//! peers.
//!
//! [`Matching`] combines the [window machines](crate::protocol::window) with steps, waiters and
//! tensors. It has no I/O: [`Lanes`] carries the messages. The thread that holds the poller calls
//! it.
//!
//! | file | |
//! |---|---|
//! | `sending` | values of this process and the messages of their receivers |
//! | `receiving` | receives of this process and the messages of their senders |
//! | `ending` | the ends of calls, steps and lives |

mod ending;
mod receiving;
mod sending;
#[cfg(test)]
mod tests;

pub use receiving::{ArrivedTensor, WindowArrival};

use super::{CallId, Error, Members, PeerIndex, Steps, Waiter};
use crate::link::{Destination, TensorKey, Value};
use crate::memory::Pool;
use crate::protocol::window::{InEdges, OutEdges, Slab, ToReceiver, ToSender, WindowOptions};
use crate::telemetry::CountersWriter;
use crate::wire::{EdgeName, Status, TaskId, Time};
use foldhash::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// The name of an edge without incarnations and without its step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EdgeKey {
    /// Source device, destination device and edge name.
    pub edge: Arc<EdgeName>,
    /// Number of the loop, 0 outside of loops.
    pub frame: u64,
    /// Pass of the loop, from 0.
    pub iteration: u64,
}

impl EdgeKey {
    /// The edge of a tensor.
    pub fn of(key: &TensorKey) -> Self {
        EdgeKey { edge: key.edge.clone(), frame: key.frame, iteration: key.iteration }
    }
}

/// The links to the peers. A message to a peer without a link is dropped.
pub trait Lanes {
    /// Sends a message about an edge on which this process receives.
    fn to_sender(&mut self, peer: PeerIndex, message: ToSender<EdgeKey>);
    /// Sends a message about an edge on which this process sends.
    fn to_receiver(&mut self, peer: PeerIndex, message: ToReceiver<Value, Status>);
}

/// A receive that waits.
#[derive(Debug)]
struct WaitingReceive {
    peer: PeerIndex,
    edge: u32,
    key: TensorKey,
    destination: Destination,
    waiter: Waiter,
}

/// What the poller keeps for one peer, across its lives.
struct PeerEdges {
    out: OutEdges<EdgeKey, Value, Status>,
    incoming: InEdges<EdgeKey, WindowArrival, u32, Status>,
    /// The error of calls that need the peer, while it has no link.
    down: Option<Error>,
}

/// The tensors of one poller.
pub struct Matching<L> {
    me: TaskId,
    pool: Pool,
    counters: CountersWriter,
    lanes: L,
    peers: Vec<PeerEdges>,
    steps: Steps,
    waiting: Slab<WaitingReceive>,
    /// The waiting receive of each call.
    calls: HashMap<CallId, u32>,
    /// Receives that can wait at a time.
    max_waiting: usize,
    /// Values that were sent and have not left. Senders read it.
    outstanding: Arc<AtomicUsize>,
    /// A lower bound of the deadlines of all waiting receives.
    next_deadline: Time,
}

impl<L: Lanes> Matching<L> {
    /// No values and no receives. Each member is without a link until [`Matching::up`].
    pub fn new(
        (me, members): (TaskId, Members),
        (pool, counters): (Pool, CountersWriter),
        options: WindowOptions,
        (max_waiting, outstanding): (usize, Arc<AtomicUsize>),
        lanes: L,
    ) -> Self {
        let no_link = |peer: &TaskId| PeerEdges {
            out: OutEdges::new(options),
            incoming: InEdges::new(options),
            down: Some(Error::NotConnected { peer: peer.clone() }),
        };
        Matching {
            peers: members.all().iter().map(no_link).collect(),
            me,
            pool,
            counters,
            lanes,
            steps: Steps::default(),
            waiting: Slab::default(),
            calls: HashMap::default(),
            max_waiting,
            outstanding,
            next_deadline: Time::NEVER,
        }
    }

    /// The links.
    pub fn lanes(&mut self) -> &mut L {
        &mut self.lanes
    }

    /// The earliest time at which [`Matching::expire`] has something to do, or [`Time::NEVER`].
    pub fn next_deadline(&self) -> Time {
        self.next_deadline
    }
}
