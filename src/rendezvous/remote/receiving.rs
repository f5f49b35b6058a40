//! The receiving side: requests of this process, and what comes for them.

use super::{Remote, Unclaimed};
use crate::fabric::Port;
use crate::link::{Links, Received, RequestError, RequestRefused, TensorKey, Want};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::Error;
use crate::rendezvous::local::check_live;
use crate::rendezvous::path::PeerIndex;
use crate::rendezvous::waiter::{Delivery, Payload, Waiter};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::Time;
use crate::wire::message::Side;
use std::sync::Arc;

impl Remote {
    pub(super) fn receive<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        key: TensorKey,
        want: Want,
        waiter: Waiter,
        now: Time,
    ) {
        if let Err(error) = check_live(&self.steps, key.step) {
            return waiter.complete(Err(error));
        }
        if let Some(error) = &self.broken {
            return waiter.complete(Err(error.clone()));
        }
        if !self.unclaimed.is_empty()
            && let Some(unclaimed) = self.claim(&key)
        {
            return self.deliver_unclaimed(links, key, want, waiter, unclaimed);
        }
        let Some(link) = self.peers[index.0 as usize].usable() else {
            return waiter.complete(Err(self.why_unusable(index)));
        };
        let timeout_ms = match waiter.deadline {
            Time::NEVER => u32::MAX,
            deadline => u32::try_from(deadline.since(now).as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX),
        };
        self.next_deadline = self.next_deadline.min(waiter.deadline);
        if let Err((refused, waiter)) = links.request(link, key.clone(), want, timeout_ms, waiter) {
            waiter.complete(Err(self.refused(refused, &key, index)));
        }
    }

    pub(super) fn refused(&self, refused: RequestRefused, key: &TensorKey, peer: PeerIndex) -> Error {
        match refused {
            RequestRefused::NoLink => Error::NotConnected { peer: self.members.task(peer).clone() },
            RequestRefused::TooManyRequests { max } => Error::ResourceExhausted {
                what: "the number of receives outstanding with a peer",
                limit: max.into(),
                remedy: "raise max_requests, or wait for some first",
            },
            RequestRefused::TooManyRoutes { max } => Error::ResourceExhausted {
                what: "the number of edges with a receive outstanding",
                limit: max.into(),
                remedy: "raise max_routes, or wait for some first",
            },
            RequestRefused::NoRoom(error) => Error::NoRoom { key: key.to_string(), source: Arc::new(error) },
        }
    }

    pub(super) fn arrived<P: Port>(
        &mut self,
        links: &Links<P, Waiter>,
        waiter: Option<Waiter>,
        key: TensorKey,
        received: Received,
        sender: Side,
    ) {
        let Some(waiter) = waiter else {
            let unclaimed = match received {
                Received::Tensor(tensor) | Received::Misfit { value: tensor, .. } => {
                    Unclaimed::Tensor { tensor, sender }
                }
                Received::Into(given) => Unclaimed::Tensor { tensor: given.freeze(), sender },
                Received::Dead(_) => Unclaimed::Dead,
                Received::Unplaced { meta, bytes, .. } => Unclaimed::Bytes { meta, bytes, sender },
            };
            return self.keep_unclaimed(key, unclaimed);
        };
        if is_on(Mutant::DeliveredTwice)
            && waiter.gave_up.is_some()
            && let Received::Tensor(tensor) = &received
        {
            self.keep_unclaimed(key.clone(), Unclaimed::Tensor { tensor: tensor.clone(), sender });
        }
        match received {
            Received::Tensor(tensor) => {
                Self::deliver(links.counters(), waiter, Payload::Tensor(tensor), false, sender)
            }
            Received::Into(given) => {
                Self::deliver(links.counters(), waiter, Payload::Into(given), false, sender)
            }
            Received::Dead(None) => {
                let empty = Payload::Tensor(links.pool().empty());
                Self::deliver(links.counters(), waiter, empty, !is_on(Mutant::DeadFlagLost), sender)
            }
            Received::Dead(Some(given)) => {
                Self::deliver(links.counters(), waiter, Payload::Into(given), true, sender)
            }
            Received::Misfit { value, given } => {
                let (sent, given) = (Box::new(value.meta().clone()), Box::new(given));
                waiter.complete(Err(Error::Misfit { key: key.to_string(), sent, given }));
                self.keep_unclaimed(key, Unclaimed::Tensor { tensor: value, sender });
            }
            Received::Unplaced { meta, bytes, error } => {
                links.counters().increment(Counter::PoolExhausted);
                waiter.complete(Err(Error::NoRoom { key: key.to_string(), source: Arc::new(error) }));
                self.keep_unclaimed(key, Unclaimed::Bytes { meta, bytes, sender });
            }
        }
    }

    pub(super) fn deliver(
        counters: &CountersWriter,
        waiter: Waiter,
        payload: Payload,
        is_dead: bool,
        sender: Side,
    ) {
        let (bytes, receiver) = match &payload {
            Payload::Tensor(tensor) if tensor.is_lent() => (tensor.meta().bytes(), Side::BORROWED),
            Payload::Tensor(tensor) => (tensor.meta().bytes(), Side::POOL),
            Payload::Into(_) if is_dead => (0, Side::POOL),
            Payload::Into(given) => (given.meta().bytes(), Side::POOL),
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
            RequestError::GivenUp => return waiter.given_up(key),
            RequestError::Remote(status) => {
                let peer = key.edge.source_task().clone();
                Error::Remote { peer, key: name, status }
            }
            RequestError::NoRoom(error) => {
                counters.increment(Counter::PoolExhausted);
                Error::NoRoom { key: name, source: Arc::new(error) }
            }
            RequestError::NoGrant(_) => Error::ResourceExhausted {
                what: "the number of destinations granted on a link",
                limit: self.settings.link.max_requests.into(),
                remedy: "wait for some receives first",
            },
            RequestError::Misfit { sent, given } => Error::Misfit { key: name, sent, given },
        };
        waiter.complete(Err(error));
    }
}
