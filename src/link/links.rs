//! The links of one poller and the port that they complete on.

use super::control::batch::BatchState;
use super::control::send_queue::{ReceiveCredits, SendQueue};
use super::link_table::LinkTable;
use super::windows::{PolledPlace, ReadyBytes, WindowEvent, WindowLink, WindowRefusal};
use super::{EdgeKey, LinkEvent, Value};
use crate::fabric::{Completions, Event, LinkFailure, LinkId, LinkLimits, Port};
use crate::memory::Pool;
use crate::mutants::{Mutant, is_on};
use crate::protocol::{ToReceiver, ToSender};
use crate::telemetry::{Counter, CountersWriter, FlightClock, FlightEvent, FlightRecord, FlightRecorder};
use crate::wire::message::fragment::Assembler;
use crate::wire::message::{Message, VERSION};
use crate::wire::{TaskId, Time};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Events and completions for which memory is allocated at the start.
const EVENTS: usize = 256;
/// The most of [`Links::last_polls`]: enough for anything that the queues can hold.
const LAST_POLLS: u32 = 10_000;
/// The time of [`Links::last_polls`]: enough to copy gigabytes. The other links wait meanwhile.
const LAST_TIME: Duration = Duration::from_secs(1);
/// Their least time. Those that took time of late leave later ones less: a peer may make and end
/// links without a pause.
const LEAST_LAST_TIME: Duration = Duration::from_millis(1);
/// A poller pauses so many times as long as they took, before others have all of [`LAST_TIME`].
const LAST_PAUSE: u32 = 30;
/// About the most bytes of messages that they read.
const LAST_BYTES: usize = 64 << 20;

/// The polls before a link ends.
pub struct LastPolls {
    begin: Time,
    limit: Duration,
    /// [`Links::rested`] at the beginning.
    rested: Time,
    polls: u32,
    /// Bytes of messages that may still come.
    pub(super) bytes: usize,
    /// The last one has found that nothing more comes.
    is_silent: bool,
}

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

impl LinkIdentity {
    /// The number of the ping that tests a link.
    pub(super) fn nonce(&self) -> u64 {
        self.local_incarnation ^ self.peer_incarnation.rotate_left(32)
    }
}

/// Settings that all links of a node have.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Largest tensor in bytes that travels in its record.
    pub small_tensor_bytes: u32,
    /// Whether received values are compared with their checksums.
    pub validate: bool,
    /// Whether this side's receives borrow where the fabric lends.
    pub borrow: bool,
    /// Bytes of all links of a poller in destinations that are granted before their tensors are
    /// sent, until a receive has taken the tensor.
    pub max_ready_bytes: u64,
}

/// The state of one link.
#[derive(Debug)]
pub(super) struct Link {
    pub id: LinkId,
    pub identity: LinkIdentity,
    pub settings: LinkSettings,
    pub out: SendQueue,
    pub receive_credits: ReceiveCredits,
    pub assembler: Assembler,
    pub windows: WindowLink,
    /// What has happened on the link beside values.
    pub recorder: Box<FlightRecorder>,
    pub up: bool,
    /// This side has ended the link: later arrivals are ignored.
    pub is_ended: bool,
    /// Listed by the table as a link with a backlog.
    pub is_backlogged: bool,
    /// [`LinkEvent::Backlogged`] was raised for this backlog.
    pub is_backlog_told: bool,
    /// Listed by the table as a link with arrivals.
    pub is_used: bool,
}

/// What a link borrows from [`Links`] while it handles one completion or call.
pub(super) struct LinkContext<'a, P: Port> {
    pub port: &'a mut P,
    pub pool: &'a Pool,
    pub counters: &'a CountersWriter,
    pub ready_bytes: &'a ReadyBytes,
    pub events: &'a mut VecDeque<LinkEvent>,
    pub windows: &'a mut VecDeque<(LinkId, WindowEvent)>,
    /// A batch is open: messages may wait for others.
    pub in_batch: bool,
}

/// The links of one poller and the port that they complete on.
pub struct Links<P: Port> {
    pub(super) port: P,
    pub(super) pool: Pool,
    pub(super) counters: CountersWriter,
    pub(super) links: LinkTable,
    pub(super) events: VecDeque<LinkEvent>,
    /// Messages of edge windows. Those of a link came before its events.
    pub(super) windows: VecDeque<(LinkId, WindowEvent)>,
    pub(super) completions: Completions,
    /// The place of the next of `completions`.
    pub(super) polled: PolledPlace,
    pub(super) batch: BatchState,
    pub(super) ready_bytes: ReadyBytes,
    clock: FlightClock,
    /// When [`Links::last_polls`] have all their time again.
    rested: Time,
}

impl<P: Port> Links<P> {
    /// No links.
    pub fn new(port: P, pool: Pool, counters: CountersWriter) -> Self {
        let completions = Completions::with_capacity(EVENTS);
        let events = VecDeque::with_capacity(EVENTS);
        Links {
            port,
            pool,
            counters,
            links: LinkTable::new(),
            events,
            windows: VecDeque::with_capacity(EVENTS),
            completions,
            polled: PolledPlace::default(),
            batch: BatchState::default(),
            ready_bytes: ReadyBytes::default(),
            clock: Arc::new(|| Time::ZERO),
            rested: Time::ZERO,
        }
    }

    /// Has this clock say the times of flight records, and when [`Links::last_polls`] must end.
    /// Without it the time is always zero.
    pub fn timed_by(self, clock: FlightClock) -> Self {
        Links { clock, ..self }
    }

    /// Records an event of a link.
    #[cold]
    pub fn record(&mut self, link: LinkId, event: FlightEvent) {
        if let Some(link) = self.links.get_mut(link) {
            link.recorder.record(event);
        }
    }

    /// The flight records of a link, and how many older ones there were.
    pub fn flight_records(&self, link: LinkId) -> (Vec<FlightRecord>, u64) {
        let link = self.links.iter().find(|known| known.id == link);
        link.map_or_else(Default::default, |link| link.recorder.records())
    }

    /// The time since which nothing has left the send queue of a link, as the calls of this method
    /// have found it; `None` if nothing waits there.
    pub fn stuck_since(&mut self, link: LinkId, now: Time) -> Option<Time> {
        self.links.get_mut(link)?.out.stuck_since(now)
    }

    /// Whether there is more than one link.
    pub fn has_several(&self) -> bool {
        self.links.iter().nth(1).is_some()
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
        let limits = self.port.limits(id).clone();
        self.port.post_receives(id, limits.depth - limits.receives);
        let recorder = Box::new(FlightRecorder::new(self.clock.clone()));
        let mut link = Link::new(id, identity, settings, &limits, recorder);
        link.recorder.record(FlightEvent::Attached);
        let nonce = link.identity.nonce();
        self.counters.increment(Counter::MessagesSent);
        let ping = Message::Ping { version: VERSION, nonce };
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

    /// Whether everything that is to leave on a link is at the peer's host, or never will be.
    pub fn is_flushed(&mut self, link: LinkId) -> bool {
        let has_left = |link: &mut Link| link.is_ended || link.out.backlog() == 0;
        self.links.get_mut(link).is_none_or(has_left) && self.port.is_flushed(link)
    }

    /// Tells the port the time.
    #[inline]
    pub fn set_time(&mut self, now: Time) {
        self.port.set_time(now);
    }

    /// Handles a bounded number of completions. Returns their number, and that of links with a new
    /// backlog; [`Links::next_event`] returns the events.
    pub fn poll(&mut self) -> usize {
        let count = self.port.poll(&mut self.completions);
        self.handle_poll(count)
    }

    /// Goes on with the `count` completions of a poll. Returns as [`Links::poll`].
    #[inline]
    fn handle_poll(&mut self, mut count: usize) -> usize {
        if count > 0 {
            if self.polled_several() {
                self.begin_batch();
            }
            self.handle_completions();
        }
        if self.links.has_backlog() {
            count += self.flush_backlog();
        }
        count
    }

    /// Posts what waits. Returns the number of links with a new backlog.
    #[inline(never)]
    fn flush_backlog(&mut self) -> usize {
        let mut told = 0;
        self.links.for_each_backlogged(|link| {
            link.out.flush(&mut self.port, &self.counters, self.batch.is_open);
            if let Some(why) = link.out.overflow() {
                self.port.fail(link.id, LinkFailure::Protocol(why));
            }
            if link.out.backlog() > 0 && !link.is_backlog_told {
                link.is_backlog_told = true;
                self.events.push_back(LinkEvent::Backlogged);
                told += 1;
            }
        });
        told
    }

    /// The polls before a link ends, which go on until nothing more comes.
    #[cold]
    pub fn last_polls(&self) -> LastPolls {
        let begin = (self.clock)();
        let unrested = self.rested.since(begin) / LAST_PAUSE;
        let limit = LAST_TIME.saturating_sub(unrested).max(LEAST_LAST_TIME);
        let (rested, bytes) = (self.rested.max(begin), LAST_BYTES);
        LastPolls { begin, limit, rested, polls: 0, bytes, is_silent: false }
    }

    /// One of [`Links::last_polls`]; `false` if they are over. Their number, bytes and time are
    /// bounded, as peers may never be silent. The time is that of the caller too.
    #[cold]
    pub fn poll_last(&mut self, last: &mut LastPolls) -> bool {
        let took = (self.clock)().since(last.begin);
        // No debt is longer than that of LAST_TIME, whatever took more.
        let longest = last.begin + took + LAST_TIME * LAST_PAUSE;
        self.rested = longest.min(last.rested + took * LAST_PAUSE);
        let is_full = last.polls == LAST_POLLS || last.bytes == 0;
        if last.is_silent || is_full || (last.polls > 0 && took >= last.limit) {
            return false;
        }
        last.polls += 1;
        let count = self.port.poll(&mut self.completions);
        last.bytes = last.bytes.saturating_sub(self.completions.message_bytes());
        // A poll that copies a part of a large tensor returns 0 and leaves something to come.
        last.is_silent = self.handle_poll(count) == 0 && self.arm();
        true
    }

    /// Takes the end of a link from the events, if it is there.
    #[cold]
    pub fn take_down(&mut self, of: LinkId) -> Option<LinkEvent> {
        let is_down = |event: &LinkEvent| matches!(event, LinkEvent::Down { link, .. } if *link == of);
        let at = self.events.iter().position(is_down)?;
        self.events.remove(at)
    }

    /// Takes the oldest event. If there is none, an open [batch](Links::begin_batch) is sent.
    #[inline]
    pub fn next_event(&mut self) -> Option<LinkEvent> {
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

    /// Messages that [`Links::next_window`] has.
    pub fn window_count(&self) -> usize {
        self.windows.len()
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

    /// How much there is to do on all links.
    #[cfg(any(test, feature = "sim"))]
    pub fn load(&self) -> super::LinkLoad {
        let sum = |part: fn(&Link) -> usize| self.links.iter().map(part).sum();
        super::LinkLoad {
            landings: sum(|link| link.windows.transfers().1),
            backlog: sum(|link| link.out.backlog()),
            leaving: sum(|link| link.out.values() + link.windows.transfers().0),
        }
    }

    pub(super) fn with(&mut self, id: LinkId) -> Option<(&mut Link, LinkContext<'_, P>)> {
        let (links, _, cx) = self.split();
        Some((links.get_mut(id)?, cx))
    }

    /// The links and the completions, with the rest for a link.
    #[inline]
    pub(super) fn split(&mut self) -> (&mut LinkTable, &mut Completions, LinkContext<'_, P>) {
        let cx = LinkContext {
            port: &mut self.port,
            pool: &self.pool,
            counters: &self.counters,
            ready_bytes: &self.ready_bytes,
            events: &mut self.events,
            windows: &mut self.windows,
            in_batch: self.batch.is_open,
        };
        (&mut self.links, &mut self.completions, cx)
    }
}

impl Link {
    pub(super) fn new(
        id: LinkId,
        identity: LinkIdentity,
        settings: LinkSettings,
        limits: &LinkLimits,
        recorder: Box<FlightRecorder>,
    ) -> Self {
        Link {
            id,
            out: SendQueue::new(id, limits),
            receive_credits: ReceiveCredits::new(limits.depth),
            assembler: Assembler::default(),
            windows: WindowLink::new(limits),
            recorder,
            up: false,
            is_ended: false,
            is_backlogged: false,
            is_backlog_told: false,
            is_used: false,
            identity,
            settings,
        }
    }

    /// Notes that an operation with a tensor has completed or failed.
    pub(super) fn finished<P: Port>(&mut self, cx: &mut LinkContext<'_, P>) {
        self.out.finished();
        self.post_ended(cx);
    }

    /// Handles a completion of the peer's doing.
    ///
    /// # Errors
    /// A description, if the peer broke the protocol.
    pub(super) fn completed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
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
                self.on_written(cx, immediate, bytes)
            }
            Event::Lent { bytes, .. } => {
                self.receive_credits.consumed();
                self.on_lent_record(cx, message, bytes)
            }
            Event::Repaired => {
                cx.counters.increment(Counter::LinksRepaired);
                self.recorder.record(FlightEvent::Repaired);
                Ok(())
            }
            Event::Done | Event::Failed | Event::ReadDone { .. } | Event::Down(_) => Ok(()),
        }
    }

    /// Sends a control message.
    pub(super) fn send<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, message: &Message<'_>) {
        cx.counters.increment(Counter::MessagesSent);
        self.out.message(cx.port, cx.counters, message, cx.in_batch);
    }

    pub(super) fn down<P: Port>(mut self, cx: &mut LinkContext<'_, P>, failure: LinkFailure) {
        if !is_on(Mutant::OutstandingLeak) {
            self.end_transfers(cx);
        }
        cx.port.detach(self.id);
        self.recorder.record(FlightEvent::Down);
        let records = self.recorder.records();
        cx.events.push_back(LinkEvent::Down { link: self.id, failure, records });
    }
}
