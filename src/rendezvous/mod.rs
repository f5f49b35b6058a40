//! Edges and steps, and the tables that match sends with receives (specification 2).
//!
//! A [`Step`] is the rendezvous of one training step. A send never blocks: the waiting receive gets
//! the tensor, or the tensor is kept. A receive gets the tensor at once, waits, or has a callback
//! called. The local table serves an edge within the process. For an edge between processes, the
//! poller of the sender keeps the tensor, and the receive requests it over a [`RemotePath`].
//!
//! Sends to peers and receives from peers take no lock. Beginning, aborting and cleaning up a step
//! take a lock once per step, and so do sends and receives within the process.
//!
//! This module must not touch a fabric, nor call user code while it holds a table.

mod batch;
mod context;
mod edge;
mod ended;
mod error;
mod fifo;
mod foreign;
mod local;
mod losses;
mod outstanding;
mod path;
mod pending;
mod pending_batch;
mod receive;
mod remote;
#[cfg(test)]
mod remote_calls_tests;
mod sequence;
mod standing;
mod step;
mod steps;
mod table;
mod waiter;
#[cfg(any(test, feature = "internals"))]
pub mod windows;

pub use batch::Batch;
pub use context::{Context, RendezvousSettings};
pub use edge::Edge;
pub use error::Error;
pub(crate) use foreign::REGISTERED_FROM;
pub use losses::{Losses, PeerStatus};
pub use path::{
    Cancel, CancelAll, LinkTag, Members, OnPath, Paths, PeerIndex, RemotePath, StandingChange, StepChange,
};
pub use pending::{CancelToken, Pending, Receivable};
pub use pending_batch::PendingBatch;
pub use receive::{ReceiveAllBuilder, ReceiveBuilder};
#[cfg(any(test, feature = "sim"))]
pub use remote::RemoteLoad;
pub use remote::{
    BatchReceive, BatchSend, PeerObserver, ReceiveAll, RemoteCommand, RemoteHandler, RemoteSettings,
};
pub use sequence::Sequence;
pub use standing::Standing;
pub use step::{Sendable, Step};
pub(crate) use steps::MAX_RETIRED_STEPS;
pub use waiter::{Delivery, Waiter};
