//! What one poller keeps for the rendezvous: the tag matching of its peers' edges.
//!
//! [`Matching`] combines the [window machines](crate::protocol) with steps, waiters and tensors. It
//! has no I/O: [`Lanes`] carries the messages. [`WindowHandler`] drives it on the links of a
//! poller, which owns it, so it takes no lock. Users and the node reach it by a [`RemoteCommand`],
//! or by the calls of a thread that holds the poller.
//!
//! | file | |
//! |---|---|
//! | `sending` | values of this process and the messages of their receivers |
//! | `receiving` | receives of this process and the messages of their senders |
//! | `transfers` | offered tensors on their way to a receive |
//! | `batch` | batches of the thread that holds the poller |
//! | `ending` | the ends of calls, steps and lives |
//! | `ended_steps` | the steps that have ended here |
//! | `report`, `waits` | reports of the edges, of values that were not taken, and of waits |
//! | `direct` | calls of the thread that holds the poller: the short path |
//! | `handler` | commands and events of a poller |
//! | `standing` | standing requests |
//! | `connections`, `link_lanes` | the links of the peers |
//! | `steps`, `table` | steps and values of edges within the process |
//!
//! Code in this module may not know the API of steps and edges above it, touch a fabric except
//! through links, or call user code.

mod aborted_steps;
mod batch;
mod command;
mod connections;
mod direct;
mod edge_report;
mod ended_steps;
mod ending;
mod error;
mod fifo;
mod gone_steps;
mod handler;
mod link_lanes;
mod outstanding;
mod receiving;
pub mod recv_tensor;
mod report;
mod sending;
mod standing;
mod steps;
mod table;
#[cfg(test)]
mod tests;
mod transfers;
mod untaken;
mod waiter;
mod waits;

pub use batch::{BatchWalk, ReceivesInOrder, WalkEnd};
#[cfg(any(test, feature = "sim"))]
pub use command::RemoteLoad;
pub use command::{
    BatchReceive, BatchSend, Cancel, CancelAll, LinkTag, LostPeer, Members, OnPath, PeerEnd, PeerIndex,
    PeerObserver, ProbeCallback, ReceiveAll, RemoteCommand, StandingChange, StepChange, UntakenCallback,
};
pub use direct::ExpectedRecord;
pub use edge_report::{EdgeReport, EdgeReports, EdgeWait};
pub use error::{Error, GrantedBytes};
pub(crate) use gone_steps::MAX_RETIRED_STEPS;
pub use handler::WindowHandler;
pub(crate) use outstanding::{ReceiveLimit, ReceivePermit, reserve};
pub(crate) use steps::{BeginError, Begun, MANY_STEPS, MAX_ABORTED, StepState, Steps, check_live};
pub(crate) use table::{AskOutcome, Numbered, OfferOutcome, Table};
pub use untaken::{Untaken, UntakenEdge};
pub use waiter::{CallHandle, CallId, Delivery, NewReceive, Payload, Waiter};
pub(crate) use waiter::{CancelReason, Outcome};
pub use waits::{WaitReport, WaitReports};

use crate::fabric::ShortTake;
use crate::link::windows::{LandingRefused, MAX_EDGES, QueuedValues, WindowArrival, WindowRefusal};
use crate::link::{Destination, DirectReceive, EdgeKey, LinkSettings, TensorKey, TensorKeyRef, Value};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::protocol::{InEdges, OutEdges, Record, Slab, ToReceiver, ToSender, WindowOptions};
use crate::telemetry::{CountersWriter, FlightEvent};
use crate::wire::{EdgeId, EdgeSide, Immediate, TaskId, Time};
use ended_steps::{EndedSteps, UntoldSteps};
use foldhash::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use transfers::Transfers;
use untaken::LostValues;
use waits::LongWaits;

/// Calls for which memory is allocated at the start.
const CALLS: usize = 256;

/// Settings of a [`WindowHandler`].
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// The settings of each link.
    pub link: LinkSettings,
    /// The windows of each link: [`WINDOWS`], except in tests. All members have the same.
    pub windows: WindowOptions,
    /// Limit of the receives from a peer that wait singly.
    pub max_requests: u32,
    /// A call that waits for longer is logged, once.
    pub hung_after: Duration,
    /// Whether the loss of a peer, other than its clean stop, ends every call with every peer.
    pub peer_loss_is_fatal: bool,
}

impl RemoteSettings {
    /// With these, no call is logged as long, and a loss ends the calls with that peer alone.
    pub fn new(link: LinkSettings, max_requests: u32) -> Self {
        let (windows, hung_after) = (WINDOWS, Duration::MAX);
        RemoteSettings { link, windows, max_requests, hung_after, peer_loss_is_fatal: false }
    }
}

/// Values that the edges of one direction of a link can hold: places for their loans, less those
/// that answers to needs may take.
const CELLS: u64 = (crate::fabric::MAX_LOANS / 2) as u64;

/// The windows of every link.
pub const WINDOWS: WindowOptions = WindowOptions {
    first_window: 2,
    usual_window: 64,
    largest_window: 256,
    max_cells: CELLS,
    max_edges: MAX_EDGES,
    kept_edges: 1 << 12,
    max_needs: 1 << 17,
    resends: false,
};

/// Something about the next value of an edge with a peer.
pub type OfEdge<'a, T> = (PeerIndex, TensorKeyRef<'a>, T);

/// The links to the peers. A message to a peer without a link is dropped.
pub trait Lanes {
    /// Whether a value stays here when its record has left: its tensor is offered.
    fn keeps(&mut self, peer: PeerIndex, value: &Value) -> bool;
    /// The pool that tensors are received into.
    fn pool(&self) -> &Pool;
    /// The poller's counters.
    fn counters(&self) -> &CountersWriter;
    /// The peer with the most bytes for tensors that it has offered and not written yet, if any has
    /// some.
    fn most_granted(&self) -> Option<GrantedBytes>;
    /// Opens a batch: see [`Links::begin_batch`](crate::link::Links::begin_batch).
    fn begin_batch(&mut self);
    /// Records an event of a peer's link in its flight recorder.
    fn record(&mut self, peer: PeerIndex, event: FlightEvent) {
        let _ = (peer, event);
    }
    /// The values of each edge, by its number, that wait in the queue of a peer's link.
    fn queued(&self, peer: PeerIndex) -> HashMap<u32, QueuedValues> {
        let _ = peer;
        HashMap::default()
    }
    /// The time since which nothing has left the send queue of a peer's link, as the calls of this
    /// method have found it; `None` if nothing waits there.
    fn stuck_since(&mut self, peer: PeerIndex, now: Time) -> Option<Time> {
        let _ = (peer, now);
        None
    }
    /// Handles the messages that [`Lanes::take_short`] has polled for and did not take. Returns
    /// whether there were any.
    fn handle_polled(&mut self) -> bool;
    /// Sends a message about an edge on which this process receives.
    fn to_sender(&mut self, peer: PeerIndex, message: ToSender<EdgeKey>);
    /// Sends a message about an edge on which this process sends. Returns whether a tensor of it
    /// stays here, until [`Matching::left`] is called for it.
    fn to_receiver(&mut self, peer: PeerIndex, message: ToReceiver<Value, WindowRefusal>) -> bool;
    /// As [`Lanes::send_short`], if a batch may be open.
    fn send_packed(&mut self, peer: PeerIndex, record: Record<()>, tensor: &mut Option<Tensor>) -> bool;
    /// Grants the destination of an offered tensor: see [`Links::land`](crate::link::Links::land).
    ///
    /// # Errors
    /// The reason with the destination, if the peer can't write to it.
    fn land(
        &mut self,
        peer: PeerIndex,
        offer: u32,
        target: TensorMut,
    ) -> Result<Immediate, (LandingRefused, TensorMut)>;
    /// Ends the offer of a tensor that no receive takes.
    fn decline(&mut self, peer: PeerIndex, offer: u32);
    /// Grants a destination for the next tensor of an edge: see
    /// [`Links::make_ready`](crate::link::Links::make_ready).
    fn make_ready(&mut self, peer: PeerIndex, edge: EdgeId);
    /// Whether [`Lanes::make_ready`] would grant one.
    fn may_get_ready(&mut self, peer: PeerIndex, edge: EdgeId) -> bool;
    /// Asks for that destination back.
    fn withdraw(&mut self, peer: PeerIndex, edge: EdgeId);
    /// Sends the record of a tensor, if it takes nothing else. Returns whether it did.
    fn send_short(&mut self, peer: PeerIndex, record: Record<()>, tensor: &mut Option<Tensor>) -> bool;
    /// Gives the value of a record to its receive, if the record is the next message.
    fn take_short(
        &mut self,
        peer: PeerIndex,
        record: Record<()>,
        receive: &mut DirectReceive,
    ) -> ShortTake<()>;
}

/// A receive that waits.
#[derive(Debug)]
struct WaitingReceive {
    peer: PeerIndex,
    edge: u32,
    key: TensorKey,
    destination: Destination,
    waiter: Waiter,
    /// Whether the receive counts towards the limit of receives that wait.
    is_bounded: bool,
    /// Whether [`Matching::calls`] has the receive.
    is_listed: bool,
    /// The offered tensor that the receive gets.
    landing: Option<Immediate>,
}

/// What the poller keeps for one peer, across its lives.
struct PeerEdges {
    out: OutEdges<EdgeKey, Value, WindowRefusal>,
    incoming: InEdges<EdgeKey, WindowArrival, u32, WindowRefusal>,
    /// Offered tensors that the peer writes to their destinations.
    transfers: Transfers,
    /// Whether a receive has taken an offered tensor on the present link.
    offers: bool,
    /// Receives that wait, without those of batches.
    waiting: u32,
    /// The error of calls that need the peer, while it has no link. Boxed: each send looks whether
    /// there is one.
    down: Option<Box<Error>>,
    /// Whether the peer has announced an edge on the present link. Only then it hears which steps
    /// have ended here.
    has_announced: bool,
}

impl PeerEdges {
    /// The index of the edge of a tensor that the peer sends.
    #[inline]
    fn incoming_edge(&mut self, key: TensorKeyRef<'_>) -> u32 {
        let hint = key.edge.name.place(EdgeSide::Receiver);
        let index = self.incoming.edge_near(hint, |known| known.is(key.edge), || key.edge.clone());
        if index != hint {
            key.edge.name.note_place(EdgeSide::Receiver, index);
        }
        index
    }

    /// The index of the edge of a tensor for the peer.
    #[inline]
    fn outgoing_edge(&mut self, key: TensorKeyRef<'_>) -> u32 {
        let hint = key.edge.name.place(EdgeSide::Sender);
        let index = self.out.edge_near(hint, |known| known.is(key.edge), || key.edge.clone());
        if index != hint {
            key.edge.name.note_place(EdgeSide::Sender, index);
        }
        index
    }
}

/// The tensors of one poller.
pub struct Matching {
    peers: Vec<PeerEdges>,
    steps: EndedSteps,
    /// Steps that were cleaned up, of which the peers have not been told.
    untold: UntoldSteps,
    waiting: Slab<WaitingReceive>,
    /// The waiting receive of each [listed](Matching::list) call.
    calls: HashMap<CallId, u32>,
    /// Receives that can wait for one peer at a time, without those of batches.
    max_waiting: u32,
    /// Values that were sent and have not left. Senders read it.
    outstanding: Arc<AtomicUsize>,
    /// A lower bound of the times when waiting receives are late, or reported.
    next_deadline: Time,
    /// The fatal loss that has ended every call, if any.
    broken: Option<Error>,
    /// Messages of senders and losses of peers so far, modulo 2^64.
    news: u64,
    /// Values that left for lives of peers that have ended.
    lost: LostValues,
    long_waits: LongWaits,
    /// Bytes of a peer's earlier errors in receives that began later on its present link.
    late_texts: HashMap<PeerIndex, usize>,
}

impl Matching {
    /// No values and no receives. Each member is without a link until [`Matching::up`].
    pub fn new(
        members: &Members,
        options: WindowOptions,
        (max_waiting, outstanding): (u32, Arc<AtomicUsize>),
        hung_after: Duration,
    ) -> Self {
        let no_link = |peer: &TaskId| PeerEdges {
            out: OutEdges::new(options),
            incoming: InEdges::without_link(options),
            transfers: Transfers::default(),
            offers: false,
            waiting: 0,
            down: Some(Box::new(Error::NotConnected { peer: peer.clone() })),
            has_announced: false,
        };
        Matching {
            peers: members.all().iter().map(no_link).collect(),
            steps: EndedSteps::default(),
            untold: UntoldSteps::default(),
            waiting: Slab::with_capacity(CALLS),
            calls: HashMap::with_capacity_and_hasher(CALLS, Default::default()),
            max_waiting,
            outstanding,
            next_deadline: Time::NEVER,
            broken: None,
            news: 0,
            lost: LostValues::default(),
            long_waits: LongWaits::new(hung_after),
            late_texts: HashMap::default(),
        }
    }

    /// The earliest time at which [`Matching::expire`] has something to do, or [`Time::NEVER`].
    pub fn next_deadline(&self) -> Time {
        self.next_deadline.min(self.long_waits.next)
    }
}
