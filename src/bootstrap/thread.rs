//! The bootstrap thread: one tokio runtime on one thread, started and ended as a whole.

use super::BootstrapError;
use super::acceptor::{Acceptor, ProvenCaller};
use super::auth::Authenticator;
use super::client::Client;
use super::generated::bootstrap_server::BootstrapServer;
use super::refused::RefusedCallers;
use super::server::Server;
use super::shared::{BootstrapShared, ServicePhase};
use super::store::{self, StoreGrpc};
use super::tensors::{self, TensorClients, TensorsGrpc};
use crate::wire::TaskId;
use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};

/// Name of the thread.
pub(super) const NAME: &str = "tw-bootstrap";
/// Name of the threads that make links and resolve names.
pub(super) const BLOCKING_NAME: &str = "tw-boot-block";

/// Bytes of the longest message in both directions. It holds a cluster's text or an offer.
pub(super) const MAX_MESSAGE: usize = 160 * 1024;

/// Time limit of the calls that tell all peers that this process leaves.
const LEAVE_LIMIT: Duration = Duration::from_millis(500);
/// Calls of one connection that are served at a time. Those for tensors have a bound of their own.
pub(super) const MAX_CALLS: u32 = 32;
/// Bytes of one call, and of all calls of one connection, that may come before they are read.
const WINDOWS: (u32, u32) = (192 * 1024, 384 * 1024);
/// Bytes of the headers of one call.
pub(super) const MAX_HEADERS: u32 = 8 * 1024;
/// Errors of a peer in its streams before its connection ends.
const MAX_STREAM_ERRORS: usize = 64;
/// The least time for which a connection may be without a valid request.
const MIN_IDLE: Duration = Duration::from_secs(10);

/// The order to end the thread.
pub(super) struct StopOrder {
    /// The reason that peers are told; `None` for no message.
    pub(super) reason: Option<String>,
    /// The peer whose loss is the reason.
    pub(super) because_of: Option<TaskId>,
    /// When the caller stops waiting.
    pub(super) until: Instant,
}

/// The runtime of the thread.
pub(super) fn runtime() -> Result<Runtime, BootstrapError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| BootstrapError::Start { tried: "making the event queue", source })
}

/// Starts a thread that gets the runtime. Without a thread the runtime ends here, and waits for
/// nothing: tokio panics if one that waits is dropped within another one.
pub(super) fn start(
    name: &str,
    runtime: Runtime,
    work: impl FnOnce(Runtime) + Send + 'static,
) -> Result<JoinHandle<()>, BootstrapError> {
    let (hands_over, handed) = mpsc::channel();
    let run = move || handed.recv().map_or((), work);
    match std::thread::Builder::new().name(name.into()).spawn(run) {
        Ok(thread) => {
            // The thread waits for it.
            let _ = hands_over.send(runtime);
            Ok(thread)
        }
        Err(source) => {
            runtime.shutdown_background();
            Err(BootstrapError::Start { tried: "starting a thread", source })
        }
    }
}

/// Runs until the stop order, or until the sender of `stop` is dropped.
pub(super) fn run(
    runtime: Runtime,
    shared: Arc<BootstrapShared>,
    auth: Arc<Authenticator>,
    listener: TcpListener,
    stop: oneshot::Receiver<StopOrder>,
) {
    let _ended = ThreadEnd(shared.clone());
    let until = runtime.block_on(serve(&shared, &auth, listener, stop));
    // Nothing polls the runtime any more, so no call can begin after this.
    shared.change(|members| ((), members.close()));
    runtime.shutdown_timeout(until.saturating_duration_since(Instant::now()));
}

/// Reports the end of the thread on every path, so that no waiter waits for a panicked thread.
struct ThreadEnd(Arc<BootstrapShared>);

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        // Each has a reference to what refers to them.
        drop(self.0.tensor_clients().take());
        self.0.advance(&[ServicePhase::Started, ServicePhase::Stopping], ServicePhase::Stopped);
    }
}

async fn serve(
    shared: &Arc<BootstrapShared>,
    auth: &Arc<Authenticator>,
    listener: TcpListener,
    stop: oneshot::Receiver<StopOrder>,
) -> Instant {
    let mut tasks = JoinSet::new();
    tasks.spawn(listen(shared.clone(), auth.clone(), listener));
    let mut clients = Vec::new();
    for peer in 0..shared.peers.len() {
        match Client::new(shared.clone(), auth.clone(), peer) {
            Ok(client) => clients.push(client),
            Err(error) => {
                tracing::error!("{}: no client for {}: {error}", shared.options.me, shared.peers[peer])
            }
        }
    }
    if let Some((_, max_bytes)) = shared.tensors.get() {
        match TensorClients::new(shared, auth, *max_bytes) {
            Ok(clients) => *shared.tensor_clients() = Some(clients),
            Err(error) => tracing::error!("{}: no clients for tensors: {error}", shared.options.me),
        }
    }
    for client in &clients {
        tasks.spawn(client.clone().tend());
    }
    let order =
        stop.await.unwrap_or_else(|_| StopOrder { reason: None, because_of: None, until: Instant::now() });
    let until = order.until;
    if let Some(reason) = order.reason {
        let limit = LEAVE_LIMIT.min(until.saturating_duration_since(Instant::now()));
        let lost = order.because_of;
        let goodbyes = clients.into_iter().map(|client| client.leave(reason.clone(), lost.clone(), limit));
        goodbyes.collect::<JoinSet<()>>().join_all().await;
    }
    until
}

async fn listen(shared: Arc<BootstrapShared>, auth: Arc<Authenticator>, listener: TcpListener) {
    let idle = MIN_IDLE.max(shared.options.silence.saturating_mul(2));
    let (me, peers) = (shared.options.me.clone(), shared.peers.clone());
    let names = peers.iter().chain([&me]).cloned().collect();
    let server = Arc::new(Server::new(shared.clone()));
    let tensors =
        shared.tensors.get().map(|(service, _)| tensors::service(server.clone(), &peers, service.clone()));
    let limits = ConnectionLimits {
        idle,
        call: shared.options.link_timeout + Duration::from_secs(1),
        calls: MAX_CALLS + tensors.as_ref().map_or(0, |_| tensors::MAX_CALLS),
    };
    let bootstrap = BootstrapServer::from_arc(server)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let refused = shared.refused.clone();
    let store = store::service(shared.store.clone(), names, MAX_MESSAGE, refused.clone());
    let services = Services { bootstrap, store, tensors };
    serve_connections(me, peers, (auth, refused), vec![listener], limits, services).await;
}

/// What callers may do.
pub(super) struct ConnectionLimits {
    /// How long a connection may be without a valid request.
    pub(super) idle: Duration,
    /// How long a call may take.
    pub(super) call: Duration,
    /// Calls of one connection that may be open at a time.
    pub(super) calls: u32,
}

/// Serves the callers that have proven a name, for ever, and notes those that were refused.
pub(super) async fn serve_connections<S>(
    me: TaskId,
    peers: Vec<TaskId>,
    (auth, refused): (Arc<Authenticator>, RefusedCallers),
    listeners: Vec<TcpListener>,
    limits: ConnectionLimits,
    service: S,
) where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let listeners = listeners.into_iter().map(tokio::net::TcpListener::from_std);
    let listeners = match listeners.collect::<std::io::Result<Vec<_>>>() {
        Ok(listeners) => listeners,
        Err(error) => return tracing::error!("{me}: the listening socket failed: {error}"),
    };
    let (acceptor, incoming) = Acceptor::new(me.clone(), peers, auth, limits.idle, refused);
    let accepting = listeners.into_iter().map(|listener| acceptor.clone().run(listener));
    let _accepting: JoinSet<()> = accepting.collect();
    let served = tonic::transport::Server::default()
        .timeout(limits.call)
        .max_concurrent_streams(limits.calls)
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
        .http2_max_header_list_size(MAX_HEADERS)
        // tonic has no bound of its own, and each error of a peer keeps a stream.
        .http2_max_local_error_reset_streams(Some(MAX_STREAM_ERRORS))
        .serve_with_incoming(service, incoming);
    if let Err(error) = served.await {
        tracing::error!("{me}: serving peers failed: {error}");
    }
}

/// The services of one port. The path of a call has the name of its service.
#[derive(Clone)]
struct Services {
    bootstrap: BootstrapServer<Server>,
    store: StoreGrpc,
    /// If this process serves tensors.
    tensors: Option<TensorsGrpc>,
}

impl Service<Request<Body>> for Services {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = request.uri().path().strip_prefix('/').and_then(|path| path.split('/').next());
        match (service, &mut self.tensors) {
            (Some(store::SERVICE_NAME), _) => admitted(self.store.clone(), request),
            (Some(tensors::SERVICE_NAME), Some(tensors)) => tensors.call(request),
            _ => admitted(self.bootstrap.clone(), request),
        }
    }
}

/// Has `service` answer a call once fewer than [`MAX_CALLS`] of its connection are served. HTTP/2
/// lets more come beside tensors. What comes of a call is read only after this.
fn admitted<S>(mut service: S, request: Request<Body>) -> BoxFuture<Response<Body>, Infallible>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    let caller = request.extensions().get::<Arc<ProvenCaller>>().cloned();
    Box::pin(async move {
        let _place = match &caller {
            // Nobody closes it.
            Some(caller) => caller.calls.acquire().await.ok(),
            // The service refuses it.
            None => None,
        };
        service.call(request).await
    })
}
