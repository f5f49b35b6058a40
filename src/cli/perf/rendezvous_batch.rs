//! The whole engine with many tensors at a time: sent and received by one call, or one by one, and answered by as many.
//!
//! One by one, all receives are begun before the first is waited for: a batch is not compared with a round trip per tensor.

use super::channel::Channel;
use super::plan::Settings;
use super::rendezvous_lat::{SMALL, joined, name};
use super::workload::{Facts, Halt, Initiator, Linger, PATIENCE, Responder, Watch};
use crate::cli::CliError;
use tensorwire::memory::{BufferRing, Tensor};
use tensorwire::node::Node;
use tensorwire::rendezvous::{Batch, Delivery, Pending};
use tensorwire::wire::DType;

/// Tensors of a round are written while those of the last may still be on their way.
const ROUNDS: usize = 3;

/// One side: a node of a cluster of two.
pub struct RendezvousBatch {
    node: Node,
    settings: Settings,
    out: Batch,
    back: Batch,
    ring: BufferRing,
    bytes: usize,
    produced: Vec<Tensor>,
    received: Vec<Delivery<Tensor>>,
    /// Receives that were begun one by one.
    begun: Vec<Pending<Tensor>>,
    rounds: u64,
}

impl RendezvousBatch {
    /// Joins the other side as task `me` of two.
    pub fn open(me: u32, settings: &Settings, channel: &mut Channel) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
        let node = joined(me, settings, channel)?;
        let names = (0..settings.batch).map(|at| format!("batch/{at}"));
        let out =
            names.clone().map(|name| node.edge_to("perf", 1 - me, &name)).collect::<Result<Vec<_>, _>>();
        let back = names.map(|name| node.edge_from("perf", 1 - me, &name)).collect::<Result<Vec<_>, _>>();
        let [out, back] = [out, back].map(|edges| edges.and_then(|edges| node.batch(edges)));
        let (out, back) = (out.map_err(|error| failed(&error))?, back.map_err(|error| failed(&error))?);
        let ring = node.ring(DType::U8, &[1], 1).map_err(|error| failed(&error))?;
        let settings = settings.clone();
        let (produced, received, begun) = (Vec::new(), Vec::new(), Vec::new());
        Ok(RendezvousBatch {
            node,
            settings,
            out,
            back,
            ring,
            bytes: 0,
            produced,
            received,
            begun,
            rounds: 0,
        })
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes == bytes {
            return Ok(());
        }
        self.produced.clear();
        let buffers = ROUNDS * self.settings.batch as usize;
        self.ring = self
            .node
            .ring(DType::U8, &[bytes as u64], buffers)
            .map_err(|error| CliError::failed(format!("{buffers} buffers of {bytes} bytes"), error))?;
        self.bytes = bytes;
        Ok(())
    }

    /// Writes the tensors that are sent next, in buffers that nobody reads any more.
    fn fill(&mut self, watch: &Watch) -> Result<(), Halt> {
        let mut wait = watch.wait();
        while self.produced.len() < self.settings.batch as usize {
            match self.ring.next() {
                Ok(mut buffer) => {
                    buffer.bytes_mut().fill(self.rounds as u8);
                    self.produced.push(buffer.freeze());
                }
                Err(_) => {
                    self.progress()?;
                    wait.again()?;
                }
            }
        }
        Ok(())
    }

    /// Each round is a step of its own. Both sides count them.
    fn step(&mut self) -> Result<tensorwire::rendezvous::Step, Halt> {
        self.rounds += 1;
        if self.rounds > 2 {
            // The peer has answered the round after it.
            self.node.cleanup(self.rounds - 2);
        }
        self.node.step(self.rounds).map_err(halt)
    }

    fn send(&mut self, step: &tensorwire::rendezvous::Step) -> Result<(), Halt> {
        let tensors = self.produced.drain(..);
        if !self.settings.singly {
            return self.out.send(step, tensors).map_err(halt);
        }
        let mut sent = self.out.edges().iter().zip(tensors);
        sent.try_for_each(|(edge, tensor)| step.send(edge, tensor)).map_err(halt)
    }

    fn receive(&mut self, step: &tensorwire::rendezvous::Step) -> Result<(), Halt> {
        if !self.settings.singly {
            return self.back.recv_into(step, PATIENCE, &mut self.received).map_err(halt);
        }
        self.received.clear();
        for edge in self.back.edges() {
            self.begun.push(step.recv_pending_within(edge, PATIENCE).map_err(halt)?);
        }
        for pending in self.begun.drain(..) {
            self.received.push(pending.wait().map_err(halt)?);
        }
        Ok(())
    }

    fn progress(&self) -> Result<(), Halt> {
        self.node.progress().map(drop).map_err(halt)
    }
}

fn halt(error: tensorwire::rendezvous::Error) -> Halt {
    Halt::Failed(error.to_string())
}

impl Initiator for RendezvousBatch {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn produce(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.fill(watch)
    }

    fn round_trip(&mut self, _watch: &Watch) -> Result<(), Halt> {
        let step = self.step()?;
        self.send(&step)?;
        self.receive(&step)
    }

    fn facts(&self) -> Facts {
        let how = if self.settings.singly { "one by one" } else { "by one call" };
        Facts {
            fabric: name(self.settings.fabric).into(),
            device: None,
            pages: self.node.pool_report().pages.to_string(),
            poll_mode: format!("inline, spin; {} tensors each way {how}", self.settings.batch),
            inline_bytes: u64::from(self.settings.inline.unwrap_or(SMALL)),
            depth: u64::from(self.settings.depth),
            mtu: None,
        }
    }
}

impl Responder for RendezvousBatch {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn answer(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.fill(watch)?;
        let step = self.step()?;
        self.receive(&step)?;
        self.send(&step)
    }

    /// What was sent last is served when this side makes progress.
    fn linger(&mut self) -> Result<Linger, Halt> {
        self.progress().map(|()| Linger::Again)
    }
}
