//! Requests of this side, from their sending to their end.

use super::links::{Context, Link, RequestRefused};
use super::requests::Request;
use super::routes::Announce;
use super::{LinkEvent, Received, RequestError, TensorKey, Want};
use crate::fabric::Port;
use crate::memory::{LentBytes, Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Arrival, Receiver, ReceiverAction};
use crate::telemetry::Counter;
use crate::wire::message::{Message, MetaRef, RequestId, Side, TensorRequest, VersionedMeta};
use crate::wire::{DType, Grant, Immediate, ImmediateKind, Status};

impl<C> Link<C> {
    /// Sends a request.
    pub(super) fn request<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        key: TensorKey,
        want: Want,
        timeout_ms: u32,
        waiter: C,
    ) -> Result<(), (RequestRefused, C)> {
        if !self.requests.has_room() {
            return Err((RequestRefused::TooManyRequests { max: self.requests.max() }, waiter));
        }
        let Some((route, announce)) = self.routes_out.take(&key.edge) else {
            return Err((RequestRefused::TooManyRoutes { max: self.settings.max_routes }, waiter));
        };
        let (number, cached) = (route.number, route.meta.clone());
        self.announce(cx, announce, number, &key);
        let destination = match self.destination(cx, want, cached.as_ref()) {
            Ok(destination) => destination,
            Err(refused) => {
                self.routes_out.release(&key.edge);
                return Err((refused, waiter));
            }
        };
        let meta = if destination.use_cached { cached } else { None };
        let wire = (key.step, key.frame, key.iteration);
        let request = Request {
            machine: Receiver::new(destination.grant.map(|grant| grant.len)),
            key,
            waiter: Some(waiter),
            grant: destination.grant,
            given: destination.given,
            into: destination.into,
            meta,
            failure: None,
        };
        let meta_version = request.meta.as_ref().map_or(0, |meta| meta.version);
        // There was room, so there is an id.
        let Some(id) = self.requests.insert(request) else { return Ok(()) };
        let (step, frame, iteration) = wire;
        let message = Message::Request(TensorRequest {
            request: id,
            route: number,
            step,
            frame,
            iteration,
            meta_version,
            timeout_ms,
            borrow: destination.borrow,
            grant: destination.grant,
        });
        self.send(cx, &message);
        Ok(())
    }

    fn announce<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
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

    /// Makes the destination of a request, as far as it can be known before the answer.
    fn destination<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        want: Want,
        cached: Option<&VersionedMeta>,
    ) -> Result<Destination, RequestRefused> {
        let in_response =
            |meta: &VersionedMeta| meta.meta.bytes() <= u64::from(self.settings.small_tensor_bytes);
        let lends = cx.port.limits(self.id).lends;
        match (want, cached) {
            (Want::Borrow, _) if lends => {
                Ok(Destination { borrow: true, use_cached: true, ..Destination::NONE })
            }
            (Want::Fresh | Want::Borrow, Some(meta)) if !in_response(meta) => {
                let target = cx.pool.tensor(meta.meta.clone()).map_err(RequestRefused::NoRoom)?;
                // A link with no room for a grant asks without one: slower, and right.
                let grant = self.grant(cx, target).ok();
                Ok(Destination { grant, use_cached: true, ..Destination::NONE })
            }
            (Want::Fresh | Want::Borrow, _) => Ok(Destination { use_cached: true, ..Destination::NONE }),
            (Want::Into(given), Some(meta)) if meta.meta == *given.meta() => {
                let into = Destination { into: true, use_cached: true, ..Destination::NONE };
                if in_response(meta) {
                    return Ok(Destination { given: Some(given), ..into });
                }
                Ok(match self.grant(cx, given) {
                    Ok(grant) => Destination { grant: Some(grant), ..into },
                    Err(given) => Destination { given: Some(given), ..into },
                })
            }
            // What is cached is not what was given: only the sender knows which is right now.
            (Want::Into(given), _) => Ok(Destination { given: Some(given), into: true, ..Destination::NONE }),
        }
    }

    fn grant<P: Port>(&mut self, cx: &mut Context<'_, P, C>, target: TensorMut) -> Result<Grant, TensorMut> {
        cx.port.grant(self.id, target).map_err(|(_, target)| target)
    }

    /// Gives up the requests that `judge` says.
    pub(super) fn give_up<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        judge: &mut dyn FnMut(&TensorKey, &mut Option<C>) -> bool,
    ) {
        for slot in 0..self.requests.slots() {
            let Some((id, request)) = self.requests.in_slot(slot) else { continue };
            if judge(&request.key, &mut request.waiter)
                && request.machine.give_up() == ReceiverAction::SendCancel
            {
                if is_on(Mutant::GrantFreedBeforeAck) {
                    drop(take_back(request, cx.port, self.id));
                }
                self.send_cancel(cx, id);
            }
        }
    }

    /// A write with immediate, or an immediate alone, has come.
    pub(super) fn immediate<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        immediate: Immediate,
        bytes: u64,
    ) -> Result<(), String> {
        let id = RequestId { slot: immediate.slot, generation: immediate.generation };
        let link = self.id;
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        match immediate.kind {
            ImmediateKind::Plain => {
                let action = request.machine.arrive(Arrival::Landed { bytes }).map_err(|v| v.to_string())?;
                let landed = request.grant.take().and_then(|grant| cx.port.revoke(link, &grant));
                let Some(target) = landed else {
                    return Err(format!(
                        "a write landed for slot {}, which granted nothing",
                        id.slot.index()
                    ));
                };
                let received =
                    if request.into { Received::Into(target) } else { Received::Tensor(target.freeze()) };
                let side = request.meta.as_ref().map_or(Side::POOL, |meta| meta.side);
                self.deliver(cx, id, action, received, side);
                Ok(())
            }
            ImmediateKind::Dead => {
                let action = request.machine.arrive(Arrival::Dead).map_err(|v| v.to_string())?;
                let given = take_back(request, cx.port, link);
                let given = if request.into { given } else { None };
                self.deliver(cx, id, action, Received::Dead(given), Side::HEAP);
                Ok(())
            }
            ImmediateKind::Lend => Err("a loan's immediate came without a loan".into()),
            ImmediateKind::Stripe => Err("a stripe came for a request that was not striped".into()),
        }
    }

    /// A loan has come.
    pub(super) fn lent<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        immediate: Immediate,
        bytes: LentBytes,
    ) -> Result<(), String> {
        let id = RequestId { slot: immediate.slot, generation: immediate.generation };
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        if request.into {
            return Err("a loan came for a request that did not ask to borrow".into());
        }
        let action = request.machine.arrive(Arrival::Loan).map_err(|v| v.to_string())?;
        let Some(meta) = request.meta.clone() else {
            return Err(format!("a loan came for slot {}, whose meta-data is not known", id.slot.index()));
        };
        let tensor = Tensor::from_lent(cx.pool, meta.meta, bytes).map_err(|(error, _)| error.to_string())?;
        self.deliver(cx, id, action, Received::Tensor(tensor), meta.side);
        Ok(())
    }

    /// `META_DATA_RESPONSE`.
    pub(super) fn meta_came<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        meta: VersionedMeta,
        loan_follows: bool,
    ) -> Result<(), String> {
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        if meta.meta.dtype() == DType::String {
            return Err("it offered strings, which this version does not move".into());
        }
        let arrival = if loan_follows { Arrival::MetaBeforeLoan } else { Arrival::Meta };
        let action = request.machine.arrive(arrival).map_err(|v| v.to_string())?;
        request.meta = Some(meta.clone());
        let key = request.key.clone();
        self.routes_out.learn(&key.edge, &meta);
        if action == ReceiverAction::Allocate {
            self.allocate(cx, id, &meta);
        }
        Ok(())
    }

    /// Makes room for the tensor that the sender has, and asks again.
    fn allocate<P: Port>(&mut self, cx: &mut Context<'_, P, C>, id: RequestId, meta: &VersionedMeta) {
        let link = self.id;
        let Some(request) = self.requests.get(id) else { return };
        let old = take_back(request, cx.port, link);
        let target = match (request.into, old) {
            (true, Some(given)) if *given.meta() == meta.meta => Ok(given),
            (true, Some(given)) => Err(RequestError::Misfit {
                sent: Box::new(meta.meta.clone()),
                given: Box::new(given.meta().clone()),
            }),
            _ => cx.pool.tensor(meta.meta.clone()).map_err(RequestError::NoRoom),
        };
        let granted = target.and_then(|target| {
            cx.port.grant(link, target).map_err(|(error, _)| RequestError::NoGrant(error))
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

    fn send_cancel<P: Port>(&mut self, cx: &mut Context<'_, P, C>, id: RequestId) {
        cx.counters.increment(Counter::CancelsSent);
        if is_on(Mutant::CancelDropped) {
            return;
        }
        self.send(cx, &Message::Cancel { request: id });
    }

    /// `TENSOR_RESPONSE`: the bytes are copied out of the message.
    pub(super) fn response_came<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        meta: MetaRef,
        data: &[u8],
    ) -> Result<(), String> {
        let link = self.id;
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Response).map_err(|v| v.to_string())?;
        let meta = match (meta, &request.meta) {
            (MetaRef::New(meta), _) => meta,
            (MetaRef::Cached(version), Some(known)) if known.version == version => known.clone(),
            (MetaRef::Cached(version), _) => {
                return Err(format!(
                    "a response refers to meta-data {version}, which the request did not name"
                ));
            }
        };
        if meta.meta.bytes() != data.len() as u64 || meta.meta.dtype() == DType::String {
            return Err(format!("a response has {} bytes for {}", data.len(), meta.meta));
        }
        let given = take_back(request, cx.port, link);
        let into = request.into;
        let key = request.key.clone();
        self.routes_out.learn(&key.edge, &meta);
        let given_meta = given.as_ref().map(|given| given.meta().clone());
        let (target, fits) = match given.filter(|given| into && *given.meta() == meta.meta) {
            Some(given) => (Ok(given), true),
            None => (cx.pool.tensor(meta.meta.clone()), !into),
        };
        let mut target = match target {
            Ok(target) => target,
            Err(error) => {
                let received = Received::Unplaced { meta: meta.meta, bytes: data.into(), error };
                self.deliver(cx, id, action, received, meta.side);
                return Ok(());
            }
        };
        target.bytes_mut().copy_from_slice(data);
        let received = match (fits, into, given_meta) {
            (true, true, _) => Received::Into(target),
            (false, true, Some(given)) => Received::Misfit { value: target.freeze(), given },
            _ => Received::Tensor(target.freeze()),
        };
        self.deliver(cx, id, action, received, meta.side);
        Ok(())
    }

    /// `ERROR_STATUS`.
    pub(super) fn error_came<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        status: Status,
    ) -> Result<(), String> {
        cx.counters.increment(Counter::ErrorsReceived);
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Error).map_err(|v| v.to_string())?;
        self.end(cx, id, action, RequestError::Remote(status));
        Ok(())
    }

    /// `CANCEL_ACK`.
    pub(super) fn acknowledged<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
    ) -> Result<(), String> {
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::CancelAck).map_err(|v| v.to_string())?;
        let error = request.failure.take().unwrap_or(RequestError::GivenUp);
        self.end(cx, id, action, error);
        Ok(())
    }

    /// The request that an answer is for; an answer for an earlier use of the slot is dropped and counted.
    fn current<P: Port>(&mut self, cx: &Context<'_, P, C>, id: RequestId) -> Option<&mut Request<C>> {
        let request = self.requests.get(id);
        if request.is_none() {
            cx.counters.increment(Counter::StaleGenerations);
        }
        request
    }

    fn deliver<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        received: Received,
        sender: Side,
    ) {
        let Some((waiter, key)) = self.finish(cx, id, action) else { return };
        if waiter.is_none() {
            cx.counters.increment(Counter::LateValues);
        }
        cx.events.push_back(LinkEvent::Arrived { waiter, key, received, sender });
    }

    fn end<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        error: RequestError,
    ) {
        let Some((waiter, key)) = self.finish(cx, id, action) else { return };
        if waiter.is_some() {
            cx.events.push_back(LinkEvent::Failed { waiter, key, error });
        }
    }

    /// Takes the waiter out and, unless the slot must stay, frees it with everything that it granted.
    fn finish<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
    ) -> Option<(Option<C>, TensorKey)> {
        if action == ReceiverAction::DeliverAndKeep && !is_on(Mutant::StaleGeneration) {
            let request = self.requests.get(id)?;
            return Some((request.waiter.take(), request.key.clone()));
        }
        let mut request = self.requests.remove(id)?;
        // The tensor goes back to the pool: nothing can be written to it any more.
        drop(take_back(&mut request, cx.port, self.id));
        if !is_on(Mutant::RouteNotReleased) {
            self.routes_out.release(&request.key.edge);
        }
        Some((request.waiter.take(), request.key))
    }
}

/// Takes back what a request has given to the peer, or was given by its waiter.
fn take_back<P: Port, C>(
    request: &mut Request<C>,
    port: &mut P,
    link: crate::fabric::LinkId,
) -> Option<TensorMut> {
    match request.grant.take() {
        Some(grant) => port.revoke(link, &grant),
        None => request.given.take(),
    }
}

/// Where a request's tensor will go, as far as that is known before the answer.
struct Destination {
    grant: Option<Grant>,
    given: Option<TensorMut>,
    into: bool,
    borrow: bool,
    /// Whether the answer may refer to the cached meta-data.
    use_cached: bool,
}

impl Destination {
    const NONE: Destination =
        Destination { grant: None, given: None, into: false, borrow: false, use_cached: false };
}
