//! The sending side: values and peers' requests meet.

use super::{Asking, Remote};
use crate::fabric::Port;
use crate::link::{Incoming, Links, Served, TensorKey, Value};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::steps::StepState;
use crate::rendezvous::table::{Asked, Offered, Table};
use crate::rendezvous::waiter::Waiter;
use crate::telemetry::Counter;
use crate::wire::{Code, Status, Time};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How much longer than its peer a request waits. The peer says itself when it gives up; this end is for
/// requests of peers that can't any more, and must not come before theirs.
const SLACK: Duration = Duration::from_millis(50);

/// [`Table::offer`] or [`Table::put_back`].
type Offer = fn(&mut Table<Value, Asking>, &TensorKey, Value) -> Offered<Value, Asking>;

impl Remote {
    pub(super) fn offer<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: &TensorKey,
        mut value: Value,
        offer: Offer,
    ) {
        loop {
            match offer(&mut self.outgoing, key, value) {
                Offered::Kept => return,
                Offered::Matched(asking, matched) => {
                    self.leave(&asking);
                    match self.serve(links, asking.incoming, matched) {
                        None => return,
                        // That request was gone; the next one in line gets the value.
                        Some(back) => value = back,
                    }
                }
            }
        }
    }

    /// Hands a value to a peer's request. Returns it if the request is gone.
    pub(super) fn serve<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        incoming: Incoming,
        value: Value,
    ) -> Option<Value> {
        let bytes = match &value {
            Value::Tensor(tensor) => tensor.meta().bytes(),
            Value::Dead => 0,
        };
        match links.serve(incoming, value) {
            Served::Copied => {
                sent(links, bytes);
                self.finished();
            }
            Served::Posted => sent(links, bytes),
            Served::Kept => {}
            Served::Gone(back) => return Some(back),
        }
        None
    }

    /// A value has left this side for good.
    pub(super) fn finished(&self) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn asked<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        incoming: Incoming,
        key: &TensorKey,
        timeout_ms: u32,
        now: Time,
    ) {
        let Some(peer) = self.peer_of(incoming.link) else { return };
        let deferred = match self.steps.is_live(key.step) {
            true => false,
            false => match self.steps.state(key.step) {
                StepState::Live => false,
                StepState::NotBegun => true,
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
            Asked::Matched(asking, value) => {
                if let Some(back) = self.serve(links, asking.incoming, value) {
                    self.offer(links, key, back, Table::put_back);
                }
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
