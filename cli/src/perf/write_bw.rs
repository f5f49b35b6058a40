//! The bare fabric: one-sided writes, as many outstanding as the queue is deep.

use super::bare_link::{BareLink, PolledCompletions};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::one_sided::Passive;
use super::options::InlineOptions;
use super::peer_watch::{Abort, PeerWatch};
use super::recorder::Recorder;
use super::workload::{Facts, Initiator};
use crate::error::CliError;
use crate::reference::stopwatch::Stopwatch;
use tensorwire::Tensor;
use tensorwire::internals::fabric::Role;
use tensorwire::internals::wire::Grant;

/// The side that writes.
pub struct WriteBw<F: MeasuredFabric> {
    side: BareLink<F>,
    granted: Grant,
    /// Target of each write: as many bytes of `granted` as the source has.
    target: Grant,
    source: Tensor,
}

impl<F: MeasuredFabric> WriteBw<F> {
    /// Links with the other side, which calls [`passive`].
    pub fn open(
        options: &InlineOptions,
        max_bytes: usize,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let mut side = BareLink::open(Role::Initiator, &options.bare, options.inline, 0, channel)?;
        let (granted, _) = side.swap_targets(max_bytes, channel)?;
        let source = side.buffer(1)?.freeze();
        Ok(WriteBw { side, granted, target: granted, source })
    }

    /// Writes `count` times, and waits for the last completion.
    fn stream(&mut self, count: u64, watch: &PeerWatch) -> Result<(), Abort> {
        let mut received = PolledCompletions::default();
        let copied = self.source.bytes().len() <= self.side.inline;
        // Inline writes have no completion, except the last one, which completes after all others.
        let expected = if copied { count.min(1) } else { count };
        for left in (0..count).rev() {
            self.side.write(&self.source, &self.target, None, left == 0, (watch, &mut received))?;
        }
        let mut wait = watch.wait();
        while received.done < expected {
            // The limit of a wait is for a time without any completion.
            if self.side.poll(&mut wait, &mut received)? {
                wait = watch.wait();
            }
        }
        Ok(())
    }
}

/// The side that is written to.
pub fn passive<F: MeasuredFabric>(
    options: &InlineOptions,
    max_bytes: usize,
    channel: &mut ControlChannel,
) -> Result<Passive<F>, CliError> {
    let mut side = BareLink::open(Role::Acceptor, &options.bare, options.inline, 0, channel)?;
    side.swap_targets(max_bytes, channel)?;
    Passive::new(side, channel)
}

impl<F: MeasuredFabric> Initiator for WriteBw<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        if self.source.bytes().len() != bytes {
            self.source = self.side.buffer(bytes)?.freeze();
        }
        self.target = BareLink::<F>::part(&self.granted, bytes)?;
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.stream(1, watch)
    }

    /// The writes overlap, so no write has a time of its own.
    fn rounds(
        &mut self,
        count: u64,
        clock: &Stopwatch,
        watch: &PeerWatch,
        _into: &mut Recorder,
    ) -> Result<u64, Abort> {
        let began = clock.now();
        self.stream(count, watch)?;
        Ok(clock.nanos(began, clock.now()))
    }

    fn facts(&self) -> Facts {
        self.side.facts()
    }
}
