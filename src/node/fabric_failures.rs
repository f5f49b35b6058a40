//! Fabrics on which links with a peer could not be made, so that the next attempts do without them.

use super::offer::FabricRefusal;
use crate::bootstrap::PeerInfo;
use crate::fabric::{FabricError, FabricKind};
use crate::wire::{Incarnation, TaskId};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Failures in a row after which a fabric counts as one that does not reach the peer.
const ENOUGH: u32 = 2;

/// The failed attempts with each peer, in its present life.
#[derive(Default)]
pub(super) struct FabricFailures(Mutex<HashMap<TaskId, PeerFailures>>);

struct PeerFailures {
    life: Incarnation,
    failed: Vec<(FabricKind, u32, String)>,
}

impl FabricFailures {
    fn peers(&self) -> MutexGuard<'_, HashMap<TaskId, PeerFailures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that links with the peer over this fabric did not fail too often. When all `kinds`
    /// have, all of them are tried again.
    ///
    /// # Errors
    /// How the last attempt failed.
    pub fn check(
        &self,
        peer: &PeerInfo,
        kind: FabricKind,
        kinds: &[FabricKind],
    ) -> Result<(), FabricRefusal> {
        let mut peers = self.peers();
        let Some(of_peer) = peers.get_mut(&peer.name).filter(|of_peer| of_peer.life == peer.incarnation)
        else {
            return Ok(());
        };
        if kinds.iter().all(|kind| of_peer.has_given_up(*kind).is_some()) {
            of_peer.failed.clear();
        }
        match of_peer.has_given_up(kind) {
            Some(why) => Err(FabricRefusal { why: format!("tried {ENOUGH} times: {why}"), is_final: false }),
            None => Ok(()),
        }
    }

    /// Notes that an endpoint could not be connected. Failures that say nothing of the fabric do
    /// not count.
    pub fn note(&self, peer: &PeerInfo, kind: FabricKind, error: &FabricError) {
        if !tells_of_fabric(kind, error) {
            return;
        }
        let mut peers = self.peers();
        let fresh = || PeerFailures { life: peer.incarnation, failed: Vec::new() };
        let of_peer = peers.entry(peer.name.clone()).or_insert_with(fresh);
        if of_peer.life != peer.incarnation {
            *of_peer = fresh();
        }
        match of_peer.failed.iter_mut().find(|(failed, ..)| *failed == kind) {
            Some((_, count, why)) => (*count, *why) = (*count + 1, error.to_string()),
            None => of_peer.failed.push((kind, 1, error.to_string())),
        }
    }
}

impl PeerFailures {
    fn has_given_up(&self, kind: FabricKind) -> Option<&str> {
        let found = self.failed.iter().find(|(failed, count, _)| *failed == kind && *count >= ENOUGH);
        found.map(|(_, _, why)| why.as_str())
    }
}

/// Whether a failure may be the fabric's, and not that of a peer that is stopped, ends or lacks
/// something.
fn tells_of_fabric(kind: FabricKind, error: &FabricError) -> bool {
    const LACKS: [Errno; 4] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
    match (kind, error) {
        (_, FabricError::Peer { .. } | FabricError::Disagreement { .. }) => true,
        // The kernel connects the socket of a peer that lives: only its process may be slow.
        (FabricKind::Shm, _) => false,
        (_, FabricError::Os { source, .. }) => {
            Errno::from_io_error(source).is_none_or(|e| !LACKS.contains(&e))
        }
        (_, FabricError::Timeout { .. } | FabricError::Unavailable { .. }) => true,
        (_, FabricError::Option { .. }) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    const BOTH: [FabricKind; 2] = [FabricKind::Shm, FabricKind::Verbs];

    fn silent() -> FabricError {
        FabricError::Timeout {
            fabric: FabricKind::Verbs,
            tried: "a ping".into(),
            after: Duration::from_secs(5),
        }
    }

    #[test]
    fn a_fabric_that_fails_again_is_left_out_for_that_life_of_the_peer() {
        let failures = FabricFailures::default();
        for _ in 0..ENOUGH {
            assert_eq!(failures.check(&peer(7), FabricKind::Verbs, &BOTH), Ok(()));
            failures.note(&peer(7), FabricKind::Verbs, &silent());
        }
        let refusal = failures.check(&peer(7), FabricKind::Verbs, &BOTH).expect_err("it failed twice");
        assert!(refusal.why.contains("a ping took longer") && !refusal.is_final, "{refusal:?}");
        assert_eq!(failures.check(&peer(7), FabricKind::Shm, &BOTH), Ok(()));
        assert_eq!(failures.check(&peer(8), FabricKind::Verbs, &BOTH), Ok(()), "another life");
    }

    #[test]
    fn a_node_without_another_fabric_tries_the_same_again() {
        let failures = FabricFailures::default();
        for _ in 0..5 {
            failures.note(&peer(7), FabricKind::Verbs, &silent());
            assert_eq!(failures.check(&peer(7), FabricKind::Verbs, &[FabricKind::Verbs]), Ok(()));
        }
    }

    #[test]
    fn a_slow_peer_and_a_lack_of_descriptors_do_not_count() {
        let lack = |errno: Errno| FabricError::Os {
            fabric: FabricKind::Verbs,
            tried: "a call".into(),
            remedy: "none",
            source: errno.into(),
        };
        assert!(!tells_of_fabric(FabricKind::Shm, &silent()));
        assert!(!tells_of_fabric(FabricKind::Verbs, &lack(Errno::MFILE)));
        assert!(tells_of_fabric(FabricKind::Verbs, &lack(Errno::NETUNREACH)));
        assert!(tells_of_fabric(FabricKind::Verbs, &silent()));
        let why = "it runs as user 1".into();
        assert!(tells_of_fabric(FabricKind::Shm, &FabricError::Peer { fabric: FabricKind::Shm, why }));
    }
}
