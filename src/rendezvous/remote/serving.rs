//! The sending side: values and peers' requests meet.

use super::{Asking, Outgoing, Remote};
use crate::fabric::Port;
use crate::link::{Incoming, Links, Served, TensorKey, Value};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::steps::StepState;
use crate::rendezvous::table::{Asked, Numbered, Offered};
use crate::rendezvous::waiter::Waiter;
use crate::telemetry::Counter;
use crate::wire::{Code, Status, Time};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How much longer than its peer a request waits. The peer says itself when it gives up; this end is for
/// requests of peers that can't any more, and must not come before theirs.
const SLACK: Duration = Duration::from_millis(50);

impl Remote {
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
        mut offered: Offered<Outgoing, Asking>,
    ) {
        while let Offered::Matched(asking, matched) = offered {
            offered = self.serve(links, key, asking, matched);
        }
    }

    /// Hands what is in line to a peer's request. Returns whom to serve with what next, if that request was gone, or
    /// what was in line.
    fn serve<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        asking: Asking,
        matched: Numbered<Outgoing>,
    ) -> Offered<Outgoing, Asking> {
        let (incoming, number) = (asking.incoming, matched.number);
        let value = match matched.value {
            Outgoing::Value(value) => value,
            Outgoing::Held { link, .. } if link != incoming.link => {
                // It was held by the peer of a link that is gone. The request goes on with what is next in line.
                self.next_deadline = self.next_deadline.min(asking.deadline);
                return match self.outgoing.ask(key, asking) {
                    Asked::Matched(asking, next) => Offered::Matched(asking, next),
                    Asked::Kept => Offered::Kept,
                };
            }
            Outgoing::Held { held, .. } => {
                self.leave(&asking);
                return match links.serve_held(incoming, held, number) {
                    true => Offered::Kept,
                    false => self.outgoing.put_back(key, matched),
                };
            }
        };
        self.leave(&asking);
        let bytes = match &value {
            Value::Tensor(tensor) => tensor.meta().bytes(),
            Value::Dead => 0,
        };
        match links.serve(incoming, value, number) {
            Served::Copied => {
                sent(links, bytes);
                self.finished();
            }
            Served::Posted => sent(links, bytes),
            Served::Refused => self.finished(),
            Served::Kept => {}
            Served::Gone(back) => {
                return self.outgoing.put_back(key, Numbered { number, value: Outgoing::Value(back) });
            }
        }
        Offered::Kept
    }

    /// A value has left this side for good.
    pub(super) fn finished(&self) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
    }

    #[allow(clippy::too_many_arguments)] // what the request says
    pub(super) fn asked<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        incoming: Incoming,
        key: &TensorKey,
        timeout_ms: u32,
        armed: bool,
        now: Time,
    ) {
        let Some(peer) = self.peer_of(incoming.link) else { return };
        let deferred = match self.steps.is_live(key.step) {
            true => false,
            false => match self.steps.state(key.step) {
                StepState::Live => false,
                // What is asked for in advance comes before its step by its nature. The slots of the link bound it.
                StepState::NotBegun => !armed,
                StepState::Aborted(status) => return links.refuse(incoming, status.into_derived()),
                StepState::Gone => {
                    let message = format!("step {} was cleaned up at {}", key.step, self.me);
                    return links.refuse(incoming, Status::new(Code::NotFound, message));
                }
            },
        };
        if deferred && self.peer(peer).deferred >= self.settings.max_deferred {
            let message = format!(
                "{} requests wait at {} for steps that have not begun there (this one for step {}), which is the limit: raise max_deferred",
                self.settings.max_deferred, self.me, key.step
            );
            return links.refuse(incoming, Status::new(Code::ResourceExhausted, message));
        }
        let deadline = match timeout_ms {
            u32::MAX => Time::NEVER,
            ms if is_on(Mutant::DeadlineTooEarly) => now + Duration::from_millis(u64::from(ms) / 2),
            ms => now + Duration::from_millis(ms.into()) + SLACK,
        };
        match self.outgoing.ask(key, Asking { incoming, peer, deadline, deferred }) {
            Asked::Matched(asking, matched) => {
                self.match_up(links, key, Offered::Matched(asking, matched));
            }
            Asked::Kept => {
                self.next_deadline = self.next_deadline.min(deadline);
                if deferred {
                    self.peer(peer).deferred += 1;
                    links.counters().increment(Counter::RequestsDeferred);
                }
            }
        }
    }

    /// A peer's request has left the table.
    pub(super) fn leave(&mut self, asking: &Asking) {
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
