//! What a poller does for the rendezvous: keeps outgoing tensors, matches peers' requests with them, and
//! brings what peers send to whoever waits here. Owned by its poller, so nothing in it takes a lock.

mod batches;
mod ending;
#[cfg(test)]
mod explore;
mod peers;
mod receiving;
mod serving;
mod standing;
mod unclaimed;

use super::path::{Cancel, CancelAll, LinkTag, Members, PeerIndex, StandingChange, StepChange};
use super::reuse::Reused;
use super::steps::{StepState, Steps};
use super::table::{Numbered, Table};
use super::waiter::{CallId, Waiter};
use super::{Error, LossCause};
use crate::engine::Handler;
use crate::fabric::{LinkId, Port};
use crate::link::{
    HeldValue, Incoming, LinkEvent, LinkLoad, LinkSettings, Links, Received, TensorKey, Value, Want,
};
use crate::mutants::{Mutant, is_on};
use crate::wire::message::RequestId;
use crate::wire::{TaskId, Time};
use foldhash::HashMap;
use receiving::Receive;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

pub use batches::{ReceiveAll, Receiving, Sending};

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
pub type Tried = Box<dyn FnOnce(Result<(), String>) + Send>;

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
        done: Tried,
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
        want: Want,
        /// For whom.
        waiter: Waiter,
    },
    /// Several values for peers.
    SendAll(Reused<Sending>),
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
    /// How much is there to do?
    Load(Box<dyn FnOnce(Load) + Send>),
}

/// How much a poller keeps for the rendezvous, to see what a program waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Of its links.
    pub links: LinkLoad,
    /// Values that no peer has asked for yet.
    pub values: usize,
    /// Requests of peers that wait for their value.
    pub asking: usize,
    /// Those of them that wait for their step to begin.
    pub deferred: usize,
    /// Values that came when nobody waited for them any more.
    pub unclaimed: usize,
    /// Receives that wait until there is room to ask for them.
    pub held_up: usize,
}

/// Told when a peer came or went. Nothing in it may block.
pub trait PeerWatch: Send + Sync {
    /// A link with this life of the peer works in both directions, as both sides have said.
    fn up(&self, peer: PeerIndex, tag: LinkTag);
    /// A peer was lost: a link that was up is gone, or a life is over that was to be linked.
    fn down(&self, peer: PeerIndex, tag: LinkTag, error: Error);
    /// A link had failed already when both sides said that it is up. Nobody has used it.
    fn stillborn(&self, peer: PeerIndex, tag: LinkTag);
}

/// The rendezvous' half of a poller.
pub struct Remote {
    me: TaskId,
    incarnation: u64,
    members: Members,
    settings: RemoteSettings,
    peers: Vec<Peer>,
    /// Whose each link is, or was in an earlier life.
    by_link: HashMap<LinkId, PeerIndex>,
    steps: Steps,
    outgoing: Table<Outgoing, Asking>,
    /// The requests of the calls that wait on a link.
    calls: HashMap<CallId, (LinkId, RequestId)>,
    outstanding: Arc<AtomicUsize>,
    unclaimed: HashMap<TensorKey, VecDeque<HeldValue>>,
    standing: standing::Standings,
    held_up: batches::HeldUpTable,
    next_deadline: Time,
    watch: Arc<dyn PeerWatch>,
    /// The loss that ended everything, where such losses do.
    broken: Option<Error>,
}

#[derive(Default)]
struct Peer {
    /// The present link, or the attempt at one.
    tie: Option<Tie>,
    /// How the last link that was up has ended, or the life that was to be linked, until another one is up.
    lost: Option<(LinkTag, LossCause)>,
    deferred: u32,
}

struct Tie {
    link: LinkId,
    tag: LinkTag,
    stage: Stage,
    /// Why the link is being failed, if this side knows better than the fabric.
    verdict: Option<LossCause>,
}

/// How far a link is. Until it is up, its end is nobody's loss: it is tried again.
enum Stage {
    Trying(Tried),
    Tried,
    Up,
}

impl Peer {
    /// The link that calls may use now.
    fn usable(&self) -> Option<LinkId> {
        self.tie.as_ref().filter(|tie| matches!(tie.stage, Stage::Up)).map(|tie| tie.link)
    }
}

/// Something in line for a peer.
#[derive(Debug)]
enum Outgoing {
    /// A value. It counts as outstanding.
    Value(Value),
    /// The place of a value that the peer holds itself, by its name on that link.
    Held { link: LinkId, held: u32 },
}

/// A peer's request that waits for its value.
#[derive(Debug)]
struct Asking {
    incoming: Incoming,
    peer: PeerIndex,
    deadline: Time,
    deferred: bool,
}

impl Remote {
    /// No peers yet. `outstanding` counts the values that wait here, for senders to look at.
    #[allow(clippy::too_many_arguments)] // each is a different thing that the node has
    pub fn new(
        me: TaskId,
        incarnation: u64,
        members: Members,
        settings: RemoteSettings,
        outstanding: Arc<AtomicUsize>,
        watch: Arc<dyn PeerWatch>,
    ) -> Self {
        let peers: Vec<_> = members.all().iter().map(|_| Peer::default()).collect();
        let held_up = batches::HeldUpTable::new(peers.len());
        Remote {
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
            unclaimed: HashMap::default(),
            standing: standing::Standings::default(),
            held_up,
            next_deadline: Time::NEVER,
            watch,
            broken: None,
        }
    }

    fn load(&self, links: LinkLoad) -> Load {
        let (values, asking) = self.outgoing.len();
        let deferred = self.peers.iter().map(|peer| peer.deferred as usize).sum();
        let orphans = self.unclaimed.values().map(VecDeque::len).sum::<usize>();
        let unclaimed = orphans + links.held;
        Load { links, values, asking, deferred, unclaimed, held_up: self.held_up.len() }
    }

    /// Whether values of a step may be kept: it goes on, or the word that it has begun is still to come from the thread that
    /// began it, and another thread was quicker with a value.
    fn may_hold(&self, step: u64) -> bool {
        self.steps.is_live(step) || matches!(self.steps.state(step), StepState::NotBegun)
    }

    fn peer(&mut self, index: PeerIndex) -> &mut Peer {
        &mut self.peers[index.0 as usize]
    }

    fn peer_of(&self, link: LinkId) -> Option<PeerIndex> {
        let index = *self.by_link.get(&link)?;
        let tie = self.peers[index.0 as usize].tie.as_ref()?;
        (tie.link == link).then_some(index)
    }
}

impl<P: Port> Handler<P> for Remote {
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
            RemoteCommand::Receive { peer, key, want, waiter } => {
                self.receive(links, Receive { peer, key, want, waiter }, now);
            }
            RemoteCommand::Cancel(cancel) => match self.calls.contains_key(&cancel.id) {
                true => self.cancel(links, &cancel, now),
                false => {
                    self.cancel_held_up(&cancel.why, |id| id == cancel.id);
                    return Some(RemoteCommand::Cancel(cancel));
                }
            },
            RemoteCommand::Step(change) => self.step_changed(links, change),
            RemoteCommand::Attach { peer, tag, link, done } => {
                self.attach(links, peer, tag, link, done);
                if let Some(link) = self.peer(peer).tie.as_ref().map(|tie| tie.link) {
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
            RemoteCommand::Load(done) => done(self.load(links.load())),
        }
        None
    }

    fn event(&mut self, links: &mut Links<P, Waiter>, event: LinkEvent<Waiter>, now: Time) {
        match event {
            LinkEvent::Asked { incoming, key, timeout_ms, armed } => {
                self.asked(links, incoming, &key, timeout_ms, armed, now);
            }
            LinkEvent::Arrived { waiter, key, received, sender } => {
                self.calls.remove(&waiter.id);
                if is_on(Mutant::DeliveredTwice)
                    && waiter.gave_up.is_some()
                    && let Received::Tensor(tensor) = &received
                {
                    self.keep_unclaimed(key, HeldValue::Tensor { tensor: tensor.clone(), sender });
                }
                Self::arrived(links, waiter, received, sender);
            }
            LinkEvent::Failed { waiter, key, error } => {
                self.calls.remove(&waiter.id);
                self.failed(links.counters(), waiter, &key, error);
            }
            LinkEvent::Orphaned { key, value, incarnation } => {
                // What an old life had sent is not the new one's (specification 2.2).
                if !self.is_succeeded(key.edge.source_task(), incarnation) {
                    self.keep_unclaimed(key, value);
                }
            }
            LinkEvent::Withdrawn { incoming, key } => {
                let withdrawn = self.outgoing.remove_waiter(&key, |asking| asking.incoming == incoming);
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
            LinkEvent::Returned { link, key, held, number } => {
                if self.may_hold(key.step) {
                    self.put_back(links, &key, Numbered { number, value: Outgoing::Held { link, held } });
                }
            }
            LinkEvent::Answered { bytes } => serving::sent(links, bytes),
            LinkEvent::Finished => self.finished(),
            LinkEvent::Up { link } => self.tried(link),
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
