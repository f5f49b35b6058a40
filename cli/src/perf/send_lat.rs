//! The bare fabric: a message, answered by another.

use super::bare_link::{BareLink, PolledCompletions};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::options::BareOptions;
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{Facts, Initiator, KeepAlive, Responder};
use crate::error::CliError;
use tensorwire::internals::fabric::Role;

/// One side of the ping-pong.
pub struct SendLat<F: MeasuredFabric> {
    side: BareLink<F>,
    message: Vec<u8>,
}

impl<F: MeasuredFabric> SendLat<F> {
    /// Links with the other side, which calls this in the other role.
    pub fn open(role: Role, options: &BareOptions, channel: &mut ControlChannel) -> Result<Self, CliError> {
        let side = BareLink::open(role, options, None, 0, channel)?;
        Ok(SendLat { side, message: Vec::new() })
    }
}

impl<F: MeasuredFabric> Initiator for SendLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.message.resize(bytes, 0);
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.side.send(&self.message, (watch, &mut PolledCompletions::default()))?;
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
        self.side.send(&self.message, (watch, &mut PolledCompletions::default()))
    }

    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        Ok(KeepAlive::Poll)
    }
}
