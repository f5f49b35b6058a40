//! The receiving side.

use super::{Lanes, Matching, WaitingReceive};
use crate::link::windows::{RejectedTensor, WindowArrival, WindowRefusal};
use crate::link::{Corruption, Destination, Received, RequestError, TensorKey, TensorKeyRef};
use crate::matching::{CancelReason, Delivery, Error, PeerIndex, Waiter};
use crate::mutants::{Mutant, is_on};
use crate::protocol::window::{Held, Incoming, ToReceiver, WindowViolation};
use crate::telemetry::Counter;
use crate::wire::message::Placement;
use std::sync::Arc;

impl Matching {
    /// Begins a receive, or ends it at once. A receive beyond the limit fails if `is_bounded`.
    pub fn receive(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key): (PeerIndex, TensorKey),
        destination: Destination,
        waiter: Waiter,
        is_bounded: bool,
    ) {
        if !self.steps.goes_on(key.step)
            && let Some(end) = self.steps.end_of(key.step)
        {
            return waiter.complete(Err(end.error(key.step)));
        }
        if let Some(error) = &self.broken {
            return waiter.complete(Err(error.clone()));
        }
        let entry = &mut self.peers[peer.0 as usize];
        let edge = entry.incoming_edge(key.borrowed());
        let receive = WaitingReceive { peer, edge, key, destination, waiter, is_bounded };
        let step = receive.key.step;
        if let Some(held) = entry.incoming.take(edge, step) {
            self.deliver(lanes, receive, held);
            return self.send_due(lanes, peer, edge);
        }
        if let Some(error) = &entry.down {
            let error = error.clone();
            self.send_due(lanes, peer, edge);
            return receive.waiter.complete(Err(error));
        }
        if let Some(refusal) = entry.incoming.refusal(edge, step) {
            let error = RequestError::Remote(refusal.status(receive.key.borrowed()));
            self.send_due(lanes, peer, edge);
            return failed(lanes, receive.waiter, &receive.key, error);
        }
        if receive.waiter.timeout.is_zero() {
            entry.incoming.ask(edge, step, &mut |message| lanes.to_sender(peer, message));
            let WaitingReceive { key, mut waiter, .. } = receive;
            waiter.cancel_reason = Some(CancelReason::Deadline(None));
            return waiter.fail_cancelled(&key);
        }
        self.wait(lanes, receive);
    }

    fn wait(&mut self, lanes: &mut impl Lanes, receive: WaitingReceive) {
        let WaitingReceive { peer, edge, is_bounded, .. } = receive;
        let waiting = &mut self.peers[peer.0 as usize].waiting;
        if is_bounded && *waiting >= self.max_waiting {
            self.send_due(lanes, peer, edge);
            return receive.waiter.complete(Err(Error::too_many_receives(self.max_waiting)));
        }
        *waiting += u32::from(is_bounded);
        let step = receive.key.step;
        self.next_deadline = self.next_deadline.min(receive.waiter.deadline);
        let id = receive.waiter.id;
        let waiter = self.waiting.add(receive);
        self.calls.insert(id, waiter);
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        incoming.wait(edge, step, waiter, &mut |message| lanes.to_sender(peer, message));
    }

    /// Handles a message of a peer that sends.
    ///
    /// # Errors
    /// If the peer breaks the protocol. Its link must end.
    pub fn handle_sender(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        message: ToReceiver<WindowArrival, WindowRefusal>,
    ) -> Result<(), WindowViolation> {
        self.news = self.news.wrapping_add(1);
        let Matching { peers, steps, .. } = self;
        let incoming = &mut peers[peer.0 as usize].incoming;
        let mut post = |message| lanes.to_sender(peer, message);
        match incoming.receive(message, |step| steps.end_of(step).is_some(), &mut post)? {
            Incoming::Nothing => {}
            Incoming::Dropped(value) => drop(value),
            Incoming::Value(edge, waiter, held) => {
                if let Some(receive) = self.take_waiting(waiter) {
                    self.deliver(lanes, receive, held);
                }
                self.send_due(lanes, peer, edge);
            }
            Incoming::Ended(waiters, _, refusal) => {
                for waiter in waiters {
                    let Some(receive) = self.take_waiting(waiter) else { continue };
                    let error = RequestError::Remote(refusal.status(receive.key.borrowed()));
                    failed(lanes, receive.waiter, &receive.key, error);
                }
            }
        }
        Ok(())
    }

    /// Gives a value to a receive, or to the next one that it fits. The caller then calls
    /// `send_due`.
    pub(super) fn deliver(&mut self, lanes: &impl Lanes, receive: WaitingReceive, held: Held<WindowArrival>) {
        let mut next = Some((receive, held));
        // A loop, as many receives with other shapes can wait.
        while let Some((receive, held)) = next.take() {
            let (peer, edge) = (receive.peer, receive.edge);
            let Held { step, in_window, value } = held;
            let left = Self::offer(lanes, receive, value).filter(|_| !is_on(Mutant::MismatchDropped));
            let Some(value) = left else { return };
            let incoming = &mut self.peers[peer.0 as usize].incoming;
            let Some((waiter, held)) = incoming.put_back(edge, Held { step, in_window, value }) else {
                return;
            };
            next = self.take_waiting(waiter).map(|receive| (receive, held));
        }
    }

    /// Ends a receive with a value or its error. Returns a value that the receive could not take.
    fn offer(lanes: &impl Lanes, receive: WaitingReceive, value: WindowArrival) -> Option<WindowArrival> {
        let WaitingReceive { key, destination, waiter, .. } = receive;
        let (result, left) = received(lanes, key.borrowed(), destination, value);
        waiter.complete(result.map(|(received, sender)| Delivery::of(received, sender, lanes.pool())));
        left
    }

    /// Sends what an edge owes its sender.
    pub(super) fn send_due(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, edge: u32) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        incoming.send_due(edge, &mut |message| lanes.to_sender(peer, message));
    }

    pub(super) fn take_waiting(&mut self, waiter: u32) -> Option<WaitingReceive> {
        let receive = self.waiting.remove(waiter)?;
        self.peers[receive.peer.0 as usize].waiting -= u32::from(receive.is_bounded);
        self.calls.remove(&receive.waiter.id);
        Some(receive)
    }
}

/// The result of a receive that meets a value, and a value that the receive could not take.
pub(super) fn received(
    lanes: &impl Lanes,
    key: TensorKeyRef<'_>,
    destination: Destination,
    value: WindowArrival,
) -> (Result<(Received, Placement), Error>, Option<WindowArrival>) {
    let (result, left) = match value {
        WindowArrival::Failed(status) => (Err(error_of(lanes, key, RequestError::Remote(status))), None),
        WindowArrival::Dead => {
            let given = match destination {
                Destination::Into(given) => Some(given),
                Destination::Alloc | Destination::Borrow => None,
            };
            (Ok((Received::Dead(given), Placement::HEAP)), None)
        }
        WindowArrival::Tensor(tensor) => match tensor.place(lanes.pool(), lanes.counters(), destination) {
            Ok(received) => (Ok(received), None),
            Err(rejected) => {
                let RejectedTensor { tensor, error } = *rejected;
                (Err(error_of(lanes, key, error)), tensor.map(WindowArrival::Tensor))
            }
        },
    };
    if let Ok((received, _)) = &result {
        count_received(lanes, received);
    }
    (result, left)
}

/// Counts a value that a receive has got.
#[inline]
pub(super) fn count_received(lanes: &impl Lanes, received: &Received) {
    let bytes = match received {
        Received::Tensor(tensor) => tensor.meta().bytes(),
        Received::Into(given) => given.meta().bytes(),
        Received::Dead(_) => 0,
    };
    lanes.counters().increment(Counter::TensorsReceived);
    lanes.counters().add(Counter::BytesReceived, bytes);
}

/// Ends a receive with an error.
pub(super) fn failed(lanes: &impl Lanes, waiter: Waiter, key: &TensorKey, error: RequestError) {
    waiter.complete(Err(error_of(lanes, key.borrowed(), error)));
}

pub(super) fn error_of(lanes: &impl Lanes, key: TensorKeyRef<'_>, error: RequestError) -> Error {
    let (peer, name) = (key.edge.source_task().clone(), key.to_key().to_string());
    match error {
        RequestError::Remote(status) => Error::Remote { peer, key: name, status },
        RequestError::NoRoom(error) => {
            lanes.counters().increment(Counter::PoolExhausted);
            Error::NoRoom { key: name, source: Arc::new(error) }
        }
        RequestError::Corrupted(Corruption { bytes, sent, actual }) => {
            Error::Corrupted { peer, key: name, bytes, sent, actual }
        }
        RequestError::ShapeMismatch { sent, given } => Error::ShapeMismatch { key: name, sent, given },
        // The machines of requests alone cancel, and grant destinations.
        RequestError::Cancelled | RequestError::NoGrant { .. } => Error::Cancelled { key: name },
    }
}
