//! A virtual network inside one process and in virtual time, for tests of all modules above the
//! fabric.
//!
//! A seed decides what a real network leaves to chance. Examples are delays, links that overtake
//! each other, full queues, late local completions, stalled readers, cut links, dying processes and
//! flipped bits. The same seed and the same calls give the same history, whose digest is
//! [`SimNetwork::digest`]. Time advances only by [`SimNetwork::advance_to`] or, with
//! [`SimOptions::auto_advance`], by polls.
//!
//! | file | |
//! |---|---|
//! | `network` | the clock, packets under way and their arrival |
//! | `load` | the payload of a packet |
//! | `loans` | memory that is lent where it lies |
//! | `ends` | how links and processes end |
//! | `flips` | bits that change on their way |
//! | `side` | one side of a link: operations, grants, arrivals for the next poll |
//! | `port` | the port's calls |
//! | `random`, `digest` | the seeded generator; one number for a history |
//!
//! This module may lock and allocate, because it is for tests. It has no unsafe code.
#![allow(clippy::disallowed_types)] // one lock around the whole network

mod digest;
mod ends;
mod flips;
#[cfg(test)]
mod hostile_tests;
mod load;
mod loans;
mod network;
mod port;
mod random;
mod side;
#[cfg(test)]
mod test_ends;
#[cfg(test)]
mod tests;

pub use network::SimNetwork;
pub use port::{SimPort, SimSleeper};

use super::{Endpoint, Fabric, FabricError, FabricKind, LinkOptions, LoanLimiter, Role};
use crate::memory::Pool;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// The number of a process in the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SimProcess(pub u32);

/// How the network behaves.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// One-way delay of a packet.
    pub delay: RangeInclusive<Duration>,
    /// Delay between the arrival of an operation and its local completion.
    pub completion_delay: RangeInclusive<Duration>,
    /// Largest number of completions of one poll.
    pub poll_batch: usize,
    /// How often a post is refused as full without need, per thousand.
    pub full_per_mille: u32,
    /// Whether links lend.
    pub lends: bool,
    /// [`LinkLimits::max_message`](crate::fabric::LinkLimits::max_message) of every link.
    pub max_message: usize,
    /// [`LinkLimits::max_write`](crate::fabric::LinkLimits::max_write) of every link.
    pub max_write: u64,
    /// [`LinkLimits::max_grant`](crate::fabric::LinkLimits::max_grant) of every link.
    pub max_grant: u64,
    /// Most bytes that a process lends at a time.
    pub max_lent_bytes: u64,
    /// Whether an empty poll advances the time to the next event.
    pub auto_advance: bool,
    /// Whether [`SimNetwork::trace`] is recorded.
    pub trace: bool,
}

impl Default for SimOptions {
    fn default() -> Self {
        SimOptions {
            delay: Duration::from_nanos(500)..=Duration::from_micros(5),
            completion_delay: Duration::ZERO..=Duration::from_micros(5),
            poll_batch: 16,
            full_per_mille: 0,
            lends: true,
            max_message: crate::fabric::MAX_MESSAGE,
            max_write: u64::MAX,
            max_grant: u64::MAX,
            max_lent_bytes: u64::MAX,
            auto_advance: false,
            trace: false,
        }
    }
}

/// One process's access to the network.
pub struct SimFabric {
    network: SimNetwork,
    process: SimProcess,
    pool: Pool,
    limiter: Arc<LoanLimiter>,
}

impl SimFabric {
    /// The number of the process.
    pub fn process(&self) -> SimProcess {
        self.process
    }
}

impl Fabric for SimFabric {
    type Endpoint = SimEndpoint;
    type Link = SimLink;
    type Port = SimPort;

    fn port(&self) -> Result<SimPort, FabricError> {
        Ok(SimPort::new(self.network.clone(), self.pool.clone()))
    }

    fn loan_limiter(&self) -> Option<Arc<LoanLimiter>> {
        Some(Arc::clone(&self.limiter))
    }

    fn endpoint(&self, _port: usize, options: &LinkOptions) -> Result<SimEndpoint, FabricError> {
        let out_of_range = |option, value, allowed| {
            Err(FabricError::Option { fabric: FabricKind::Sim, option, value, allowed })
        };
        if !options.depth.is_power_of_two() {
            return out_of_range("depth", options.depth.into(), "a power of two");
        }
        let side = self.network.open(self.process, options);
        let address = (side as u64).to_le_bytes().to_vec();
        Ok(SimEndpoint { network: self.network.clone(), side: Some(side), address })
    }
}

/// One side of a link that is not connected yet.
pub struct SimEndpoint {
    network: SimNetwork,
    side: Option<usize>,
    address: Vec<u8>,
}

impl Endpoint for SimEndpoint {
    type Link = SimLink;

    fn address(&self) -> &[u8] {
        &self.address
    }

    /// Does not wait for the other side. Packets for it wait for the first poll of its port.
    fn connect(mut self, _role: Role, peer: &[u8], _timeout: Duration) -> Result<SimLink, FabricError> {
        let refused = |why: String| FabricError::Peer { fabric: FabricKind::Sim, why };
        let peer = <[u8; 8]>::try_from(peer).map_err(|_| refused(format!("{peer:?} is no address")))?;
        let Some(side) = self.side.take() else { unreachable!("taken here and when it is dropped") };
        let connected = self.network.connect(side, u64::from_le_bytes(peer) as usize);
        if let Err(why) = connected {
            self.network.close(side);
            return Err(refused(why));
        }
        Ok(SimLink { network: self.network.clone(), side: Some(side) })
    }
}

impl Drop for SimEndpoint {
    fn drop(&mut self) {
        if let Some(side) = self.side {
            self.network.close(side);
        }
    }
}

/// A connected link that no port has yet. Dropping it closes it.
pub struct SimLink {
    network: SimNetwork,
    side: Option<usize>,
}

impl Drop for SimLink {
    fn drop(&mut self) {
        if let Some(side) = self.side {
            self.network.close(side);
        }
    }
}
