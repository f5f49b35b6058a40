//! The connections that others open: first they prove a name, then they carry requests.
//!
//! A candidate ends after [`PROOF_LIMIT`] without a proof, and a proven connection after
//! [`FIRST_REQUEST`] without a request that passes the checks of a caller. Bytes that are no such
//! request, for example HTTP/2 pings, keep no connection alive.

use super::auth::{Admitted, AuthStream, Authenticator, ProofError};
use super::http2_stream::Http2Stream;
use super::pacer::HandshakePacer;
use super::places::Places;
use super::refused::RefusedCallers;
use super::thread::MAX_CALLS;
use crate::wire::{LACK_REMEDY, TaskId, is_lack, source_of};
use rustix::net::SendFlags;
use std::collections::HashMap;
use std::io;
use std::mem::{Discriminant, discriminant};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::server::Connected;

/// How long a candidate may take for its proof.
pub(super) const PROOF_LIMIT: Duration = Duration::from_secs(3);
/// How long a proven connection may take for its first valid request.
pub(super) const FIRST_REQUEST: Duration = Duration::from_secs(5);
/// Proven connections of a name in this time, at most. h2 can write a line to the log for each.
const OFTEN: (u32, Duration) = (512, Duration::from_secs(10));
/// Pause of the acceptor after a failure, which is mostly a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// A source is logged once in this time for each reason.
const QUIET: Duration = Duration::from_secs(10);
/// Sources and reasons that are told apart within that time.
const MAX_LINES: usize = 64;
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
type SharedPlaces = Mutex<Places<UnprovenConnection, oneshot::Sender<()>>>;

/// A connection whose caller has not proven its name yet.
struct UnprovenConnection {
    from: SocketAddr,
    task: AbortHandle,
}

/// Accepts connections.
pub(super) struct Acceptor {
    /// The name of this process.
    me: TaskId,
    /// Callers that have places of their own, in ascending order.
    peers: Vec<TaskId>,
    auth: Arc<Authenticator>,
    pacer: HandshakePacer,
    places: Arc<SharedPlaces>,
    /// How long a proven connection may be without a valid request.
    idle: Duration,
    proven: mpsc::Sender<AcceptedConnection>,
    /// Since when callers of a name, and of names without places, have made so many connections.
    made: Mutex<HashMap<Option<TaskId>, (Instant, u32)>>,
    log: Mutex<QuietLog>,
    refused: RefusedCallers,
}

impl Acceptor {
    pub(super) fn new(
        me: TaskId,
        mut peers: Vec<TaskId>,
        auth: Arc<Authenticator>,
        idle: Duration,
        refused: RefusedCallers,
    ) -> (Arc<Self>, ProvenConnections) {
        let (proven, incoming) = mpsc::channel(WAITING);
        let (places, log) = (Arc::new(Mutex::new(Places::new())), Mutex::default());
        peers.sort();
        let (pacer, made) = (HandshakePacer::default(), Mutex::default());
        let acceptor = Acceptor { me, peers, auth, pacer, places, idle, proven, made, log, refused };
        (Arc::new(acceptor), ProvenConnections(incoming))
    }

    /// Accepts for ever.
    pub(super) async fn run(self: Arc<Self>, listener: TcpListener) {
        self.run_with(|| listener.accept()).await;
    }

    async fn run_with<A>(self: Arc<Self>, mut accept: impl FnMut() -> A)
    where
        A: Future<Output = io::Result<(TcpStream, SocketAddr)>>,
    {
        loop {
            match accept().await {
                Ok((stream, from)) => {
                    self.refused.set_lack(None);
                    self.examine(stream, from);
                }
                Err(error) => {
                    let code = error.raw_os_error().unwrap_or_default();
                    let lack = is_lack(&error).then(|| format!("{error}; {LACK_REMEDY}"));
                    let why = lack.clone().unwrap_or_else(|| error.to_string());
                    if let Some(unsaid) = self.log().line(LogKey::Accept(code), Instant::now()) {
                        let (me, more) = (&self.me, more(unsaid));
                        tracing::warn!("{me}: accepting a connection failed: {why}{more}");
                    }
                    self.refused.set_lack(lack);
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Has a new connection prove its name, unless the first look refuses it.
    fn examine(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let is_slow = self.auth.screens_slowly();
        // A stranger that is refused here takes no place.
        if !is_slow && let Err(why) = self.screen(&stream) {
            return self.log_refusal(from, &why);
        }
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY for {from}: {error}");
        }
        let (this, (started, number)) = (self.clone(), oneshot::channel());
        let task = tokio::spawn(async move {
            // The sender is dropped only if this task is aborted.
            let Ok(number) = number.await else { return };
            let proof = async {
                if is_slow {
                    this.pacer.run(false, async { this.screen(&stream) }).await?;
                }
                let greeted = this.auth.greet(stream).await?;
                let has_secret = greeted.has_secret;
                this.places().opened(number, has_secret);
                this.pacer.run(has_secret, this.auth.admit(greeted)).await
            };
            let outcome = timeout(PROOF_LIMIT, proof).await;
            this.places().dismiss(number);
            match outcome.unwrap_or(Err(ProofError::TooLate)) {
                Ok(admitted) if this.is_too_often(&admitted.name, Instant::now()) => {
                    this.log_refusal(from, &ProofError::TooOften);
                }
                // Fails when this process stops.
                Ok(admitted) => drop(this.proven.send(this.place(admitted)).await),
                Err(why) => this.log_refusal(from, &why),
            }
        });
        let draw = getrandom::u64().unwrap_or_default();
        let candidate = UnprovenConnection { from, task: task.abort_handle() };
        let (number, evicted) = self.places().admit(from.ip(), candidate, draw);
        let _ = started.send(number);
        if let Some(evicted) = evicted {
            evicted.task.abort();
            self.log_refusal(evicted.from, &ProofError::Displaced);
        }
    }

    /// The first look at a connection. A stranger is told that it is one.
    fn screen(&self, stream: &TcpStream) -> Result<(), ProofError> {
        let Err((verdict, why)) = self.auth.screen(stream) else { return Ok(()) };
        // An empty send buffer has room for a greeting. It is lost if the caller has gone.
        let greeting = self.auth.refusal(verdict);
        let _ = rustix::net::send(stream, greeting.as_ref(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        Err(why)
    }

    /// The name, if its callers have places of their own.
    fn member(&self, name: &TaskId) -> Option<TaskId> {
        self.peers.binary_search(name).is_ok().then(|| name.clone())
    }

    /// Whether the callers of a name make more connections than they may. This is one more.
    fn is_too_often(&self, name: &TaskId, now: Instant) -> bool {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, count) = made.entry(self.member(name)).or_insert((now, 0));
        if now.saturating_duration_since(*since) >= OFTEN.1 {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        *count > OFTEN.0
    }

    fn place(&self, admitted: Admitted) -> AcceptedConnection {
        let Admitted { stream, name } = admitted;
        let (end, ended) = oneshot::channel();
        let member = self.member(&name);
        let (number, evicted) = self.places().admit_proven(member.clone(), end);
        if let Some(evicted) = evicted {
            let _ = evicted.send(());
        }
        let place = Place { places: self.places.clone(), member, number };
        AcceptedConnection::new(stream, name, self.idle, ended, place)
    }

    fn places(&self) -> MutexGuard<'_, Places<UnprovenConnection, oneshot::Sender<()>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> MutexGuard<'_, QuietLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a stranger, unless the same source was refused for the same reason a short time ago.
    fn log_refusal(&self, from: SocketAddr, why: &ProofError) {
        self.refused.note(&from.ip(), why);
        let key = LogKey::Refusal(source_of(from.ip()), discriminant(why));
        if let Some(unsaid) = self.log().line(key, Instant::now()) {
            let me = &self.me;
            tracing::warn!("{me}: a connection from {from} was refused: {why}{}", more(unsaid));
        }
    }
}

fn more(unsaid: u64) -> String {
    if unsaid == 0 { String::new() } else { format!(" ({unsaid} more such lines were left out)") }
}

/// What lines of the log have in common of which one in [`QUIET`] is enough.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum LogKey {
    Refusal(IpAddr, Discriminant<ProofError>),
    /// By the number of the system's error.
    Accept(i32),
    /// All for which there is no room.
    Others,
}

/// When each line was logged last, and how many were left out since.
#[derive(Default)]
struct QuietLog(HashMap<LogKey, (Option<Instant>, u64)>);

impl QuietLog {
    /// Whether to log a line now, and how many such lines were left out before it.
    fn line(&mut self, mut key: LogKey, now: Instant) -> Option<u64> {
        let is_quiet = |until: Option<Instant>| until.is_some_and(|until| now < until);
        if self.0.len() >= MAX_LINES && !self.0.contains_key(&key) {
            self.0.retain(|_, (until, _)| is_quiet(*until));
            if self.0.len() >= MAX_LINES {
                key = LogKey::Others;
            }
        }
        let (until, unsaid) = self.0.entry(key).or_default();
        if is_quiet(*until) {
            *unsaid += 1;
            return None;
        }
        *until = Some(now + QUIET);
        Some(std::mem::take(unsaid))
    }
}

/// Frees the place of a connection that ends.
struct Place {
    places: Arc<SharedPlaces>,
    member: Option<TaskId>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).leave(&self.member, self.number);
    }
}

/// Who is at the other end of a connection, and when it was last of use.
#[derive(Debug)]
pub(super) struct ProvenCaller {
    pub(super) name: TaskId,
    /// Places for calls that are not for tensors, which have bounds of their own.
    pub(super) calls: Semaphore,
    valid_until: Mutex<Instant>,
    idle: Duration,
}

impl ProvenCaller {
    pub(super) fn new(name: TaskId, idle: Duration) -> Self {
        let valid_until = Mutex::new(Instant::now() + FIRST_REQUEST.min(idle));
        ProvenCaller { name, calls: Semaphore::new(MAX_CALLS as usize), valid_until, idle }
    }

    /// A request has passed the checks of its caller.
    pub(super) fn extend(&self) {
        *self.valid_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + self.idle;
    }

    fn valid_until(&self) -> Instant {
        *self.valid_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection whose caller has proven its name.
pub(super) struct AcceptedConnection {
    stream: Http2Stream<AuthStream>,
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
        let stream = Http2Stream::serving(stream);
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

#[cfg(test)]
mod tests {
    use super::super::auth::AuthSettings;
    use super::super::places::MAX_CANDIDATES;
    use super::super::tests::logged;
    use super::*;

    #[test]
    fn each_source_and_reason_is_logged_once_in_a_time_and_all_are_bounded() {
        let (mut log, now) = (QuietLog::default(), Instant::now());
        let refusal = |host: u8, why| LogKey::Refusal(IpAddr::from([10, 0, 0, host]), discriminant(&why));
        for key in [refusal(1, ProofError::TooLate), refusal(2, ProofError::TooLate), LogKey::Accept(24)] {
            assert_eq!(log.line(key, now), Some(0));
            assert_eq!((log.line(key, now), log.line(key, now + QUIET / 2)), (None, None));
        }
        assert_eq!(log.line(refusal(1, ProofError::NoOpening), now), Some(0), "another reason");
        assert_eq!(log.line(refusal(1, ProofError::TooLate), now + QUIET), Some(2));
        for host in 0..=255 {
            log.line(refusal(host, ProofError::Displaced), now + QUIET);
        }
        assert!(log.0.len() <= MAX_LINES + 1, "{}", log.0.len());
        let others = log.0.get(&LogKey::Others).expect("the rest");
        assert!(others.1 > 150, "{}", others.1);
    }

    #[test]
    fn a_name_has_a_number_of_connections_in_a_time() {
        let (acceptor, now) = (acceptor(), Instant::now());
        let [member, other, third] =
            ["worker/1", "a/0", "b/0"].map(|name| name.parse::<TaskId>().expect("a name"));
        for _ in 0..OFTEN.0 {
            assert!(!acceptor.is_too_often(&member, now));
        }
        assert!(acceptor.is_too_often(&member, now + OFTEN.1 / 2));
        assert!(!acceptor.is_too_often(&member, now + OFTEN.1));
        // Names without places share one number.
        for _ in 0..OFTEN.0 {
            assert!(!acceptor.is_too_often(&other, now));
        }
        assert!(acceptor.is_too_often(&third, now));
    }

    fn acceptor() -> Arc<Acceptor> {
        let [me, peer] = [0, 1].map(|task| TaskId::new("worker", task).unwrap());
        let auth = Authenticator::open(&AuthSettings::Plain, &me).unwrap();
        let idle = Duration::from_secs(1);
        Acceptor::new(me, vec![peer], Arc::new(auth), idle, RefusedCallers::default()).0
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn an_accept_that_fails_does_not_spin_and_is_logged_once() {
        const EMFILE: i32 = 24;
        let (mut calls, begin) = (0, Instant::now());
        let acceptor = acceptor();
        let log = logged(|| {
            runtime().block_on(async {
                let failing = acceptor.clone().run_with(|| {
                    calls += 1;
                    std::future::ready(Err(io::Error::from_raw_os_error(EMFILE)))
                });
                timeout(PAUSE * 10, failing).await.expect_err("it tries for ever");
            });
        });
        let most = begin.elapsed().as_millis() / PAUSE.as_millis() + 1;
        assert!((2..=most).contains(&calls), "{calls} calls");
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains("accepting a connection failed: Too many open files"), "{log}");
        assert!(log.contains("raise the limit of open files of this process (ulimit -n)"), "{log}");
        let lack = acceptor.refused.lack().expect("the error of a join tells it");
        assert!(lack.contains("Too many open files") && lack.contains("ulimit -n"), "{lack}");
    }

    #[test]
    fn the_log_blames_the_connection_that_gave_up_its_place() {
        let log = logged(|| {
            runtime().block_on(async {
                let (acceptor, listener) = (acceptor(), TcpListener::bind("127.0.0.1:0").await.unwrap());
                let address = listener.local_addr().unwrap();
                let mut open = Vec::new();
                // The flood's address, and one connection from another one that finds no place.
                for number in 0..=MAX_CANDIDATES {
                    let socket = tokio::net::TcpSocket::new_v4().unwrap();
                    let host = if number < MAX_CANDIDATES { 1 } else { 2 };
                    socket.bind(SocketAddr::from(([127, 0, 0, host], 0))).unwrap();
                    open.push(socket.connect(address).await.unwrap());
                    let (stream, from) = listener.accept().await.unwrap();
                    acceptor.examine(stream, from);
                }
            });
        });
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains("a connection from 127.0.0.1:") && log.contains("gave up its place"), "{log}");
    }

    #[test]
    fn without_sock_diag_looks_that_refuse_delay_later_ones_and_members_come_in() {
        runtime().block_on(async {
            let [me, peer] = [0, 1].map(|task| TaskId::new("worker", task).unwrap());
            let auth = Arc::new(Authenticator::without_sock_diag(&me));
            let (peers, idle) = (vec![peer.clone()], Duration::from_secs(1));
            let (acceptor, mut incoming) = Acceptor::new(me.clone(), peers, auth, idle, Default::default());
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            for is_gone in [true, true, false] {
                let caller = tokio::net::TcpStream::connect(address).await.unwrap();
                let (stream, from) = listener.accept().await.unwrap();
                if is_gone {
                    // The table has no established socket of it any more.
                    drop(caller);
                    acceptor.examine(stream, from);
                    continue;
                }
                acceptor.examine(stream, from);
                let auth = Authenticator::open(&AuthSettings::Uid, &peer).unwrap();
                auth.connect(caller, &me).await.unwrap();
                assert_eq!(incoming.0.recv().await.expect("a member").caller.name, peer);
            }
            assert!(acceptor.pacer.delayed_until(false).is_some(), "two looks have failed");
            assert_eq!(acceptor.refused.lines().len(), 1);
        });
    }
}
