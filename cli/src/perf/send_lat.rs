//! The bare fabric: a message, answered by another.

use super::bare_link::{BareLink, Received};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::plan::Settings;
use super::workload::{Abort, Facts, Initiator, KeepAlive, PeerWatch, Responder};
use crate::CliError;
use tensorwire::internals::fabric::Role;

/// One side of the ping-pong.
pub struct SendLat<F: MeasuredFabric> {
    side: BareLink<F>,
    message: Vec<u8>,
}

impl<F: MeasuredFabric> SendLat<F> {
    /// Links with the other side, which does the same in the other role.
    pub fn open(role: Role, settings: &Settings, channel: &mut ControlChannel) -> Result<Self, CliError> {
        Ok(SendLat { side: BareLink::open(role, settings, channel)?, message: Vec::new() })
    }
}

impl<F: MeasuredFabric> Initiator for SendLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.message.resize(bytes, 0);
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.side.send(&self.message, (watch, &mut Received::default()))?;
        self.side.arrived(watch)
    }

    fn facts(&self) -> Facts {
        self.side.facts()
    }
}

impl<F: MeasuredFabric> Responder for SendLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.message.resize(bytes, 0);
        Ok(())
    }

    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.side.arrived(watch)?;
        self.side.send(&self.message, (watch, &mut Received::default()))
    }

    /// What was sent last is with the other side.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        Ok(KeepAlive::Again)
    }
}
