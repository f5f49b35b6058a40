//! The API of edges and steps (specification 2).
//!
//! A [`Step`] is the rendezvous of one training step. A send never blocks: the waiting receive gets
//! the tensor, or the tensor is kept. A receive gets the tensor at once, waits, or has a callback
//! called. The local table serves an edge within the process. An edge between processes is served
//! by the pollers of both, each over its [`RemotePath`].
//!
//! Sends to peers and receives from peers take no lock. Beginning, aborting and cleaning up a step
//! take a lock once per step, and so do sends and receives within the process.
//!
//! This module must not touch a fabric, nor call user code while it holds a table.

mod batch;
mod call_flights;
mod call_path;
mod context;
mod edge;
mod foreign;
mod local;
mod losses;
mod path;
mod pending;
mod pending_batch;
mod pending_set;
mod receive;
#[cfg(test)]
mod remote_calls_tests;
mod send_within;
mod sequence;
mod standing;
mod step;
mod step_flags;

pub use crate::matching::{Delivery, Error};
pub use batch::Batch;
pub use call_path::CallPath;
pub use context::{Context, RendezvousSettings};
pub use edge::Edge;
pub(crate) use foreign::REGISTERED_FROM;
pub use losses::{Losses, PeerStatus};
pub use path::{Paths, RemotePath};
pub use pending::{CancelToken, Pending, Receivable};
pub use pending_batch::PendingBatch;
pub use pending_set::PendingSet;
pub use receive::{ReceiveAllBuilder, ReceiveBuilder};
pub use send_within::SendError;
pub use sequence::Sequence;
pub use standing::Standing;
pub use step::{Sendable, Step};
