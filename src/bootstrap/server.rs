//! The calls that peers make to this process.
//!
//! Every request is checked part by part before it changes state. A refusal names the error for the
//! operators of both sides.

use super::acceptor::ProvenCaller;
use super::generated as grpc;
use super::options::MAX_HOST_ID;
use super::peer_record::{GENERATION_PAUSE, HandshakeProgress, LifeRefusal, OfferDecision, PeerIdentity};
use super::peer_table::PeerTable;
use super::peering::{MAX_OFFER, PeerInfo};
use super::shared::{
    BootstrapShared, MAX_REASON, ServicePhase, connect, incarnation, prepare, shown_cluster,
};
use crate::wire::shorten;
use crate::wire::{Incarnation, LossCause, TaskId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::{Request, Response, Status};

/// How long `Ready` waits for this side before it says "still connecting".
pub(super) const READY_WAIT: Duration = Duration::from_millis(500);

/// How long a `Leave` because of a loss waits for that loss on this side. The caller waits longer.
const LOSS_WAIT: Duration = Duration::from_millis(300);

/// How long the answer to a failed attempt waits for the cause on this side.
const CAUSE_WAIT: Duration = Duration::from_millis(400);

/// The code of a Hello's refusal that no further attempt changes.
pub(super) const REFUSED_FOR_GOOD: tonic::Code = tonic::Code::FailedPrecondition;

/// Serves the peers' calls.
pub(super) struct Server {
    shared: Arc<BootstrapShared>,
    /// One lock for each peer. The task of a peer's `Leave` holds it, so there is one at a time.
    leaving: Vec<Arc<tokio::sync::Mutex<()>>>,
}

/// The caller: a peer, in the life that it claims.
struct From {
    peer: usize,
    life: Incarnation,
}

impl Server {
    pub(super) fn new(shared: Arc<BootstrapShared>) -> Self {
        let leaving = shared.peers.iter().map(|_| Arc::default()).collect();
        Server { shared, leaving }
    }

    /// Checks everything about the caller but its incarnation. A caller speaks for the name that
    /// its connection has proven, and for no other.
    fn check(&self, proven: &ProvenCaller, caller: Option<grpc::Caller>) -> Result<From, Status> {
        let caller = caller.ok_or_else(|| Status::invalid_argument("the request does not say who calls"))?;
        let me = &self.shared.options.me;
        let from = name(caller.from.as_ref())?;
        if from != proven.name {
            return Err(Status::permission_denied(format!(
                "this connection speaks for {}, and the request is {from}'s",
                proven.name
            )));
        }
        // First of all: what follows tells members about the cluster.
        let peer = self.shared.index_of(&from);
        if peer.is_none() && from != *me {
            let what = format!("{from} is not in the cluster of {me}: give all members the same cluster");
            return Err(Status::new(REFUSED_FOR_GOOD, what));
        }
        if self.shared.phase() != ServicePhase::Started {
            return Err(Status::unavailable(format!("{me} is stopping")));
        }
        if caller.version != self.shared.version {
            return Err(self.refuse(
                &from,
                REFUSED_FOR_GOOD,
                format!(
                    "{from} speaks version {} of the bootstrap protocol and {me} speaks version {}; \
                     run the same version of tensorwire on every member",
                    caller.version, self.shared.version
                ),
            ));
        }
        let life = incarnation(caller.incarnation).map_err(Status::invalid_argument)?;
        self.check_cluster(&caller, &from)?;
        let to = name(caller.to.as_ref())?;
        let Some(peer) = peer else {
            return Err(self.refuse_my_name(life, &to));
        };
        if to != *me {
            let what = format!("{from} meant to call {to} and has reached {me}; check what listens where");
            return Err(self.refuse(&from, self.code_of_a_mix_up(&to), what));
        }
        if ![0, self.shared.options.incarnation.get()].contains(&caller.to_incarnation) {
            let what = format!("incarnation {:016x} of {me} is over", caller.to_incarnation);
            return Err(Status::aborted(what));
        }
        proven.extend();
        Ok(From { peer, life })
    }

    fn check_cluster(&self, caller: &grpc::Caller, from: &TaskId) -> Result<(), Status> {
        if caller.cluster_digest == self.shared.digest {
            return Ok(());
        }
        let (theirs, ours) = (caller.cluster_digest, self.shared.digest);
        let what = format!(
            "{from} has another cluster (digest {theirs:016x}) than {} (digest {ours:016x}): \"{}\"",
            self.shared.options.me,
            self.shared.shown_cluster()
        );
        // A Hello, which comes first, is refused with both clusters.
        Err(Status::new(REFUSED_FOR_GOOD, what))
    }

    /// Refuses a Hello. The join of this process ends too, if no further attempt changes that.
    fn refuse_hello(&self, request: &grpc::HelloRequest, mut status: Status) -> Status {
        let Some(caller) = request.caller.as_ref().filter(|_| status.code() == REFUSED_FOR_GOOD) else {
            return status;
        };
        let Ok(from) = name(caller.from.as_ref()) else { return status };
        let Some(peer) = self.shared.index_of(&from) else { return status };
        if caller.version == self.shared.version && caller.cluster_digest != self.shared.digest {
            // Only a Hello carries the peer's cluster.
            let theirs = shown_cluster(&request.cluster);
            let what = format!("{}; the caller's is \"{theirs}\"", status.message());
            status = self.refuse(&from, REFUSED_FOR_GOOD, what);
        }
        let (with, now) = (incarnation(caller.incarnation).ok(), Instant::now());
        self.shared.change(|members| (members.disagree_unmet(peer, with, status.message(), now), Vec::new()));
        status
    }

    /// What listens at an IP address stays there. A name may lead elsewhere later.
    fn code_of_a_mix_up(&self, meant: &TaskId) -> tonic::Code {
        let is_ip = self.shared.options.cluster.address(meant).is_some_and(|address| address.ip().is_some());
        if is_ip { REFUSED_FOR_GOOD } else { tonic::Code::Aborted }
    }

    /// Refuses a caller that goes by this process's own name.
    fn refuse_my_name(&self, life: Incarnation, to: &TaskId) -> Status {
        let (me, mine) = (&self.shared.options.me, self.shared.options.incarnation);
        if life == mine {
            let what = format!(
                "{me} has reached itself at the address of {to}; check the cluster and the bind option"
            );
            return Status::new(self.code_of_a_mix_up(to), what);
        }
        Status::already_exists(format!(
            "the name {me} is taken by another incarnation, which is alive; incarnation {life} can't have it"
        ))
    }

    /// Checks that a caller is in the life in which it introduced itself.
    fn check_life(&self, from: &From) -> Result<(), Status> {
        let heard =
            self.shared.step(|members| (members.heard(from.peer, from.life, Instant::now()), Vec::new()));
        heard.map_err(|refusal| self.refuse_life(from, refusal))
    }

    /// Checks a caller that must have introduced itself. Returns its name and life.
    pub(super) fn check_introduced(
        &self,
        proven: &ProvenCaller,
        caller: Option<grpc::Caller>,
    ) -> Result<(TaskId, Incarnation), Status> {
        let from = self.check(proven, caller)?;
        self.check_life(&from)?;
        Ok((self.shared.peers[from.peer].clone(), from.life))
    }

    fn refuse_life(&self, from: &From, refusal: LifeRefusal) -> Status {
        let name = &self.shared.peers[from.peer];
        let what = why_refused(&refusal, name, from.life, self.shared.options.silence);
        match refusal {
            LifeRefusal::Taken { .. } => self.refuse(name, tonic::Code::AlreadyExists, what),
            LifeRefusal::Over | LifeRefusal::Late => Status::aborted(what),
            LifeRefusal::Unknown => Status::failed_precondition(what),
        }
    }

    /// A refusal that this side shows too, as the reason why that peer is missing.
    fn refuse(&self, from: &TaskId, code: tonic::Code, what: String) -> Status {
        if let Some(peer) = self.shared.index_of(from) {
            let note = format!("it was refused: {what}");
            let (is_final, now) = (code == REFUSED_FOR_GOOD, Instant::now());
            let is_news =
                self.shared.step(|members| (members.note_refusal(peer, note, is_final, now), Vec::new()));
            if is_news {
                tracing::warn!("{}: refused {from}: {what}", self.shared.options.me);
            }
        }
        Status::new(code, what)
    }

    /// Why this side of a generation has failed. A thread that is about to know is waited for.
    async fn own_failure(&self, peer: usize, generation: u64) -> Option<String> {
        let until = tokio::time::Instant::now() + CAUSE_WAIT;
        let mut changes = self.shared.watch();
        loop {
            changes.mark_unchanged();
            let (failure, is_busy) =
                self.shared.see(|members| (members.failure(peer, generation), members.is_busy(peer)));
            if failure.is_some() || !is_busy || !Self::turn(&mut changes, until).await {
                return failure;
            }
        }
    }

    /// Waits until the peer table may have changed, or until `until`. Returns whether there is time
    /// left.
    async fn turn(changes: &mut tokio::sync::watch::Receiver<()>, until: tokio::time::Instant) -> bool {
        tokio::time::timeout_at(until, changes.changed()).await.is_ok_and(|changed| changed.is_ok())
    }
}

#[tonic::async_trait]
impl grpc::bootstrap_server::Bootstrap for Server {
    async fn hello(
        &self,
        request: Request<grpc::HelloRequest>,
    ) -> Result<Response<grpc::HelloResponse>, Status> {
        let (proven, request) = open(request)?;
        let shared = &self.shared;
        let from = self.check(&proven, request.caller.clone());
        let from = from.map_err(|status| self.refuse_hello(&request, status))?;
        let who = who(request.member).map_err(Status::invalid_argument)?;
        if who.incarnation != from.life {
            return Err(Status::invalid_argument("caller and member have different incarnations"));
        }
        let lack = shorten(&request.lack, MAX_REASON);
        let met = shared.step(|members| match members.meet(from.peer, &who, false, Instant::now()) {
            Ok(events) => {
                members.note_says(from.peer, from.life, lack);
                (Ok(()), events)
            }
            Err(refusal) => (Err(refusal), Vec::new()),
        });
        met.map_err(|refusal| self.refuse_life(&from, refusal))?;
        if shared.see(|members| members.link(from.peer).is_none()) {
            shared.nudges[from.peer].notify_one();
        }
        let unanswered = shorten(&shared.see(|members| members.why_unanswered(from.peer)), MAX_REASON);
        Ok(Response::new(grpc::HelloResponse { member: shared.member(), unanswered }))
    }

    async fn get_remote_address(
        &self,
        request: Request<grpc::GetRemoteAddressRequest>,
    ) -> Result<Response<grpc::GetRemoteAddressResponse>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        self.check_life(&from)?;
        let (shared, name) = (&self.shared, &self.shared.peers[from.peer]);
        if shared.starts(from.peer) {
            let me = &shared.options.me;
            return Err(Status::invalid_argument(format!(
                "{me} sorts before {name}, so {me} starts the exchange"
            )));
        }
        if request.offer.len() > MAX_OFFER {
            let length = request.offer.len();
            return Err(Status::invalid_argument(format!(
                "an offer of {length} bytes; at most {MAX_OFFER} travel"
            )));
        }
        let until = tokio::time::Instant::now() + shared.options.link_timeout;
        let (mut changes, mut is_accepted) = (shared.watch(), false);
        loop {
            changes.mark_unchanged();
            if !is_accepted && shared.phase() != ServicePhase::Started {
                // It stopped while the offer waited.
                return Err(Status::unavailable(format!("{} is stopping", shared.options.me)));
            }
            let offered = |members: &mut PeerTable| {
                let now = Instant::now();
                members.offered(from.peer, from.life, request.generation, &request.offer, now)
            };
            match shared.step(offered) {
                OfferDecision::Answer(offer) => {
                    return Ok(Response::new(grpc::GetRemoteAddressResponse { offer }));
                }
                OfferDecision::Refused(why) => return Err(Status::aborted(why)),
                // A task of its own: it continues if the caller hangs up, and a repeated call finds
                // its result.
                OfferDecision::Start(info) => {
                    is_accepted = true;
                    drop(tokio::spawn(accept(shared.clone(), from.peer, info, request.offer.clone())));
                }
                OfferDecision::Wait => {
                    // A generation whose time has not come waits for nothing else.
                    let look = until.min(tokio::time::Instant::now() + GENERATION_PAUSE);
                    if !Self::turn(&mut changes, look).await && look == until {
                        return Err(Status::deadline_exceeded("this side's endpoint takes too long to make"));
                    }
                }
            }
        }
    }

    async fn ready(
        &self,
        request: Request<grpc::ReadyRequest>,
    ) -> Result<Response<grpc::ReadyResponse>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        self.check_life(&from)?;
        let shared = &self.shared;
        let answer = |progress: grpc::Progress, reason: &str, is_final: bool| {
            let (progress, reason) = (progress as i32, shorten(reason, MAX_REASON));
            Ok(Response::new(grpc::ReadyResponse { progress, reason, is_final }))
        };
        match grpc::Progress::try_from(request.progress) {
            Ok(grpc::Progress::Connected) => {}
            Ok(grpc::Progress::Failed) => {
                // Its words: "this process" in them is the peer.
                let why = format!("{} says: {}", shared.peers[from.peer], request.reason);
                let why = shorten(&why, MAX_REASON);
                // A side that has failed by itself knows the cause. The other one may only see that
                // nobody answers.
                let ours = self.own_failure(from.peer, request.generation).await;
                let disagreement = shared.disagreement_with(from.peer);
                shared.change(|members| {
                    if request.is_final {
                        members.disagree(from.peer, from.life, &why);
                    }
                    ((), members.give_up(from.peer, from.life, request.generation, &why))
                });
                shared.nudges[from.peer].notify_one();
                let is_final = disagreement.is_some();
                return answer(grpc::Progress::Failed, &disagreement.or(ours).unwrap_or_default(), is_final);
            }
            _ => return Err(Status::invalid_argument("progress must be CONNECTED or FAILED")),
        }
        let until = tokio::time::Instant::now() + READY_WAIT;
        let mut changes = shared.watch();
        loop {
            changes.mark_unchanged();
            let progress =
                shared.step(|members| members.said_ready(from.peer, from.life, request.generation));
            match progress {
                HandshakeProgress::Connected => return answer(grpc::Progress::Connected, "", false),
                HandshakeProgress::Failed(why) => return answer(grpc::Progress::Failed, &why, false),
                HandshakeProgress::Connecting => {
                    if !Self::turn(&mut changes, until).await {
                        return answer(grpc::Progress::Connecting, "", false);
                    }
                }
            }
        }
    }

    async fn heartbeat(
        &self,
        request: Request<grpc::HeartbeatRequest>,
    ) -> Result<Response<grpc::HeartbeatResponse>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        let shared = &self.shared;
        let stands = shared.step(|members| {
            let stands = match members.heard(from.peer, from.life, Instant::now()) {
                // A life that counts as dead here learns why its link is gone. Then it sends a
                // Hello.
                Ok(()) | Err(LifeRefusal::Unknown) => {
                    Ok(members.stands(from.peer, from.life, request.generation))
                }
                Err(refusal) => Err(refusal),
            };
            (stands, Vec::new())
        });
        let stands =
            stands.unwrap_or_else(|refusal| Err(self.refuse_life(&from, refusal).message().to_owned()));
        Ok(Response::new(grpc::HeartbeatResponse {
            incarnation: shared.options.incarnation.get(),
            linked: stands.is_ok(),
            reason: shorten(&stands.err().unwrap_or_default(), MAX_REASON),
        }))
    }

    async fn leave(
        &self,
        request: Request<grpc::LeaveRequest>,
    ) -> Result<Response<grpc::LeaveResponse>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        let cause = LossCause::Left(shorten(&request.reason, MAX_REASON));
        let first = name(request.because_of.as_ref()).ok().and_then(|name| self.shared.index_of(&name));
        let (shared, first) = (self.shared.clone(), first.filter(|first| *first != from.peer));
        let turn = self.leaving[from.peer].clone().lock_owned().await;
        if shared.see(|members| members.present(from.peer)) != Some(from.life) {
            return Ok(Response::new(grpc::LeaveResponse {}));
        }
        // A task of its own: it continues if the caller hangs up.
        let told = tokio::spawn(async move {
            let _turn = turn;
            if let Some(first) = first {
                look_for_loss(&shared, first).await;
            }
            shared.change(|members| ((), members.over(from.peer, from.life, &cause)));
        });
        // Fails when this process stops.
        drop(told.await);
        Ok(Response::new(grpc::LeaveResponse {}))
    }
}

/// Looks at a peer that another one holds for lost, so that the first loss is told first. A peer
/// that is there stays as it is.
async fn look_for_loss(shared: &BootstrapShared, peer: usize) {
    let mut changes = shared.watch();
    let looked = timeout(LOSS_WAIT, async {
        loop {
            changes.mark_unchanged();
            if !shared.see(|members| members.is_met(peer)) {
                return;
            }
            shared.nudges[peer].notify_one();
            // It may have to be asked again.
            let _ = timeout(LOSS_WAIT / 4, changes.changed()).await;
        }
    });
    // At the timeout it is there, as far as this process knows.
    let _ = looked.await;
}

/// Makes and connects this side's endpoint of a generation that the peer has started. Gives the
/// endpoint up unless the peer confirms its connection in time.
async fn accept(shared: Arc<BootstrapShared>, peer: usize, info: PeerInfo, offer: Vec<u8>) {
    if prepare(&shared, peer, &info, Some(offer.clone())).await.is_err() {
        return;
    }
    if let Err(why) = connect(&shared, peer, &info, offer).await {
        shared.log_attempt(peer, &why);
        return;
    }
    let mut changes = shared.watch();
    shared.change(|members| ((), members.link_if_both_ready(peer, &info)));
    let linked = timeout(shared.options.link_timeout, async {
        while shared.see(|members| members.is_linking(peer, &info)) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    });
    if linked.await.is_err() {
        let why = format!(
            "{} did not say within {:?} that it is connected",
            info.name, shared.options.link_timeout
        );
        shared.change(|members| {
            let events = match members.link(peer) {
                Some(_) => Vec::new(),
                None => members.give_up(peer, info.incarnation, info.generation, &why),
            };
            ((), events)
        });
    }
}

/// The request, and who has proven to be its caller.
pub(super) fn open<M>(request: Request<M>) -> Result<(Arc<ProvenCaller>, M), Status> {
    match request.extensions().get::<Arc<ProvenCaller>>().cloned() {
        Some(proven) => Ok((proven, request.into_inner())),
        None => Err(Status::unauthenticated("the connection has proven no name")),
    }
}

/// Why a life of that peer is refused, in words.
pub(super) fn why_refused(
    refusal: &LifeRefusal,
    name: &TaskId,
    life: Incarnation,
    silence: Duration,
) -> String {
    match refusal {
        // The incarnation of the living one stays untold: a stranger learns nothing of a life.
        LifeRefusal::Taken { alive: _ } => format!(
            "the name {name} is taken by another incarnation, which is alive; incarnation {life} can't have \
             it until that one has left or been silent for {silence:?}"
        ),
        LifeRefusal::Over => format!(
            "incarnation {life} of {name} is over: it has left, or another one has taken its place; start \
             the process again"
        ),
        LifeRefusal::Unknown => format!("incarnation {life} of {name} is not known here; say Hello first"),
        LifeRefusal::Late => format!("incarnation {life} of {name} was asked before another one was met"),
    }
}

/// A name that a peer has sent.
fn name(task: Option<&grpc::Task>) -> Result<TaskId, Status> {
    let task = task.ok_or_else(|| Status::invalid_argument("the request lacks a task's name"))?;
    TaskId::new(task.job.clone(), task.index).map_err(|error| Status::invalid_argument(error.to_string()))
}

/// The introduction of a peer.
pub(super) fn who(member: Option<grpc::Member>) -> Result<PeerIdentity, &'static str> {
    let member = member.ok_or("the message lacks what its sender tells of itself")?;
    if member.host_id.is_empty() || member.host_id.len() > MAX_HOST_ID {
        return Err("the host id must have 1 to 128 bytes");
    }
    if member.host_id.contains(char::is_control) {
        return Err("the host id has control characters");
    }
    Ok(PeerIdentity { incarnation: incarnation(member.incarnation)?, host_id: member.host_id })
}
