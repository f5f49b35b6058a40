//! The dedicated mode: a background poller holds the poller and never sleeps. Calls submit commands
//! and wait.

use super::shared_poller::{Engine, Unusable};
use super::submission_queue::SubmissionConsumer;
use super::{Poller, WaitStrategy};
use crate::fabric::Port;
use crate::link::Handler;
use crate::sync::LockOutcome;
use crate::wire::Time;

/// Capacity for returned commands that is allocated at the start.
const RETURNED: usize = 64;

impl<P: Port, H: Handler<P>> Engine<P, H> {
    /// Submits a command to the background poller.
    pub(super) fn submit_to_thread(&self, command: H::Command) -> Result<(), Unusable> {
        let mut command = command;
        let mut round = 0;
        loop {
            self.check()?;
            match self.submissions.submit(command) {
                // Dropping a command ends its call: its one-shot sender goes with it.
                Ok(()) => {
                    self.submissions.drop_if_closed();
                    return Ok(());
                }
                Err(back) => command = back,
            }
            self.wait.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Waits while the background poller makes progress.
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

    /// The loop of the background poller, until the engine is closed.
    pub(super) fn run_dedicated(&self) {
        let mut consumer = SubmissionConsumer::new();
        let mut returned = Vec::with_capacity(RETURNED);
        let mut work = |cell: &mut Option<Poller<P, H>>| {
            let Some(poller) = cell else { return };
            while !self.is_closing() {
                let now = self.clock.now();
                let waited = returned.len();
                consumer.take(&self.submissions, |command| returned.extend(poller.command(command, now)));
                // All lanes were drained since these commands were returned. What they refer to
                // exists by now, or has ended.
                returned.drain(..waited).for_each(|command| drop(poller.command(command, now)));
                if poller.step(now) == 0 && self.wait == WaitStrategy::Yield {
                    std::thread::yield_now();
                }
            }
            // Dropping a command ends its call.
            consumer.take(&self.submissions, drop);
        };
        // Only `close` may hold the lock, before this thread has begun. Then there is no work.
        while let Ok(LockOutcome::Busy) = self.with_cell(&mut work) {
            std::thread::yield_now();
        }
        self.submissions.close(consumer);
    }
}
