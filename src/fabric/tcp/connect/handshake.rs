//! The connections of a link: opening or accepting them, and their hellos.
//!
//! The initiator begins to open all connections before it says a hello on one. So the acceptor has
//! seen nothing of a link for which the initiator lacks descriptors. Each hello is said as soon as
//! its connection is open: a silent one is closed soon, however slow the others are. The acceptor
//! answers when it has every connection of the link, so an initiator that is through knows that the
//! acceptor is too.

use super::super::failure::{LIMITS, os, peer};
use super::super::io::{self, Sockets};
use super::super::options::TcpOptions;
use super::address::{TcpAddress, Token};
use super::arrivals::{ArrivingConnections, PartialHello, SharedArrivals, own_limit};
use super::deadline::ConnectDeadline;
use super::dial;
use super::hello::{BYTES, Hello, Speaker};
use super::set_up::into_link;
use crate::fabric::{FabricError, FabricKind};
use crate::wire::LACKS;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::io::{Error, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Pause before the next look for connections while descriptors lack.
const PAUSE: Duration = Duration::from_millis(10);
/// How long the acceptor tries to go on once descriptors have lacked.
const LACK_TIME: Duration = Duration::from_millis(200);

/// What both sides know of the link that is made.
pub(in super::super) struct LinkPlan<'a> {
    pub options: &'a TcpOptions,
    /// This side's token.
    pub own: Token,
    pub peer: &'a TcpAddress,
    /// Connections for bulk.
    pub streams: u8,
    pub deadline: ConnectDeadline,
}

impl LinkPlan<'_> {
    fn timeout(&self, tried: String) -> FabricError {
        FabricError::Timeout { fabric: FabricKind::Tcp, tried, after: self.deadline.after }
    }

    /// Opens the connections.
    pub(in super::super) fn initiate(&self) -> Result<Sockets, FabricError> {
        let sockets = self.open()?;
        for (stream, socket) in (0..).zip(&sockets) {
            self.await_answer(socket, stream)?;
        }
        self.ready(sockets)
    }

    fn hello(&self, speaker: Speaker, stream: u8) -> [u8; BYTES] {
        Hello { speaker, stream, number: 0, token: self.peer.token }.to_bytes()
    }

    /// Opens the connections at the first address that works, and says the hellos.
    fn open(&self) -> Result<Vec<TcpStream>, FabricError> {
        let addresses = self.peer.hosts.iter().map(|host| SocketAddr::new(*host, self.peer.port));
        let candidates: Vec<SocketAddr> = addresses.collect();
        let mut failed = Vec::new();
        for (at, address) in candidates.iter().enumerate() {
            // Later addresses get their part of the time.
            let until = ConnectDeadline::after(self.deadline.left() / (candidates.len() - at) as u32);
            if until.is_over() {
                break;
            }
            match self.open_at(*address, until) {
                Ok(sockets) => return Ok(sockets),
                Err(error) if LACKS.contains(&error) => {
                    return Err(os(format!("connecting to {address}"), error, LIMITS));
                }
                Err(error) => failed.push(format!("{address}: {error}")),
            }
        }
        if self.deadline.is_over() {
            return Err(self.timeout(format!("connecting to {}", list(&candidates))));
        }
        Err(peer(format!(
            "none of its addresses takes a connection ({}): is its process running, does a firewall let its \
             ports through, and has this host a free port (net.ipv4.ip_local_port_range)?",
            failed.join(", ")
        )))
    }

    /// Opens the connections at this address: the first one in this time, the others until the
    /// deadline.
    fn open_at(&self, address: SocketAddr, mut until: ConnectDeadline) -> rustix::io::Result<Vec<TcpStream>> {
        let sockets: Vec<TcpStream> =
            (0..=self.streams).map(|_| dial::open(address)).collect::<Result<_, _>>()?;
        let mut silent: Vec<u8> = (0..=self.streams).collect();
        loop {
            for stream in std::mem::take(&mut silent) {
                match io::send(&sockets[usize::from(stream)], &self.hello(Speaker::Initiator, stream))? {
                    0 => silent.push(stream),
                    // The address works. The socket's buffer is empty, so that the hello fits.
                    _ => until = self.deadline,
                }
            }
            if silent.is_empty() {
                return Ok(sockets);
            }
            let waiting = silent.iter().map(|stream| &sockets[usize::from(*stream)]);
            let mut fds: Vec<PollFd<'_>> = waiting.map(|it| PollFd::new(it, PollFlags::OUT)).collect();
            if !until.wait(&mut fds)? {
                return Err(Errno::TIMEDOUT);
            }
        }
    }

    fn await_answer(&self, socket: &TcpStream, stream: u8) -> Result<(), FabricError> {
        let mut answer = PartialHello::default();
        loop {
            match answer.read(socket) {
                Ok(Some(hello)) if self.is_right(&hello, Speaker::Acceptor) && hello.stream == stream => {
                    return Ok(());
                }
                Ok(Some(_)) | Err(None) => {
                    return Err(peer("who listens at its address is not it: another process has the port"));
                }
                Err(Some(error)) => return Err(broken("reading its hello", error)),
                Ok(None) => {}
            }
            if !self.wait(&mut [PollFd::new(socket, PollFlags::IN)], self.deadline)? {
                return Err(self.timeout("waiting for the peer's hello".into()));
            }
        }
    }

    fn is_right(&self, hello: &Hello, speaker: Speaker) -> bool {
        // The token first, whatever else is wrong.
        hello.token.is(&self.own) && hello.speaker == speaker && hello.number == 0
    }

    /// Waits for the connections of the initiator.
    pub(in super::super) fn accept(
        &self,
        listener: &TcpListener,
        shared: &SharedArrivals,
    ) -> Result<Sockets, FabricError> {
        let mut arriving = ArrivingConnections::new(shared.clone(), self.streams);
        let mut accepted: Vec<Option<TcpStream>> = (0..=self.streams).map(|_| None).collect();
        let mut lack: Option<(Errno, ConnectDeadline)> = None;
        while accepted.iter().any(Option::is_none) {
            let mut until = arriving.until(self.deadline);
            let sockets = arriving.sockets().chain(accepted.iter().flatten());
            let mut fds: Vec<PollFd<'_>> = sockets.map(|it| PollFd::new(it, PollFlags::IN)).collect();
            match lack {
                None => fds.push(PollFd::new(listener, PollFlags::IN)),
                // The listener stays readable.
                Some(_) => until = until.or_earlier(ConnectDeadline::after(PAUSE)),
            }
            self.wait(&mut fds, until)?;
            drop(fds);
            if let Some((error, until)) = lack
                && (until.is_over() || self.deadline.is_over())
            {
                return Err(lacking(error));
            }
            if self.deadline.is_over() {
                return Err(self.not_all_came(&accepted, arriving.strangers()));
            }
            let admit = |hello: Hello, socket| self.admit(&hello, socket, &mut accepted);
            arriving.take(|| listener.accept(), |_| {}, admit);
            lack = lack.or_else(|| Some((arriving.lack()?, ConnectDeadline::after(LACK_TIME))));
            // An initiator that goes while this process lacks descriptors goes because of it.
            let gone = accepted.iter().flatten().try_for_each(check_open);
            gone.map_err(|error| lack.map_or(error, |(lack, _)| lacking(lack)))?;
        }
        let sockets: Vec<TcpStream> = accepted.into_iter().flatten().collect();
        for (stream, mut socket) in (0..).zip(&sockets) {
            // The socket's buffer is empty, so that the hello fits.
            let said = socket.write_all(&self.hello(Speaker::Acceptor, stream));
            said.map_err(|error| broken("saying hello to it", error))?;
        }
        self.ready(sockets)
    }

    /// Takes a connection that said the right hello for a place that is free. Returns whether it is
    /// the peer's.
    fn admit(&self, hello: &Hello, socket: TcpStream, accepted: &mut [Option<TcpStream>]) -> bool {
        let is_right = self.is_right(hello, Speaker::Initiator);
        let place = accepted.get_mut(usize::from(hello.stream)).filter(|place| place.is_none());
        match place {
            Some(place) if is_right => *place = Some(socket),
            _ if is_right => {
                tracing::debug!(stream = hello.stream, "a connection was closed: it came twice, or is none")
            }
            _ => {}
        }
        is_right
    }

    /// The error of a wait that has taken too long: who came.
    fn not_all_came(&self, accepted: &[Option<TcpStream>], strangers: u64) -> FabricError {
        let missing = accepted.iter().filter(|socket| socket.is_none()).count();
        let others = match strangers {
            0 => String::new(),
            count => format!(", while {count} came that are not the peer's"),
        };
        self.timeout(format!("waiting for {missing} of {} connections of the peer{others}", accepted.len()))
    }

    fn wait(&self, fds: &mut [PollFd<'_>], until: ConnectDeadline) -> Result<bool, FabricError> {
        until.wait(fds).map_err(|error| os("waiting for a connection", error, LIMITS))
    }

    fn ready(&self, sockets: Vec<TcpStream>) -> Result<Sockets, FabricError> {
        into_link(sockets, self.options).map_err(not_set)
    }
}

fn not_set(error: Error) -> FabricError {
    let remedy = if own_limit(&error).is_some() { LIMITS } else { "use a kernel of Linux 5.10 or later" };
    os("setting the options of a socket", error, remedy)
}

/// The peer's connection could not be accepted for so long.
fn lacking(lack: Errno) -> FabricError {
    os("accepting a connection", lack, LIMITS)
}

/// A connection with the peer failed: what this process lacked, else the peer ended it.
fn broken(tried: &str, error: Error) -> FabricError {
    match own_limit(&error) {
        Some(_) => os(tried, error, LIMITS),
        None => peer(format!("{tried} failed: {error}")),
    }
}

/// Fails if the peer has closed a connection before all had come, or says more than its hello.
fn check_open(socket: &TcpStream) -> Result<(), FabricError> {
    match socket.peek(&mut [0]) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
        Ok(0) => Err(peer("it has closed a connection of the link before all had come")),
        Ok(_) => Err(peer("it has sent more than its hello before all connections had come")),
        Err(error) => Err(peer(format!("a connection of the link ended before all had come: {error}"))),
    }
}

fn list(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}
