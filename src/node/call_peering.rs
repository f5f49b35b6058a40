//! How members meet whose tensors travel by gRPC calls.

use super::offer::{self, FabricOffer, FabricRefusal, OfferState};
use super::peering::{PeerDirectory, tag_of};
use super::transport::PeerTransport;
use crate::bootstrap::{PeerInfo, Peering, Prepared};
use crate::fabric::FabricKind;
use crate::matching::PeerIndex;
use crate::matching::recv_tensor::CallLink;
use crate::rendezvous::CallPath;
use crate::wire::{Code, LossCause, Status, TaskId};
use std::sync::Arc;
use std::time::Duration;

/// Links members that both name the path. There is nothing to connect: the service is reached.
pub(super) struct CallPeering {
    path: Arc<CallPath>,
    me: TaskId,
    directory: PeerDirectory,
}

impl CallPeering {
    pub fn new(path: Arc<CallPath>, me: TaskId, directory: PeerDirectory) -> Self {
        CallPeering { path, me, directory }
    }

    fn index(&self, peer: &PeerInfo) -> Result<PeerIndex, Status> {
        self.directory.index(&peer.name).ok_or_else(|| {
            let what = format!("{} is not a member of the cluster that this node knows", peer.name);
            Status::new(Code::NotFound, what)
        })
    }

    fn lose(&self, peer: &PeerInfo, cause: LossCause) {
        if let Ok(index) = self.index(peer) {
            self.path.lost(index, &peer.name, tag_of(peer), cause);
        }
    }

    /// Checks that a peer names the path too.
    fn check(&self, peer: &PeerInfo, theirs: &[u8]) -> Result<(), Status> {
        let failed = |why: String| Status::new(Code::FailedPrecondition, why);
        let offers = offer::decode(theirs).map_err(|why| failed(format!("{} made {why}", peer.name)))?;
        let has_grpc = |offer: &FabricOffer| {
            offer.kind == FabricKind::Grpc && matches!(offer.state, OfferState::Offered { .. })
        };
        if offers.iter().any(has_grpc) {
            return Ok(());
        }
        Err(failed(format!(
            "{} and {} have no fabric in common: fabric is grpc at {}, and {} does not name it. Set fabric \
             to the same value on all members, or leave it auto",
            self.me, peer.name, self.me, peer.name
        )))
    }
}

impl Peering for CallPeering {
    fn prepare(&self, peer: &PeerInfo, theirs: Option<&[u8]>) -> Result<Prepared, Status> {
        self.index(peer)?;
        if let Some(theirs) = theirs {
            self.check(peer, theirs)?;
        }
        let why = || FabricRefusal { why: "fabric is grpc".into(), is_final: true };
        let mut offers: Vec<_> =
            FabricKind::FASTEST_FIRST.map(|kind| FabricOffer::refused(kind, why())).into();
        let state = OfferState::Offered { depth: 0, failures: 0, address: Vec::new() };
        offers.push(FabricOffer { kind: FabricKind::Grpc, state });
        Ok(Prepared { ticket: 0, offer: offer::encode(&offers) })
    }

    fn connect(
        &self,
        peer: &PeerInfo,
        _ticket: u64,
        offer: &[u8],
        _initiator: bool,
        _timeout: Duration,
    ) -> Result<(), Status> {
        self.check(peer, offer)?;
        let transport = PeerTransport { kind: FabricKind::Grpc, why: "fabric = grpc".into(), devices: None };
        self.directory.note(self.index(peer)?, transport);
        Ok(())
    }

    fn abandon(&self, _peer: &PeerInfo, _ticket: u64) {}

    fn ready(&self, peer: &PeerInfo, _ticket: u64) {
        if let Ok(index) = self.index(peer) {
            self.path.up(index, CallLink { tag: tag_of(peer), generation: peer.generation });
        }
    }

    fn lost(&self, peer: &PeerInfo, cause: LossCause) {
        self.lose(peer, cause);
    }

    fn gone(&self, peer: &PeerInfo, cause: LossCause) {
        self.lose(peer, cause);
    }
}
