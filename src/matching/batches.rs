//! Batches of sends or receives.
//!
//! Receives without room are queued and sent as earlier ones end. Later receives of the same keys
//! wait behind them. Receives of batches can be more than the requests of a link. Other receives
//! find no room if standing requests, or receives that have given up, still have their requests.

use super::receiving::Receive;
use super::{
    BatchReceive, BatchSend, CallId, CancelAll, CancelReason, Error, PeerIndex, ReceiveAll, RemoteHandler,
    Waiter,
};
use crate::fabric::Port;
use crate::link::{Links, TensorKey};
use crate::mutants::{Mutant, is_on};
use crate::sync::Reused;
use crate::telemetry::Counter;
use crate::wire::Time;
use foldhash::HashMap;
use std::collections::VecDeque;

/// The queued receives of each peer, in their order.
#[derive(Debug)]
pub(super) struct QueuedReceives {
    peers: Vec<VecDeque<Receive>>,
    /// Number of queued receives of each key.
    keys: HashMap<TensorKey, u32>,
    count: usize,
}

impl QueuedReceives {
    pub fn new(peers: usize) -> Self {
        // A hash table that is less than half full never grows.
        let keys = HashMap::with_capacity_and_hasher(super::CALLS, Default::default());
        QueuedReceives { peers: (0..peers).map(|_| VecDeque::new()).collect(), keys, count: 0 }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether a receive of this key must wait behind queued ones.
    #[inline]
    pub fn has(&self, key: &TensorKey) -> bool {
        self.count > 0 && self.keys.contains_key(key)
    }

    pub fn push(&mut self, receive: Receive) {
        self.note(&receive.key);
        self.peers[receive.peer.0 as usize].push_back(receive);
    }

    fn note(&mut self, key: &TensorKey) {
        self.count += 1;
        match self.keys.get_mut(key) {
            Some(count) => *count += 1,
            None => _ = self.keys.insert(key.clone(), 1),
        }
    }

    fn forget(&mut self, key: &TensorKey) {
        self.count -= 1;
        if let Some(count) = self.keys.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.keys.remove(key);
            }
        }
    }

    fn first(&self, peer: PeerIndex) -> Option<&TensorKey> {
        self.peers[peer.0 as usize].front().map(|first| &first.key)
    }

    fn pop(&mut self, peer: PeerIndex) -> Option<Receive> {
        let first = self.peers[peer.0 as usize].pop_front()?;
        self.forget(&first.key);
        Some(first)
    }

    /// Removes the receives that fit, peer by peer and in their order.
    pub fn remove(
        &mut self,
        mut fits: impl FnMut(&Receive) -> bool,
        mut each: impl FnMut(TensorKey, Waiter),
    ) {
        if self.count == 0 {
            return;
        }
        for peer in 0..self.peers.len() {
            // One full rotation keeps the order of the others.
            for _ in 0..self.peers[peer].len() {
                let Some(receive) = self.peers[peer].pop_front() else { break };
                if fits(&receive) {
                    self.forget(&receive.key);
                    each(receive.key, receive.waiter);
                } else {
                    self.peers[peer].push_back(receive);
                }
            }
        }
    }

    /// The earliest deadline of all queued receives.
    pub fn next_deadline(&self) -> Time {
        let deadlines = self.peers.iter().flatten().map(|receive| receive.waiter.deadline);
        if self.count == 0 { Time::NEVER } else { deadlines.min().unwrap_or(Time::NEVER) }
    }
}

impl RemoteHandler {
    pub(super) fn send_all<P: Port>(&mut self, links: &mut Links<P, Waiter>, mut values: Reused<BatchSend>) {
        links.begin_batch();
        links.counters().increment(Counter::Batches);
        for BatchSend { key, value, .. } in values.drain(..) {
            self.offer(links, key, value);
        }
    }

    pub(super) fn receive_all<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        batch: ReceiveAll,
        now: Time,
    ) {
        links.begin_batch();
        links.counters().increment(Counter::Batches);
        let ReceiveAll { deadline, timeout, mut receives } = batch;
        for BatchReceive { peer, id, key, destination, sender, .. } in receives.drain(..) {
            let waiter = Waiter { permit: None, id, sender, deadline, timeout, cancel_reason: None };
            let before = self.calls.len() + self.queued.len();
            self.receive_or_queue(links, Receive { peer, key, destination, waiter }, now);
            if is_on(Mutant::BatchStopsAtFailure) && self.calls.len() + self.queued.len() == before {
                break;
            }
        }
    }

    /// Begins a receive, or queues it until there is room.
    pub(super) fn receive_or_queue<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        receive: Receive,
        now: Time,
    ) {
        match self.has_room(links, receive.peer, &receive.key) {
            true => self.receive(links, receive, now),
            false => self.queue_receive(links, receive),
        }
    }

    /// Whether a receive of this key can be sent now or ends at once.
    fn has_room<P: Port>(&self, links: &mut Links<P, Waiter>, peer: PeerIndex, key: &TensorKey) -> bool {
        let Some(link) = self.connections.usable(peer) else { return true };
        links.has_room(link, key) || self.orphans.contains_key(key)
    }

    /// Queues a receive until there is room.
    pub(super) fn queue_receive<P: Port>(&mut self, links: &mut Links<P, Waiter>, receive: Receive) {
        links.counters().increment(Counter::ReceivesQueued);
        self.next_deadline = self.next_deadline.min(receive.waiter.deadline);
        self.queued.push(receive);
    }

    /// Begins queued receives, as far as there is room.
    pub(super) fn resume<P: Port>(&mut self, links: &mut Links<P, Waiter>, now: Time) {
        if self.queued.len() == 0 || is_on(Mutant::QueuedForgotten) {
            return;
        }
        for peer in (0..self.deferred.len() as u32).map(PeerIndex) {
            while let Some(first) = self.queued.first(peer)
                && self.has_room(links, peer, first)
            {
                links.begin_batch();
                let Some(receive) = self.queued.pop(peer) else { break };
                self.begin_receive(links, receive, now);
            }
        }
    }

    /// Fails the queued receives that fit.
    pub(super) fn fail_queued(
        &mut self,
        error: impl Fn(&TensorKey) -> Error,
        fits: impl Fn(PeerIndex, &TensorKey) -> bool,
    ) {
        let mut failed = Vec::new();
        let fits = |receive: &Receive| fits(receive.peer, &receive.key);
        self.queued.remove(fits, |key, waiter| failed.push((waiter, error(&key))));
        failed.into_iter().for_each(|(waiter, error)| waiter.complete(Err(error)));
    }

    /// Ends the queued receives whose deadline has passed.
    pub(super) fn expire_queued(&mut self, now: Time) {
        self.queued.remove(
            |receive| receive.waiter.deadline <= now,
            |key, mut waiter| {
                waiter.cancel_reason.get_or_insert(CancelReason::Deadline(None));
                waiter.fail_cancelled(&key);
            },
        );
    }

    /// Cancels the queued receives of these calls.
    pub(super) fn cancel_queued(&mut self, why: &CancelReason, of: impl Fn(CallId) -> bool) {
        self.queued.remove(
            |receive| of(receive.waiter.id),
            |key, mut waiter| {
                waiter.cancel_reason = Some(why.clone());
                waiter.fail_cancelled(&key);
            },
        );
    }

    /// Cancels all calls of a batch. Returns the command if a call is unknown here: it has ended,
    /// or its begin command is still queued.
    pub(super) fn cancel_all<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        cancel: CancelAll,
        now: Time,
    ) -> Option<CancelAll> {
        links.begin_batch();
        let ids = cancel.first..cancel.first + cancel.count;
        self.cancel_queued(&cancel.why, |id| ids.contains(&id.0));
        let mut is_missing = false;
        for id in ids {
            let one = cancel.one(id);
            match self.calls.contains_key(&one.id) {
                true => self.cancel(links, &one, now),
                false => is_missing = true,
            }
        }
        is_missing.then_some(cancel)
    }
}
