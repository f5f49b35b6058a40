//! The event count of a port. The thread that watches the device notifies it when the port's
//! completion channel has an event.

use crate::fabric::{Sleep, Sleeper};
use crate::sync::ProcessWords;
use crate::sync::event_count::EventCount;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The longest sleep. A completion that an arming on a broken device misses is found after it.
const LIMIT: Duration = Duration::from_millis(100);

/// The event count of a port.
pub(super) type PortEvents = EventCount<ProcessWords>;

/// Blocks threads while nothing arrives on a port's links: a futex. A sleep ends after 100 ms at
/// the latest. See [`Sleeper`].
#[derive(Clone)]
pub struct VerbsSleeper {
    pub(super) events: Arc<PortEvents>,
}

impl Sleeper for VerbsSleeper {
    fn seen(&self) -> u32 {
        self.events.key()
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        self.events.sleep(who, seen, timeout.min(LIMIT));
    }

    fn wake(&self, who: Sleep) {
        self.events.wake(who);
    }

    fn enter_wait(&self) {
        self.events.enter_wait();
    }

    fn exit_wait(&self) {
        self.events.exit_wait();
    }
}

impl fmt::Debug for VerbsSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
