//! Connections that are being opened, without waiting.

use super::super::io;
use super::arrivals::PartialHello;
use super::hello::Hello;
use crate::wire::LACKS;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use std::net::{SocketAddr, TcpStream};

/// Why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialError {
    /// The peer's host says that nobody listens there.
    Refused,
    /// Who listens there is not the peer.
    OtherListener,
    /// This process or host lacks a descriptor or memory for it.
    Lack(Errno),
    /// Another attempt may succeed.
    Failed,
}

/// Begins to open a connection. A send on it gets nothing away before it is open.
pub(super) fn open(to: SocketAddr) -> rustix::io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error),
    }
}

/// A connection that is being opened, to replace one that broke.
pub(super) struct DialledConnection {
    pub socket: TcpStream,
    hello: Hello,
    is_said: bool,
    answer: PartialHello,
}

impl DialledConnection {
    /// Begins to open it.
    pub(super) fn new(to: SocketAddr, hello: Hello) -> Result<Self, DialError> {
        let socket = open(to).map_err(kind)?;
        Ok(DialledConnection { socket, hello, is_said: false, answer: PartialHello::default() })
    }

    /// Says the hello as soon as it can. Returns the other side's when it has come.
    pub(super) fn step(&mut self) -> Result<Option<Hello>, DialError> {
        if !self.is_said {
            let hello = self.hello.to_bytes();
            match io::send(&self.socket, &hello) {
                Ok(0) => return Ok(None),
                Ok(count) if count == hello.len() => self.is_said = true,
                Ok(_) => return Err(DialError::Failed),
                Err(error) => return Err(kind(error)),
            }
        }
        match self.answer.read(&self.socket) {
            Ok(answer) => Ok(answer),
            Err(None) => Err(DialError::OtherListener),
            Err(Some(_)) => Err(DialError::Failed),
        }
    }
}

fn kind(error: Errno) -> DialError {
    match error {
        Errno::CONNREFUSED => DialError::Refused,
        error if LACKS.contains(&error) => DialError::Lack(error),
        _ => DialError::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_this_process_is_told_apart_from_the_peer() {
        for lack in LACKS {
            assert_eq!(kind(lack), DialError::Lack(lack));
        }
        assert_eq!(kind(Errno::CONNREFUSED), DialError::Refused);
        assert_eq!(kind(Errno::HOSTUNREACH), DialError::Failed);
    }
}
