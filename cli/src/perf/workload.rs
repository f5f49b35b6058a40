//! What a test measures: one process starts round trips, the other answers them.
//!
//! To add a workload: implement both traits, add a variant to [`Test`](super::options::Test), and
//! open the two sides in [`open`](super::open).

use super::control_channel::ControlChannel;
use super::peer_watch::{Abort, PeerWatch};
use super::recorder::Recorder;
use crate::error::CliError;
use crate::reference::stopwatch::Stopwatch;

/// The side that measures.
pub trait Initiator {
    /// Prepares round trips with `bytes` of payload each way. Not measured. The responder prepares
    /// at the same time, and both may use the channel.
    fn prepare(&mut self, bytes: usize, channel: &mut ControlChannel) -> Result<(), CliError>;

    /// Prepares one round trip, such as a freshly written source. Not measured.
    fn produce(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
        Ok(())
    }

    /// One round trip: payload there, payload back.
    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// `count` round trips, each a sample. Returns the nanoseconds of all of them. A workload
    /// without round trips overrides this and records no samples.
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

    /// Facts for the report.
    fn facts(&self) -> Facts;
}

/// The side that answers.
pub trait Responder {
    /// Prepares round trips with `bytes` of payload each way.
    fn prepare(&mut self, bytes: usize, channel: &mut ControlChannel) -> Result<(), CliError>;

    /// Waits for one payload, and sends one back.
    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// Answers `count` round trips.
    fn answers(&mut self, count: u64, watch: &PeerWatch) -> Result<(), Abort> {
        (0..count).try_for_each(|_| self.answer(watch))
    }

    /// Called again and again between turns: the initiator may still need the last answer.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort>;
}

/// What a responder does between turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlive {
    /// It polls: the initiator may need it.
    Poll,
    /// It may sleep until the next message on the channel.
    Sleep,
}

/// Properties of an open workload, for the report's header.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The fabric, or the bare memory.
    pub fabric: String,
    /// The device, where the fabric has one.
    pub device: Option<String>,
    /// The pages that the pool got.
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
