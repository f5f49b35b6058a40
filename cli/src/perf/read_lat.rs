//! The bare fabric: a one-sided read. Its figure is the whole round trip.

use super::bare_link::{BareLink, PolledCompletions};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::one_sided::Passive;
use super::options::BareOptions;
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{Facts, Initiator};
use crate::error::CliError;
use tensorwire::internals::fabric::{Port, PostError, Role};
use tensorwire::internals::wire::Grant;
use tensorwire::{Tensor, TensorMut};

/// The side that reads.
pub struct ReadLat<F: MeasuredFabric> {
    side: BareLink<F>,
    exposed: Grant,
    /// Source of the next read: a part of `exposed`.
    source: Grant,
    /// Target of the next read; `None` after a read failed.
    target: Option<TensorMut>,
    /// The memory that the other side may read.
    _own: Tensor,
}

impl<F: MeasuredFabric> ReadLat<F> {
    /// Links with the other side, which calls [`passive`].
    pub fn open(
        options: &BareOptions,
        max_bytes: usize,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let (side, exposed, own) = linked(Role::Initiator, options, max_bytes, channel)?;
        Ok(ReadLat { side, exposed, source: exposed, target: None, _own: own })
    }
}

/// The side that is read.
pub fn passive<F: MeasuredFabric>(
    options: &BareOptions,
    max_bytes: usize,
    channel: &mut ControlChannel,
) -> Result<Passive<F>, CliError> {
    // The port keeps the exposed memory.
    let (side, ..) = linked(Role::Acceptor, options, max_bytes, channel)?;
    Passive::new(side, channel)
}

fn linked<F: MeasuredFabric>(
    role: Role,
    options: &BareOptions,
    max_bytes: usize,
    channel: &mut ControlChannel,
) -> Result<(BareLink<F>, Grant, Tensor), CliError> {
    let mut side = BareLink::open(role, options, None, 0, channel)?;
    let own = side.buffer(max_bytes)?.freeze();
    let exposed = side.swap_sources(&own, channel)?;
    Ok((side, exposed, own))
}

impl<F: MeasuredFabric> Initiator for ReadLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.source = BareLink::<F>::part(&self.exposed, bytes)?;
        self.target = None; // returns to the pool first
        self.target = Some(self.side.buffer(bytes)?);
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        let Some(mut target) = self.target.take() else {
            return Err(Abort::Failed("the last read failed".into()));
        };
        let (mut wait, mut received) = (watch.wait(), PolledCompletions::default());
        while let Err((error, back)) = self.side.port.read(self.side.link, target, &self.source) {
            if error != PostError::Full {
                return Err(self.side.refused(error));
            }
            target = back;
            self.side.poll(&mut wait, &mut received)?;
        }
        while received.read.is_none() {
            self.side.poll(&mut wait, &mut received)?;
        }
        self.target = received.read;
        Ok(())
    }

    fn facts(&self) -> Facts {
        Facts { inline_bytes: 0, ..self.side.facts() }
    }
}
