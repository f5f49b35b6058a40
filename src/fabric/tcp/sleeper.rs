//! The event count of a port. The watcher notifies it when something has come for an armed port.

use crate::fabric::{Sleep, Sleeper};
use crate::sync::ProcessWords;
use crate::sync::event_count::EventCount;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The longest sleep.
const LIMIT: Duration = Duration::from_millis(100);

/// Blocks threads while nothing arrives on a port's links: a futex. A sleep ends after 100 ms at
/// the latest. See [`Sleeper`].
#[derive(Clone)]
pub struct TcpSleeper {
    events: Arc<EventCount<ProcessWords>>,
}

impl TcpSleeper {
    /// Without sleepers.
    pub(super) fn new() -> Self {
        TcpSleeper { events: Arc::new(EventCount::new(ProcessWords::default())) }
    }

    /// Ends the sleep of those who wait for events.
    pub(super) fn notify(&self) {
        self.events.notify();
    }
}

impl Sleeper for TcpSleeper {
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

impl fmt::Debug for TcpSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
