//! What a test measures: one process starts round trips, the other answers them.
//!
//! To add a workload: implement both traits, add a variant to [`Test`](super::options::Test), and
//! open the two sides in [`open`](super::open).

use super::control_channel::ControlChannel;
use super::peer_watch::{Abort, PeerWatch};
use super::recorder::Recorder;
use crate::error::CliError;
use crate::reference::stopwatch::Stopwatch;

/// Short round trips that are timed together.
const CHUNK: u64 = 16;
/// The longest source, in bytes, that is written while the other side answers. To write 4 KiB that
/// the other side has just read takes as long as its answer.
const WRITTEN_IN_FLIGHT: usize = 256;
/// From this length on a round trip is timed alone, in nanoseconds. Two readings of the clock take
/// about 2 % of it.
const LONG_NS: u64 = 1000;

/// The side that measures.
pub trait Initiator {
    /// Prepares round trips with `bytes` of payload each way. Not measured. The responder prepares
    /// at the same time, and both may use the channel.
    fn prepare(&mut self, bytes: usize, channel: &mut ControlChannel) -> Result<(), CliError>;

    /// Prepares the first round trip of a chunk, such as a freshly written source. Not measured.
    fn produce(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
        Ok(())
    }

    /// Round trips that may be timed together.
    fn max_chunk(&self) -> u64 {
        CHUNK
    }

    /// One round trip: payload there, payload back.
    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// `count` round trips. Returns the nanoseconds of all of them. A workload without round trips
    /// overrides this and records no samples.
    ///
    /// Each round trip is a sample. A chunk of short ones is timed as a whole, because reading the
    /// clock would lengthen each of them. Each then counts with the mean of its chunk. After a mean
    /// of [`LONG_NS`] or more, the next round trip is timed alone.
    fn rounds(
        &mut self,
        count: u64,
        clock: &Stopwatch,
        watch: &PeerWatch,
        into: &mut Recorder,
    ) -> Result<u64, Abort> {
        let began = clock.now();
        let (mut left, mut chunk) = (count, 1);
        while left > 0 {
            chunk = left.min(chunk);
            self.produce(watch)?;
            let start = clock.now();
            for _ in 0..chunk {
                self.round_trip(watch)?;
            }
            let mean = (clock.nanos(start, clock.now()) + chunk / 2) / chunk;
            into.record_many(mean, chunk);
            left -= chunk;
            chunk = if mean < LONG_NS { self.max_chunk() } else { 1 };
        }
        Ok(clock.nanos(began, clock.now()))
    }

    /// Facts for the report.
    fn facts(&self) -> Facts;
}

/// Round trips that may be timed together if each sends a freshly written source of `bytes`.
pub fn chunk_of_fresh(bytes: usize) -> u64 {
    if bytes <= WRITTEN_IN_FLIGHT { CHUNK } else { 1 }
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
    /// Why the nodes use this fabric, where nodes choose it.
    pub fabric_reason: Option<String>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Counts its chunks and round trips, which take at least a given time.
    struct Counting {
        least: Duration,
        max_chunk: u64,
        chunks: u64,
        round_trips: u64,
    }

    impl Initiator for Counting {
        fn prepare(&mut self, _bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
            Ok(())
        }

        fn produce(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
            self.chunks += 1;
            Ok(())
        }

        fn max_chunk(&self) -> u64 {
            self.max_chunk
        }

        fn round_trip(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
            self.round_trips += 1;
            let start = Instant::now();
            while start.elapsed() < self.least {}
            Ok(())
        }

        fn facts(&self) -> Facts {
            unreachable!("no report")
        }
    }

    /// Makes `count` round trips, each of which must become a sample. Returns the number of chunks.
    fn chunks(count: u64, least: Duration, max_chunk: u64) -> u64 {
        let mut counting = Counting { least, max_chunk, chunks: 0, round_trips: 0 };
        let (clock, watch, mut recorder) = (Stopwatch::new(), PeerWatch::without_peer(), Recorder::new());
        counting.rounds(count, &clock, &watch, &mut recorder).expect("no round trip fails");
        assert_eq!((counting.round_trips, recorder.summary(1.0).count), (count, count));
        counting.chunks
    }

    #[test]
    fn short_round_trips_are_timed_in_chunks() {
        let chunks = chunks(10_000, Duration::ZERO, CHUNK);
        assert!((10_000 / CHUNK..5_000).contains(&chunks), "{chunks} chunks");
    }

    #[test]
    fn long_round_trips_and_those_that_need_it_are_timed_alone() {
        assert_eq!(chunks(50, Duration::from_micros(5), CHUNK), 50);
        assert_eq!(chunks(1000, Duration::ZERO, 1), 1000);
    }
}
