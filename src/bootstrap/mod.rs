//! How the processes of a cluster meet: a thin gRPC service that carries addresses, membership, liveness and
//! errors.
//!
//! Each process makes one [`Bootstrap`]. It listens at the process's address, calls every peer, and drives
//! the process's [`Peering`] to make one link with each of them; then it watches over them with heartbeats.
//! It runs on one thread, `tw-bootstrap`, and on short-lived ones for what blocks.
//!
//! Rules of this room: no tensor passes through it, it knows nothing of fabrics (offers are opaque bytes),
//! and nothing of tokio or tonic shows in what it offers to the rest of the crate. Nothing that a peer sends
//! is used before it was checked, and every wait has an end. The protocol is `proto/tensorwire/v1/bootstrap.proto`.
//!
//! | file | |
//! |---|---|
//! | `service` | the handle: start, join, stop |
//! | `members`, `slot` | what is known of each peer: pure state, no I/O, no clock |
//! | `server`, `client` | the calls that come in and go out |
//! | `shared` | what ties them together, and calls into the [`Peering`] |
//! | `thread`, `incoming` | the runtime and its connections |
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // a thread of its own, which moves no tensor

mod client;
mod error;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[rustfmt::skip]
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
mod generated;
mod acceptor;
mod names;
mod options;
mod peer_record;
mod peer_table;
mod peering;
mod server;
mod service;
mod shared;
mod thread;

#[cfg(test)]
mod tests;

pub use error::{BootstrapError, MissingPeer};
pub use names::Incarnation;
pub use options::{BootstrapOptions, LINK_TIMEOUT};
pub use peering::{PeerInfo, Peering, Prepared};
pub use service::{Bootstrap, NodeState};
pub use shared::MAX_REASON;
