//! What threads block on while nothing comes on a port's links.

use super::doorbells::OwnDoorbell;
use crate::fabric::{Sleep, Sleeper};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The longest sleep. A peer that breaks the rules can hold back a ring; then what came is found
/// after some sleeps, when its link is looked at in turn.
const LIMIT: Duration = Duration::from_millis(100);

/// The longest sleep where the kernel makes no barrier in other processes: a ring can be missed by
/// chance.
const UNCERTAIN: Duration = Duration::from_millis(1);

/// What threads block on while nothing comes on a port's links: a futex in the port's doorbell. See
/// [`Sleeper`].
///
/// A sleep ends after 100 ms at the latest; after 1 ms where the kernel, here or at a peer, refuses
/// `membarrier(2)`.
#[derive(Clone)]
pub struct ShmSleeper {
    bell: Arc<OwnDoorbell>,
}

impl ShmSleeper {
    pub(crate) fn new(bell: Arc<OwnDoorbell>) -> Self {
        ShmSleeper { bell }
    }
}

impl Sleeper for ShmSleeper {
    fn seen(&self) -> u32 {
        self.bell.bell.seen()
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        let limit = if self.bell.barriers_supported() { LIMIT } else { UNCERTAIN };
        self.bell.bell.sleep(who, seen, timeout.min(limit));
    }

    fn wake(&self, who: Sleep) {
        self.bell.bell.wake(who);
    }

    fn enter_wait(&self) {
        self.bell.bell.enter_wait();
    }

    fn exit_wait(&self) {
        self.bell.bell.exit_wait();
    }
}

impl fmt::Debug for ShmSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
