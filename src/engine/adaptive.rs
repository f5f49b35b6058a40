//! The adaptive mode: calls make progress and sleep while nothing comes. A background poller does
//! so while no call is under way.
//!
//! A thread in a call is an *active waiter*: while there is one, arrivals do not wake the
//! background poller. To sleep, a thread arms the port, which costs a barrier in all threads of all
//! peers. A thread that sleeps pays that. A thread that leaves a call does not, as its next call is
//! likely to follow soon. A call that leaves the port unarmed puts the background poller on
//! *standby*: it checks now and then whether calls continue. As soon as they do not, it takes over,
//! arms the port and sleeps.

use super::shared_poller::{Engine, Unusable};
use super::{PollMode, Poller};
use crate::fabric::{Port, Sleep, Sleeper};
use crate::link::Handler;
use crate::sync::LockOutcome;
use crate::wire::Time;
use std::time::Duration;

/// Polls between two reads of the clock.
const POLLS: u32 = 4;
/// Times in a row, at least, that a thread yields its CPU before it sleeps.
const YIELDS: u32 = 16;
/// Time between two checks on standby: without a call in it, the background poller takes over.
const STANDBY: Duration = Duration::from_millis(1);
/// The longest sleep. No wake-up depends on it: it bounds the harm of a peer that withdraws its
/// doorbell rings.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);

/// A guard of a call: while it lives, arrivals do not wake the background poller.
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
            let count = self.poll_until(now, POLLS, done)?;
            if done() {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
            if count > 0 {
                (quiet_since, idle) = (now, 0);
            } else if idle < YIELDS || now.since(quiet_since) < self.spin {
                // The thread or process that this call waits for may need this CPU.
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
        // A thread that finds the lock taken may not sleep: a holder that only submits does not arm
        // the port.
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

    /// Runs before the lock is released.
    pub(super) fn before_unlock(&self, poller: &mut Poller<P, H>) {
        if poller.take_active() {
            self.nudge();
        }
        if self.background.sleeps_past(poller.next_deadline()) {
            self.sleeper.wake(Sleep::Background);
        }
    }

    /// Makes sure that some thread sees what comes from now on.
    fn leave(&self) {
        self.sleeper.exit_wait();
        let mut armed = false;
        // Arming an armed port only checks whether a peer has rung.
        let outcome = self.with_poller(|poller| armed = poller.is_armed() && poller.arm());
        let handled = matches!(outcome, Ok(LockOutcome::Ran)) && armed;
        if !handled && self.background.enter_standby() {
            self.sleeper.wake(Sleep::Background);
        }
    }

    /// The loop of the background poller, until the engine is closed or unusable.
    pub(super) fn run_adaptive(&self) {
        while self.check().is_ok() {
            let seen = self.sleeper.seen();
            let until = match self.background.calls_continue() {
                true => self.clock.now() + STANDBY,
                false => match self.take_over() {
                    Some(until) => until,
                    // Calls are under way again.
                    None => continue,
                },
            };
            self.sleeper.sleep(Sleep::Background, seen, until.since(self.clock.now()).min(LONGEST_SLEEP));
            self.background.set_awake();
        }
    }

    /// Makes progress until nothing comes any more and the port is armed. Returns the time of the
    /// next poll, or `None` if a call took the lock meanwhile.
    fn take_over(&self) -> Option<Time> {
        let mut quiet_since = self.clock.now();
        loop {
            let now = self.clock.now();
            let (mut count, mut until) = (0, None);
            let outcome = self.with_poller(|poller| {
                for _ in 0..POLLS {
                    count += poller.step(now);
                }
                if count == 0 && now.since(quiet_since) >= self.spin && poller.arm() {
                    // Set under the lock: a later holder with an earlier deadline must see it.
                    self.background.set_asleep_until(poller.next_deadline());
                    until = Some(poller.next_deadline());
                }
            });
            match outcome {
                Ok(LockOutcome::Ran) if until.is_some() => return until,
                Ok(LockOutcome::Ran) => {
                    if count > 0 {
                        quiet_since = now;
                    }
                    std::thread::yield_now();
                }
                Ok(_) => {
                    self.background.enter_standby();
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
