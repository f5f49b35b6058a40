//! One process of the cluster: reads the configuration, makes the pool, joins peers, stops.
//!
//! Only this module asks the system for the time, the host and the network; lower modules get these
//! as parameters. No code here is on the data path.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // start, join and stop may wait

mod back_pressure;
mod call_peering;
mod calls;
mod clock;
mod device_plan;
mod error;
mod events;
mod fabric_failures;
mod host;
mod meeting;
mod offer;
mod options;
mod parts;
mod peering;
mod plan;
mod pollers;
mod process;
mod rdma;
mod stopping;
mod store;
mod system_limits;
mod transport;

pub use back_pressure::TensorError;
pub use clock::MonotonicClock;
pub use error::NodeError;
pub use events::{EventStream, Events, NodeEvent, NodeEventKind};
pub use meeting::MeetingError;
pub use options::auth_settings;
pub use plan::{PlannedResource, ResourcePlan};
pub use process::{Node, NodeState, PeerReport, PeerState};
pub use rdma::rdma_settings;
