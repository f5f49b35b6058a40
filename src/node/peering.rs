//! Makes links with peers from the addresses that the bootstrap service brings.

use super::events::{EventHistory, EventPeer};
use super::pollers::{LinkPollers, PollerSet};
use super::process::{PeerReport, PeerState};
use super::transport::{PeerTransport, TransportFabric};
use crate::bootstrap::{Bootstrap, PeerInfo, Peering, Prepared};
use crate::engine::{Executor, Unusable};
use crate::fabric::{Endpoint, FabricError, LinkOptions, Role};
use crate::matching::{LinkTag, LostPeer, Members, PeerIndex, PeerObserver, RemoteCommand, WaitReports};
use crate::rendezvous::{Context, Error, Losses, Paths, PeerStatus};
use crate::wire::{Code, Generation, LossCause, Status, TaskId};
use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Maps tasks to peers, and peers to the transport of their last link.
#[derive(Clone)]
pub(super) struct PeerDirectory {
    members: Members,
    transports: Arc<Mutex<HashMap<PeerIndex, PeerTransport>>>,
}

impl PeerDirectory {
    pub fn new(members: Members) -> Self {
        PeerDirectory { members, transports: Arc::default() }
    }

    fn transports(&self) -> MutexGuard<'_, HashMap<PeerIndex, PeerTransport>> {
        self.transports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, task: &TaskId) -> Option<PeerIndex> {
        self.members.index(task)
    }

    fn task(&self, peer: PeerIndex) -> &TaskId {
        self.members.task(peer)
    }

    /// Reports on every member but task `me`.
    pub fn reports(&self, me: &TaskId, context: &Context) -> Vec<PeerReport> {
        let others = self.members.all().iter().filter(|task| *task != me);
        let of = |task: &TaskId| {
            let index = self.members.index(task)?;
            Some(report(task, context.peer_status(index), self.transports().get(&index).copied()))
        };
        others.filter_map(of).collect()
    }
}

fn report(task: &TaskId, status: PeerStatus, transport: Option<PeerTransport>) -> PeerReport {
    let (tag, state) = match status {
        PeerStatus::Absent => (None, PeerState::Absent),
        PeerStatus::Up(tag) => (Some(tag), PeerState::Connected),
        PeerStatus::Lost(tag, error) => (tag, PeerState::Lost(error)),
    };
    let transport = transport.filter(|_| tag.is_some());
    PeerReport {
        task: task.clone(),
        incarnation: tag.map(|tag| tag.incarnation),
        generation: tag.map_or(Generation::NONE, |tag| tag.generation),
        fabric: transport.map(|transport| transport.kind),
        why: transport.map_or("", |transport| transport.why),
        state,
    }
}

/// Reports the state of links to the rendezvous and to the bootstrap service.
pub(super) struct LinkReporter {
    me: TaskId,
    losses: Arc<Losses>,
    directory: PeerDirectory,
    events: Arc<EventHistory>,
    bootstrap: OnceLock<Weak<Bootstrap>>,
    pollers: OnceLock<(Weak<dyn PollerSet>, Executor)>,
}

impl LinkReporter {
    pub fn new(me: TaskId, losses: Arc<Losses>, directory: PeerDirectory, events: Arc<EventHistory>) -> Self {
        let (bootstrap, pollers) = (OnceLock::new(), OnceLock::new());
        LinkReporter { me, losses, directory, events, bootstrap, pollers }
    }

    fn event_peer(&self, peer: PeerIndex, tag: LinkTag) -> EventPeer {
        let LinkTag { incarnation, generation } = tag;
        EventPeer { peer: self.directory.task(peer).clone(), incarnation, generation }
    }

    /// Reports lost links to the bootstrap service from now on, and the end of every call to all
    /// pollers.
    pub fn report_to(&self, bootstrap: &Arc<Bootstrap>, pollers: &Arc<dyn PollerSet>, executor: &Executor) {
        let _ = self.bootstrap.set(Arc::downgrade(bootstrap));
        let _ = self.pollers.set((Arc::downgrade(pollers), executor.clone()));
    }

    /// Ends the calls of every poller, if the loss is fatal. The executor does this, as this thread
    /// holds a poller.
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

    /// Writes to the log on the executor: this thread holds a poller, and the log may block.
    fn log(&self, write: impl FnOnce() + Send + 'static) {
        match self.pollers.get() {
            Some((_, executor)) => executor.run(write),
            None => write(),
        }
    }

    /// Reports the loss to the bootstrap service, which makes a new link if this one was up.
    fn report(&self, peer: PeerIndex, tag: LinkTag, why: &str) {
        if let Some(bootstrap) = self.bootstrap.get().and_then(Weak::upgrade) {
            bootstrap.report_lost(self.directory.task(peer), tag.generation.get(), why);
        }
    }
}

impl PeerObserver for LinkReporter {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.up(peer, tag);
        let Some(event) = self.events.up(self.event_peer(peer, tag)) else { return };
        let transport = self.directory.transports().get(&peer).copied();
        let over = transport.map_or(String::new(), |found| format!(" by {} ({})", found.kind, found.why));
        let me = self.me.clone();
        self.log(move || tracing::info!("{me}: {event}: connected{over}"));
    }

    fn down(&self, lost: &LostPeer) {
        let is_fatal = self.losses.note(lost);
        if let Some(event) = self.events.lost(self.event_peer(lost.peer, lost.tag), lost.error.clone()) {
            let (me, lost) = (self.me.clone(), lost.clone());
            self.log(move || event.log(&me, &lost, is_fatal));
        }
        self.end_all();
        // The peer gets the cause alone: the rest of the error is about the peer.
        let why = match &lost.error {
            Error::PeerLost { cause, .. } => cause.to_string(),
            error => error.to_string(),
        };
        self.report(lost.peer, lost.tag, &why);
    }

    fn hung(&self, waits: &WaitReports) {
        let (me, waits) = (self.me.clone(), waits.clone());
        self.log(move || {
            let listed = waits.to_string().replace('\n', "; ");
            tracing::warn!(
                "{me}: calls have waited for longer than hung_after: {listed}. What to do: read Node::waits \
                 and the log of the peers that are waited for; Node::flight_logs has the last events of \
                 their links"
            );
        });
    }

    fn failed_before_ready(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.failed_before_ready(peer, tag);
        self.report(peer, tag, "it had failed before both sides knew that it was up");
    }
}

/// Makes endpoints for the bootstrap service, connects them, and attaches the links to pollers.
pub(super) struct FabricPeering<F: TransportFabric> {
    fabric: F,
    pollers: Arc<dyn LinkPollers<F::Link>>,
    me: TaskId,
    directory: PeerDirectory,
    host: String,
    options: LinkOptions,
    endpoints: Mutex<Endpoints<F::Endpoint>>,
}

struct Endpoints<H> {
    next: u64,
    waiting: HashMap<u64, (H, PeerTransport)>,
}

impl<F: TransportFabric> FabricPeering<F> {
    pub fn new(
        fabric: F,
        pollers: Arc<dyn LinkPollers<F::Link>>,
        me: TaskId,
        directory: PeerDirectory,
        host: String,
        options: LinkOptions,
    ) -> Self {
        let endpoints = Mutex::new(Endpoints { next: 0, waiting: HashMap::new() });
        FabricPeering { fabric, pollers, me, directory, host, options, endpoints }
    }

    fn endpoints(&self) -> MutexGuard<'_, Endpoints<F::Endpoint>> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, task: &TaskId) -> Result<PeerIndex, Status> {
        self.directory.index(task).ok_or_else(|| {
            Status::new(Code::NotFound, format!("{task} is not a member of the cluster that this node knows"))
        })
    }

    /// Attaches the link to its poller and makes progress until a probe has gone both ways.
    fn try_link(&self, peer: &PeerInfo, link: F::Link, timeout: Duration) -> Result<(), Status> {
        let (done, outcome) = channel();
        let index = self.index(&peer.name)?;
        let attach = RemoteCommand::Attach {
            peer: index,
            tag: tag_of(peer),
            link,
            // The channel is closed if the timeout has passed.
            done: Box::new(move |result| drop(done.send(result))),
        };
        let unusable = |error: Unusable| Status::new(Code::Unavailable, error.to_string());
        self.pollers.submit(index, attach).map_err(unusable)?;
        let end = Instant::now() + timeout;
        while Instant::now() < end {
            self.pollers.progress(index).map_err(unusable)?;
            match outcome.recv_timeout(PROBE_POLL) {
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

    /// Checks that the peer has the same depth, if it must. Returns the rest of its offer.
    fn check_depth<'a>(&self, peer: &PeerInfo, offer: &'a [u8]) -> Result<&'a [u8], Status> {
        let refused = |message| Status::new(Code::FailedPrecondition, message);
        let (theirs, offer) = offer
            .split_first_chunk()
            .ok_or_else(|| refused(format!("{} made an offer without a depth", peer.name)))?;
        let theirs = u32::from_le_bytes(*theirs);
        match self.fabric.common_depth(&self.options) {
            Some(ours) if ours != theirs => Err(refused(format!(
                "queue_depth is {ours} at {} and {theirs} at {}: give all members the same, and start again",
                self.me, peer.name
            ))),
            _ => Ok(offer),
        }
    }

    /// Closes this link with the peer, and no other link.
    fn lose(&self, peer: &PeerInfo, cause: LossCause) {
        self.submit(peer, |peer, tag| RemoteCommand::Lose { peer, tag, cause });
    }

    fn submit(&self, peer: &PeerInfo, command: impl FnOnce(PeerIndex, LinkTag) -> RemoteCommand<F::Link>) {
        if let Ok(index) = self.index(&peer.name) {
            // An unusable poller has ended every link and call already.
            let _ = self.pollers.submit(index, command(index, tag_of(peer)));
        }
    }
}

fn tag_of(peer: &PeerInfo) -> LinkTag {
    LinkTag { incarnation: peer.incarnation, generation: peer.number.into() }
}

/// The depth in the offer of a fabric whose two sides may differ.
const ANY_DEPTH: u32 = 0;

/// How long the thread that probes a link waits between two polls.
const PROBE_POLL: Duration = Duration::from_micros(50);

impl<F: TransportFabric> Peering for FabricPeering<F> {
    fn prepare(&self, peer: &PeerInfo) -> Result<Prepared, Status> {
        let transport = self.fabric.transport(peer.host_id == self.host).map_err(|status| {
            let hosts = format!("{} is on host {}, this is {}: ", peer.name, peer.host_id, self.host);
            Status::new(status.code, hosts + &status.message)
        })?;
        let options = LinkOptions { generation: peer.generation as u8, ..self.options.clone() };
        let port = Paths::index_of(self.index(&peer.name)?, self.pollers.count());
        let endpoint = self.fabric.node_endpoint(port, &options)?;
        let depth = self.fabric.common_depth(&options).unwrap_or(ANY_DEPTH);
        let offer = [&[transport.tag()], &depth.to_le_bytes()[..], endpoint.address()].concat();
        let mut endpoints = self.endpoints();
        let ticket = endpoints.next;
        endpoints.next += 1;
        endpoints.waiting.insert(ticket, (endpoint, transport));
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
        let (endpoint, transport) =
            endpoint.ok_or_else(|| Status::new(Code::Internal, "the endpoint of this link is gone"))?;
        let offer = match offer.split_first() {
            Some((tag, offer)) if *tag == transport.tag() => offer,
            _ => return Err(other_transport(peer, transport)),
        };
        let offer = self.check_depth(peer, offer)?;
        let role = if initiator { Role::Initiator } else { Role::Acceptor };
        let started = Instant::now();
        let link = endpoint.connect(role, offer, timeout).map_err(unavailable)?;
        self.try_link(peer, link, timeout.saturating_sub(started.elapsed()))?;
        let index = self.index(&peer.name)?;
        self.directory.transports().insert(index, transport);
        Ok(())
    }

    fn abandon(&self, peer: &PeerInfo, ticket: u64) {
        // A waiting endpoint is dropped; a link goes down.
        if self.endpoints().waiting.remove(&ticket).is_none() {
            self.lose(peer, LossCause::Closed("the link was given up before it was ready".into()));
        }
    }

    fn ready(&self, peer: &PeerInfo, _ticket: u64) {
        self.submit(peer, |peer, tag| RemoteCommand::Ready { peer, tag });
    }

    fn lost(&self, peer: &PeerInfo, cause: LossCause) {
        self.lose(peer, cause);
    }

    fn gone(&self, peer: &PeerInfo, cause: LossCause) {
        self.submit(peer, |peer, tag| RemoteCommand::Gone { peer, tag, cause });
    }
}

/// The error of two sides that chose different fabrics.
fn other_transport(peer: &PeerInfo, transport: PeerTransport) -> Status {
    let message = format!(
        "this side reaches {} by {} ({}), and the peer chose another fabric: set fabric to the same value \
            on all members",
        peer.name, transport.kind, transport.why
    );
    Status::new(Code::FailedPrecondition, message)
}

/// The error of a link. One that no further attempt mends ends the joins of both sides.
fn unavailable(error: FabricError) -> Status {
    let is_final = matches!(error, FabricError::Disagreement { .. });
    Status::new(if is_final { Code::FailedPrecondition } else { Code::Unavailable }, error.to_string())
}

#[cfg(test)]
#[path = "peering_tests.rs"]
mod tests;
