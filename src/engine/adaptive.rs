//! The adaptive mode: calls make progress, and sleep while nothing comes; a thread, the keeper, does while no call
//! is under way.
//!
//! A thread in a call *attends*: what comes does not wake the keeper then. Whoever stops attending leaves the port armed,
//! so that what comes later wakes the keeper, or wakes it at once.

use super::shared::{Engine, Unusable};
use super::token::Owned;
use super::{Handler, Mode, Poller};
use crate::fabric::{Port, Sleep, Sleeper};
use crate::wire::Time;
use std::time::Duration;

/// Steps between two looks at the clock.
const LOOKS: u32 = 4;
/// Steps that a leaving call makes to get the port armed before it leaves that to the keeper.
const LAST_LOOKS: u32 = 4;
/// The longest sleep. Nothing depends on it: it bounds what a peer could gain that takes back its rings.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);

/// While it lives, what comes does not wake the keeper.
pub(super) struct Attendance<'a, P: Port, H: Handler<P>> {
    engine: &'a Engine<P, H>,
}

impl<P: Port, H: Handler<P>> Engine<P, H> {
    pub(super) fn attend(&self) -> Attendance<'_, P, H> {
        self.sleeper.attend();
        Attendance { engine: self }
    }

    pub(super) fn wait_adaptive(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        let _attendance = self.attend();
        let mut quiet_since = self.clock.now();
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
                quiet_since = now;
            } else if now.since(quiet_since) >= self.spin {
                self.sleep_as_waiter(deadline, done)?;
                quiet_since = self.clock.now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn sleep_as_waiter(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<(), Unusable> {
        let seen = self.sleeper.seen();
        let (mut armed, mut until) = (true, deadline);
        // Another owner will complete what this thread waits for, or arm the port when it leaves.
        self.own(|poller| {
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
    pub(super) fn after_own(&self, poller: &mut Poller<P, H>) {
        if poller.take_active() {
            self.nudge();
        }
        if self.keeper.sleeps_beyond(poller.next_deadline()) {
            self.sleeper.wake(Sleep::Keeper);
        }
    }

    /// Makes sure that somebody sees what comes from now on.
    fn leave(&self) {
        self.sleeper.leave();
        let mut armed = false;
        for _ in 0..LAST_LOOKS {
            let now = self.clock.now();
            let owned = self.own(|poller| {
                armed = poller.arm();
                if !armed {
                    poller.step(now);
                }
            });
            match owned {
                Ok(Owned::Ran) if armed => return,
                Ok(_) => std::hint::spin_loop(),
                Err(_) => return,
            }
        }
        self.sleeper.wake(Sleep::Keeper);
    }

    /// What the keeper does until the engine is closed or unusable.
    pub(super) fn keep(&self) {
        let mut quiet_since = self.clock.now();
        while self.check().is_ok() {
            let seen = self.sleeper.seen();
            let now = self.clock.now();
            let (mut count, mut until, mut armed) = (0, Time::NEVER, true);
            let owned = self.own(|poller| {
                for _ in 0..LOOKS {
                    count += poller.step(now);
                }
                if count == 0 && now.since(quiet_since) >= self.spin {
                    armed = poller.arm();
                    until = poller.next_deadline();
                    self.keeper.sleeps_until(until);
                } else {
                    armed = false;
                }
            });
            match owned {
                // A call is under way, and arms the port or wakes this thread when it leaves.
                Ok(Owned::Busy) => self.keeper.sleeps_until(Time::NEVER),
                Ok(_) if !armed => {
                    if count > 0 {
                        quiet_since = now;
                    }
                    continue;
                }
                Ok(_) => {}
                Err(_) => return,
            }
            if self.keeper.is_closing() {
                return;
            }
            self.sleeper.sleep(Sleep::Keeper, seen, until.since(self.clock.now()).min(LONGEST_SLEEP));
            self.keeper.is_awake();
            quiet_since = self.clock.now();
        }
    }
}

impl<P: Port, H: Handler<P>> Drop for Attendance<'_, P, H> {
    fn drop(&mut self) {
        if self.engine.mode() == Mode::Adaptive {
            self.engine.leave();
        }
    }
}
