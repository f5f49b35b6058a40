//! The errors of a node.

use super::meeting::MeetingError;
use super::plan::PlannedResource;
use crate::bootstrap::BootstrapError;
use crate::config::ConfigError;
use crate::fabric::FabricError;
use crate::memory::{PoolError, RegionError};
use crate::store::StoreError;
use crate::wire::{LACK_REMEDY, TaskId, is_lack};
use std::fmt;

/// Why a node could not start, join or stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A setting is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The memory of the pool could not be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The pool could not be made.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The fabric could not be opened.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The bootstrap service failed, or a member did not join in time.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// A member was lost while the node joined: at once if `peer_loss` is `fail_all`, else when
    /// `join_timeout` had passed.
    #[error("the cluster can't be joined: {error}{}", MissingToo(missing))]
    Lost {
        /// The loss that came first.
        error: Box<crate::rendezvous::Error>,
        /// The other members that were not connected then.
        missing: Vec<TaskId>,
    },
    /// The identity of this host could not be read.
    #[error(
        "reading {path}, which tells this host from others, failed: {source}; {}",
        if is_lack(source) { LACK_REMEDY } else { "mount /proc" }
    )]
    Host {
        /// The file that was read.
        path: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A limit of the system, or of an RDMA device, is too low for a cluster of this size. Nothing
    /// was opened but the device, if its limit is the one.
    #[error("a node with {peers} peers can't work here: {resource}")]
    Limit {
        /// The number of peers.
        peers: u64,
        /// The resource, with its limit and what to change.
        resource: Box<PlannedResource>,
    },
    /// The members could not meet.
    #[error(transparent)]
    Meeting(#[from] Box<MeetingError>),
    /// The store of the cluster can't be reached.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This process was forked from the node's.
    #[error("{}", crate::rendezvous::Error::Forked)]
    Forked,
    /// A polling thread could not be started.
    #[error(transparent)]
    Start(#[from] crate::engine::StartError),
    /// The thread that starts the node could not be pinned.
    #[error(transparent)]
    Pin(#[from] crate::engine::PinError),
}

impl From<MeetingError> for NodeError {
    fn from(error: MeetingError) -> Self {
        NodeError::Meeting(Box::new(error))
    }
}

/// Shows who else is missing.
struct MissingToo<'a>(&'a [TaskId]);

impl fmt::Display for MissingToo<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, task) in self.0.iter().enumerate() {
            write!(f, "{}{task}", if number == 0 { "; not connected either: " } else { ", " })?;
        }
        Ok(())
    }
}
