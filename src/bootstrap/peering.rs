//! The trait by which the bootstrap service makes links and reports peers.

use super::names::Incarnation;
use crate::wire::{LossCause, Status, TaskId};
use std::time::Duration;

/// Bytes of the longest offer.
pub const MAX_OFFER: usize = 64 * 1024;

/// A peer in one of its lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Its name.
    pub name: TaskId,
    /// The number of its life.
    pub incarnation: Incarnation,
    /// Equal to ours if and only if it runs on this host.
    pub host_id: String,
    /// Threads of its process that never sleep.
    pub spinners: u32,
    /// Which link of the pair this is about; grows with each new try, the same number on both
    /// sides.
    pub generation: u64,
}

/// One side of a link that is not connected yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The implementer's name for it; it comes back in the later calls.
    pub ticket: u64,
    /// The address for the peer; at most [`MAX_OFFER`] bytes, opaque to the bootstrap service.
    pub offer: Vec<u8>,
}

/// Makes links for the bootstrap service, and is told of changes of peers.
///
/// Each ticket that [`Peering::prepare`] gave out ends in exactly one of these ways: `connect`
/// fails, `abandon` is called, or `ready` is called. Each `ready` is followed by one `lost` at
/// most; a link that is still up when the service stops, or that was reported with `report_lost`,
/// gets none. `gone` is for lives that end without a link that is up.
///
/// `prepare` and `connect` run on threads of their own and may block. `ready`, `lost`, `gone` and
/// `abandon` must not block: liveness depends on it. A panic in any of them is caught and logged,
/// and counts as a failure.
pub trait Peering: Send + Sync + 'static {
    /// Makes this side's endpoint of a link with `peer`, and the offer that takes the peer to it.
    ///
    /// # Errors
    /// Whatever the fabric says; it is shown to both sides, and tried again until the peer is gone.
    fn prepare(&self, peer: &PeerInfo) -> Result<Prepared, Status>;

    /// Connects the endpoint `ticket` with the endpoint behind the peer's `offer`. Blocks, for
    /// `timeout` at most. The `initiator` reaches out, the other side waits to be reached. On
    /// failure nothing is left of it.
    ///
    /// # Errors
    /// Whatever the fabric says; it is shown to both sides, and tried again until the peer is gone.
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

    /// Both sides have said that they are connected: the link may be used.
    fn ready(&self, peer: &PeerInfo, ticket: u64);

    /// A link that was ready is not to be used any more.
    fn lost(&self, peer: &PeerInfo, cause: LossCause);

    /// A life of the peer is over that had no link which was ready: it never had one, or that was
    /// lost before.
    fn gone(&self, peer: &PeerInfo, cause: LossCause);
}
