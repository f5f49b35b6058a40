//! Errors of proofs. No message has a secret or a key in it.

use super::{AuthMode, Verdict};
use std::io;

/// Why this process can't prove who it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// The kernel does not tell the users of connections.
    #[error(
        "the kernel does not tell the users of connections here: {why}; set secret_file (`tensorwire auth \
         secret FILE` makes one)"
    )]
    Kernel {
        /// What was tried.
        why: String,
    },
}

/// Why a connection was refused, on the side that refuses or on the other.
#[derive(Debug, thiserror::Error)]
pub(in crate::bootstrap) enum ProofError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("what listens there is no bootstrap service of this version of tensorwire")]
    NoGreeting,
    #[error("its auth is {theirs}, and {ours} here: set the same on every member")]
    OtherMode { ours: AuthMode, theirs: AuthMode },
    #[error(
        "it runs as user {uid}, another than this process: run all members as one user, or set secret_file"
    )]
    OtherUser { uid: u32 },
    #[error(
        "it is not on this host, and auth = uid reaches no other: set secret_file, or tls_ca, \
         tls_certificate and tls_key, on every member"
    )]
    OtherHost,
    #[error("it refuses this process: {0}")]
    Refused(&'static str),
    #[error("it has sent what is no opening of a connection")]
    NoOpening,
    #[error("the kernel does not tell whose connection it is: {0}")]
    Unknown(io::Error),
    #[error("it did not prove its name within the time")]
    TooLate,
}

impl ProofError {
    /// The words of the other side.
    pub(super) fn refused(verdict: Verdict, mode: AuthMode) -> Self {
        ProofError::Refused(match (verdict, mode) {
            (Verdict::OtherUser, _) => {
                "this process runs as another user; run all members as one user, or set secret_file"
            }
            (Verdict::OtherHost, _) => {
                "its auth is uid, which admits no process of another host; set secret_file on every member"
            }

            (_, AuthMode::Uid | AuthMode::Plain) => "see its log",
        })
    }
}
