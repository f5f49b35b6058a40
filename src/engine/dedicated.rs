//! The dedicated mode: a thread owns the poller and never sleeps; calls hand over and wait.

use super::handover::Taker;
use super::shared::{Engine, Unusable};
use super::token::Owned;
use super::{Handler, Poller, Waiting};
use crate::fabric::Port;
use crate::wire::Time;

/// Wishes that come back at a time, for which there is room from the start.
const EARLY: usize = 64;

impl<P: Port, H: Handler<P>> Engine<P, H> {
    /// Hands a wish over to the thread.
    pub(super) fn give(&self, op: H::Op) -> Result<(), Unusable> {
        let mut op = op;
        let mut round = 0;
        loop {
            self.check()?;
            match self.wishes.give(op) {
                // The call of a wish that nobody takes any more is told by the wish's end.
                Ok(()) => {
                    self.wishes.drop_if_closed();
                    return Ok(());
                }
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
        let mut early = Vec::with_capacity(EARLY);
        let mut work = |slot: &mut Option<Poller<P, H>>| {
            let Some(poller) = slot else { return };
            while !self.keeper.is_closing() {
                let now = self.clock.now();
                let waited = early.len();
                taker.take(&self.wishes, |op| early.extend(poller.op(op, now)));
                // Since they came, all lanes were emptied: what they are about is there, or has ended.
                early.drain(..waited).for_each(|op| drop(poller.op(op, now)));
                if poller.step(now) == 0 && self.waiting == Waiting::Yield {
                    std::thread::yield_now();
                }
            }
            // Whoever made these wishes is told by their end.
            taker.take(&self.wishes, drop);
        };
        // A call that began in another mode may still have the poller for a moment. Poisoned or closed: every call on
        // the engine says so.
        while let Ok(Owned::Busy) = self.own_slot(&mut work) {
            std::thread::yield_now();
        }
        self.wishes.close(taker);
    }
}
