//! The ends of calls, steps and lives.

use super::{EdgeKey, Lanes, Matching};
use crate::link::TensorKey;
use crate::link::windows::WindowRefusal;
use crate::matching::{Cancel, CancelReason, Error, PeerIndex, StepChange};
use crate::mutants::{Mutant, is_on};
use crate::protocol::window::StepsOver;
use crate::wire::Time;
use std::sync::Arc;

impl Matching {
    /// Cancels a call. Returns whether it was waiting.
    pub fn cancel(&mut self, cancel: &Cancel) -> bool {
        let Some(waiter) = self.calls.get(&cancel.id).copied() else { return false };
        self.give_up(waiter, cancel.why.clone());
        true
    }

    /// Ends the waits whose deadline is `now` or earlier.
    pub fn expire(&mut self, now: Time) {
        let late = self.waiting.iter().filter(|(_, receive)| receive.waiter.deadline <= now);
        let late: Vec<_> = late.map(|(waiter, _)| waiter).collect();
        late.into_iter().for_each(|waiter| self.give_up(waiter, CancelReason::Deadline(None)));
        let deadlines = self.waiting.iter().map(|(_, receive)| receive.waiter.deadline);
        let next = deadlines.min().filter(|_| !is_on(Mutant::LaterDeadlinesForgotten));
        self.next_deadline = next.unwrap_or(Time::NEVER);
    }

    /// Ends a wait. A value that comes later is for the next receive.
    fn give_up(&mut self, waiter: u32, why: CancelReason) {
        let Some(mut receive) = self.take_waiting(waiter) else { return };
        if !is_on(Mutant::GivenUpStaysListed) {
            let incoming = &mut self.peers[receive.peer.0 as usize].incoming;
            incoming.give_up(receive.edge, receive.key.step, &waiter);
        }
        receive.waiter.cancel_reason = Some(why);
        receive.waiter.fail_cancelled(&receive.key);
    }

    /// Notes the change of a step.
    pub fn step_changed(&mut self, lanes: &mut impl Lanes, change: StepChange) {
        match change {
            StepChange::Sequence { base } => self.steps.sequence(base),
            StepChange::Begun { step, worker } => {
                // The rendezvous has checked that the step may begin.
                let _ = self.steps.begin(step, &worker);
            }
            StepChange::Aborted { step, status } => {
                // The begin command of another thread may still be queued. It changes nothing then.
                let _ = self.steps.begin(step, &Arc::from(""));
                self.steps.abort(step, status.clone());
                let error = Error::Aborted { step: step.into(), status: status.clone() };
                let refusal = WindowRefusal::from(status.into_derived());
                self.end_step(lanes, step, &error, &refusal);
            }
            StepChange::CleanedUp { step } => {
                self.steps.cleanup(step);
                self.end_step(lanes, step, &Error::StepGone { step: step.into() }, &WindowRefusal::CleanedUp);
            }
        }
    }

    /// Drops the values of a step, fails its receives, and tells the peers that have announced
    /// edges.
    fn end_step(&mut self, lanes: &mut impl Lanes, step: u64, error: &Error, refusal: &WindowRefusal) {
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            let entry = &mut self.peers[peer.0 as usize];
            let over = StepsOver { first: step, last: step, error: refusal.clone() };
            let hears = entry.has_announced;
            let dropped = entry.out.end_steps(over, &mut |message| {
                if hears {
                    lanes.to_receiver(peer, message);
                }
            });
            let (waiters, _) = entry.incoming.end_step(step, &mut |message| lanes.to_sender(peer, message));
            if !is_on(Mutant::EndedValuesOutstanding) {
                self.left(dropped.len());
            }
            self.fail(waiters, error);
        }
    }

    /// A link to a peer is up.
    pub fn up(&mut self, peer: PeerIndex) {
        let entry = &mut self.peers[peer.0 as usize];
        entry.down = None;
        entry.incoming.returned();
    }

    /// A peer announces an edge. With its first one the peer hears which steps have ended here.
    pub(super) fn note_announcement(&mut self, lanes: &mut impl Lanes, peer: PeerIndex) {
        let Matching { peers, steps, .. } = self;
        let entry = &mut peers[peer.0 as usize];
        if std::mem::replace(&mut entry.has_announced, true) {
            return;
        }
        let mut post = |message| lanes.to_receiver(peer, message);
        for (first, last) in steps.retired() {
            // Their values were dropped when they ended.
            let _ =
                entry.out.end_steps(StepsOver { first, last, error: WindowRefusal::CleanedUp }, &mut post);
        }
        for (step, status) in steps.aborted().filter(|_| !is_on(Mutant::EarlierAbortsNotTold)) {
            let error = WindowRefusal::from(status.clone().into_derived());
            let _ = entry.out.end_steps(StepsOver { first: step, last: step, error }, &mut post);
        }
    }

    /// The life of a peer has ended, and its link. Its receives fail with `error`. Values that left
    /// are lost; the others are for its next life. Returns the number of lost values at most.
    pub fn lost(&mut self, peer: PeerIndex, error: &Error) -> u64 {
        let entry = &mut self.peers[peer.0 as usize];
        entry.down.get_or_insert_with(|| error.clone());
        // Not in `up`: the peer may announce an edge before this side knows that both are ready.
        entry.has_announced = false;
        let lost = entry.out.uncredited();
        drop(entry.out.lost());
        let waiters = entry.incoming.lost();
        let unheard = usize::from(is_on(Mutant::LossNotToldToWindow));
        self.fail(waiters.into_iter().skip(unheard), error);
        lost
    }

    /// Ends every present and future receive with this error, unless an earlier error has.
    pub fn end(&mut self, error: &Error) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error.clone());
        let waiters: Vec<_> = self.waiting.iter().map(|(waiter, _)| waiter).collect();
        for waiter in waiters {
            let Some(receive) = self.take_waiting(waiter) else { continue };
            let incoming = &mut self.peers[receive.peer.0 as usize].incoming;
            incoming.give_up(receive.edge, receive.key.step, &waiter);
            receive.waiter.complete(Err(error.clone()));
        }
    }

    /// Announces an edge before its receives, with a window of at least `window` values.
    pub fn widen(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, key: &TensorKey, window: u32) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let edge = incoming.edge(&EdgeKey::of(key.borrowed()));
        incoming.widen(edge, window.into(), &mut |message| lanes.to_sender(peer, message));
    }

    /// Calls that need a peer without a link fail with this error.
    pub fn set_down(&mut self, peer: PeerIndex, error: &Error) {
        self.peers[peer.0 as usize].down = Some(error.clone());
    }

    /// Drops what came from an earlier life of a peer and was not received: it is not for the
    /// successor of that life (specification 2.2). Returns the number of values.
    pub fn drop_held(&mut self, peer: PeerIndex) -> u64 {
        self.peers[peer.0 as usize].incoming.drop_held().len() as u64
    }

    /// How much there is to do.
    #[cfg(any(test, feature = "sim"))]
    pub fn load(&self, links: crate::link::LinkLoad) -> crate::matching::RemoteLoad {
        let edges = || self.peers.iter().flat_map(|peer| peer.out.edges());
        let held = self.peers.iter().flat_map(|peer| peer.incoming.edges());
        let requests = links.requests + self.waiting.iter().count();
        crate::matching::RemoteLoad {
            links: crate::link::LinkLoad { requests, ..links },
            values: edges().map(|(_, edge)| edge.waiting().count()).sum(),
            requests: edges().map(|(_, edge)| edge.needs()).sum(),
            deferred: 0,
            orphans: held.map(|(_, _, edge)| edge.held().len()).sum(),
            queued: 0,
        }
    }

    fn fail(&mut self, waiters: impl IntoIterator<Item = u32>, error: &Error) {
        for waiter in waiters {
            if let Some(receive) = self.take_waiting(waiter) {
                receive.waiter.complete(Err(error.clone()));
            }
        }
    }
}
