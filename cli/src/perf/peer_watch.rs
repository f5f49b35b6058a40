//! Waits inside a turn: no wait outlives the other process, and none is endless.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long one process waits for the other within a round trip.
pub const ROUND_TIMEOUT: Duration = Duration::from_secs(10);
/// Polls of a wait between two checks of the other process, each of which is a system call.
const POLLS_PER_CHECK: u32 = 1 << 14;

/// Why a round trip ended early.
#[derive(Debug, thiserror::Error)]
pub enum Abort {
    /// The other process has ended or failed. The channel, or the exit status, tells why.
    #[error("the other process gave up")]
    PeerGone,
    /// The other process is alive and does not answer.
    #[error("the other process did not answer within {ROUND_TIMEOUT:?}")]
    PeerSilent,
    /// The workload failed in this process.
    #[error("{0}")]
    Failed(String),
}

impl From<tensorwire::Error> for Abort {
    fn from(error: tensorwire::Error) -> Self {
        Abort::Failed(error.to_string())
    }
}

/// Watches the other process during waits.
#[derive(Debug)]
pub struct PeerWatch {
    /// The channel to the other process: it hangs up when that process ends.
    socket: OwnedFd,
}

impl PeerWatch {
    /// A watch of the process at the other end of this socket.
    pub fn new(socket: OwnedFd) -> Self {
        PeerWatch { socket }
    }

    /// A watch for tests, of a process that never ends.
    #[cfg(test)]
    pub fn without_peer() -> Self {
        let flags = rustix::event::EventfdFlags::empty();
        PeerWatch::new(rustix::event::eventfd(0, flags).expect("an eventfd"))
    }

    /// Begins a wait.
    #[inline(always)]
    pub fn wait(&self) -> Wait<'_> {
        Wait { watch: self, polls: 0, since: None }
    }

    fn is_gone(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.socket, PollFlags::RDHUP)], Some(&now)) == Ok(1)
    }
}

/// One wait of a spinning thread.
#[derive(Debug)]
pub struct Wait<'a> {
    watch: &'a PeerWatch,
    polls: u32,
    since: Option<Instant>,
}

impl Wait<'_> {
    /// Called after each poll that found nothing.
    ///
    /// # Errors
    /// If the other process has ended or does not answer.
    #[inline(always)]
    pub fn again(&mut self) -> Result<(), Abort> {
        self.polls += 1;
        if self.polls < POLLS_PER_CHECK { Ok(()) } else { self.check() }
    }

    #[cold]
    fn check(&mut self) -> Result<(), Abort> {
        self.polls = 0;
        if self.watch.is_gone() {
            return Err(Abort::PeerGone);
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > ROUND_TIMEOUT { Err(Abort::PeerSilent) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_wait_ends_soon_after_the_other_process() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let watch = PeerWatch::new(ours.into());
        let mut wait = watch.wait();
        (0..3 * POLLS_PER_CHECK).for_each(|_| wait.again().unwrap());
        std::io::Write::write_all(&mut theirs, b"a message is no end").unwrap();
        (0..3 * POLLS_PER_CHECK).for_each(|_| wait.again().unwrap());
        drop(theirs);
        let abort = (0..=POLLS_PER_CHECK).find_map(|_| wait.again().err());
        assert!(matches!(abort, Some(Abort::PeerGone)));
    }
}
