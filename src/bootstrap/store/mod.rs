//! A [`Store`] on a bootstrap service: `proto/tensorwire/v1/store.proto`.
//!
//! Each bootstrap service serves one to the members of its cluster. [`StoreServer`] serves one
//! before there is a cluster. Callers prove their names as those of the bootstrap service do, and a
//! stranger gets no answer.
//!
//! | file | content |
//! |---|---|
//! | `service` | incoming calls |
//! | `owners` | keys that one caller alone may change |
//! | `server` | a server of its own |
//! | `client` | outgoing calls |
//!
//! [`Store`]: crate::store::Store

mod client;
#[rustfmt::skip]
#[allow(missing_docs, unnameable_types, clippy::all, clippy::unwrap_used)]
pub(super) mod generated;
mod owners;
mod server;
mod service;

pub use client::RemoteStore;
pub use owners::MEETING_KEYS;
pub use server::StoreServer;
pub(super) use service::{SERVICE_NAME, StoreGrpc, service};

#[cfg(test)]
pub(super) type StoreGrpcClient = generated::store_client::StoreClient<tonic::transport::Channel>;

use super::auth::AuthSettings;
use crate::wire::{HostPort, TaskId};
use std::time::Duration;

/// Who reaches a store at which address, and how.
///
/// ```
/// use tensorwire::{RemoteStore, Store, StoreOptions, StoreServer, TaskId};
///
/// # let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
/// let members = [TaskId::new("worker", 0)?, TaskId::new("worker", 1)?];
/// let address: tensorwire::HostPort = format!("127.0.0.1:{port}").parse()?;
/// let [first, second] = members.clone();
/// let of = |me| StoreOptions::new(me, first.clone(), address.clone());
///
/// let server = StoreServer::start(&of(first.clone()), members.clone())?; // in one process
/// let store = RemoteStore::connect(&of(second))?; // in another
/// store.set("ready", b"yes")?;
/// assert_eq!(server.store().count("")?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreOptions {
    /// The name of this process.
    pub me: TaskId,
    /// The name of the process that serves the store.
    pub server: TaskId,
    /// Where it listens.
    pub address: HostPort,
    /// How processes prove who they are. [`AuthSettings::Uid`] unless it is set.
    pub auth: AuthSettings,
    /// Whether the server may listen on an address that other hosts reach, although `auth` does not
    /// prove who they are.
    pub allow_non_loopback: bool,
    /// How long a call tries to reach the server, unless it says itself how long it waits. 60
    /// seconds unless it is set. A call that changes something is an error, too, if the server does
    /// not answer it within four seconds, or the connection ends before.
    pub timeout: Duration,
}

impl StoreOptions {
    /// Process `me` reaches the store of `server` at `address`.
    pub fn new(me: TaskId, server: TaskId, address: HostPort) -> Self {
        let (auth, timeout) = (AuthSettings::Uid, Duration::from_secs(60));
        StoreOptions { me, server, address, auth, allow_non_loopback: false, timeout }
    }
}
