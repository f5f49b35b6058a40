//! Why a peer is gone.

use std::fmt;
use std::time::Duration;

/// Why a peer is gone, or its link is.
///
/// ```
/// use tensorwire::{Error, LossCause};
///
/// /// What to do after the loss of a peer.
/// fn plan(error: &Error) -> &'static str {
///     match error {
///         Error::PeerLost { cause, .. } if cause.is_clean() => "go on without it",
///         Error::PeerLost { cause: LossCause::Died(_), .. } => "join again",
///         _ => "look into it",
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossCause {
    /// Its process has ended, as far as this host can tell. The kernel reports it, its address
    /// refuses connections, or another process has its place in the cluster. A firewall of another
    /// host may refuse instead. Then the same process is linked again.
    #[error("its process has ended: {0}")]
    Died(String),
    /// It left. The text is its own.
    #[error("{0}")]
    Left(String),
    /// It has not answered for too long. Its process may still be there.
    #[error(
        "nothing was heard from it for {after:?}, and silence_bound is {bound:?}: it may be stopped, \
         swapped out or starved, or the network to it may be down"
    )]
    Silent {
        /// For how long nothing was heard.
        after: Duration,
        /// The setting `silence_bound` of this process.
        bound: Duration,
    },
    /// It broke the protocol.
    #[error("{0}")]
    Protocol(String),
    /// A device, its port or the network between the two failed. Its process may be well.
    #[error("{0}")]
    Network(String),
    /// This process lacks memory, descriptors or another resource that the link needs. The peer has
    /// done nothing wrong.
    #[error("this process, not the peer, could not keep the link: {0}")]
    Local(String),
    /// One side has closed the link. Both processes may be well.
    #[error("{0}")]
    Closed(String),
}

impl LossCause {
    /// The reason that a peer gives when it stops with nothing wrong.
    pub const STOPPED: &str = "it stopped";

    /// Whether the peer stopped as it should, with nothing wrong.
    pub fn is_clean(&self) -> bool {
        matches!(self, LossCause::Left(reason) if reason == LossCause::STOPPED)
    }

    /// The process was started again, as the life with this number: the life before it has ended.
    pub(crate) fn replaced(incarnation: impl fmt::Display) -> Self {
        LossCause::Died(format!("it was started again, as incarnation {incarnation}"))
    }
}
