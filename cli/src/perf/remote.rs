//! The two processes on two hosts, or started one by one on one: a server that listens, and a client that comes.

use super::control_channel::{ChannelError, ControlChannel, ControlMessage, PATIENCE};
use super::plan::Plan;
use super::report::PerfReport;
use super::{answer, explain, measure};
use crate::{CliError, print};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long a client looks for its server, which may have been started at the same time.
const LOOKING: Duration = Duration::from_secs(5);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Measures, with the server there.
pub fn client(plan: &Plan, host: &str, port: u16) -> Result<PerfReport, CliError> {
    let mut channel = ControlChannel::tcp(reach(host, port)?, PATIENCE)?;
    measure(plan, None, &mut channel).map_err(|error| explain(error, &mut channel, None))
}

fn reach(host: &str, port: u16) -> Result<TcpStream, CliError> {
    let tried = || format!("reaching the server {host} at port {port}");
    let since = Instant::now();
    let mut addresses =
        (host, port).to_socket_addrs().map_err(|error| CliError::failed(tried(), error))?.cycle();
    loop {
        let Some(address) = addresses.next() else {
            return Err(CliError::failed(tried(), "the name has no address"));
        };
        match TcpStream::connect_timeout(&address, LOOKING) {
            Ok(stream) => return Ok(stream),
            Err(error) if since.elapsed() >= LOOKING => {
                let why = format!("{error}; start the server there first: the same command without a host");
                return Err(CliError::failed(tried(), why));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Answers one client.
pub fn serve(plan: &Plan, port: u16) -> Result<(), CliError> {
    let listening = |error: std::io::Error| {
        let remedy = "choose another --port on both sides if it is in use";
        CliError::failed(format!("listening at port {port}"), format!("{error}; {remedy}"))
    };
    // On a host without IPv6 the first one fails.
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .map_err(listening)?;
    print(&format!("waiting for a client of {} at port {port}\n", plan.test.name()))?;
    let (stream, from) = listener.accept().map_err(listening)?;
    drop(listener);
    let mut channel = ControlChannel::tcp(stream, PATIENCE)?;
    let served = meet(plan, &mut channel);
    match served {
        Ok(()) => print(&format!("served {}\n", from.ip())),
        Err(error) => {
            // The client may be what failed, and gone.
            let _: Result<(), ChannelError> = channel.send(&ControlMessage::Failed(error.to_string()));
            Err(error)
        }
    }
}

fn meet(plan: &Plan, channel: &mut ControlChannel) -> Result<(), CliError> {
    let ControlMessage::Open { test, version, terms, mut settings, .. } = channel.receive()? else {
        return Err(CliError::Failed("what came first is no client's word".into()));
    };
    let own = env!("CARGO_PKG_VERSION");
    if version != own {
        return Err(CliError::Failed(format!(
            "the client is of version {version}, the server of {own}: run the same release on both"
        )));
    }
    plan.agree(test, &terms)?;
    channel.send(&ControlMessage::Ready)?;
    settings.device = plan.settings.device.clone();
    answer(test, &settings, plan.cores.responder, None, channel)
}
