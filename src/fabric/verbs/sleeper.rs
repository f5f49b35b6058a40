//! The event count of a port. The thread that watches the device notifies it when the port's
//! completion channel has an event.

use super::port::VerbsPort;
use crate::fabric::{Sleep, Sleeper, Wakeup};
use crate::sync::ProcessWords;
use crate::sync::event_count::EventCount;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The longest sleep. A completion that an arming on a broken device misses is found after it.
const LIMIT: Duration = Duration::from_millis(100);

/// What the threads of a port's poller sleep on.
pub(super) struct PortWakeup {
    own: EventCount<ProcessWords>,
    /// The sleeper of another port, on which they sleep instead.
    other: OnceLock<Arc<dyn Wakeup>>,
}

impl PortWakeup {
    pub fn new() -> Self {
        PortWakeup { own: EventCount::new(ProcessWords::default()), other: OnceLock::new() }
    }

    /// The threads sleep on another port's sleeper from now on. The first one counts.
    pub fn sleep_on(&self, other: Arc<dyn Wakeup>) {
        let _ = self.other.set(other);
    }
}

impl Wakeup for PortWakeup {
    fn notify(&self) {
        match self.other.get() {
            Some(other) => other.notify(),
            None => self.own.notify(),
        }
    }

    fn wake(&self, who: Sleep) {
        match self.other.get() {
            Some(other) => other.wake(who),
            None => self.own.wake(who),
        }
    }
}

impl VerbsPort {
    /// Wakes the threads that sleep on another port from now on.
    pub(in crate::fabric) fn sleep_on(&self, other: Arc<dyn Wakeup>) {
        self.resources.wakeup.sleep_on(other);
    }
}

/// Blocks threads while nothing arrives on a port's links: a futex. A sleep ends after 100 ms at
/// the latest. See [`Sleeper`].
#[derive(Clone)]
pub struct VerbsSleeper {
    pub(super) port: Arc<PortWakeup>,
}

impl Sleeper for VerbsSleeper {
    fn seen(&self) -> u32 {
        self.port.own.key()
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        self.port.own.sleep(who, seen, timeout.min(LIMIT));
    }

    fn wake(&self, who: Sleep) {
        self.port.own.wake(who);
    }

    fn enter_wait(&self) {
        self.port.own.enter_wait();
    }

    fn exit_wait(&self) {
        self.port.own.exit_wait();
    }
}

impl Wakeup for VerbsSleeper {
    fn notify(&self) {
        self.port.own.notify();
    }

    fn wake(&self, who: Sleep) {
        self.port.own.wake(who);
    }
}

impl fmt::Debug for VerbsSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
