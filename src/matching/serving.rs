//! The sending side: matches values with the requests of peers.

use super::{AskOutcome, Numbered, OfferOutcome, Outgoing, RemoteHandler, StepState, Waiter, WaitingRequest};
use crate::fabric::Port;
use crate::link::{Links, PeerRequestId, ServeOutcome, TensorKey, Value};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::Counter;
use crate::wire::{Code, Status, Time};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How much longer than at its peer a request waits here. A peer cancels its requests by itself.
/// This deadline is for peers that can't, and must not pass first.
const DEADLINE_MARGIN: Duration = Duration::from_millis(50);

impl RemoteHandler {
    /// Gives a value to the first waiting request, or queues it.
    pub(super) fn offer<P: Port>(&mut self, links: &mut Links<P, Waiter>, key: TensorKey, value: Value) {
        if self.may_hold(key.step) {
            let offered = self.outgoing.offer(&key, Outgoing::Value(value));
            self.match_up(links, &key, offered);
        } else {
            self.finished();
        }
    }

    /// Puts a returned entry at its place in line, or gives it to a waiting request.
    pub(super) fn put_back<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        value: Numbered<Outgoing>,
    ) {
        let offered = self.outgoing.put_back(key, value);
        self.match_up(links, key, offered);
    }

    /// Serves matched requests until one takes its entry.
    pub(super) fn match_up<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        mut offered: OfferOutcome<Outgoing, WaitingRequest>,
    ) {
        while let OfferOutcome::Matched(waiting, matched) = offered {
            offered = self.serve(links, key, waiting, matched);
        }
    }

    /// Answers a request with an entry of the line. If the request is gone, or the entry is void,
    /// returns the next match.
    fn serve<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        waiting: WaitingRequest,
        matched: Numbered<Outgoing>,
    ) -> OfferOutcome<Outgoing, WaitingRequest> {
        let (peer_request, number) = (waiting.peer_request, matched.number);
        let value = match matched.value {
            Outgoing::Value(value) => value,
            Outgoing::Stashed { link, .. } if link != peer_request.link => {
                // The value was in the stash of a peer whose link is gone. The request continues
                // with the next entry in line.
                self.next_deadline = self.next_deadline.min(waiting.deadline);
                return match self.outgoing.ask(key, waiting) {
                    AskOutcome::Matched(waiting, next) => OfferOutcome::Matched(waiting, next),
                    AskOutcome::Queued => OfferOutcome::Queued,
                };
            }
            Outgoing::Stashed { stash_id, .. } => {
                self.leave(&waiting);
                return match links.serve_stashed(peer_request, stash_id, number) {
                    true => OfferOutcome::Queued,
                    false => self.outgoing.put_back(key, matched),
                };
            }
        };
        self.leave(&waiting);
        let bytes = match &value {
            Value::Tensor(tensor) => tensor.meta().bytes(),
            Value::Dead => 0,
        };
        match links.serve(peer_request, value, number) {
            ServeOutcome::Copied => {
                sent(links, bytes);
                self.finished();
            }
            ServeOutcome::Posted => sent(links, bytes),
            ServeOutcome::Refused => self.finished(),
            ServeOutcome::Pinned => {}
            ServeOutcome::Gone(back) => {
                return self.outgoing.put_back(key, Numbered { number, value: Outgoing::Value(back) });
            }
        }
        OfferOutcome::Queued
    }

    /// Notes that a value has left this side for good.
    pub(super) fn finished(&self) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
    }

    #[allow(clippy::too_many_arguments)] // what the request says
    pub(super) fn asked<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        peer_request: PeerRequestId,
        key: &TensorKey,
        timeout_ms: u32,
        standing: bool,
        now: Time,
    ) {
        let Some(peer) = self.connections.peer_of(peer_request.link) else { return };
        let deferred = match self.steps.is_live(key.step) {
            true => false,
            false => match self.steps.state(key.step) {
                StepState::Live => false,
                // A standing request comes before its step begins, by design. The slots of the link
                // bound it.
                StepState::NotBegun => !standing,
                StepState::Aborted(status) => return links.refuse(peer_request, status.into_derived()),
                StepState::Gone => {
                    let message = format!("step {} was cleaned up at {}", key.step, self.me);
                    return links.refuse(peer_request, Status::new(Code::NotFound, message));
                }
            },
        };
        // The peer accepts only a value that is there now.
        let waits = timeout_ms > 0;
        if deferred && waits && self.deferred[peer.0 as usize] >= self.settings.max_deferred {
            let message = format!(
                "{} requests wait at {} for steps that have not begun there (this one for step {}), \
                 which is the limit: raise max_deferred",
                self.settings.max_deferred, self.me, key.step
            );
            return links.refuse(peer_request, Status::new(Code::ResourceExhausted, message));
        }
        let deadline = match timeout_ms {
            u32::MAX => Time::NEVER,
            ms if is_on(Mutant::DeadlineTooEarly) => now + Duration::from_millis(u64::from(ms) / 2),
            ms => now + Duration::from_millis(ms.into()) + DEADLINE_MARGIN,
        };
        match self.outgoing.ask(key, WaitingRequest { peer_request, peer, deadline, deferred }) {
            AskOutcome::Matched(waiting, matched) => {
                self.match_up(links, key, OfferOutcome::Matched(waiting, matched));
            }
            AskOutcome::Queued if !waits => {
                self.outgoing.remove_waiter(key, |waiting| waiting.peer_request == peer_request);
                let message = format!("{} has no value for {key} now", self.me);
                links.refuse(peer_request, Status::new(Code::DeadlineExceeded, message));
            }
            AskOutcome::Queued => {
                self.next_deadline = self.next_deadline.min(deadline);
                if deferred {
                    self.deferred[peer.0 as usize] += 1;
                    links.counters().increment(Counter::RequestsDeferred);
                }
            }
        }
    }

    /// Notes that a request of a peer has left the table.
    pub(super) fn leave(&mut self, waiting: &WaitingRequest) {
        if waiting.deferred {
            let deferred = &mut self.deferred[waiting.peer.0 as usize];
            *deferred = deferred.saturating_sub(1);
        }
    }
}

/// Counts a value that was sent.
pub(super) fn sent<P: Port>(links: &Links<P, Waiter>, bytes: u64) {
    links.counters().increment(Counter::TensorsSent);
    links.counters().add(Counter::BytesSent, bytes);
}
