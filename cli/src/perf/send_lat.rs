//! The bare fabric: a message, answered by another.

use super::channel::Channel;
use super::fabrics::Measured;
use super::plan::Settings;
use super::side::{Came, Side};
use super::workload::{Facts, Halt, Initiator, Linger, Responder, Watch};
use crate::CliError;
use tensorwire::fabric::Role;

/// One side of the ping-pong.
pub struct SendLat<F: Measured> {
    side: Side<F>,
    message: Vec<u8>,
}

impl<F: Measured> SendLat<F> {
    /// Links with the other side, which does the same in the other role.
    pub fn open(role: Role, settings: &Settings, channel: &mut Channel) -> Result<Self, CliError> {
        Ok(SendLat { side: Side::open(role, settings, channel)?, message: Vec::new() })
    }
}

impl<F: Measured> Initiator for SendLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.message.resize(bytes, 0);
        Ok(())
    }

    fn round_trip(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.side.send(&self.message, (watch, &mut Came::default()))?;
        self.side.arrived(watch)
    }

    fn facts(&self) -> Facts {
        self.side.facts()
    }
}

impl<F: Measured> Responder for SendLat<F> {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.message.resize(bytes, 0);
        Ok(())
    }

    fn answer(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.side.arrived(watch)?;
        self.side.send(&self.message, (watch, &mut Came::default()))
    }

    /// What was sent last is with the other side.
    fn linger(&mut self) -> Result<Linger, Halt> {
        Ok(Linger::Again)
    }
}
