//! Offered tensors on their way to a receive.
//!
//! A fabric that lends nothing offers its large tensors. When a receive takes such a tensor, its
//! destination is granted to the sender, which writes to it. Until the tensor has landed, the
//! receive waits as a waiter. If the receive gives up, the tensor is the first of its step again.

use super::receiving::{count_received, failed};
use super::{Lanes, Matching, WaitingReceive};
use crate::link::windows::{
    ArrivedBytes, ArrivedTensor, LandingRefused, OfferedTensor, ReadyValue, ToldMeta, WindowArrival,
    check_bytes,
};
use crate::link::{Destination, ReceiveError, Received};
use crate::matching::{Delivery, PeerIndex};
use crate::memory::{TensorMut, copy};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::Counter;
use crate::wire::Immediate;
use foldhash::HashMap;
use std::sync::Arc;

/// The tensors that a peer writes to their destinations. The edge holds each of them, as taken by a
/// receive or for the next one.
pub(super) type Transfers = HashMap<Immediate, Transfer>;

/// A tensor that its sender writes to its destination.
#[derive(Debug)]
pub(super) struct Transfer {
    edge: u32,
    step: u64,
    told: Arc<ToldMeta>,
    checksum: Option<u64>,
    wanted_by: WantedBy,
}

/// Who gets a tensor that has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WantedBy {
    /// A waiting receive.
    Receive {
        waiter: u32,
        /// Whether the tensor lands in the given tensor of this receive.
        is_given: bool,
    },
    /// The next receive of the step.
    NextReceive,
    /// Nobody: the step has ended.
    Nobody,
}

/// Why a receive did not take an offered tensor.
#[derive(Debug)]
enum NotLanded {
    /// The receive fails.
    Failed(ReceiveError),
    /// The link has ended, or is about to. The receive fails with the cause as soon as it is known.
    Down,
}

impl NotLanded {
    fn of(why: LandingRefused) -> Self {
        match why {
            LandingRefused::Down => NotLanded::Down,
            LandingRefused::Full { limit } => NotLanded::Failed(ReceiveError::NoGrant { limit }),
            LandingRefused::TooLong { limit } => NotLanded::Failed(ReceiveError::TooLong { limit }),
            LandingRefused::Unreachable => unreachable!("a port reaches the whole pool"),
        }
    }
}

fn is_landing(landing: Immediate) -> impl Fn(&WindowArrival) -> bool {
    move |value| matches!(value, WindowArrival::Landing(id) if *id == landing)
}

impl Matching {
    /// A receive takes the first value of its step, which is offered or on its way.
    #[cold]
    pub(super) fn take_remote(&mut self, lanes: &mut impl Lanes, mut receive: WaitingReceive) {
        let (edge, step) = (receive.edge, receive.key.step);
        let incoming = &mut self.peers[receive.peer.0 as usize].incoming;
        let begun = match incoming.first(edge, step) {
            Some(WindowArrival::Offered(offered)) => Self::land(lanes, &mut receive, offered),
            Some(&WindowArrival::Landing(landing)) => {
                incoming.take_in_place(edge, step);
                return self.join_transfer(receive, landing);
            }
            // Not reached: the caller has looked.
            Some(WindowArrival::Ready(_)) | None => return,
        };
        let begun = match begun {
            Ok(begun) => begun,
            Err(NotLanded::Failed(error)) => return failed(lanes, receive.waiter, &receive.key, error),
            Err(NotLanded::Down) => {
                // What is offered is lost with the link. Other values may have come behind it.
                let is_landing = |value: &WindowArrival| matches!(value, WindowArrival::Landing(_));
                while let Some(held) = incoming.take_if(edge, step, |value| !is_landing(value)) {
                    if held.value.is_ready() {
                        return self.deliver(lanes, receive, held);
                    }
                }
                return self.wait_listed(lanes, receive);
            }
        };
        if let Some(value) = incoming.take_in_place(edge, step)
            && let WindowArrival::Offered(offered) = std::mem::replace(value, WindowArrival::Landing(begun.0))
        {
            self.transfer(receive, offered, begun);
        }
    }

    /// A receive takes an offered tensor that has just come. Returns the tensor if the receive has
    /// failed instead.
    #[cold]
    pub(super) fn take_arrived(
        &mut self,
        lanes: &mut impl Lanes,
        mut receive: WaitingReceive,
        offered: OfferedTensor,
    ) -> Option<OfferedTensor> {
        let begun = match Self::land(lanes, &mut receive, &offered) {
            Ok(begun) => begun,
            Err(NotLanded::Failed(error)) => {
                failed(lanes, receive.waiter, &receive.key, error);
                return Some(offered);
            }
            Err(NotLanded::Down) => {
                self.wait_listed(lanes, receive);
                return None;
            }
        };
        let incoming = &mut self.peers[receive.peer.0 as usize].incoming;
        incoming.hold_taken(receive.edge, receive.key.step, WindowArrival::Landing(begun.0));
        self.transfer(receive, offered, begun);
        None
    }

    /// Chooses and grants the destination of an offered tensor. Returns whether the receive has
    /// given it.
    fn land(
        lanes: &mut impl Lanes,
        receive: &mut WaitingReceive,
        offered: &OfferedTensor,
    ) -> Result<(Immediate, bool), NotLanded> {
        let (peer, meta) = (receive.peer, &offered.told.meta);
        if let Destination::Into(given) = &receive.destination
            && given.meta() != meta
        {
            let (sent, given) = (Box::new(meta.clone()), Box::new(given.meta().clone()));
            return Err(NotLanded::Failed(ReceiveError::ShapeMismatch { sent, given }));
        }
        if let Destination::Into(given) = std::mem::replace(&mut receive.destination, Destination::Alloc) {
            match lanes.land(peer, offered.offer, given) {
                Ok(landing) => return Ok((landing, true)),
                Err((why, given)) => {
                    receive.destination = Destination::Into(given);
                    // A tensor that is out of reach is a copy of one that lands in the pool.
                    if why != LandingRefused::Unreachable {
                        return Err(NotLanded::of(why));
                    }
                }
            }
        }
        let target = lanes.pool().landing(meta);
        let target = target.map_err(|error| NotLanded::Failed(ReceiveError::NoRoom(error)))?;
        let landing = lanes.land(peer, offered.offer, target);
        Ok((landing.map_err(|(why, _)| NotLanded::of(why))?, false))
    }

    /// The sender writes an offered tensor to its destination, for a receive.
    fn transfer(&mut self, receive: WaitingReceive, offered: OfferedTensor, begun: (Immediate, bool)) {
        let (landing, is_given) = begun;
        let OfferedTensor { told, checksum, .. } = offered;
        let (peer, edge, step) = (receive.peer, receive.edge, receive.key.step);
        let waiter = self.wait_for_transfer(WaitingReceive { landing: Some(landing), ..receive });
        let wanted_by = WantedBy::Receive { waiter, is_given };
        let transfer = Transfer { edge, step, told, checksum, wanted_by };
        let entry = &mut self.peers[peer.0 as usize];
        entry.transfers.insert(landing, transfer);
        entry.offers = true;
    }

    /// Whether a receive should wait as a waiter, so that the next tensor of its edge gets a
    /// destination.
    #[inline]
    pub(super) fn may_get_ready(&self, lanes: &mut impl Lanes, peer: PeerIndex, edge: u32) -> bool {
        let entry = &self.peers[peer.0 as usize];
        entry.offers && entry.incoming.announced(edge).is_some_and(|id| lanes.may_get_ready(peer, id))
    }

    /// Grants a destination for the next tensor of an edge if a receive waits for a tensor of the
    /// pool. Asks for it back if no receive waits. A standing edge has one while it holds no value.
    #[inline]
    pub(super) fn update_ready(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, edge: u32) {
        if self.peers[peer.0 as usize].offers {
            self.update_ready_of(lanes, peer, edge);
        }
    }

    #[cold]
    pub(super) fn update_ready_of(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, edge: u32) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let Some(id) = incoming.announced(edge) else { return };
        let first = incoming.edge_at(edge).and_then(|edge| edge.waiters().next());
        let first = first.and_then(|(_, waiter)| self.waiting.get(*waiter));
        let wants_one = match first {
            Some(first) => !matches!(first.destination, Destination::Into(_)),
            None => incoming.lands_ahead(edge),
        };
        if first.is_some() && !wants_one {
            // Its tensors go to given ones, and are not copied.
            incoming.land_in_given(edge);
        }
        let is_kept = wants_one || is_on(Mutant::DestinationNotWithdrawn);
        match is_kept {
            true if incoming.holds_any(edge) => {}
            true => lanes.make_ready(peer, id),
            false => lanes.withdraw(peer, id),
        }
    }

    /// As [`Matching::update_ready`], for the edges of receives that are about to fail.
    pub(super) fn update_ready_for(&mut self, lanes: &mut impl Lanes, waiters: &[u32]) {
        for waiter in waiters {
            if let Some(receive) = self.waiting.get(*waiter) {
                self.update_ready(lanes, receive.peer, receive.edge);
            }
        }
    }

    fn wait_for_transfer(&mut self, receive: WaitingReceive) -> u32 {
        self.peers[receive.peer.0 as usize].waiting += u32::from(receive.is_bounded);
        self.add_waiting(receive)
    }

    /// A receive takes a tensor that is on its way.
    pub(super) fn join_transfer(&mut self, receive: WaitingReceive, landing: Immediate) {
        let peer = receive.peer;
        let waiter = self.wait_for_transfer(WaitingReceive { landing: Some(landing), ..receive });
        if let Some(transfer) = self.peers[peer.0 as usize].transfers.get_mut(&landing) {
            transfer.wanted_by = WantedBy::Receive { waiter, is_given: false };
        }
    }

    /// A receive that waits for a transfer gives up. The next receive gets the tensor.
    pub(super) fn leave_transfer(&mut self, peer: PeerIndex, landing: Immediate) {
        let entry = &mut self.peers[peer.0 as usize];
        let Some(transfer) = entry.transfers.get_mut(&landing) else { return };
        transfer.wanted_by =
            if is_on(Mutant::LandingDropped) { WantedBy::Nobody } else { WantedBy::NextReceive };
        let next = entry.incoming.leave_taken(transfer.edge, transfer.step, is_landing(landing));
        if let Some(waiter) = next
            && let Some(receive) = self.waiting.get_mut(waiter)
        {
            receive.landing = Some(landing);
            transfer.wanted_by = WantedBy::Receive { waiter, is_given: false };
        }
    }

    /// Nobody takes a value any more. Returns the waiting receive that had taken it.
    pub(super) fn discard(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        value: WindowArrival,
    ) -> Option<u32> {
        match value {
            WindowArrival::Offered(offered) if !is_on(Mutant::OfferNotDeclined) => {
                lanes.decline(peer, offered.offer);
                None
            }
            WindowArrival::Landing(landing) => {
                let transfer = self.peers[peer.0 as usize].transfers.get_mut(&landing)?;
                match std::mem::replace(&mut transfer.wanted_by, WantedBy::Nobody) {
                    WantedBy::Receive { waiter, .. } => Some(waiter),
                    WantedBy::NextReceive | WantedBy::Nobody => None,
                }
            }
            WindowArrival::Ready(_) | WindowArrival::Offered(_) => None,
        }
    }

    /// The link of a peer has ended, and with it all transfers and offers. Returns the receives
    /// that waited for them, which fail.
    pub(super) fn lose_transfers(&mut self, peer: PeerIndex) -> Vec<u32> {
        let entry = &mut self.peers[peer.0 as usize];
        drop(entry.incoming.drop_held_if(|value| !value.is_ready()));
        let lost = entry.transfers.drain().filter_map(|(_, transfer)| match transfer.wanted_by {
            WantedBy::Receive { waiter, .. } => Some(waiter),
            WantedBy::NextReceive | WantedBy::Nobody => None,
        });
        lost.collect()
    }

    /// A tensor lies in its destination.
    pub fn landed(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, landing: Immediate, tensor: TensorMut) {
        self.news = self.news.wrapping_add(1);
        let entry = &mut self.peers[peer.0 as usize];
        let Some(transfer) = entry.transfers.remove(&landing) else { return };
        let Transfer { edge, told, checksum, wanted_by, .. } = transfer;
        match wanted_by {
            WantedBy::Nobody => {}
            WantedBy::NextReceive => {
                let value = WindowArrival::Ready(ready(told, checksum, in_pool(lanes, tensor)));
                entry.incoming.replace_held(edge, is_landing(landing), value);
            }
            WantedBy::Receive { waiter, is_given } => {
                let Some(receive) = self.take_waiting(waiter) else { return };
                if is_given && !receive.is_dropped() {
                    Self::give_back(lanes, receive, &told, checksum, tensor);
                    self.peers[peer.0 as usize].incoming.remove_taken(edge, is_landing(landing));
                } else {
                    let value = ready(told, checksum, in_pool(lanes, tensor));
                    self.deliver_landed(lanes, landing, receive, value);
                }
                self.send_due(lanes, peer, edge);
                self.update_ready(lanes, peer, edge);
            }
        }
    }

    /// Ends a receive whose tensor lies in its given one.
    fn give_back(
        lanes: &impl Lanes,
        receive: WaitingReceive,
        told: &ToldMeta,
        checksum: Option<u64>,
        given: TensorMut,
    ) {
        if let Err(corruption) = check_bytes(lanes.counters(), checksum, given.bytes()) {
            return failed(lanes, receive.waiter, &receive.key, ReceiveError::Corrupted(corruption));
        }
        let received = Received::Into(given);
        count_received(lanes, &received);
        receive.waiter.complete(Ok(Delivery::of(received, told.sender, lanes.pool())));
    }

    /// Gives a tensor that has landed to the receive that has taken it, or to the next one that it
    /// fits.
    fn deliver_landed(
        &mut self,
        lanes: &mut impl Lanes,
        landing: Immediate,
        mut receive: WaitingReceive,
        mut value: ReadyValue,
    ) {
        loop {
            let (peer, edge, step) = (receive.peer, receive.edge, receive.key.step);
            let left = match receive.is_dropped() {
                true => {
                    receive.abandon();
                    Some(value)
                }
                false => Self::offer(lanes, receive, value),
            };
            let incoming = &mut self.peers[peer.0 as usize].incoming;
            let Some(left) = left else { return incoming.remove_taken(edge, is_landing(landing)) };
            let Some(waiter) = incoming.leave_taken(edge, step, is_landing(landing)) else {
                return incoming.replace_held(edge, is_landing(landing), WindowArrival::Ready(left));
            };
            let Some(next) = self.take_waiting(waiter) else { return };
            (receive, value) = (next, left);
        }
    }
}

/// A tensor that has landed, and that its receive does not take. Memory that a caller gave to that
/// receive is the caller's again: its bytes are copied. Without room for that it stays.
fn in_pool(lanes: &impl Lanes, tensor: TensorMut) -> TensorMut {
    if !tensor.is_foreign() {
        return tensor;
    }
    let Ok(mut copied) = lanes.pool().landing(tensor.meta()) else { return tensor };
    copy(copied.bytes_mut(), tensor.bytes());
    lanes.counters().increment(Counter::TensorsStaged);
    lanes.counters().add(Counter::BytesStaged, tensor.meta().bytes());
    copied
}

/// A tensor that has landed, for a receive.
fn ready(told: Arc<ToldMeta>, checksum: Option<u64>, tensor: TensorMut) -> ReadyValue {
    let bytes = ArrivedBytes::Landed(tensor.freeze());
    ReadyValue::Tensor(ArrivedTensor { told, checksum, bytes })
}
