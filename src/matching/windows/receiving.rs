//! The receiving side.

use super::sending::is_over;
use super::{EdgeKey, Lanes, Matching, WaitingReceive};
use crate::link::{
    Corruption, Destination, Received, RequestError, StashedValue, TensorKey, placement_of, placement_of_mut,
};
use crate::matching::{CancelReason, Delivery, Error, Payload, PeerIndex, Waiter, check_live};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::protocol::window::{Held, Incoming, ToReceiver, WindowViolation};
use crate::telemetry::Counter;
use crate::wire::message::Placement;
use crate::wire::{Status, checksum_of};
use std::sync::Arc;

/// A value that has come from a peer.
#[derive(Debug)]
pub enum WindowArrival {
    /// Whole, in this process or borrowed.
    Tensor(ArrivedTensor),
    /// A dead value.
    Dead,
    /// The sender failed to send the value.
    Failed(Status),
}

/// A tensor that has come from a peer. Its bytes lie in this process, or in the sender's pool.
#[derive(Debug)]
pub struct ArrivedTensor {
    /// The tensor, which is lent if its bytes lie at the sender.
    pub tensor: Tensor,
    /// The placement of the tensor at the sender.
    pub sender: Placement,
    /// The sender's checksum of the bytes.
    pub checksum: Option<u64>,
}

impl ArrivedTensor {
    /// Compares the bytes with the sender's checksum.
    fn check(&self) -> Result<(), Corruption> {
        let Some(sent) = self.checksum else { return Ok(()) };
        let bytes = self.tensor.bytes();
        let actual = checksum_of(bytes);
        match actual == sent {
            true => Ok(()),
            false => Err(Corruption { bytes: bytes.len() as u64, sent, actual }),
        }
    }

    /// Puts the tensor where the receive wants it.
    fn place(self, pool: &Pool, destination: Destination) -> Result<(Received, Placement), Box<Rejected>> {
        if let Err(corruption) = self.check() {
            return Err(Box::new(Rejected { value: None, error: RequestError::Corrupted(corruption) }));
        }
        let ArrivedTensor { tensor, sender, checksum } = self;
        let back = |tensor, error| {
            let value = Some(WindowArrival::Tensor(ArrivedTensor { tensor, sender, checksum }));
            Err(Box::new(Rejected { value, error }))
        };
        match destination {
            Destination::Into(given) => {
                let value = StashedValue::Tensor { tensor: tensor.clone(), sender };
                let placed = value.place(pool, Some(given), true);
                placed.or_else(|rejected| back(tensor, rejected.into_remaining().1))
            }
            Destination::Alloc if tensor.is_lent() => match copied(pool, &tensor) {
                Ok(copy) => Ok((Received::Tensor(copy.freeze()), sender)),
                Err(error) => back(tensor, RequestError::NoRoom(error)),
            },
            Destination::Alloc | Destination::Borrow => Ok((Received::Tensor(tensor), sender)),
        }
    }
}

fn copied(pool: &Pool, tensor: &Tensor) -> Result<TensorMut, crate::memory::PoolError> {
    let mut copy = pool.landing(tensor.meta().clone())?;
    copy.bytes_mut().copy_from_slice(tensor.bytes());
    Ok(copy)
}

/// A value that a receive could not take. Without a value the error has consumed it.
struct Rejected {
    value: Option<WindowArrival>,
    error: RequestError,
}

impl<L: Lanes> Matching<L> {
    /// Begins a receive, or ends it at once.
    pub fn receive(&mut self, peer: PeerIndex, key: TensorKey, destination: Destination, waiter: Waiter) {
        if let Err(error) = check_live(&self.steps, key.step) {
            return waiter.complete(Err(error));
        }
        let entry = &mut self.peers[peer.0 as usize];
        let edge = entry.incoming.edge(&EdgeKey::of(&key));
        let receive = WaitingReceive { peer, edge, key, destination, waiter };
        let step = receive.key.step;
        if let Some(held) = entry.incoming.take(edge, step) {
            self.deliver(receive, held);
            return self.send_due(peer, edge);
        }
        if let Some(error) = &entry.down {
            let error = error.clone();
            self.send_due(peer, edge);
            return receive.waiter.complete(Err(error));
        }
        if let Some(status) = entry.incoming.refusal(edge, step) {
            let error = RequestError::Remote(status.clone());
            self.send_due(peer, edge);
            return self.failed(receive.waiter, &receive.key, error);
        }
        if receive.waiter.timeout.is_zero() {
            entry.incoming.ask(edge, step, &mut |message| self.lanes.to_sender(peer, message));
            let WaitingReceive { key, mut waiter, .. } = receive;
            waiter.cancel_reason = Some(CancelReason::Deadline(None));
            return waiter.fail_cancelled(&key);
        }
        self.wait(receive);
    }

    fn wait(&mut self, receive: WaitingReceive) {
        if self.calls.len() == self.max_waiting {
            let error = Error::ResourceExhausted {
                what: "the number of receives that wait for peers",
                limit: self.max_waiting as u64,
                remedy: "raise max_requests, or wait for some first",
            };
            self.send_due(receive.peer, receive.edge);
            return receive.waiter.complete(Err(error));
        }
        let WaitingReceive { peer, edge, .. } = receive;
        let step = receive.key.step;
        self.next_deadline = self.next_deadline.min(receive.waiter.deadline);
        let id = receive.waiter.id;
        let waiter = self.waiting.add(receive);
        self.calls.insert(id, waiter);
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        incoming.wait(edge, step, waiter, &mut |message| self.lanes.to_sender(peer, message));
    }

    /// Handles a message of a peer that sends.
    ///
    /// # Errors
    /// If the peer breaks the protocol. Its link must end.
    pub fn from_sender(
        &mut self,
        peer: PeerIndex,
        message: ToReceiver<WindowArrival, Status>,
    ) -> Result<(), WindowViolation> {
        let Matching { peers, lanes, steps, .. } = self;
        let incoming = &mut peers[peer.0 as usize].incoming;
        let mut post = |message| lanes.to_sender(peer, message);
        match incoming.receive(message, |step| is_over(steps, step), &mut post)? {
            Incoming::Nothing | Incoming::Dropped(_) => {}
            Incoming::Value(edge, waiter, held) => {
                if let Some(receive) = self.take_waiting(waiter) {
                    self.deliver(receive, held);
                }
                self.send_due(peer, edge);
            }
            Incoming::Ended(waiters, _, status) => {
                for waiter in waiters {
                    let Some(receive) = self.take_waiting(waiter) else { continue };
                    self.failed(receive.waiter, &receive.key, RequestError::Remote(status.clone()));
                }
            }
        }
        Ok(())
    }

    /// Gives a value to a receive, or to the next one that it fits. The caller then calls
    /// `send_due`.
    fn deliver(&mut self, receive: WaitingReceive, held: Held<WindowArrival>) {
        let mut next = Some((receive, held));
        // A loop, as many receives with other shapes can wait.
        while let Some((receive, held)) = next.take() {
            let (peer, edge) = (receive.peer, receive.edge);
            let Held { step, in_window, value } = held;
            let Some(value) = self.offer(receive, value) else { return };
            let incoming = &mut self.peers[peer.0 as usize].incoming;
            let Some((waiter, held)) = incoming.put_back(edge, Held { step, in_window, value }) else {
                return;
            };
            next = self.take_waiting(waiter).map(|receive| (receive, held));
        }
    }

    /// Ends a receive with a value or its error. Returns a value that the receive could not take.
    fn offer(&self, receive: WaitingReceive, value: WindowArrival) -> Option<WindowArrival> {
        let WaitingReceive { key, destination, waiter, .. } = receive;
        let (received, sender) = match value {
            WindowArrival::Failed(status) => {
                self.failed(waiter, &key, RequestError::Remote(status));
                return None;
            }
            WindowArrival::Dead => {
                let given = match destination {
                    Destination::Into(given) => Some(given),
                    Destination::Alloc | Destination::Borrow => None,
                };
                (Received::Dead(given), Placement::HEAP)
            }
            WindowArrival::Tensor(tensor) => match tensor.place(&self.pool, destination) {
                Ok(placed) => placed,
                Err(rejected) => {
                    self.failed(waiter, &key, rejected.error);
                    return rejected.value;
                }
            },
        };
        self.arrived(waiter, received, sender);
        None
    }

    /// Sends what an edge owes its sender.
    pub(super) fn send_due(&mut self, peer: PeerIndex, edge: u32) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        incoming.send_due(edge, &mut |message| self.lanes.to_sender(peer, message));
    }

    pub(super) fn take_waiting(&mut self, waiter: u32) -> Option<WaitingReceive> {
        let receive = self.waiting.remove(waiter)?;
        self.calls.remove(&receive.waiter.id);
        Some(receive)
    }

    fn arrived(&self, waiter: Waiter, received: Received, sender: Placement) {
        let (payload, is_dead) = match received {
            Received::Tensor(tensor) => (Payload::Tensor(tensor), false),
            Received::Into(given) => (Payload::Into(given), false),
            Received::Dead(None) => (Payload::Tensor(self.pool.empty()), true),
            Received::Dead(Some(given)) => (Payload::Into(given), true),
        };
        let (bytes, receiver) = match &payload {
            Payload::Tensor(tensor) => (tensor.meta().bytes(), placement_of(tensor)),
            Payload::Into(given) if is_dead => (0, placement_of_mut(given)),
            Payload::Into(given) => (given.meta().bytes(), placement_of_mut(given)),
        };
        self.counters.increment(Counter::TensorsReceived);
        self.counters.add(Counter::BytesReceived, bytes);
        waiter.complete(Ok(Delivery { tensor: payload, is_dead, sender, receiver }));
    }

    pub(super) fn failed(&self, waiter: Waiter, key: &TensorKey, error: RequestError) {
        let (peer, name) = (key.edge.source_task().clone(), key.to_string());
        let error = match error {
            RequestError::Remote(status) => Error::Remote { peer, key: name, status },
            RequestError::NoRoom(error) => {
                self.counters.increment(Counter::PoolExhausted);
                Error::NoRoom { key: name, source: Arc::new(error) }
            }
            RequestError::Corrupted(Corruption { bytes, sent, actual }) => {
                Error::Corrupted { peer, key: name, bytes, sent, actual }
            }
            RequestError::ShapeMismatch { sent, given } => Error::ShapeMismatch { key: name, sent, given },
            // The machines of requests alone cancel, and grant destinations.
            RequestError::Cancelled | RequestError::NoGrant { .. } => Error::Cancelled { key: name },
        };
        waiter.complete(Err(error));
    }
}
