//! The connections of a link: opening or accepting them, and their hellos.
//!
//! The initiator says all its hellos before it waits for an answer. The acceptor answers when it
//! has every connection of the link, so an initiator that is through knows that the acceptor is
//! too.

use super::super::failure::{LIMITS, os, peer};
use super::super::io::Sockets;
use super::super::options::TcpOptions;
use super::address::{TcpAddress, Token};
use super::deadline::ConnectDeadline;
use super::hello::{BYTES, Hello, Speaker};
use crate::fabric::{FabricError, FabricKind};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Connections that have not said their hello yet, of one endpoint. More wait in the kernel.
pub(super) const HALF_OPEN: usize = 32;
/// How long a connection may take to say its hello.
pub(super) const HELLO_TIME: Duration = Duration::from_secs(1);

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
        let mut sockets = Vec::with_capacity(1 + usize::from(self.streams));
        for stream in 0..=self.streams {
            // The first one finds the address that works.
            let known = sockets.first().and_then(|first: &TcpStream| first.peer_addr().ok());
            let mut socket = self.open(known)?;
            let hello = Hello { speaker: Speaker::Initiator, stream, number: 0, token: self.peer.token };
            // The socket's buffer is empty, so that the hello fits.
            socket
                .write_all(&hello.to_bytes())
                .map_err(|error| peer(format!("saying hello to it failed: {error}")))?;
            sockets.push(socket);
        }
        for (stream, socket) in (0..).zip(&sockets) {
            self.await_answer(socket, stream)?;
        }
        self.ready(sockets)
    }

    fn open(&self, known: Option<SocketAddr>) -> Result<TcpStream, FabricError> {
        let all = self.peer.hosts.iter().map(|host| SocketAddr::new(*host, self.peer.port));
        let candidates: Vec<SocketAddr> = known.map_or_else(|| all.collect(), |known| vec![known]);
        let mut failed = Vec::new();
        for (at, address) in candidates.iter().enumerate() {
            // Later addresses get their part of the time.
            let left = self.deadline.left() / (candidates.len() - at) as u32;
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(address, left) {
                Ok(socket) => return Ok(socket),
                Err(error) if is_own_limit(&error) => {
                    return Err(os(format!("connecting to {address}"), error, LIMITS));
                }
                Err(error) => failed.push(format!("{address}: {error}")),
            }
        }
        if self.deadline.is_over() {
            return Err(self.timeout(format!("connecting to {}", list(&candidates))));
        }
        Err(peer(format!(
            "nobody listens there ({}): is its process running, and does a firewall let its ports through?",
            failed.join(", ")
        )))
    }

    fn await_answer(&self, socket: &TcpStream, stream: u8) -> Result<(), FabricError> {
        let mut answer = PartialHello::default();
        socket.set_nonblocking(true).map_err(not_set)?;
        loop {
            match answer.read(socket) {
                Ok(Some(hello)) if self.is_right(&hello, Speaker::Acceptor) && hello.stream == stream => {
                    return Ok(());
                }
                Ok(Some(_)) | Err(None) => {
                    return Err(peer("who listens at its address is not it: another process has the port"));
                }
                Err(Some(error)) => return Err(peer(format!("reading its hello failed: {error}"))),
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
    pub(in super::super) fn accept(&self, listener: &TcpListener) -> Result<Sockets, FabricError> {
        let mut strangers: Vec<ArrivingConnection> = Vec::new();
        let mut accepted: Vec<Option<TcpStream>> = (0..=self.streams).map(|_| None).collect();
        while accepted.iter().any(Option::is_none) {
            let until = strangers.iter().fold(self.deadline, |until, it| until.or_earlier(it.until));
            let mut fds: Vec<PollFd<'_>> =
                strangers.iter().map(|it| PollFd::new(&it.socket, PollFlags::IN)).collect();
            if strangers.len() < HALF_OPEN {
                fds.push(PollFd::new(listener, PollFlags::IN));
            }
            self.wait(&mut fds, until)?;
            if self.deadline.is_over() {
                let missing = accepted.iter().filter(|socket| socket.is_none()).count();
                let of = accepted.len();
                return Err(self.timeout(format!("waiting for {missing} of {of} connections of the peer")));
            }
            drop(fds);
            while strangers.len() < HALF_OPEN {
                match listener.accept() {
                    Ok((socket, _)) => strangers.extend(ArrivingConnection::new(socket)),
                    Err(error) if is_own_limit(&error) => {
                        return Err(os("accepting a connection", error, LIMITS));
                    }
                    // Nobody more, or somebody who has left again.
                    Err(_) => break,
                }
            }
            strangers.retain_mut(|stranger| match stranger.hello.read(&stranger.socket) {
                Ok(None) => !stranger.until.is_over(),
                Ok(Some(hello)) => {
                    self.admit(&hello, stranger, &mut accepted);
                    false
                }
                Err(_) => false,
            });
        }
        let sockets: Vec<TcpStream> = accepted.into_iter().flatten().collect();
        for (stream, mut socket) in (0..).zip(&sockets) {
            let hello = Hello { speaker: Speaker::Acceptor, stream, number: 0, token: self.peer.token };
            socket
                .write_all(&hello.to_bytes())
                .map_err(|error| peer(format!("answering its hello failed: {error}")))?;
        }
        self.ready(sockets)
    }

    /// Takes a connection that said the right hello for a place that is free. Closes any other.
    fn admit(&self, hello: &Hello, stranger: &mut ArrivingConnection, accepted: &mut [Option<TcpStream>]) {
        let is_right = self.is_right(hello, Speaker::Initiator);
        let place = accepted.get_mut(usize::from(hello.stream)).filter(|place| place.is_none());
        match place {
            Some(place) if is_right => *place = stranger.socket.try_clone().ok(),
            _ => tracing::debug!(
                stream = hello.stream,
                "a connection was closed: its hello is not the peer's, or came twice"
            ),
        }
    }

    fn wait(&self, fds: &mut [PollFd<'_>], until: ConnectDeadline) -> Result<bool, FabricError> {
        until.wait(fds).map_err(|error| os("waiting for a connection", error, LIMITS))
    }

    fn ready(&self, sockets: Vec<TcpStream>) -> Result<Sockets, FabricError> {
        into_link(sockets, self.options).map_err(not_set)
    }
}

/// The connections of a link, the main one first, with their options set.
pub(super) fn into_link(sockets: Vec<TcpStream>, options: &TcpOptions) -> io::Result<Sockets> {
    sockets.iter().try_for_each(|socket| set_up(socket, options))?;
    let mut sockets = sockets.into_iter();
    let Some(main) = sockets.next() else { unreachable!("the main connection is always made") };
    Ok(Sockets { main, bulk: sockets.collect() })
}

fn set_up(socket: &TcpStream, options: &TcpOptions) -> io::Result<()> {
    let timeout = options.time_to_notice();
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(socket, timeout.as_millis() as u32)?; // at most an hour
    // The kernel counts in seconds.
    let interval = (timeout / 4).max(Duration::from_secs(1));
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, interval)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    if !options.busy_poll.is_zero() {
        let micros = options.busy_poll.as_micros() as u32; // at most a second
        if let Err(error) = socket2::SockRef::from(socket).set_busy_poll(micros) {
            tracing::debug!(
                micros,
                %error,
                "no busy polling: it takes CAP_NET_ADMIN, or as large a net.core.busy_read"
            );
        }
    }
    Ok(())
}

fn not_set(error: io::Error) -> FabricError {
    os("setting the options of a socket", error, "use a kernel of Linux 5.10 or later")
}

/// Whether this process or host lacks something, rather than the peer.
fn is_own_limit(error: &io::Error) -> bool {
    let limits = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| limits.contains(&error))
}

fn list(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}

/// A connection that has not said its hello yet.
pub(super) struct ArrivingConnection {
    pub socket: TcpStream,
    pub hello: PartialHello,
    pub until: ConnectDeadline,
}

impl ArrivingConnection {
    pub(super) fn new(socket: TcpStream) -> Option<Self> {
        socket.set_nonblocking(true).ok()?;
        Some(ArrivingConnection {
            socket,
            hello: PartialHello::default(),
            until: ConnectDeadline::after(HELLO_TIME),
        })
    }
}

/// The part of a hello that has come.
pub(super) struct PartialHello {
    bytes: [u8; BYTES],
    len: usize,
}

impl Default for PartialHello {
    fn default() -> Self {
        PartialHello { bytes: [0; BYTES], len: 0 }
    }
}

impl PartialHello {
    /// Reads what has come, and nothing behind the hello. `Ok(None)`: there is more to come.
    ///
    /// # Errors
    /// The connection's, or none if what came is no hello.
    pub(super) fn read(&mut self, mut socket: &TcpStream) -> Result<Option<Hello>, Option<io::Error>> {
        while self.len < BYTES {
            match socket.read(&mut self.bytes[self.len..]) {
                Ok(0) => return Err(Some(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Some(error)),
            }
        }
        Hello::from_bytes(&self.bytes).map(Some).ok_or(None)
    }
}
