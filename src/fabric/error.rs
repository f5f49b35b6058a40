//! Why an operation was not posted, and why a fabric, a port or a link could not be made.

use super::FabricKind;
use std::time::Duration;

/// Why an operation was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The link's queue, or a table behind it, is full: poll, and try again.
    #[error("the queue is full")]
    Full,
    /// The link is down.
    #[error("the link is down")]
    Down,
    /// The operation can't be done with these operands, now or later.
    #[error("the operation can't be posted: {0}")]
    Refused(&'static str),
}

/// Why a fabric, a port or a link could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A call to the operating system failed.
    #[error("{fabric}: {tried} failed: {source}; {remedy}")]
    Os {
        /// The fabric that failed.
        fabric: FabricKind,
        /// What was tried, with which value.
        tried: String,
        /// What to change.
        remedy: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A library, device or kernel feature is missing or not sufficient.
    #[error("{fabric}: {why}")]
    Unavailable {
        /// The fabric that failed.
        fabric: FabricKind,
        /// What is missing, what there is instead, and what to change.
        why: String,
    },
    /// An option is out of range.
    #[error("{fabric}: {option} is {value}: {allowed}")]
    Option {
        /// The fabric that failed.
        fabric: FabricKind,
        /// The option's name.
        option: &'static str,
        /// The refused value.
        value: u64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// A setting asks for what a device of this host can't do.
    #[error("{fabric}: {why}")]
    Setting {
        /// The fabric that failed.
        fabric: FabricKind,
        /// The setting with its value and origin, what is allowed, and what the device offers.
        why: String,
    },
    /// The peer did not answer in time.
    #[error("{fabric}: {tried} took longer than {after:?}; is the peer running and reachable?")]
    Timeout {
        /// The fabric that failed.
        fabric: FabricKind,
        /// What was tried.
        tried: String,
        /// As given by the caller.
        after: Duration,
    },
    /// The two sides do not fit: their settings, users or releases differ. No further attempt
    /// changes that.
    #[error("{fabric}: the two sides do not fit: {why}")]
    Disagreement {
        /// The fabric that failed.
        fabric: FabricKind,
        /// What differs, with both values.
        why: String,
    },
    /// The peer broke the fabric's rules.
    #[error("{fabric}: the peer was refused: {why}")]
    Peer {
        /// The fabric that failed.
        fabric: FabricKind,
        /// What the peer did.
        why: String,
    },
}
