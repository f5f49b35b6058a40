//! The receiving side.

use super::{Lanes, Matching, WaitingReceive};
use crate::link::windows::{ReadyValue, RejectedTensor, WindowArrival, WindowRefusal};
use crate::link::{Corruption, Destination, ReceiveError, Received, TensorKey, TensorKeyRef};
use crate::matching::{CallHandle, CancelReason, Delivery, Error, NewReceive, PeerIndex, Waiter};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Held, Incoming, ToReceiver, WindowViolation};
use crate::telemetry::Counter;
use crate::wire::Status;
use crate::wire::message::Placement;
use std::sync::Arc;

/// Bytes of a peer's error in the receives that it ends, all together. The receives after that
/// have [`CUT_TEXT`] bytes of its text and of its details.
const TEXT_OF_ALL: usize = 64 << 20;
const CUT_TEXT: usize = 1024;
/// Bytes of a peer's earlier errors in the receives of a link that begin later, all together. As
/// many can begin as this process likes. Those after that have [`CUT_LATE`] bytes of the text and
/// of the details.
const TEXT_OF_LATE: usize = 64 << 20;
const CUT_LATE: usize = 4096;

impl Matching {
    /// Begins the receive that `new` holds, or ends it at once. Takes it from there, as each pass
    /// by value is a copy. A receive beyond the limit fails if `is_bounded`.
    ///
    /// Returns the number of a receive that waits and is not [listed](Matching::list). The caller
    /// keeps it for the call's handle, or lists it. `None`: it has ended, or is listed.
    #[inline]
    pub fn receive(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        new: &mut Option<NewReceive>,
        is_bounded: bool,
    ) -> Option<u32> {
        let NewReceive { key, waiter, .. } = new.as_ref()?;
        let (step, is_try) = (key.step, waiter.timeout.is_zero());
        if !self.steps.goes_on(step)
            && let Some(end) = self.steps.end_of(step)
        {
            return NewReceive::fail(new, end.error(step));
        }
        if let Some(error) = &self.broken {
            return NewReceive::fail(new, error.clone());
        }
        let entry = &mut self.peers[peer.0 as usize];
        let edge = entry.incoming_edge(key.borrowed());
        if entry.incoming.holds_any(edge) && entry.incoming.first(edge, step).is_some() {
            let receive = WaitingReceive::new(new.take()?, peer, edge, is_bounded);
            self.receive_held(lanes, receive);
            return None;
        }
        if let Some(error) = entry.down.as_deref() {
            let error = error.clone();
            self.send_due(lanes, peer, edge);
            return NewReceive::fail(new, error);
        }
        if let Some(refusal) = entry.incoming.refusal(edge, step) {
            let refusal = refusal.clone();
            let receive = WaitingReceive::new(new.take()?, peer, edge, is_bounded);
            self.receive_refused(lanes, receive, &refusal);
            return None;
        }
        if is_try {
            entry.incoming.ask(edge, step, &mut |message| lanes.to_sender(peer, message));
            let NewReceive { key, waiter, .. } = new.take()?;
            let waiter = Waiter { cancel_reason: Some(CancelReason::Deadline(None)), ..waiter };
            waiter.fail_cancelled(&key);
            return None;
        }
        self.wait(lanes, (peer, edge), new, is_bounded)
    }

    /// A receive takes the first value of its step.
    #[inline(never)] // keeps the begin of a receive short
    fn receive_held(&mut self, lanes: &mut impl Lanes, receive: WaitingReceive) {
        let (peer, edge, step) = (receive.peer, receive.edge, receive.key.step);
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        match incoming.take_if(edge, step, WindowArrival::is_ready) {
            Some(held) => self.deliver(lanes, receive, held),
            None => self.take_remote(lanes, receive),
        }
        self.send_due(lanes, peer, edge);
        self.update_ready(lanes, peer, edge);
    }

    /// The peer has ended the step of a receive, or does not serve its edge.
    #[inline(never)] // keeps the begin of a receive short
    fn receive_refused(&mut self, lanes: &mut impl Lanes, receive: WaitingReceive, refusal: &WindowRefusal) {
        let WaitingReceive { peer, edge, key, waiter, .. } = receive;
        self.send_due(lanes, peer, edge);
        let status = late_status(self.late_texts.entry(peer).or_default(), refusal, key.borrowed());
        failed(lanes, waiter, &key, ReceiveError::Remote(status));
    }

    #[inline(always)] // else the receive is copied
    fn wait(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, edge): (PeerIndex, u32),
        new: &mut Option<NewReceive>,
        is_bounded: bool,
    ) -> Option<u32> {
        let NewReceive { key, waiter, .. } = new.as_ref()?;
        // One search for the entry.
        let Matching { peers, waiting, max_waiting, next_deadline, long_waits, .. } = self;
        let entry = &mut peers[peer.0 as usize];
        if is_bounded && entry.waiting >= *max_waiting {
            let error = Error::too_many_receives(*max_waiting);
            self.send_due(lanes, peer, edge);
            return NewReceive::fail(new, error);
        }
        entry.waiting += u32::from(is_bounded);
        let step = key.step;
        *next_deadline = (*next_deadline).min(long_waits.due_of(waiter));
        let waiter = waiting.add(WaitingReceive::new(new.take()?, peer, edge, is_bounded));
        entry.incoming.wait(edge, step, waiter, &mut |message| lanes.to_sender(peer, message));
        if entry.offers {
            self.update_ready_of(lanes, peer, edge);
        }
        Some(waiter)
    }

    /// As [`Matching::wait`], for a receive whose handle does not learn its number.
    #[cold]
    pub(super) fn wait_listed(&mut self, lanes: &mut impl Lanes, receive: WaitingReceive) {
        let WaitingReceive { peer, edge, key, destination, waiter, is_bounded, .. } = receive;
        let mut new = Some(NewReceive { key, destination, waiter });
        if let Some(waiter) = self.wait(lanes, (peer, edge), &mut new, is_bounded) {
            self.list(waiter);
        }
    }

    /// Adds a receive that waits again, and counts as waiting.
    pub(super) fn add_waiting(&mut self, receive: WaitingReceive) -> u32 {
        let waiter = &receive.waiter;
        let due = waiter.deadline.min(self.long_waits.report_of(waiter));
        self.next_deadline = self.next_deadline.min(due);
        let waiter = self.waiting.add(receive);
        self.list(waiter);
        waiter
    }

    /// Enters a receive that waits in the table of calls, so that its id alone finds it.
    pub(super) fn list(&mut self, waiter: u32) {
        if let Some(receive) = self.waiting.get_mut(waiter) {
            receive.is_listed = true;
            self.calls.insert(receive.waiter.id, waiter);
        }
    }

    /// The number of the receive of a call, if it waits.
    #[inline]
    pub(super) fn waiter_of(&self, call: CallHandle) -> Option<u32> {
        let is_it = |waiter: &u32| self.waiting.get(*waiter).is_some_and(|of| of.waiter.id == call.id);
        call.waiter.filter(is_it).or_else(|| self.calls.get(&call.id).copied())
    }

    /// Handles a message of a peer that sends.
    ///
    /// # Errors
    /// If the peer breaks the protocol. Its link must end.
    #[inline(always)] // else the message is copied
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
            Incoming::Dropped(value) => _ = self.discard(lanes, peer, value),
            Incoming::Value(edge, waiter, held) => {
                // Before the receive is taken out, as a borrow of it then costs one more copy.
                if self.waiting.get(waiter).is_some_and(WaitingReceive::is_dropped) {
                    self.pass_on(lanes, waiter, held);
                } else if let Some(receive) = self.take_waiting(waiter) {
                    self.deliver(lanes, receive, held);
                }
                let entry = &mut self.peers[peer.0 as usize];
                entry.incoming.send_due(edge, &mut |message| lanes.to_sender(peer, message));
                if entry.offers {
                    self.update_ready_of(lanes, peer, edge);
                }
            }
            Incoming::Ended(waiters, values, refusal) => {
                values.into_iter().for_each(|value| _ = self.discard(lanes, peer, value));
                self.fail_refused(lanes, waiters, &refusal);
            }
        }
        Ok(())
    }

    /// Fails receives whose steps have ended at the sender, or whose edge it does not serve.
    #[cold]
    fn fail_refused(&mut self, lanes: &mut impl Lanes, waiters: Vec<u32>, refusal: &WindowRefusal) {
        self.update_ready_for(lanes, &waiters);
        let mut room = TEXT_OF_ALL;
        for waiter in waiters {
            let Some(receive) = self.take_waiting(waiter) else { continue };
            let most = if room > 0 { usize::MAX } else { CUT_TEXT };
            let status = refusal.status(receive.key.borrowed(), most);
            room = room.saturating_sub(status.message.len() + status.details.len());
            failed(lanes, receive.waiter, &receive.key, ReceiveError::Remote(status));
        }
    }

    /// Gives a value to a receive, or to the next one that it fits. The caller then calls
    /// `send_due`.
    #[inline(never)] // keeps the begin of a receive short
    pub(super) fn deliver(
        &mut self,
        lanes: &mut impl Lanes,
        receive: WaitingReceive,
        held: Held<WindowArrival>,
    ) {
        let (peer, edge) = (receive.peer, receive.edge);
        if let Some(left) = self.try_deliver(lanes, receive, held) {
            self.deliver_to_next(lanes, (peer, edge), left);
        }
    }

    /// Gives the value of a receive that was dropped to the next one that it fits.
    #[cold]
    fn pass_on(&mut self, lanes: &mut impl Lanes, waiter: u32, held: Held<WindowArrival>) {
        let Some(receive) = self.take_waiting(waiter) else { return };
        let of = (receive.peer, receive.edge);
        receive.abandon();
        self.deliver_to_next(lanes, of, held);
    }

    /// Gives a value that a receive could not take to the next one that it fits.
    #[cold]
    fn deliver_to_next(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, edge): (PeerIndex, u32),
        mut held: Held<WindowArrival>,
    ) {
        // A loop, as many receives with other shapes can wait.
        loop {
            let incoming = &mut self.peers[peer.0 as usize].incoming;
            let Some((waiter, put_back)) = incoming.put_back(edge, held) else { return };
            let Some(receive) = self.take_waiting(waiter) else { return };
            if receive.is_dropped() {
                receive.abandon();
                held = put_back;
                continue;
            }
            let Some(left) = self.try_deliver(lanes, receive, put_back) else { return };
            held = left;
        }
    }

    /// Gives a value to a receive. Returns it if the receive could not take it, and has failed.
    #[inline(always)] // else both are copied
    fn try_deliver(
        &mut self,
        lanes: &mut impl Lanes,
        receive: WaitingReceive,
        held: Held<WindowArrival>,
    ) -> Option<Held<WindowArrival>> {
        let Held { step, order, in_window, is_taken, value } = held;
        let value = match value {
            WindowArrival::Ready(value) => WindowArrival::Ready(Self::offer(lanes, receive, value)?),
            WindowArrival::Offered(offered) => {
                WindowArrival::Offered(self.take_arrived(lanes, receive, offered)?)
            }
            WindowArrival::Landing(landing) => {
                self.join_transfer(receive, landing);
                return None;
            }
        };
        (!is_on(Mutant::MismatchDropped)).then_some(Held { step, order, in_window, is_taken, value })
    }

    /// Ends a receive with a value or its error. Returns a value that the receive could not take.
    #[inline(always)] // else both are copied
    pub(super) fn offer(
        lanes: &impl Lanes,
        receive: WaitingReceive,
        value: ReadyValue,
    ) -> Option<ReadyValue> {
        let WaitingReceive { key, destination, waiter, .. } = receive;
        match received(lanes, key.borrowed(), destination, value) {
            Ok((received, sender)) => {
                waiter.complete(Ok(Delivery::of(received, sender, lanes.pool())));
                None
            }
            Err(undelivered) => {
                let Undelivered { error, left } = *undelivered;
                waiter.complete(Err(error));
                left
            }
        }
    }

    /// Sends what an edge owes its sender.
    #[inline(always)] // on the short path, where a receive returns credit
    pub(super) fn send_due(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, edge: u32) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        incoming.send_due(edge, &mut |message| lanes.to_sender(peer, message));
    }

    pub(super) fn take_waiting(&mut self, waiter: u32) -> Option<WaitingReceive> {
        self.uncount(waiter)?;
        self.waiting.remove(waiter)
    }

    /// Ends a receive whose thread has got the value itself.
    #[inline]
    pub(super) fn end_waiting(&mut self, waiter: u32) {
        if let Some(receive) = self.uncount(waiter) {
            receive.waiter.sender.close();
            self.waiting.discard(waiter);
        }
    }

    /// A receive that waits no more: it is not counted, and its call is not listed.
    #[inline]
    fn uncount(&mut self, waiter: u32) -> Option<&mut WaitingReceive> {
        let receive = self.waiting.get_mut(waiter)?;
        self.peers[receive.peer.0 as usize].waiting -= u32::from(receive.is_bounded);
        if receive.is_listed {
            self.calls.remove(&receive.waiter.id);
        }
        Some(receive)
    }
}

impl NewReceive {
    /// Ends a receive before it has begun.
    #[cold]
    fn fail(new: &mut Option<NewReceive>, error: Error) -> Option<u32> {
        if let Some(NewReceive { waiter, .. }) = new.take() {
            waiter.complete(Err(error));
        }
        None
    }
}

impl WaitingReceive {
    #[inline(always)] // else it is copied
    fn new(new: NewReceive, peer: PeerIndex, edge: u32, is_bounded: bool) -> Self {
        let NewReceive { key, destination, waiter } = new;
        let (is_listed, landing) = (false, None);
        WaitingReceive { peer, edge, key, destination, waiter, is_bounded, is_listed, landing }
    }

    /// Whether its handle was dropped. What comes then is for the next receive, even if it
    /// overtakes the command that cancels this one.
    #[inline]
    pub(super) fn is_dropped(&self) -> bool {
        self.waiter.sender.is_abandoned() && !is_on(Mutant::ValueToNobody)
    }

    /// Ends a receive whose handle was dropped.
    #[cold]
    pub(super) fn abandon(mut self) {
        self.waiter.cancel_reason = Some(CancelReason::Dropped);
        self.waiter.fail_cancelled(&self.key);
    }
}

/// Why a receive did not get the value that it met. Boxed, so that a value is not copied.
pub(super) struct Undelivered {
    /// The error of the receive.
    pub error: Error,
    /// The value, for the next receive.
    pub left: Option<ReadyValue>,
}

/// Gives a value to a receive, with the placement at its sender.
///
/// # Errors
/// If the receive can't take it.
#[inline(always)] // else the value is copied
pub(super) fn received(
    lanes: &impl Lanes,
    key: TensorKeyRef<'_>,
    destination: Destination,
    value: ReadyValue,
) -> Result<(Received, Placement), Box<Undelivered>> {
    let received = match value {
        ReadyValue::Failed(status) => {
            let error = error_of(lanes, key, ReceiveError::Remote(status));
            return Err(Box::new(Undelivered { error, left: None }));
        }
        ReadyValue::Dead => {
            let given = match destination {
                Destination::Into(given) => Some(given),
                Destination::Alloc | Destination::Borrow => None,
            };
            (Received::Dead(given), Placement::HEAP)
        }
        ReadyValue::Tensor(tensor) => {
            tensor.place(lanes.pool(), lanes.counters(), destination).map_err(|rejected| {
                let RejectedTensor { tensor, error } = *rejected;
                let error = error_of(lanes, key, error);
                Box::new(Undelivered { error, left: tensor.map(ReadyValue::Tensor) })
            })?
        }
    };
    count_received(lanes, &received.0);
    Ok(received)
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
pub(super) fn failed(lanes: &impl Lanes, waiter: Waiter, key: &TensorKey, error: ReceiveError) {
    waiter.complete(Err(error_of(lanes, key.borrowed(), error)));
}

#[cold]
pub(super) fn error_of(lanes: &impl Lanes, key: TensorKeyRef<'_>, error: ReceiveError) -> Error {
    let (peer, name) = (key.edge.name.source_task().clone(), key.to_key().to_string());
    match error {
        ReceiveError::Remote(status) => Error::Remote { peer, key: name, status },
        ReceiveError::NoRoom(error) => {
            lanes.counters().increment(Counter::PoolExhausted);
            Error::NoRoom { key: name, source: Arc::new(error), granted: lanes.most_granted().map(Box::new) }
        }
        ReceiveError::Corrupted(Corruption { bytes, sent, actual }) => {
            Error::Corrupted { peer, key: name, bytes, sent, actual }
        }
        ReceiveError::ShapeMismatch { sent, given } => Error::ShapeMismatch { key: name, sent, given },
        ReceiveError::NoGrant { limit } => Error::too_many_grants(limit),
        ReceiveError::TooLong { limit } => Error::too_long_for_grant(limit),
    }
}

/// What a receive gets of the peer's error, of which earlier ones got `so_far` bytes of long ones.
pub(super) fn late_status(so_far: &mut usize, refusal: &WindowRefusal, key: TensorKeyRef<'_>) -> Status {
    let most = if *so_far < TEXT_OF_LATE { usize::MAX } else { CUT_LATE };
    let status = refusal.status(key, most);
    let bytes = status.message.len() + status.details.len();
    *so_far += if bytes > CUT_LATE { bytes } else { 0 };
    status
}
