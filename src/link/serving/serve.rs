//! The requests of a peer, from their arrival to their answer.

use crate::fabric::{LinkId, LoanPermit, MAX_MESSAGE, Port};
use crate::link::links::{Link, LinkContext};
use crate::link::receiving::standing::STANDING_LIMIT;
use crate::link::routes::received::MetaVersion;
use crate::link::serving::answered::WireKey;
use crate::link::{LinkEvent, PeerRequestId, ServeOutcome, TensorKey, Value, placement_of};
use crate::memory::Tensor;
use crate::mutants::{Mutant, is_on};
use crate::protocol::{CancelAction, Sender, SenderAnswer, SenderRequest, SenderValue};
use crate::telemetry::Counter;
use crate::wire::message::{Follows, MetaRef, RequestId, StandingRequest, TensorRequest, VersionedMeta};
use crate::wire::message::{Message, Message::CancelAck};
use crate::wire::{Code, DType, Grant, Immediate, ImmediateKind, MetaSlot, ShortMessage, Status};
use foldhash::HashMap;

/// A request of the peer that is not completely answered.
#[derive(Debug)]
pub(in crate::link) struct PeerRequest {
    generation: u8,
    machine: Sender,
    key: TensorKey,
    route: u32,
    meta_version: u32,
    grant: Option<Grant>,
    /// Whether a checksum follows the answer.
    validate: bool,
    /// Whether it is a standing request.
    standing: bool,
    /// The value that is pinned until the re-request, with its place in line.
    pinned: Option<(Tensor, u64)>,
}

impl PeerRequest {
    fn wire_key(&self) -> WireKey {
        let TensorKey { step, frame, iteration, .. } = self.key;
        WireKey { route: self.route, step, frame, iteration }
    }
}

/// Loans may use one in this many of the outstanding operations of a link.
pub(crate) const LOAN_SHARE: usize = 2;
/// One request in this many is reserved for plain requests.
const PLAIN_SHARE: u32 = 4;

/// Requests of the peer by slot. `max_requests` bounds their number.
pub(in crate::link) type PeerRequests = HashMap<u32, PeerRequest>;

impl<C> Link<C> {
    /// `TENSOR_REQUEST`.
    pub(in crate::link) fn on_request<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: &TensorRequest,
        standing: bool,
    ) -> Result<(), String> {
        let slot = request.request.slot.index();
        if let Some(served) = self.peer_requests.get(&slot) {
            let (old, new) = (served.generation, request.request.generation);
            return Err(format!("request slot {slot} (generation {new}) is in use (generation {old})"));
        }
        let Some(route) = self.routes_in.get(request.route) else {
            return Err(format!("a request names route {}, which was not announced", request.route));
        };
        let edge = match &route.edge {
            Ok(edge) => edge.clone(),
            Err(status) => {
                let status = status.clone();
                self.error(cx, request.request, status);
                return Ok(());
            }
        };
        if let Some(status) = self.no_room_for_more(standing) {
            self.error(cx, request.request, status);
            return Ok(());
        }
        let key = TensorKey { edge, step: request.step, frame: request.frame, iteration: request.iteration };
        let asked = SenderRequest {
            granted: request.grant.map(|grant| grant.len),
            meta_version: request.meta_version,
            borrow: request.borrow,
            standing,
        };
        let served = PeerRequest {
            generation: request.request.generation,
            machine: Sender::new(asked),
            key: key.clone(),
            route: request.route,
            meta_version: request.meta_version,
            grant: request.grant,
            validate: request.validate,
            standing,
            pinned: None,
        };
        self.peer_requests.insert(slot, served);
        self.standing_peer_requests += u32::from(standing);
        let peer_request = PeerRequestId { link: self.id, request: request.request };
        cx.events.push_back(LinkEvent::Requested {
            peer_request,
            key,
            timeout_ms: request.timeout_ms,
            standing,
        });
        Ok(())
    }

    /// The refusal of one more request, if the limit is reached. Standing requests leave a quarter
    /// of the limit to plain ones. A receive whose standing request was refused sends a plain one,
    /// which must not fail.
    fn no_room_for_more(&self, standing: bool) -> Option<Status> {
        let (has, max) = (self.peer_requests.len(), self.settings.max_requests);
        if standing && self.standing_peer_requests >= (max - max / PLAIN_SHARE).max(1) {
            let message = format!(
                "{} has {} standing requests of {} unanswered, which is what it takes of {max} requests",
                self.identity.local, self.standing_peer_requests, self.identity.peer
            );
            return Some(Status::new(STANDING_LIMIT, message));
        }
        if has < max as usize {
            return None;
        }
        let message = format!(
            "{} has {has} requests of {} unanswered, which is its limit: raise max_requests there",
            self.identity.local, self.identity.peer
        );
        Some(Status::new(if standing { STANDING_LIMIT } else { Code::ResourceExhausted }, message))
    }

    fn remove_peer_request(&mut self, slot: u32) -> Option<PeerRequest> {
        let served = self.peer_requests.remove(&slot)?;
        self.standing_peer_requests -= u32::from(served.standing);
        Some(served)
    }

    /// `STANDING_REQUEST`: one request for each of its steps.
    pub(in crate::link) fn on_standing_request<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        standing: &StandingRequest<'_>,
    ) -> Result<(), String> {
        for (n, step) in standing.steps.iter().enumerate() {
            let request = TensorRequest {
                request: step.request,
                route: standing.route,
                // The decoder refuses a message in which this overflows.
                step: standing.first_step.wrapping_add(n as u64),
                frame: standing.frame,
                iteration: standing.iteration,
                meta_version: standing.meta_version,
                timeout_ms: u32::MAX,
                borrow: standing.borrow,
                validate: standing.validate,
                grant: standing.grant(&step),
            };
            self.on_request(cx, &request, true)?;
        }
        Ok(())
    }

    /// `TENSOR_RE_REQUEST`.
    pub(in crate::link) fn on_re_request<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        grant: Grant,
    ) -> Result<(), String> {
        cx.counters.increment(Counter::ReRequests);
        let Some(served) = self.peer_request_mut(request) else {
            return Err(format!("a re-request came for slot {}, which is free", request.slot.index()));
        };
        served.machine.re_requested(grant.len).map_err(|violation| violation.to_string())?;
        let Some(served) = self.remove_peer_request(request.slot.index()) else { return Ok(()) };
        let of = served.wire_key();
        if let Some((tensor, number)) = served.pinned {
            let bytes = tensor.meta().bytes();
            self.answered.note(request, number, of);
            let checksum = self.checksum(served.validate && !is_on(Mutant::ChecksumLeftOut), &tensor);
            self.write(cx, request, tensor, grant, ImmediateKind::Plain);
            self.send_checksum(cx, request, checksum);
            cx.events.push_back(LinkEvent::Resumed { bytes });
        }
        Ok(())
    }

    /// `CANCEL`: an unanswered request is withdrawn, or its value put back. The acknowledgement
    /// goes behind everything.
    pub(in crate::link) fn on_cancel<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, request: RequestId) {
        cx.counters.increment(Counter::CancelsReceived);
        if let Some(served) = self.take_peer_request(request) {
            cx.events.push_back(undo(self.id, request, served));
        }
        self.send(cx, &CancelAck { request });
    }

    /// The link is gone: undoes every request of the peer.
    pub(in crate::link) fn undo_all<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>) {
        let link = self.id;
        // In the order of the slots, not of the hashes: equal events make equal runs.
        let mut served: Vec<(u32, PeerRequest)> = self.peer_requests.drain().collect();
        served.sort_unstable_by_key(|(slot, _)| *slot);
        self.standing_peer_requests = 0;
        for (slot, served) in served {
            let Some(slot) = crate::wire::Slot::new(slot) else { continue };
            let request = RequestId { slot, generation: served.generation };
            if is_on(Mutant::KeptValueForgotten) {
                continue;
            }
            cx.events.push_back(undo(link, request, served));
        }
    }

    /// `RETURN`: the value of an answer was not taken. It stays in the peer's stash, and its place
    /// in line comes back.
    pub(in crate::link) fn on_return<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        of: WireKey,
        stash_id: u32,
    ) -> Result<(), String> {
        cx.counters.increment(Counter::ValuesReturned);
        let Some(number) = self.answered.take(request, of) else {
            return Err(format!(
                "a value came back for slot {}, which was not given it",
                request.slot.index()
            ));
        };
        let edge = match self.routes_in.get(of.route).map(|route| &route.edge) {
            Some(Ok(edge)) => edge.clone(),
            _ => return Err(format!("a value came back on route {}, which has none", of.route)),
        };
        let key = TensorKey { edge, step: of.step, frame: of.frame, iteration: of.iteration };
        cx.events.push_back(LinkEvent::Returned { link: self.id, key, stash_id, number });
        Ok(())
    }

    /// Answers a request with the id of a value in the peer's stash.
    pub(in crate::link) fn serve_stashed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        stash_id: u32,
        number: u64,
    ) -> bool {
        let Some(served) = self.take_peer_request(request) else { return false };
        self.answered.note(request, number, served.wire_key());
        self.send(cx, &Message::Stashed { request, stash_id });
        true
    }

    /// Answers a request with a value. `number` is the value's place in line.
    pub(in crate::link) fn serve<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        value: Value,
        number: u64,
    ) -> ServeOutcome {
        let Some(served) = self.peer_request_mut(request) else { return ServeOutcome::Gone(value) };
        let (route, asked_version, borrows) =
            (served.route, served.meta_version, served.machine.would_borrow());
        let tensor = match value {
            Value::Tensor(tensor) => tensor,
            Value::Dead => {
                served.machine.matched(SenderValue::DEAD);
                let of = served.wire_key();
                self.remove_peer_request(request.slot.index());
                self.answered.note(request, number, of);
                self.out.empty(cx.port, cx.counters, immediate(ImmediateKind::Dead, request));
                return ServeOutcome::Copied;
            }
        };
        let bytes = tensor.meta().bytes();
        let limits = cx.port.limits(self.id);
        let (lends, most) = (limits.lends, limits.max_write);
        if bytes > most {
            let message = format!(
                "the tensor has {bytes} bytes, and the queue of the link to {} carries {most} in one write: \
                 raise queue_depth (rdma_qp_queue_depth on verbs) on both sides, or send it in parts",
                self.identity.peer
            );
            self.refuse(cx, request, Status::new(Code::ResourceExhausted, message));
            return ServeOutcome::Refused;
        }
        let placement = placement_of(&tensor);
        // A route with an unanswered request cannot be dropped. A peer that does so anyway gets
        // meta-data with each answer.
        let version = self.routes_in.get(route).map_or(MetaVersion { number: 1, is_known: false }, |route| {
            route.version_of(tensor.meta(), placement)
        });
        let full = VersionedMeta { version: version.number, placement, meta: tensor.meta().clone() };
        let meta = match version.number == asked_version {
            true => MetaRef::Cached(asked_version),
            false => MetaRef::New(full.clone()),
        };
        let fits_response = bytes <= u64::from(self.settings.small_tensor_bytes)
            && meta.response_len(bytes as usize) <= MAX_MESSAGE;
        let is_asked = lends && borrows && !fits_response;
        let is_flat = tensor.span().is_some() && tensor.dtype() != DType::Bool;
        let permit = if is_asked && is_flat { self.permit_loan(cx, bytes) } else { None };
        let value = SenderValue {
            dead: false,
            bytes,
            meta_version: version.number,
            fits_response,
            lendable: permit.is_some(),
        };
        let Some(served) = self.peer_request_mut(request) else {
            return ServeOutcome::Gone(Value::Tensor(tensor));
        };
        let (answer, grant, of) = (served.machine.matched(value), served.grant, served.wire_key());
        let validate = served.validate;
        if answer == SenderAnswer::Meta {
            served.pinned = Some((tensor, number));
            self.meta(cx, request, full, Follows::ReRequest);
            return ServeOutcome::Pinned;
        }
        self.remove_peer_request(request.slot.index());
        self.answered.note(request, number, of);
        let checksum = self.checksum(validate, &tensor);
        match (answer, grant) {
            (SenderAnswer::Lend { meta_first }, _) => {
                // The machine lends only with a permit.
                let Some(permit) = permit else { return ServeOutcome::Posted };
                let kind = match (meta_first, version.is_known) {
                    (false, _) => ImmediateKind::Lend,
                    (true, true) => ImmediateKind::LendAs(MetaSlot::of(version.number)),
                    (true, false) => {
                        self.meta(cx, request, full, Follows::Loan);
                        ImmediateKind::Lend
                    }
                };
                cx.counters.increment(Counter::LoansPosted);
                let message = ShortMessage::from_u32(immediate(kind, request).to_bits());
                self.out.lend(cx.port, cx.counters, tensor, Some(permit), message);
            }
            (SenderAnswer::Response, _) => {
                cx.counters.increment(Counter::SmallResponses);
                let response = Message::Response { request, meta, data: tensor.bytes() };
                self.send(cx, &response);
                self.send_checksum(cx, request, checksum);
                return ServeOutcome::Copied;
            }
            (SenderAnswer::Write, Some(grant)) => {
                self.write(cx, request, tensor, grant, ImmediateKind::Plain)
            }
            (SenderAnswer::MetaThenWrite, Some(grant)) => {
                let kind = match version.is_known {
                    true => ImmediateKind::PlainAs(MetaSlot::of(version.number)),
                    false => {
                        self.meta(cx, request, full, Follows::Write);
                        ImmediateKind::Plain
                    }
                };
                self.write(cx, request, tensor, grant, kind);
            }
            // Not reached: the machine writes only to a grant, and the other two answers were
            // handled above.
            (
                SenderAnswer::Write | SenderAnswer::MetaThenWrite | SenderAnswer::Dead | SenderAnswer::Meta,
                _,
            ) => {}
        }
        self.send_checksum(cx, request, checksum);
        ServeOutcome::Posted
    }

    /// A permit to lend a value. Refused if the send queue is half full or the limit of lent memory
    /// is reached: a slow holder must not stop other traffic. A value that is not lent is copied.
    fn permit_loan<P: Port>(&self, cx: &mut LinkContext<'_, P, C>, bytes: u64) -> Option<LoanPermit> {
        let has_room = self.out.values() < self.depth as usize / LOAN_SHARE;
        let permit = if has_room { cx.port.permit_loan(self.id, bytes) } else { None };
        if permit.is_none() {
            cx.counters.increment(Counter::LoansRefused);
        }
        permit
    }

    fn meta<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        meta: VersionedMeta,
        follows: Follows,
    ) {
        cx.counters.increment(Counter::MetaResponses);
        self.send(cx, &Message::Meta { request, follows, meta });
    }

    fn write<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        tensor: Tensor,
        grant: Grant,
        kind: ImmediateKind,
    ) {
        cx.counters.increment(Counter::WritesPosted);
        // A destination may be longer than the value.
        let target = Grant { len: tensor.meta().bytes(), ..grant };
        self.out.write(cx.port, cx.counters, tensor, target, immediate(kind, request));
    }

    /// Answers a request with an error.
    pub(in crate::link) fn refuse<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        status: Status,
    ) {
        if self.take_peer_request(request).is_some() {
            self.error(cx, request, status);
        }
    }

    fn error<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, request: RequestId, status: Status) {
        cx.counters.increment(Counter::ErrorsSent);
        self.send(cx, &Message::Error { request, status });
    }

    fn peer_request_mut(&mut self, request: RequestId) -> Option<&mut PeerRequest> {
        let served = self.peer_requests.get_mut(&request.slot.index())?;
        (served.generation == request.generation).then_some(served)
    }

    fn take_peer_request(&mut self, request: RequestId) -> Option<PeerRequest> {
        self.peer_request_mut(request)?;
        self.remove_peer_request(request.slot.index())
    }
}

fn undo<C>(link: LinkId, request: RequestId, served: PeerRequest) -> LinkEvent<C> {
    match (served.machine.cancelled(), served.pinned) {
        (CancelAction::PutBack, Some((tensor, number))) => {
            LinkEvent::PutBack { key: served.key, value: Value::Tensor(tensor), number }
        }
        _ => LinkEvent::Withdrawn { peer_request: PeerRequestId { link, request }, key: served.key },
    }
}

fn immediate(kind: ImmediateKind, request: RequestId) -> Immediate {
    Immediate { kind, generation: request.generation, slot: request.slot }
}
