//! What threads block on while nothing comes: the completion channel of a port, and two descriptors by which threads of this
//! process wake each other.

use super::beds::{Beds, Descriptors, Roused};
use super::cq::Channel;
use super::failure::os;
use crate::fabric::{FabricError, Sleep, Sleeper};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The longest sleep; what an arming could miss on a broken device is found after it.
const LIMIT: Duration = Duration::from_millis(100);

/// One port's bell.
pub(super) struct Bell(Beds<Waits>);

/// What the threads of a port block on.
struct Waits {
    channel: Arc<Channel>,
    /// The device is gone, and its channel always ready: from now on only kicks end a sleep.
    has_hung_up: AtomicBool,
    waiter: OwnedFd,
    keeper: OwnedFd,
}

impl Bell {
    pub fn new(channel: &Arc<Channel>) -> Result<Arc<Self>, FabricError> {
        let make = || {
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| os("making an eventfd", error.into(), "raise the limit of open files"))
        };
        let waits = Waits {
            channel: Arc::clone(channel),
            has_hung_up: AtomicBool::new(false),
            waiter: make()?,
            keeper: make()?,
        };
        Ok(Arc::new(Bell(Beds::new(waits))))
    }

    /// Ends every sleep.
    pub fn wake_all(&self) {
        self.0.wake(Sleep::Waiter);
        self.0.wake(Sleep::Background);
    }
}

impl Waits {
    fn of(&self, who: Sleep) -> &OwnedFd {
        match who {
            Sleep::Waiter => &self.waiter,
            Sleep::Background => &self.keeper,
        }
    }
}

impl Descriptors for Waits {
    type Word = AtomicU64;

    fn kick(&self, who: Sleep) {
        // It fails only where the count is full, and then everybody is awake.
        let _ = rustix::io::write(self.of(who), &1u64.to_ne_bytes());
    }

    fn unkick(&self, who: Sleep) {
        let _ = rustix::io::read(self.of(who), &mut [0; 8]);
    }

    fn block(&self, who: Sleep, heeds: bool, timeout: Duration) -> Roused {
        let mut fds = [
            PollFd::from_borrowed_fd(self.of(who).as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN),
        ];
        let heeds = heeds && !self.has_hung_up.load(Ordering::Relaxed);
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.min(LIMIT).subsec_nanos()) };
        if poll(&mut fds[..1 + usize::from(heeds)], Some(&timeout)).is_err() {
            return Roused::default(); // a signal: sleeps may end early
        }
        let [own, channel] = [fds[0].revents(), fds[1].revents()];
        let came = channel.contains(PollFlags::IN);
        if !came && channel.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            self.has_hung_up.store(true, Ordering::Relaxed);
        }
        Roused { kicked: !own.is_empty(), came }
    }

    fn take(&self) -> bool {
        self.channel.take()
    }
}

/// What threads block on while nothing comes on a port's links. A sleep ends after 100 ms at the latest. See [`Sleeper`].
#[derive(Clone)]
pub struct VerbsSleeper {
    pub(super) bell: Arc<Bell>,
}

impl Sleeper for VerbsSleeper {
    fn seen(&self) -> u32 {
        self.bell.0.seen()
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        self.bell.0.sleep(who, seen, timeout);
    }

    fn wake(&self, who: Sleep) {
        self.bell.0.wake(who);
    }

    fn enter_wait(&self) {
        self.bell.0.enter_wait();
    }

    fn exit_wait(&self) {
        self.bell.0.exit_wait();
    }
}

impl fmt::Debug for VerbsSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
