//! What a poller does for the rendezvous: keeps outgoing tensors, matches peers' requests with them, and
//! brings what peers send to whoever waits here. Owned by its poller, so nothing in it takes a lock.

mod ending;
mod peers;
mod receiving;
mod serving;
mod unclaimed;

use self::unclaimed::Unclaimed;

use super::path::{Cancel, Members, PeerIndex, StepChange};
use super::steps::Steps;
use super::table::Table;
use super::waiter::Waiter;
use super::{Error, LossCause};
use crate::engine::Handler;
use crate::fabric::{LinkId, Port};
use crate::link::{Incoming, LinkEvent, LinkLoad, LinkSettings, Links, TensorKey, Value, Want};
use crate::mutants::{Mutant, is_on};
use crate::wire::{TaskId, Time};
use foldhash::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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

/// What users and the node hand over to the poller.
pub enum RemoteOp<L> {
    /// A new link.
    Attach {
        /// With whom.
        peer: PeerIndex,
        /// Which life of it.
        incarnation: u64,
        /// The link.
        link: L,
        /// Told when the link has been tried in both directions, or failed.
        done: Box<dyn FnOnce(Result<(), String>) + Send>,
    },
    /// A peer is gone.
    Lose {
        /// Which.
        peer: PeerIndex,
        /// Why.
        cause: LossCause,
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
    /// A call ends.
    Cancel(Cancel),
    /// A step changed its state.
    Step(StepChange),
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
}

/// Told when a peer came or went.
pub trait PeerWatch: Send + Sync {
    /// A link with this life of the peer works in both directions.
    fn up(&self, peer: PeerIndex, incarnation: u64);
    /// The link with this life of the peer is gone.
    fn down(&self, peer: PeerIndex, error: Error);
}

/// The rendezvous' half of a poller.
pub struct Remote {
    me: TaskId,
    incarnation: u64,
    members: Members,
    settings: RemoteSettings,
    peers: Vec<Peer>,
    steps: Steps,
    outgoing: Table<Value, Asking>,
    outstanding: Arc<AtomicUsize>,
    unclaimed: HashMap<TensorKey, VecDeque<Unclaimed>>,
    next_deadline: Time,
    watch: Arc<dyn PeerWatch>,
    /// The loss that ended everything, where such losses do.
    broken: Option<Error>,
}

#[derive(Default)]
struct Peer {
    state: PeerState,
    deferred: u32,
    /// Why the link is being failed, if this side knows better than the fabric.
    verdict: Option<LossCause>,
}

#[derive(Default)]
enum PeerState {
    #[default]
    Absent,
    Connecting {
        link: LinkId,
        incarnation: u64,
        done: Box<dyn FnOnce(Result<(), String>) + Send>,
    },
    Up {
        link: LinkId,
        incarnation: u64,
    },
    Lost {
        incarnation: u64,
        cause: LossCause,
    },
}

impl PeerState {
    fn life(&self) -> Option<(LinkId, u64)> {
        match self {
            PeerState::Connecting { link, incarnation, .. } | PeerState::Up { link, incarnation } => {
                Some((*link, *incarnation))
            }
            PeerState::Absent | PeerState::Lost { .. } => None,
        }
    }

    fn link(&self) -> Option<LinkId> {
        self.life().map(|(link, _)| link)
    }
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
        let peers = members.all().iter().map(|_| Peer::default()).collect();
        Remote {
            me,
            incarnation,
            members,
            settings,
            peers,
            steps: Steps::default(),
            outgoing: Table::default(),
            outstanding,
            unclaimed: HashMap::default(),
            next_deadline: Time::NEVER,
            watch,
            broken: None,
        }
    }

    fn load(&self, links: LinkLoad) -> Load {
        let (values, asking) = self.outgoing.len();
        let deferred = self.peers.iter().map(|peer| peer.deferred as usize).sum();
        let unclaimed = self.unclaimed.values().map(VecDeque::len).sum();
        Load { links, values, asking, deferred, unclaimed }
    }

    fn peer(&mut self, index: PeerIndex) -> &mut Peer {
        &mut self.peers[index.0 as usize]
    }

    fn peer_of(&self, link: LinkId) -> Option<PeerIndex> {
        let at = self.peers.iter().position(|peer| peer.state.link() == Some(link))?;
        Some(PeerIndex(at as u32))
    }
}

impl<P: Port> Handler<P> for Remote {
    type Waiter = Waiter;
    type Op = RemoteOp<P::Link>;

    fn op(&mut self, links: &mut Links<P, Waiter>, op: Self::Op, now: Time) {
        match op {
            RemoteOp::Send { key, value } => {
                if self.steps.is_live(key.step) {
                    self.offer(links, &key, value, Table::offer);
                } else {
                    self.outstanding.fetch_sub(1, Ordering::Relaxed);
                }
            }
            RemoteOp::Receive { peer, key, want, waiter } => {
                self.receive(links, peer, key, want, waiter, now);
            }
            RemoteOp::Cancel(cancel) => self.cancel(links, &cancel, now),
            RemoteOp::Step(change) => self.step_changed(links, change),
            RemoteOp::Attach { peer, incarnation, link, done } => {
                self.attach(links, peer, incarnation, link, done);
            }
            RemoteOp::Lose { peer, cause } => self.lose(links, peer, cause),
            RemoteOp::Load(done) => done(self.load(links.load())),
        }
    }

    fn event(&mut self, links: &mut Links<P, Waiter>, event: LinkEvent<Waiter>, now: Time) {
        match event {
            LinkEvent::Asked { incoming, key, timeout_ms } => {
                self.asked(links, incoming, &key, timeout_ms, now);
            }
            LinkEvent::Arrived { waiter, key, received, sender } => {
                self.arrived(links, waiter, key, received, sender);
            }
            LinkEvent::Failed { waiter: Some(waiter), key, error } => {
                self.failed(links.counters(), waiter, &key, error)
            }
            LinkEvent::Failed { waiter: None, .. } => {}
            LinkEvent::Withdrawn { incoming, key } => {
                let withdrawn = self.outgoing.remove_waiter(&key, |asking| asking.incoming == incoming);
                if let Some(asking) = withdrawn {
                    self.leave(&asking);
                }
            }
            LinkEvent::PutBack { key, value } => {
                if self.steps.is_live(key.step) {
                    let offer = if is_on(Mutant::PutBackLast) { Table::offer } else { Table::put_back };
                    self.offer(links, &key, value, offer);
                } else {
                    self.outstanding.fetch_sub(1, Ordering::Relaxed);
                }
            }
            LinkEvent::Answered { bytes } => serving::sent(links, bytes),
            LinkEvent::Finished => self.finished(),
            LinkEvent::Up { link } => self.up(link),
            LinkEvent::Down { link, failure, waiters } => self.down(links, link, failure, waiters),
        }
    }

    fn next_deadline(&self) -> Time {
        self.next_deadline
    }

    fn expire(&mut self, links: &mut Links<P, Waiter>, now: Time) {
        self.expire_waiting(links, now);
    }
}
