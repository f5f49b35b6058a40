//! The end of calls and steps.

use super::{Cancel, CancelReason, Error, Outgoing, RemoteHandler, StepChange, Waiter};
use crate::fabric::Port;
use crate::link::{CancelDecision, Links};
use crate::mutants::{Mutant, is_on};
use crate::wire::{Code, Status, TaskId, Time};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl RemoteHandler {
    pub(super) fn cancel<P: Port>(&mut self, links: &mut Links<P, Waiter>, cancel: &Cancel, now: Time) {
        let Some((link, request)) = self.calls.get(&cancel.id).copied() else { return };
        let cancel_deadline = now + self.settings.cancel_grace;
        let mut next = self.next_deadline;
        let calls = &mut self.calls;
        links.cancel_request(link, request, &mut |_, slot| {
            let Some(waiter) = slot.as_mut().filter(|waiter| waiter.id == cancel.id) else {
                return CancelDecision::Keep;
            };
            if matches!(cancel.why, CancelReason::Dropped) && !is_on(Mutant::DroppedReceiveEats) {
                calls.remove(&cancel.id);
                *slot = None;
            } else if waiter.cancel_reason.is_none() {
                waiter.cancel_reason = Some(cancel.why.clone());
                waiter.deadline = cancel_deadline;
                next = next.min(cancel_deadline);
            }
            CancelDecision::Cancel
        });
        self.next_deadline = next;
    }

    pub(super) fn step_changed<P: Port>(&mut self, links: &mut Links<P, Waiter>, change: StepChange) {
        match change {
            StepChange::Sequence { base } => self.steps.sequence(base),
            StepChange::Begun { step, worker } => {
                // The rendezvous has checked that the step may begin.
                let _ = self.steps.begin(step, &worker);
                self.undefer(step);
                self.extend_standing(links, step);
            }
            StepChange::Aborted { steps, status } => {
                if steps.start() == steps.end() {
                    // The begin command of another thread may still be queued. It changes nothing
                    // then.
                    let _ = self.steps.begin(*steps.start(), &Arc::from(""));
                    self.steps.abort(*steps.start(), status.clone());
                } else {
                    self.steps.abort_all(&steps, &status);
                }
                let error = |step: u64| Error::Aborted { step: step.into(), status: status.clone() };
                self.end_steps(links, &steps, error, |_| status.clone().into_derived());
            }
            StepChange::CleanedUp { step } => {
                self.steps.cleanup(step);
                let status =
                    |me: &TaskId| Status::new(Code::NotFound, format!("step {step} was cleaned up at {me}"));
                self.end_steps(links, &(step..=step), |step| Error::StepGone { step: step.into() }, status);
            }
        }
    }

    /// Makes the deferred requests of a step ordinary ones.
    pub(super) fn undefer(&mut self, step: u64) {
        if self.deferred.iter().all(|deferred| *deferred == 0) {
            return;
        }
        if is_on(Mutant::DeferredDropped) {
            drop(self.outgoing.remove_waiters(|key, waiting| key.step == step && waiting.deferred));
        }
        let waiting = self.outgoing.waiters_mut().filter(|(key, _)| key.step == step);
        for (_, waiting) in waiting {
            if std::mem::take(&mut waiting.deferred) {
                let deferred = &mut self.deferred[waiting.peer.0 as usize];
                *deferred = deferred.saturating_sub(1);
            }
        }
    }

    fn end_steps<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        steps: &RangeInclusive<u64>,
        error: impl Fn(u64) -> Error,
        status: impl Fn(&TaskId) -> Status,
    ) {
        links.begin_batch();
        let (values, waiting) = self.outgoing.remove_steps(|kept| steps.contains(&kept));
        let ours = values.iter().filter(|value| matches!(value, Outgoing::Value(_))).count();
        self.outstanding.fetch_sub(ours, Ordering::Relaxed);
        for (_, waiting) in waiting {
            self.leave(&waiting);
            links.refuse(waiting.peer_request, status(&self.me));
        }
        self.drop_orphans(|key| steps.contains(&key.step));
        links.drop_stashed(steps);
        self.fail_queued(|key| error(key.step), |_, key| steps.contains(&key.step));
        let calls = &mut self.calls;
        for link in links.ids() {
            links.cancel_requests(link, &mut |key, waiter| {
                if !steps.contains(&key.step) || is_on(Mutant::AbortMissesWaiter) {
                    return CancelDecision::Keep;
                }
                if let Some(waiter) = waiter.take() {
                    calls.remove(&waiter.id);
                    waiter.complete(Err(error(key.step)));
                }
                CancelDecision::Abandon
            });
        }
    }

    /// Ends every wait whose deadline has passed, and computes the next deadline.
    pub(super) fn expire_waiting<P: Port>(&mut self, links: &mut Links<P, Waiter>, now: Time) {
        links.begin_batch();
        self.expire_queued(now);
        let mut next = self.queued.next_deadline();
        let cancel_deadline = now + self.settings.cancel_grace;
        let calls = &mut self.calls;
        for link in links.ids() {
            links.cancel_requests(link, &mut |key, slot| {
                let Some(waiter) = slot else { return CancelDecision::Keep };
                if now < waiter.deadline || is_on(Mutant::DeadlineNeverFires) {
                    next = next.min(waiter.deadline);
                    return CancelDecision::Keep;
                }
                if waiter.cancel_reason.is_none() {
                    waiter.cancel_reason = Some(CancelReason::Deadline(None));
                    waiter.deadline = cancel_deadline;
                    next = next.min(cancel_deadline);
                } else if let Some(waiter) = slot.take() {
                    // The peer has not acknowledged the cancel in time. The waiter is told now.
                    calls.remove(&waiter.id);
                    waiter.fail_cancelled(key);
                }
                CancelDecision::Cancel
            });
        }
        let late = self.outgoing.remove_waiters(|_, waiting| waiting.deadline <= now);
        for (key, waiting) in late {
            self.leave(&waiting);
            let message = format!("nothing was sent for {key} at {} in time", self.me);
            links.refuse(waiting.peer_request, Status::new(Code::DeadlineExceeded, message));
        }
        for (_, waiting) in self.outgoing.waiters() {
            next = next.min(waiting.deadline);
        }
        self.next_deadline = next;
    }
}
