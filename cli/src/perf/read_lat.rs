//! The bare fabric: a one-sided read. Its figure is the whole round trip.

use super::channel::Channel;
use super::fabrics::Measured;
use super::one_sided::Passive;
use super::plan::Settings;
use super::side::{Came, Side};
use super::workload::{Facts, Halt, Initiator, Watch};
use crate::CliError;
use tensorwire::fabric::{Lane, Port, PostError, Role};
use tensorwire::memory::{Tensor, TensorMut};
use tensorwire::wire::Grant;

/// The side that reads.
pub struct ReadLat<F: Measured> {
    side: Side<F>,
    exposed: Grant,
    /// What is read: as many bytes of `exposed` as are asked for.
    source: Grant,
    /// Where they go; gone if a read failed.
    target: Option<TensorMut>,
    /// The other side has leave to read it, as this one has there.
    _own: Tensor,
}

impl<F: Measured> ReadLat<F> {
    /// Links with the other side, which does the same in [`passive`].
    pub fn open(settings: &Settings, channel: &mut Channel) -> Result<Self, CliError> {
        let (side, exposed, own) = linked(Role::Initiator, settings, channel)?;
        Ok(ReadLat { side, exposed, source: exposed, target: None, _own: own })
    }
}

/// The side that is read.
pub fn passive<F: Measured>(settings: &Settings, channel: &mut Channel) -> Result<Passive<F>, CliError> {
    let (side, ..) = linked(Role::Acceptor, settings, channel)?; // the port holds what is exposed
    Passive::new(side, channel)
}

fn linked<F: Measured>(
    role: Role,
    settings: &Settings,
    channel: &mut Channel,
) -> Result<(Side<F>, Grant, Tensor), CliError> {
    let mut side = Side::open(role, settings, channel)?;
    let own = side.buffer(settings.max_bytes)?.freeze();
    let exposed = side.swap_sources(&own, channel)?;
    Ok((side, exposed, own))
}

impl<F: Measured> Initiator for ReadLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.source = Side::<F>::part(&self.exposed, bytes)?;
        self.target = None; // back to the pool first
        self.target = Some(self.side.buffer(bytes)?);
        Ok(())
    }

    fn round_trip(&mut self, watch: &Watch) -> Result<(), Halt> {
        let Some(mut target) = self.target.take() else {
            return Err(Halt::Failed("the last read failed".into()));
        };
        let (mut wait, mut came, id) = (watch.wait(), Came::default(), self.side.name());
        while let Err((error, back)) =
            self.side.port.read(self.side.link, Lane::CONTROL, id, target, &self.source)
        {
            if error != PostError::Full {
                return Err(self.side.refused(error));
            }
            target = back;
            self.side.poll(&mut wait, &mut came)?;
        }
        while came.read.is_none() {
            self.side.poll(&mut wait, &mut came)?;
        }
        self.target = came.read;
        Ok(())
    }

    fn facts(&self) -> Facts {
        Facts { inline_bytes: 0, ..self.side.facts() }
    }
}
