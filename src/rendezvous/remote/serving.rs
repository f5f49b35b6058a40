//! The sending side: values and peers' requests meet.

use super::{Outgoing, RemoteHandler, WaitingRequest};
use crate::fabric::Port;
use crate::link::{Links, PeerRequestId, ServeOutcome, TensorKey, Value};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::steps::StepState;
use crate::rendezvous::table::{AskOutcome, Numbered, OfferOutcome};
use crate::rendezvous::waiter::Waiter;
use crate::telemetry::Counter;
use crate::wire::{Code, Status, Time};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How much longer than its peer a request waits. The peer says itself when it gives up; this end is for
/// requests of peers that can't any more, and must not come before theirs.
const DEADLINE_MARGIN: Duration = Duration::from_millis(50);

impl RemoteHandler {
    /// Gives a value to whoever waits for it, or keeps it.
    pub(super) fn offer<P: Port>(&mut self, links: &mut Links<P, Waiter>, key: TensorKey, value: Value) {
        if self.may_hold(key.step) {
            let offered = self.outgoing.offer(&key, Outgoing::Value(value));
            self.match_up(links, &key, offered);
        } else {
            self.finished();
        }
    }

    /// Puts what came back where it was in line, or gives it to whoever waits.
    pub(super) fn put_back<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        value: Numbered<Outgoing>,
    ) {
        let offered = self.outgoing.put_back(key, value);
        self.match_up(links, key, offered);
    }

    /// Serves the request that something was matched with, until there is one that takes it.
    pub(super) fn match_up<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        mut offered: OfferOutcome<Outgoing, WaitingRequest>,
    ) {
        while let OfferOutcome::Matched(asking, matched) = offered {
            offered = self.serve(links, key, asking, matched);
        }
    }

    /// Hands what is in line to a peer's request. Returns whom to serve with what next, if that request was gone, or
    /// what was in line.
    fn serve<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        asking: WaitingRequest,
        matched: Numbered<Outgoing>,
    ) -> OfferOutcome<Outgoing, WaitingRequest> {
        let (peer_request, number) = (asking.peer_request, matched.number);
        let value = match matched.value {
            Outgoing::Value(value) => value,
            Outgoing::Stashed { link, .. } if link != peer_request.link => {
                // It was held by the peer of a link that is gone. The request goes on with what is next in line.
                self.next_deadline = self.next_deadline.min(asking.deadline);
                return match self.outgoing.ask(key, asking) {
                    AskOutcome::Matched(asking, next) => OfferOutcome::Matched(asking, next),
                    AskOutcome::Queued => OfferOutcome::Queued,
                };
            }
            Outgoing::Stashed { stash_id, .. } => {
                self.leave(&asking);
                return match links.serve_stashed(peer_request, stash_id, number) {
                    true => OfferOutcome::Queued,
                    false => self.outgoing.put_back(key, matched),
                };
            }
        };
        self.leave(&asking);
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

    /// A value has left this side for good.
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
        let Some(peer) = self.peer_of(peer_request.link) else { return };
        let deferred = match self.steps.is_live(key.step) {
            true => false,
            false => match self.steps.state(key.step) {
                StepState::Live => false,
                // What is asked for in advance comes before its step by its nature. The slots of the link bound it.
                StepState::NotBegun => !standing,
                StepState::Aborted(status) => return links.refuse(peer_request, status.into_derived()),
                StepState::Gone => {
                    let message = format!("step {} was cleaned up at {}", key.step, self.me);
                    return links.refuse(peer_request, Status::new(Code::NotFound, message));
                }
            },
        };
        // The peer wants a value that is there now.
        let waits = timeout_ms > 0;
        if deferred && waits && self.peer(peer).deferred >= self.settings.max_deferred {
            let message = format!(
                "{} requests wait at {} for steps that have not begun there (this one for step {}), which is the limit: raise max_deferred",
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
            AskOutcome::Matched(asking, matched) => {
                self.match_up(links, key, OfferOutcome::Matched(asking, matched));
            }
            AskOutcome::Queued if !waits => {
                self.outgoing.remove_waiter(key, |asking| asking.peer_request == peer_request);
                let message = format!("{} has no value for {key} now", self.me);
                links.refuse(peer_request, Status::new(Code::DeadlineExceeded, message));
            }
            AskOutcome::Queued => {
                self.next_deadline = self.next_deadline.min(deadline);
                if deferred {
                    self.peer(peer).deferred += 1;
                    links.counters().increment(Counter::RequestsDeferred);
                }
            }
        }
    }

    /// A peer's request has left the table.
    pub(super) fn leave(&mut self, asking: &WaitingRequest) {
        if asking.deferred {
            let peer = self.peer(asking.peer);
            peer.deferred = peer.deferred.saturating_sub(1);
        }
    }
}

/// Counts a value that is on its way to its peer.
pub(super) fn sent<P: Port>(links: &Links<P, Waiter>, bytes: u64) {
    links.counters().increment(Counter::TensorsSent);
    links.counters().add(Counter::BytesSent, bytes);
}
