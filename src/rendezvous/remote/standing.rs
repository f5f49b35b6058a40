//! Edges whose steps are asked for in advance (see [`crate::link`]): which steps, and when more of them.
//!
//! A window is asked for when the peer is there, and the next half of one whenever the last step that has begun has come so
//! near the end of it: so it costs two messages a window.

use super::Remote;
use crate::fabric::{LinkId, Port};
use crate::link::{Links, TensorKey};
use crate::rendezvous::path::{PeerIndex, StandingChange};
use crate::rendezvous::steps::StepState;
use crate::rendezvous::waiter::Waiter;

/// An edge whose steps are asked for in advance.
#[derive(Debug)]
pub(super) struct Standing {
    id: u64,
    peer: PeerIndex,
    /// The edge, with the first step of the sequence.
    key: TensorKey,
    window: u32,
    borrow: bool,
    /// The last step of the sequence that has begun here, if one has.
    reached: Option<u64>,
    /// The first step that was not asked for yet on the present link, once any was.
    next: Option<u64>,
}

impl Standing {
    fn is_of(&self, key: &TensorKey) -> bool {
        key.edge == self.key.edge && key.frame == self.key.frame && key.iteration == self.key.iteration
    }
}

impl Remote {
    pub(super) fn standing_changed<P: Port>(&mut self, links: &mut Links<P, Waiter>, change: StandingChange) {
        match change {
            StandingChange::Begun { id, peer, key, window, borrow } => {
                self.steps.sequence(key.step);
                let reached = self.steps.last_begun(key.step);
                self.standing.push(Standing { id, peer, key, window, borrow, reached, next: None });
                self.arm(links, self.standing.len() - 1);
            }
            StandingChange::Window { id, window } => {
                let Some(at) = self.standing.iter().position(|standing| standing.id == id) else { return };
                self.standing[at].window = window;
                self.arm(links, at);
            }
            StandingChange::Ended { id } => {
                let Some(at) = self.standing.iter().position(|standing| standing.id == id) else { return };
                let standing = self.standing.swap_remove(at);
                if let Some(link) = self.peers[standing.peer.0 as usize].usable() {
                    links.disarm(link, &mut |key| standing.is_of(key));
                }
            }
        }
    }

    /// A step has begun: windows that it brings near their end are made longer.
    pub(super) fn arm_for<P: Port>(&mut self, links: &mut Links<P, Waiter>, step: u64) {
        for at in 0..self.standing.len() {
            let standing = &mut self.standing[at];
            if step < standing.key.step || standing.reached.is_some_and(|reached| step <= reached) {
                continue;
            }
            if step >= self.steps.open(standing.key.step).1 {
                continue;
            }
            standing.reached = Some(step);
            self.arm(links, at);
        }
    }

    /// A new link with a peer is there: whatever was asked for in advance on an earlier one is asked for again.
    pub(super) fn arm_again<P: Port>(&mut self, links: &mut Links<P, Waiter>, peer: PeerIndex) {
        for at in 0..self.standing.len() {
            let standing = &mut self.standing[at];
            if standing.peer == peer {
                standing.next = None;
                self.arm(links, at);
            }
        }
    }

    fn arm<P: Port>(&mut self, links: &mut Links<P, Waiter>, at: usize) {
        let standing = &self.standing[at];
        let Some(link) = self.peers[standing.peer.0 as usize].usable() else { return };
        if self.broken.is_some() || standing.window == 0 {
            return;
        }
        let (open, limit) = self.steps.open(standing.key.step);
        let window = u64::from(standing.window);
        let current = standing.reached.map_or(open, |reached| reached.max(open));
        // Steps that lie further back are asked for when they are received.
        let behind = current.saturating_add(1).saturating_sub(window);
        let from = standing.next.unwrap_or(0).max(open).max(behind);
        let until = current.saturating_add(window).min(limit);
        // Until the first answer has told what the tensors are like, it is not known where they could go.
        let is_first = standing.next.is_none_or(|next| current < next)
            && !links.foresees(link, &standing.key, standing.borrow);
        let until = match (is_first, standing.next) {
            (true, None) => until.min(from.saturating_add(1)),
            (true, Some(_)) => return,
            (false, _) => until,
        };
        let ahead = from.saturating_sub(current);
        if from < until && (standing.next.is_none() || ahead <= window / 2) {
            self.standing[at].next = Some(self.arm_steps(links, at, link, from, until));
        }
    }

    /// Asks for the steps from `from` to before `until`, but those that are over. Returns the first that was not asked for.
    fn arm_steps<P: Port>(
        &self,
        links: &mut Links<P, Waiter>,
        at: usize,
        link: LinkId,
        mut from: u64,
        until: u64,
    ) -> u64 {
        let standing = &self.standing[at];
        let goes_on = |step: &u64| matches!(self.steps.state(*step), StepState::NotBegun | StepState::Live);
        while from < until {
            let count = (from..until).take_while(goes_on).count() as u32;
            let first = TensorKey { step: from, ..standing.key.clone() };
            let armed = if count == 0 { 0 } else { links.arm_steps(link, &first, count, standing.borrow) };
            from += u64::from(armed);
            if armed < count {
                break;
            }
            // The one behind them is over, or there is none.
            from = until.min(from + 1);
        }
        from
    }
}
