//! Direct calls: those of the thread that holds the poller. A receive of them needs no waiter, and
//! one that waits already ends without an event.
//!
//! Small tensors within the credit take the short path. Both of its halves do to an edge what the
//! general path does, without messages and events in between. Whatever takes more is left to the
//! general path.

use super::receiving::{Undelivered, count_received, error_of, late_status, received};
use super::{Lanes, Matching, OfEdge, PeerEdges};
use crate::fabric::ShortTake;
use crate::link::windows::WindowArrival;
use crate::link::{Destination, DirectReceive, ReceiveError, TensorKeyRef, Value};
use crate::matching::{CallHandle, Error, PeerIndex, reserve};
use crate::memory::Tensor;
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Held, OutEdge, Record};
use crate::telemetry::Counter;
use crate::wire::EdgeSide;

/// The record that a receive waits for. Valid until the next message is handled.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedRecord {
    peer: PeerIndex,
    edge: u32,
    record: Record<()>,
    /// Whether no message is due when the value has come.
    stays_settled: bool,
}

impl PeerEdges {
    /// The record that a receive waits for on an edge without a value of its step. `None` if other
    /// receives wait too, or the value comes in another way. The step is live.
    #[inline]
    pub(super) fn expected(&self, peer: PeerIndex, edge: u32, step: u64) -> Option<ExpectedRecord> {
        let record = self.incoming.next_record(edge, step)?;
        let stays_settled = self.incoming.stays_settled(edge);
        Some(ExpectedRecord { peer, edge, record, stays_settled })
    }
}

impl PeerEdges {
    /// As [`Matching::send_short`], for an edge whose place is not known yet.
    #[cold]
    fn send_far(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        key: TensorKeyRef<'_>,
        tensor: &mut Option<Tensor>,
    ) -> bool {
        let index = self.outgoing_edge(key);
        let edge = self.out.at(index, |_| true);
        let has_left = edge.is_some_and(|edge| leaves_short(lanes, peer, edge, key.step, tensor));
        // The edge may be new, and the value may never be sent.
        self.out.forget(index);
        has_left
    }
}

impl Matching {
    /// Sends a tensor that leaves at once. Returns whether it did. A tensor that is lent is taken.
    #[inline]
    pub fn send_short(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key): (PeerIndex, TensorKeyRef<'_>),
        tensor: &mut Option<Tensor>,
    ) -> bool {
        if !self.steps.goes_on(key.step) {
            return false;
        }
        let entry = &mut self.peers[peer.0 as usize];
        // A peer may announce edges before this side knows that both are ready.
        if entry.down.is_some() {
            return false;
        }
        let index = key.edge.name.place(EdgeSide::Sender);
        if let Some(edge) = entry.out.at(index, |known| known.is(key.edge)) {
            return leaves_short(lanes, peer, edge, key.step, tensor);
        }
        entry.send_far(lanes, peer, key, tensor)
    }

    /// Sends a value that does not count as outstanding yet. A value that must wait, or whose
    /// tensor is offered, counts from now on, with `limit` values at most. Returns whether it
    /// waits.
    ///
    /// # Errors
    /// The value, beyond the limit.
    #[inline]
    pub fn send_now(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key): (PeerIndex, TensorKeyRef<'_>),
        value: Value,
        limit: usize,
    ) -> Result<bool, Value> {
        if !self.steps.goes_on(key.step) {
            return Ok(false);
        }
        let entry = &mut self.peers[peer.0 as usize];
        let index = entry.outgoing_edge(key);
        let out = &mut entry.out;
        let waits = !out.can_leave(index, key.step);
        let counts = (waits && !is_on(Mutant::WaitingValueUncounted)) || lanes.keeps(peer, &value);
        if counts && reserve(&self.outstanding, 1, limit).is_err() {
            out.forget(index);
            return Err(value);
        }
        if waits {
            lanes.counters().increment(Counter::SendsWaited);
            if out.wait(index, key.step, value) {
                self.note_wait_on(peer, index);
            }
            return Ok(true);
        }
        let mut staying = 0;
        out.offer(index, key.step, value, &mut |message| {
            staying += usize::from(lanes.to_receiver(peer, message));
        });
        if counts && staying == 0 {
            self.left(1);
        }
        Ok(false)
    }

    /// Takes the next value for the thread that holds the poller, without a waiter. A receive that
    /// still waits after `Ok` must begin as a waiter. `None`: there is no value now, and the sender
    /// was asked for it. `expected` becomes the record that brings the value, for
    /// [`Matching::take_short`]. Beyond the limit of waiting receives the receive fails if
    /// `is_bounded`.
    #[inline(always)] // on the short path of a batch
    pub fn receive_now(
        &mut self,
        lanes: &mut impl Lanes,
        of: OfEdge<'_, bool>,
        receive: &mut DirectReceive,
        expected: &mut Option<ExpectedRecord>,
    ) -> Option<Result<(), Box<Error>>> {
        match self.receive_short(lanes, (of.0, of.1), receive) {
            Some(ShortTake::Taken(())) => Some(Ok(())),
            looked => self.receive_any(lanes, of, receive, (expected, looked.is_some())),
        }
    }

    /// Takes the next value if it is the next message, and nothing else is to be done for it.
    /// `None` if it did not look for a message.
    #[inline(always)] // on the short path
    pub fn receive_short(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key): (PeerIndex, TensorKeyRef<'_>),
        receive: &mut DirectReceive,
    ) -> Option<ShortTake<()>> {
        if !self.steps.goes_on(key.step) {
            return None;
        }
        let index = key.edge.name.place(EdgeSide::Receiver);
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let edge = incoming.plain_at(index, |known| known.is(key.edge), key.step)?;
        let record = edge.next_short(key.step)?;
        let taken = lanes.take_short(peer, record, receive);
        if taken == ShortTake::Taken(()) {
            count_direct(lanes, receive);
            edge.took();
        }
        Some(taken)
    }

    /// Ends a receive that waits, if its value is the next message and nothing else is to be done
    /// for it. The value is for the caller: the channel of the receive is closed without it.
    #[inline]
    pub fn end_short(
        &mut self,
        lanes: &mut impl Lanes,
        call: CallHandle,
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        let Some(waiter) = self.waiter_of(call) else { return ShortTake::Other };
        let Some(waiting) = self.waiting.get_mut(waiter) else { return ShortTake::Other };
        let (peer, index, step) = (waiting.peer, waiting.edge, waiting.key.step);
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let Some(record) = incoming.record_of(index, step, &waiter) else { return ShortTake::Other };
        let destination = std::mem::replace(&mut waiting.destination, Destination::Alloc);
        *receive = DirectReceive::Waiting(destination);
        let taken = lanes.take_short(peer, record, receive);
        match receive {
            DirectReceive::Waiting(_) if is_on(Mutant::DestinationLost) => {}
            DirectReceive::Waiting(destination) => {
                waiting.destination = std::mem::replace(destination, Destination::Alloc);
            }
            DirectReceive::Received(received, _) => {
                count_received(lanes, received);
                incoming.took_for(index, step);
                self.end_waiting(waiter);
                if self.peers[peer.0 as usize].offers {
                    self.update_ready_of(lanes, peer, index);
                }
            }
        }
        taken
    }

    /// As [`Matching::receive_now`], for a value that takes more. `was_looked`: the next message
    /// was just looked at.
    #[inline(never)] // keeps the path above short
    pub(super) fn receive_any(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key, is_bounded): OfEdge<'_, bool>,
        receive: &mut DirectReceive,
        (expected, was_looked): (&mut Option<ExpectedRecord>, bool),
    ) -> Option<Result<(), Box<Error>>> {
        let entry = &mut self.peers[peer.0 as usize];
        let edge = entry.incoming_edge(key);
        let mut next = None;
        if self.steps.goes_on(key.step) {
            next = match entry.incoming.holds_any(edge) {
                true => match self.take_held(lanes, (peer, edge), key, receive) {
                    Some(result) => return Some(result),
                    None => {
                        let entry = &self.peers[peer.0 as usize];
                        if entry.incoming.first(edge, key.step).is_some() {
                            // An offered tensor takes a while: it is for a waiter.
                            return Some(Ok(()));
                        }
                        entry.expected(peer, edge, key.step)
                    }
                },
                false => entry.expected(peer, edge, key.step),
            };
            if let Some(next) = next.as_ref().filter(|_| !was_looked)
                && self.take_short(lanes, next, receive) == ShortTake::Taken(())
            {
                return Some(Ok(()));
            }
        }
        *expected = next;
        let Some(error) = self.why_not_now(lanes, (peer, key, is_bounded), edge) else {
            // The destination of a large tensor is granted for a waiter.
            let is_given = matches!(receive, DirectReceive::Waiting(Destination::Into(_)));
            return (!is_given && self.may_get_ready(lanes, peer, edge)).then_some(Ok(()));
        };
        // The edge may be new, and is not needed then.
        self.send_due(lanes, peer, edge);
        Some(Err(Box::new(error)))
    }

    #[inline]
    fn take_held(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, edge): (PeerIndex, u32),
        key: TensorKeyRef<'_>,
        receive: &mut DirectReceive,
    ) -> Option<Result<(), Box<Error>>> {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let held = incoming.take_if(edge, key.step, WindowArrival::is_ready)?;
        let Held { step, order, in_window, value: WindowArrival::Ready(value), .. } = held else {
            return None;
        };
        let destination = receive.take_destination().unwrap_or(Destination::Alloc);
        let result = match received(lanes, key, destination, value) {
            Ok((received, sender)) => {
                *receive = DirectReceive::Received(received, sender);
                Ok(())
            }
            Err(undelivered) => {
                let Undelivered { error, left } = *undelivered;
                if let Some(value) = left.filter(|_| !is_on(Mutant::DirectMismatchDropped)) {
                    let value = WindowArrival::Ready(value);
                    let held = Held { step, order, in_window, is_taken: false, value };
                    self.hold_again(lanes, peer, edge, held);
                }
                Err(Box::new(error))
            }
        };
        self.send_due(lanes, peer, edge);
        self.update_ready(lanes, peer, edge);
        Some(result)
    }

    /// The error of a receive that found no value. `None` if the value may still come.
    fn why_not_now(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key, is_bounded): OfEdge<'_, bool>,
        edge: u32,
    ) -> Option<Error> {
        if let Some(end) = self.steps.end_of(key.step) {
            return Some(end.error(key.step));
        }
        if let Some(error) = &self.broken {
            return Some(error.clone());
        }
        let entry = &mut self.peers[peer.0 as usize];
        if let Some(error) = entry.down.as_deref() {
            return Some(error.clone());
        }
        if let Some(refusal) = entry.incoming.refusal(edge, key.step) {
            let so_far = self.late_texts.entry(peer).or_default();
            let error = ReceiveError::Remote(late_status(so_far, refusal, key));
            return Some(error_of(lanes, key, error));
        }
        if is_bounded && entry.waiting >= self.max_waiting {
            return Some(Error::too_many_receives(self.max_waiting));
        }
        entry.incoming.ask(edge, key.step, &mut |message| lanes.to_sender(peer, message));
        None
    }

    /// A value that did not fit is for the next receive.
    #[cold]
    fn hold_again(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, edge: u32, held: Held<WindowArrival>) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        if let Some((waiter, held)) = incoming.put_back(edge, held)
            && let Some(receive) = self.take_waiting(waiter)
        {
            self.deliver(lanes, receive, held);
        }
    }

    /// Gives the value of an expected record to its receive, if the record is the next message of
    /// the peer.
    #[inline(always)] // on the short path
    pub fn take_short(
        &mut self,
        lanes: &mut impl Lanes,
        expected: &ExpectedRecord,
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        let ExpectedRecord { peer, edge, record, stays_settled } = *expected;
        let taken = lanes.take_short(peer, record, receive);
        if taken == ShortTake::Taken(()) {
            count_direct(lanes, receive);
            let incoming = &mut self.peers[peer.0 as usize].incoming;
            incoming.took(edge, stays_settled, &mut |message| lanes.to_sender(peer, message));
        }
        taken
    }
}

/// Sends a tensor on an edge, if it leaves at once. Returns whether it did.
#[inline(always)] // on the short path
fn leaves_short(
    lanes: &mut impl Lanes,
    peer: PeerIndex,
    edge: &mut OutEdge<Value>,
    step: u64,
    tensor: &mut Option<Tensor>,
) -> bool {
    let has_left = edge.next_record(step).is_some_and(|record| lanes.send_short(peer, record, tensor));
    if has_left {
        edge.left();
    }
    has_left
}

/// Counts the value that a receive has got.
#[inline]
fn count_direct(lanes: &impl Lanes, receive: &DirectReceive) {
    if let DirectReceive::Received(received, _) = receive {
        count_received(lanes, received);
    }
}
