//! Drives the matching on the links of a poller.

use super::{ExpectedRecord, Matching, OfEdge};
use crate::fabric::{LinkFailure, LinkId, Port};
use crate::link::windows::WindowEvent;
use crate::link::{DirectReceive, Handler, LinkEvent, Links, TensorKey, TensorKeyRef, Value};
use crate::matching::connections::{Connections, EndedConnection, UnreportedLoss, count_lost_values};
use crate::matching::link_lanes::LinkLanes;
use crate::matching::standing::{StandingWindow, StandingWindows};
use crate::matching::{
    BatchReceive, BatchSend, CancelAll, EdgeReports, Error, LinkTag, Members, NewReceive, PeerEnd, PeerIndex,
    PeerObserver, ReceiveAll, RemoteCommand, RemoteSettings, StandingChange, UntakenCallback, Waiter,
};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Taken, ToSender, WindowViolation};
use crate::sync::Reused;
use crate::telemetry::{Counter, FlightEvent, FlightRecord};
use crate::wire::message::EdgeCredits;
use crate::wire::{LossCause, TaskId, Time};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Messages that are handled after the last polls before a link ends.
const UNHANDLED: usize = 1024;

/// The rendezvous' part of a poller whose links exchange edge windows.
pub struct WindowHandler {
    connections: Connections,
    matching: Matching,
    /// In a box, so that the other fields lie near: they are on the short path.
    standing: Box<StandingWindows>,
}

impl WindowHandler {
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
        let RemoteSettings { windows, max_requests, hung_after, .. } = settings;
        WindowHandler {
            matching: Matching::new(&members, windows, (max_requests, outstanding), hung_after),
            connections: Connections::new(me, incarnation, members, &settings, observer),
            standing: Box::default(),
        }
    }

    /// Calls `body` with the matching and its lanes.
    #[inline(always)] // on the short path
    pub(crate) fn with<P: Port, R>(
        &mut self,
        links: &mut Links<P>,
        body: impl FnOnce(&mut Matching, &mut LinkLanes<'_, P>) -> R,
    ) -> R {
        let WindowHandler { connections, matching, .. } = self;
        body(matching, &mut LinkLanes { links, connections })
    }

    fn send<P: Port>(&mut self, links: &mut Links<P>, peer: PeerIndex, key: &TensorKey, value: Value) {
        let left = self.with(links, |matching, lanes| matching.send(lanes, peer, key.borrowed(), value));
        self.matching.left(left);
    }

    /// Sends the values of a batch, which count as outstanding.
    pub fn send_batch<P: Port>(
        &mut self,
        links: &mut Links<P>,
        values: &mut dyn Iterator<Item = OfEdge<'_, Value>>,
    ) {
        links.begin_batch();
        links.counters().increment(Counter::Batches);
        let mut left = 0;
        self.with(links, |matching, lanes| {
            for (peer, key, value) in values {
                left += matching.send(lanes, peer, key, value);
            }
        });
        self.matching.left(left);
    }

    /// See [`Matching::receive_any`].
    pub fn receive_any<P: Port>(
        &mut self,
        links: &mut Links<P>,
        (peer, key): (PeerIndex, TensorKeyRef<'_>),
        receive: &mut DirectReceive,
        expected: &mut Option<ExpectedRecord>,
    ) -> Option<Result<(), Box<Error>>> {
        self.with(links, |matching, lanes| {
            matching.receive_any(lanes, (peer, key, true), receive, (expected, false))
        })
    }

    /// Begins a receive: see [`Matching::receive`].
    pub fn receive<P: Port>(
        &mut self,
        links: &mut Links<P>,
        peer: PeerIndex,
        new: &mut Option<NewReceive>,
    ) -> Option<u32> {
        self.with(links, |matching, lanes| matching.receive(lanes, peer, new, true))
    }

    /// Begins a receive of a command. Its handle has no number of a waiter, so the call is listed.
    fn receive_listed<P: Port>(
        &mut self,
        links: &mut Links<P>,
        peer: PeerIndex,
        receive: NewReceive,
        is_bounded: bool,
    ) {
        self.with(links, |matching, lanes| {
            if let Some(waits) = matching.receive(lanes, peer, &mut Some(receive), is_bounded) {
                matching.list(waits);
            }
        });
    }

    fn send_all<P: Port>(&mut self, links: &mut Links<P>, mut values: Reused<BatchSend>) {
        links.begin_batch();
        links.counters().increment(Counter::Batches);
        let mut left = 0;
        self.with(links, |matching, lanes| {
            for BatchSend { peer, key, value, .. } in values.drain(..) {
                left += matching.send(lanes, peer, key.borrowed(), value);
            }
        });
        self.matching.left(left);
    }

    fn receive_all<P: Port>(&mut self, links: &mut Links<P>, batch: ReceiveAll) {
        links.begin_batch();
        links.counters().increment(Counter::Batches);
        let ReceiveAll { begun, deadline, timeout, mut receives } = batch;
        for BatchReceive { peer, id, key, destination, sender, .. } in receives.drain(..) {
            let (permit, cancel_reason, is_logged) = (None, None, false);
            let waiter = Waiter { permit, id, sender, begun, deadline, timeout, cancel_reason, is_logged };
            self.receive_listed(links, peer, NewReceive { key, destination, waiter }, false);
        }
    }

    /// Cancels all calls of a batch. Returns the command if a call is unknown here: it has ended,
    /// or its begin command is still queued.
    fn cancel_all<P: Port>(&mut self, links: &mut Links<P>, cancel: CancelAll) -> Option<CancelAll> {
        let mut is_missing = false;
        for id in cancel.first..cancel.first + cancel.count {
            is_missing |= !self.with(links, |matching, lanes| matching.cancel(lanes, &cancel.one(id)));
        }
        is_missing.then_some(cancel)
    }

    /// Changes a standing edge. Returns the command if the edge is unknown: the command that
    /// creates it, from another thread, may still be queued.
    fn standing_changed<P: Port>(
        &mut self,
        links: &mut Links<P>,
        change: StandingChange,
    ) -> Option<StandingChange> {
        match change {
            StandingChange::Begun { id, peer, key, window } => {
                self.standing.begin(id, StandingWindow { peer, key, window });
                self.widen(links, |standing| standing.get(id));
            }
            StandingChange::Window { id, window } => {
                let Some(standing) = self.standing.get_mut(id) else { return Some(change) };
                standing.window = window;
                self.widen(links, |standing| standing.get(id));
            }
            StandingChange::Ended { id } => {
                let Some((ended, is_last)) = self.standing.end(id) else { return Some(change) };
                if is_last {
                    self.with(links, |matching, lanes| matching.end_standing(lanes, ended.peer, &ended.key));
                }
            }
        }
        None
    }

    /// Announces the edges of these standing requests, with their windows.
    fn widen<'a, P: Port, I>(&'a mut self, links: &mut Links<P>, which: impl FnOnce(&'a StandingWindows) -> I)
    where
        I: IntoIterator<Item = &'a StandingWindow>,
    {
        let WindowHandler { connections, matching, standing, .. } = self;
        let mut lanes = LinkLanes { links, connections };
        for edge in which(standing).into_iter().filter(|edge| edge.window > 0) {
            matching.widen(&mut lanes, edge.peer, &edge.key, edge.window);
        }
    }

    fn report<P: Port>(&self, links: &Links<P>, limit: usize) -> EdgeReports {
        let mut reports = EdgeReports::default();
        for peer in (0..self.connections.members().all().len() as u32).map(PeerIndex) {
            let link = self.connections.present(peer).map(|link| links.window_figures(link));
            self.matching.report(peer, &link.unwrap_or_default(), limit, &mut reports);
        }
        reports.cut(limit);
        reports
    }

    fn untaken<P: Port>(
        &mut self,
        links: &mut Links<P>,
        asks: bool,
        since: Option<u64>,
        done: UntakenCallback,
    ) {
        if asks {
            links.begin_batch();
            self.with(links, |matching, lanes| matching.flush(lanes));
        }
        done(self.matching.untaken(since), self.matching.losses());
    }

    fn is_flushed<P: Port>(&self, links: &mut Links<P>) -> bool {
        let mut peers = (0..self.connections.members().all().len() as u32).map(PeerIndex);
        peers.all(|peer| self.connections.present(peer).is_none_or(|link| links.is_flushed(link)))
    }

    #[inline]
    fn handle_windows<P: Port>(&mut self, links: &mut Links<P>) {
        while let Some((link, event)) = links.next_window() {
            self.window(links, link, event);
        }
    }

    /// Reads what peers sent before the end of a link.
    #[cold]
    fn read_last<P: Port>(&mut self, links: &mut Links<P>) {
        let mut last = links.last_polls();
        while links.poll_last(&mut last) {
            // The others wait for the end, as what they cause lets peers send more. A message can
            // take long, so those beyond the first ones take of the time of these polls.
            if links.window_count() > UNHANDLED {
                self.handle_windows(links);
            }
        }
    }

    fn window<P: Port>(&mut self, links: &mut Links<P>, link: LinkId, event: WindowEvent) {
        if let WindowEvent::Sent = event {
            return self.matching.left(1);
        }
        // Messages of a link that was replaced are void.
        let Some(peer) = self.connections.peer_of(link) else { return };
        let handled = self.with(links, |matching, lanes| match event {
            WindowEvent::ToSender(message, refusal) => {
                matching.handle_receiver(lanes, peer, message, refusal)
            }
            WindowEvent::Credits(credits) => credits.edges().try_for_each(|edge| {
                let EdgeCredits { limit, came, held, .. } = credits;
                let credit = ToSender::Credit { edge, limit, taken: Taken { came, held } };
                matching.handle_receiver(lanes, peer, credit, None)
            }),
            WindowEvent::ToReceiver(message) => matching.handle_sender(lanes, peer, message),
            WindowEvent::Landed(landing, tensor) => {
                matching.landed(lanes, peer, landing, tensor);
                Ok(())
            }
            WindowEvent::Sent => Ok(()),
        });
        if let Err(WindowViolation(why)) = handled {
            links.fail(link, LinkFailure::Protocol(format!("the peer sent {why}")));
        }
    }

    fn ready<P: Port>(&mut self, links: &mut Links<P>, peer: PeerIndex, tag: LinkTag) {
        let Some(old_life) = self.connections.ready(peer, tag) else { return };
        if old_life && !is_on(Mutant::OldWindowsKept) {
            let dropped = self.matching.drop_held(peer);
            links.counters().add(Counter::ValuesLost, dropped);
        }
        self.matching.up(peer);
        self.widen(links, |standing| standing.from(peer));
        self.connections.report_up(peer, tag);
    }

    #[cold]
    fn down<P: Port>(
        &mut self,
        links: &mut Links<P>,
        link: LinkId,
        failure: LinkFailure,
        records: (Vec<FlightRecord>, u64),
    ) {
        if let Some(ended) = self.connections.down(link, failure) {
            self.connections.keep_records(&ended, records);
            self.ended(links, ended);
        }
    }

    /// Ends a link now, and not with its event.
    #[cold]
    fn end<P: Port>(&mut self, links: &mut Links<P>, link: LinkId, why: LinkFailure) {
        if let Some(LinkEvent::Down { failure, records, .. }) = links.take_down(link) {
            return self.down(links, link, failure, records);
        }
        links.record(link, FlightEvent::Down);
        let records = links.flight_records(link);
        links.fail(link, why.clone());
        self.down(links, link, why, records);
    }

    fn ended<P: Port>(&mut self, links: &mut Links<P>, ended: EndedConnection) {
        self.matching.news = self.matching.news.wrapping_add(1);
        let (counters, values) = (links.counters(), self.matching.lost(ended.peer, &ended.error));
        let values = count_lost_values(counters, &ended.error, values);
        let mut loss = self.connections.ended(links.counters(), ended);
        loss.iter_mut().for_each(|loss| loss.lost.values = values);
        self.lost(loss);
    }

    /// Closes one link. A command about an earlier link changes nothing.
    fn close<P: Port>(&mut self, links: &mut Links<P>, peer: PeerIndex, tag: LinkTag, cause: LossCause) {
        let Some((link, why)) = self.connections.closing(peer, tag, cause) else { return };
        // This command may arrive before the peer's last tensors were read.
        self.read_last(links);
        links.fail(link, why);
    }

    fn gone<P: Port>(&mut self, links: &mut Links<P>, PeerEnd { peer, tag, cause }: PeerEnd) {
        let Some((tag, is_up)) = self.connections.of_life(peer, tag) else { return };
        self.close(links, peer, tag, cause.clone());
        let loss = (!is_up).then(|| self.connections.note_loss(links.counters(), peer, tag, cause));
        self.lost(loss.flatten());
    }

    /// Reports a loss. A fatal one ends every call first.
    fn lost(&mut self, loss: Option<UnreportedLoss>) {
        let Some(loss) = loss else { return };
        self.matching.set_down(loss.lost.peer, &loss.lost.error);
        if loss.is_fatal {
            let first = self.connections.first_cause(&loss.lost);
            self.matching.end(first.as_ref().unwrap_or(&loss.lost.error));
        }
        self.connections.report(&loss);
    }
}

impl<P: Port> Handler<P> for WindowHandler {
    type Command = RemoteCommand<P::Link>;

    fn command(&mut self, links: &mut Links<P>, command: Self::Command, now: Time) -> Option<Self::Command> {
        match command {
            RemoteCommand::Send { peer, key, value } => self.send(links, peer, &key, value),
            RemoteCommand::SendAll(values) => self.send_all(links, values),
            RemoteCommand::Receive { peer, receive } => self.receive_listed(links, peer, receive, true),
            RemoteCommand::ReceiveAll(batch) => self.receive_all(links, batch),
            RemoteCommand::Cancel(cancel) => {
                let found = self.with(links, |matching, lanes| matching.cancel(lanes, &cancel));
                return (!found).then_some(RemoteCommand::Cancel(cancel));
            }
            RemoteCommand::CancelAll(cancel) => {
                return self.cancel_all(links, cancel).map(RemoteCommand::CancelAll);
            }
            RemoteCommand::Step(change) => {
                links.begin_batch();
                self.with(links, |matching, lanes| matching.step_changed(lanes, change));
            }
            RemoteCommand::Standing(change) => {
                return self.standing_changed(links, change).map(RemoteCommand::Standing);
            }
            RemoteCommand::Attach { peer, tag, link, done } => {
                if let Some(old) = self.connections.replaced(peer, tag) {
                    let records = links.flight_records(old.link);
                    self.connections.close(links, &old);
                    self.connections.keep_records(&old, records);
                    self.ended(links, old);
                }
                self.connections.attach(links, (peer, tag), link, done);
            }
            RemoteCommand::Ready { peer, tag } => self.ready(links, peer, tag),
            RemoteCommand::Lose { peer, tag, cause } => self.close(links, peer, tag, cause),
            RemoteCommand::Gone(end) => self.gone(links, end),
            RemoteCommand::End { error } => self.matching.end(&error),
            RemoteCommand::Edges { limit, done } => done(self.report(links, limit)),
            RemoteCommand::Waits { limit, done } => {
                done(self.with(links, |matching, lanes| matching.waits(lanes, now, limit)));
            }
            RemoteCommand::FlightLogs(done) => done(self.connections.flight_logs(links)),
            RemoteCommand::Untaken { asks, since, done } => self.untaken(links, asks, since, done),
            RemoteCommand::IsFlushed(done) => done(self.is_flushed(links)),
            #[cfg(any(test, feature = "sim"))]
            RemoteCommand::Load(done) => done(self.matching.load(links.load())),
        }
        None
    }

    fn event(&mut self, links: &mut Links<P>, event: LinkEvent, _now: Time) {
        let earlier = match &event {
            LinkEvent::Down { link, failure, .. } if failure.is_remote() => {
                self.connections.ended_before(*link)
            }
            _ => Vec::new(),
        };
        if !earlier.is_empty() {
            // What the peers sent before their ends is handled first.
            self.read_last(links);
        }
        self.handle_windows(links);
        match event {
            LinkEvent::Up { link } => self.connections.probed(link),
            LinkEvent::Backlogged => self.matching.note_wait(),
            LinkEvent::Down { link, failure, records } => {
                earlier.into_iter().for_each(|(link, why)| self.end(links, link, why));
                self.down(links, link, failure, records);
            }
        }
    }

    #[inline]
    fn before_poll(&mut self, links: &mut Links<P>) {
        if self.matching.has_untold_ends() {
            self.with(links, |matching, lanes| matching.tell_ends(lanes));
        }
    }

    #[inline]
    fn after_events(&mut self, links: &mut Links<P>, _now: Time) {
        self.handle_windows(links);
    }

    fn next_deadline(&self) -> Time {
        self.matching.next_deadline()
    }

    fn expire(&mut self, links: &mut Links<P>, now: Time) {
        self.with(links, |matching, lanes| matching.expire(lanes, now));
        if let Some(waits) = self.matching.take_long_waits() {
            self.connections.report_hung(&waits);
        }
    }
}
