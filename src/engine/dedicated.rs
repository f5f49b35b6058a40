//! The dedicated mode: a thread owns the poller and never sleeps; calls hand over and wait.

use super::handover::Taker;
use super::shared::{Engine, Unusable};
use super::{Handler, Waiting};
use crate::fabric::Port;
use crate::wire::Time;

impl<P: Port, H: Handler<P>> Engine<P, H> {
    /// Hands a wish over to the thread.
    pub(super) fn give(&self, op: H::Op) -> Result<(), Unusable> {
        let mut op = op;
        let mut round = 0;
        loop {
            self.check()?;
            match self.wishes.give(op) {
                Ok(()) => return Ok(()),
                Err(back) => op = back,
            }
            self.waiting.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Waits while the thread makes progress.
    pub(super) fn wait_for_thread(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        let mut round = 0;
        loop {
            for _ in 0..self.waiting.looks() {
                if done() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            self.check()?;
            if self.clock.now() >= deadline {
                return Ok(done());
            }
            self.waiting.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// What the thread does until the engine is closed.
    pub(super) fn drive(&self) {
        let mut taker = Taker::new();
        // Poisoned or closed: every call on the engine says so.
        let _ = self.own_slot(|slot| {
            let Some(poller) = slot else { return };
            while !self.keeper.is_closing() {
                let now = self.clock.now();
                taker.take(&self.wishes, |op| poller.op(op, now));
                if poller.step(now) == 0 && self.waiting == Waiting::Yield {
                    std::thread::yield_now();
                }
            }
            // What was handed over before the end is not lost without a word: its calls end.
            taker.take(&self.wishes, drop);
        });
    }
}
