//! What can be measured: one side that starts round trips, one that answers them.
//!
//! To add a workload: implement both traits, add a variant to [`Test`](super::options::Test) with its facts, and
//! open the two sides in [`initiator`] and [`responder`].

use super::channel::Channel;
use super::options::{Settings, Test};
use super::rendezvous_lat::RendezvousLat;
use super::write_lat::WriteLat;
use crate::cli::CliError;
use crate::cli::reference::{CacheLine, Ring64, Shared};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tensorwire::fabric::Role;

/// How long one side waits for the other within a round trip.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// How many times a wait looks before it asks whether it still makes sense: a few microseconds.
const LOOKS: u32 = 4096;

/// The side that measures.
pub trait Initiator {
    /// Gets ready for round trips with `bytes` of payload each way. Not measured; the other side prepares at the same
    /// time, and the channel is there to swap what both need.
    fn prepare(&mut self, bytes: usize, channel: &mut Channel) -> Result<(), CliError>;

    /// What a round trip needs and is not measured: a freshly written source, where the workload sends one.
    fn produce(&mut self, _watch: &Watch) -> Result<(), Halt> {
        Ok(())
    }

    /// One round trip: payload there, payload back.
    fn round_trip(&mut self, watch: &Watch) -> Result<(), Halt>;

    /// What the report says about it.
    fn facts(&self) -> Facts;
}

/// The side that answers.
pub trait Responder {
    /// Gets ready for round trips with `bytes` of payload each way.
    fn prepare(&mut self, bytes: usize, channel: &mut Channel) -> Result<(), CliError>;

    /// Waits for one payload, and sends one back.
    fn answer(&mut self, watch: &Watch) -> Result<(), Halt>;

    /// Called again and again between turns: the other side may still want what was sent last.
    fn linger(&mut self) -> Result<(), Halt>;
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
    /// The test that was asked for, without the idle links.
    Alone,
}

/// Why a round trip ended early.
#[derive(Debug, thiserror::Error)]
pub enum Halt {
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
#[derive(Clone, Debug)]
pub struct Watch {
    shared: Arc<Shared>,
}

impl Watch {
    /// One that looks at this mapping's abort flag.
    pub fn new(shared: Arc<Shared>) -> Self {
        Watch { shared }
    }

    /// Begins a wait.
    #[inline(always)]
    pub fn wait(&self) -> Wait<'_> {
        Wait { watch: self, looks: 0, since: None }
    }
}

/// One wait of a spinning side.
#[derive(Debug)]
pub struct Wait<'a> {
    watch: &'a Watch,
    looks: u32,
    since: Option<Instant>,
}

impl Wait<'_> {
    /// Call it after each look that found nothing.
    ///
    /// # Errors
    /// If there is nothing to wait for any more.
    #[inline(always)]
    pub fn again(&mut self) -> Result<(), Halt> {
        self.looks += 1;
        if self.looks < LOOKS { Ok(()) } else { self.ask() }
    }

    #[cold]
    fn ask(&mut self) -> Result<(), Halt> {
        self.looks = 0;
        if self.watch.shared.is_aborted() {
            return Err(Halt::Aborted);
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > PATIENCE { Err(Halt::Silent) } else { Ok(()) }
    }
}

/// Opens the measuring side of the test that was asked for. The responder opens at the same time.
pub fn initiator(
    test: Test,
    settings: &Settings,
    shared: &Arc<Shared>,
    channel: &mut Channel,
) -> Result<Box<dyn Initiator>, CliError> {
    Ok(match test {
        Test::WriteLat => Box::new(WriteLat::open(Role::Initiator, settings, channel)?),
        Test::RendezvousLat => Box::new(RendezvousLat::open(0, settings, channel)?),
        Test::CacheLine => Box::new(CacheLine::new(shared, Subject::Test)),
        Test::Ring64 => Box::new(Ring64::initiator(shared, Subject::Test, settings.depth)),
    })
}

/// Opens the answering side of the test that was asked for.
pub fn responder(
    test: Test,
    settings: &Settings,
    shared: &Arc<Shared>,
    channel: &mut Channel,
) -> Result<Box<dyn Responder>, CliError> {
    Ok(match test {
        Test::WriteLat => Box::new(WriteLat::open(Role::Acceptor, settings, channel)?),
        Test::RendezvousLat => Box::new(RendezvousLat::open(1, settings, channel)?),
        Test::CacheLine => Box::new(CacheLine::new(shared, Subject::Test)),
        Test::Ring64 => Box::new(Ring64::responder(shared, Subject::Test, settings.depth)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_soon_after_an_abort() {
        let (shared, _fd) = Shared::create(0).unwrap();
        let shared = Arc::new(shared);
        let watch = Watch::new(Arc::clone(&shared));
        let mut wait = watch.wait();
        (0..3 * LOOKS).for_each(|_| wait.again().unwrap());
        shared.abort();
        let halt = (0..=LOOKS).find_map(|_| wait.again().err());
        assert!(matches!(halt, Some(Halt::Aborted)));
    }
}
