//! Edges and steps: who sends what to whom, and the tables in which both sides meet (specification
//! 2).
//!
//! A [`Step`] is one training step's rendezvous. A send never blocks: it hands the tensor to
//! whoever waits, or keeps it. A receive gets it at once, waits, or is called back. Where source
//! and destination are the same process the local table serves both; otherwise the sender's poller
//! keeps the tensor and a receive asks for it over a [`RemotePath`].
//!
//! Beginning, aborting and cleaning up a step take a lock, once per step, as do sends and receives
//! within the process. Sends to peers and receives from them take none.
//!
//! What may not be done here: touch a fabric, or call user code while a table is held.

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
mod reuse;
mod sequence;
mod standing;
mod step;
mod steps;
mod table;
mod waiter;

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
pub use reuse::Reused;
pub use sequence::Sequence;
pub use standing::Standing;
pub use step::{Sendable, Step};
pub(crate) use steps::MAX_RETIRED_STEPS;
pub use waiter::{Delivery, Waiter};
