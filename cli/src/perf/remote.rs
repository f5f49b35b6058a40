//! A server that listens for a client, on two hosts or on one.

use super::channel_message::ChannelMessage;
use super::control_channel::{CHANNEL_TIMEOUT, ChannelError, ControlChannel};
use super::plan::Plan;
use super::report::PerfReport;
use super::session::{answer, explain, measure};
use crate::error::{CliError, print};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long a client tries to connect: the server may have been started at the same time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

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

/// Answers one client.
pub fn serve(plan: &Plan, port: u16) -> Result<(), CliError> {
    let listening = |error: std::io::Error| {
        let remedy = "choose another --port on both sides if it is in use";
        CliError::failed(format!("listening at port {port}"), format!("{error}; {remedy}"))
    };
    // The first bind fails on a host without IPv6.
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .map_err(listening)?;
    print(&format!("waiting for a client of {} at port {port}\n", plan.args.test.name()))?;
    let (stream, from) = listener.accept().map_err(listening)?;
    drop(listener);
    let mut channel = ControlChannel::tcp(stream, CHANNEL_TIMEOUT)?;
    let served = serve_client(plan, &mut channel);
    match served {
        Ok(()) => print(&format!("served {}\n", from.ip())),
        Err(error) => {
            // Fails if the client has ended.
            let _: Result<(), ChannelError> = channel.send(&ChannelMessage::Failed(error.to_string()));
            Err(error)
        }
    }
}

fn serve_client(plan: &Plan, channel: &mut ControlChannel) -> Result<(), CliError> {
    let (version, mut args) = match channel.receive()? {
        ChannelMessage::Open { version, args, .. } => (version, args),
        other => return Err(CliError::Failed(format!("the client sent {other:?} first, not Open"))),
    };
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
