//! A gRPC service in each process of a cluster: addresses, membership, liveness and errors.
//!
//! Each process makes one [`Bootstrap`]. It listens at the process's address, calls every peer, and
//! has the process's [`Peering`] make one link with each. Then it sends heartbeats. It runs on one
//! thread, `tw-bootstrap`, and on short-lived threads for calls that block.
//!
//! Rules of this module: it carries no tensor, except in the explicit path of `tensors`. It knows
//! no fabric: offers are opaque bytes. No type of tokio or tonic is in its interface. A peer's
//! message is checked before it is used, and every wait has an end. The protocol is
//! `proto/tensorwire/v1/bootstrap.proto`.
//!
//! | file | content |
//! |---|---|
//! | `service` | the handle: start, join, stop |
//! | `peer_table`, `peer_record` | the state of each peer: no I/O, no clock |
//! | `server`, `client` | incoming and outgoing calls |
//! | `tensors` | tensors over gRPC, for nodes that name that path |
//! | `shared` | state shared by all parts, and calls of the [`Peering`] |
//! | `thread` | the runtime |
//! | `messages` | texts of the messages that have an offer |
//! | `auth` | the proof of names before the first request |
//! | `acceptor`, `connector` | incoming and outgoing connections |
//! | `http2_stream`, `peer_channel` | what HTTP/2 and gRPC must not take from a peer |
//! | `refused` | the callers that were refused last |
//! | `blocking` | calls that may block |
//! | `pacer` | the time that failed handshakes may take |
//! | `places` | how many connections there are, and whose |
//! | `store` | a key-value store that the service has beside its own calls |
//! | `prover` | the same proofs for a connection beside the service |
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // its own thread, off the data path

mod acceptor;
mod auth;
mod blocking;
mod client;
mod connector;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[rustfmt::skip]
#[allow(missing_docs, unnameable_types, clippy::all, clippy::unwrap_used)]
mod generated;
mod http2_stream;
mod incarnation;
mod messages;
mod options;
mod pacer;
mod peer_channel;
mod peer_record;
mod peer_table;
mod peering;
mod places;
mod prover;
mod refused;
mod server;
mod service;
mod shared;
mod store;
mod tensors;
mod thread;

#[cfg(test)]
mod tests;

pub use auth::{AuthError, AuthMode, AuthSettings, TlsFiles};
pub use error::{BootstrapError, MissingPeer};
pub use options::{BootstrapOptions, LINK_TIMEOUT, Listening, resolve};
pub use peering::{PeerInfo, Peering, Prepared};
pub use prover::{ProvenChannel, Prover};
pub use service::{Bootstrap, NodeState};
pub use shared::MAX_REASON;
pub use store::{MEETING_KEYS, RemoteStore, StoreOptions, StoreServer};
pub use tensors::{
    ArrivedParts, SentAnswer, TensorAnswer, TensorCall, TensorCaller, TensorPeer, TensorRequest,
    TensorService,
};
