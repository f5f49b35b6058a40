//! The table of request slots: every request of this side that the peer may still answer.

use crate::link::links::IN_FLIGHT;
use crate::link::receiving::checksum::Unverified;
use crate::link::receiving::standing::EarlyArrival;
use crate::link::{Destination, TensorKey};
use crate::memory::TensorMut;
use crate::mutants::{Mutant, is_on};
use crate::protocol::Receiver;
use crate::wire::message::{RequestId, VersionedMeta};
use crate::wire::{Grant, Slot};
use foldhash::HashMap;

/// A request of this side.
#[derive(Debug)]
pub(in crate::link) struct Request<C> {
    /// Its state machine.
    pub machine: Receiver,
    /// The requested key.
    pub key: TensorKey,
    /// The waiter; `None` once the waiter got another answer.
    pub waiter: Option<C>,
    /// The grant that the peer has for it.
    pub grant: Option<Grant>,
    /// The waiter's tensor, while it is not granted.
    pub given: Option<TensorMut>,
    /// Whether the waiter gave a tensor to receive into.
    pub into: bool,
    /// The meta-data that the answer may refer to.
    pub meta: Option<VersionedMeta>,
    /// The reason for a cancel that was not the waiter's.
    pub failure: Option<crate::link::RequestError>,
    /// The number of its edge's route.
    pub route: u32,
    /// Its number among the requests of the link, in the order in which they were made.
    pub asked: u64,
    /// The timeout in ms that the peer is told.
    pub timeout_ms: u32,
    /// Whether it accepts a loan.
    pub borrow: bool,
    /// The destination that its waiter wants, while the request is blocked.
    pub destination: Option<Destination>,
    /// Bytes in quarantine: the request was cancelled, and the peer may still write to them.
    pub quarantined: u64,
    /// Whether it is counted in [`UnresolvedKeys`].
    pub is_unresolved: bool,
    /// Whether a value that still comes is dropped: its step has ended.
    pub is_abandoned: bool,
    /// What came for a standing request before its claim.
    pub early: Option<EarlyArrival>,
    /// The claiming waiter's tensor: the value is copied there.
    pub copy_to: Option<TensorMut>,
    /// Bytes of its destination while it is an unclaimed standing request.
    pub standing_bytes: u64,
    /// The value whose checksum is still to come.
    pub unverified: Option<Unverified>,
}

/// Keys with unresolved requests: the waiter is gone, and the outcome is not known. Later requests
/// for such a key are blocked. A value that comes is theirs, and it was sent before any other that
/// they could get.
#[derive(Debug, Default)]
pub(in crate::link) struct UnresolvedKeys {
    keys: HashMap<TensorKey, BlockedRequests>,
}

#[derive(Debug, Default)]
struct BlockedRequests {
    unresolved: u32,
    blocked: Vec<RequestId>,
}

impl UnresolvedKeys {
    /// Number of unresolved keys.
    #[cfg(any(test, feature = "sim"))]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Notes one more unresolved request of a key.
    pub fn add(&mut self, key: &TensorKey) {
        self.keys.entry(key.clone()).or_default().unresolved += 1;
    }

    /// Whether requests for a key are blocked.
    pub fn is_blocked(&self, key: &TensorKey) -> bool {
        !self.keys.is_empty() && self.keys.contains_key(key)
    }

    /// Blocks a request.
    pub fn block(&mut self, key: &TensorKey, request: RequestId) {
        if let Some(waiting) = self.keys.get_mut(key) {
            waiting.blocked.push(request);
        }
    }

    /// Notes the end of a blocked request.
    pub fn unblock(&mut self, key: &TensorKey, request: RequestId) {
        if let Some(waiting) = self.keys.get_mut(key) {
            waiting.blocked.retain(|blocked| *blocked != request);
        }
    }

    /// Notes that a request of a key is resolved. Returns the requests that are not blocked any
    /// more, in their order.
    pub fn resolve(&mut self, key: &TensorKey) -> Vec<RequestId> {
        let Some(waiting) = self.keys.get_mut(key) else { return Vec::new() };
        waiting.unresolved -= 1;
        if waiting.unresolved > 0 {
            return Vec::new();
        }
        self.keys.remove(key).map(|waiting| waiting.blocked).unwrap_or_default()
    }
}

impl<C> Request<C> {
    /// Whether a loan may come for it.
    pub fn may_borrow(&self) -> bool {
        self.borrow && !self.into
    }

    /// A request that is not sent yet.
    pub fn unsent(key: TensorKey, waiter: C, route: u32, asked: u64, timeout_ms: u32) -> Self {
        Request { waiter: Some(waiter), ..Self::without_waiter(key, route, asked, timeout_ms) }
    }

    /// An unsent request without a waiter.
    pub fn without_waiter(key: TensorKey, route: u32, asked: u64, timeout_ms: u32) -> Self {
        Request {
            machine: Receiver::unsent(),
            key,
            waiter: None,
            grant: None,
            given: None,
            into: false,
            meta: None,
            failure: None,
            route,
            asked,
            timeout_ms,
            borrow: false,
            destination: None,
            quarantined: 0,
            is_unresolved: false,
            is_abandoned: false,
            early: None,
            copy_to: None,
            standing_bytes: 0,
            unverified: None,
        }
    }
}

#[derive(Debug)]
struct RequestSlot<C> {
    generation: u8,
    request: Option<Request<C>>,
}

/// Request slots with generations. Each use of a slot has the next generation, so that an answer to
/// an earlier use is recognised.
#[derive(Debug)]
pub(in crate::link) struct Requests<C> {
    entries: Vec<RequestSlot<C>>,
    free: Vec<u32>,
    max: u32,
}

impl<C> Requests<C> {
    pub fn new(max: u32) -> Self {
        let (entries, free) = (Vec::with_capacity(IN_FLIGHT), Vec::with_capacity(IN_FLIGHT));
        Requests { entries, free, max: max.min(Slot::COUNT) }
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Capacity of the table.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// Whether the table has room for one more request.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.entries.len() < self.max as usize
    }

    /// Adds a request. If the table is full, drops it and returns `None`.
    pub fn insert(&mut self, request: Request<C>) -> Option<RequestId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() < self.max as usize => {
                self.entries.push(RequestSlot { generation: 0, request: None });
                self.entries.len() as u32 - 1
            }
            None => return None,
        };
        let entry = &mut self.entries[index as usize];
        entry.request = Some(request);
        Some(RequestId { slot: Slot::new(index)?, generation: entry.generation })
    }

    /// The request with this id; `None` if the slot is free or has another generation.
    pub fn get(&mut self, id: RequestId) -> Option<&mut Request<C>> {
        let entry = self.entries.get_mut(id.slot.index() as usize)?;
        if entry.generation == id.generation || is_on(Mutant::StaleGeneration) {
            entry.request.as_mut()
        } else {
            None
        }
    }

    /// Removes a request. Its slot has the next generation from now on.
    pub fn remove(&mut self, id: RequestId) -> Option<Request<C>> {
        self.get(id)?;
        let index = id.slot.index();
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        entry.request.take()
    }

    /// Number of slots that were ever used, from 0 on.
    pub fn slots(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The request in a slot, with its id.
    pub fn in_slot(&mut self, index: u32) -> Option<(RequestId, &mut Request<C>)> {
        let RequestSlot { generation, request } = self.entries.get_mut(index as usize)?;
        let id = RequestId { slot: Slot::new(index)?, generation: *generation };
        Some((id, request.as_mut()?))
    }

    /// All requests.
    pub fn iter(&self) -> impl Iterator<Item = &Request<C>> {
        self.entries.iter().filter_map(|entry| entry.request.as_ref())
    }

    /// Removes all requests.
    pub fn drain(&mut self) -> impl Iterator<Item = Request<C>> {
        self.free.clear();
        self.entries.drain(..).filter_map(|entry| entry.request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::EdgeName;
    use std::sync::Arc;

    #[test]
    fn blocked_requests_go_in_their_order_except_ended_ones() {
        let key = request(0).key;
        let id = |slot| RequestId { slot: Slot::new(slot).expect("20 bits"), generation: 0 };
        let mut unresolved = UnresolvedKeys::default();
        unresolved.add(&key);
        unresolved.add(&key);
        for slot in 0..3 {
            unresolved.block(&key, id(slot));
        }
        // Cancels do not accumulate.
        for _ in 0..1000 {
            unresolved.block(&key, id(7));
            unresolved.unblock(&key, id(7));
        }
        unresolved.unblock(&key, id(1));
        assert_eq!(unresolved.resolve(&key), [], "one more is not resolved");
        assert_eq!(unresolved.resolve(&key), [id(0), id(2)]);
        assert_eq!(unresolved.len(), 0);
    }

    fn request(waiter: u32) -> Request<u32> {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        let edge = Arc::new(EdgeName::new(device, device, "e").expect("edge"));
        let key = TensorKey { edge, step: 1, frame: 0, iteration: 0 };
        Request::unsent(key, waiter, 0, 0, 0)
    }

    #[test]
    fn a_slot_used_again_does_not_match_its_old_id() {
        let mut requests = Requests::new(1);
        let first = requests.insert(request(1)).expect("room");
        assert!(requests.insert(request(2)).is_none(), "full");
        requests.remove(first).expect("there");
        let second = requests.insert(request(2)).expect("room");
        assert_eq!(second.slot, first.slot);
        assert!(requests.get(first).is_none() && requests.remove(first).is_none());
        assert_eq!(requests.get(second).expect("there").waiter, Some(2));
    }

    #[test]
    fn generations_wrap_after_256_uses_and_never_onto_one_in_use() {
        let mut requests = Requests::new(2);
        let first = requests.insert(request(0)).expect("room");
        for round in 0..300 {
            let id = requests.insert(request(round)).expect("room");
            assert_ne!(id.slot, first.slot);
            requests.remove(id).expect("there");
        }
        assert_eq!(requests.len(), 1);
        let ids: Vec<_> = (0..requests.slots()).filter_map(|slot| Some(requests.in_slot(slot)?.0)).collect();
        assert_eq!(ids, [first]);
    }

    #[test]
    fn requests_are_blocked_until_the_last_one_before_them_is_resolved() {
        let mut unresolved = UnresolvedKeys::default();
        let key = request(0).key;
        assert!(!unresolved.is_blocked(&key));
        unresolved.add(&key);
        unresolved.add(&key);
        let ids = [3, 1].map(|slot| RequestId { slot: Slot::new(slot).expect("20 bits"), generation: 0 });
        for id in ids {
            assert!(
                unresolved.is_blocked(&key) && !unresolved.is_blocked(&TensorKey { step: 2, ..key.clone() })
            );
            unresolved.block(&key, id);
        }
        assert_eq!(unresolved.resolve(&key), []);
        assert_eq!(unresolved.resolve(&key), ids);
        assert!(!unresolved.is_blocked(&key) && unresolved.resolve(&key).is_empty());
    }

    #[test]
    fn an_id_beyond_the_table_is_unknown() {
        let mut requests = Requests::<u32>::new(4);
        let id = RequestId { slot: Slot::new(1_000_000).expect("20 bits"), generation: 0 };
        assert!(requests.get(id).is_none());
    }
}
