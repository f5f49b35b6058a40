//! The links of one poller and the port that they complete on.

use super::control::batch::BatchState;
use super::control::send_queue::{ReceiveCredits, SendQueue};
use super::link_table::LinkTable;
use super::receiving::slots::{Requests, UnresolvedKeys};
use super::receiving::standing::{StandingBytes, StandingCapacity, StandingPosted, StandingTable};
use super::receiving::stash::Stash;
use super::routes::announced::OutRoutes;
use super::routes::received::InRoutes;
use super::serving::answered::AnsweredSlots;
use super::serving::serve::PeerRequests;
use super::windows::{EdgeKey, PolledPlace, WindowEvent, WindowLink, WindowRefusal};
use super::{CancelDecision, Destination, LinkEvent, PeerRequestId, ServeOutcome, TensorKey, Value};
use crate::fabric::{Completions, Event, LinkFailure, LinkId, Port};
use crate::memory::Pool;
use crate::mutants::{Mutant, is_on};
use crate::protocol::window::{ToReceiver, ToSender};
use crate::telemetry::{Counter, CountersWriter, Gauge};
use crate::wire::message::fragment::Assembler;
use crate::wire::message::{Message, RequestId, VERSION};
use crate::wire::{Status, TaskId};
use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Requests in each direction of a link for which memory is allocated at the start.
pub(super) const IN_FLIGHT: usize = 64;
/// Events and completions for which memory is allocated at the start.
const EVENTS: usize = 256;

/// The two tasks of a link.
#[derive(Clone, Debug)]
pub struct LinkIdentity {
    /// This task.
    pub local: TaskId,
    /// The incarnation of this task.
    pub local_incarnation: u64,
    /// The peer's task.
    pub peer: TaskId,
    /// The incarnation of the peer's task.
    pub peer_incarnation: u64,
}

/// The protocol by which the two ends of a link exchange tensors. Both ends have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorProtocol {
    /// The receiver requests each tensor.
    Requests,
    /// The receiver announces an edge, and the sender sends within its credit.
    Windows {
        /// Whether this side's receives borrow where the fabric lends.
        borrow: bool,
    },
}

impl TensorProtocol {
    /// The version that a ping tells, so that two ends with different protocols make no link.
    pub(super) fn version(self) -> u16 {
        match self {
            TensorProtocol::Requests => VERSION,
            TensorProtocol::Windows { .. } => VERSION | 1 << 8,
        }
    }
}

/// Limits and timeouts, equal for all links of a node.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Largest tensor in bytes that travels in its response.
    pub small_tensor_bytes: u32,
    /// Limit of outstanding requests in each direction.
    pub max_requests: u32,
    /// Limit of routes that each side announces.
    pub max_routes: u32,
    /// Whether received values are compared with their checksums.
    pub validate: bool,
    /// The protocol by which the ends exchange tensors.
    pub protocol: TensorProtocol,
}

/// The state of one link.
#[derive(Debug)]
pub(super) struct Link<C> {
    pub id: LinkId,
    pub identity: LinkIdentity,
    pub settings: LinkSettings,
    pub out: SendQueue,
    pub receive_credits: ReceiveCredits,
    pub depth: u32,
    pub requests: Requests<C>,
    pub peer_requests: PeerRequests,
    /// Number of standing requests among `peer_requests`.
    pub standing_peer_requests: u32,
    pub answered: AnsweredSlots,
    pub stash: Stash,
    pub unresolved: UnresolvedKeys,
    pub standing: StandingTable,
    /// Number of requests made so far.
    pub asked: u64,
    pub routes_out: OutRoutes,
    pub routes_in: InRoutes,
    pub assembler: Assembler,
    pub windows: WindowLink,
    pub nonce: u64,
    pub up: bool,
    /// This side has ended the link: later arrivals are ignored.
    pub is_ended: bool,
    /// Listed by the table as a link with a backlog.
    pub is_backlogged: bool,
    /// Listed by the table as a link with arrivals.
    pub is_used: bool,
}

/// What a link borrows from [`Links`] while it handles one completion or call.
pub(super) struct LinkContext<'a, P: Port, C> {
    pub port: &'a mut P,
    pub pool: &'a Pool,
    pub counters: &'a CountersWriter,
    pub events: &'a mut VecDeque<LinkEvent<C>>,
    pub windows: &'a mut VecDeque<(LinkId, WindowEvent)>,
    pub standing_bytes: &'a mut StandingBytes,
    /// A batch is open: messages may wait for others.
    pub in_batch: bool,
}

/// The links of one poller and the port that they complete on. `C` names a waiter for the layer
/// above.
pub struct Links<P: Port, C> {
    pub(super) port: P,
    pub(super) pool: Pool,
    pub(super) counters: CountersWriter,
    pub(super) links: LinkTable<C>,
    pub(super) events: VecDeque<LinkEvent<C>>,
    /// Messages of edge windows. Those of a link came before its events.
    pub(super) windows: VecDeque<(LinkId, WindowEvent)>,
    pub(super) standing_bytes: StandingBytes,
    pub(super) completions: Completions,
    /// The place of the next of `completions`.
    pub(super) polled: PolledPlace,
    pub(super) batch: BatchState,
}

impl<P: Port, C> Links<P, C> {
    /// No links. `pollers` is the number of pollers that share the pool.
    pub fn new(port: P, pool: Pool, counters: CountersWriter, pollers: usize) -> Self {
        let completions = Completions::with_capacity(EVENTS);
        let events = VecDeque::with_capacity(EVENTS);
        let standing_bytes = StandingBytes::new(pool.region().len(), pollers);
        Links {
            port,
            pool,
            counters,
            links: LinkTable::new(),
            events,
            windows: VecDeque::with_capacity(EVENTS),
            standing_bytes,
            completions,
            polled: PolledPlace::default(),
            batch: BatchState::default(),
        }
    }

    /// The pool that tensors are received into.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// This poller's counters.
    pub fn counters(&self) -> &CountersWriter {
        &self.counters
    }

    /// The object that threads sleep on while nothing comes.
    pub fn sleeper(&self) -> P::Sleeper {
        self.port.sleeper()
    }

    /// Arms the port: what comes from now on ends sleeps. `false` if something has come already.
    /// See [`Port::arm`].
    pub fn arm(&mut self) -> bool {
        if !self.arm_port() {
            return false;
        }
        // Credits and room that came just before cause no wake-up.
        let mut left = false;
        self.links.for_each_backlogged(|link| {
            let backlog = link.out.backlog();
            link.out.flush(&mut self.port, &self.counters, self.batch.is_open);
            left |= link.out.backlog() < backlog;
        });
        !left
    }

    /// Adds a connected link and probes it in both directions. [`LinkEvent::Up`] follows when it
    /// works.
    ///
    /// # Errors
    /// If the port has no room for it.
    pub fn attach(
        &mut self,
        link: P::Link,
        identity: LinkIdentity,
        settings: LinkSettings,
    ) -> Result<LinkId, crate::fabric::FabricError> {
        let id = self.port.attach(link)?;
        let limits = self.port.limits(id);
        let (depth, posted) = (limits.depth, limits.receives);
        self.port.post_receives(id, depth - posted);
        let mut link = Link::new(id, identity, settings, depth);
        let nonce = link.nonce;
        self.counters.increment(Counter::MessagesSent);
        let ping = Message::Ping { version: link.settings.protocol.version(), nonce };
        link.out.message(&mut self.port, &self.counters, &ping, self.batch.is_open);
        self.links.insert(link);
        self.links.note_backlog(id);
        Ok(id)
    }

    /// Ends a link from this side. [`LinkEvent::Down`] follows. Completions that were not polled
    /// yet are ignored.
    pub fn fail(&mut self, link: LinkId, why: LinkFailure) {
        if let Some(link) = self.links.get_mut(link) {
            link.is_ended = true;
        }
        self.port.fail(link, why);
    }

    /// Handles a bounded number of completions. Returns their number; [`Links::next_event`] returns
    /// the events.
    pub fn poll(&mut self) -> usize {
        let count = self.port.poll(&mut self.completions);
        if count > 0 {
            if self.polled_several() {
                self.begin_batch();
            }
            self.handle_completions();
        }
        self.links.for_each_backlogged(|link| {
            link.out.flush(&mut self.port, &self.counters, self.batch.is_open);
            if let Some(why) = link.out.overflow(&link.settings) {
                self.port.fail(link.id, LinkFailure::Protocol(why));
            }
        });
        count
    }

    /// Takes the oldest event. If there is none, an open [batch](Links::begin_batch) is sent.
    #[inline]
    pub fn next_event(&mut self) -> Option<LinkEvent<C>> {
        if self.events.is_empty() {
            self.end_batch();
            return None;
        }
        self.events.pop_front()
    }

    /// Takes the oldest message of edge windows, and the link that it came on. A message comes
    /// before the events that its link had after it.
    #[inline]
    pub fn next_window(&mut self) -> Option<(LinkId, WindowEvent)> {
        self.windows.pop_front()
    }

    /// Whether [`Links::next_event`] has an event.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Sends a message about an edge on which this process receives. Dropped if there is no such
    /// link.
    #[inline]
    pub fn window_to_sender(&mut self, link: LinkId, message: ToSender<EdgeKey>) {
        let Some((found, mut cx)) = self.with(link) else { return };
        found.window_to_sender(&mut cx, message);
        self.links.note_backlog(link);
    }

    /// Sends a message about an edge on which this process sends. Dropped if there is no such link.
    /// Returns whether a tensor of it stays here: [`WindowEvent::Sent`] follows.
    #[inline]
    pub fn window_to_receiver(&mut self, link: LinkId, message: ToReceiver<Value, WindowRefusal>) -> bool {
        let Some((found, mut cx)) = self.with(link) else { return false };
        let stays = found.window_to_receiver(&mut cx, message);
        self.links.note_backlog(link);
        stays
    }

    /// Whether a request for a key finds room in the tables of requests, grants and routes.
    pub fn has_room(&mut self, link: LinkId, key: &TensorKey) -> bool {
        let Some(found) = self.links.get_mut(link) else { return true };
        let grants = self.port.limits(link).grants as usize;
        let has_slot = found.requests.has_room() && found.requests.len() < grants;
        has_slot && found.routes_out.has_room(&key.edge) || found.standing.has(key)
    }

    /// Requests a tensor, or claims the standing request for it. The answer is an event that
    /// carries `waiter`.
    ///
    /// # Errors
    /// Returns the waiter if there is no such link, no room for the request, or no memory for its
    /// destination.
    pub fn request(
        &mut self,
        link: LinkId,
        key: TensorKey,
        destination: Destination,
        timeout_ms: u32,
        waiter: C,
    ) -> Result<RequestId, (RequestRefused, C)> {
        let Some((found, mut cx)) = self.with(link) else { return Err((RequestRefused::NoLink, waiter)) };
        let asked = found.request(&mut cx, key, destination, timeout_ms, waiter);
        self.links.note_backlog(link);
        asked
    }

    /// Bytes that a standing request for a key needs at its destination; `None` if placement or
    /// size is not known yet.
    pub fn expected_bytes(&mut self, link: LinkId, key: &TensorKey, borrow: bool) -> Option<u64> {
        let (found, mut cx) = self.with(link)?;
        found.expected_bytes(&mut cx, key, borrow)
    }

    /// The capacity that all standing requests of a link share.
    pub fn standing_capacity(&mut self, link: LinkId) -> StandingCapacity {
        let none = StandingCapacity { slots: 0, bytes: 0 };
        self.with(link).map_or(none, |(found, mut cx)| found.standing_capacity(&mut cx))
    }

    /// Sends standing requests for `count` steps beginning with that of `first`, or for as many as
    /// have room, on behalf of `owner`. A later [`Links::request`] for one of the steps claims its
    /// request.
    pub fn post_standing(
        &mut self,
        link: LinkId,
        first: &TensorKey,
        count: u32,
        borrow: bool,
        owner: u64,
    ) -> StandingPosted {
        let Some((found, mut cx)) = self.with(link) else {
            return StandingPosted { steps: 0, no_room: true };
        };
        let standing = found.post_standing(&mut cx, first, count, borrow, owner);
        self.links.note_backlog(link);
        standing
    }

    /// Withdraws the unclaimed standing requests of `owner` for the steps from that of `first` up
    /// to, but not including, `until`. Values that have come are in line again.
    pub fn withdraw_standing(&mut self, link: LinkId, first: &TensorKey, until: u64, owner: u64) {
        if let Some((found, mut cx)) = self.with(link) {
            found.withdraw_standing(&mut cx, first, until, owner);
            self.links.note_backlog(link);
        }
    }

    /// Lets `decide` decide about every request of a link.
    pub fn cancel_requests(
        &mut self,
        link: LinkId,
        decide: &mut dyn FnMut(&TensorKey, &mut Option<C>) -> CancelDecision,
    ) {
        if let Some((found, mut cx)) = self.with(link) {
            found.cancel_requests(&mut cx, decide);
            self.links.note_backlog(link);
        }
    }

    /// Whether a request is there and was made as a standing one.
    pub fn is_standing(&mut self, link: LinkId, request: RequestId) -> bool {
        let request = self.with(link).and_then(|(found, _)| found.requests.get(request));
        request.is_some_and(|request| request.machine.is_standing())
    }

    /// Lets `decide` decide about one request, if it exists.
    pub fn cancel_request(
        &mut self,
        link: LinkId,
        request: RequestId,
        decide: &mut dyn FnMut(&TensorKey, &mut Option<C>) -> CancelDecision,
    ) {
        if let Some((found, mut cx)) = self.with(link) {
            found.cancel_request(&mut cx, request, decide);
            self.links.note_backlog(link);
        }
    }

    /// Answers a peer's request.
    ///
    /// `number` is the value's place in line. It comes back with the value if the value comes back.
    pub fn serve(&mut self, peer_request: PeerRequestId, value: Value, number: u64) -> ServeOutcome {
        let Some((link, mut cx)) = self.with(peer_request.link) else { return ServeOutcome::Gone(value) };
        let served = link.serve(&mut cx, peer_request.request, value, number);
        self.links.note_backlog(peer_request.link);
        served
    }

    /// Answers a peer's request with `STASHED_RESPONSE`: the next value is in the peer's stash,
    /// under the id that [`LinkEvent::Returned`] brought. Returns whether the request existed.
    pub fn serve_stashed(&mut self, peer_request: PeerRequestId, stash_id: u32, number: u64) -> bool {
        let Some((link, mut cx)) = self.with(peer_request.link) else { return false };
        let served = link.serve_stashed(&mut cx, peer_request.request, stash_id, number);
        self.links.note_backlog(peer_request.link);
        served
    }

    /// Drops the stashed values of a step.
    pub fn drop_stashed(&mut self, steps: &RangeInclusive<u64>) {
        for id in self.ids() {
            if let Some((link, _)) = self.with(id) {
                link.stash.end_steps(steps);
            }
        }
    }

    /// Answers a peer's request with an error.
    pub fn refuse(&mut self, peer_request: PeerRequestId, status: Status) {
        if let Some((link, mut cx)) = self.with(peer_request.link) {
            link.refuse(&mut cx, peer_request.request, status);
            self.links.note_backlog(peer_request.link);
        }
    }

    /// The present links, up or not.
    pub fn ids(&self) -> impl Iterator<Item = LinkId> + use<P, C> {
        self.links.ids()
    }

    /// How much there is to do on all links.
    #[cfg(any(test, feature = "sim"))]
    pub fn load(&self) -> super::LinkLoad {
        let sum = |part: fn(&Link<C>) -> usize| self.links.iter().map(part).sum();
        super::LinkLoad {
            requests: sum(|link| link.requests.len() + link.windows.transfers().1),
            peer_requests: sum(|link| link.peer_requests.len()),
            busy_routes: sum(|link| link.routes_out.busy()),
            backlog: sum(|link| link.out.backlog()),
            leaving: sum(|link| link.out.values() + link.windows.transfers().0),
            stashed: sum(|link| link.stash.len()),
            unresolved: sum(|link| link.unresolved.len()),
            standing: sum(|link| link.standing.len()),
        }
    }

    pub(super) fn with(&mut self, id: LinkId) -> Option<(&mut Link<C>, LinkContext<'_, P, C>)> {
        let (links, _, cx) = self.split();
        Some((links.get_mut(id)?, cx))
    }

    /// The links and the completions, with the rest for a link.
    #[inline]
    pub(super) fn split(&mut self) -> (&mut LinkTable<C>, &mut Completions, LinkContext<'_, P, C>) {
        let cx = LinkContext {
            port: &mut self.port,
            pool: &self.pool,
            counters: &self.counters,
            events: &mut self.events,
            windows: &mut self.windows,
            standing_bytes: &mut self.standing_bytes,
            in_batch: self.batch.is_open,
        };
        (&mut self.links, &mut self.completions, cx)
    }
}

/// Why a request was not sent.
#[derive(Debug)]
pub enum RequestRefused {
    /// The link does not exist.
    NoLink,
    /// The slot table is full.
    TooManyRequests {
        /// Capacity of the table.
        max: u32,
    },
    /// The route table is full of routes in use.
    TooManyRoutes {
        /// Capacity of the table.
        max: u32,
    },
    /// The pool has no room for the tensor.
    NoRoom(crate::memory::PoolError),
}

impl<C> Link<C> {
    pub(super) fn new(id: LinkId, identity: LinkIdentity, settings: LinkSettings, depth: u32) -> Self {
        Link {
            id,
            out: SendQueue::new(id, depth),
            receive_credits: ReceiveCredits::new(depth),
            depth,
            requests: Requests::new(settings.max_requests),
            peer_requests: PeerRequests::with_capacity_and_hasher(IN_FLIGHT, Default::default()),
            standing_peer_requests: 0,
            answered: AnsweredSlots::with_capacity(IN_FLIGHT),
            stash: Stash::default(),
            unresolved: UnresolvedKeys::default(),
            standing: StandingTable::new(),
            asked: 0,
            routes_out: OutRoutes::new(settings.max_routes),
            routes_in: InRoutes::new(settings.max_routes),
            assembler: Assembler::default(),
            windows: WindowLink::default(),
            nonce: identity.local_incarnation ^ identity.peer_incarnation.rotate_left(32),
            up: false,
            is_ended: false,
            is_backlogged: false,
            is_used: false,
            identity,
            settings,
        }
    }

    /// Notes that an operation with a tensor has completed or failed.
    pub(super) fn finished<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>) {
        self.out.finished();
        match self.settings.protocol {
            TensorProtocol::Requests => cx.events.push_back(LinkEvent::SendComplete),
            TensorProtocol::Windows { .. } => self.window_post_ended(cx),
        }
    }

    /// Handles a completion of the peer's doing.
    ///
    /// # Errors
    /// A description, if the peer broke the protocol.
    pub(super) fn completed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        event: Event,
        message: &[u8],
    ) -> Result<(), String> {
        if self.is_ended {
            return Ok(());
        }
        match event {
            Event::Message(_) => {
                self.receive_credits.consumed();
                self.on_slot(cx, message)
            }
            Event::Immediate { immediate, bytes } => {
                self.receive_credits.consumed();
                cx.counters.increment(Counter::ImmediatesReceived);
                match self.settings.protocol {
                    TensorProtocol::Requests => self.on_immediate(cx, immediate, bytes),
                    TensorProtocol::Windows { .. } => self.on_written(cx, immediate, bytes),
                }
            }
            Event::Lent { bytes, .. } => {
                self.receive_credits.consumed();
                match self.settings.protocol {
                    TensorProtocol::Requests => self.on_loan(cx, message, bytes),
                    TensorProtocol::Windows { .. } => self.on_lent_record(cx, message, bytes),
                }
            }
            Event::Done | Event::Failed | Event::ReadDone { .. } | Event::Down(_) => Ok(()),
        }
    }

    /// Sends a control message.
    pub(super) fn send<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, message: &Message<'_>) {
        cx.counters.increment(Counter::MessagesSent);
        self.out.message(cx.port, cx.counters, message, cx.in_batch);
    }

    pub(super) fn down<P: Port>(mut self, cx: &mut LinkContext<'_, P, C>, failure: LinkFailure) {
        self.undo_all(cx);
        self.drop_offers(cx);
        // Queued values will never be posted.
        if !is_on(Mutant::OutstandingLeak) {
            cx.events.extend((0..self.out.values()).map(|_| LinkEvent::SendComplete));
        }
        self.unlist_all(cx);
        for entry in self.stash.drain() {
            let incarnation = self.identity.peer_incarnation;
            cx.events.push_back(LinkEvent::Orphaned { key: entry.key, value: entry.value, incarnation });
        }
        let quarantined = self.requests.iter().map(|request| request.quarantined).sum();
        cx.counters.lower(Gauge::QuarantinedBytes, quarantined);
        let waiters = self.requests.drain().filter_map(|request| request.waiter).collect();
        cx.port.detach(self.id);
        cx.events.push_back(LinkEvent::Down { link: self.id, failure, waiters });
    }
}
