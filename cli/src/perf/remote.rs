//! A server that listens for a client, on two hosts or on one.

use super::channel_message::ChannelMessage;
use super::control_channel::{CHANNEL_TIMEOUT, ChannelError, ControlChannel};
use super::options::PerfArgs;
use super::plan::Plan;
use super::report::PerfReport;
use super::session::{answer, explain, measure};
use crate::error::{CliError, print};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a client tries to connect: the server may have been started at the same time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// How long a connection has for the first message of a client.
const FIRST_MESSAGE: Duration = Duration::from_secs(5);
/// Connections without a first message at a time. A further one takes the place of the oldest.
const MAX_STRANGERS: usize = 64;
/// Between two looks for a connection, and whether one of them has turned out to be a client.
const LOOK: Duration = Duration::from_millis(5);

/// Measures, with the server on that host.
pub fn client(plan: &Plan, host: &str, port: u16) -> Result<PerfReport, CliError> {
    let mut channel = ControlChannel::tcp(connect(host, port)?, CHANNEL_TIMEOUT)?;
    measure(plan, None, &mut channel).map_err(|error| explain(error, &mut channel, None))
}

fn connect(host: &str, port: u16) -> Result<TcpStream, CliError> {
    let tried = || format!("connecting to the server {host} at port {port}");
    let since = Instant::now();
    let mut addresses =
        (host, port).to_socket_addrs().map_err(|error| CliError::failed(tried(), error))?.cycle();
    loop {
        let Some(address) = addresses.next() else {
            return Err(CliError::failed(tried(), "the name has no address"));
        };
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) if since.elapsed() >= CONNECT_TIMEOUT => {
                let why = format!("{error}; start the server there first: the same command without a host");
                return Err(CliError::failed(tried(), why));
            }
            Err(_) => std::thread::sleep(RETRY_PAUSE),
        }
    }
}

/// Answers one client that connects to this address.
pub fn serve(plan: &Plan, at: SocketAddr) -> Result<(), CliError> {
    let listening = |error: std::io::Error| {
        let remedy = "choose another --port on both sides if it is in use, and an address of this host";
        CliError::failed(format!("listening at {at}"), format!("{error}; {remedy}"))
    };
    let listener = TcpListener::bind(at).map_err(listening)?;
    listener.set_nonblocking(true).map_err(listening)?;
    print(&format!("waiting for a client of {} at {at}\n", plan.args.test.name()))?;
    if at.ip().is_loopback() {
        print("this host alone can reach it: --listen ADDRESS lets others\n")?;
    }
    let FirstMessage { from, version, args, mut channel } = first_client(&listener).map_err(listening)?;
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

/// A connection whose first message is waited for.
struct Stranger {
    thread: JoinHandle<Heard>,
    /// Closes the connection. `None` once it has, or if the process has too few descriptors.
    closer: Option<TcpStream>,
    is_evicted: bool,
}

/// Waits for a connection whose first message is that of a client. Any other is closed and said.
fn first_client(listener: &TcpListener) -> std::io::Result<FirstMessage> {
    let mut strangers: Vec<Stranger> = Vec::new();
    loop {
        while let Some(at) = strangers.iter().position(|one| one.thread.is_finished()) {
            let Stranger { thread, is_evicted, .. } = strangers.remove(at);
            match thread.join() {
                // The threads of the others end by themselves.
                Ok(Ok(first)) => return Ok(*first),
                Ok(Err(_)) if is_evicted => {}
                Ok(Err(why)) => eprintln!("{why}: it was closed, and the server waits on"),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        match accept(listener, &strangers) {
            Some(stranger) => strangers.push(stranger),
            None => std::thread::sleep(LOOK),
        }
        if strangers.iter().filter(|one| !one.is_evicted).count() > MAX_STRANGERS {
            evict(&mut strangers);
        }
    }
}

/// Closes the oldest connection. A client speaks at once, so a flood does not keep it out.
fn evict(strangers: &mut [Stranger]) {
    if let Some(oldest) = strangers.iter_mut().find(|one| one.closer.is_some()) {
        // Fails if the other side has closed it.
        let _ = oldest.closer.take().map(|closer| closer.shutdown(Shutdown::Both));
        oldest.is_evicted = true;
    }
}

/// Accepts a connection, on a thread of its own. `None` without one, or while the system or this
/// process can take no more: it then waits in the system's queue.
fn accept(listener: &TcpListener, strangers: &[Stranger]) -> Option<Stranger> {
    if strangers.len() >= 2 * MAX_STRANGERS {
        return None;
    }
    let (stream, from) = listener.accept().ok()?;
    let closer = stream.try_clone().ok();
    let thread = std::thread::Builder::new().spawn(move || first_message(stream, from)).ok()?;
    Some(Stranger { thread, closer, is_evicted: false })
}

/// A client, or what is wrong with the connection.
type Heard = Result<Box<FirstMessage>, String>;

fn first_message(stream: TcpStream, from: SocketAddr) -> Heard {
    let receive = || {
        stream.set_nonblocking(false)?;
        let mut channel = ControlChannel::tcp(stream, FIRST_MESSAGE)?;
        Ok((channel.receive()?, channel))
    };
    match receive().map_err(|error: ChannelError| error.to_string()) {
        Ok((ChannelMessage::Open { version, args, .. }, channel)) => {
            Ok(Box::new(FirstMessage { from, version, args, channel }))
        }
        Ok((other, _)) => Err(format!("the connection from {from} is no client's: it sent {other:?} first")),
        Err(why) => Err(format!("the connection from {from} is no client's: {why}")),
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
            "the client is of version {version}, the server of {own}: run the same release on both"
        )));
    }
    plan.agree(&args)?;
    channel.send(&ChannelMessage::Ready)?;
    // The device is each process's own choice.
    if let (Some(theirs), Some(ours)) = (args.test.fabric_mut(), plan.args.test.fabric()) {
        theirs.device = ours.device.clone();
    }
    answer(&args, plan.cores.responder, None, channel)
}
