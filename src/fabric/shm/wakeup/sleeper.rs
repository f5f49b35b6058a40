//! Sleeping while nothing arrives on a port's links.

use super::doorbells::OwnDoorbell;
use crate::fabric::{Sleep, Sleeper, Wakeup};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The longest sleep. A hostile peer can omit a ring. The port then finds the slot after some
/// sleeps, when it checks the idle links one after the other.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// The longest sleep where the kernel makes no barrier in other processes, because a ring can be
/// missed.
const MAX_SLEEP_WITHOUT_BARRIERS: Duration = Duration::from_millis(1);

/// Blocks threads while nothing arrives on a port's links, on a futex in the port's doorbell. See
/// [`Sleeper`].
///
/// A sleep ends after 100 ms at the latest, or after 1 ms where the kernel, here or at a peer,
/// refuses `membarrier(2)`.
#[derive(Clone)]
pub struct ShmSleeper {
    doorbell: Arc<OwnDoorbell>,
}

impl ShmSleeper {
    pub(crate) fn new(doorbell: Arc<OwnDoorbell>) -> Self {
        ShmSleeper { doorbell }
    }
}

impl Sleeper for ShmSleeper {
    fn seen(&self) -> u32 {
        self.doorbell.doorbell.events.key()
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        let limit = if self.doorbell.barriers_supported() { MAX_SLEEP } else { MAX_SLEEP_WITHOUT_BARRIERS };
        self.doorbell.doorbell.events.sleep(who, seen, timeout.min(limit));
    }

    fn wake(&self, who: Sleep) {
        self.doorbell.doorbell.events.wake(who);
    }

    fn enter_wait(&self) {
        self.doorbell.doorbell.events.enter_wait();
    }

    fn exit_wait(&self) {
        self.doorbell.doorbell.events.exit_wait();
    }
}

impl Wakeup for ShmSleeper {
    fn notify(&self) {
        self.doorbell.doorbell.events.notify();
    }

    fn wake(&self, who: Sleep) {
        self.doorbell.doorbell.events.wake(who);
    }
}

impl fmt::Debug for ShmSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
