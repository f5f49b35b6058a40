//! Reads and writes of non-blocking sockets.

use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use std::net::{Shutdown, TcpStream};

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketRead {
    Bytes(usize),
    /// Nothing is there now.
    Nothing,
    /// The peer's side of the connection has ended.
    End,
}

/// The connections of a link.
#[derive(Debug)]
pub(super) struct Sockets {
    pub main: TcpStream,
    pub bulk: Vec<TcpStream>,
}

impl Sockets {
    /// All of them, the main one first.
    pub(super) fn all(&self) -> impl Iterator<Item = &TcpStream> {
        std::iter::once(&self.main).chain(&self.bulk)
    }

    /// Tells the peer that nothing more comes.
    pub(super) fn shut_down(&self) {
        // An error is a connection that has ended already.
        self.all().for_each(|socket| _ = socket.shutdown(Shutdown::Write));
    }

    /// Ends them in both directions.
    pub(super) fn abandon(&self) {
        // An error is a connection that has ended already.
        self.all().for_each(|socket| _ = socket.shutdown(Shutdown::Both));
    }
}

/// Sends the bytes of several buffers, as many as the kernel takes now.
///
/// # Errors
/// That of the connection, if it has ended.
#[inline]
pub(super) fn send_all(socket: &TcpStream, buffers: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let mut control = SendAncillaryBuffer::default();
    taken(rustix::net::sendmsg(socket, buffers, &mut control, SendFlags::NOSIGNAL))
}

/// As [`send_all`], of one buffer.
///
/// # Errors
/// Like [`send_all`].
#[inline]
pub(super) fn send(socket: &TcpStream, bytes: &[u8]) -> Result<usize, Errno> {
    taken(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL))
}

#[inline]
fn taken(sent: Result<usize, Errno>) -> Result<usize, Errno> {
    match sent {
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        sent => sent,
    }
}

/// Reads what is there into a buffer, which has at least one byte.
///
/// # Errors
/// That of the connection, if it is broken.
#[inline]
pub(super) fn receive(socket: &TcpStream, buffer: &mut [u8]) -> Result<SocketRead, Errno> {
    received(rustix::net::recv(socket, buffer, RecvFlags::empty()).map(|(count, _)| count))
}

/// As [`receive`], into two buffers one after the other.
///
/// # Errors
/// Like [`receive`].
#[inline]
pub(super) fn receive_two(
    socket: &TcpStream,
    first: &mut [u8],
    second: &mut [u8],
) -> Result<SocketRead, Errno> {
    received(rustix::io::readv(socket, &mut [IoSliceMut::new(first), IoSliceMut::new(second)]))
}

#[inline]
fn received(read: Result<usize, Errno>) -> Result<SocketRead, Errno> {
    match read {
        Ok(0) => Ok(SocketRead::End),
        Ok(count) => Ok(SocketRead::Bytes(count)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(SocketRead::Nothing),
        Err(error) => Err(error),
    }
}
