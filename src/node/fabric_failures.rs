//! Fabrics on which links with a peer could not be made, so that the next attempts prefer others.

use crate::bootstrap::PeerInfo;
use crate::fabric::{FabricError, FabricKind};
use crate::wire::{Incarnation, TaskId, is_lack};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Failures in a row after which a fabric counts as one that does not reach the peer.
pub(super) const ENOUGH: u8 = 2;

/// How long after the last failure all count. A peer may only have been slow for a while, and the
/// next link should be as fast as it can.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

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
    /// When. None if none did.
    last: Option<Instant>,
}

impl FailedAttempts {
    /// Whether they still count.
    fn is_recent(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| now.saturating_duration_since(last) < FORGOTTEN_AFTER)
    }
}

impl FabricFailures {
    fn peers(&self) -> MutexGuard<'_, HashMap<TaskId, PeerFailures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The failed attempts with this life of the peer over this fabric.
    pub fn of(&self, peer: &PeerInfo, kind: FabricKind) -> FailedAttempts {
        let peers = self.peers();
        let of_life = peers.get(&peer.name).filter(|of_peer| of_peer.life == peer.incarnation);
        let failed = of_life.and_then(|of_peer| of_peer.failed.get(&kind));
        failed.filter(|failed| failed.is_recent(Instant::now())).cloned().unwrap_or_default()
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
        let (failed, now) = (of_peer.failed.entry(kind).or_default(), Instant::now());
        let count = if failed.is_recent(now) { failed.count.saturating_add(1) } else { 1 };
        *failed = FailedAttempts { count, why: error.to_string(), last: Some(now) };
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
        (_, FabricError::Option { .. } | FabricError::Setting { .. }) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

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
    fn failures_of_long_ago_do_not_count() {
        let failures = FabricFailures::default();
        let note = || failures.note(&peer(7), FabricKind::Verbs, &silent());
        note();
        note();
        let long_ago = Instant::now().checked_sub(FORGOTTEN_AFTER).expect("clocks count back");
        let age = || {
            let mut peers = failures.peers();
            let failed = peers.get_mut(&peer(7).name).and_then(|it| it.failed.get_mut(&FabricKind::Verbs));
            failed.expect("noted").last = Some(long_ago);
        };
        age();
        assert_eq!(failures.of(&peer(7), FabricKind::Verbs), FailedAttempts::default());
        note();
        assert_eq!(failures.of(&peer(7), FabricKind::Verbs).count, 1);
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
