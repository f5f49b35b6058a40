//! What can be measured: one side that starts round trips, one that answers them.
//!
//! To add a workload: implement both traits, add a variant to [`Test`](super::options::Test) with its facts, and
//! open the two sides in [`open`](super::open).

use super::control_channel::ControlChannel;
use super::recorder::Recorder;
use crate::CliError;
use crate::reference::Stopwatch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long one side waits for the other within a round trip.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// How many times a wait looks before it asks whether it still makes sense, which takes a system call.
const LOOKS: u32 = 1 << 14;

/// The side that measures.
pub trait Initiator {
    /// Gets ready for round trips with `bytes` of payload each way. Not measured; the other side prepares at the same
    /// time, and the channel is there to swap what both need.
    fn prepare(&mut self, bytes: usize, channel: &mut ControlChannel) -> Result<(), CliError>;

    /// What a round trip needs and is not measured: a freshly written source, where the workload sends one.
    fn produce(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
        Ok(())
    }

    /// One round trip: payload there, payload back.
    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// So many round trips, each a sample. Says how many nanoseconds all of them took. What does not come in round trips
    /// does it its own way, and takes no samples.
    fn rounds(
        &mut self,
        count: u64,
        clock: &Stopwatch,
        watch: &PeerWatch,
        into: &mut Recorder,
    ) -> Result<u64, Abort> {
        let began = clock.now();
        for _ in 0..count {
            self.produce(watch)?;
            let start = clock.now();
            self.round_trip(watch)?;
            let end = clock.now();
            into.record(clock.nanos(start, end));
        }
        Ok(clock.nanos(began, clock.now()))
    }

    /// What the report says about it.
    fn facts(&self) -> Facts;
}

/// The side that answers.
pub trait Responder {
    /// Gets ready for round trips with `bytes` of payload each way.
    fn prepare(&mut self, bytes: usize, channel: &mut ControlChannel) -> Result<(), CliError>;

    /// Waits for one payload, and sends one back.
    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// Answers so many. What is one-sided has nothing to answer.
    fn answers(&mut self, count: u64, watch: &PeerWatch) -> Result<(), Abort> {
        (0..count).try_for_each(|_| self.answer(watch))
    }

    /// Called again and again between turns: the other side may still want what was sent last.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort>;
}

/// What the answering side does until the other one asks for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlive {
    /// It must go on looking after what the other side wants.
    Again,
    /// Nothing: it may sleep.
    Sleep,
}

/// What a workload found when it was opened, for the report's header.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The fabric, or what stands for it.
    pub fabric: String,
    /// The device, where the fabric has one.
    pub device: Option<String>,
    /// The pages that the pool really got.
    pub pages: String,
    /// How progress is made.
    pub poll_mode: String,
    /// Bytes that travel inside a slot or work request.
    pub inline_bytes: u64,
    /// Operations that can be outstanding.
    pub depth: u64,
    /// The path's MTU, where the fabric has one.
    pub mtu: Option<u64>,
}

/// Who is measured in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// The test that was asked for.
    Test,
    /// The bare cache line.
    CacheLine,
    /// The bare ring.
    Ring64,
    /// The test that was asked for, without what was added to it: see [`Settings::beside`](super::plan::Settings::beside).
    Baseline,
}

/// Why a round trip ended early.
#[derive(Debug, thiserror::Error)]
pub enum Abort {
    /// The other process is gone or gave up, and the channel or the process's end says why.
    #[error("the other process gave up")]
    Aborted,
    /// The other process is alive and does not answer.
    #[error("the other process did not answer within {PATIENCE:?}")]
    Silent,
    /// The workload failed on this side.
    #[error("{0}")]
    Failed(String),
}

/// Guards the waits inside a turn: none outlives the other process, and none is endless.
#[derive(Debug)]
pub struct PeerWatch {
    /// The channel to the other process: it hangs up when that one ends.
    socket: OwnedFd,
}

impl PeerWatch {
    /// One that looks at this socket.
    pub fn new(socket: OwnedFd) -> Self {
        PeerWatch { socket }
    }

    /// One for tests, whose other process never ends.
    #[cfg(test)]
    pub fn without_other() -> Self {
        let flags = rustix::event::EventfdFlags::empty();
        PeerWatch::new(rustix::event::eventfd(0, flags).expect("an eventfd"))
    }

    /// Begins a wait.
    #[inline(always)]
    pub fn wait(&self) -> Wait<'_> {
        Wait { watch: self, looks: 0, since: None }
    }

    fn is_gone(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.socket, PollFlags::RDHUP)], Some(&now)) == Ok(1)
    }
}

/// One wait of a spinning side.
#[derive(Debug)]
pub struct Wait<'a> {
    watch: &'a PeerWatch,
    looks: u32,
    since: Option<Instant>,
}

impl Wait<'_> {
    /// Call it after each look that found nothing.
    ///
    /// # Errors
    /// If there is nothing to wait for any more.
    #[inline(always)]
    pub fn again(&mut self) -> Result<(), Abort> {
        self.looks += 1;
        if self.looks < LOOKS { Ok(()) } else { self.ask() }
    }

    #[cold]
    fn ask(&mut self) -> Result<(), Abort> {
        self.looks = 0;
        if self.watch.is_gone() {
            return Err(Abort::Aborted);
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > PATIENCE { Err(Abort::Silent) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_wait_ends_soon_after_the_other_side() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let watch = PeerWatch::new(ours.into());
        let mut wait = watch.wait();
        (0..3 * LOOKS).for_each(|_| wait.again().unwrap());
        std::io::Write::write_all(&mut theirs, b"a word is no end").unwrap();
        (0..3 * LOOKS).for_each(|_| wait.again().unwrap());
        drop(theirs);
        let halt = (0..=LOOKS).find_map(|_| wait.again().err());
        assert!(matches!(halt, Some(Abort::Aborted)));
    }
}
