//! The whole engine with many tensors at a time, sent and received by one call, or one by one.
//!
//! One by one, all receives begin before the first wait, so that a batch is not compared with a
//! round trip per tensor.

use super::control_channel::ControlChannel;
use super::exchange::{Exchange, filled};
use super::options::RendezvousOptions;
use super::peer_watch::{Abort, PeerWatch, ROUND_TIMEOUT};
use super::rendezvous_lat::joined;
use super::workload::Facts;
use crate::error::CliError;
use tensorwire::{Batch, BufferRing, DType, Delivery, Node, Pending, Step, Tensor};

/// Rounds whose tensors may be in flight or being written at a time.
const ROUNDS: usize = 3;

/// One side: a node of a cluster of two.
pub struct RendezvousBatch {
    node: Node,
    facts: Facts,
    options: RendezvousOptions,
    out: Batch,
    back: Batch,
    ring: BufferRing,
    bytes: usize,
    produced: Vec<Tensor>,
    received: Vec<Delivery<Tensor>>,
    /// Receives begun one by one.
    begun: Vec<Pending<Tensor>>,
    rounds: u64,
}

impl RendezvousBatch {
    /// Joins the other side as task `me` (0 or 1).
    pub fn open(
        me: u32,
        options: &RendezvousOptions,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
        let (node, facts) = joined(me, options, channel)?;
        let names = (0..options.batch()).map(|at| format!("batch/{at}"));
        let out =
            names.clone().map(|name| node.edge_to("perf", 1 - me, &name)).collect::<Result<Vec<_>, _>>();
        let back = names.map(|name| node.edge_from("perf", 1 - me, &name)).collect::<Result<Vec<_>, _>>();
        let [out, back] = [out, back].map(|edges| edges.and_then(|edges| node.batch(edges)));
        let (out, back) = (out.map_err(|error| failed(&error))?, back.map_err(|error| failed(&error))?);
        let ring = node.ring(DType::U8, &[1], 1).map_err(|error| failed(&error))?;
        let options = options.clone();
        let (produced, received, begun) = (Vec::new(), Vec::new(), Vec::new());
        Ok(RendezvousBatch {
            node,
            facts,
            options,
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

    fn settings(&self) -> &Facts {
        &self.facts
    }

    fn how(&self) -> String {
        let how = if self.options.is_baseline { "one by one" } else { "by one call" };
        format!("{} tensors each way {how}", self.options.batch())
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes == bytes {
            return Ok(());
        }
        self.produced.clear();
        let buffers = ROUNDS * self.options.batch() as usize;
        self.ring = self
            .node
            .ring(DType::U8, &[bytes as u64], buffers)
            .map_err(|error| CliError::failed(format!("{buffers} buffers of {bytes} bytes"), error))?;
        self.bytes = bytes;
        Ok(())
    }

    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        while self.produced.len() < self.options.batch() as usize {
            self.produced.push(filled(&self.node, &mut self.ring, watch, self.rounds as u8)?);
        }
        Ok(())
    }

    fn chunk(&self) -> u64 {
        1
    }

    fn is_filled(&self) -> bool {
        !self.produced.is_empty()
    }

    fn step(&mut self) -> Result<Step, Abort> {
        self.rounds += 1;
        if self.rounds > 2 {
            // The peer has answered the round after that step.
            self.node.cleanup(self.rounds - 2);
        }
        Ok(self.node.step(self.rounds)?)
    }

    fn send(&mut self, step: &Step) -> Result<(), Abort> {
        let tensors = self.produced.drain(..);
        if !self.options.is_baseline {
            return Ok(self.out.send(step, tensors)?);
        }
        let mut sent = self.out.edges().iter().zip(tensors);
        Ok(sent.try_for_each(|(edge, tensor)| step.send(edge, tensor))?)
    }

    fn receive(&mut self, step: &Step) -> Result<(), Abort> {
        if !self.options.is_baseline {
            return Ok(self.back.recv_many(step, ROUND_TIMEOUT, &mut self.received)?);
        }
        self.received.clear();
        for edge in self.back.edges() {
            self.begun.push(step.receive(edge).within(ROUND_TIMEOUT).begin()?);
        }
        for pending in self.begun.drain(..) {
            self.received.push(pending.wait()?);
        }
        Ok(())
    }
}
