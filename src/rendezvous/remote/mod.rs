//! What a poller does for the rendezvous: keeps outgoing tensors, matches peers' requests with them, and
//! brings what peers send to whoever waits here. Owned by its poller, so nothing in it takes a lock.

mod batches;
mod connections;
mod ending;
#[cfg(test)]
mod explore;
mod orphans;
mod receiving;
mod serving;
mod standing;

use super::Error;
use super::path::{Cancel, CancelAll, LinkTag, Members, PeerIndex, StandingChange, StepChange};
use super::reuse::Reused;
use super::steps::{StepState, Steps};
use super::table::{Numbered, Table};
use super::waiter::{CallId, Waiter};
use crate::engine::Handler;
use crate::fabric::{LinkId, Port};
use crate::link::{
    Destination, LinkEvent, LinkSettings, Links, PeerRequestId, Received, StashedValue, TensorKey, Value,
};
use crate::mutants::{Mutant, is_on};
use crate::wire::message::RequestId;
use crate::wire::{LossCause, TaskId, Time};
use foldhash::HashMap;
use receiving::Receive;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

pub use batches::{BatchReceive, BatchSend, ReceiveAll};

/// Calls that find room before anything is allocated.
const CALLS: usize = 256;

/// How the remote half behaves.
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// How links behave.
    pub link: LinkSettings,
    /// Requests of one peer that may wait for steps that have not begun.
    pub max_deferred: u32,
    /// How long a call that gave up waits for its peer's word before it ends all the same.
    pub cancel_grace: Duration,
    /// Whether the loss of any peer, other than by its clean stop, ends every call with every peer.
    pub peer_loss_is_fatal: bool,
}

/// Told when a link has been tried in both directions, or failed.
pub type ProbeCallback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// What users and the node hand over to the poller.
pub enum RemoteCommand<L> {
    /// A new link.
    Attach {
        /// With whom.
        peer: PeerIndex,
        /// Which link with it.
        tag: LinkTag,
        /// The link.
        link: L,
        /// Told when the link has been tried in both directions, or failed.
        done: ProbeCallback,
    },
    /// Both sides have tried a link: calls may use it from now on.
    Ready {
        /// With whom.
        peer: PeerIndex,
        /// Which link with it.
        tag: LinkTag,
    },
    /// A link is not to be used any more. Other links with that peer are left alone.
    Lose {
        /// With whom.
        peer: PeerIndex,
        /// Which link with it.
        tag: LinkTag,
        /// Why.
        cause: LossCause,
    },
    /// A life of a peer is over, whether it was ever linked or not.
    Gone {
        /// Which peer.
        peer: PeerIndex,
        /// Which life, and the last link that there was or was to be with it.
        tag: LinkTag,
        /// Why.
        cause: LossCause,
    },
    /// Everything has ended, as another poller found out.
    End {
        /// With what.
        error: Error,
    },
    /// A value for a peer.
    Send {
        /// Its name.
        key: TensorKey,
        /// The value.
        value: Value,
    },
    /// A receive from a peer.
    Receive {
        /// From whom.
        peer: PeerIndex,
        /// What.
        key: TensorKey,
        /// Into what.
        destination: Destination,
        /// For whom.
        waiter: Waiter,
    },
    /// Several values for peers.
    SendAll(Reused<BatchSend>),
    /// Several receives from peers.
    ReceiveAll(ReceiveAll),
    /// Several calls end.
    CancelAll(CancelAll),
    /// A call ends.
    Cancel(Cancel),
    /// A step changed its state.
    Step(StepChange),
    /// Steps of an edge are to be asked for in advance, or not any more.
    Standing(StandingChange),
    /// Reports how much there is to do.
    #[cfg(any(test, feature = "sim"))]
    Load(Box<dyn FnOnce(RemoteLoad) + Send>),
}

/// How much a poller keeps for the rendezvous, for tests that wait until nothing is left.
#[cfg(any(test, feature = "sim"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteLoad {
    /// Of its links.
    pub links: crate::link::LinkLoad,
    /// Values that no peer has requested yet.
    pub values: usize,
    /// Requests of peers that wait for their value.
    pub requests: usize,
    /// Those of them that wait for their step to begin.
    pub deferred: usize,
    /// Values that came when nobody waited for them any more.
    pub orphans: usize,
    /// Receives that wait until there is room to ask for them.
    pub queued: usize,
}

/// Told when a peer came or went. Nothing in it may block.
pub trait PeerObserver: Send + Sync {
    /// A link with this life of the peer works in both directions, as both sides have said.
    fn up(&self, peer: PeerIndex, tag: LinkTag);
    /// A peer was lost: a link that was up is gone, or a life is over that was to be linked.
    fn down(&self, peer: PeerIndex, tag: LinkTag, error: Error);
    /// A link had failed already when both sides said that it is up. Nobody has used it.
    fn failed_before_ready(&self, peer: PeerIndex, tag: LinkTag);
}

/// The rendezvous' half of a poller.
pub struct RemoteHandler {
    me: TaskId,
    incarnation: u64,
    members: Members,
    settings: RemoteSettings,
    peers: Vec<PeerEntry>,
    /// Whose each link is, or was in an earlier life.
    by_link: HashMap<LinkId, PeerIndex>,
    steps: Steps,
    outgoing: Table<Outgoing, WaitingRequest>,
    /// The requests of the calls that wait on a link.
    calls: HashMap<CallId, (LinkId, RequestId)>,
    outstanding: Arc<AtomicUsize>,
    orphans: HashMap<TensorKey, VecDeque<StashedValue>>,
    standing: standing::StandingEdges,
    queued: batches::QueuedReceives,
    next_deadline: Time,
    observer: Arc<dyn PeerObserver>,
    /// The loss that ended everything, where such losses do.
    broken: Option<Error>,
}

#[derive(Default)]
struct PeerEntry {
    /// The present link, or the attempt at one.
    connection: Option<PeerConnection>,
    /// How the last link that was up has ended, or the life that was to be linked, until another one is up.
    lost: Option<(LinkTag, LossCause)>,
    deferred: u32,
}

struct PeerConnection {
    link: LinkId,
    tag: LinkTag,
    stage: ConnectionStage,
    /// Why the link is being failed, if this side knows better than the fabric.
    close_reason: Option<LossCause>,
}

/// How far a link is. Until it is up, its end is nobody's loss: it is tried again.
enum ConnectionStage {
    Probing(ProbeCallback),
    Probed,
    Up,
}

impl PeerEntry {
    /// The link that calls may use now.
    fn usable(&self) -> Option<LinkId> {
        self.connection
            .as_ref()
            .filter(|connection| matches!(connection.stage, ConnectionStage::Up))
            .map(|connection| connection.link)
    }
}

/// Something in line for a peer.
#[derive(Debug)]
enum Outgoing {
    /// A value. It counts as outstanding.
    Value(Value),
    /// The place of a value that the peer holds itself, by its name on that link.
    Stashed { link: LinkId, stash_id: u32 },
}

/// A peer's request that waits for its value.
#[derive(Debug)]
struct WaitingRequest {
    peer_request: PeerRequestId,
    peer: PeerIndex,
    deadline: Time,
    deferred: bool,
}

impl RemoteHandler {
    /// No peers yet. `outstanding` counts the values that wait here, for senders to look at.
    #[allow(clippy::too_many_arguments)] // each is a different thing that the node has
    pub fn new(
        me: TaskId,
        incarnation: u64,
        members: Members,
        settings: RemoteSettings,
        outstanding: Arc<AtomicUsize>,
        observer: Arc<dyn PeerObserver>,
    ) -> Self {
        let peers: Vec<_> = members.all().iter().map(|_| PeerEntry::default()).collect();
        let queued = batches::QueuedReceives::new(peers.len());
        RemoteHandler {
            me,
            incarnation,
            members,
            settings,
            peers,
            by_link: HashMap::default(),
            steps: Steps::default(),
            outgoing: Table::default(),
            calls: HashMap::with_capacity_and_hasher(CALLS, Default::default()),
            outstanding,
            orphans: HashMap::default(),
            standing: standing::StandingEdges::default(),
            queued,
            next_deadline: Time::NEVER,
            observer,
            broken: None,
        }
    }

    #[cfg(any(test, feature = "sim"))]
    fn load(&self, links: crate::link::LinkLoad) -> RemoteLoad {
        let (values, requests) = self.outgoing.len();
        let deferred = self.peers.iter().map(|peer| peer.deferred as usize).sum();
        let orphans = self.orphans.values().map(VecDeque::len).sum::<usize>() + links.stashed;
        RemoteLoad { links, values, requests, deferred, orphans, queued: self.queued.len() }
    }

    /// Whether values of a step may be kept: it goes on, or the word that it has begun is still to come from the thread that
    /// began it, and another thread was quicker with a value.
    fn may_hold(&self, step: u64) -> bool {
        self.steps.is_live(step) || matches!(self.steps.state(step), StepState::NotBegun)
    }

    fn peer(&mut self, index: PeerIndex) -> &mut PeerEntry {
        &mut self.peers[index.0 as usize]
    }

    fn peer_of(&self, link: LinkId) -> Option<PeerIndex> {
        let index = *self.by_link.get(&link)?;
        let connection = self.peers[index.0 as usize].connection.as_ref()?;
        (connection.link == link).then_some(index)
    }
}

impl<P: Port> Handler<P> for RemoteHandler {
    type Waiter = Waiter;
    type Command = RemoteCommand<P::Link>;

    fn command(
        &mut self,
        links: &mut Links<P, Waiter>,
        op: Self::Command,
        now: Time,
    ) -> Option<Self::Command> {
        match op {
            RemoteCommand::Send { key, value } => self.offer(links, key, value),
            RemoteCommand::SendAll(values) => self.send_all(links, values),
            RemoteCommand::ReceiveAll(batch) => self.receive_all(links, batch, now),
            RemoteCommand::CancelAll(cancel) => {
                return self.cancel_all(links, cancel, now).map(RemoteCommand::CancelAll);
            }
            RemoteCommand::Receive { peer, key, destination, waiter } => {
                self.receive(links, Receive { peer, key, destination, waiter }, now);
            }
            RemoteCommand::Cancel(cancel) => match self.calls.contains_key(&cancel.id) {
                true => self.cancel(links, &cancel, now),
                false => {
                    self.cancel_queued(&cancel.why, |id| id == cancel.id);
                    return Some(RemoteCommand::Cancel(cancel));
                }
            },
            RemoteCommand::Step(change) => self.step_changed(links, change),
            RemoteCommand::Attach { peer, tag, link, done } => {
                self.attach(links, peer, tag, link, done);
                if let Some(link) = self.peer(peer).connection.as_ref().map(|connection| connection.link) {
                    self.by_link.insert(link, peer);
                }
            }
            RemoteCommand::Standing(change) => {
                return self.standing_changed(links, change).map(RemoteCommand::Standing);
            }
            RemoteCommand::Ready { peer, tag } => self.ready(links, peer, tag),
            RemoteCommand::Lose { peer, tag, cause } => self.lose(links, peer, tag, cause),
            RemoteCommand::Gone { peer, tag, cause } => self.gone(links, peer, tag, cause),
            RemoteCommand::End { error } => self.end(links, &error),
            #[cfg(any(test, feature = "sim"))]
            RemoteCommand::Load(done) => done(self.load(links.load())),
        }
        None
    }

    fn event(&mut self, links: &mut Links<P, Waiter>, event: LinkEvent<Waiter>, now: Time) {
        match event {
            LinkEvent::Requested { peer_request, key, timeout_ms, standing } => {
                self.asked(links, peer_request, &key, timeout_ms, standing, now);
            }
            LinkEvent::Arrived { waiter, key, received, sender } => {
                self.calls.remove(&waiter.id);
                if is_on(Mutant::DeliveredTwice)
                    && waiter.cancel_reason.is_some()
                    && let Received::Tensor(tensor) = &received
                {
                    self.store_orphan(key, StashedValue::Tensor { tensor: tensor.clone(), sender });
                }
                Self::arrived(links, waiter, received, sender);
            }
            LinkEvent::Failed { waiter, key, error } => {
                self.calls.remove(&waiter.id);
                self.failed(links.counters(), waiter, &key, error);
            }
            LinkEvent::Orphaned { key, value, incarnation } => {
                // What an old life had sent is not the new one's (specification 2.2).
                if !self.is_superseded(key.edge.source_task(), incarnation) {
                    self.store_orphan(key, value);
                }
            }
            LinkEvent::Withdrawn { peer_request, key } => {
                let withdrawn =
                    self.outgoing.remove_waiter(&key, |asking| asking.peer_request == peer_request);
                if let Some(asking) = withdrawn {
                    self.leave(&asking);
                }
            }
            LinkEvent::PutBack { key, value, number } => {
                if self.may_hold(key.step) {
                    let number = if is_on(Mutant::PutBackLast) { u64::MAX } else { number };
                    self.put_back(links, &key, Numbered { number, value: Outgoing::Value(value) });
                } else {
                    self.finished();
                }
            }
            LinkEvent::Returned { link, key, stash_id, number } => {
                if self.may_hold(key.step) {
                    self.put_back(
                        links,
                        &key,
                        Numbered { number, value: Outgoing::Stashed { link, stash_id } },
                    );
                }
            }
            LinkEvent::Resumed { bytes } => serving::sent(links, bytes),
            LinkEvent::SendComplete => self.finished(),
            LinkEvent::Up { link } => self.probed(link),
            LinkEvent::Down { link, failure, waiters } => {
                self.down(links, link, failure, waiters);
                self.by_link.remove(&link);
            }
        }
    }

    fn after_events(&mut self, links: &mut Links<P, Waiter>, now: Time) {
        self.resume(links, now);
    }

    fn next_deadline(&self) -> Time {
        self.next_deadline
    }

    fn expire(&mut self, links: &mut Links<P, Waiter>, now: Time) {
        self.expire_waiting(links, now);
    }
}
