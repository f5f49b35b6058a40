//! Errors of starting, joining and stopping.

use super::auth::{AuthError, AuthMode};
use super::service::NodeState;
use crate::wire::{Incarnation, TaskId};
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// An error of the bootstrap service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// This process is not in the cluster.
    #[error("{me} is not in the cluster \"{cluster}\": add its address, or change the name of this task")]
    NotAMember {
        /// The name of this process.
        me: TaskId,
        /// The cluster in its canonical text, cut.
        cluster: String,
    },
    /// An address is open to other hosts without `allow_non_loopback`.
    #[error(
        "the address {address} of {whose} is not loopback, and auth is {auth}: set secret_file, or tls_ca, \
         tls_certificate and tls_key, on every member. Or use loopback addresses, or set allow_non_loopback: \
         with plain, every process that reaches this port can then join, read and write tensors"
    )]
    NotLoopback {
        /// Whose address it is: a task, or the bind setting.
        whose: String,
        /// Host and port from the cluster or the settings.
        address: String,
        /// How members prove who they are.
        auth: AuthMode,
    },
    /// This process can't prove who it is.
    #[error("{me} can't prove who it is: {why}")]
    Auth {
        /// The name of this process.
        me: TaskId,
        /// What is missing.
        why: AuthError,
    },
    /// An address could not be resolved.
    #[error(
        "the address {address} of {whose} can't be resolved: {source}; check the name, or give the IP address"
    )]
    Resolve {
        /// Whose address it is.
        whose: TaskId,
        /// Host and port from the cluster.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The service's address could not be bound.
    #[error("{me} can't listen on {address}: {source}; {remedy}")]
    Bind {
        /// The name of this process.
        me: TaskId,
        /// The resolved address and port.
        address: SocketAddr,
        /// What to change.
        remedy: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A thread or the sockets' event queue could not be made.
    #[error(
        "the bootstrap thread can't start: {tried} failed: {source}; check the limits on threads and open \
         files"
    )]
    Start {
        /// The step that failed.
        tried: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system gives no random numbers.
    #[error("no random number for the incarnation of this process: {why}")]
    Random {
        /// The system's words.
        why: String,
    },
    /// The service's state does not allow the call.
    #[error("{me}: can't {tried}: the bootstrap service is {state}")]
    State {
        /// The name of this process.
        me: TaskId,
        /// The call.
        tried: &'static str,
        /// The present state.
        state: NodeState,
    },
    /// Not all members were linked in time.
    #[error(
        "{me} (incarnation {incarnation}) waited {waited:?} for its cluster; {} of {peers} peers missing: {}",
        missing.len(), MissingList(missing)
    )]
    Missing {
        /// The name of this process.
        me: TaskId,
        /// The life of this process.
        incarnation: Incarnation,
        /// The time waited.
        waited: Duration,
        /// Number of peers in all.
        peers: usize,
        /// The missing peers, each with its last error.
        missing: Vec<MissingPeer>,
    },
    /// A member and this process disagree about a setting, which neither can change while it runs.
    #[error("{me} can't link with {peer} at {address}: {why}")]
    Disagreement {
        /// The name of this process.
        me: TaskId,
        /// The member that disagrees.
        peer: TaskId,
        /// Its address in the cluster.
        address: String,
        /// The setting, with both values.
        why: String,
    },
    /// Members have ended between the meeting and the join.
    #[error(
        "{me} can't join: since the members met, {} of them ended: {}. See their logs, and start all again{}",
        ended.len(), MissingList(ended), Others(missing)
    )]
    Ended {
        /// The name of this process.
        me: TaskId,
        /// The members that have ended, each with what it said when it left, or how its address
        /// refuses calls.
        ended: Vec<MissingPeer>,
        /// The others that are missing, each with its last error.
        missing: Vec<MissingPeer>,
    },
    /// Some threads did not end in time. They end by themselves when their work has ended.
    #[error("{me}: stopping took longer than {waited:?}: {why}")]
    StopTimeout {
        /// The name of this process.
        me: TaskId,
        /// The time waited.
        waited: Duration,
        /// The threads that had not ended.
        why: String,
    },
    /// The thread that `stop` waits for has called it. The service stops when that call returns.
    #[error(
        "{me}: stop was called inside a callback of the bootstrap service, which can't wait for its own end"
    )]
    StopInCallback {
        /// The name of this process.
        me: TaskId,
    },
}

/// A member that did not join in time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingPeer {
    /// The member.
    pub name: TaskId,
    /// Its address in the cluster.
    pub address: String,
    /// The last error of linking with it.
    pub last_error: String,
}

/// Shows the missing peers in one line.
struct MissingList<'a>(&'a [MissingPeer]);

/// Those that are missing besides.
struct Others<'a>(&'a [MissingPeer]);

impl fmt::Display for Others<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            others => write!(f, "; missing too: {}", MissingList(others)),
        }
    }
}

impl fmt::Display for MissingList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, peer) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { "; " };
            write!(f, "{separator}{} at {}: {}", peer.name, peer.address, peer.last_error)?;
        }
        Ok(())
    }
}
