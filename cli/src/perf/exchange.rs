//! Rounds that are a step each: the initiator sends and receives, the responder receives and sends.

use super::control_channel::ControlChannel;
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{Facts, Initiator, KeepAlive, Responder};
use crate::error::CliError;
use tensorwire::{BufferRing, Node, Step, Tensor};

/// One side of the rounds.
pub trait Exchange {
    /// The node of this side.
    fn node(&self) -> &Node;

    /// The settings of the node, for the report.
    fn settings(&self) -> &Facts;

    /// The rounds in words, for the report.
    fn how(&self) -> String;

    /// Prepares tensors of this size.
    fn resize(&mut self, bytes: usize) -> Result<(), CliError>;

    /// Round trips that may be timed together: the tensors of all but the first are written while
    /// the other side answers.
    fn chunk(&self) -> u64;

    /// Writes the tensors that are sent next.
    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort>;

    /// Whether they are written.
    fn is_filled(&self) -> bool;

    /// Begins the step of the next round. Both sides count the rounds alike.
    fn step(&mut self) -> Result<Step, Abort>;

    /// Sends the written tensors.
    fn send(&mut self, step: &Step) -> Result<(), Abort>;

    /// Receives as many tensors.
    fn receive(&mut self, step: &Step) -> Result<(), Abort>;
}

impl<T: Exchange> Initiator for T {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn produce(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        if self.is_filled() { Ok(()) } else { self.fill(watch) }
    }

    fn max_chunk(&self) -> u64 {
        self.chunk()
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        let step = self.step()?;
        self.send(&step)?;
        if self.chunk() > 1 {
            self.fill(watch)?;
        }
        self.receive(&step)
    }

    fn facts(&self) -> Facts {
        let settings = self.settings().clone();
        Facts { poll_mode: format!("{}; {}", settings.poll_mode, self.how()), ..settings }
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

    /// The last tensors are served when this side makes progress.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        progress(self.node()).map(|()| KeepAlive::Poll)
    }
}

/// A tensor filled with `byte`, in the next free buffer of the ring.
pub fn filled(node: &Node, ring: &mut BufferRing, watch: &PeerWatch, byte: u8) -> Result<Tensor, Abort> {
    let mut wait = watch.wait();
    loop {
        if let Ok(mut buffer) = ring.acquire() {
            buffer.bytes_mut().fill(byte);
            return Ok(buffer.freeze());
        }
        progress(node)?;
        wait.again()?;
    }
}

/// Makes progress on a node.
pub fn progress(node: &Node) -> Result<(), Abort> {
    node.progress()?;
    Ok(())
}
