//! What threads block on while nothing comes: the completion channel of a port, and two descriptors by which threads of this
//! process wake each other.

use super::cq::Channel;
use super::failure::os;
use crate::fabric::{FabricError, Sleep, Sleeper};
use rustix::event::Timespec;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The longest sleep; what an arming could miss on a broken device is found after it.
const LIMIT: Duration = Duration::from_millis(100);

/// One port's bell.
pub(super) struct Bell {
    channel: Arc<Channel>,
    /// Changes with every wake-up.
    ring: AtomicU32,
    attending: AtomicU32,
    keepers: AtomicU32,
    waiter: OwnedFd,
    keeper: OwnedFd,
}

impl Bell {
    pub fn new(channel: &Arc<Channel>) -> Result<Arc<Self>, FabricError> {
        let make = || {
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| os("making an eventfd", error.into(), "raise the limit of open files"))
        };
        Ok(Arc::new(Bell {
            channel: Arc::clone(channel),
            ring: AtomicU32::new(0),
            attending: AtomicU32::new(0),
            keepers: AtomicU32::new(0),
            waiter: make()?,
            keeper: make()?,
        }))
    }

    fn of(&self, who: Sleep) -> &OwnedFd {
        match who {
            Sleep::Waiter => &self.waiter,
            Sleep::Keeper => &self.keeper,
        }
    }

    fn kick(&self, who: Sleep) {
        // It fails only where the count is full, and then everybody is awake.
        let _ = rustix::io::write(self.of(who), &1u64.to_ne_bytes());
    }

    /// Moves the ring and ends every sleep.
    pub fn wake_all(&self) {
        self.wake(Sleep::Waiter);
        self.wake(Sleep::Keeper);
    }

    fn wake(&self, who: Sleep) {
        self.ring.fetch_add(1, Ordering::AcqRel);
        self.kick(who);
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        let is_keeper = who == Sleep::Keeper;
        if is_keeper {
            // Before the look at who attends: who leaves after that look sees a keeper, and kicks.
            self.keepers.fetch_add(1, Ordering::SeqCst);
        }
        let heeds = !is_keeper || self.attending.load(Ordering::SeqCst) == 0;
        if self.ring.load(Ordering::Acquire) == seen {
            self.block(who, seen, timeout.min(LIMIT), heeds);
        }
        if is_keeper {
            self.keepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn block(&self, who: Sleep, seen: u32, timeout: Duration, heeds: bool) {
        let own = self.of(who);
        let mut fds = [
            PollFd::from_borrowed_fd(own.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN),
        ];
        let fds = if heeds { &mut fds[..] } else { &mut fds[..1] };
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
        if poll(fds, Some(&timeout)).is_err() {
            return; // a signal: sleeps may end early
        }
        let of_channel = fds.get(1).map_or(PollFlags::empty(), PollFd::revents);
        if of_channel.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            // The device is gone, and its channel always ready: from now on only kicks end a sleep.
            let _ = poll(&mut fds[..1], Some(&timeout));
        }
        let (kicked, came) = (!fds[0].revents().is_empty(), of_channel.contains(PollFlags::IN));
        if came {
            let mut taken = false;
            while self.channel.take() {
                taken = true;
            }
            if taken {
                self.ring.fetch_add(1, Ordering::AcqRel);
            }
        }
        // A kick from before this sleep. One for it has moved the ring first, and stays for others who sleep.
        if kicked && self.ring.load(Ordering::Acquire) == seen {
            let _ = rustix::io::read(own, &mut [0; 8]);
        }
    }
}

/// What threads block on while nothing comes on a port's links. A sleep ends after 100 ms at the latest. See [`Sleeper`].
#[derive(Clone)]
pub struct VerbsSleeper {
    pub(super) bell: Arc<Bell>,
}

impl Sleeper for VerbsSleeper {
    fn seen(&self) -> u32 {
        self.bell.ring.load(Ordering::Acquire)
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        self.bell.sleep(who, seen, timeout);
    }

    fn wake(&self, who: Sleep) {
        self.bell.wake(who);
    }

    fn attend(&self) {
        self.bell.attending.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        let before = self.bell.attending.fetch_sub(1, Ordering::SeqCst);
        if before == 1 && self.bell.keepers.load(Ordering::SeqCst) > 0 {
            // So that it heeds the channel from now on.
            self.bell.kick(Sleep::Keeper);
        }
    }
}

impl fmt::Debug for VerbsSleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsSleeper").field("seen", &self.seen()).finish_non_exhaustive()
    }
}
