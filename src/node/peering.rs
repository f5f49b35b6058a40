//! Makes links with peers when the bootstrap service brings their addresses.

use super::pollers::Pollers;
use super::process::{PeerReport, PeerState};
use crate::bootstrap::{Bootstrap, LossCause as Gone, PeerInfo, Peering, Prepared, TaskName};
use crate::engine::{Executor, Unusable};
use crate::fabric::shm::ShmFabric;
use crate::fabric::{Fabric, FabricKind, Half, LinkOptions, Role};
use crate::rendezvous::{
    Error, LossCause, Losses, Members, PeerIndex, PeerWatch, RemoteOp, RemotePath, Rendezvous,
};
use crate::wire::{Code, Status, TaskId};
use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Which life of each member is linked, and how.
pub(super) struct Lives {
    members: Members,
    chosen: Mutex<HashMap<PeerIndex, Chosen>>,
}

struct Chosen {
    incarnation: u64,
    generation: u64,
    spinners: u32,
    why: &'static str,
}

impl Lives {
    pub fn new(members: Members) -> Self {
        Lives { members, chosen: Mutex::default() }
    }

    fn index(&self, name: &TaskName) -> Option<PeerIndex> {
        self.members.index(&TaskId { job: name.job().to_owned(), task: name.task() })
    }

    fn name(&self, peer: PeerIndex) -> Option<TaskName> {
        let task = self.members.task(peer);
        TaskName::new(task.job.as_str(), task.task).ok()
    }

    fn chosen(&self) -> MutexGuard<'_, HashMap<PeerIndex, Chosen>> {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn reports(&self, me: &TaskId, rendezvous: &Rendezvous) -> Vec<PeerReport> {
        let chosen = self.chosen();
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
        why: chosen.map_or("", |chosen| chosen.why),
        state,
    }
}

/// Tells the rendezvous and the bootstrap service what becomes of links.
pub(super) struct Watch {
    losses: Arc<Losses>,
    lives: Arc<Lives>,
    bootstrap: OnceLock<Weak<Bootstrap>>,
    pollers: OnceLock<(Weak<Pollers>, Executor)>,
}

impl Watch {
    pub fn new(losses: Arc<Losses>, lives: Arc<Lives>) -> Self {
        Watch { losses, lives, bootstrap: OnceLock::new(), pollers: OnceLock::new() }
    }

    /// From now on the bootstrap service hears of links that the fabric loses, and all pollers of what ends everything.
    pub fn report_to(&self, bootstrap: &Arc<Bootstrap>, pollers: &Arc<Pollers>, executor: &Executor) {
        let _ = self.bootstrap.set(Arc::downgrade(bootstrap));
        let _ = self.pollers.set((Arc::downgrade(pollers), executor.clone()));
    }

    /// Has every poller end its calls, if this loss ended those of the one that saw it. Not from here: this is called
    /// by a poller.
    fn end_all(&self) {
        let Some(error) = self.losses.ended() else { return };
        let Some((pollers, executor)) = self.pollers.get() else { return };
        let pollers = pollers.clone();
        executor.run(move || {
            if let Some(pollers) = pollers.upgrade() {
                pollers.paths().all().for_each(|path| path.end(error.clone()));
            }
        });
    }
}

impl PeerWatch for Watch {
    fn up(&self, peer: PeerIndex, incarnation: u64) {
        self.losses.up(peer, incarnation);
    }

    fn down(&self, peer: PeerIndex, error: Error) {
        let why = error.to_string();
        self.losses.down(peer, error);
        self.end_all();
        let generation = self.lives.chosen().get(&peer).map(|chosen| chosen.generation);
        if let Some(generation) = generation
            && let Some(bootstrap) = self.bootstrap.get().and_then(Weak::upgrade)
            && let Some(name) = self.lives.name(peer)
        {
            bootstrap.report_lost(&name, generation, &why);
        }
    }
}

/// The bootstrap service's hands: they make halves, connect them, and give the links to the poller.
pub(super) struct FabricPeering {
    fabric: ShmFabric,
    pollers: Arc<Pollers>,
    lives: Arc<Lives>,
    host: String,
    options: LinkOptions,
    halves: Mutex<Halves>,
}

#[derive(Default)]
struct Halves {
    next: u64,
    waiting: HashMap<u64, <ShmFabric as Fabric>::Half>,
}

impl FabricPeering {
    pub fn new(
        fabric: ShmFabric,
        pollers: Arc<Pollers>,
        lives: Arc<Lives>,
        host: String,
        options: LinkOptions,
    ) -> Self {
        FabricPeering { fabric, pollers, lives, host, options, halves: Mutex::default() }
    }

    fn halves(&self) -> MutexGuard<'_, Halves> {
        self.halves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, name: &TaskName) -> Result<PeerIndex, Status> {
        self.lives.index(name).ok_or_else(|| {
            Status::new(Code::NotFound, format!("{name} is not a member of the cluster that this node knows"))
        })
    }

    /// Hands the link to the poller and makes progress until it has been tried in both directions.
    fn try_link(
        &self,
        peer: &PeerInfo,
        link: <ShmFabric as Fabric>::Link,
        timeout: Duration,
    ) -> Result<(), Status> {
        let (done, outcome) = channel();
        let index = self.index(&peer.name)?;
        let engine = self.pollers.of(index);
        let attach = RemoteOp::Attach {
            peer: index,
            incarnation: peer.incarnation.get(),
            link,
            // Nobody listens any more if the time was over.
            done: Box::new(move |result| drop(done.send(result))),
        };
        let unusable = |error: Unusable| Status::new(Code::Unavailable, error.to_string());
        engine.submit(attach).map_err(unusable)?;
        let end = Instant::now() + timeout;
        while Instant::now() < end {
            engine.progress().map_err(unusable)?;
            match outcome.recv_timeout(PROBE) {
                Ok(result) => return result.map_err(|why| Status::new(Code::Unavailable, why)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let message = format!(
            "the new link did not answer a ping within {timeout:?}: does {} make progress?",
            peer.name
        );
        self.lose(&peer.name, LossCause::Closed(message.clone()));
        Err(Status::new(Code::DeadlineExceeded, message))
    }

    fn lose(&self, name: &TaskName, cause: LossCause) {
        if let Ok(index) = self.index(name) {
            RemotePath::lose(&**self.pollers.of(index), index, cause);
        }
    }
}

/// Why a peer is reached as it is.
const WHY: &str = "same host: shared memory";

/// How long the thread that tries a link rests between two looks.
const PROBE: Duration = Duration::from_micros(50);

impl Peering for FabricPeering {
    fn prepare(&self, peer: &PeerInfo) -> Result<Prepared, Status> {
        if peer.host_id != self.host {
            let message = format!(
                "{} runs on another host ({}; this is {}), and this version moves tensors only through shared memory: start all members on one host, in one network namespace",
                peer.name, peer.host_id, self.host
            );
            return Err(Status::new(Code::FailedPrecondition, message));
        }
        let options = LinkOptions { generation: peer.generation as u8, ..self.options.clone() };
        let half = self.fabric.half(&options).map_err(unavailable)?;
        let offer = half.address().to_vec();
        let mut halves = self.halves();
        let ticket = halves.next;
        halves.next += 1;
        halves.waiting.insert(ticket, half);
        Ok(Prepared { ticket, offer })
    }

    fn connect(
        &self,
        peer: &PeerInfo,
        ticket: u64,
        offer: &[u8],
        initiator: bool,
        timeout: Duration,
    ) -> Result<(), Status> {
        let half = self.halves().waiting.remove(&ticket);
        let half = half.ok_or_else(|| Status::new(Code::Internal, "the half of this link is gone"))?;
        let role = if initiator { Role::Initiator } else { Role::Acceptor };
        let started = Instant::now();
        let link = half.connect(role, offer, timeout).map_err(unavailable)?;
        self.try_link(peer, link, timeout.saturating_sub(started.elapsed()))?;
        // Known before `ready`, which the bootstrap service may call after it has let a join return.
        let (incarnation, generation) = (peer.incarnation.get(), peer.generation);
        let chosen = Chosen { incarnation, generation, spinners: peer.spinners, why: WHY };
        let spinners = {
            let mut all = self.lives.chosen();
            all.insert(self.index(&peer.name)?, chosen);
            all.values().map(|chosen| chosen.spinners).sum()
        };
        // All peers of this version are on this host.
        self.pollers.others_spin(spinners);
        Ok(())
    }

    fn abandon(&self, peer: &PeerInfo, ticket: u64) {
        // A half that waits is dropped; a link that was made goes down.
        if self.halves().waiting.remove(&ticket).is_none() {
            self.lose(&peer.name, LossCause::Closed("the link was given up before it was ready".into()));
        }
    }

    fn ready(&self, peer: &PeerInfo, _ticket: u64) {
        let (name, life) = (&peer.name, peer.incarnation);
        tracing::info!(peer = %name, incarnation = %life, fabric = %FabricKind::Shm, why = WHY, "connected");
    }

    fn lost(&self, peer: &PeerInfo, cause: Gone) {
        let cause = match cause {
            Gone::Left { reason } => LossCause::Left(reason),
            Gone::Silent { after } => LossCause::Silent(after),
            other => LossCause::Closed(other.to_string()),
        };
        self.lose(&peer.name, cause);
    }
}

fn unavailable(error: crate::fabric::FabricError) -> Status {
    Status::new(Code::Unavailable, error.to_string())
}
