//! Requests of this side, from their sending to their end.

use crate::fabric::Port;
use crate::link::links::{Link, LinkContext, RequestRefused};
use crate::link::receiving::checksum::Unverified;
use crate::link::receiving::destination::{place_response, place_value, take_back};
use crate::link::receiving::slots::Request;
use crate::link::receiving::standing::EarlyArrival;
use crate::link::receiving::stash::{RejectedValue, StashEntry};
use crate::link::routes::announced::Announce;
use crate::link::{CancelDecision, Destination, LinkEvent, Received, RequestError, StashedValue, TensorKey};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Arrival, ReceiverAction};
use crate::telemetry::{Counter, Gauge};
use crate::wire::message::{Follows, Message, MetaRef, Placement, RequestId, TensorRequest, VersionedMeta};
use crate::wire::{Code, Status};

impl<C> Link<C> {
    /// Claims the standing request of a key. Otherwise sends a request, or blocks it while the key
    /// is unresolved.
    pub(in crate::link) fn request<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        key: TensorKey,
        destination: Destination,
        timeout_ms: u32,
        waiter: C,
    ) -> Result<RequestId, (RequestRefused, C)> {
        let (destination, waiter) = match self.claim(cx, &key, destination, timeout_ms, waiter) {
            Ok(id) => return Ok(id),
            Err(unclaimed) => unclaimed,
        };
        let full = RequestRefused::TooManyRequests { max: self.requests.max() };
        if !self.requests.has_room() {
            return Err((full, waiter));
        }
        let Some((route, announce)) = self.routes_out.take(&key.edge) else {
            return Err((RequestRefused::TooManyRoutes { max: self.settings.max_routes }, waiter));
        };
        let (number, cached) = (route.number, route.cached().cloned());
        self.announce(cx, announce, number, &key);
        self.routes_out.ask(&key.edge, key.step);
        self.asked += 1;
        let mut request = Request::unsent(key, waiter, number, self.asked, timeout_ms);
        request.machine = self.unsent_machine();
        if self.unresolved.is_blocked(&request.key) && !is_on(Mutant::NotBlocked) {
            request.destination = Some(destination);
            let key = request.key.clone();
            // `has_room` was checked, so there is an id.
            let Some(id) = self.requests.insert(request) else { unreachable!("{full:?}") };
            self.unresolved.block(&key, id);
            return Ok(id);
        }
        match self.prepare_destination(cx, destination, cached.as_ref()) {
            Ok(prepared) => request.ask(prepared, cached),
            Err(refused) => {
                self.routes_out.release(&request.key.edge);
                // The request was made with a waiter.
                let Some(waiter) = request.waiter else { unreachable!("{refused:?}") };
                return Err((refused, waiter));
            }
        }
        let Some(id) = self.requests.insert(request) else { unreachable!("{full:?}") };
        self.send_request(cx, id);
        Ok(id)
    }

    /// Sends a request that was blocked.
    pub(in crate::link) fn release<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        let Some(destination) = request.destination.take() else { return };
        let edge = request.key.edge.clone();
        let cached = self.routes_out.cached(&edge);
        let prepared = self.prepare_destination(cx, destination, cached.as_ref());
        let Some(request) = self.requests.get(id) else { return };
        match prepared {
            Ok(prepared) => {
                request.ask(prepared, cached);
                self.send_request(cx, id);
            }
            Err(RequestRefused::NoRoom(error)) => {
                self.end(cx, id, ReceiverAction::Deliver, RequestError::NoRoom(error));
            }
            // Not reached: only a lack of room makes a destination fail.
            Err(_) => self.end(cx, id, ReceiverAction::Deliver, RequestError::Cancelled),
        }
    }

    fn send_request<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        let message = Message::Request(TensorRequest {
            request: id,
            route: request.route,
            step: request.key.step,
            frame: request.key.frame,
            iteration: request.key.iteration,
            meta_version: request.meta.as_ref().map_or(0, |meta| meta.version),
            timeout_ms: request.timeout_ms,
            borrow: request.borrow,
            validate: request.machine.validates(),
            grant: request.grant,
        });
        self.send(cx, &message);
    }

    pub(in crate::link) fn announce<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        announce: Announce,
        number: u32,
        key: &TensorKey,
    ) {
        if announce == Announce::Nothing {
            return;
        }
        if let Announce::DropThenRoute(old) = announce {
            self.send(cx, &Message::RouteDrop { number: old });
        }
        let route = Message::Route {
            number,
            incarnation: self.identity.peer_incarnation,
            source: key.edge.source(),
            destination: key.edge.destination(),
            edge: key.edge.name(),
        };
        self.send(cx, &route);
    }

    /// Lets `decide` decide about every request.
    pub(in crate::link) fn cancel_requests<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        decide: &mut dyn FnMut(&TensorKey, &mut Option<C>) -> CancelDecision,
    ) {
        for slot in 0..self.requests.slots() {
            if let Some((id, _)) = self.requests.in_slot(slot) {
                self.cancel_request(cx, id, decide);
            }
        }
    }

    /// Lets `decide` decide about one request.
    pub(in crate::link) fn cancel_request<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        decide: &mut dyn FnMut(&TensorKey, &mut Option<C>) -> CancelDecision,
    ) {
        let Some(request) = self.requests.get(id) else { return };
        let had_waiter = request.waiter.is_some();
        match decide(&request.key, &mut request.waiter) {
            CancelDecision::Keep => return,
            CancelDecision::Abandon => request.is_abandoned = true,
            CancelDecision::Cancel => {
                let is_orphan = had_waiter && request.waiter.is_none();
                if is_orphan && !request.is_abandoned && !request.machine.is_unsent() {
                    request.is_unresolved = true;
                    self.unresolved.add(&request.key);
                }
            }
        }
        if request.machine.is_unsent() {
            self.unresolved.unblock(&request.key, id);
        }
        self.unlist(cx, id);
        self.cancel_now(cx, id);
    }

    /// Cancels a request that is out of all other tables.
    pub(in crate::link) fn cancel_now<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        match request.machine.cancel() {
            ReceiverAction::SendCancel => self.send_cancel(cx, id),
            action @ (ReceiverAction::FinishCancelled | ReceiverAction::Free) => {
                self.end(cx, id, action, RequestError::Cancelled);
            }
            _ => {}
        }
    }

    /// `META_DATA_RESPONSE`.
    pub(in crate::link) fn on_meta<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        meta: VersionedMeta,
        follows: Follows,
    ) -> Result<(), String> {
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        if follows == Follows::Loan && !request.may_borrow() {
            return Err("meta-data of a loan came for a request that did not ask to borrow".into());
        }
        let arrival = match follows {
            Follows::ReRequest => Arrival::Meta,
            Follows::Loan => Arrival::MetaBeforeLoan,
            Follows::Write => Arrival::MetaBeforeWrite { bytes: meta.meta.bytes() },
        };
        let action = request.machine.arrive(arrival).map_err(|v| v.to_string())?;
        request.meta = Some(meta.clone());
        let key = request.key.clone();
        self.routes_out.learn(&key.edge, &meta);
        if action == ReceiverAction::Allocate {
            self.allocate(cx, id, &meta);
        }
        Ok(())
    }

    /// Allocates a destination for the sender's meta-data and sends the re-request.
    fn allocate<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId, meta: &VersionedMeta) {
        let link = self.id;
        let Some(request) = self.requests.get(id) else { return };
        let old = take_back(request, cx.port, cx.counters, link);
        if request.machine.is_unclaimed() {
            drop(old);
            return self.allocate_early(cx, id, meta);
        }
        let given = match request.copy_to.take() {
            Some(given) if *given.meta() == meta.meta && !cx.port.reaches(&given) => {
                // The tensor lands in the pool first.
                request.copy_to = Some(given);
                None
            }
            Some(given) => {
                // No value has come that would have to be copied.
                request.into = true;
                Some(given)
            }
            None => old.filter(|_| request.into),
        };
        let target = match given {
            Some(given) if *given.meta() == meta.meta => Ok(given),
            Some(given) => Err(RequestError::ShapeMismatch {
                sent: Box::new(meta.meta.clone()),
                given: Box::new(given.meta().clone()),
            }),
            None => cx.pool.landing(&meta.meta).map_err(RequestError::NoRoom),
        };
        let granted = target.and_then(|target| {
            let limit = cx.port.limits(link).grants;
            // On a link that is down nothing can be granted either. The waiter gets the end of the
            // link before this error.
            cx.port.grant(link, target).map_err(|_| RequestError::NoGrant { limit })
        });
        match granted {
            Ok(grant) => {
                request.grant = Some(grant);
                request.machine.allocated(grant.len);
                self.send(cx, &Message::ReRequest { request: id, grant });
            }
            Err(failure) => {
                request.failure = Some(failure);
                if request.machine.no_room() == ReceiverAction::SendCancel {
                    self.send_cancel(cx, id);
                }
            }
        }
    }

    fn send_cancel<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        cx.counters.increment(Counter::CancelsSent);
        if let Some(request) = self.requests.get(id)
            && let Some(grant) = request.grant
        {
            request.quarantined = grant.len;
            cx.counters.raise(Gauge::QuarantinedBytes, grant.len);
            if is_on(Mutant::GrantFreedBeforeAck) {
                drop(take_back(request, cx.port, cx.counters, self.id));
            }
        }
        if is_on(Mutant::CancelDropped) {
            return;
        }
        self.send(cx, &Message::Cancel { request: id });
    }

    /// `TENSOR_RESPONSE`: the bytes are copied out of the message.
    pub(in crate::link) fn on_response<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        meta: MetaRef,
        data: &[u8],
    ) -> Result<(), String> {
        let link = self.id;
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Response).map_err(|v| v.to_string())?;
        let (meta, is_told) = match (meta, &request.meta) {
            (MetaRef::New(meta), _) => (meta, true),
            (MetaRef::Cached(version), Some(known)) if known.version == version => (known.clone(), false),
            (MetaRef::Cached(version), _) => {
                return Err(format!(
                    "a response refers to meta-data {version}, which the request did not name"
                ));
            }
        };
        if meta.meta.bytes() != data.len() as u64 {
            return Err(format!("a response has {} bytes for {}", data.len(), meta.meta));
        }
        let destination = take_back(request, cx.port, cx.counters, link).filter(|_| request.into);
        let given = request.copy_to.take().or(destination);
        let edge = request.key.edge.clone();
        match is_told {
            true => self.routes_out.learn(&edge, &meta),
            false => self.routes_out.note_arrival(&edge, meta.version),
        }
        match place_response(cx, meta, data, given) {
            Ok((received, sender)) => self.deliver(cx, id, action, received, sender),
            Err(rejected) => self.unwanted(cx, id, action, *rejected),
        }
        Ok(())
    }

    /// `STASHED_RESPONSE`: the next value in line is in the stash of this side.
    pub(in crate::link) fn on_stashed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        name: u32,
    ) -> Result<(), String> {
        let Some(request) = self.requests.get(id) else {
            cx.counters.increment(Counter::StaleGenerations);
            return Ok(());
        };
        let is_held = self.stash.has(name, &request.key);
        let arrival = if is_held { Arrival::Stashed } else { Arrival::NotStashed };
        let action = request.machine.arrive(arrival).map_err(|v| v.to_string())?;
        if let Some(entry) = self.stash.take(name, &request.key) {
            self.place(cx, id, action, None, entry);
        } else if action == ReceiverAction::AskOnceMore {
            self.send_request(cx, id);
        }
        Ok(())
    }

    /// Gives a stashed value to a request. A value that the request can't take goes back to the
    /// stash. There it has its old id `name`, or is in line again as the answer to this request.
    fn place<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        name: Option<u32>,
        entry: StashEntry,
    ) {
        let link = self.id;
        let Some(request) = self.requests.get(id) else { return };
        let StashEntry { key, value, asked } = entry;
        if action == ReceiverAction::StoreEarly {
            drop(take_back(request, cx.port, cx.counters, link));
            return self.store_early(id, EarlyArrival::Value(value));
        }
        if request.waiter.is_none() {
            return self.late(cx, id, action, value);
        }
        let given = take_back(request, cx.port, cx.counters, link);
        let (given, into) = match request.copy_to.take() {
            Some(given) => (Some(given), true),
            None => (given, request.into),
        };
        match (place_value(cx, value, given, into), name) {
            (Ok((received, sender)), _) => self.deliver(cx, id, action, received, sender),
            (Err(rejected), Some(name)) => {
                let (remaining, error) = rejected.into_remaining();
                if let Some(value) = remaining {
                    self.stash.put_back(name, StashEntry { key, value, asked });
                }
                self.end(cx, id, action, error);
            }
            (Err(rejected), None) => self.unwanted(cx, id, action, *rejected),
        }
    }

    /// `ERROR_STATUS`.
    pub(in crate::link) fn on_error<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        status: Status,
    ) -> Result<(), String> {
        cx.counters.increment(Counter::ErrorsReceived);
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Error).map_err(|v| v.to_string())?;
        self.sender_failed(cx, id, action, status);
        Ok(())
    }

    /// Handles an error of the sender for a request.
    pub(in crate::link) fn sender_failed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        status: Status,
    ) {
        if self.is_standing_limit(id, &status) {
            return self.standing_refused(cx, id, action);
        }
        let Some(request) = self.requests.get(id) else { return };
        // A sender that has ended the step has forgotten its line, so a stashed value of the key is
        // next.
        let is_over = status.derived || status.code == Code::NotFound;
        let key = (is_over && request.waiter.is_some()).then(|| request.key.clone());
        if !self.stash.is_empty()
            && let Some((name, entry)) = key.and_then(|key| self.stash.take_any(&key))
        {
            return self.place(cx, id, action, Some(name), entry);
        }
        self.end(cx, id, action, RequestError::Remote(status));
    }

    /// `CANCEL_ACK`.
    pub(in crate::link) fn on_cancel_ack<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
    ) -> Result<(), String> {
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::CancelAck).map_err(|v| v.to_string())?;
        let error = request.failure.take().unwrap_or(RequestError::Cancelled);
        self.end(cx, id, action, error);
        Ok(())
    }

    /// The request that an answer is for. An answer for an earlier use of the slot is dropped and
    /// counted.
    pub(in crate::link) fn current<P: Port>(
        &mut self,
        cx: &LinkContext<'_, P, C>,
        id: RequestId,
    ) -> Option<&mut Request<C>> {
        let request = self.requests.get(id);
        if request.is_none() {
            cx.counters.increment(Counter::StaleGenerations);
        }
        request
    }

    pub(in crate::link) fn deliver<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        mut received: Received,
        mut sender: Placement,
    ) {
        match action {
            ReceiverAction::AwaitChecksum => {
                return self.await_checksum(id, Unverified::Placed(received, sender));
            }
            ReceiverAction::StoreEarly => {
                return self.store_early(id, EarlyArrival::Value(StashedValue::of(received, sender)));
            }
            _ => {}
        }
        let Some(request) = self.requests.get(id) else { return };
        if request.waiter.is_none() {
            return self.late(cx, id, action, StashedValue::of(received, sender));
        }
        if let Some(given) = request.copy_to.take() {
            match place_value(cx, StashedValue::of(received, sender), Some(given), true) {
                Ok(placed) => (received, sender) = placed,
                Err(rejected) => return self.unwanted(cx, id, action, *rejected),
            }
        }
        if let Some((Some(waiter), key)) = self.finish(cx, id, action) {
            cx.events.push_back(LinkEvent::Arrived { waiter, key, received, sender });
        }
    }

    /// Handles a value whose waiter is gone.
    fn late<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        value: StashedValue,
    ) {
        cx.counters.increment(Counter::LateValues);
        if self.requests.get(id).is_some_and(|request| !request.is_abandoned)
            && !is_on(Mutant::UnclaimedDropped)
        {
            self.hold(cx, id, value);
        }
        self.finish(cx, id, action);
    }

    /// Handles a value that does not fit its destination or has no room.
    pub(in crate::link) fn unwanted<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        rejected: RejectedValue,
    ) {
        match action {
            ReceiverAction::AwaitChecksum => {
                return self.await_checksum(id, Unverified::RejectedValue(Box::new(rejected)));
            }
            ReceiverAction::StoreEarly => return self.store_early(id, EarlyArrival::Value(rejected.value)),
            _ => {}
        }
        if self.requests.get(id).is_some_and(|request| request.waiter.is_none()) {
            return self.late(cx, id, action, rejected.value);
        }
        let (remaining, error) = rejected.into_remaining();
        if let Some(value) = remaining {
            self.hold(cx, id, value);
        }
        self.end(cx, id, action, error);
    }

    /// Stashes the value of an answer, and returns its place in line to the sender.
    pub(in crate::link) fn hold<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        value: StashedValue,
    ) {
        let Some(request) = self.requests.get(id) else { return };
        let (key, route, asked) = (request.key.clone(), request.route, request.asked);
        let TensorKey { step, frame, iteration, .. } = key;
        let stash_id = self.stash.keep(StashEntry { key, value, asked });
        if is_on(Mutant::ReturnNotSent) {
            return;
        }
        self.send(cx, &Message::Return { request: id, route, step, frame, iteration, stash_id });
    }

    pub(in crate::link) fn end<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        error: RequestError,
    ) {
        if action == ReceiverAction::StoreEarly {
            if let Some(request) = self.requests.get(id) {
                drop(take_back(request, cx.port, cx.counters, self.id));
            }
            return self.store_early(id, EarlyArrival::Failed(error));
        }
        if let Some((Some(waiter), key)) = self.finish(cx, id, action) {
            cx.events.push_back(LinkEvent::Failed { waiter, key, error });
        }
    }

    /// Ends a standing request that its sender refused. It ends without a message, unless its
    /// cancel is under way.
    pub(in crate::link) fn drop_refused<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
    ) {
        if action == ReceiverAction::StoreEarly {
            // As after a cancel that needs no message.
            self.unlist(cx, id);
            return self.cancel_now(cx, id);
        }
        self.end(cx, id, action, RequestError::Cancelled);
    }

    /// Takes the waiter out. Frees the slot and all grants, unless the slot must stay.
    fn finish<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
    ) -> Option<(Option<C>, TensorKey)> {
        if action == ReceiverAction::DeliverAndKeep && !is_on(Mutant::StaleGeneration) {
            let request = self.requests.get(id)?;
            return Some((request.waiter.take(), request.key.clone()));
        }
        self.unlist(cx, id);
        let mut request = self.requests.remove(id)?;
        // The tensor goes back to the pool: no write to it is possible any more.
        drop(take_back(&mut request, cx.port, cx.counters, self.id));
        if !is_on(Mutant::RouteNotReleased) {
            self.routes_out.release(&request.key.edge);
        }
        if request.is_unresolved {
            for blocked in self.unresolved.resolve(&request.key) {
                self.release(cx, blocked);
            }
        }
        Some((request.waiter, request.key))
    }
}
