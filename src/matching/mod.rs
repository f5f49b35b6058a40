//! What one poller keeps for the rendezvous: the tag matching of its peers' edges.
//!
//! A [`RemoteHandler`] holds outgoing values, matches them with the requests of peers, and delivers
//! what peers send. Its poller owns it, so it takes no lock. Users and the node reach it by a
//! [`RemoteCommand`]. The rendezvous uses the same tables and steps for edges within the process.
//!
//! Code in this module may not know the API of steps and edges above it, touch a fabric except
//! through links, or call user code.

mod aborted_steps;
mod batches;
mod command;
mod connections;
mod edge_report;
mod ending;
mod error;
#[cfg(test)]
mod explore;
mod fifo;
mod gone_steps;
mod losses;
mod orphans;
mod outstanding;
mod receiving;
mod serving;
mod standing;
mod steps;
mod table;
mod untaken;
mod waiter;
pub mod windows;

#[cfg(any(test, feature = "sim"))]
pub use command::RemoteLoad;
pub use command::{
    BatchReceive, BatchSend, Cancel, CancelAll, LinkTag, Members, OnPath, PeerIndex, PeerObserver,
    ProbeCallback, ReceiveAll, RemoteCommand, StandingChange, StepChange, UntakenCallback,
};
pub use edge_report::{EdgeReport, EdgeReports, EdgeWait};
pub use error::Error;
pub(crate) use gone_steps::MAX_RETIRED_STEPS;
pub(crate) use outstanding::{ReceiveLimit, ReceivePermit, reserve};
pub(crate) use steps::{BeginError, Begun, MANY_STEPS, MAX_ABORTED, StepState, Steps, check_live};
pub(crate) use table::{AskOutcome, Numbered, OfferOutcome, Table};
pub use untaken::{Untaken, UntakenEdge};
pub use waiter::{CallId, Delivery, Payload, Waiter};
pub(crate) use waiter::{CancelReason, Outcome};

use crate::fabric::{LinkId, Port};
use crate::link::{
    Handler, LinkEvent, LinkSettings, Links, PeerRequestId, Received, StashedValue, TensorKey, Value,
};
use crate::mutants::{Mutant, is_on};
use crate::wire::message::RequestId;
use crate::wire::{TaskId, Time};
use connections::Connections;
use foldhash::HashMap;
use receiving::Receive;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// Calls for which memory is allocated at the start.
const CALLS: usize = 256;

/// The handler of a poller that the rendezvous commands.
pub trait Remote<P: Port>: Handler<P, Command = RemoteCommand<P::Link>> {
    /// Whether [`Remote::windows`] returns a handler.
    const HAS_WINDOWS: bool = false;

    /// The handler, if its links exchange edge windows. A thread that holds the poller can call it
    /// without a command.
    fn windows(&mut self) -> Option<&mut windows::WindowHandler> {
        None
    }
}

impl<P: Port> Remote<P> for RemoteHandler {}

/// Settings of a [`RemoteHandler`].
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// Limits and timeouts of each link.
    pub link: LinkSettings,
    /// Limit of deferred requests of one peer: those for steps that have not begun here.
    pub max_deferred: u32,
    /// How long a cancelled call waits for the answer of its peer before it ends.
    pub cancel_grace: Duration,
    /// Whether the loss of a peer, other than its clean stop, ends every call with every peer.
    pub peer_loss_is_fatal: bool,
}

/// The rendezvous' part of a poller.
pub struct RemoteHandler {
    me: TaskId,
    settings: RemoteSettings,
    connections: Connections,
    /// The deferred requests of each peer.
    deferred: Vec<u32>,
    steps: Steps,
    outgoing: Table<Outgoing, WaitingRequest>,
    /// The link and request of each call that waits.
    calls: HashMap<CallId, (LinkId, RequestId)>,
    outstanding: Arc<AtomicUsize>,
    orphans: HashMap<TensorKey, VecDeque<StashedValue>>,
    standing: standing::StandingEdges,
    queued: batches::QueuedReceives,
    next_deadline: Time,
    /// The fatal loss that has ended every call, if any.
    broken: Option<Error>,
}

/// An entry in the line of a key.
#[derive(Debug)]
enum Outgoing {
    /// A value, which counts as outstanding.
    Value(Value),
    /// The place of a value in the peer's stash, by its id on that link.
    Stashed { link: LinkId, stash_id: u32 },
}

/// A request of a peer that waits for its value.
#[derive(Debug)]
struct WaitingRequest {
    peer_request: PeerRequestId,
    peer: PeerIndex,
    deadline: Time,
    deferred: bool,
}

impl RemoteHandler {
    /// A handler without links. `outstanding` counts the values in line here; senders read it.
    #[allow(clippy::too_many_arguments)] // each is a different thing that the node has
    pub fn new(
        me: TaskId,
        incarnation: u64,
        members: Members,
        settings: RemoteSettings,
        outstanding: Arc<AtomicUsize>,
        observer: Arc<dyn PeerObserver>,
    ) -> Self {
        let deferred = vec![0; members.all().len()];
        let queued = batches::QueuedReceives::new(deferred.len());
        RemoteHandler {
            connections: Connections::new(me.clone(), incarnation, members, &settings, observer),
            me,
            settings,
            deferred,
            steps: Steps::default(),
            outgoing: Table::default(),
            calls: HashMap::with_capacity_and_hasher(CALLS, Default::default()),
            outstanding,
            orphans: HashMap::default(),
            standing: standing::StandingEdges::default(),
            queued,
            next_deadline: Time::NEVER,
            broken: None,
        }
    }

    #[cfg(any(test, feature = "sim"))]
    fn load(&self, links: crate::link::LinkLoad) -> RemoteLoad {
        let (values, requests) = self.outgoing.len();
        let deferred = self.deferred.iter().map(|deferred| *deferred as usize).sum();
        let orphans = self.orphans.values().map(VecDeque::len).sum::<usize>() + links.stashed;
        RemoteLoad { links, values, requests, deferred, orphans, queued: self.queued.len() }
    }

    /// The values that no request has taken.
    fn untaken(&self) -> Untaken {
        let mut untaken = Untaken::default();
        let members = self.connections.members();
        let is_linked =
            |task: &TaskId| members.index(task).is_some_and(|peer| self.connections.usable(peer).is_some());
        let is_stashed = |value: &Outgoing| matches!(value, Outgoing::Stashed { .. });
        untaken.add_all(self.outgoing.values(), is_stashed, is_linked);
        untaken
    }

    /// Whether values of a step may be kept: the step is live, or its begin command of another
    /// thread is still queued.
    fn may_hold(&self, step: u64) -> bool {
        self.steps.is_live(step) || matches!(self.steps.state(step), StepState::NotBegun)
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
            RemoteCommand::Send { key, value, .. } => self.offer(links, key, value),
            RemoteCommand::SendAll(values) => self.send_all(links, values),
            RemoteCommand::ReceiveAll(batch) => self.receive_all(links, batch, now),
            RemoteCommand::CancelAll(cancel) => {
                return self.cancel_all(links, cancel, now).map(RemoteCommand::CancelAll);
            }
            RemoteCommand::Receive { peer, key, destination, waiter } => {
                self.receive_or_queue(links, Receive { peer, key, destination, waiter }, now);
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
                if let Some(old) = self.connections.replaced(peer, tag) {
                    self.replaced(links, old);
                }
                self.connections.attach(links, (peer, tag), link, done);
            }
            RemoteCommand::Standing(change) => {
                return self.standing_changed(links, change).map(RemoteCommand::Standing);
            }
            RemoteCommand::Ready { peer, tag } => self.ready(links, peer, tag),
            RemoteCommand::Lose { peer, tag, cause } => self.connections.lose(links, peer, tag, cause),
            RemoteCommand::Gone { peer, tag, cause } => {
                let loss = self.connections.gone(links, peer, tag, cause);
                self.lost(links, loss);
            }
            RemoteCommand::End { error } => self.end(links, &error),
            // Requests have no windows.
            RemoteCommand::Edges { done, .. } => done(EdgeReports::default()),
            RemoteCommand::Untaken { done, .. } => done(self.untaken(), 0),
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
                // Values of an old incarnation are not for its successor (specification 2.2).
                if !self.connections.is_superseded(key.edge.source_task(), incarnation) {
                    self.store_orphan(key, value);
                }
            }
            LinkEvent::Withdrawn { peer_request, key } => {
                let withdrawn =
                    self.outgoing.remove_waiter(&key, |waiting| waiting.peer_request == peer_request);
                if let Some(waiting) = withdrawn {
                    self.leave(&waiting);
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
            LinkEvent::Up { link } => self.connections.probed(link),
            LinkEvent::Down { link, failure, waiters } => {
                self.down(links, link, failure, waiters);
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
