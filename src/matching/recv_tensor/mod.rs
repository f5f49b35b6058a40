//! The matching of the gRPC path: values with requests at the sender, answers with receives at the
//! receiver (specification 9).
//!
//! A receive asks the sender for the next value of its key, by a request with a number. A key has
//! one request at a time, so that its receives are served in their order. The sender answers a
//! request once it has a value, and keeps the value until the receiver says that the request is
//! finished. So a request may be repeated when its answer was lost. A request for which no receive
//! waits any more is given up after [`IDLE_GRACE`], and its value goes back in line. So does a
//! value that no receive could take, if much is held already. If only tries wait, the request is a
//! try: the sender answers at once, with a value or without.
//!
//! [`RecvTensors`] is plain state: no I/O, no clock, no threads. A [`RequestChannel`] carries
//! requests.
//!
//! | file | |
//! |---|---|
//! | `sending` | values of this process, and the requests of peers |
//! | `inbound` | what is kept of the receives from one peer |
//! | `receiving` | receives of this process, and the answers of peers |
//! | `ending` | the ends of calls, steps and lives |
//! | `finished` | which requests of a peer have ended |
//! | `head` | what an answer says before its bytes |
//! | `report` | reports |

mod ending;
mod finished;
mod head;
mod inbound;
mod receiving;
mod report;
mod sending;
#[cfg(test)]
mod tests;

pub use head::AnswerHead;
pub use sending::MAX_PEER_REQUESTS;

use super::ended_steps::EndedSteps;
use super::untaken::LostValues;
use super::{CallId, Error, LinkTag, Members, Outcome, PeerIndex, RemoteSettings, Waiter};
use crate::link::{Destination, TensorKey};
use crate::memory::{Pool, Tensor};
use crate::sync::OneshotSender;
use crate::telemetry::CountersWriter;
use crate::wire::{Incarnation, TaskId, Time};
use bytes::Bytes;
use finished::FinishedRequests;
use foldhash::HashMap;
use inbound::{Inbound, QueuedReceive};
use sending::Outbound;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// The value that answers a request.
#[derive(Debug)]
pub struct AnswerValue {
    /// What is known before the bytes.
    pub head: AnswerHead,
    /// What follows the head.
    pub bytes: AnswerBytes,
}

/// What follows the head of an answer.
#[derive(Debug)]
pub enum AnswerBytes {
    /// Of a dead value: none.
    Dead,
    /// The elements, or the serialised form.
    Tensor(Tensor),
    /// Why there is no value.
    Failure(Bytes),
}

/// Takes the answer to a request of a peer. Does nothing if the peer has hung up. A drop says that
/// there is no value yet.
pub type RequestAnswer = Box<dyn FnOnce(AnswerValue) + Send>;

/// A request that goes on until it is answered. Dropping it gives it up.
pub type OpenRequest = Box<dyn Send>;

/// A request of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnRequest {
    /// The task that is asked, and its index.
    pub peer: PeerIndex,
    /// The life that is asked.
    pub life: Incarnation,
    /// The number of the request.
    pub id: u64,
    /// The id of the step.
    pub step: u64,
    /// The rendezvous key, with the life that is asked (specification 2.2).
    pub key: String,
    /// Whether the answer needs a checksum of the bytes.
    pub wants_checksum: bool,
    /// Whether it asks for a value that is there already, and does not wait for one.
    pub is_try: bool,
    /// The generation of the link that it is made on.
    pub link: u64,
}

/// A request of a peer.
#[derive(Clone, Copy, Debug)]
pub struct AskedRequest<'a> {
    /// The number that the peer gave it.
    pub id: u64,
    /// The id of the step.
    pub step: u64,
    /// The rendezvous key (specification 2.2).
    pub key: &'a str,
    /// Whether the answer needs a checksum of the bytes.
    pub wants_checksum: bool,
    /// Whether it asks for a value that is there already, and does not wait for one.
    pub is_try: bool,
    /// The generation of the link that it is made on.
    pub link: u64,
}

/// Carries requests to peers. No method blocks.
pub trait RequestChannel: Send {
    /// Asks until the answer has come, which is then given to [`RecvTensors::answered`]. A try
    /// without a value is told to [`RecvTensors::tried`].
    fn ask(&mut self, request: OwnRequest) -> OpenRequest;
    /// Says that a request has ended. Once the peer has heard it, calls [`RecvTensors::withdrawn`]
    /// if `is_given_up`.
    fn finish(&mut self, peer: PeerIndex, life: Incarnation, id: u64, is_given_up: bool);
    /// Has the peer forget requests of earlier lives, and of this one those below `id`.
    fn clean_up(&mut self, peer: PeerIndex, life: Incarnation, id: u64);
    /// The link with the peer has ended: it is told nothing more.
    fn lost(&mut self, peer: PeerIndex);
}

/// The outcome of a receive, for its caller. It is sent when no lock is held.
#[derive(Debug)]
pub struct EndedReceive(OneshotSender<Outcome>, Outcome);

impl EndedReceive {
    /// Gives the caller the outcome.
    pub fn send(self) {
        self.0.send(self.1);
    }
}

/// The present link with a peer.
#[derive(Debug)]
struct CallPeer {
    out: Outbound,
    incoming: Inbound,
    /// The error of calls that need the peer, while it has no link.
    down: Option<Error>,
    /// The present link, or the last one.
    link: Option<CallLink>,
}

/// A link with a peer: nothing but the news that both sides are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallLink {
    /// Names the link on this side.
    pub tag: LinkTag,
    /// The number that both sides know it by, among the links of two lives.
    pub generation: u64,
}

/// The tensors of one process and the requests for them.
pub struct RecvTensors {
    me: TaskId,
    incarnation: Incarnation,
    members: Members,
    peers: Vec<CallPeer>,
    steps: EndedSteps,
    calls: HashMap<CallId, (PeerIndex, TensorKey)>,
    /// Values that were sent and not taken. Senders read it.
    outstanding: Arc<AtomicUsize>,
    settings: RemoteSettings,
    pool: Pool,
    counters: CountersWriter,
    channel: Box<dyn RequestChannel>,
    /// The fatal loss that has ended every call, if any.
    broken: Option<Error>,
    lost: LostValues,
    ended: Vec<EndedReceive>,
}

impl RecvTensors {
    /// No values and no receives. Each member is without a link.
    pub fn new(
        (me, incarnation): (TaskId, Incarnation),
        members: Members,
        settings: RemoteSettings,
        outstanding: Arc<AtomicUsize>,
        pool: Pool,
        channel: Box<dyn RequestChannel>,
    ) -> Self {
        let no_link = |peer: &TaskId| CallPeer {
            out: Outbound::default(),
            incoming: Inbound::default(),
            down: Some(Error::NotConnected { peer: peer.clone() }),
            link: None,
        };
        RecvTensors {
            me,
            incarnation,
            peers: members.all().iter().map(no_link).collect(),
            members,
            steps: EndedSteps::default(),
            calls: HashMap::default(),
            outstanding,
            settings,
            pool,
            counters: CountersWriter::new(),
            channel,
            broken: None,
            lost: LostValues::default(),
            ended: Vec::new(),
        }
    }

    /// The counters, for readers.
    pub fn counters(&self) -> &CountersWriter {
        &self.counters
    }

    /// How long a receive waits before it is logged: a little more than `hung_after`, so that one
    /// report has the receives that began together.
    pub fn logged_after(&self) -> Duration {
        let bound = self.settings.hung_after;
        bound.saturating_add(bound / 16)
    }

    /// The receives that have ended since the last call, for their callers.
    pub fn take_ended(&mut self) -> Vec<EndedReceive> {
        std::mem::take(&mut self.ended)
    }

    fn peer(&mut self, peer: PeerIndex) -> &mut CallPeer {
        &mut self.peers[peer.0 as usize]
    }

    /// Ends a waiting receive.
    fn complete(&mut self, waiter: Waiter, result: Outcome) {
        self.calls.remove(&waiter.id);
        let Waiter { permit, sender, .. } = waiter;
        drop(permit);
        self.ended.push(EndedReceive(sender, result));
    }

    /// Ends a waiting receive with an error.
    fn fail(&mut self, receive: QueuedReceive, error: Error) {
        self.complete(receive.waiter, Outcome(Err(error)));
    }
}

/// Where a receive wants its tensor: nothing is lent on this path.
fn not_borrowed(destination: Destination) -> Destination {
    match destination {
        Destination::Borrow => Destination::Alloc,
        other => other,
    }
}

impl CallPeer {
    /// The present link.
    fn present(&self) -> Option<CallLink> {
        self.link.filter(|_| self.down.is_none())
    }
}

/// How long a request stays open without a receive that waits. The next receive of the key gets its
/// value without another call, also if each gives up sooner than a call takes.
pub const IDLE_GRACE: Duration = Duration::from_millis(100);

/// A time without a deadline.
const NEVER: Time = Time::NEVER;
