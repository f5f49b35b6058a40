//! The trait by which the bootstrap service makes links and reports peers.

use crate::wire::{Incarnation, LossCause, Status, TaskId};
use std::fmt;
use std::time::Duration;

/// Bytes of the longest offer.
pub(super) const MAX_OFFER: usize = 64 * 1024;

/// A peer in one of its lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Name of the variable.
    pub name: TaskId,
    /// The number of its life.
    pub incarnation: Incarnation,
    /// Equal to this process's if and only if the peer runs on this host.
    pub host_id: String,
    /// The number of the attempt to link these two lives, from 1 on. It is the same on both sides.
    pub generation: u64,
    /// The number of the attempt among all lives of the peer, on this side. It grows.
    pub number: u64,
}

/// An endpoint of a link that is not connected yet.
#[derive(Clone, PartialEq, Eq)]
pub struct Prepared {
    /// The implementer's number for it. Later calls pass it back.
    pub ticket: u64,
    /// The address for the peer; at most [`MAX_OFFER`] bytes, opaque to the bootstrap service.
    pub offer: Vec<u8>,
}

impl fmt::Debug for Prepared {
    /// Without the offer, which may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prepared({}, {} bytes)", self.ticket, self.offer.len())
    }
}

/// Makes links for the bootstrap service, and is told of changes of peers.
///
/// Each ticket of [`Peering::prepare`] ends in exactly one of these ways: `connect` fails,
/// `abandon` is called, or `ready` is called. At most one `lost` follows a `ready`. A link that is
/// up when the service stops, or that was reported with `report_lost`, gets none. `gone` is for
/// lives that end without a link that is up.
///
/// `prepare` and `connect` run on threads of their own and may block. `ready`, `lost`, `gone` and
/// `abandon` must not block: liveness depends on it. A panic in any of them is caught and logged,
/// and counts as a failure.
pub trait Peering: Send + Sync + 'static {
    /// Makes this side's endpoint of a link with `peer`, and the offer that takes the peer to it.
    /// The side that does not start the exchange knows the offer of the peer, `theirs`.
    ///
    /// # Errors
    /// The fabric's error. Both sides show it, and the service tries again until the peer is gone.
    /// It does not after [`Code::FailedPrecondition`](crate::wire::Code).
    fn prepare(&self, peer: &PeerInfo, theirs: Option<&[u8]>) -> Result<Prepared, Status>;

    /// Connects the endpoint `ticket` with the endpoint behind the peer's `offer`. Blocks for
    /// `timeout` at most. The `initiator` connects, the other side accepts. After a failure nothing
    /// is left of the endpoint.
    ///
    /// # Errors
    /// The fabric's error. Both sides show it, and the service tries again until the peer is gone.
    fn connect(
        &self,
        peer: &PeerInfo,
        ticket: u64,
        offer: &[u8],
        initiator: bool,
        timeout: Duration,
    ) -> Result<(), Status>;

    /// Drops the endpoint or link of the ticket.
    fn abandon(&self, peer: &PeerInfo, ticket: u64);

    /// Both sides are connected: the link may be used.
    fn ready(&self, peer: &PeerInfo, ticket: u64);

    /// A link that was ready is not to be used any more.
    fn lost(&self, peer: &PeerInfo, cause: LossCause);

    /// A life of the peer is over that had no ready link: it never had one, or lost it before.
    fn gone(&self, peer: &PeerInfo, cause: LossCause);
}
