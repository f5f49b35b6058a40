//! The whole engine with standing requests: each round trip is a step of its own.
//!
//! The baseline uses plain receives and does the same otherwise. A step ends two steps later.

use super::control_channel::ControlChannel;
use super::exchange::{Exchange, filled};
use super::options::RendezvousOptions;
use super::peer_watch::{Abort, PeerWatch, ROUND_TIMEOUT};
use super::rendezvous_lat::joined;
use super::workload::{Facts, chunk_of_fresh};
use crate::error::CliError;
use tensorwire::{BufferRing, DType, Edge, Node, Sequence, Standing, Step, Tensor};

/// Buffers for the tensors to send: one may be in flight while the next is written.
const BUFFERS: usize = 3;

/// One side: a node of a cluster of two.
pub struct RendezvousStanding {
    // Declared, and so dropped, before the node.
    _standing: Option<Standing>,
    node: Node,
    facts: Facts,
    options: RendezvousOptions,
    sequence: Sequence,
    to: Edge,
    from: Edge,
    ring: BufferRing,
    bytes: usize,
    /// The tensor to send next.
    produced: Option<Tensor>,
    rounds: u64,
}

impl RendezvousStanding {
    /// Joins the other side as task `me` (0 or 1).
    pub fn open(
        me: u32,
        options: &RendezvousOptions,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
        let (node, facts) = joined(me, options, channel)?;
        let sequence = node.sequence(0);
        let to = node.edge_to("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let from = node.edge_from("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let ring = node.ring(DType::U8, &[1], BUFFERS).map_err(|error| failed(&error))?;
        let standing = match options.is_baseline {
            true => None,
            false => {
                let standing = node.standing(&from, sequence, options.standing());
                Some(standing.map_err(|error| CliError::failed("making a standing request", error))?)
            }
        };
        let options = options.clone();
        Ok(RendezvousStanding {
            _standing: standing,
            node,
            facts,
            options,
            sequence,
            to,
            from,
            ring,
            bytes: 0,
            produced: None,
            rounds: 0,
        })
    }
}

impl Exchange for RendezvousStanding {
    fn node(&self) -> &Node {
        &self.node
    }

    fn settings(&self) -> &Facts {
        &self.facts
    }

    fn how(&self) -> String {
        format!("standing requests, window {}", self.options.standing())
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes == bytes {
            return Ok(());
        }
        // The tensor of the last size returns to the pool first.
        self.produced = None;
        self.ring = self
            .node
            .ring(DType::U8, &[bytes as u64], BUFFERS)
            .map_err(|error| CliError::failed(format!("buffers of {bytes} bytes"), error))?;
        self.bytes = bytes;
        Ok(())
    }

    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.produced = Some(filled(&self.node, &mut self.ring, watch, self.rounds as u8)?);
        Ok(())
    }

    fn chunk(&self) -> u64 {
        chunk_of_fresh(self.bytes)
    }

    fn is_filled(&self) -> bool {
        self.produced.is_some()
    }

    fn step(&mut self) -> Result<Step, Abort> {
        let n = self.rounds;
        self.rounds += 1;
        if n >= 2 {
            // The peer has answered the round after that step.
            self.node.cleanup(self.sequence.step(n - 2));
        }
        Ok(self.node.step(self.sequence.step(n))?)
    }

    fn send(&mut self, step: &Step) -> Result<(), Abort> {
        let Some(tensor) = self.produced.take() else {
            return Err(Abort::Failed("nothing was produced for this round".into()));
        };
        Ok(step.send(&self.to, tensor)?)
    }

    fn receive(&mut self, step: &Step) -> Result<(), Abort> {
        Ok(step.recv(&self.from, ROUND_TIMEOUT).map(drop)?)
    }
}
