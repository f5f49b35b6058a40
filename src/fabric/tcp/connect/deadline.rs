//! The end of a wait, while a link is made.

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// The end of a wait.
#[derive(Clone, Copy)]
pub(crate) struct ConnectDeadline {
    at: Option<Instant>,
    /// The timeout from which the deadline was made, for errors.
    pub after: Duration,
}

impl ConnectDeadline {
    /// The deadline after a timeout. A timeout that is too long for the clock never ends.
    pub(crate) fn after(after: Duration) -> Self {
        ConnectDeadline { at: Instant::now().checked_add(after), after }
    }

    /// The time that is left: zero after the deadline. A day if it never comes.
    pub(crate) fn left(self) -> Duration {
        let never = Duration::from_secs(24 * 3600);
        self.at.map_or(never, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether it is over.
    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// The earlier of two.
    pub(crate) fn or_earlier(self, other: ConnectDeadline) -> ConnectDeadline {
        if other.left() < self.left() { other } else { self }
    }

    /// Sleeps until one of `fds` is ready, or until the deadline. Returns `false` at the deadline.
    pub(crate) fn wait(self, fds: &mut [PollFd<'_>]) -> rustix::io::Result<bool> {
        loop {
            let left = Timespec::try_from(self.left()).ok();
            match poll(fds, left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}
