//! The whole engine with many tensors at a time: sent and received by one call, or one by one, and answered by as many.
//!
//! One by one, all receives are begun before the first is waited for: a batch is not compared with a round trip per tensor.

use super::control_channel::ControlChannel;
use super::exchange::{Exchange, filled, halt};
use super::plan::Settings;
use super::rendezvous_lat::joined;
use super::workload::{Abort, PATIENCE, PeerWatch};
use crate::CliError;
use tensorwire::{Batch, BufferRing, DType, Delivery, Node, Pending, Step, Tensor};

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
    pub fn open(me: u32, settings: &Settings, channel: &mut ControlChannel) -> Result<Self, CliError> {
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
}

impl Exchange for RendezvousBatch {
    fn node(&self) -> &Node {
        &self.node
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn how(&self) -> String {
        let how = if self.settings.singly { "one by one" } else { "by one call" };
        format!("{} tensors each way {how}", self.settings.batch)
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

    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        while self.produced.len() < self.settings.batch as usize {
            self.produced.push(filled(&self.node, &mut self.ring, watch, self.rounds as u8)?);
        }
        Ok(())
    }

    fn step(&mut self) -> Result<Step, Abort> {
        self.rounds += 1;
        if self.rounds > 2 {
            // The peer has answered the round after it.
            self.node.cleanup(self.rounds - 2);
        }
        self.node.step(self.rounds).map_err(halt)
    }

    fn send(&mut self, step: &Step) -> Result<(), Abort> {
        let tensors = self.produced.drain(..);
        if !self.settings.singly {
            return self.out.send(step, tensors).map_err(halt);
        }
        let mut sent = self.out.edges().iter().zip(tensors);
        sent.try_for_each(|(edge, tensor)| step.send(edge, tensor)).map_err(halt)
    }

    fn receive(&mut self, step: &Step) -> Result<(), Abort> {
        if !self.settings.singly {
            return self.back.recv_many(step, PATIENCE, &mut self.received).map_err(halt);
        }
        self.received.clear();
        for edge in self.back.edges() {
            self.begun.push(step.receive(edge).within(PATIENCE).begin().map_err(halt)?);
        }
        for pending in self.begun.drain(..) {
            self.received.push(pending.wait().map_err(halt)?);
        }
        Ok(())
    }
}
