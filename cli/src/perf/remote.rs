//! A server that listens for a client, on two hosts or on one.

use super::channel_message::ChannelMessage;
use super::control_channel::{CHANNEL_TIMEOUT, ChannelError, ControlChannel};
use super::options::PerfArgs;
use super::plan::{Plan, check_client_options};
use super::proofs;
use super::report::PerfReport;
use super::session::{answer, explain, measure};
use crate::error::{CliError, print, say};
use rustix::net::sockopt;
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tensorwire::TaskId;
use tensorwire::internals::bootstrap::Prover;
use tensorwire::internals::wire::{is_lack, shorten};

/// How long a client tries to connect: the server may have been started at the same time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The same if a connection ends before the proof is done: the server may be flooded.
const PROOF_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// How long a connection has for the first message of a client.
const FIRST_MESSAGE: Duration = Duration::from_secs(5);
/// Connections without a first message at a time. A further one takes the place of another.
const MAX_STRANGERS: usize = 128;
/// In this time, each reason why a connection was closed is said once, and so many reasons.
const QUIET: Duration = Duration::from_secs(1);
const MAX_SAID: usize = 4;
/// How long the other host may be silent, and the probes that it has missed then.
const GONE: Duration = Duration::from_secs(20);
const PROBES: u32 = 4;
/// Bytes of a client's version in an error.
const MAX_VERSION: usize = 40;
/// The numbers of the two processes.
const CLIENT: u32 = 0;
const SERVER: u32 = 1;
/// Between two looks for a connection, and whether one of them has turned out to be a client.
const LOOK: Duration = Duration::from_millis(5);

/// Measures, with the server on that host.
pub fn client(plan: &Plan, host: &str, port: u16) -> Result<PerfReport, CliError> {
    let mut channel = connect(host, port)?;
    measure(plan, None, &mut channel).map_err(|error| explain(error, &mut channel, None))
}

/// Connects to the host, by any of its addresses.
fn connect(host: &str, port: u16) -> Result<ControlChannel, CliError> {
    let tried = || format!("connecting to the server {host} at port {port}");
    let addresses = (host, port).to_socket_addrs().map_err(|error| CliError::failed(tried(), error))?;
    connect_to_one(&addresses.collect::<Vec<_>>(), CONNECT_TIMEOUT, &tried)
}

/// Connects to one of the addresses, and each side proves its name to the other. Tries again while
/// the server is not there or has no room. If an address does not answer, the others have their
/// part of the time.
fn connect_to_one(
    addresses: &[SocketAddr],
    timeout: Duration,
    tried: &dyn Fn() -> String,
) -> Result<ControlChannel, CliError> {
    let since = Instant::now();
    let server = proofs::name(SERVER)?;
    let of_each = timeout / (addresses.len() as u32).max(1);
    for (attempt, address) in addresses.iter().cycle().enumerate() {
        let (prover, _) = proofs::prover(CLIENT, address.ip().to_canonical())?;
        let connected = TcpStream::connect_timeout(address, of_each).and_then(|stream| {
            set_up(&stream)?;
            let local_ip = stream.local_addr()?.ip();
            Ok((prover.connect(stream, &server, of_each)?, local_ip))
        });
        match connected {
            Ok((channel, local_ip)) => {
                return Ok(ControlChannel::proven(channel, local_ip, CHANNEL_TIMEOUT)?);
            }
            Err(error) if is_lack(&error) => return Err(CliError::failed(tried(), error)),
            // The next address may be that of the server.
            Err(_) if (attempt + 1) % addresses.len() != 0 => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(CliError::failed(tried(), error));
            }
            Err(error) if since.elapsed() >= timeout.max(proof_timeout(error.kind())) => {
                let why = format!("{error}; start the server there first: the same command without a host");
                return Err(CliError::failed(tried(), why));
            }
            Err(_) => std::thread::sleep(RETRY_PAUSE),
        }
    }
    Err(CliError::failed(tried(), "the name has no address"))
}

/// Sets the options of a connection. If the other host is gone, it ends after [`GONE`]: waits for
/// a message have no timeout.
fn set_up(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(stream, GONE.as_millis() as u32)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, GONE / PROBES)?;
    sockopt::set_tcp_keepintvl(stream, GONE / PROBES)?;
    Ok(sockopt::set_tcp_keepcnt(stream, PROBES)?)
}

/// How long a client tries again at least, after this error.
fn proof_timeout(error: ErrorKind) -> Duration {
    match error {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => PROOF_TIMEOUT,
        _ => Duration::ZERO,
    }
}

/// Answers one client that connects to this address.
pub fn serve(plan: &Plan, at: SocketAddr) -> Result<(), CliError> {
    let listening = |error: std::io::Error| {
        let remedy = "choose another --port on both sides if it is in use, and an address of this host";
        CliError::failed(format!("listening at {at}"), format!("{error}; {remedy}"))
    };
    let (prover, mode) = proofs::prover(SERVER, at.ip())?;
    let client = proofs::name(CLIENT)?;
    let listener = TcpListener::bind(at).map_err(listening)?;
    listener.set_nonblocking(true).map_err(listening)?;
    print(&format!(
        "waiting for a client of {} at {at}, which proves itself by {mode}\n",
        plan.args.test.name()
    ))?;
    if at.ip().is_loopback() {
        print("this host alone can reach it: --listen ADDRESS lets others\n")?;
    }
    let FirstMessage { from, version, args, mut channel } =
        Strangers::new(prover, client).first_client(&listener).map_err(listening)?;
    drop(listener);
    let served = channel.set_timeout(CHANNEL_TIMEOUT).map_err(CliError::from);
    let served = served.and_then(|()| serve_client(plan, &version, args, &mut channel));
    match served {
        Ok(()) => print(&format!("served {}\n", from.ip())),
        Err(error) => {
            // Fails if the client has ended.
            let _: Result<(), ChannelError> = channel.send(&ChannelMessage::Failed(error.to_string()));
            Err(error)
        }
    }
}

/// The first message of a client, and the channel that it came on.
struct FirstMessage {
    from: SocketAddr,
    version: String,
    args: PerfArgs,
    channel: ControlChannel,
}

/// The connections whose first messages are waited for.
struct Strangers {
    prover: Prover,
    /// The name that a client must prove.
    client: TaskId,
    all: Vec<Stranger>,
    /// What was said of connections, and since when.
    said: (Vec<String>, Instant),
}

struct Stranger {
    from: SocketAddr,
    thread: JoinHandle<Heard>,
    /// Closes the connection. `None` once it has, or if the process has too few descriptors.
    closer: Option<TcpStream>,
    is_evicted: bool,
    has_proven: Arc<AtomicBool>,
}

impl Stranger {
    fn has_proven(&self) -> bool {
        self.has_proven.load(Ordering::Relaxed)
    }
}

/// A client, or what is wrong with the connection.
type Heard = Result<Box<FirstMessage>, ChannelError>;

/// What a look for a connection has found.
enum AcceptOutcome {
    Nothing,
    Connection(Stranger),
    /// One that was closed at once, and why.
    Closed(SocketAddr, ChannelError),
    /// Why this process could take none.
    Unable(std::io::Error),
}

impl Strangers {
    fn new(prover: Prover, client: TaskId) -> Self {
        Strangers { prover, client, all: Vec::new(), said: (Vec::new(), Instant::now()) }
    }

    /// Waits for a connection whose first message is that of a client. Any other is closed and
    /// said.
    fn first_client(mut self, listener: &TcpListener) -> std::io::Result<FirstMessage> {
        loop {
            while let Some(at) = self.all.iter().position(|one| one.thread.is_finished()) {
                let Stranger { from, thread, is_evicted, .. } = self.all.remove(at);
                match thread.join() {
                    // The threads of the others end by themselves.
                    Ok(Ok(first)) => return Ok(*first),
                    Ok(Err(_)) if is_evicted => {}
                    Ok(Err(error)) => self.say_closed(from, &error),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            match self.accept(listener) {
                AcceptOutcome::Connection(stranger) => self.all.push(stranger),
                AcceptOutcome::Closed(from, error) => self.say_closed(from, &error),
                AcceptOutcome::Unable(error) => {
                    self.say_unable(&error);
                    std::thread::sleep(LOOK);
                }
                AcceptOutcome::Nothing => std::thread::sleep(LOOK),
            }
            if self.all.iter().filter(|one| !one.is_evicted).count() > MAX_STRANGERS {
                self.evict();
            }
        }
    }

    fn say_closed(&mut self, from: SocketAddr, error: &ChannelError) {
        let why = match error {
            // An error of the system, and not of the proof.
            ChannelError::Io(error) if error.raw_os_error().is_some() => return self.say_unable(error),
            ChannelError::Io(error) => error.to_string(),
            error => error.to_string(),
        };
        self.say(&why, || {
            format!(
                "the connection from {from} is no client's: {why}: it was closed, and the server waits on"
            )
        });
    }

    fn say_unable(&mut self, error: &std::io::Error) {
        let why = format!("{error}; raise the limits of open files (ulimit -n) and threads (ulimit -u)");
        self.say(&why, || format!("no connection can be taken: {why}; the server waits on"));
    }

    /// Says a line, unless its reason or too many others were said just now: a flood is not said
    /// line by line.
    fn say(&mut self, why: &str, line: impl FnOnce() -> String) {
        let (said, since) = &mut self.said;
        if since.elapsed() >= QUIET {
            said.clear();
            *since = Instant::now();
        }
        if said.len() < MAX_SAID && said.iter().all(|one| one != why) {
            said.push(why.to_owned());
            say(line());
        }
    }

    /// Closes one of the connections without a proof, or of all if there are none, by chance. A
    /// flood that closed the oldest would close a client's before its proof is done.
    fn evict(&mut self) {
        let mut open: Vec<&mut Stranger> = self.all.iter_mut().filter(|one| one.closer.is_some()).collect();
        if open.iter().any(|one| !one.has_proven()) {
            open.retain(|one| !one.has_proven());
        }
        let draw = getrandom::u64().unwrap_or_default() as usize;
        if let Some(at) = draw.checked_rem(open.len()) {
            let stranger = &mut open[at];
            // Fails if the other side has closed it.
            let _ = stranger.closer.take().map(|closer| closer.shutdown(Shutdown::Both));
            stranger.is_evicted = true;
        }
    }

    /// Accepts a connection, on a thread of its own, unless the first look refuses it.
    fn accept(&self, listener: &TcpListener) -> AcceptOutcome {
        if self.all.len() >= 2 * MAX_STRANGERS {
            return AcceptOutcome::Nothing;
        }
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if is_passing(error.kind()) => return AcceptOutcome::Nothing,
            Err(error) => return AcceptOutcome::Unable(error),
        };
        if let Err(error) = self.prover.screen(&stream) {
            return AcceptOutcome::Closed(from, error.into());
        }
        let closer = stream.try_clone().ok();
        let (prover, client, has_proven) = (self.prover.clone(), self.client.clone(), Arc::default());
        let proven = Arc::clone(&has_proven);
        let hear = move || first_message(&prover, &client, stream, from, &proven);
        match std::thread::Builder::new().spawn(hear) {
            Ok(thread) => {
                AcceptOutcome::Connection(Stranger { from, thread, closer, is_evicted: false, has_proven })
            }
            Err(error) => AcceptOutcome::Unable(error),
        }
    }
}

/// Whether nobody waits, or who waited has gone.
fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted)
}

fn first_message(
    prover: &Prover,
    client: &TaskId,
    stream: TcpStream,
    from: SocketAddr,
    has_proven: &AtomicBool,
) -> Heard {
    let until = Instant::now() + FIRST_MESSAGE;
    let receive = || -> Result<_, ChannelError> {
        set_up(&stream)?;
        let local_ip = stream.local_addr()?.ip();
        let channel = prover.accept(stream, client, FIRST_MESSAGE)?;
        has_proven.store(true, Ordering::Relaxed);
        let left = until.saturating_duration_since(Instant::now()).max(LOOK);
        let mut channel = ControlChannel::proven(channel, local_ip, left)?;
        Ok((channel.receive()?, channel))
    };
    match receive()? {
        (ChannelMessage::Open { version, args, .. }, channel) => {
            Ok(Box::new(FirstMessage { from, version, args, channel }))
        }
        (other, _) => Err(ChannelError::Unexpected(format!("{other:?}"))),
    }
}

fn serve_client(
    plan: &Plan,
    version: &str,
    mut args: PerfArgs,
    channel: &mut ControlChannel,
) -> Result<(), CliError> {
    let own = env!("CARGO_PKG_VERSION");
    if version != own {
        return Err(CliError::Failed(format!(
            "the client is of version {}, the server of {own}: run the same release on both",
            shorten(version, MAX_VERSION)
        )));
    }
    plan.agree(&args)?;
    check_client_options(&args)?;
    channel.send(&ChannelMessage::Ready)?;
    // The device is each process's own choice.
    if let (Some(theirs), Some(ours)) = (args.test.fabric_mut(), plan.args.test.fabric()) {
        theirs.device = ours.device.clone();
    }
    answer(&args, plan.cores.responder, None, channel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Error;
    use std::net::Ipv4Addr;

    #[test]
    fn what_this_process_lacks_is_not_said_of_the_connection() {
        let (prover, _) = proofs::prover(SERVER, Ipv4Addr::LOCALHOST.into()).expect("good settings");
        let mut strangers = Strangers::new(prover, proofs::name(CLIENT).expect("a name"));
        let from = (Ipv4Addr::LOCALHOST, 1).into();
        for error in [rustix::io::Errno::MFILE.into(), Error::other("it is another's")] {
            strangers.say_closed(from, &error.into());
        }
        let said = &strangers.said.0;
        assert!(said[0].contains("ulimit -n"), "{said:?}");
        assert_eq!(said[1], "it is another's");
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next_one() {
        let [silent, serving] =
            [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
        let addresses = [&silent, &serving].map(|listener| listener.local_addr().expect("bound"));
        let (prover, _) = proofs::prover(SERVER, Ipv4Addr::LOCALHOST.into()).expect("good settings");
        let strangers = Strangers::new(prover, proofs::name(CLIENT).expect("a name"));
        let server = std::thread::spawn(move || match strangers.accept(&serving) {
            AcceptOutcome::Connection(stranger) => stranger.thread.join().expect("no panic").is_err(),
            _ => false,
        });
        let channel = connect_to_one(&addresses, Duration::from_secs(2), &|| "connecting".into());
        drop(channel.expect("the second address answers"));
        assert!(server.join().expect("no panic"), "the connection ended without a message");
        let error = connect_to_one(&[], Duration::ZERO, &|| "connecting".into()).err().expect("nothing");
        assert_eq!(error.to_string(), "connecting: the name has no address");
    }
}
