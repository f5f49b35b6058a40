//! What a poller does for the rendezvous: keeps outgoing tensors, matches peers' requests with them, and
//! brings what peers send to whoever waits here. Owned by its poller, so nothing in it takes a lock.

use super::path::{Cancel, Members, PeerIndex, StepChange};
use super::steps::{StepState, Steps};
use super::table::{Asked, Offered, Table};
use super::waiter::{Delivery, GiveUp, Payload, Waiter};
use super::{Error, LossCause};
use crate::engine::Handler;
use crate::fabric::{FabricError, LinkFailure, LinkId, Port};
use crate::link::{
    Incoming, LinkEvent, LinkIdentity, LinkSettings, Links, Received, RequestError, RequestRefused,
    TensorKey, Value, Want,
};
use crate::memory::{Tensor, TensorMut};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::Side;
use crate::wire::{Code, Status, TaskId, TensorMeta, Time};
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

/// A value that came when nobody waited for it any more.
#[derive(Debug)]
enum Unclaimed {
    Tensor { tensor: Tensor, sender: Side },
    Dead,
    Bytes { meta: TensorMeta, bytes: Box<[u8]>, sender: Side },
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

    fn peer(&mut self, index: PeerIndex) -> &mut Peer {
        &mut self.peers[index.0 as usize]
    }

    fn peer_of(&self, link: LinkId) -> Option<PeerIndex> {
        let at = self.peers.iter().position(|peer| peer.state.link() == Some(link))?;
        Some(PeerIndex(at as u32))
    }

    // ---- peers ----

    fn attach<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        incarnation: u64,
        link: P::Link,
        done: Box<dyn FnOnce(Result<(), String>) + Send>,
    ) {
        if let Some((old, incarnation)) = self.peer(index).state.life() {
            let cause = LossCause::Closed("it has come back in a new life".into());
            let peer = self.members.task(index).clone();
            let error = Error::PeerLost { peer, incarnation, cause };
            links.give_up(old, &mut |_, waiter| {
                if let Some(waiter) = waiter.take() {
                    waiter.complete(Err(error.clone()));
                }
                false
            });
            links.fail(old, LinkFailure::Local("the peer has come back in a new life".into()));
        }
        let identity = LinkIdentity {
            local: self.me.clone(),
            local_incarnation: self.incarnation,
            peer: self.members.task(index).clone(),
            peer_incarnation: incarnation,
        };
        match links.attach(link, identity, self.settings.link.clone()) {
            Ok(link) => self.peer(index).state = PeerState::Connecting { link, incarnation, done },
            Err(error) => done(Err(FabricError::to_string(&error))),
        }
    }

    fn up(&mut self, link: LinkId) {
        let Some(index) = self.peer_of(link) else { return };
        let state = std::mem::take(&mut self.peer(index).state);
        let PeerState::Connecting { link, incarnation, done } = state else {
            self.peer(index).state = state;
            return;
        };
        self.peer(index).state = PeerState::Up { link, incarnation };
        self.watch.up(index, incarnation);
        done(Ok(()));
    }

    fn down<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        link: LinkId,
        failure: LinkFailure,
        waiters: Vec<Waiter>,
    ) {
        let asking = self.outgoing.remove_waiters(|_, asking| asking.incoming.link == link);
        for (_, asking) in asking {
            self.leave(&asking);
        }
        // A link of an earlier life was emptied when the new life came.
        let Some(index) = self.peer_of(link) else { return };
        let cause = self.peer(index).verdict.take().unwrap_or_else(|| cause_of(failure));
        let state = std::mem::take(&mut self.peer(index).state);
        let incarnation = match state {
            PeerState::Connecting { incarnation, done, .. } => {
                done(Err(cause.to_string()));
                incarnation
            }
            PeerState::Up { incarnation, .. } | PeerState::Lost { incarnation, .. } => incarnation,
            PeerState::Absent => 0,
        };
        self.peer(index).state = PeerState::Lost { incarnation, cause: cause.clone() };
        links.counters().increment(Counter::PeersLost);
        let peer = self.members.task(index).clone();
        let error = Error::PeerLost { peer, incarnation, cause: cause.clone() };
        for waiter in waiters {
            waiter.complete(Err(error.clone()));
        }
        if self.settings.peer_loss_is_fatal && !cause.is_clean() && self.broken.is_none() {
            self.broken = Some(error.clone());
            self.fail_waiters(links, &error);
        }
        self.watch.down(index, error);
    }

    /// Every call on every link ends with this error.
    fn fail_waiters<P: Port>(&mut self, links: &mut Links<P, Waiter>, error: &Error) {
        for link in links.ids() {
            links.give_up(link, &mut |_, waiter| {
                if let Some(waiter) = waiter.take() {
                    waiter.complete(Err(error.clone()));
                }
                true
            });
        }
    }

    fn lose<P: Port>(&mut self, links: &mut Links<P, Waiter>, index: PeerIndex, cause: LossCause) {
        let peer = self.peer(index);
        if let Some(link) = peer.state.link() {
            let why = LinkFailure::Local(cause.to_string());
            peer.verdict = Some(cause);
            links.fail(link, why);
        }
    }

    // ---- sending ----

    fn offer<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        mut value: Value,
        offer: fn(&mut Table<Value, Asking>, &TensorKey, Value) -> Offered<Value, Asking>,
    ) {
        loop {
            match offer(&mut self.outgoing, key, value) {
                Offered::Kept => return,
                Offered::Matched(asking, matched) => {
                    self.leave(&asking);
                    match self.serve(links, asking.incoming, matched) {
                        None => return,
                        // That request was gone; the next one in line gets the value.
                        Some(back) => value = back,
                    }
                }
            }
        }
    }

    /// Hands a value to a peer's request. Returns it if the request is gone.
    fn serve<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        incoming: Incoming,
        value: Value,
    ) -> Option<Value> {
        let bytes = match &value {
            Value::Tensor(tensor) => tensor.meta().bytes(),
            Value::Dead => 0,
        };
        let back = links.serve(incoming, value);
        if back.is_none() {
            self.outstanding.fetch_sub(1, Ordering::Relaxed);
            links.counters().increment(Counter::TensorsSent);
            links.counters().add(Counter::BytesSent, bytes);
        }
        back
    }

    fn asked<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        incoming: Incoming,
        key: &TensorKey,
        timeout_ms: u32,
        now: Time,
    ) {
        let Some(peer) = self.peer_of(incoming.link) else { return };
        let deferred = match self.steps.is_live(key.step) {
            true => false,
            false => match self.steps.state(key.step) {
                StepState::Live => false,
                StepState::NotBegun => true,
                StepState::Aborted(status) => return links.refuse(incoming, status.into_derived()),
                StepState::Gone => {
                    let message = format!("step {} was cleaned up at {}", key.step, self.me);
                    return links.refuse(incoming, Status::new(Code::NotFound, message));
                }
            },
        };
        if deferred && self.peer(peer).deferred >= self.settings.max_deferred {
            let message = format!(
                "{} requests wait at {} for steps that have not begun there (this one for step {}), which is the limit: raise max_deferred",
                self.settings.max_deferred, self.me, key.step
            );
            return links.refuse(incoming, Status::new(Code::ResourceExhausted, message));
        }
        let deadline = match timeout_ms {
            u32::MAX => Time::NEVER,
            ms => now + Duration::from_millis(ms.into()),
        };
        match self.outgoing.ask(key, Asking { incoming, peer, deadline, deferred }) {
            Asked::Matched(asking, value) => {
                if let Some(back) = self.serve(links, asking.incoming, value) {
                    self.offer(links, key, back, Table::put_back);
                }
            }
            Asked::Kept => {
                self.next_deadline = self.next_deadline.min(deadline);
                if deferred {
                    self.peer(peer).deferred += 1;
                    links.counters().increment(Counter::RequestsDeferred);
                }
            }
        }
    }

    /// A peer's request has left the table.
    fn leave(&mut self, asking: &Asking) {
        if asking.deferred {
            let peer = self.peer(asking.peer);
            peer.deferred = peer.deferred.saturating_sub(1);
        }
    }

    // ---- receiving ----

    fn receive<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        key: TensorKey,
        want: Want,
        waiter: Waiter,
        now: Time,
    ) {
        if let Err(error) = super::local::check_live(&self.steps, key.step) {
            return waiter.complete(Err(error));
        }
        if let Some(error) = &self.broken {
            return waiter.complete(Err(error.clone()));
        }
        if !self.unclaimed.is_empty()
            && let Some(unclaimed) = self.claim(&key)
        {
            return self.deliver_unclaimed(links, key, want, waiter, unclaimed);
        }
        let peer = self.members.task(index).clone();
        let link = match &self.peers[index.0 as usize].state {
            PeerState::Up { link, .. } => *link,
            PeerState::Absent | PeerState::Connecting { .. } => {
                return waiter.complete(Err(Error::NotConnected { peer }));
            }
            PeerState::Lost { incarnation, cause } => {
                let (incarnation, cause) = (*incarnation, cause.clone());
                return waiter.complete(Err(Error::PeerLost { peer, incarnation, cause }));
            }
        };
        let timeout_ms = match waiter.deadline {
            Time::NEVER => u32::MAX,
            deadline => u32::try_from(deadline.since(now).as_millis()).unwrap_or(u32::MAX),
        };
        self.next_deadline = self.next_deadline.min(waiter.deadline);
        if let Err((refused, waiter)) = links.request(link, key.clone(), want, timeout_ms, waiter) {
            waiter.complete(Err(self.refused(refused, &key, index)));
        }
    }

    fn refused(&self, refused: RequestRefused, key: &TensorKey, peer: PeerIndex) -> Error {
        match refused {
            RequestRefused::NoLink => Error::NotConnected { peer: self.members.task(peer).clone() },
            RequestRefused::TooManyRequests { max } => Error::ResourceExhausted {
                what: "the number of receives outstanding with a peer",
                limit: max.into(),
                remedy: "raise max_requests, or wait for some first",
            },
            RequestRefused::TooManyRoutes { max } => Error::ResourceExhausted {
                what: "the number of edges with a receive outstanding",
                limit: max.into(),
                remedy: "raise max_routes, or wait for some first",
            },
            RequestRefused::NoRoom(error) => Error::NoRoom { key: key.to_string(), source: Arc::new(error) },
        }
    }

    fn arrived<P: Port>(&mut self, links: &Links<P, Waiter>, waiter: Option<Waiter>, key: TensorKey, received: Received, sender: Side) {
        let Some(waiter) = waiter else {
            let unclaimed = match received {
                Received::Tensor(tensor) | Received::Misfit { value: tensor, .. } => {
                    Unclaimed::Tensor { tensor, sender }
                }
                Received::Into(given) => Unclaimed::Tensor { tensor: given.freeze(), sender },
                Received::Dead(_) => Unclaimed::Dead,
                Received::Unplaced { meta, bytes, .. } => Unclaimed::Bytes { meta, bytes, sender },
            };
            return self.keep_unclaimed(key, unclaimed);
        };
        match received {
            Received::Tensor(tensor) => {
                Self::deliver(links.counters(), waiter, Payload::Tensor(tensor), false, sender)
            }
            Received::Into(given) => {
                Self::deliver(links.counters(), waiter, Payload::Into(given), false, sender)
            }
            Received::Dead(None) => {
                Self::deliver(links.counters(), waiter, Payload::Tensor(Tensor::empty()), true, sender)
            }
            Received::Dead(Some(given)) => {
                Self::deliver(links.counters(), waiter, Payload::Into(given), true, sender)
            }
            Received::Misfit { value, given } => {
                let sent = value.meta().clone();
                waiter.complete(Err(Error::Misfit { key: key.to_string(), sent, given }));
                self.keep_unclaimed(key, Unclaimed::Tensor { tensor: value, sender });
            }
            Received::Unplaced { meta, bytes, error } => {
                links.counters().increment(Counter::PoolExhausted);
                waiter.complete(Err(Error::NoRoom { key: key.to_string(), source: Arc::new(error) }));
                self.keep_unclaimed(key, Unclaimed::Bytes { meta, bytes, sender });
            }
        }
    }

    fn deliver(counters: &CountersWriter, waiter: Waiter, payload: Payload, is_dead: bool, sender: Side) {
        let (bytes, receiver) = match &payload {
            Payload::Tensor(tensor) if tensor.is_lent() => (tensor.meta().bytes(), Side::BORROWED),
            Payload::Tensor(tensor) => (tensor.meta().bytes(), Side::POOL),
            Payload::Into(_) if is_dead => (0, Side::POOL),
            Payload::Into(given) => (given.meta().bytes(), Side::POOL),
        };
        counters.increment(Counter::TensorsReceived);
        counters.add(Counter::BytesReceived, bytes);
        waiter.complete(Ok(Delivery { tensor: payload, is_dead, sender, receiver }));
    }

    fn failed(&self, counters: &CountersWriter, waiter: Waiter, key: &TensorKey, error: RequestError) {
        let name = key.to_string();
        let error = match error {
            RequestError::GivenUp => return waiter.given_up(key),
            RequestError::Remote(status) => {
                let peer = key.edge.source_task().clone();
                Error::Remote { peer, key: name, status }
            }
            RequestError::NoRoom(error) => {
                counters.increment(Counter::PoolExhausted);
                Error::NoRoom { key: name, source: Arc::new(error) }
            }
            RequestError::NoGrant(_) => Error::ResourceExhausted {
                what: "the number of destinations granted on a link",
                limit: self.settings.link.max_requests.into(),
                remedy: "wait for some receives first",
            },
            RequestError::Misfit { sent, given } => Error::Misfit { key: name, sent, given },
        };
        waiter.complete(Err(error));
    }

    // ---- values that came too late for their waiter ----

    fn keep_unclaimed(&mut self, key: TensorKey, unclaimed: Unclaimed) {
        if self.steps.is_live(key.step) {
            self.unclaimed.entry(key).or_default().push_back(unclaimed);
        }
    }

    fn claim(&mut self, key: &TensorKey) -> Option<Unclaimed> {
        let kept = self.unclaimed.get_mut(key)?;
        let first = kept.pop_front();
        if kept.is_empty() {
            self.unclaimed.remove(key);
        }
        first
    }

    fn deliver_unclaimed<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: TensorKey,
        want: Want,
        waiter: Waiter,
        unclaimed: Unclaimed,
    ) {
        let (tensor, sender) = match unclaimed {
            Unclaimed::Dead => {
                let payload = match want {
                    Want::Into(given) => Payload::Into(given),
                    Want::Fresh | Want::Borrow => Payload::Tensor(Tensor::empty()),
                };
                return Self::deliver(links.counters(), waiter, payload, true, Side::HEAP);
            }
            Unclaimed::Tensor { tensor, sender } => (tensor, sender),
            Unclaimed::Bytes { meta, bytes, sender } => match links.pool().tensor(meta.clone()) {
                Ok(mut tensor) => {
                    tensor.bytes_mut().copy_from_slice(&bytes);
                    (tensor.freeze(), sender)
                }
                Err(error) => {
                    waiter.complete(Err(Error::NoRoom { key: key.to_string(), source: Arc::new(error) }));
                    self.unclaimed.entry(key).or_default().push_front(Unclaimed::Bytes {
                        meta,
                        bytes,
                        sender,
                    });
                    return;
                }
            },
        };
        match want {
            Want::Fresh | Want::Borrow => {
                Self::deliver(links.counters(), waiter, Payload::Tensor(tensor), false, sender)
            }
            Want::Into(given) => match fill(given, &tensor) {
                Ok(given) => Self::deliver(links.counters(), waiter, Payload::Into(given), false, sender),
                Err(given) => {
                    let (sent, given) = (tensor.meta().clone(), given.meta().clone());
                    waiter.complete(Err(Error::Misfit { key: key.to_string(), sent, given }));
                    let kept = Unclaimed::Tensor { tensor, sender };
                    self.unclaimed.entry(key).or_default().push_front(kept);
                }
            },
        }
    }

    // ---- the end of calls and steps ----

    fn cancel<P: Port>(&mut self, links: &mut Links<P, Waiter>, cancel: &Cancel, now: Time) {
        let grace = now + self.settings.cancel_grace;
        let mut next = self.next_deadline;
        for link in links.ids() {
            links.give_up(link, &mut |_, waiter| {
                let Some(waiter) = waiter.as_mut().filter(|waiter| waiter.id == cancel.id) else {
                    return false;
                };
                if waiter.gave_up.is_none() {
                    waiter.gave_up = Some(cancel.why.clone());
                    waiter.deadline = grace;
                    next = next.min(grace);
                }
                true
            });
        }
        self.next_deadline = next;
    }

    fn step_changed<P: Port>(&mut self, links: &mut Links<P, Waiter>, change: StepChange) {
        match change {
            StepChange::Sequence { base } => self.steps.sequence(base),
            StepChange::Begun { step, worker } => {
                // The rendezvous has checked that it may begin.
                let _ = self.steps.begin(step, &worker);
                self.undefer(step);
            }
            StepChange::Aborted { step, status } => {
                self.steps.abort(step, status.clone());
                let error = Error::Aborted { step, status: status.clone() };
                self.end_step(links, step, &error, &status.into_derived());
            }
            StepChange::CleanedUp { step } => {
                self.steps.cleanup(step);
                let status =
                    Status::new(Code::NotFound, format!("step {step} was cleaned up at {}", self.me));
                self.end_step(links, step, &Error::StepGone { step }, &status);
            }
        }
    }

    /// The requests that waited for the step to begin are like any others now.
    fn undefer(&mut self, step: u64) {
        if self.peers.iter().all(|peer| peer.deferred == 0) {
            return;
        }
        let waiting = self.outgoing.remove_waiters(|key, asking| key.step == step && asking.deferred);
        for (key, asking) in waiting {
            self.leave(&asking);
            // Nothing was offered for a step that had not begun, so the waiter is kept.
            let _ = self.outgoing.ask(&key, Asking { deferred: false, ..asking });
        }
    }

    fn end_step<P: Port>(&mut self, links: &mut Links<P, Waiter>, step: u64, error: &Error, status: &Status) {
        let (values, asking) = self.outgoing.remove_steps(|kept| kept == step);
        self.outstanding.fetch_sub(values, Ordering::Relaxed);
        for (_, asking) in asking {
            self.leave(&asking);
            links.refuse(asking.incoming, status.clone());
        }
        self.unclaimed.retain(|key, _| key.step != step);
        for link in links.ids() {
            links.give_up(link, &mut |key, waiter| {
                if key.step != step {
                    return false;
                }
                if let Some(waiter) = waiter.take() {
                    waiter.complete(Err(error.clone()));
                }
                true
            });
        }
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
                    self.outstanding.fetch_add(1, Ordering::Relaxed);
                    self.offer(links, &key, value, Table::put_back);
                }
            }
            LinkEvent::Up { link } => self.up(link),
            LinkEvent::Down { link, failure, waiters } => self.down(links, link, failure, waiters),
        }
    }

    fn next_deadline(&self) -> Time {
        self.next_deadline
    }

    fn expire(&mut self, links: &mut Links<P, Waiter>, now: Time) {
        let mut next = Time::NEVER;
        let grace = now + self.settings.cancel_grace;
        for link in links.ids() {
            links.give_up(link, &mut |key, slot| {
                let Some(waiter) = slot else { return false };
                if now < waiter.deadline {
                    next = next.min(waiter.deadline);
                    return false;
                }
                if waiter.gave_up.is_none() {
                    waiter.gave_up = Some(GiveUp::Deadline);
                    waiter.deadline = grace;
                    next = next.min(grace);
                } else if let Some(waiter) = slot.take() {
                    // The peer has not even said that it lets go: it is told later, the waiter now.
                    waiter.given_up(key);
                }
                true
            });
        }
        let late = self.outgoing.remove_waiters(|_, asking| asking.deadline <= now);
        for (key, asking) in late {
            self.leave(&asking);
            let message = format!("nothing was sent for {key} at {} in time", self.me);
            links.refuse(asking.incoming, Status::new(Code::DeadlineExceeded, message));
        }
        for (_, asking) in self.outgoing.waiters() {
            next = next.min(asking.deadline);
        }
        self.next_deadline = next;
    }
}

fn fill(mut given: TensorMut, from: &Tensor) -> Result<TensorMut, TensorMut> {
    if given.meta() != from.meta() {
        return Err(given);
    }
    given.bytes_mut().copy_from_slice(from.bytes());
    Ok(given)
}

fn cause_of(failure: LinkFailure) -> LossCause {
    match failure {
        LinkFailure::PeerDied { .. } => LossCause::Died(failure.to_string()),
        LinkFailure::Closed => LossCause::Left(failure.to_string()),
        LinkFailure::Local(why) => LossCause::Closed(why),
        other => LossCause::Protocol(other.to_string()),
    }
}
