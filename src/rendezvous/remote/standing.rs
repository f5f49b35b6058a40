//! Edges whose steps are asked for in advance (see [`crate::link`]): which steps, and when more of them.
//!
//! A window is asked for when the peer is there, and the next half of one whenever the last step that has begun has come so
//! near the end of it: so it costs two messages a window. Where all edges together would have more than there is room for,
//! their windows are as much shorter.

use super::RemoteHandler;
use crate::fabric::{LinkId, Port};
use crate::link::{Links, StandingCapacity, StandingPosted, TensorKey};
use crate::rendezvous::path::{PeerIndex, StandingChange};
use crate::rendezvous::steps::StepState;
use crate::rendezvous::waiter::Waiter;
use crate::telemetry::Counter;
use foldhash::HashMap;

/// An edge whose steps are asked for in advance.
#[derive(Debug)]
struct StandingEdge {
    id: u64,
    peer: PeerIndex,
    /// The edge, with the first step of the sequence.
    key: TensorKey,
    window: u32,
    borrow: bool,
    /// The last step of the sequence that has begun here, if one has: as of the last look at it.
    reached: Option<u64>,
    /// The step whose begin asks for a look; none before it does.
    due: u64,
    /// The first step that was not asked for yet on the present link, once any was.
    next: Option<u64>,
    /// How far ahead the last message reached, if it would have reached further with more room: windows are that long for now.
    cut: Option<u64>,
    /// Bytes of the destination of one step, once they are known.
    bytes: Option<u64>,
}

/// All of them on a poller.
#[derive(Debug, Default)]
pub(super) struct StandingEdges {
    list: Vec<StandingEdge>,
    /// Where each lies, by its name.
    places: HashMap<u64, usize>,
    /// How many of each peer have a window.
    of_peer: HashMap<PeerIndex, u64>,
    /// How many have a window; of how many of them it is known how large they are, and the sum of that.
    active: u64,
    known: u64,
    bytes: u64,
    /// No later than any of them is due: most steps begin without a look at them.
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

    /// Counts one among those that share the room, or takes it out again.
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

    /// How long the window of an edge can be so that those of all others have room as well.
    fn share(&self, at: usize, room: StandingCapacity) -> u64 {
        let StandingEdge { window, peer, bytes, .. } = self.list[at];
        let slots = room.slots / self.of_peer.get(&peer).copied().unwrap_or(1).max(1);
        // Those that are not known are taken to be like the others.
        let of_all = u128::from(self.bytes) * u128::from(self.active) / u128::from(self.known.max(1));
        let steps = match bytes {
            None | Some(0) => u64::MAX,
            Some(_) => (u128::from(room.bytes) / of_all.max(1)) as u64,
        };
        u64::from(window).min(slots).min(steps).max(1)
    }
}

impl RemoteHandler {
    /// A wish about an edge. It comes back if nothing is known of that edge: the word that began it, from another thread, may
    /// still be to come.
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
                if let (Some(link), Some(next)) = (self.peers[peer.0 as usize].usable(), next) {
                    let first = TensorKey { step: self.steps.open(key.step).0, ..key };
                    links.withdraw_standing(link, &first, next, id);
                }
            }
        }
        None
    }

    /// A step has begun: windows that it brings near their end are made longer.
    pub(super) fn extend_standing<P: Port>(&mut self, links: &mut Links<P, Waiter>, step: u64) {
        if step < self.standing.soonest {
            return;
        }
        // All are known before the first takes its share of the room.
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

    /// Something else than a step may ask for more of an edge: what was known of when that is holds no longer.
    fn look_again(&mut self, at: usize) {
        let standing = &mut self.standing.list[at];
        // Of the steps before it was due nobody took note here.
        standing.reached = standing.reached.max(self.steps.last_begun(standing.key.step));
        standing.due = 0;
        self.standing.soonest = 0;
    }

    /// A new link with a peer is there: what is still to come is asked for again.
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

    /// Finds out how large the tensors of an edge are. Returns whether anything is known of them.
    fn learn_expected_bytes<P: Port>(&mut self, links: &mut Links<P, Waiter>, at: usize) -> bool {
        let standing = &self.standing.list[at];
        let Some(link) = self.peers[standing.peer.0 as usize].usable() else { return false };
        let Some(bytes) = links.expected_bytes(link, &standing.key, standing.borrow) else { return false };
        if standing.bytes != Some(bytes) {
            self.standing.change(at, |standing| standing.bytes = Some(bytes));
        }
        true
    }

    /// Asks for more steps of an edge, if it is time. `is_current_open`: the last one that has begun is still to be received.
    fn post_standing<P: Port>(&mut self, links: &mut Links<P, Waiter>, at: usize, is_current_open: bool) {
        let standing = &self.standing.list[at];
        let Some(link) = self.peers[standing.peer.0 as usize].usable() else { return };
        if self.broken.is_some() || standing.window == 0 {
            return;
        }
        let (open, limit) = self.steps.open(standing.key.step);
        let current = standing.reached.map_or(open, |reached| reached.max(open));
        // Steps that lie further back have been asked for, or are when they are received.
        let from = match standing.reached {
            Some(reached) if !is_current_open => reached.saturating_add(1),
            _ => current,
        };
        let next = standing.next;
        let from = next.map_or(from, |next| next.max(from));
        if !self.learn_expected_bytes(links, at) {
            // Until the first answer has told what the tensors are like, it is not known where they could go: one at a time.
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

    /// Asks for the steps from `from` to before `until`, but those that are over and those that were asked for. Returns whether
    /// there was no room for all.
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
                // The one behind them is over or was asked for, or there is none.
                from = until.min(from + 1);
            }
        }
        standing.next = Some(from);
        no_room
    }
}
