//! The whole engine with steps of their own: a tensor sent and received each step, its request made in advance or in it.
//!
//! Who asks in advance and who asks plainly do the same otherwise: each round trip is a step that both sides begin, and that ends
//! two steps later.

use super::control_channel::ControlChannel;
use super::exchange::{Exchange, filled, halt};
use super::plan::Settings;
use super::rendezvous_lat::joined;
use super::workload::{Abort, PATIENCE, PeerWatch};
use crate::CliError;
use tensorwire::{BufferRing, Counter, DType, Edge, Node, Sequence, Standing, Step, Tensor};

/// Buffers that tensors are produced into: one may still be on its way while the next is written.
const BUFFERS: usize = 3;
/// Rounds after which it is looked whether their tensors were asked for in advance.
const LOOK: u64 = 64;

/// One side: a node of a cluster of two.
pub struct RendezvousStanding {
    // Before the node, which it asks.
    standing: Option<Standing>,
    node: Node,
    settings: Settings,
    sequence: Sequence,
    to: Edge,
    from: Edge,
    ring: BufferRing,
    bytes: usize,
    /// The tensor to send next.
    produced: Option<Tensor>,
    rounds: u64,
    /// Tensors that had been asked for in advance, when it was looked last.
    claimed: u64,
}

impl RendezvousStanding {
    /// Joins the other side as task `me` of two.
    pub fn open(me: u32, settings: &Settings, channel: &mut ControlChannel) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
        let node = joined(me, settings, channel)?;
        let sequence = node.sequence(0);
        let to = node.edge_to("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let from = node.edge_from("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let ring = node.ring(DType::U8, &[1], BUFFERS).map_err(|error| failed(&error))?;
        let standing = match settings.plain {
            true => None,
            false => {
                let standing = node.standing(&from, sequence, settings.standing);
                Some(standing.map_err(|error| CliError::failed("asking in advance", error))?)
            }
        };
        let settings = settings.clone();
        Ok(RendezvousStanding {
            standing,
            node,
            settings,
            sequence,
            to,
            from,
            ring,
            bytes: 0,
            produced: None,
            rounds: 0,
            claimed: 0,
        })
    }

    /// What was not asked for in advance is received all the same, and would be measured as what it is not. The first ones, and
    /// those after a change of size, are asked for in their steps.
    fn look(&mut self) -> Result<(), Abort> {
        let claimed = self.node.counters().get(Counter::StandingClaimed);
        let news = claimed - std::mem::replace(&mut self.claimed, claimed);
        if self.rounds == 0 || self.standing.is_none() || news >= LOOK / 2 {
            return Ok(());
        }
        Err(Abort::Failed(format!(
            "of the last {LOOK} tensors {news} had been asked for in advance: a window of {} does not hold here",
            self.settings.standing
        )))
    }
}

impl Exchange for RendezvousStanding {
    fn node(&self) -> &Node {
        &self.node
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn how(&self) -> String {
        format!("standing requests, {} steps in advance", self.settings.standing)
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes == bytes {
            return Ok(());
        }
        // The last size's go back to the pool first.
        self.produced = None;
        self.ring = self
            .node
            .ring(DType::U8, &[bytes as u64], BUFFERS)
            .map_err(|error| CliError::failed(format!("buffers of {bytes} bytes"), error))?;
        self.bytes = bytes;
        Ok(())
    }

    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        if self.rounds.is_multiple_of(LOOK) {
            self.look()?;
        }
        self.produced = Some(filled(&self.node, &mut self.ring, watch, self.rounds as u8)?);
        Ok(())
    }

    fn step(&mut self) -> Result<Step, Abort> {
        let n = self.rounds;
        self.rounds += 1;
        if n >= 2 {
            // The peer has answered the round after it.
            self.node.cleanup(self.sequence.step(n - 2));
        }
        self.node.step(self.sequence.step(n)).map_err(halt)
    }

    fn send(&mut self, step: &Step) -> Result<(), Abort> {
        let Some(tensor) = self.produced.take() else {
            return Err(Abort::Failed("nothing was produced for this round".into()));
        };
        step.send(&self.to, tensor).map_err(halt)
    }

    fn receive(&mut self, step: &Step) -> Result<(), Abort> {
        step.recv(&self.from, PATIENCE).map(drop).map_err(halt)
    }
}
