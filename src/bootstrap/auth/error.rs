//! Errors of proofs. No message has a secret or a key in it.

use super::super::shared::MAX_REASON;
use super::{AuthMode, Verdict};
use crate::wire::{LACK_REMEDY, TaskId, shorten};
use std::io;
use std::path::PathBuf;

/// Why this process can't prove who it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// A file can't be used.
    #[error("{key} = {}: {why}", path.display())]
    File {
        /// The setting.
        key: &'static str,
        /// As in the settings.
        path: PathBuf,
        /// What is wrong with it. Nothing of its content.
        why: String,
    },
    /// The CPU lacks instructions of the cryptography.
    #[error(
        "this CPU lacks AES, AVX2, ADX, BMI2 or PCLMULQDQ instructions, which auth = secret and auth = tls \
         need"
    )]
    Cpu,
    /// This process or its host lacks descriptors or memory.
    #[error("the kernel was asked for the users of connections, which failed: {source}; {LACK_REMEDY}")]
    Lack {
        /// The error of the system.
        source: io::Error,
    },
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
    Io(io::Error),
    #[error(
        "it ended the connection before the proof was done ({0}): is it stopping, or flooded with \
         connections? See its log"
    )]
    Cut(io::Error),
    #[error("what listens there is no bootstrap service of this version of tensorwire")]
    NoGreeting,
    #[error(
        "what listens there says that its auth is {theirs}. This process has {ours}, and so must the member: \
         check what listens there"
    )]
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
    #[error("it has ended the connection before the kernel could tell whose it was")]
    Ended,
    #[error("it refuses this process: {0}")]
    Refused(&'static str),
    #[error("its certificate is not that of {0}")]
    OtherName(TaskId),
    #[error("TLS failed: {0}")]
    Tls(String),
    #[error("it has sent what is no opening of a connection: is it a member of this release?")]
    NoOpening,
    #[error("the kernel does not tell whose connection it is: {0}")]
    Unknown(io::Error),
    #[error("it did not prove its name within the time: if it is a member, look at its host and network")]
    TooLate,
    #[error(
        "it gave up its place to a newer one, as too many connections had proven no name yet: keep \
         strangers from this port with a firewall"
    )]
    Displaced,
    #[error("it has made too many connections in a short time: its log may say why they end")]
    TooOften,
}

impl ProofError {
    /// The words of the other side, which has proven nothing yet unless the mode is uid. So they
    /// must not lead to another mode than that of this process, except away from uid.
    pub(super) fn refused(verdict: Verdict, mode: AuthMode) -> Self {
        ProofError::Refused(match (verdict, mode) {
            (Verdict::OtherUser, AuthMode::Uid) => {
                "this process runs as another user; run all members as one user, or set secret_file"
            }
            (Verdict::OtherHost, AuthMode::Uid) => {
                "its auth is uid, which admits no process of another host; set secret_file on every member"
            }
            (_, AuthMode::Secret) => "the proof failed; do all members have the same secret_file?",
            (_, AuthMode::Tls) => "the proof failed; see its log, and tls_certificate of this process",
            (_, AuthMode::Uid | AuthMode::Plain) => "see its log",
        })
    }

    /// A failed handshake with what to look at, whatever TLS says of it.
    pub(super) fn with_remedy(self, mode: AuthMode) -> Self {
        let remedy = match mode {
            AuthMode::Secret => "do all members have the same secret_file?",
            AuthMode::Tls => {
                "were the certificates of both members made by an authority that is in the tls_ca of both, \
                 do they name these members, and do they hold now?"
            }
            AuthMode::Uid | AuthMode::Plain => return self,
        };
        match self {
            ProofError::Tls(why) => ProofError::Tls(format!("{why}; {remedy}")),
            error => error,
        }
    }
}

impl From<io::Error> for ProofError {
    fn from(error: io::Error) -> Self {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match tls {
            Some(error) => error.clone().into(),
            None => ProofError::Io(error),
        }
    }
}

impl From<rustls::Error> for ProofError {
    fn from(error: rustls::Error) -> Self {
        // It has parts of the other's certificates.
        ProofError::Tls(shorten(&error.to_string(), MAX_REASON))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// rustls prints each number of what a certificate says that it is for.
    #[test]
    fn a_stranger_does_not_decide_how_long_an_error_is() {
        let long = || rustls::Error::General("1".repeat(300_000));
        for error in [ProofError::from(long()), io::Error::other(long()).into()] {
            let text = error.with_remedy(AuthMode::Tls).to_string();
            assert!(text.len() < 2 * MAX_REASON, "{} bytes", text.len());
            assert!(text.contains("were the certificates"), "{text}");
        }
    }

    /// A listener that has proven nothing says whatever it likes.
    #[test]
    fn no_word_of_a_listener_leads_to_weaker_settings() {
        for ours in [AuthMode::Tls, AuthMode::Secret, AuthMode::Uid] {
            for verdict in [Verdict::OtherUser, Verdict::OtherHost, Verdict::Unproven] {
                let text = ProofError::refused(verdict, ours).to_string();
                assert!(!text.contains("plain") && !text.contains("set auth"), "{ours}: {text}");
                if ours != AuthMode::Uid {
                    assert!(
                        !text.contains("set secret_file") && !text.contains("as one user"),
                        "{ours}: {text}"
                    );
                }
            }
            for theirs in [AuthMode::Secret, AuthMode::Uid, AuthMode::Plain] {
                let text = ProofError::OtherMode { ours, theirs }.to_string();
                assert!(text.contains(&format!("This process has {ours}, and so must the member")), "{text}");
                assert!(!text.contains("set "), "{text}");
            }
        }
    }
}
