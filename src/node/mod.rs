//! One process of the cluster: configuration in, pool made, peers joined, paths chosen, clean stop.
//!
//! Everything that asks the system for the time, the host or the network comes together here; the
//! rooms below are handed what they need. Nothing here is on the data path.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // starting, stopping and joining may wait

mod clock;
mod error;
mod host;
mod peering;
mod pollers;
mod process;
mod rdma;
mod reach;
mod room;

pub use clock::MonotonicClock;
pub use error::NodeError;
pub use process::{Node, NodeState, PeerReport, PeerState};
pub use rdma::rdma_wishes;
pub use room::TensorError;
