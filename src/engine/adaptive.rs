//! The adaptive mode: calls make progress and sleep while nothing comes. A background poller does
//! so while no call is under way.
//!
//! A thread sleeps on the *armed* port, and what comes then wakes it. To arm the port costs a
//! barrier in all threads of all peers. A thread that sleeps pays that. A thread that leaves a call
//! does not, as its next call is likely to follow soon. A call that leaves the port unarmed puts
//! the background poller on *standby*. The background poller then checks now and then whether calls
//! have polled the port. As soon as they have not, it takes over, arms the port and sleeps on it.
//!
//! So while the port is unarmed and no call is under way, the background poller is awake or on
//! standby. A [direct call](super::direct) relies on that: it may leave what it likes on a port on
//! which nobody sleeps.

use super::background::sleep_on_standby;
use super::shared_poller::{Engine, Unusable};
use super::{Poller, WaitStrategy};
use crate::fabric::{Port, Sleep, Sleeper};
use crate::link::Handler;
use crate::sync::LockOutcome;
use crate::telemetry::Counter;
use crate::wire::Time;
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Polls between two reads of the clock.
const POLLS: u32 = 4;
/// Times in a row, at least, that a thread yields its CPU before it sleeps.
const YIELDS: u32 = 16;
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

    pub(super) fn progress_adaptive(&self) -> Result<usize, Unusable> {
        let step = |poller: &mut Poller<P, H>| (!self.sleeps()).then(|| poller.step(self.clock.now()));
        if let Some(Some(count)) = self.with_poller_once(step)? {
            return Ok(count);
        }
        let mut count = 0;
        let _guard = self.active_waiter();
        let now = self.clock.now();
        self.with_poller(|poller| count += poller.step(now))?;
        Ok(count)
    }

    pub(super) fn wait_adaptive(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        let _waiting = self.active_waiter();
        let (mut quiet_since, mut idle) = self.begin_quiet();
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

    /// The time since when a wait that begins now has polled in vain, and how often it has yielded.
    fn begin_quiet(&self) -> (Time, u32) {
        let since = self.spun_since.load(Ordering::Relaxed);
        if since == 0 {
            return (self.clock.now(), 0);
        }
        // Its direct wait has spun.
        self.spun_since.store(0, Ordering::Relaxed);
        // A thread that yields to one that computes waits for a whole time slice. A thread that
        // sleeps runs as soon as it is woken.
        let yields = if self.wait == WaitStrategy::Spin { YIELDS } else { 0 };
        (Time::from_nanos(since), yields)
    }

    fn sleep_as_waiter(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<(), Unusable> {
        let seen = self.sleeper.seen();
        let (armed, until) = (Cell::new(false), Cell::new(deadline));
        // A thread that finds the lock taken may not sleep: a holder that only submits does not arm
        // the port.
        let arm = |poller: &mut Poller<P, H>| {
            armed.set(poller.arm());
            until.set(deadline.min(poller.next_deadline()));
        };
        self.sleepers.sleep_unless(
            || self.with_poller(arm).is_err() || !armed.get() || done() || self.check().is_err(),
            || {
                let timeout = until.get().since(self.clock.now()).min(LONGEST_SLEEP);
                self.sleeper.sleep(Sleep::Waiter, seen, timeout);
            },
        );
        self.check()
    }

    /// Runs before the lock is released.
    pub(super) fn before_unlock(&self, poller: &mut Poller<P, H>) {
        if self.sleepers.any() {
            // The next poll, which would send what was put off, may be far.
            poller.before_poll();
        }
        if poller.take_active() {
            self.nudge();
        }
        if self.sleepers.background_sleeps_past(poller.next_deadline().as_nanos()) {
            self.sleeper.wake(Sleep::Background);
        }
    }

    /// Makes sure that some thread sees what comes from now on.
    fn leave(&self) {
        self.sleeper.exit_wait();
        if !self.sleepers.is_background_asleep() {
            // It takes over once calls do not poll any more.
            return;
        }
        let mut armed = false;
        // Arming an armed port only checks whether a peer has rung.
        let outcome = self.with_poller(|poller| armed = poller.is_armed() && poller.arm());
        let handled = matches!(outcome, Ok(LockOutcome::Ran)) && armed;
        if !handled && self.sleepers.end_background_sleep() {
            self.sleeper.wake(Sleep::Background);
        }
    }

    /// The loop of the background poller, until the engine is closed or unusable.
    pub(super) fn run_adaptive(&self) {
        let mut on_standby = false;
        loop {
            // Before the check: the end of the engine moves the key, and so ends the sleep.
            let seen = self.sleeper.seen();
            if self.check().is_err() {
                return;
            }
            if on_standby {
                let polls = self.counters.get(Counter::Polls);
                sleep_on_standby();
                on_standby = self.counters.get(Counter::Polls) != polls;
                continue;
            }
            on_standby = match self.take_over() {
                Some(until) => {
                    let timeout = until.since(self.clock.now()).min(LONGEST_SLEEP);
                    self.sleeper.sleep(Sleep::Background, seen, timeout);
                    !self.sleepers.end_background_sleep()
                }
                // Calls are under way.
                None => true,
            };
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
                    self.sleepers.set_background_until(poller.next_deadline().as_nanos());
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
                Ok(_) => return None,
                Err(_) => return Some(Time::NEVER),
            }
        }
    }
}

impl<P: Port, H: Handler<P>> Drop for ActiveWaiter<'_, P, H> {
    fn drop(&mut self) {
        self.engine.leave();
    }
}
