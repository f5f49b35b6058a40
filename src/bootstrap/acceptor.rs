//! The connections that others open: first they prove a name, then they carry requests.
//!
//! A candidate ends after [`PROOF_LIMIT`] without a proof, and a proven connection after
//! [`FIRST_REQUEST`] without a request that passes the checks of a caller. Bytes that are no such
//! request, for example HTTP/2 pings, keep no connection alive.

use super::auth::{Admitted, AuthStream, Authenticator, ProofError};
use super::places::Places;
use super::shared::BootstrapShared;
use crate::wire::TaskId;
use rustix::net::SendFlags;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::server::Connected;

/// How long a candidate may take for its proof.
pub(super) const PROOF_LIMIT: Duration = Duration::from_secs(3);
/// How long a proven connection may take for its first valid request.
pub(super) const FIRST_REQUEST: Duration = Duration::from_secs(5);
/// Pause of the acceptor after a failure, which is mostly a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// Strangers are logged once in this time.
const QUIET: Duration = Duration::from_secs(10);
/// Proven connections that the HTTP/2 server has not taken yet.
const WAITING: usize = 16;

/// The proven connections, for the HTTP/2 server.
pub(super) struct ProvenConnections(mpsc::Receiver<AcceptedConnection>);

impl Stream for ProvenConnections {
    type Item = io::Result<AcceptedConnection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|connection| connection.map(Ok))
    }
}

/// The two kinds of connections, and how to end each.
type Seats = Mutex<Places<AbortHandle, oneshot::Sender<()>>>;

/// Accepts connections.
pub(super) struct Acceptor {
    shared: Arc<BootstrapShared>,
    auth: Arc<Authenticator>,
    seats: Arc<Seats>,
    /// How long a proven connection may be without a valid request.
    idle: Duration,
    proven: mpsc::Sender<AcceptedConnection>,
    log: Mutex<StrangerLog>,
}

impl Acceptor {
    pub(super) fn new(
        shared: Arc<BootstrapShared>,
        auth: Arc<Authenticator>,
        idle: Duration,
    ) -> (Arc<Self>, ProvenConnections) {
        let (proven, incoming) = mpsc::channel(WAITING);
        let (seats, log) = (Arc::new(Mutex::new(Places::new())), Mutex::default());
        (Arc::new(Acceptor { shared, auth, seats, idle, proven, log }), ProvenConnections(incoming))
    }

    /// Accepts for ever.
    pub(super) async fn run(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => self.examine(stream, from),
                Err(error) => {
                    tracing::warn!("accepting a connection failed: {error}");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Has a new connection prove its name, unless the first look refuses it.
    fn examine(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        if let Err((verdict, why)) = self.auth.screen(&stream) {
            self.log_refusal(from, &why);
            // An empty send buffer has room for a greeting. It is lost if the caller has gone.
            let greeting = self.auth.refusal(verdict);
            let _ = rustix::net::send(&stream, greeting.as_ref(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            return;
        }
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY for {from}: {error}");
        }
        let (this, (started, number)) = (self.clone(), oneshot::channel());
        let candidate = tokio::spawn(async move {
            // The sender is dropped only if this task is aborted.
            let Ok(number) = number.await else { return };
            let outcome = timeout(PROOF_LIMIT, this.auth.accept(stream)).await;
            this.seats().dismiss(number);
            match outcome.unwrap_or(Err(ProofError::TooLate)) {
                // Fails when this process stops.
                Ok(admitted) => drop(this.proven.send(this.seat(admitted)).await),
                Err(why) => this.log_refusal(from, &why),
            }
        });
        let draw = getrandom::u64().unwrap_or_default();
        let (number, evicted) = self.seats().admit(from.ip(), candidate.abort_handle(), draw);
        let _ = started.send(number);
        if let Some(evicted) = evicted {
            evicted.abort();
            self.log_refusal(from, &ProofError::TooLate);
        }
    }

    fn seat(&self, admitted: Admitted) -> AcceptedConnection {
        let Admitted { stream, name } = admitted;
        let (end, ended) = oneshot::channel();
        let member = self.shared.index_of(&name).map(|_| name.clone());
        let (number, evicted) = self.seats().seat(member.clone(), end);
        if let Some(evicted) = evicted {
            let _ = evicted.send(());
        }
        let place = Place { seats: self.seats.clone(), member, number };
        AcceptedConnection::new(stream, name, self.idle, ended, place)
    }

    fn seats(&self) -> MutexGuard<'_, Places<AbortHandle, oneshot::Sender<()>>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a stranger, unless many come.
    fn log_refusal(&self, from: SocketAddr, why: &ProofError) {
        let now = Instant::now();
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.until.is_some_and(|until| now < until) {
            log.unsaid += 1;
            return;
        }
        let (me, unsaid) = (&self.shared.options.me, std::mem::take(&mut log.unsaid));
        tracing::warn!("{me}: a connection from {from} was refused: {why} ({unsaid} more before it)");
        log.until = Some(now + QUIET);
    }
}

#[derive(Default)]
struct StrangerLog {
    until: Option<Instant>,
    /// Strangers since the last line.
    unsaid: u64,
}

/// Frees the place of a connection that ends.
struct Place {
    seats: Arc<Seats>,
    member: Option<TaskId>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner).leave(&self.member, self.number);
    }
}

/// Who is at the other end of a connection, and when it was last of use.
#[derive(Debug)]
pub(super) struct ProvenCaller {
    pub(super) name: TaskId,
    valid_until: Mutex<Instant>,
    idle: Duration,
}

impl ProvenCaller {
    pub(super) fn new(name: TaskId, idle: Duration) -> Self {
        ProvenCaller { name, valid_until: Mutex::new(Instant::now() + FIRST_REQUEST.min(idle)), idle }
    }

    /// A request has passed the checks of its caller.
    pub(super) fn is_valid(&self) {
        *self.valid_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + self.idle;
    }

    fn valid_until(&self) -> Instant {
        *self.valid_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection whose caller has proven its name.
pub(super) struct AcceptedConnection {
    stream: AuthStream,
    caller: Arc<ProvenCaller>,
    timer: Pin<Box<Sleep>>,
    /// A newer connection takes this one's place. `None` once it has.
    ended: Option<oneshot::Receiver<()>>,
    _place: Place,
}

impl AcceptedConnection {
    fn new(
        stream: AuthStream,
        name: TaskId,
        idle: Duration,
        ended: oneshot::Receiver<()>,
        place: Place,
    ) -> Self {
        let caller = Arc::new(ProvenCaller::new(name, idle));
        let timer = Box::pin(tokio::time::sleep_until(caller.valid_until()));
        AcceptedConnection { stream, caller, timer, ended: Some(ended), _place: place }
    }

    /// Fails once the connection is to end; otherwise the task is woken then.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.ended.as_mut().is_none_or(|ended| Pin::new(ended).poll(context).is_ready()) {
            self.ended = None;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        while self.timer.as_mut().poll(context).is_ready() {
            let until = self.caller.valid_until();
            if until <= Instant::now() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.timer.as_mut().reset(until);
        }
        Ok(())
    }
}

impl Connected for AcceptedConnection {
    type ConnectInfo = Arc<ProvenCaller>;

    fn connect_info(&self) -> Arc<ProvenCaller> {
        self.caller.clone()
    }
}

impl AsyncRead for AcceptedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for AcceptedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
