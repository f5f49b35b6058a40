//! The adaptive mode: calls make progress, and sleep while nothing comes; a thread, the keeper, does while no call
//! is under way.
//!
//! A thread in a call *attends*: what comes does not wake the keeper then. To sleep, a thread arms the port, which
//! costs a barrier in all threads of all peers; that is worth it for who sleeps, but not for who leaves a call and will
//! soon be back in the next. So a call that leaves the port unarmed has the keeper *watch*: the keeper looks now and
//! then whether calls go on, and takes over, arms the port and sleeps as soon as they do not.

use super::poller_lock::LockOutcome;
use super::shared_poller::{Engine, Unusable};
use super::{Handler, PollMode, Poller};
use crate::fabric::{Port, Sleep, Sleeper};
use crate::wire::Time;
use std::time::Duration;

/// Steps between two looks at the clock.
const LOOKS: u32 = 4;
/// How often who finds nothing gives its CPU away, at least, before it sleeps.
const YIELDS: u32 = 16;
/// How long no call must have been under way for the keeper to take over.
const WATCH: Duration = Duration::from_millis(1);
/// The longest sleep. Nothing depends on it: it bounds what a peer could gain that takes back its rings.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);

/// While it lives, what comes does not wake the keeper.
pub(super) struct ActiveWaiter<'a, P: Port, H: Handler<P>> {
    engine: &'a Engine<P, H>,
}

impl<P: Port, H: Handler<P>> Engine<P, H> {
    pub(super) fn active_waiter(&self) -> ActiveWaiter<'_, P, H> {
        self.sleeper.enter_wait();
        ActiveWaiter { engine: self }
    }

    pub(super) fn wait_adaptive(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        let _waiting = self.active_waiter();
        let (mut quiet_since, mut idle) = (self.clock.now(), 0);
        loop {
            let now = self.clock.now();
            let count = self.look(now, LOOKS, done)?;
            if done() {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
            if count > 0 {
                (quiet_since, idle) = (now, 0);
            } else if idle < YIELDS || now.since(quiet_since) < self.spin {
                // Whoever brings what this waits for may need this CPU.
                std::thread::yield_now();
                idle += 1;
            } else {
                self.sleep_as_waiter(deadline, done)?;
                (quiet_since, idle) = (self.clock.now(), 0);
            }
        }
    }

    fn sleep_as_waiter(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<(), Unusable> {
        let seen = self.sleeper.seen();
        let (mut armed, mut until) = (false, deadline);
        // Beside another owner nobody may sleep: one that only submits arms nothing when it lets go.
        self.with_poller(|poller| {
            armed = poller.arm();
            until = until.min(poller.next_deadline());
        })?;
        if !armed {
            return Ok(());
        }
        self.sleepers.sleep_unless(
            || done() || self.check().is_err(),
            || self.sleeper.sleep(Sleep::Waiter, seen, until.since(self.clock.now()).min(LONGEST_SLEEP)),
        );
        self.check()
    }

    /// What an owner does before it lets go.
    pub(super) fn before_unlock(&self, poller: &mut Poller<P, H>) {
        if poller.take_active() {
            self.nudge();
        }
        if self.background.sleeps_past(poller.next_deadline()) {
            self.sleeper.wake(Sleep::Background);
        }
    }

    /// Makes sure that somebody sees what comes from now on.
    fn leave(&self) {
        self.sleeper.exit_wait();
        let mut armed = false;
        // A port that is armed already only looks whether anybody has rung.
        let owned = self.with_poller(|poller| armed = poller.is_armed() && poller.arm());
        let settled = matches!(owned, Ok(LockOutcome::Ran)) && armed;
        if !settled && self.background.watch() {
            self.sleeper.wake(Sleep::Background);
        }
    }

    /// What the keeper does until the engine is closed or unusable.
    pub(super) fn run_adaptive(&self) {
        while self.check().is_ok() {
            let seen = self.sleeper.seen();
            let until = match self.background.calls_continue() {
                true => self.clock.now() + WATCH,
                false => match self.take_over() {
                    Some(until) => until,
                    // OneshotPool are under way again.
                    None => continue,
                },
            };
            self.sleeper.sleep(Sleep::Background, seen, until.since(self.clock.now()).min(LONGEST_SLEEP));
            self.background.set_awake();
        }
    }

    /// Makes progress until nothing comes any more and the port is armed; says when to look again. `None` if a call
    /// came in between.
    fn take_over(&self) -> Option<Time> {
        let mut quiet_since = self.clock.now();
        loop {
            let now = self.clock.now();
            let (mut count, mut until) = (0, None);
            let owned = self.with_poller(|poller| {
                for _ in 0..LOOKS {
                    count += poller.step(now);
                }
                if count == 0 && now.since(quiet_since) >= self.spin && poller.arm() {
                    // Known before another owner can bring an earlier deadline.
                    self.background.set_asleep_until(poller.next_deadline());
                    until = Some(poller.next_deadline());
                }
            });
            match owned {
                Ok(LockOutcome::Ran) if until.is_some() => return until,
                Ok(LockOutcome::Ran) => {
                    if count > 0 {
                        quiet_since = now;
                    }
                    std::thread::yield_now();
                }
                Ok(_) => {
                    self.background.watch();
                    return None;
                }
                Err(_) => return Some(Time::NEVER),
            }
        }
    }
}

impl<P: Port, H: Handler<P>> Drop for ActiveWaiter<'_, P, H> {
    fn drop(&mut self) {
        if self.engine.mode() == PollMode::Adaptive {
            self.engine.leave();
        }
    }
}
