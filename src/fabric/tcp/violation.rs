//! The rules that a peer can break on a link. A broken rule ends the link.

use crate::fabric::LinkFailure;

/// A rule that the peer broke, with the values that it sent. The texts say "it" for the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TcpViolation {
    #[error("it used a key for {len} bytes at {offset} of region {region}, {why}")]
    Grant { region: u16, offset: u64, len: u64, why: TcpGrantViolation },
    #[error("it has more than {0} reads under way")]
    TooManyReads(usize),
    #[error("it answered read {answered}, where read {asked} was next")]
    OtherRead { asked: u32, answered: u32 },
    #[error("it answered read {0}, and none is under way")]
    UnknownRead(u32),
    #[error("it answered a read of {asked} bytes with {answered}")]
    ReadLength { asked: u64, answered: u64 },
    #[error("it sent more after its goodbye")]
    AfterGoodbye,
    #[error("it acknowledged {number} frames, where {from} to {to} can be")]
    Acknowledgement { number: u32, from: u32, to: u32 },
    #[error("it resumed a connection that had not broken, or did not resume one that had")]
    Resume,
}

/// Why no grant allows an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TcpGrantViolation {
    #[error("but there is no grant with that key, or it has been taken back")]
    UnknownKey,
    #[error("but that key is for another region")]
    OtherRegion,
    #[error("but they are not inside what is granted")]
    OutsideGrant,
    #[error("which may only be read")]
    ReadOnly,
    #[error("which may only be written")]
    WriteOnly,
}

impl From<TcpViolation> for LinkFailure {
    #[cold]
    fn from(violation: TcpViolation) -> Self {
        LinkFailure::Protocol(violation.to_string())
    }
}
