//! Makes links with peers when the bootstrap service brings their addresses.

use super::process::{PeerReport, PeerState};
use crate::bootstrap::{LossCause as Gone, PeerInfo, Peering, Prepared};
use crate::engine::Inline;
use crate::fabric::shm::ShmFabric;
use crate::fabric::{Fabric, FabricKind, Half, LinkOptions, Port, Role};
use crate::rendezvous::{LossCause, Members, PeerIndex, Remote, RemoteOp, RemotePath, Rendezvous};
use crate::wire::{Code, Status, TaskId};
use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

type ShmEngine = Inline<<ShmFabric as Fabric>::Port, Remote>;

/// Which life of each member is linked, and how.
pub(super) struct Lives {
    members: Members,
    chosen: Mutex<HashMap<PeerIndex, Chosen>>,
}

#[derive(Clone)]
struct Chosen {
    incarnation: u64,
    why: String,
}

impl Lives {
    pub fn new(members: Members) -> Self {
        Lives { members, chosen: Mutex::default() }
    }

    fn choose(&self, peer: PeerIndex, incarnation: u64, why: &str) {
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        chosen.insert(peer, Chosen { incarnation, why: why.to_owned() });
    }

    pub fn reports(&self, me: &TaskId, rendezvous: &Rendezvous) -> Vec<PeerReport> {
        let chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let others = self.members.all().iter().filter(|task| *task != me);
        others.filter_map(|task| Some(report(task, self.members.index(task)?, &chosen, rendezvous))).collect()
    }
}

fn report(
    task: &TaskId,
    peer: PeerIndex,
    chosen: &HashMap<PeerIndex, Chosen>,
    rendezvous: &Rendezvous,
) -> PeerReport {
    let chosen = chosen.get(&peer);
    let state = match (rendezvous.lost(peer), chosen) {
        (Some(error), _) => PeerState::Lost(error),
        (None, Some(_)) => PeerState::Connected,
        (None, None) => PeerState::Absent,
    };
    PeerReport {
        task: task.clone(),
        incarnation: chosen.map_or(0, |chosen| chosen.incarnation),
        fabric: chosen.map(|_| FabricKind::Shm),
        why: chosen.map(|chosen| chosen.why.clone()).unwrap_or_default(),
        state,
    }
}
