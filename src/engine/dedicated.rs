//! The dedicated mode: a thread owns the poller and never sleeps; calls hand over and wait.

use super::poller_lock::LockOutcome;
use super::shared_poller::{Engine, Unusable};
use super::submission_queue::SubmissionConsumer;
use super::{Handler, Poller, WaitStrategy};
use crate::fabric::Port;
use crate::wire::Time;

/// Wishes that come back at a time, for which there is room from the start.
const EARLY: usize = 64;

impl<P: Port, H: Handler<P>> Engine<P, H> {
    /// Hands a command over to the thread.
    pub(super) fn submit_to_thread(&self, op: H::Command) -> Result<(), Unusable> {
        let mut op = op;
        let mut round = 0;
        loop {
            self.check()?;
            match self.submissions.submit(op) {
                // The call of a command that nobody takes any more is told by the command's end.
                Ok(()) => {
                    self.submissions.drop_if_closed();
                    return Ok(());
                }
                Err(back) => op = back,
            }
            self.wait.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Waits while the thread makes progress.
    pub(super) fn wait_for_thread(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        let mut round = 0;
        loop {
            for _ in 0..self.wait.polls() {
                if done() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            self.check()?;
            if self.clock.now() >= deadline {
                return Ok(done());
            }
            self.wait.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// What the thread does until the engine is closed.
    pub(super) fn run_dedicated(&self) {
        let mut consumer = SubmissionConsumer::new();
        let mut early = Vec::with_capacity(EARLY);
        let mut work = |slot: &mut Option<Poller<P, H>>| {
            let Some(poller) = slot else { return };
            while !self.background.is_closing() {
                let now = self.clock.now();
                let waited = early.len();
                consumer.take(&self.submissions, |op| early.extend(poller.command(op, now)));
                // Since they came, all lanes were emptied: what they are about is there, or has ended.
                early.drain(..waited).for_each(|op| drop(poller.command(op, now)));
                if poller.step(now) == 0 && self.wait == WaitStrategy::Yield {
                    std::thread::yield_now();
                }
            }
            // Whoever made these submissions is told by their end.
            consumer.take(&self.submissions, drop);
        };
        // A call that began in another mode may still have the poller for a moment. Poisoned or closed: every call on
        // the engine says so.
        while let Ok(LockOutcome::Busy) = self.with_slot(&mut work) {
            std::thread::yield_now();
        }
        self.submissions.close(consumer);
    }
}
