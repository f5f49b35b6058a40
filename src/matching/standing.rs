//! Standing edges: for which steps standing requests are sent, and when (see [`crate::link`]).
//!
//! A first window of requests is sent when the peer is linked. The next half window follows when
//! the last step that has begun comes near the end: two messages per window. If all edges together
//! need more than the capacity, their windows shrink in proportion.

use super::{PeerIndex, RemoteHandler, StandingChange, StepState, Waiter};
use crate::fabric::{LinkId, Port};
use crate::link::{Links, StandingCapacity, StandingPosted, TensorKey};
use crate::telemetry::Counter;
use foldhash::HashMap;

/// An edge with standing requests.
#[derive(Debug)]
struct StandingEdge {
    id: u64,
    peer: PeerIndex,
    /// The edge, with the first step of the sequence.
    key: TensorKey,
    window: u32,
    borrow: bool,
    /// The last step of the sequence that has begun here, as of the last check of this edge.
    reached: Option<u64>,
    /// The step whose begin causes the next check; earlier steps cause none.
    due: u64,
    /// The first step without a request on the present link, once any was sent.
    next: Option<u64>,
    /// The length of the last window, if a lack of room cut it. Windows have that length for now.
    cut: Option<u64>,
    /// Bytes of the destination of one step, once known.
    bytes: Option<u64>,
}

/// The standing edges of a poller.
#[derive(Debug, Default)]
pub(super) struct StandingEdges {
    list: Vec<StandingEdge>,
    /// The index of each edge, by its id.
    places: HashMap<u64, usize>,
    /// Number of edges of each peer that have a window.
    of_peer: HashMap<PeerIndex, u64>,
    /// Number of edges with a window; of those, the number whose size is known and the sum of these
    /// sizes.
    active: u64,
    known: u64,
    bytes: u64,
    /// The smallest `due`, or less: most steps begin without a check of the edges.
    soonest: u64,
}

impl StandingEdges {
    fn insert(&mut self, standing: StandingEdge) -> usize {
        self.soonest = self.soonest.min(standing.due);
        self.places.insert(standing.id, self.list.len());
        self.list.push(standing);
        self.count(self.list.len() - 1, true);
        self.list.len() - 1
    }

    fn remove(&mut self, at: usize) -> StandingEdge {
        self.count(at, false);
        let standing = self.list.swap_remove(at);
        self.places.remove(&standing.id);
        if let Some(moved) = self.list.get(at) {
            self.places.insert(moved.id, at);
        }
        standing
    }

    /// Adds an edge to the figures of those that share the capacity, or removes it.
    fn count(&mut self, at: usize, is_in: bool) {
        let StandingEdge { window, peer, bytes, .. } = self.list[at];
        if window == 0 {
            return;
        }
        let change = |number: &mut u64, by: u64| match is_in {
            true => *number += by,
            false => *number -= by,
        };
        change(self.of_peer.entry(peer).or_default(), 1);
        change(&mut self.active, 1);
        change(&mut self.known, u64::from(bytes.is_some()));
        change(&mut self.bytes, bytes.unwrap_or(0));
    }

    fn change(&mut self, at: usize, change: impl FnOnce(&mut StandingEdge)) {
        self.count(at, false);
        change(&mut self.list[at]);
        self.count(at, true);
    }

    /// The length of an edge's window that leaves room for the windows of all other edges.
    fn share(&self, at: usize, room: StandingCapacity) -> u64 {
        let StandingEdge { window, peer, bytes, .. } = self.list[at];
        let slots = room.slots / self.of_peer.get(&peer).copied().unwrap_or(1).max(1);
        // Edges of unknown size count as the average of the others.
        let of_all = u128::from(self.bytes) * u128::from(self.active) / u128::from(self.known.max(1));
        let steps = match bytes {
            None | Some(0) => u64::MAX,
            Some(_) => (u128::from(room.bytes) / of_all.max(1)) as u64,
        };
        u64::from(window).min(slots).min(steps).max(1)
    }
}

impl RemoteHandler {
    /// Changes a standing edge. Returns the command if the edge is unknown: the command that
    /// creates it, from another thread, may still be queued.
    pub(super) fn standing_changed<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        change: StandingChange,
    ) -> Option<StandingChange> {
        match change {
            StandingChange::Begun { id, peer, key, window, borrow } => {
                self.steps.sequence(key.step);
                let reached = self.steps.last_begun(key.step);
                let (due, next, cut, bytes) = (0, None, None, None);
                let at = self.standing.insert(StandingEdge {
                    id,
                    peer,
                    key,
                    window,
                    borrow,
                    reached,
                    due,
                    next,
                    cut,
                    bytes,
                });
                self.post_standing(links, at, false);
            }
            StandingChange::Window { id, window } => {
                let Some(at) = self.standing.places.get(&id).copied() else { return Some(change) };
                self.standing.change(at, |standing| (standing.window, standing.cut) = (window, None));
                self.look_again(at);
                self.post_standing(links, at, false);
            }
            StandingChange::Ended { id } => {
                let Some(at) = self.standing.places.get(&id).copied() else { return Some(change) };
                let StandingEdge { peer, key, next, .. } = self.standing.remove(at);
                if let (Some(link), Some(next)) = (self.connections.usable(peer), next) {
                    let first = TensorKey { step: self.steps.open(key.step).0, ..key };
                    links.withdraw_standing(link, &first, next, id);
                }
            }
        }
        None
    }

    /// A step has begun: extends the windows that it brings near their end.
    pub(super) fn extend_standing<P: Port>(&mut self, links: &mut Links<P, Waiter>, step: u64) {
        if step < self.standing.soonest {
            return;
        }
        // The sizes of all edges are known before the first edge takes its share.
        for at in 0..self.standing.list.len() {
            if self.standing.list[at].bytes.is_none() {
                self.learn_expected_bytes(links, at);
            }
        }
        for at in 0..self.standing.list.len() {
            let standing = &mut self.standing.list[at];
            if step < standing.key.step.max(standing.due) || standing.reached >= Some(step) {
                continue;
            }
            if step >= self.steps.open(standing.key.step).1 {
                continue;
            }
            standing.reached = Some(step);
            if standing.cut.is_some() && standing.next.is_none_or(|next| next <= step) {
                links.counters().increment(Counter::StandingStepsMissed);
            }
            self.post_standing(links, at, true);
        }
        self.standing.soonest = self.standing.list.iter().map(|standing| standing.due).min().unwrap_or(0);
    }

    /// Makes the next begin of any step check this edge: its `due` is void.
    fn look_again(&mut self, at: usize) {
        let standing = &mut self.standing.list[at];
        // Steps before `due` were not noted here.
        standing.reached = standing.reached.max(self.steps.last_begun(standing.key.step));
        standing.due = 0;
        self.standing.soonest = 0;
    }

    /// A new link with a peer is up: sends the requests of its edges again.
    pub(super) fn repost_standing<P: Port>(&mut self, links: &mut Links<P, Waiter>, peer: PeerIndex) {
        for at in 0..self.standing.list.len() {
            let standing = &mut self.standing.list[at];
            if standing.peer == peer {
                (standing.next, standing.cut) = (None, None);
                self.look_again(at);
                self.post_standing(links, at, true);
            }
        }
    }

    /// Updates the expected bytes of an edge. Returns whether they are known.
    fn learn_expected_bytes<P: Port>(&mut self, links: &mut Links<P, Waiter>, at: usize) -> bool {
        let standing = &self.standing.list[at];
        let Some(link) = self.connections.usable(standing.peer) else { return false };
        let Some(bytes) = links.expected_bytes(link, &standing.key, standing.borrow) else { return false };
        if standing.bytes != Some(bytes) {
            self.standing.change(at, |standing| standing.bytes = Some(bytes));
        }
        true
    }

    /// Sends requests for more steps of an edge, if it is time. `is_current_open`: the last step
    /// that has begun is still to be received.
    fn post_standing<P: Port>(&mut self, links: &mut Links<P, Waiter>, at: usize, is_current_open: bool) {
        let standing = &self.standing.list[at];
        let Some(link) = self.connections.usable(standing.peer) else { return };
        if self.broken.is_some() || standing.window == 0 {
            return;
        }
        let (open, limit) = self.steps.open(standing.key.step);
        let current = standing.reached.map_or(open, |reached| reached.max(open));
        // Earlier steps have requests already, or get plain ones.
        let from = match standing.reached {
            Some(reached) if !is_current_open => reached.saturating_add(1),
            _ => current,
        };
        let next = standing.next;
        let from = next.map_or(from, |next| next.max(from));
        if !self.learn_expected_bytes(links, at) {
            // Until the first answer, the size of the tensors is unknown: one step at a time.
            if next.is_none_or(|next| next <= current) && from < limit {
                self.post_steps(links, at, link, from, from + 1);
            }
            return;
        }
        let window = self.standing.share(at, links.standing_capacity(link));
        let until = current.saturating_add(window).min(limit);
        let standing = &self.standing.list[at];
        let length = standing.cut.map_or(window, |cut| cut.min(window));
        if from < until && (next.is_none() || from.saturating_sub(current) <= length / 2) {
            let no_room = self.post_steps(links, at, link, from, until);
            let standing = &mut self.standing.list[at];
            let ahead = standing.next.unwrap_or(from).saturating_sub(current);
            standing.cut = no_room.then_some(ahead);
        }
        let standing = &mut self.standing.list[at];
        let length = standing.cut.map_or(window, |cut| cut.min(window));
        standing.due = standing.next.map_or(0, |next| next.saturating_sub(length / 2));
    }

    /// Sends requests for the steps from `from` up to, but not including, `until`, except steps
    /// that are over or have requests. Returns whether there was no room for all.
    fn post_steps<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        at: usize,
        link: LinkId,
        mut from: u64,
        until: u64,
    ) -> bool {
        let standing = &mut self.standing.list[at];
        let goes_on = |step: &u64| matches!(self.steps.state(*step), StepState::NotBegun | StepState::Live);
        let mut no_room = false;
        while from < until && !no_room {
            let count = (from..until).take_while(goes_on).count() as u32;
            let first = TensorKey { step: from, ..standing.key.clone() };
            let posted = match count {
                0 => StandingPosted { steps: 0, no_room: false },
                _ => links.post_standing(link, &first, count, standing.borrow, standing.id),
            };
            from += u64::from(posted.steps);
            no_room = posted.no_room;
            if !no_room {
                // The next step is over, has a request already, or does not exist.
                from = until.min(from + 1);
            }
        }
        standing.next = Some(from);
        no_room
    }
}
