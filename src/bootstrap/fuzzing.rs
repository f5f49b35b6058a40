//! Entry points of fuzz targets: messages of peers, as the server and the client receive them, and
//! their effects.
//!
//! The input is a list of calls and answers of two peers. One starts its link with this process;
//! with the other this process starts. In all cases there is no panic, answers and refusals have
//! bounded length, and each endpoint ends once.

use super::acceptor::ProvenCaller;
use super::auth::{AuthSettings, Authenticator};
use super::client::Client;
use super::generated as grpc;
use super::generated::bootstrap_server::Bootstrap;
use super::options::BootstrapOptions;
use super::peering::{MAX_OFFER, PeerInfo, Peering, Prepared};
use super::server::{Server, who};
use super::service::PROTOCOL_VERSION;
use super::shared::{BootstrapShared, MAX_REASON, ServicePhase, connect, prepare, task};
use crate::wire::shorten;
use crate::wire::{Code, Incarnation, Status};
use crate::wire::{LossCause, TaskId};
use prost::Message;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use tonic::{Request, Response};

/// The peer that starts the link with this process.
const CALLER: usize = 0;
/// The peer with which this process starts it.
const CALLEE: usize = 1;
const MAX_COMMANDS: usize = 64;
/// Bytes of a refusal's text at most.
const MAX_REFUSAL: usize = 8 * 1024;
/// Time limit for work on another thread: as long as `tests/fuzz` gives an input. On a busy machine
/// with a sanitizer such a thread may not run for seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The state of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FuzzEndpoint {
    Prepared,
    Connected,
    Failed,
    Abandoned,
    Ready,
}

/// Makes no link, and checks that each endpoint ends exactly once.
#[derive(Default)]
struct Tickets {
    endpoints: Mutex<HashMap<u64, FuzzEndpoint>>,
    next: AtomicU64,
}

impl Tickets {
    fn becomes(&self, ticket: u64, from: &[FuzzEndpoint], to: FuzzEndpoint) {
        let before = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, to);
        let is_right = before.is_some_and(|before| from.contains(&before));
        // The service catches panics of its peering, and this one must be seen.
        if !is_right {
            eprintln!("endpoint {ticket} was {before:?} and became {to:?}");
            std::process::abort();
        }
    }

    fn any(&self, wanted: &[FuzzEndpoint]) -> bool {
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.values().any(|endpoint| wanted.contains(endpoint))
    }
}

impl Peering for Tickets {
    fn prepare(&self, peer: &PeerInfo, _theirs: Option<&[u8]>) -> Result<Prepared, Status> {
        if peer.generation % 8 == 7 {
            return Err(Status::new(Code::ResourceExhausted, "no endpoint for this one"));
        }
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, FuzzEndpoint::Prepared);
        Ok(Prepared { ticket, offer: vec![b'o'; 16] })
    }

    fn connect(
        &self,
        _peer: &PeerInfo,
        ticket: u64,
        offer: &[u8],
        _initiator: bool,
        _timeout: Duration,
    ) -> Result<(), Status> {
        if offer.first() == Some(&b'F') {
            self.becomes(ticket, &[FuzzEndpoint::Prepared], FuzzEndpoint::Failed);
            return Err(Status::new(Code::Unavailable, "the cable is cut"));
        }
        self.becomes(ticket, &[FuzzEndpoint::Prepared], FuzzEndpoint::Connected);
        Ok(())
    }

    fn abandon(&self, _peer: &PeerInfo, ticket: u64) {
        self.becomes(ticket, &[FuzzEndpoint::Prepared, FuzzEndpoint::Connected], FuzzEndpoint::Abandoned);
    }

    fn ready(&self, _peer: &PeerInfo, ticket: u64) {
        self.becomes(ticket, &[FuzzEndpoint::Connected], FuzzEndpoint::Ready);
    }

    fn lost(&self, _peer: &PeerInfo, _cause: LossCause) {}

    fn gone(&self, _peer: &PeerInfo, _cause: LossCause) {}
}

struct Scene {
    shared: Arc<BootstrapShared>,
    tickets: Arc<Tickets>,
    server: Server,
    client: Client,
}

/// Takes a list of calls in.
pub fn calls(bytes: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .expect("a runtime");
    runtime.block_on(run(bytes));
    runtime.shutdown_background();
}

async fn run(mut input: &[u8]) {
    let name = |task| TaskId::new("worker", task).expect("a name");
    let addresses = vec!["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"];
    let cluster = format!("worker={}", addresses.join(",")).parse().expect("a cluster");
    let life = Incarnation::new(77).expect("not zero");
    let tickets = Arc::new(Tickets::default());
    let options = BootstrapOptions::for_tests(name(1), cluster, life);
    let shared = Arc::new(BootstrapShared::new(options, PROTOCOL_VERSION, tickets.clone()));
    shared.advance(&[ServicePhase::Created], ServicePhase::Started);
    let auth = Authenticator::open(&AuthSettings::Plain, &name(1)).expect("it needs nothing");
    let client = Client::new(shared.clone(), Arc::new(auth), CALLEE).expect("a client");
    let scene = Scene { server: Server::new(shared.clone()), client, shared, tickets };
    for _ in 0..MAX_COMMANDS {
        let Some((command, rest)) = input.split_first() else { break };
        let Some((len, rest)) = rest.split_first() else { break };
        let (message, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        input = rest;
        scene.take(*command, message).await;
        scene.until_idle().await;
    }
    scene.shared.change(|members| ((), members.close()));
    scene.until_idle().await;
    assert!(
        !scene.tickets.any(&[FuzzEndpoint::Prepared, FuzzEndpoint::Connected]),
        "an endpoint was forgotten"
    );
}

impl Scene {
    /// Waits until no endpoint is being made or connected, so that later results do not depend on
    /// threads.
    async fn until_idle(&self) {
        let begin = Instant::now();
        for _ in 0..4 {
            tokio::task::yield_now().await;
            let is_busy = |peer| self.shared.see(|members| members.is_busy(peer));
            while is_busy(CALLER) || is_busy(CALLEE) || self.tickets.any(&[FuzzEndpoint::Prepared]) {
                assert!(begin.elapsed() < TIMEOUT, "an endpoint is never done");
                std::thread::yield_now();
                tokio::task::yield_now().await;
            }
        }
    }

    async fn take(&self, command: u8, bytes: &[u8]) {
        // The high bit corrects the caller.
        let right = command & 0x80 != 0;
        macro_rules! call {
            ($request:ident, $method:ident) => {
                self.call(
                    bytes,
                    |request: &mut grpc::$request| {
                        request.caller = self.right(right, request.caller.take());
                        request.caller.as_ref().and_then(|caller| proven(caller.from.as_ref()?))
                    },
                    |request| self.server.$method(request),
                )
                .await
            };
        }
        match command % 9 {
            0 => call!(HelloRequest, hello),
            1 => call!(GetRemoteAddressRequest, get_remote_address),
            2 => call!(ReadyRequest, ready),
            3 => call!(HeartbeatRequest, heartbeat),
            4 => call!(LeaveRequest, leave),
            5 => self.met(bytes),
            6 => self.heartbeat_answered(bytes),
            7 => self.ready_answered(bytes),
            _ => self.time_passes(bytes),
        }
    }

    /// A caller that passes the first checks, in one of a few lives.
    fn right(&self, right: bool, caller: Option<grpc::Caller>) -> Option<grpc::Caller> {
        if !right {
            return caller;
        }
        let life = caller.as_ref().map_or(1, |caller| caller.incarnation % 4 + 1);
        let from = caller.map_or(CALLER, |caller| (caller.version % 2) as usize);
        Some(grpc::Caller {
            version: PROTOCOL_VERSION,
            cluster_digest: self.shared.digest,
            from: Some(task(&self.shared.peers[from])),
            incarnation: life,
            to: Some(task(&self.shared.options.me)),
            to_incarnation: 0,
        })
    }

    /// A call that is dropped when it has to wait. Its connection has proven the caller's name, if
    /// that is one.
    async fn call<M, F>(
        &self,
        bytes: &[u8],
        right: impl FnOnce(&mut M) -> Option<ProvenCaller>,
        call: impl FnOnce(Request<M>) -> F,
    ) where
        M: Message + Default + Clone + PartialEq,
        F: Future<Output: Answered>,
    {
        let Some(mut message) = decoded::<M>(bytes) else { return };
        let proven = right(&mut message);
        let mut request = Request::new(message);
        if let Some(proven) = proven {
            request.extensions_mut().insert(Arc::new(proven));
        }
        let mut answer = std::pin::pin!(call(request));
        let answer = std::future::poll_fn(|context| Poll::Ready(answer.as_mut().poll(context))).await;
        if let Poll::Ready(answer) = answer {
            answer.check();
        }
    }

    /// The answer to our Hello: this process starts a link, and connects it with the bytes of the
    /// answer.
    fn met(&self, bytes: &[u8]) {
        let Some(answer) = decoded::<grpc::HelloResponse>(bytes) else { return };
        let Ok(who) = who(answer.member) else { return };
        let started = self.shared.step(|members| match members.meet(CALLEE, &who, true, Instant::now()) {
            Ok(acts) => (members.start(CALLEE, who.incarnation, Instant::now()), acts),
            Err(_) => (None, Vec::new()),
        });
        let Some(info) = started else { return };
        let (shared, offer) = (self.shared.clone(), bytes.last().map_or(Vec::new(), |last| vec![*last]));
        drop(tokio::spawn(async move {
            if prepare(&shared, CALLEE, &info, None).await.is_ok() {
                let _ = connect(&shared, CALLEE, &info, offer).await;
            }
        }));
    }

    fn heartbeat_answered(&self, bytes: &[u8]) {
        let Some(answer) = decoded::<grpc::HeartbeatResponse>(bytes) else { return };
        if let Some((info, _)) = self.shared.see(|members| members.link(CALLEE)) {
            self.client.digest_heartbeat(&info, &answer);
        }
    }

    fn ready_answered(&self, bytes: &[u8]) {
        let Some(answer) = decoded::<grpc::ReadyResponse>(bytes) else { return };
        let life = Incarnation::new(1 + u64::from(bytes.len() as u8 % 4)).expect("not zero");
        let why = shorten(&answer.reason, MAX_REASON);
        self.shared.change(|members| {
            let generation = bytes.len() as u64 / 4 % 4;
            match grpc::Progress::try_from(answer.progress) {
                Ok(grpc::Progress::Connected) => ((), members.said_ready(CALLEE, life, generation).1),
                _ => ((), members.give_up(CALLEE, life, generation, &why)),
            }
        });
    }

    /// The peer was silent for long, or nothing listens at its address.
    fn time_passes(&self, bytes: &[u8]) {
        let peer = usize::from(bytes.first().copied().unwrap_or(0) % 2);
        let later = Instant::now() + Duration::from_secs(60);
        self.shared.step(|members| match bytes.len() % 3 {
            0 => ((), members.silent(peer, later)),
            1 => ((), members.unanswered(peer, later)),
            _ => ((), members.unattended(peer, "nobody listens", later)),
        });
        let link = self.shared.see(|members| members.link(peer));
        if let Some((link, _)) = link.filter(|_| bytes.len() > 8) {
            assert!(self.shared.report(peer, link.number, "the fabric says so"));
            assert!(self.shared.take_report(peer).is_some_and(|report| report.link == link));
        }
    }
}

/// The caller of a connection that has proven this name.
fn proven(name: &grpc::Task) -> Option<ProvenCaller> {
    let name = TaskId::new(name.job.clone(), name.index).ok()?;
    Some(ProvenCaller::new(name, Duration::from_secs(1)))
}

/// A message, which is the same after another trip.
fn decoded<M: Message + Default + PartialEq>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    assert!(M::decode(&message.encode_to_vec()[..]).is_ok_and(|again| again == message));
    Some(message)
}

/// The result of a call.
trait Answered {
    fn check(self);
}

impl<M: Message> Answered for Result<Response<M>, tonic::Status> {
    fn check(self) {
        match self {
            // An offer or a reason, and some numbers.
            Ok(answer) => assert!(answer.get_ref().encoded_len() <= MAX_OFFER.max(MAX_REASON) + 256),
            Err(status) => assert!(status.message().len() <= MAX_REFUSAL, "{status}"),
        }
    }
}
