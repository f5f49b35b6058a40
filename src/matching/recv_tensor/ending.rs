//! The ends of calls, steps and lives.

use super::{CallLink, RecvTensors};
use crate::link::TensorKey;
use crate::matching::ended_steps::StepEnd;
use crate::matching::{Cancel, CancelAll, CancelReason, Error, LinkTag, PeerIndex, StepChange, WaitReports};
use crate::telemetry::Counter;
use crate::wire::Time;

impl RecvTensors {
    /// Cancels a call, unless it has ended.
    pub fn cancel(&mut self, cancel: &Cancel) {
        let Some((peer, key)) = self.calls.get(&cancel.call.id).cloned() else { return };
        self.give_up(peer, &key, cancel.why.clone(), |waiter| waiter.id == cancel.call.id);
    }

    /// Cancels several calls, except those that have ended.
    pub fn cancel_all(&mut self, cancel: &CancelAll) {
        for id in cancel.first..cancel.first + cancel.count {
            self.cancel(&cancel.one(id));
        }
    }

    /// Ends the waits whose deadline is `now` or earlier, and requests that are idle for long.
    /// Returns when there is more to end.
    pub fn expire(&mut self, now: Time) -> Time {
        let late = |of: &super::CallPeer| {
            let keys = of.incoming.keys.iter();
            let waiting = keys.flat_map(|(key, queue)| queue.waiting.iter().map(move |wait| (key, wait)));
            let late = waiting.filter(|(_, receive)| receive.waiter.deadline <= now);
            late.map(|(key, receive)| (key.clone(), receive.waiter.id)).collect::<Vec<_>>()
        };
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            for (key, id) in late(&self.peers[peer.0 as usize]) {
                self.give_up(peer, &key, CancelReason::Deadline(None), |waiter| waiter.id == id);
            }
        }
        self.withdraw_idle(now);
        self.next_deadline()
    }

    /// Receives that have waited for longer than `hung_after`, each once.
    pub fn take_long_waits(&mut self, now: Time) -> Option<WaitReports> {
        let (bound, logged_after) = (self.settings.hung_after, self.logged_after());
        let queues = self.peers.iter().flat_map(|peer| peer.incoming.keys.values());
        let mut waiters = queues.flat_map(|queue| &queue.waiting).map(|receive| &receive.waiter);
        if !waiters.any(|waiter| !waiter.is_logged && now.since(waiter.begun) >= logged_after) {
            return None;
        }
        let mut reports = WaitReports::default();
        for peer in &mut self.peers {
            let wait = super::report::receive_wait(&peer.down);
            for (key, queue) in &mut peer.incoming.keys {
                for receive in &mut queue.waiting {
                    let waiter = &mut receive.waiter;
                    if !waiter.is_logged && now.since(waiter.begun) >= bound {
                        waiter.is_logged = true;
                        reports.waits.push(super::report::of_receive(key, waiter.begun, now, wait));
                    }
                }
            }
        }
        reports.cut(super::report::LOGGED);
        (!reports.waits.is_empty()).then_some(reports)
    }

    /// Notes the change of a step.
    pub fn step_changed(&mut self, change: StepChange) {
        match change {
            StepChange::Sequence { base } => self.steps.sequence(base),
            StepChange::Aborted { steps, status } => {
                if self.steps.abort(&steps, &status) {
                    self.end_sends(|step| steps.contains(&step));
                    let error = |key: &TensorKey| StepEnd::Aborted(&status).error(key.step);
                    self.end_receives(|step| steps.contains(&step), error);
                }
            }
            StepChange::CleanedUp { step } => {
                if self.steps.cleanup(step) {
                    self.end_sends(|ended| ended == step);
                    self.end_receives(|ended| ended == step, |key| StepEnd::CleanedUp.error(key.step));
                }
            }
        }
    }

    /// A link with a peer is up.
    pub fn up(&mut self, peer: PeerIndex, link: CallLink) {
        let state = self.peer(peer);
        let before = state.link.replace(link);
        state.down = None;
        let life = link.tag.incarnation;
        if before.is_some_and(|before| before.tag.incarnation != life) {
            let dropped = self.drop_held(peer);
            self.counters.add(Counter::ValuesLost, dropped);
        }
        let next = self.next_request(peer);
        self.channel.clean_up(peer, life, next);
    }

    /// Whether a later link than this one is up.
    pub fn is_over(&self, peer: PeerIndex, tag: LinkTag) -> bool {
        let present = self.peers[peer.0 as usize].present();
        present.is_some_and(|present| present.tag.generation > tag.generation)
    }

    /// The link with a peer has ended, or a life without one. Returns how many values are lost: the
    /// peer was given them, and did not say that it has taken them.
    pub fn lost(&mut self, peer: PeerIndex, error: &Error) -> u64 {
        let is_clean = matches!(error, Error::PeerLost { cause, .. } if cause.is_clean());
        self.peer(peer).down = Some(error.clone());
        self.counters.increment(Counter::PeersLost);
        let values = self.drop_requests(peer);
        self.lose_receives(peer, error);
        self.channel.lost(peer);
        if is_clean {
            return 0;
        }
        self.counters.add(Counter::ValuesLost, values);
        values
    }

    /// Ends every present and future receive with this error, unless an earlier error has.
    pub fn end(&mut self, error: &Error) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error.clone());
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            self.lose_receives(peer, error);
        }
    }
}
