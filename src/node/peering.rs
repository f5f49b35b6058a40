//! Makes links with peers from the addresses that the bootstrap service brings.

use super::events::{EventHistory, EventPeer};
use super::fabric_failures::{ENOUGH, FabricFailures};
use super::offer::{self, FabricOffer, FabricRefusal, OfferState};
use super::pollers::LinkPollers;
use super::process::{PeerReport, PeerState};
use super::transport::{NodeFabrics, PeerTransport, common_depth};
use crate::bootstrap::{Bootstrap, PeerInfo, Peering, Prepared};
use crate::engine::{Executor, Unusable};
use crate::fabric::multi::{MultiEndpoint, MultiLink};
use crate::fabric::{Endpoint, FabricError, FabricKind, LinkOptions, Role};
use crate::matching::{
    LinkTag, LostPeer, Members, PeerEnd, PeerIndex, PeerObserver, RemoteCommand, WaitReports,
};
use crate::rendezvous::{Context, Error, Losses, Paths, PeerStatus};
use crate::wire::{Code, Generation, LossCause, Status, TaskId};
use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Maps tasks to peers, and peers to the transport of their last link.
#[derive(Clone)]
pub(super) struct PeerDirectory {
    members: Members,
    transports: Arc<Mutex<HashMap<PeerIndex, PeerTransport>>>,
    /// For each peer whether its transport is verbs, for senders, which take no lock.
    over_verbs: Arc<[AtomicBool]>,
    /// See [`PeerObserver::told_ends`].
    told_ends: Arc<Mutex<Vec<PeerEnd>>>,
}

impl PeerDirectory {
    pub fn new(members: Members) -> Self {
        let over_verbs = members.all().iter().map(|_| AtomicBool::new(false)).collect();
        PeerDirectory { members, transports: Arc::default(), over_verbs, told_ends: Arc::default() }
    }

    /// Notes the transport of a new link.
    pub fn note(&self, peer: PeerIndex, transport: PeerTransport) {
        if let Some(over_verbs) = self.over_verbs.get(peer.0 as usize) {
            over_verbs.store(transport.kind == FabricKind::Verbs, Ordering::Relaxed);
        }
        self.transports().insert(peer, transport);
    }

    /// Whether the last link with a peer was over verbs; false before there was one.
    pub fn is_over_verbs(&self, peer: PeerIndex) -> bool {
        self.over_verbs.get(peer.0 as usize).is_some_and(|is| is.load(Ordering::Relaxed))
    }

    fn note_end(&self, end: PeerEnd) {
        let mut ends = self.told_ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.retain(|earlier| earlier.peer != end.peer);
        ends.push(end);
    }

    fn transports(&self) -> MutexGuard<'_, HashMap<PeerIndex, PeerTransport>> {
        self.transports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn index(&self, task: &TaskId) -> Option<PeerIndex> {
        self.members.index(task)
    }

    fn task(&self, peer: PeerIndex) -> &TaskId {
        self.members.task(peer)
    }

    /// Reports on every member but task `me`. Takes no lock in a forked child.
    pub fn reports(&self, me: &TaskId, context: &Context) -> Vec<PeerReport> {
        let others = self.members.all().iter().filter(|task| *task != me);
        let of = |task: &TaskId| {
            let index = self.members.index(task)?;
            Some(report(task, context.peer_status(index), || self.transports().get(&index).cloned()))
        };
        others.filter_map(of).collect()
    }
}

fn report(task: &TaskId, status: PeerStatus, find: impl FnOnce() -> Option<PeerTransport>) -> PeerReport {
    let (tag, state) = match status {
        PeerStatus::Absent => (None, PeerState::Absent),
        PeerStatus::Up(tag) => (Some(tag), PeerState::Connected),
        PeerStatus::Lost(tag, error) => (tag, PeerState::Lost(error)),
    };
    let transport = tag.and_then(|_| find());
    PeerReport {
        task: task.clone(),
        incarnation: tag.map(|tag| tag.incarnation),
        generation: tag.map_or(Generation::NONE, |tag| tag.generation),
        fabric: transport.as_ref().map(|transport| transport.kind),
        devices: transport.as_ref().map_or_else(Vec::new, PeerTransport::device_names),
        why: transport.map_or_else(|| "".into(), |transport| transport.why),
        state,
    }
}

/// Reports the state of links to the rendezvous and to the bootstrap service.
pub(super) struct LinkReporter {
    me: TaskId,
    /// As the setting of this name.
    print_paths: bool,
    losses: Arc<Losses>,
    directory: PeerDirectory,
    events: Arc<EventHistory>,
    bootstrap: OnceLock<Weak<Bootstrap>>,
    context: OnceLock<(Weak<Context>, Executor)>,
}

impl LinkReporter {
    pub fn new(
        (me, print_paths): (TaskId, bool),
        losses: Arc<Losses>,
        directory: PeerDirectory,
        events: Arc<EventHistory>,
    ) -> Self {
        let (bootstrap, context) = (OnceLock::new(), OnceLock::new());
        LinkReporter { me, print_paths, losses, directory, events, bootstrap, context }
    }

    fn event_peer(&self, peer: PeerIndex, tag: LinkTag) -> EventPeer {
        let LinkTag { incarnation, generation } = tag;
        EventPeer { peer: self.directory.task(peer).clone(), incarnation, generation }
    }

    /// Reports lost links to the bootstrap service from now on, and the end of every call to the
    /// rendezvous.
    pub fn report_to(&self, bootstrap: &Arc<Bootstrap>, context: &Arc<Context>, executor: &Executor) {
        let _ = self.bootstrap.set(Arc::downgrade(bootstrap));
        let _ = self.context.set((Arc::downgrade(context), executor.clone()));
    }

    /// Ends the calls of every poller and those within the process, if the loss is fatal. The
    /// executor does this, as this thread holds a poller.
    fn end_all(&self) {
        let Some(error) = self.losses.ended() else { return };
        let Some((context, executor)) = self.context.get() else { return };
        let context = context.clone();
        executor.run(move || {
            if let Some(context) = context.upgrade() {
                context.end(error);
            }
        });
    }

    /// Writes to the log on the executor: this thread holds a poller, and the log may block.
    fn log(&self, write: impl FnOnce() + Send + 'static) {
        match self.context.get() {
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
        let transport = self.directory.transports().get(&peer).cloned();
        let over = transport.map_or(String::new(), |found| {
            let devices = found.device_names().join(" and ");
            let devices = if devices.is_empty() { devices } else { format!(" over {devices}") };
            format!(" by {}{devices} ({})", found.kind, found.why)
        });
        let (me, print_paths) = (self.me.clone(), self.print_paths);
        self.log(move || {
            tracing::info!("{me}: {event}: connected{over}");
            // Nobody may read it.
            let _ = print_paths.then(|| writeln!(std::io::stderr(), "{me}: {event}: connected{over}"));
        });
    }

    fn down(&self, lost: &LostPeer) {
        if let Some(first) = self.first_cause(lost) {
            self.losses.end_by(&first);
        }
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

    fn told_ends(&self) -> Vec<PeerEnd> {
        self.directory.told_ends.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn first_cause(&self, of: &LostPeer) -> Option<Error> {
        let is_unreported = |end: &PeerEnd| match self.losses.status(end.peer) {
            PeerStatus::Absent => true,
            PeerStatus::Up(tag) => {
                tag.incarnation == end.tag.incarnation && tag.generation <= end.tag.generation
            }
            PeerStatus::Lost(..) => false,
        };
        let ends = self.told_ends();
        let mut earlier = ends.iter().take_while(|end| end.peer != of.peer);
        let first = earlier.find(|end| !end.cause.is_clean() && is_unreported(end))?;
        let (peer, cause) = (self.directory.task(first.peer).clone(), first.cause.clone());
        Some(Error::PeerLost { peer, incarnation: first.tag.incarnation, cause })
    }
}

/// Makes endpoints for the bootstrap service, connects them, and attaches the links to pollers.
pub(super) struct FabricPeering {
    fabrics: NodeFabrics,
    pollers: Arc<dyn LinkPollers<MultiLink>>,
    me: TaskId,
    directory: PeerDirectory,
    host: String,
    options: LinkOptions,
    endpoints: Mutex<Endpoints>,
    failures: FabricFailures,
}

#[derive(Default)]
struct Endpoints {
    next: u64,
    waiting: HashMap<u64, WaitingEndpoints>,
}

/// The endpoints of one attempt: one on each fabric, of which the peer chooses, or the one that
/// this side has chosen.
struct WaitingEndpoints {
    endpoints: Vec<(FabricKind, MultiEndpoint)>,
    chosen: Option<PeerTransport>,
}

impl FabricPeering {
    pub fn new(
        fabrics: NodeFabrics,
        pollers: Arc<dyn LinkPollers<MultiLink>>,
        me: TaskId,
        directory: PeerDirectory,
        host: String,
        options: LinkOptions,
    ) -> Self {
        let (endpoints, failures) = Default::default();
        FabricPeering { fabrics, pollers, me, directory, host, options, endpoints, failures }
    }

    fn endpoints(&self) -> MutexGuard<'_, Endpoints> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, task: &TaskId) -> Result<PeerIndex, Status> {
        self.directory.index(task).ok_or_else(|| {
            Status::new(Code::NotFound, format!("{task} is not a member of the cluster that this node knows"))
        })
    }

    /// Attaches the link to its poller and makes progress until a probe has gone both ways.
    fn try_link(&self, peer: &PeerInfo, link: MultiLink, timeout: Duration) -> Result<(), Status> {
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
        let mut pause = PROBE_PAUSES.0;
        while Instant::now() < end {
            self.pollers.progress(index).map_err(unusable)?;
            match outcome.recv_timeout(pause) {
                Ok(result) => return result.map_err(|why| Status::new(Code::Unavailable, why)),
                Err(RecvTimeoutError::Timeout) => pause = PROBE_PAUSES.1.min(pause * 2),
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

    /// This side's endpoint on a fabric, and what the peer gets to know of it. With the peer's
    /// address it can accept the peer.
    fn offer(
        &self,
        peer: &PeerInfo,
        kind: FabricKind,
        theirs: Option<&[u8]>,
    ) -> Result<(MultiEndpoint, OfferState), FabricRefusal> {
        self.fabrics.check_open(kind)?;
        let port = match self.index(&peer.name) {
            Ok(index) => Paths::index_of(index, self.pollers.count()),
            Err(status) => return Err(FabricRefusal { why: status.message, is_final: true }),
        };
        let options = LinkOptions { generation: peer.generation as u8, ..self.options.clone() };
        let endpoint = self.fabrics.endpoint(kind, port, &options, theirs)?;
        let (depth, address) = (common_depth(kind, &options), endpoint.address().to_vec());
        let failures = self.failures.of(peer, kind).count;
        Ok((endpoint, OfferState::Offered { depth, failures, address }))
    }

    /// Offers every fabric, or says why not.
    fn offer_all(&self, peer: &PeerInfo) -> (Vec<FabricOffer>, WaitingEndpoints) {
        let mut endpoints = Vec::new();
        let offers = FabricKind::FASTEST_FIRST.map(|kind| match self.offer(peer, kind, None) {
            Ok((endpoint, state)) => {
                endpoints.push((kind, endpoint));
                FabricOffer { kind, state }
            }
            Err(refusal) => FabricOffer::refused(kind, refusal),
        });
        (offers.into(), WaitingEndpoints { endpoints, chosen: None })
    }

    /// Chooses the fastest fabric that both sides can use. One on which links failed too often
    /// comes after the others, so that the only one that both can use is tried for ever.
    fn choose(&self, peer: &PeerInfo, theirs: &[u8]) -> Result<(Vec<FabricOffer>, WaitingEndpoints), Status> {
        let theirs = self.decode(peer, theirs)?;
        let (mut refused, mut common) = (Vec::new(), Vec::new());
        for kind in FabricKind::FASTEST_FIRST {
            match self.check_common(peer, kind, &theirs) {
                Ok((failures, address)) => {
                    common.push((kind, address, self.given_up(peer, kind, failures)));
                }
                Err(refusal) => refused.push((kind, refusal)),
            }
        }
        // The order among equals stays.
        common.sort_by_key(|(.., given_up)| given_up.as_ref().map_or(0, |(failures, _)| *failures));
        let mut candidates = common.into_iter();
        while let Some((kind, address, _)) = candidates.next() {
            match self.offer(peer, kind, Some(address)).map_err(|refusal| refusal.of(&self.me)) {
                Ok((endpoint, state)) => {
                    let left_out = candidates.filter_map(|(kind, _, given_up)| Some((kind, given_up?.1)));
                    refused.extend(left_out);
                    let rank = |of| FabricKind::FASTEST_FIRST.iter().position(|kind| *kind == of);
                    refused.retain(|(other, _)| rank(*other) < rank(kind));
                    let chosen = Some(self.transport(kind, &refused));
                    let refused = refused.into_iter().map(|(kind, why)| FabricOffer::refused(kind, why));
                    let answer = refused.chain([FabricOffer { kind, state }]).collect();
                    return Ok((answer, WaitingEndpoints { endpoints: vec![(kind, endpoint)], chosen }));
                }
                Err(refusal) => refused.push((kind, refusal)),
            }
        }
        Err(self.nothing_in_common(peer, &refused))
    }

    /// Whether both sides can use a fabric: how often the peer failed to make a link there and its
    /// address, or why they can't.
    fn check_common<'a>(
        &self,
        peer: &PeerInfo,
        kind: FabricKind,
        theirs: &'a [FabricOffer],
    ) -> Result<(u8, &'a [u8]), FabricRefusal> {
        self.fabrics.check_open(kind).map_err(|refusal| refusal.of(&self.me))?;
        let (failures, address) = match theirs.iter().find(|offer| offer.kind == kind).map(|it| &it.state) {
            Some(OfferState::Offered { failures, address, .. }) => (*failures, address),
            Some(OfferState::Refused(refusal)) => return Err(refusal.clone().of(&peer.name)),
            None => {
                let refusal = FabricRefusal { why: "it does not know this fabric".into(), is_final: true };
                return Err(refusal.of(&peer.name));
            }
        };
        self.fabrics.check_peer(kind, address).map_err(|refusal| refusal.of(&peer.name))?;
        Ok((failures, address))
    }

    /// How often links over a fabric failed, and how, if that is too often on either side.
    fn given_up(&self, peer: &PeerInfo, kind: FabricKind, theirs: u8) -> Option<(u8, FabricRefusal)> {
        let ours = self.failures.of(peer, kind);
        let (who, count, why) = match ours.count {
            count if count >= ENOUGH => (&self.me, count, format!(": {}", ours.why)),
            _ if theirs >= ENOUGH => (&peer.name, theirs, " in vain".into()),
            _ => return None,
        };
        let refusal = FabricRefusal { why: format!("tried {count} times{why}"), is_final: false };
        Some((count.max(theirs), refusal.of(who)))
    }

    fn decode(&self, peer: &PeerInfo, offer: &[u8]) -> Result<Vec<FabricOffer>, Status> {
        offer::decode(offer)
            .map_err(|why| Status::new(Code::FailedPrecondition, format!("{} made {why}", peer.name)))
    }

    /// The transport over this fabric, where the faster ones are refused.
    fn transport(&self, kind: FabricKind, refused: &[(FabricKind, FabricRefusal)]) -> PeerTransport {
        let named = self.fabrics.named();
        let mut why = match (named, kind) {
            (Some(set), _) => format!("fabric = {set}"),
            (None, FabricKind::Shm) => "same host: shared memory".into(),
            (None, FabricKind::Verbs) => "both have an RDMA device".into(),
            (None, FabricKind::Tcp) => "TCP connections".into(),
            (None, FabricKind::Grpc) => "calls over gRPC".into(),
            #[cfg(any(test, feature = "sim"))]
            (None, FabricKind::Sim) => "in one process".into(),
        };
        for (kind, refusal) in refused.iter().filter(|(kind, _)| named.is_none_or(|set| set.has(*kind))) {
            why += &format!("; not {kind}: {}", refusal.why);
        }
        PeerTransport { kind, why: why.into(), devices: None }
    }

    fn nothing_in_common(&self, peer: &PeerInfo, refused: &[(FabricKind, FabricRefusal)]) -> Status {
        let is_final = refused.iter().all(|(_, refusal)| refusal.is_final);
        let code = if is_final { Code::FailedPrecondition } else { Code::Unavailable };
        let whys: Vec<_> = refused.iter().map(|(kind, refusal)| format!("{kind}: {}", refusal.why)).collect();
        let remedy =
            if is_final { ". Set fabric to the same value on all members, or leave it auto" } else { "" };
        let message = format!(
            "{} (on host {}) and {} (on host {}) have no fabric in common{}: {}{remedy}",
            self.me,
            self.host,
            peer.name,
            peer.host_id,
            if is_final { "" } else { " now" },
            whys.join("; ")
        );
        Status::new(code, message)
    }

    /// Takes the endpoint of an attempt, and the peer's address on the same fabric.
    fn matched(
        &self,
        peer: &PeerInfo,
        waiting: WaitingEndpoints,
        offer: &[u8],
    ) -> Result<(MultiEndpoint, Vec<u8>, PeerTransport), Status> {
        let broken = |what: &str| {
            Status::new(Code::FailedPrecondition, format!("{} made an offer with {what}", peer.name))
        };
        let (mut refused, mut offered) = (Vec::new(), Vec::new());
        for FabricOffer { kind, state } in self.decode(peer, offer)? {
            match state {
                OfferState::Offered { depth, address, .. } => offered.push((kind, depth, address)),
                OfferState::Refused(refusal) => refused.push((kind, refusal)),
            }
        }
        let WaitingEndpoints { endpoints, chosen } = waiting;
        match &chosen {
            // Of all that the peer has offered.
            Some(transport) => offered.retain(|(kind, ..)| *kind == transport.kind),
            None if offered.len() > 1 => return Err(broken("several fabrics that it has chosen")),
            None => {}
        }
        let (kind, depth, address) = offered.pop().ok_or_else(|| broken("no fabric that was chosen"))?;
        let endpoint = endpoints.into_iter().find(|(offered, _)| *offered == kind);
        let (_, endpoint) = endpoint.ok_or_else(|| broken("a fabric that was not offered"))?;
        self.check_depth(peer, kind, depth)?;
        Ok((endpoint, address, chosen.unwrap_or_else(|| self.transport(kind, &refused))))
    }

    /// Checks that the peer has the same queue depth, if it must.
    fn check_depth(&self, peer: &PeerInfo, kind: FabricKind, theirs: u32) -> Result<(), Status> {
        let ours = common_depth(kind, &self.options);
        if ours == theirs {
            return Ok(());
        }
        let message = format!(
            "queue_depth is {ours} at {} and {theirs} at {}: give all members the same, and start again",
            self.me, peer.name
        );
        Err(Status::new(Code::FailedPrecondition, message))
    }

    /// Notes the end of a peer, before its poller gets a command about it.
    fn note_end(&self, peer: &PeerInfo, cause: &LossCause) {
        let is_end = matches!(cause, LossCause::Left(_) | LossCause::Died(_) | LossCause::Silent { .. });
        if let (Ok(index), true) = (self.index(&peer.name), is_end) {
            self.directory.note_end(PeerEnd { peer: index, tag: tag_of(peer), cause: cause.clone() });
        }
    }

    /// Closes this link with the peer, and no other link.
    fn lose(&self, peer: &PeerInfo, cause: LossCause) {
        self.submit(peer, |peer, tag| RemoteCommand::Lose { peer, tag, cause });
    }

    fn submit(&self, peer: &PeerInfo, command: impl FnOnce(PeerIndex, LinkTag) -> RemoteCommand<MultiLink>) {
        if let Ok(index) = self.index(&peer.name) {
            // An unusable poller has ended every link and call already.
            let _ = self.pollers.submit(index, command(index, tag_of(peer)));
        }
    }
}

pub(super) fn tag_of(peer: &PeerInfo) -> LinkTag {
    LinkTag { incarnation: peer.incarnation, generation: peer.number.into() }
}

/// Pauses of the thread that probes a link between two polls: the first, and the longest. Each poll
/// keeps the program from the poller, also while a peer never answers.
const PROBE_PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

impl Peering for FabricPeering {
    fn prepare(&self, peer: &PeerInfo, theirs: Option<&[u8]>) -> Result<Prepared, Status> {
        self.index(&peer.name)?;
        let (offers, waiting) = match theirs {
            Some(theirs) => self.choose(peer, theirs)?,
            None => self.offer_all(peer),
        };
        let mut endpoints = self.endpoints();
        let ticket = endpoints.next;
        endpoints.next += 1;
        endpoints.waiting.insert(ticket, waiting);
        Ok(Prepared { ticket, offer: offer::encode(&offers) })
    }

    fn connect(
        &self,
        peer: &PeerInfo,
        ticket: u64,
        offer: &[u8],
        initiator: bool,
        timeout: Duration,
    ) -> Result<(), Status> {
        let waiting = self.endpoints().waiting.remove(&ticket);
        let waiting =
            waiting.ok_or_else(|| Status::new(Code::Internal, "the endpoint of this link is gone"))?;
        let (endpoint, address, mut transport) = self.matched(peer, waiting, offer)?;
        let role = if initiator { Role::Initiator } else { Role::Acceptor };
        let started = Instant::now();
        let link = endpoint.connect(role, &address, timeout).map_err(|error| {
            self.failures.note(peer, transport.kind, &error);
            // Without another fabric no further attempt mends a disagreement.
            let is_final =
                matches!(error, FabricError::Disagreement { .. }) && self.fabrics.kinds() == [transport.kind];
            let code = if is_final { Code::FailedPrecondition } else { Code::Unavailable };
            Status::new(code, error.to_string())
        })?;
        transport.devices = link.devices();
        self.try_link(peer, link, timeout.saturating_sub(started.elapsed()))?;
        self.failures.forget(peer, transport.kind);
        let index = self.index(&peer.name)?;
        self.directory.note(index, transport);
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
        self.note_end(peer, &cause);
        self.lose(peer, cause);
    }

    fn gone(&self, peer: &PeerInfo, cause: LossCause) {
        self.note_end(peer, &cause);
        self.submit(peer, |peer, tag| RemoteCommand::Gone(PeerEnd { peer, tag, cause }));
    }
}

#[cfg(test)]
#[path = "peering_tests.rs"]
mod tests;
