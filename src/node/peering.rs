//! Makes links with peers when the bootstrap service brings their addresses.

use super::pollers::{Polled, Pollers};
use super::process::{PeerReport, PeerState};
use super::reach::{Reach, Way};
use crate::bootstrap::{Bootstrap, PeerInfo, Peering, Prepared};
use crate::engine::{Executor, Unusable};
use crate::fabric::{Endpoint, LinkOptions, Role};
use crate::rendezvous::{
    Context, Error, LinkTag, Losses, Members, Paths, PeerIndex, PeerObserver, PeerStatus, RemoteCommand,
};
use crate::wire::{Code, LossCause, Status, TaskId};
use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The members under the two names that the rooms have for them, and how each was reached last.
#[derive(Clone)]
pub(super) struct Names {
    members: Members,
    ways: Arc<Mutex<HashMap<PeerIndex, Way>>>,
}

impl Names {
    pub fn new(members: Members) -> Self {
        Names { members, ways: Arc::default() }
    }

    fn ways(&self) -> MutexGuard<'_, HashMap<PeerIndex, Way>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, name: &TaskId) -> Option<PeerIndex> {
        self.members.index(name)
    }

    fn task(&self, peer: PeerIndex) -> &TaskId {
        self.members.task(peer)
    }

    /// What is known of everybody but this task.
    pub fn reports(&self, me: &TaskId, context: &Context) -> Vec<PeerReport> {
        let others = self.members.all().iter().filter(|task| *task != me);
        let of = |task: &TaskId| {
            let index = self.members.index(task)?;
            Some(report(task, context.peer_status(index), self.ways().get(&index).copied()))
        };
        others.filter_map(of).collect()
    }
}

fn report(task: &TaskId, status: PeerStatus, way: Option<Way>) -> PeerReport {
    let (tag, state) = match status {
        PeerStatus::Absent => (None, PeerState::Absent),
        PeerStatus::Up(tag) => (Some(tag), PeerState::Connected),
        PeerStatus::Lost(tag, error) => (Some(tag), PeerState::Lost(error)),
    };
    PeerReport {
        task: task.clone(),
        incarnation: tag.map_or(0, |tag| tag.incarnation),
        generation: tag.map_or(0, |tag| tag.generation),
        fabric: way.filter(|_| tag.is_some()).map(|way| way.kind),
        why: way.filter(|_| tag.is_some()).map_or("", |way| way.why),
        state,
    }
}

/// Tells the rendezvous and the bootstrap service what becomes of links.
pub(super) struct Watch {
    losses: Arc<Losses>,
    names: Names,
    bootstrap: OnceLock<Weak<Bootstrap>>,
    pollers: OnceLock<(Weak<dyn Polled>, Executor)>,
}

impl Watch {
    pub fn new(losses: Arc<Losses>, names: Names) -> Self {
        Watch { losses, names, bootstrap: OnceLock::new(), pollers: OnceLock::new() }
    }

    /// From now on the bootstrap service hears of links that the fabric loses, and all pollers of
    /// what ends everything.
    pub fn report_to(&self, bootstrap: &Arc<Bootstrap>, pollers: &Arc<dyn Polled>, executor: &Executor) {
        let _ = self.bootstrap.set(Arc::downgrade(bootstrap));
        let _ = self.pollers.set((Arc::downgrade(pollers), executor.clone()));
    }

    /// Has every poller end its calls, if this loss ended those of the one that saw it. Not from
    /// here: this is called by a poller.
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

    /// The bootstrap service makes a new link if it held this one for up.
    fn report(&self, peer: PeerIndex, tag: LinkTag, why: &str) {
        if let Some(bootstrap) = self.bootstrap.get().and_then(Weak::upgrade) {
            bootstrap.report_lost(self.names.task(peer), tag.generation, why);
        }
    }
}

impl PeerObserver for Watch {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.up(peer, tag);
    }

    fn down(&self, peer: PeerIndex, tag: LinkTag, error: Error) {
        let why = error.to_string();
        self.losses.down(peer, tag, error);
        self.end_all();
        self.report(peer, tag, &why);
    }

    fn failed_before_ready(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.failed_before_ready(peer, tag);
        self.report(peer, tag, "it had failed before both sides knew that it was up");
    }
}

/// The bootstrap service's hands: they make endpoints, connect them, and give the links to the
/// poller.
pub(super) struct FabricPeering<F: Reach> {
    fabric: F,
    pollers: Arc<Pollers<F>>,
    names: Names,
    host: String,
    options: LinkOptions,
    endpoints: Mutex<Endpoints<F::Endpoint>>,
}

struct Endpoints<H> {
    next: u64,
    waiting: HashMap<u64, (H, Way)>,
}

impl<F: Reach> FabricPeering<F> {
    pub fn new(
        fabric: F,
        pollers: Arc<Pollers<F>>,
        names: Names,
        host: String,
        options: LinkOptions,
    ) -> Self {
        let endpoints = Mutex::new(Endpoints { next: 0, waiting: HashMap::new() });
        FabricPeering { fabric, pollers, names, host, options, endpoints }
    }

    fn endpoints(&self) -> MutexGuard<'_, Endpoints<F::Endpoint>> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, name: &TaskId) -> Result<PeerIndex, Status> {
        self.names.index(name).ok_or_else(|| {
            Status::new(Code::NotFound, format!("{name} is not a member of the cluster that this node knows"))
        })
    }

    /// Hands the link to the poller and makes progress until it has been tried in both directions.
    fn try_link(&self, peer: &PeerInfo, link: F::Link, timeout: Duration) -> Result<(), Status> {
        let (done, outcome) = channel();
        let index = self.index(&peer.name)?;
        let engine = self.pollers.of(index);
        let attach = RemoteCommand::Attach {
            peer: index,
            tag: tag_of(peer),
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
        self.lose(peer, LossCause::Closed(message.clone()));
        Err(Status::new(Code::DeadlineExceeded, message))
    }

    /// This link with the peer, and no other, is not to be used any more.
    fn lose(&self, peer: &PeerInfo, cause: LossCause) {
        self.tell(peer, |peer, tag| RemoteCommand::Lose { peer, tag, cause });
    }

    fn tell(&self, peer: &PeerInfo, op: impl FnOnce(PeerIndex, LinkTag) -> RemoteCommand<F::Link>) {
        if let Ok(index) = self.index(&peer.name) {
            // On a poller that is not usable any more every link and call has ended already.
            let _ = self.pollers.of(index).submit(op(index, tag_of(peer)));
        }
    }
}

fn tag_of(peer: &PeerInfo) -> LinkTag {
    LinkTag { incarnation: peer.incarnation.get(), generation: peer.generation }
}

/// How long the thread that tries a link rests between two looks.
const PROBE: Duration = Duration::from_micros(50);

impl<F: Reach> Peering for FabricPeering<F> {
    fn prepare(&self, peer: &PeerInfo) -> Result<Prepared, Status> {
        let way = self.fabric.way(peer.host_id == self.host).map_err(|status| {
            let hosts = format!("{} is on host {}, this is {}: ", peer.name, peer.host_id, self.host);
            Status::new(status.code, hosts + &status.message)
        })?;
        let options = LinkOptions { generation: peer.generation as u8, ..self.options.clone() };
        let port = Paths::index_of(self.index(&peer.name)?, self.pollers.count());
        let endpoint = self.fabric.endpoint_by(way, port, &options)?;
        let offer = [&[way.tag()], endpoint.address()].concat();
        let mut endpoints = self.endpoints();
        let ticket = endpoints.next;
        endpoints.next += 1;
        endpoints.waiting.insert(ticket, (endpoint, way));
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
        let endpoint = self.endpoints().waiting.remove(&ticket);
        let (endpoint, way) =
            endpoint.ok_or_else(|| Status::new(Code::Internal, "the endpoint of this link is gone"))?;
        let offer = match offer.split_first() {
            Some((tag, offer)) if *tag == way.tag() => offer,
            _ => return Err(other_way(peer, way)),
        };
        let role = if initiator { Role::Initiator } else { Role::Acceptor };
        let started = Instant::now();
        let link = endpoint.connect(role, offer, timeout).map_err(unavailable)?;
        self.try_link(peer, link, timeout.saturating_sub(started.elapsed()))?;
        let index = self.index(&peer.name)?;
        self.names.ways().insert(index, way);
        if peer.host_id == self.host {
            self.pollers.peer_spins(index, peer.spinners);
        }
        Ok(())
    }

    fn abandon(&self, peer: &PeerInfo, ticket: u64) {
        // An endpoint that waits is dropped; a link that was made goes down.
        if self.endpoints().waiting.remove(&ticket).is_none() {
            self.lose(peer, LossCause::Closed("the link was given up before it was ready".into()));
        }
    }

    fn ready(&self, peer: &PeerInfo, _ticket: u64) {
        self.tell(peer, |peer, tag| RemoteCommand::Ready { peer, tag });
        let way = self.index(&peer.name).ok().and_then(|index| self.names.ways().get(&index).copied());
        if let Some(Way { kind, why }) = way {
            tracing::info!(peer = %peer.name, incarnation = %peer.incarnation, fabric = %kind, why, "connected");
        }
    }

    fn lost(&self, peer: &PeerInfo, cause: LossCause) {
        self.lose(peer, cause);
    }

    fn gone(&self, peer: &PeerInfo, cause: LossCause) {
        self.tell(peer, |peer, tag| RemoteCommand::Gone { peer, tag, cause });
    }
}

/// The two sides chose different fabrics.
fn other_way(peer: &PeerInfo, way: Way) -> Status {
    let message = format!(
        "this side reaches {} by {} ({}), and it wants to be reached otherwise: set fabric to the same on all members",
        peer.name, way.kind, way.why
    );
    Status::new(Code::FailedPrecondition, message)
}

fn unavailable(error: crate::fabric::FabricError) -> Status {
    Status::new(Code::Unavailable, error.to_string())
}

#[cfg(test)]
#[path = "peering_tests.rs"]
mod tests;
