//! The bare fabric: a one-sided read. Its figure is the whole round trip.

use super::bare_link::{BareLink, Received};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::one_sided::Passive;
use super::plan::Settings;
use super::workload::{Abort, Facts, Initiator, PeerWatch};
use crate::CliError;
use tensorwire::internals::fabric::{Port, PostError, Role};
use tensorwire::internals::wire::Grant;
use tensorwire::{Tensor, TensorMut};

/// The side that reads.
pub struct ReadLat<F: MeasuredFabric> {
    side: BareLink<F>,
    exposed: Grant,
    /// What is read: as many bytes of `exposed` as are asked for.
    source: Grant,
    /// Where they go; gone if a read failed.
    target: Option<TensorMut>,
    /// The other side has leave to read it, as this one has there.
    _own: Tensor,
}

impl<F: MeasuredFabric> ReadLat<F> {
    /// Links with the other side, which does the same in [`passive`].
    pub fn open(settings: &Settings, channel: &mut ControlChannel) -> Result<Self, CliError> {
        let (side, exposed, own) = linked(Role::Initiator, settings, channel)?;
        Ok(ReadLat { side, exposed, source: exposed, target: None, _own: own })
    }
}

/// The side that is read.
pub fn passive<F: MeasuredFabric>(
    settings: &Settings,
    channel: &mut ControlChannel,
) -> Result<Passive<F>, CliError> {
    let (side, ..) = linked(Role::Acceptor, settings, channel)?; // the port holds what is exposed
    Passive::new(side, channel)
}

fn linked<F: MeasuredFabric>(
    role: Role,
    settings: &Settings,
    channel: &mut ControlChannel,
) -> Result<(BareLink<F>, Grant, Tensor), CliError> {
    let mut side = BareLink::open(role, settings, channel)?;
    let own = side.buffer(settings.max_bytes)?.freeze();
    let exposed = side.swap_sources(&own, channel)?;
    Ok((side, exposed, own))
}

impl<F: MeasuredFabric> Initiator for ReadLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.source = BareLink::<F>::part(&self.exposed, bytes)?;
        self.target = None; // back to the pool first
        self.target = Some(self.side.buffer(bytes)?);
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        let Some(mut target) = self.target.take() else {
            return Err(Abort::Failed("the last read failed".into()));
        };
        let (mut wait, mut received) = (watch.wait(), Received::default());
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
