//! The bare fabric: a one-sided write, answered by another. The receiver takes an immediate, or
//! polls the last byte.

use super::bare_link::{BareLink, PolledCompletions, immediate};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::options::{Notify, WriteLatOptions};
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{Facts, Initiator, KeepAlive, Responder};
use crate::error::CliError;
use crate::reference::landing::Landing;
use tensorwire::Tensor;
use tensorwire::internals::fabric::Role;
use tensorwire::internals::wire::{Grant, Immediate};

/// Reads of the last byte between two polls of the port, which would report that the link is down.
const READS_PER_POLL: u32 = 4096;

/// One side of the ping-pong.
pub struct WriteLat<F: MeasuredFabric> {
    side: BareLink<F>,
    granted: Grant,
    landing: Landing,
    /// The immediate of each write; `None` if the receiver polls memory.
    immediate: Option<Immediate>,
    bytes: usize,
    /// Target of the next write: as many bytes of `granted` as the source has.
    target: Grant,
    /// Written by turns. Their last bytes differ, so that each write can be seen.
    sources: [Tensor; 2],
    written: usize,
    seen: usize,
}

/// Last byte of each source. Fresh memory holds zeros.
const MARKS: [u8; 2] = [1, 2];

impl<F: MeasuredFabric> WriteLat<F> {
    /// Links with the other side, which calls this in the other role.
    pub fn open(
        role: Role,
        options: &WriteLatOptions,
        max_bytes: usize,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let mut side =
            BareLink::open(role, &options.posting.bare, options.posting.inline, options.links(), channel)?;
        let (granted, landing) = side.swap_targets(max_bytes, channel)?;
        let immediate = match options.notify() {
            Notify::Immediate => Some(immediate()?),
            Notify::Memory => None,
        };
        let sources = sources(&side, 1)?;
        Ok(WriteLat {
            side,
            granted,
            landing,
            immediate,
            bytes: 1,
            target: granted,
            sources,
            written: 0,
            seen: 0,
        })
    }

    /// Called on both sides while neither writes.
    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes != bytes {
            self.sources = sources(&self.side, bytes)?;
        }
        self.target = BareLink::<F>::part(&self.granted, bytes)?;
        (self.bytes, self.written, self.seen) = (bytes, 0, 0);
        self.landing.clear(bytes);
        Ok(())
    }

    #[inline(always)]
    fn write(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        let (source, mut received) = (&self.sources[self.written], PolledCompletions::default());
        self.written ^= 1;
        self.side.write(source, &self.target, self.immediate, false, (watch, &mut received))
    }

    /// Waits until the other side's write has landed.
    #[inline(always)]
    fn landed(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        if self.immediate.is_some() {
            return self.side.arrived(watch);
        }
        let (mut wait, mut reads, mark) = (watch.wait(), 0u32, MARKS[self.seen]);
        self.seen ^= 1;
        while self.landing.last_of(self.bytes) != mark {
            reads += 1;
            if reads.is_multiple_of(READS_PER_POLL) {
                self.side.poll(&mut wait, &mut PolledCompletions::default())?;
            }
        }
        Ok(())
    }
}

fn sources<F: MeasuredFabric>(side: &BareLink<F>, bytes: usize) -> Result<[Tensor; 2], CliError> {
    let marked = |mark| {
        let mut source = side.buffer(bytes)?;
        source.bytes_mut()[bytes - 1] = mark;
        Ok::<_, CliError>(source.freeze())
    };
    Ok([marked(MARKS[0])?, marked(MARKS[1])?])
}

impl<F: MeasuredFabric> Initiator for WriteLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.write(watch)?;
        self.landed(watch)
    }

    fn facts(&self) -> Facts {
        let how = if self.immediate.is_some() { "spin on completions" } else { "spin on the last byte" };
        Facts { poll_mode: how.into(), ..self.side.facts() }
    }
}

impl<F: MeasuredFabric> Responder for WriteLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.landed(watch)?;
        self.write(watch)
    }

    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        Ok(KeepAlive::Poll)
    }
}
