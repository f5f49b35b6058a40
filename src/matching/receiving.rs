//! The receiving side: receives of this process and what comes for them.

use super::{Cancel, CancelReason, Delivery, Error, Payload, PeerIndex, RemoteHandler, Waiter, check_live};
use crate::fabric::Port;
use crate::link::{
    Corruption, Destination, Links, Received, RequestError, RequestRefused, TensorKey, placement_of,
    placement_of_mut,
};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::Placement;
use crate::wire::{Code, Time};
use std::sync::Arc;

/// A receive that is to begin.
#[derive(Debug)]
pub(super) struct Receive {
    pub peer: PeerIndex,
    pub key: TensorKey,
    pub destination: Destination,
    pub waiter: Waiter,
}

impl RemoteHandler {
    /// Begins a receive, behind queued ones of its key.
    #[inline]
    pub(super) fn receive<P: Port>(&mut self, links: &mut Links<P, Waiter>, receive: Receive, now: Time) {
        match self.queued.has(&receive.key) {
            true => self.queue_receive(links, receive),
            false => self.begin_receive(links, receive, now),
        }
    }

    /// Begins a receive, or ends it at once.
    #[inline]
    pub(super) fn begin_receive<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        receive: Receive,
        now: Time,
    ) {
        let Receive { peer, key, destination, waiter } = receive;
        if let Err(error) = check_live(&self.steps, key.step) {
            return waiter.complete(Err(error));
        }
        if let Some(error) = &self.broken {
            return waiter.complete(Err(error.clone()));
        }
        if !self.orphans.is_empty()
            && let Some(orphan) = self.take_orphan(&key)
        {
            return self.deliver_orphan(links, key, destination, waiter, orphan);
        }
        let Some(link) = self.connections.usable(peer) else {
            return waiter.complete(Err(self.connections.why_unusable(peer)));
        };
        let timeout_ms = match waiter.deadline {
            _ if waiter.timeout.is_zero() => 0,
            Time::NEVER => u32::MAX,
            // 0 asks for a value that is there now.
            deadline => {
                let ms = deadline.since(now).as_nanos().div_ceil(1_000_000).max(1);
                u32::try_from(ms).unwrap_or(u32::MAX)
            }
        };
        self.next_deadline = self.next_deadline.min(waiter.deadline);
        let (id, waits) = (waiter.id, !waiter.timeout.is_zero());
        match links.request(link, key.clone(), destination, timeout_ms, waiter) {
            Ok(request) => {
                self.calls.insert(id, (link, request));
                // The standing request was sent before, for a value at any time.
                if !waits && links.is_standing(link, request) {
                    self.cancel(links, &Cancel { id, why: CancelReason::Deadline(None) }, now);
                }
            }
            Err((refused, waiter)) => waiter.complete(Err(self.refused(refused, &key, peer))),
        }
    }

    pub(super) fn refused(&self, refused: RequestRefused, key: &TensorKey, peer: PeerIndex) -> Error {
        match refused {
            RequestRefused::NoLink => self.connections.why_unusable(peer),
            RequestRefused::TooManyRequests { max } => Error::too_many_receives(max),
            RequestRefused::TooManyRoutes { max } => Error::ResourceExhausted {
                what: "the number of edges with a receive outstanding",
                limit: max.into(),
                remedy: "raise max_routes, or wait for some first",
            },
            RequestRefused::NoRoom(error) => Error::NoRoom { key: key.to_string(), source: Arc::new(error) },
        }
    }

    pub(super) fn arrived<P: Port>(
        links: &Links<P, Waiter>,
        waiter: Waiter,
        received: Received,
        sender: Placement,
    ) {
        let (payload, is_dead) = match received {
            Received::Tensor(tensor) => (Payload::Tensor(tensor), false),
            Received::Into(given) => (Payload::Into(given), false),
            Received::Dead(None) => (Payload::Tensor(links.pool().empty()), !is_on(Mutant::DeadFlagLost)),
            Received::Dead(Some(given)) => (Payload::Into(given), true),
        };
        Self::deliver(links.counters(), waiter, payload, is_dead, sender);
    }

    pub(super) fn deliver(
        counters: &CountersWriter,
        waiter: Waiter,
        payload: Payload,
        is_dead: bool,
        sender: Placement,
    ) {
        let (bytes, receiver) = match &payload {
            Payload::Tensor(tensor) => (tensor.meta().bytes(), placement_of(tensor)),
            Payload::Into(given) if is_dead => (0, placement_of_mut(given)),
            Payload::Into(given) => (given.meta().bytes(), placement_of_mut(given)),
        };
        counters.increment(Counter::TensorsReceived);
        counters.add(Counter::BytesReceived, bytes);
        waiter.complete(Ok(Delivery { tensor: payload, is_dead, sender, receiver }));
    }

    pub(super) fn failed(
        &self,
        counters: &CountersWriter,
        waiter: Waiter,
        key: &TensorKey,
        error: RequestError,
    ) {
        let name = key.to_string();
        let error = match error {
            RequestError::Cancelled => return waiter.fail_cancelled(key),
            // The sender had no value in time. Its answer comes before the end of the wait if this
            // process was stalled, or if the waiter does not wait.
            RequestError::Remote(status) if status.code == Code::DeadlineExceeded && !status.derived => {
                Error::DeadlineExceeded { key: name, after: waiter.timeout }
            }
            RequestError::Remote(status) => {
                let peer = key.edge.source_task().clone();
                Error::Remote { peer, key: name, status }
            }
            RequestError::NoRoom(error) => {
                counters.increment(Counter::PoolExhausted);
                Error::NoRoom { key: name, source: Arc::new(error) }
            }
            RequestError::NoGrant { limit } => Error::too_many_grants(limit),
            RequestError::Corrupted(Corruption { bytes, sent, actual }) => {
                let peer = key.edge.source_task().clone();
                Error::Corrupted { peer, key: name, bytes, sent, actual }
            }
            RequestError::ShapeMismatch { sent, given } => Error::ShapeMismatch { key: name, sent, given },
        };
        waiter.complete(Err(error));
    }
}
