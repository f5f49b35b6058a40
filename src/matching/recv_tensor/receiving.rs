//! The receiving side.

use super::head::decode_failure;
use super::inbound::{ArrivedValue, CUT_FAILURE, HELD_PART, HeldValue, QueuedReceive, ReceiveQueue, Request};
use super::{AnswerHead, IDLE_GRACE, NEVER, OwnRequest, RecvTensors, not_borrowed};
use crate::link::windows::{ArrivedBytes, ArrivedTensor, RejectedTensor, ToldMeta};
use crate::link::{Corruption, Destination, EdgeKey, ReceiveError, Received, TensorKey};
use crate::matching::{CancelReason, Delivery, Error, NewReceive, Outcome, Payload, PeerIndex, Waiter};
use crate::memory::copy;
use crate::telemetry::Counter;
use crate::wire::message::{MAX_LONG_MESSAGE, Placement};
use crate::wire::{Code, Incarnation, Status, Time};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

impl RecvTensors {
    /// Begins a receive, or ends it at once. A receive beyond the limit fails if `is_bounded`.
    pub fn receive(
        &mut self,
        peer: PeerIndex,
        NewReceive { key, destination, waiter }: NewReceive,
        is_bounded: bool,
    ) {
        let receive = QueuedReceive { destination: not_borrowed(destination), waiter, is_bounded };
        if let Some(end) = self.steps.end_of(key.step) {
            let error = end.error(key.step);
            return self.fail(receive, error);
        }
        if let Some(error) = self.broken.clone() {
            return self.fail(receive, error);
        }
        let state = self.peer(peer);
        if let Some(held) = state.incoming.take_held(&key) {
            self.deliver(peer, &key, receive, held);
            return self.proceed(peer, &key);
        }
        if let Some(error) = state.down.clone() {
            return self.fail(receive, error);
        }
        let queue = state.incoming.keys.get(&key);
        let (is_try, mut ahead) = (receive.is_try(), queue.into_iter().flat_map(|queue| &queue.waiting));
        if is_try && !ahead.all(QueuedReceive::is_try) {
            // The next value is for an earlier receive.
            return self.give_up_one(&key, receive, CancelReason::Deadline(None));
        }
        let max_requests = self.settings.max_requests;
        if let Some(error) = self.peer(peer).incoming.full(max_requests, is_bounded) {
            return self.fail(receive, error);
        }
        let state = self.peer(peer);
        state.incoming.waiting += u32::from(is_bounded);
        let id = receive.waiter.id;
        state.incoming.keys.entry(key.clone()).or_default().waiting.push_back(receive);
        self.calls.insert(id, (peer, key.clone()));
        let request = self.peer(peer).incoming.keys.get(&key).and_then(|queue| queue.request.as_ref());
        if is_try && request.is_some_and(|request| request.last_try.is_none()) {
            // Nobody would say that there is no value. A try follows.
            self.withdraw(peer, &key);
        }
        self.ask(peer, &key);
    }

    /// Asks for the next value of a key, unless a request for it is open.
    fn ask(&mut self, peer: PeerIndex, key: &TensorKey) {
        let RecvTensors { peers, channel, counters, settings, .. } = self;
        let state = &mut peers[peer.0 as usize];
        let Some(link) = state.present() else { return };
        let life = link.tag.incarnation;
        let incoming = &mut state.incoming;
        let Some(queue) = incoming.keys.get_mut(key) else { return };
        if queue.request.is_some() || queue.held.is_some() {
            return;
        }
        incoming.next_request += 1;
        let id = incoming.next_request;
        incoming.requests.insert(id, key.clone());
        counters.increment(Counter::NeedsSent);
        let tries = queue.waiting.iter().all(QueuedReceive::is_try);
        let last_try = queue.waiting.back().filter(|_| tries).map(|receive| receive.waiter.id);
        let open = channel.ask(OwnRequest {
            peer,
            life,
            id,
            step: key.step,
            key: text_of(key, life),
            wants_checksum: settings.link.validate,
            is_try: last_try.is_some(),
            link: link.generation,
        });
        queue.request = Some(Request { id, open: Some(open), last_try, idle_since: None });
    }

    /// Makes the next request of a key if receives wait, or forgets the key if nothing is left.
    fn proceed(&mut self, peer: PeerIndex, key: &TensorKey) {
        let keys = &mut self.peer(peer).incoming.keys;
        let Some(queue) = keys.get(key) else { return };
        if queue.is_idle() {
            keys.remove(key);
        } else if !queue.waiting.is_empty() {
            self.ask(peer, key);
        }
    }

    /// The answer to a request has come.
    pub fn answered(&mut self, (peer, id): (PeerIndex, u64), answer: Result<(Vec<u8>, Vec<Bytes>), Status>) {
        let incoming = &mut self.peer(peer).incoming;
        let Some(key) = incoming.requests.get(&id).cloned() else { return };
        let Some(queue) = incoming.keys.get_mut(&key) else { return };
        // A request that was given up ends when the peer has heard so.
        let is_open = |request: &mut Request| request.id == id && request.open.is_some();
        if queue.request.take_if(is_open).is_none() {
            return;
        }
        incoming.requests.remove(&id);
        match answer {
            Ok((head, parts)) => match self.arrived(&head, &parts) {
                Ok(Ok(value)) => self.hand_out(peer, &key, HeldValue { request: id, value }),
                Ok(Err(status)) => {
                    self.counters.increment(Counter::ErrorsReceived);
                    self.finish(peer, id, false);
                    self.refused(peer, &key, status);
                }
                Err(why) => {
                    self.finish(peer, id, false);
                    let what = format!("the answer is not valid: {why}");
                    self.refused(peer, &key, Status::new(Code::DataLoss, what));
                }
            },
            // The sender may have the request, with a value.
            Err(status) => {
                self.counters.increment(Counter::ErrorsReceived);
                self.give_back(peer, &key, id);
                self.refused(peer, &key, status);
            }
        }
        self.proceed(peer, &key);
    }

    /// The sender has no value for a try. The tries that it was for end.
    pub fn tried(&mut self, peer: PeerIndex, id: u64) {
        let incoming = &mut self.peer(peer).incoming;
        let Some(key) = incoming.requests.get(&id).cloned() else { return };
        let Some(queue) = incoming.keys.get_mut(&key) else { return };
        let request = queue.request.as_ref().filter(|request| request.id == id && request.open.is_some());
        let Some(last) = request.and_then(|request| request.last_try) else { return };
        let at = queue.waiting.iter().position(|receive| receive.waiter.id == last);
        let behind = queue.waiting.split_off(at.map_or(0, |at| at + 1));
        let tries = std::mem::replace(&mut queue.waiting, behind);
        incoming.waiting -= tries.iter().filter(|receive| receive.is_bounded).count() as u32;
        // A late copy of the request takes no value once the sender has heard this.
        self.withdraw(peer, &key);
        for receive in tries {
            self.give_up_one(&key, receive, CancelReason::Deadline(None));
        }
    }

    /// The value of an answer, in the pool if it has room, or why there is none.
    fn arrived(&self, head: &[u8], parts: &[Bytes]) -> Result<Result<ArrivedValue, Status>, String> {
        let len: usize = parts.iter().map(Bytes::len).sum();
        match AnswerHead::decode(head)? {
            AnswerHead::Failed if len > MAX_LONG_MESSAGE => {
                Err(format!("a failure of {len} bytes, of at most {MAX_LONG_MESSAGE}"))
            }
            AnswerHead::Failed => decode_failure(&parts.concat()).map(Err),
            AnswerHead::Dead if len == 0 => Ok(Ok(ArrivedValue::Dead)),
            AnswerHead::Dead => Err(format!("a dead value with {len} bytes")),
            AnswerHead::Tensor { meta, .. } if meta.bytes() != len as u64 => {
                Err(format!("{len} bytes came for {meta}"))
            }
            AnswerHead::Tensor { meta, placement, checksum } => {
                let checksum = checksum.filter(|_| self.settings.link.validate);
                let bytes = match self.pool.landing(&meta) {
                    Ok(mut tensor) => {
                        let mut rest = tensor.bytes_mut();
                        for part in parts {
                            let (place, behind) = rest.split_at_mut(part.len());
                            copy(place, part);
                            rest = behind;
                        }
                        ArrivedBytes::Landed(tensor.freeze())
                    }
                    Err(_) => ArrivedBytes::Kept { bytes: parts.concat().into(), share: None },
                };
                let told = Arc::new(ToldMeta { meta, sender: placement });
                Ok(Ok(ArrivedValue::Tensor(ArrivedTensor { told, checksum, bytes })))
            }
        }
    }

    /// Gives a value to the first receive that can take it. Else holds it or gives it back.
    fn hand_out(&mut self, peer: PeerIndex, key: &TensorKey, mut held: HeldValue) {
        loop {
            let incoming = &mut self.peer(peer).incoming;
            let Some(queue) = incoming.keys.get_mut(key) else { return };
            let Some(receive) = queue.waiting.pop_front() else {
                return self.hold_or_give_back(peer, key, held);
            };
            incoming.waiting -= u32::from(receive.is_bounded);
            match self.place(peer, key, receive, held) {
                Some(left) => held = left,
                None => return,
            }
        }
    }

    /// Holds a value that no receive has taken, if the bound allows it. Else it is the sender's
    /// again, which sends it to the next request of the key.
    fn hold_or_give_back(&mut self, peer: PeerIndex, key: &TensorKey, held: HeldValue) {
        let most = self.pool.region().len() / HELD_PART;
        let incoming = &mut self.peer(peer).incoming;
        if incoming.held_bytes + held.bytes() <= most {
            return incoming.hold(key, held);
        }
        self.give_back(peer, key, held.request);
    }

    /// Gives an answered request up: its value goes back in line at the sender. The next request of
    /// the key follows when the sender has heard it.
    fn give_back(&mut self, peer: PeerIndex, key: &TensorKey, id: u64) {
        let incoming = &mut self.peer(peer).incoming;
        let Some(queue) = incoming.keys.get_mut(key) else { return };
        queue.request = Some(Request { id, open: None, last_try: None, idle_since: None });
        incoming.given_up.insert(id, key.clone());
        self.finish(peer, id, true);
    }

    /// Gives a held value to a receive that has just begun.
    fn deliver(&mut self, peer: PeerIndex, key: &TensorKey, receive: QueuedReceive, held: HeldValue) {
        // What is left was within the bound before. Its link may be over, so it can't go back.
        if let Some(left) = self.place(peer, key, receive, held) {
            self.peer(peer).incoming.hold(key, left);
        }
    }

    /// Ends a receive with a value. Returns a value that the receive could not take.
    fn place(
        &mut self,
        peer: PeerIndex,
        key: &TensorKey,
        receive: QueuedReceive,
        HeldValue { request, value }: HeldValue,
    ) -> Option<HeldValue> {
        let QueuedReceive { destination, waiter, .. } = receive;
        let placed = match value {
            ArrivedValue::Dead => {
                let given = match destination {
                    Destination::Into(given) => Some(given),
                    Destination::Alloc | Destination::Borrow => None,
                };
                Ok((Received::Dead(given), Placement::HEAP))
            }
            ArrivedValue::Tensor(tensor) => tensor.place(&self.pool, &self.counters, destination),
        };
        match placed {
            Ok((received, sender)) => {
                self.count(&received);
                self.finish(peer, request, false);
                let delivery: Delivery<Payload> = Delivery::of(received, sender, &self.pool);
                self.complete(waiter, Outcome(Ok(delivery)));
                None
            }
            Err(rejected) => {
                let RejectedTensor { tensor, error } = *rejected;
                let error = self.error_of(key, error);
                self.complete(waiter, Outcome(Err(error)));
                let left = tensor.map(|tensor| HeldValue { request, value: ArrivedValue::Tensor(tensor) });
                if left.is_none() {
                    self.finish(peer, request, false);
                }
                left
            }
        }
    }

    fn count(&self, received: &Received) {
        let bytes = match received {
            Received::Tensor(tensor) => tensor.meta().bytes(),
            Received::Into(given) => given.meta().bytes(),
            Received::Dead(_) => 0,
        };
        self.counters.increment(Counter::TensorsReceived);
        self.counters.add(Counter::BytesReceived, bytes);
    }

    fn error_of(&self, key: &TensorKey, error: ReceiveError) -> Error {
        let (peer, name) = (key.edge.name.source_task().clone(), key.to_string());
        match error {
            ReceiveError::Remote(status) => Error::Remote { peer, key: name, status },
            ReceiveError::NoRoom(error) => {
                self.counters.increment(Counter::PoolExhausted);
                Error::NoRoom { key: name, source: Arc::new(error), granted: None }
            }
            ReceiveError::Corrupted(Corruption { bytes, sent, actual }) => {
                Error::Corrupted { peer, key: name, bytes, sent, actual }
            }
            ReceiveError::ShapeMismatch { sent, given } => Error::ShapeMismatch { key: name, sent, given },
            ReceiveError::NoGrant { limit } => Error::too_many_grants(limit),
            ReceiveError::TooLong { limit } => Error::too_long_for_grant(limit),
        }
    }

    /// The sender has no value for a key, and will have none.
    fn refused(&mut self, peer: PeerIndex, key: &TensorKey, status: Status) {
        let mut status = self.peer(peer).incoming.kept(status);
        for receive in self.take_waiting(peer, key) {
            let cut = status.cut(CUT_FAILURE);
            let error = self.error_of(key, ReceiveError::Remote(std::mem::replace(&mut status, cut)));
            self.fail(receive, error);
        }
    }

    /// The receives of a key that wait, which do not wait any more.
    pub(super) fn take_waiting(&mut self, peer: PeerIndex, key: &TensorKey) -> VecDeque<QueuedReceive> {
        let incoming = &mut self.peer(peer).incoming;
        let taken = incoming.keys.get_mut(key).map(|queue| std::mem::take(&mut queue.waiting));
        let taken = taken.unwrap_or_default();
        incoming.waiting -= taken.iter().filter(|receive| receive.is_bounded).count() as u32;
        taken
    }

    /// Tells the peer that a request has ended, if its life has not.
    fn finish(&mut self, peer: PeerIndex, id: u64, is_given_up: bool) {
        if let Some(link) = self.peer(peer).present() {
            self.channel.finish(peer, link.tag.incarnation, id, is_given_up);
        }
    }

    /// Ends the wait of one receive of a key. A value that still comes is for the next receive.
    pub(super) fn give_up(
        &mut self,
        peer: PeerIndex,
        key: &TensorKey,
        why: CancelReason,
        mut fits: impl FnMut(&Waiter) -> bool,
    ) {
        let incoming = &mut self.peer(peer).incoming;
        let Some(queue) = incoming.keys.get_mut(key) else { return };
        let at = queue.waiting.iter().position(|receive| fits(&receive.waiter));
        let Some(receive) = at.and_then(|at| queue.waiting.remove(at)) else { return };
        incoming.waiting -= u32::from(receive.is_bounded);
        self.give_up_one(key, receive, why);
    }

    fn give_up_one(&mut self, key: &TensorKey, receive: QueuedReceive, why: CancelReason) {
        let error = match why {
            CancelReason::Deadline(after) => Error::DeadlineExceeded {
                key: key.to_string(),
                after: after.unwrap_or(receive.waiter.timeout),
            },
            CancelReason::Cancelled | CancelReason::Dropped => Error::Cancelled { key: key.to_string() },
        };
        self.fail(receive, error);
    }

    /// Gives up the requests for which no receive has waited for [`IDLE_GRACE`].
    pub(super) fn withdraw_idle(&mut self, now: Time) {
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            let mut idle = Vec::new();
            for (key, queue) in &mut self.peer(peer).incoming.keys {
                let Some(request) = queue.request.as_mut().filter(|request| request.open.is_some()) else {
                    continue;
                };
                if !queue.waiting.is_empty() {
                    request.idle_since = None;
                } else if *request.idle_since.get_or_insert(now) + IDLE_GRACE <= now {
                    idle.push(key.clone());
                }
            }
            idle.sort_unstable();
            idle.iter().for_each(|key| self.withdraw(peer, key));
        }
    }

    /// Gives up the request of a key: no receive waits for it. The next request follows when the
    /// peer has heard it, so that a value on its way has gone back in line before.
    fn withdraw(&mut self, peer: PeerIndex, key: &TensorKey) {
        let incoming = &mut self.peer(peer).incoming;
        let Some(request) = incoming.keys.get_mut(key).and_then(|queue| queue.request.as_mut()) else {
            return;
        };
        let (id, open) = (request.id, request.open.take());
        request.idle_since = None;
        if open.is_some() {
            incoming.requests.remove(&id);
            incoming.given_up.insert(id, key.clone());
            self.finish(peer, id, true);
        }
    }

    /// The peer has heard that a request was given up.
    pub fn withdrawn(&mut self, peer: PeerIndex, id: u64) {
        let incoming = &mut self.peer(peer).incoming;
        let Some(key) = incoming.given_up.remove(&id) else { return };
        if let Some(queue) = incoming.keys.get_mut(&key) {
            queue.request.take_if(|request| request.id == id);
        }
        self.proceed(peer, &key);
    }

    /// Drops what was to be received for ended steps. `error` makes the errors of receives.
    pub(super) fn end_receives(&mut self, fits: impl Fn(u64) -> bool, error: impl Fn(&TensorKey) -> Error) {
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            let keys = &self.peer(peer).incoming.keys;
            let mut ended: Vec<_> = keys.keys().filter(|key| fits(key.step)).cloned().collect();
            // The order of the hashes would make runs differ.
            ended.sort_unstable();
            for key in ended {
                for receive in self.take_waiting(peer, &key) {
                    self.fail(receive, error(&key));
                }
                self.withdraw(peer, &key);
                let incoming = &mut self.peer(peer).incoming;
                let held = incoming.take_held(&key);
                incoming.keys.remove(&key);
                if let Some(held) = held {
                    self.finish(peer, held.request, false);
                }
            }
        }
    }

    /// Fails the receives of a peer that is lost. Values that have come stay.
    pub(super) fn lose_receives(&mut self, peer: PeerIndex, error: &Error) {
        let incoming = &mut self.peer(peer).incoming;
        incoming.lose_link();
        let mut keys: Vec<_> = incoming.keys.keys().cloned().collect();
        keys.sort_unstable();
        for key in keys {
            for receive in self.take_waiting(peer, &key) {
                self.fail(receive, error.clone());
            }
            let keys = &mut self.peer(peer).incoming.keys;
            if let Some(queue) = keys.get_mut(&key) {
                queue.request = None;
            }
            if keys.get(&key).is_some_and(ReceiveQueue::is_idle) {
                keys.remove(&key);
            }
        }
    }

    /// Drops the values that came from an earlier life of a peer. Returns their number.
    pub(super) fn drop_held(&mut self, peer: PeerIndex) -> u64 {
        let incoming = &mut self.peer(peer).incoming;
        incoming.held_bytes = 0;
        let mut dropped = 0;
        incoming.keys.retain(|_, queue| {
            dropped += u64::from(queue.held.take().is_some());
            !queue.is_idle()
        });
        dropped
    }

    /// The number of the next request to a peer.
    pub(super) fn next_request(&mut self, peer: PeerIndex) -> u64 {
        self.peer(peer).incoming.next_request + 1
    }

    /// When the next receive is late, or has waited for so long that it is logged.
    pub(super) fn next_deadline(&self) -> Time {
        let logged_after = self.logged_after();
        let due = |waiter: &Waiter| match waiter.is_logged {
            true => waiter.deadline,
            false => waiter.deadline.min(waiter.begun + logged_after),
        };
        let queues = self.peers.iter().flat_map(|peer| peer.incoming.keys.values());
        let deadlines = queues.flat_map(|queue| &queue.waiting).map(|receive| due(&receive.waiter));
        let requests = self.peers.iter().flat_map(|peer| peer.incoming.keys.values());
        let idle = requests.filter_map(|queue| Some(queue.request.as_ref()?.idle_since? + IDLE_GRACE));
        deadlines.chain(idle).min().unwrap_or(NEVER)
    }
}

/// The key of a request to a life of its source (specification 2.2).
fn text_of(key: &TensorKey, life: Incarnation) -> String {
    let EdgeKey { name, frame, iteration } = &key.edge;
    let (source, destination, edge) = (name.source(), name.destination(), name.name());
    format!("{source};{:016x};{destination};{edge};{frame}:{iteration}", life.get())
}
