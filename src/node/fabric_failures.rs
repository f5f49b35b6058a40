//! Fabrics on which links with a peer could not be made, so that the next attempts prefer others.

use crate::bootstrap::PeerInfo;
use crate::fabric::{FabricError, FabricKind};
use crate::wire::{Incarnation, TaskId, is_lack};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Failures in a row after which a fabric counts as one that does not reach the peer.
pub(super) const ENOUGH: u8 = 2;

/// The failed attempts with each peer, in its present life.
#[derive(Default)]
pub(super) struct FabricFailures(Mutex<HashMap<TaskId, PeerFailures>>);

struct PeerFailures {
    life: Incarnation,
    failed: HashMap<FabricKind, FailedAttempts>,
}

/// The attempts on one fabric since the last one that made a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FailedAttempts {
    /// Their number, or 255 if there are more.
    pub count: u8,
    /// How the last one failed.
    pub why: String,
}

impl FabricFailures {
    fn peers(&self) -> MutexGuard<'_, HashMap<TaskId, PeerFailures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The failed attempts with this life of the peer over this fabric.
    pub fn of(&self, peer: &PeerInfo, kind: FabricKind) -> FailedAttempts {
        let peers = self.peers();
        let of_life = peers.get(&peer.name).filter(|of_peer| of_peer.life == peer.incarnation);
        of_life.and_then(|of_peer| of_peer.failed.get(&kind)).cloned().unwrap_or_default()
    }

    /// Notes that an endpoint could not be connected. Failures that say nothing of the fabric do
    /// not count.
    pub fn note(&self, peer: &PeerInfo, kind: FabricKind, error: &FabricError) {
        if !tells_of_fabric(kind, error) {
            return;
        }
        let mut peers = self.peers();
        let fresh = || PeerFailures { life: peer.incarnation, failed: HashMap::new() };
        let of_peer = peers.entry(peer.name.clone()).or_insert_with(fresh);
        if of_peer.life != peer.incarnation {
            *of_peer = fresh();
        }
        let failed = of_peer.failed.entry(kind).or_default();
        *failed = FailedAttempts { count: failed.count.saturating_add(1), why: error.to_string() };
    }

    /// Forgets the failures on a fabric that has made a link.
    pub fn forget(&self, peer: &PeerInfo, kind: FabricKind) {
        if let Some(of_peer) = self.peers().get_mut(&peer.name) {
            of_peer.failed.remove(&kind);
        }
    }
}

/// Whether a failure may be the fabric's, and not that of a peer that is stopped, ends or lacks
/// something.
fn tells_of_fabric(kind: FabricKind, error: &FabricError) -> bool {
    match (kind, error) {
        (_, FabricError::Peer { .. } | FabricError::Disagreement { .. }) => true,
        // The system keeps the processes apart, as SELinux may.
        (FabricKind::Shm, FabricError::Os { source, .. }) => source.kind() == ErrorKind::PermissionDenied,
        // The kernel connects the socket of a peer that lives: only its process may be slow.
        (FabricKind::Shm, _) => false,
        (_, FabricError::Os { source, .. }) => !is_lack(source),
        (_, FabricError::Timeout { .. } | FabricError::Unavailable { .. }) => true,
        (_, FabricError::Option { .. }) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use std::time::Duration;

    fn peer(life: u64) -> PeerInfo {
        PeerInfo {
            name: TaskId::new("w", 1).expect("a job name"),
            incarnation: Incarnation::new(life).expect("not 0"),
            host_id: "there".into(),
            generation: 1,
            number: 1,
        }
    }

    fn silent() -> FabricError {
        FabricError::Timeout {
            fabric: FabricKind::Verbs,
            tried: "a ping".into(),
            after: Duration::from_secs(5),
        }
    }

    #[test]
    fn failures_count_for_one_life_until_a_link_is_made() {
        let failures = FabricFailures::default();
        for count in 1..=ENOUGH {
            failures.note(&peer(7), FabricKind::Verbs, &silent());
            assert_eq!(failures.of(&peer(7), FabricKind::Verbs).count, count);
        }
        assert!(failures.of(&peer(7), FabricKind::Verbs).why.contains("a ping took longer"));
        for (life, kind) in [(7, FabricKind::Shm), (8, FabricKind::Verbs)] {
            assert_eq!(failures.of(&peer(life), kind), FailedAttempts::default(), "{life} {kind}");
        }
        failures.forget(&peer(7), FabricKind::Verbs);
        assert_eq!(failures.of(&peer(7), FabricKind::Verbs), FailedAttempts::default());
    }

    #[test]
    fn a_slow_peer_and_a_lack_of_descriptors_do_not_count() {
        let tells = |fabric: FabricKind, errno: Errno| {
            let (tried, source) = ("a call".into(), errno.into());
            tells_of_fabric(fabric, &FabricError::Os { fabric, tried, remedy: "none", source })
        };
        assert!(!tells_of_fabric(FabricKind::Shm, &silent()));
        assert!(!tells(FabricKind::Verbs, Errno::MFILE) && tells(FabricKind::Verbs, Errno::NETUNREACH));
        assert!(!tells(FabricKind::Shm, Errno::MFILE) && !tells(FabricKind::Shm, Errno::CONNREFUSED));
        assert!(tells(FabricKind::Shm, Errno::ACCESS) && tells(FabricKind::Shm, Errno::PERM));
        assert!(tells_of_fabric(FabricKind::Verbs, &silent()));
        let why = "it runs as user 1".into();
        assert!(tells_of_fabric(FabricKind::Shm, &FabricError::Peer { fabric: FabricKind::Shm, why }));
    }
}
