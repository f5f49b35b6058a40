//! The links of one poller and the port that they complete on.

use super::incoming::ServedTable;
use super::outbox::{Inbox, Outbox};
use super::requests::Requests;
use super::routes::{InRoutes, OutRoutes};
use super::{Incoming, LinkEvent, Served, TensorKey, Value, Want};
use crate::fabric::{Completions, Event, Lane, LinkFailure, LinkId, Port};
use crate::memory::Pool;
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::fragment::{Assembler, is_fragment};
use crate::wire::message::{Message, VERSION};
use crate::wire::{EdgeName, Status, TaskId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Requests in each direction of a link that find room before anything is allocated.
pub(super) const IN_FLIGHT: usize = 64;
/// Events and completions that find room before anything is allocated.
const EVENTS: usize = 256;

/// Who is at the two ends of a link.
#[derive(Clone, Debug)]
pub struct LinkIdentity {
    /// This task.
    pub local: TaskId,
    /// This life of it.
    pub local_incarnation: u64,
    /// The peer's task.
    pub peer: TaskId,
    /// That life of it.
    pub peer_incarnation: u64,
}

/// How a link behaves.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Tensors of at most this many bytes ride in their response.
    pub small_tensor_bytes: u32,
    /// Requests that can be outstanding in each direction.
    pub max_requests: u32,
    /// Routes that each side can announce.
    pub max_routes: u32,
}

/// One link's state.
#[derive(Debug)]
pub(super) struct Link<C> {
    pub id: LinkId,
    pub identity: LinkIdentity,
    pub settings: LinkSettings,
    pub out: Outbox,
    pub inbox: Inbox,
    pub depth: u32,
    pub requests: Requests<C>,
    pub served: ServedTable,
    pub routes_out: OutRoutes,
    pub routes_in: InRoutes,
    assembler: Assembler,
    nonce: u64,
    up: bool,
}

/// What a link works with while it handles one thing.
pub(super) struct Context<'a, P: Port, C> {
    pub port: &'a mut P,
    pub pool: &'a Pool,
    pub counters: &'a CountersWriter,
    pub events: &'a mut VecDeque<LinkEvent<C>>,
}

/// The links of one poller and the port that they complete on. `C` names a waiter for the layer above.
pub struct Links<P: Port, C> {
    port: P,
    pool: Pool,
    counters: CountersWriter,
    links: Vec<Link<C>>,
    events: VecDeque<LinkEvent<C>>,
    completions: Completions,
}

impl<P: Port, C> Links<P, C> {
    /// No links yet.
    pub fn new(port: P, pool: Pool, counters: CountersWriter) -> Self {
        let completions = Completions::with_capacity(EVENTS);
        let events = VecDeque::with_capacity(EVENTS);
        Links { port, pool, counters, links: Vec::new(), events, completions }
    }

    /// The pool that tensors are received into.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// This poller's counters.
    pub fn counters(&self) -> &CountersWriter {
        &self.counters
    }

    /// What threads sleep on while nothing comes.
    pub fn sleeper(&self) -> P::Sleeper {
        self.port.sleeper()
    }

    /// Arranges that what comes from now on ends sleeps; `false` if something is there already. See [`Port::arm`].
    pub fn arm(&mut self) -> bool {
        self.port.arm()
    }

    /// Takes a connected link in and tries it in both directions; [`LinkEvent::Up`] tells when it works.
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
        let (depth, lanes) = (limits.depth, limits.lanes);
        for lane in 0..lanes {
            self.port.post_receives(id, Lane(lane), depth);
        }
        let nonce = identity.local_incarnation ^ identity.peer_incarnation.rotate_left(32);
        let mut link = Link {
            id,
            identity,
            out: Outbox::new(id, depth),
            inbox: Inbox::default(),
            depth,
            requests: Requests::new(settings.max_requests),
            served: ServedTable::with_capacity_and_hasher(IN_FLIGHT, Default::default()),
            routes_out: OutRoutes::new(settings.max_routes),
            routes_in: InRoutes::new(settings.max_routes),
            assembler: Assembler::default(),
            nonce,
            up: false,
            settings,
        };
        self.counters.increment(Counter::MessagesSent);
        link.out.message(&mut self.port, &Message::Ping { version: VERSION, nonce });
        self.links.push(link);
        Ok(id)
    }

    /// Ends a link from this side. [`LinkEvent::Down`] follows.
    pub fn fail(&mut self, link: LinkId, why: LinkFailure) {
        self.port.fail(link, why);
    }

    /// Moves what has come, a bounded amount. Returns how many completions there were; the events that they
    /// caused are taken with [`Links::next_event`].
    pub fn poll(&mut self) -> usize {
        let count = self.port.poll(&mut self.completions);
        if count > 0 {
            self.handle_completions();
        }
        for link in &mut self.links {
            if link.out.backlog() > 0 {
                link.out.flush(&mut self.port);
            }
            if link.out.backlog() > link.max_backlog() {
                let why = format!("it takes nothing and asks for more: {} answers wait", link.out.backlog());
                self.port.fail(link.id, LinkFailure::Protocol(why));
            }
        }
        count
    }

    fn handle_completions(&mut self) {
        for (completion, message) in self.completions.drain() {
            let Some(at) = self.links.iter().position(|link| link.id == completion.link) else { continue };
            let mut cx = Context {
                port: &mut self.port,
                pool: &self.pool,
                counters: &self.counters,
                events: &mut self.events,
            };
            if let Event::Down(failure) = completion.event {
                let link = self.links.swap_remove(at);
                link.down(&mut cx, failure);
            } else if let Err(why) = self.links[at].completed(&mut cx, completion.event, message) {
                cx.port.fail(completion.link, LinkFailure::Protocol(why));
            }
        }
        self.completions.clear();
        for link in &mut self.links {
            if link.inbox.replenish(&mut self.port, link.id, link.depth) {
                self.counters.increment(Counter::CreditsPublished);
            }
        }
    }

    /// The next event, oldest first.
    pub fn next_event(&mut self) -> Option<LinkEvent<C>> {
        self.events.pop_front()
    }

    /// Asks the peer for a tensor. The answer is an event that carries `waiter`.
    ///
    /// # Errors
    /// The waiter comes back if there is no such link, no room for the request, or no memory for its destination.
    pub fn request(
        &mut self,
        link: LinkId,
        key: TensorKey,
        want: Want,
        timeout_ms: u32,
        waiter: C,
    ) -> Result<(), (RequestRefused, C)> {
        match self.with(link) {
            Some((link, mut cx)) => link.request(&mut cx, key, want, timeout_ms, waiter),
            None => Err((RequestRefused::NoLink, waiter)),
        }
    }

    /// Looks at every waiter of a link's requests. `judge` may take the waiter away, having told it something,
    /// and says whether the request is given up; a waiter that was left hears of the request's end later.
    pub fn give_up(&mut self, link: LinkId, judge: &mut dyn FnMut(&TensorKey, &mut Option<C>) -> bool) {
        if let Some((link, mut cx)) = self.with(link) {
            link.give_up(&mut cx, judge);
        }
    }

    /// Answers a peer's request.
    pub fn serve(&mut self, incoming: Incoming, value: Value) -> Served {
        match self.with(incoming.link) {
            Some((link, mut cx)) => link.serve(&mut cx, incoming.request, value),
            None => Served::Gone(value),
        }
    }

    /// Answers a peer's request with an error.
    pub fn refuse(&mut self, incoming: Incoming, status: Status) {
        if let Some((link, mut cx)) = self.with(incoming.link) {
            link.refuse(&mut cx, incoming.request, status);
        }
    }

    /// How many links are there, up or not.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    /// Whether there is no link.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// The link in this place, in no order. None comes or goes but in [`Links::attach`] and [`Links::poll`].
    ///
    /// # Panics
    /// If there are not so many links.
    pub fn id(&self, at: usize) -> LinkId {
        self.links[at].id
    }

    /// Whether anything still waits to leave on any link.
    pub fn has_backlog(&self) -> bool {
        self.links.iter().any(|link| link.out.backlog() > 0)
    }

    fn with(&mut self, id: LinkId) -> Option<(&mut Link<C>, Context<'_, P, C>)> {
        let link = self.links.iter_mut().find(|link| link.id == id)?;
        let cx = Context {
            port: &mut self.port,
            pool: &self.pool,
            counters: &self.counters,
            events: &mut self.events,
        };
        Some((link, cx))
    }
}

/// Why a request was not sent.
#[derive(Debug)]
pub enum RequestRefused {
    /// There is no such link.
    NoLink,
    /// The slot table is full.
    TooManyRequests {
        /// How many it holds.
        max: u32,
    },
    /// The route table is full of routes in use.
    TooManyRoutes {
        /// How many it holds.
        max: u32,
    },
    /// There is no room for the tensor.
    NoRoom(crate::memory::PoolError),
}

impl<C> Link<C> {
    /// Something completed.
    ///
    /// # Errors
    /// In words, if the peer broke the protocol.
    fn completed<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        event: Event,
        message: &[u8],
    ) -> Result<(), String> {
        match event {
            Event::Message(_) => {
                self.inbox.consumed();
                cx.counters.increment(Counter::MessagesReceived);
                self.message(cx, message)
            }
            Event::Immediate { immediate, bytes } => {
                self.inbox.consumed();
                cx.counters.increment(Counter::ImmediatesReceived);
                self.immediate(cx, immediate, bytes)
            }
            Event::Lent { immediate, bytes } => {
                self.inbox.consumed();
                self.lent(cx, immediate, bytes)
            }
            // The port has released the source; a failure is followed by the link's end.
            Event::Done { .. } | Event::Failed { .. } => {
                self.out.finished();
                cx.events.push_back(LinkEvent::Finished);
                Ok(())
            }
            Event::ReadDone { .. } | Event::Down(_) => Ok(()),
        }
    }

    /// What can wait to leave: requests and cancels of ours, answers and acknowledgements to the peer's, and some.
    fn max_backlog(&self) -> usize {
        4 * self.settings.max_requests as usize + 4096
    }

    /// Sends a control message.
    pub(super) fn send<P: Port>(&mut self, cx: &mut Context<'_, P, C>, message: &Message<'_>) {
        cx.counters.increment(Counter::MessagesSent);
        self.out.message(cx.port, message);
    }

    fn message<P: Port>(&mut self, cx: &mut Context<'_, P, C>, bytes: &[u8]) -> Result<(), String> {
        if !is_fragment(bytes) {
            if !self.assembler.is_idle() {
                return Err("a message came between the fragments of another".into());
            }
            return self.whole_message(cx, bytes);
        }
        let mut assembler = std::mem::take(&mut self.assembler);
        let handled = match assembler.push(bytes) {
            Ok(Some(whole)) => self.whole_message(cx, whole),
            Ok(None) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        self.assembler = assembler;
        handled
    }

    fn whole_message<P: Port>(&mut self, cx: &mut Context<'_, P, C>, bytes: &[u8]) -> Result<(), String> {
        match Message::decode(bytes).map_err(|error| error.to_string())? {
            Message::Ping { version, .. } if version != VERSION => {
                Err(format!("it speaks version {version} of the protocol, this side version {VERSION}"))
            }
            Message::Ping { nonce, .. } => {
                self.send(cx, &Message::Pong { nonce });
                Ok(())
            }
            Message::Pong { nonce } => self.pong(cx, nonce),
            Message::Route { number, incarnation, source, destination, edge } => {
                let edge = self.checked_edge(incarnation, source, destination, edge);
                self.routes_in.announce(number, edge)
            }
            Message::RouteDrop { number } => match self.routes_in.forget(number) {
                true => Ok(()),
                false => Err(format!("route {number} was dropped, but never announced")),
            },
            Message::Request(request) => self.asked(cx, &request),
            Message::ReRequest { request, grant } => self.asked_again(cx, request, grant),
            Message::Cancel { request } => {
                self.cancelled(cx, request);
                Ok(())
            }
            Message::Meta { request, loan_follows, meta } => self.meta_came(cx, request, meta, loan_follows),
            Message::Response { request, meta, data } => self.response_came(cx, request, meta, data),
            Message::CancelAck { request } => self.acknowledged(cx, request),
            Message::Error { request, status } => self.error_came(cx, request, status),
        }
    }

    fn pong<P: Port>(&mut self, cx: &mut Context<'_, P, C>, nonce: u64) -> Result<(), String> {
        if nonce != self.nonce {
            return Err("it answered a ping that was not sent".into());
        }
        if !self.up {
            self.up = true;
            cx.events.push_back(LinkEvent::Up { link: self.id });
        }
        Ok(())
    }

    /// A route must name a source here, in this life, and a destination that is the peer (SPEC 2.3).
    fn checked_edge(
        &self,
        incarnation: u64,
        source: &str,
        destination: &str,
        edge: &str,
    ) -> Result<Arc<EdgeName>, Status> {
        use crate::wire::Code::{FailedPrecondition, InvalidArgument, PermissionDenied};
        let edge = EdgeName::new(source, destination, edge)
            .map_err(|error| Status::new(InvalidArgument, error.to_string()))?;
        let LinkIdentity { local, local_incarnation, peer, .. } = &self.identity;
        if edge.source_task() != local {
            let message = format!("{edge} does not start at {local}, which {peer} asked for it");
            return Err(Status::new(InvalidArgument, message));
        }
        if edge.destination_task() != peer {
            let message = format!("{edge} does not end at {peer}, which asked for it");
            return Err(Status::new(PermissionDenied, message));
        }
        if incarnation != *local_incarnation {
            let message = format!(
                "{edge} was asked of incarnation {incarnation:016x} of {local}, which is gone: it is {local_incarnation:016x} now"
            );
            return Err(Status::new(FailedPrecondition, message));
        }
        Ok(Arc::new(edge))
    }

    fn down<P: Port>(mut self, cx: &mut Context<'_, P, C>, failure: LinkFailure) {
        self.undo_all(cx);
        // What was queued will never be posted.
        cx.events.extend((0..self.out.values()).map(|_| LinkEvent::Finished));
        let waiters = self.requests.drain().filter_map(|request| request.waiter).collect();
        cx.port.detach(self.id);
        cx.events.push_back(LinkEvent::Down { link: self.id, failure, waiters });
    }
}
