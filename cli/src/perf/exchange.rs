//! Rounds of which each is a step: one side sends and receives, the other receives and sends.

use super::control_channel::ControlChannel;
use super::plan::Settings;
use super::rendezvous_lat::{SMALL, name};
use super::workload::{Abort, Facts, Initiator, KeepAlive, PeerWatch, Responder};
use crate::CliError;
use tensorwire::{BufferRing, Error, Node, Step, Tensor};

/// One side of such rounds.
pub trait Exchange {
    /// The node that it works with.
    fn node(&self) -> &Node;

    /// What was asked for.
    fn settings(&self) -> &Settings;

    /// What the rounds are made of, for the report.
    fn how(&self) -> String;

    /// Makes ready for tensors of this many bytes.
    fn resize(&mut self, bytes: usize) -> Result<(), CliError>;

    /// Writes what is sent next. Not timed.
    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// Begins the step of the next round. Both sides count them.
    fn step(&mut self) -> Result<Step, Abort>;

    /// Sends what was written.
    fn send(&mut self, step: &Step) -> Result<(), Abort>;

    /// Receives as much.
    fn receive(&mut self, step: &Step) -> Result<(), Abort>;
}

impl<T: Exchange> Initiator for T {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn produce(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.fill(watch)
    }

    fn round_trip(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
        let step = self.step()?;
        self.send(&step)?;
        self.receive(&step)
    }

    fn facts(&self) -> Facts {
        let settings = self.settings();
        Facts {
            fabric: name(settings.fabric).into(),
            device: None,
            pages: self.node().pool_report().pages.to_string(),
            poll_mode: format!("inline, spin; {}", self.how()),
            inline_bytes: u64::from(settings.inline.unwrap_or(SMALL)),
            depth: u64::from(settings.depth),
            mtu: None,
        }
    }
}

impl<T: Exchange> Responder for T {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.fill(watch)?;
        let step = self.step()?;
        self.receive(&step)?;
        self.send(&step)
    }

    /// What was sent last is served when this side makes progress.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        progress(self.node()).map(|()| KeepAlive::Again)
    }
}

/// A tensor of these bytes, in a buffer that nobody reads any more.
pub fn filled(node: &Node, ring: &mut BufferRing, watch: &PeerWatch, byte: u8) -> Result<Tensor, Abort> {
    let mut wait = watch.wait();
    loop {
        if let Ok(mut buffer) = ring.next() {
            buffer.bytes_mut().fill(byte);
            return Ok(buffer.freeze());
        }
        progress(node)?;
        wait.again()?;
    }
}

/// Has a node move on.
pub fn progress(node: &Node) -> Result<(), Abort> {
    node.progress().map(drop).map_err(halt)
}

/// A run that ends with this error.
pub fn halt(error: Error) -> Abort {
    Abort::Failed(error.to_string())
}
