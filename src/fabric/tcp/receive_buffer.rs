//! What the main connection has received and nobody has handled yet.

use super::io::{self, SocketRead};
use rustix::io::Errno;
use std::net::TcpStream;

/// Bytes that one read takes at most besides a payload. A longer payload than that goes straight to
/// its destination, save for the part that comes with its header.
const BYTES: usize = 8 << 10;

/// SocketRead bytes of the main connection.
#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    bytes: Box<[u8; BYTES]>,
    start: usize,
    end: usize,
}

impl Default for ReceiveBuffer {
    fn default() -> Self {
        ReceiveBuffer { bytes: Box::new([0; BYTES]), start: 0, end: 0 }
    }
}

impl ReceiveBuffer {
    /// The bytes that wait.
    #[inline]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Forgets the first `count` bytes.
    #[inline]
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }

    /// Forgets all bytes.
    pub(super) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// Moves as many bytes as there are into `room`. Returns their number.
    #[inline]
    pub(super) fn take(&mut self, room: &mut [u8]) -> usize {
        let count = room.len().min(self.end - self.start);
        room[..count].copy_from_slice(&self.bytes()[..count]);
        self.consume(count);
        count
    }

    /// Reads what has come behind the bytes that wait, once.
    ///
    /// # Errors
    /// That of the connection.
    #[inline]
    pub(super) fn fill(&mut self, socket: &TcpStream) -> Result<SocketRead, Errno> {
        if self.start > 0 {
            // A part of a header, or nothing.
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == BYTES {
            return Ok(SocketRead::Nothing);
        }
        let received = io::receive(socket, &mut self.bytes[self.end..])?;
        if let SocketRead::Bytes(count) = received {
            self.end += count;
        }
        Ok(received)
    }

    /// Reads into `room` and, if that is full, behind it into this buffer, which is empty. Returns
    /// how many bytes of `room` were read.
    ///
    /// # Errors
    /// That of the connection.
    #[inline]
    pub(super) fn fill_behind(&mut self, socket: &TcpStream, room: &mut [u8]) -> Result<SocketRead, Errno> {
        debug_assert!(self.start == self.end);
        (self.start, self.end) = (0, 0);
        let received = io::receive_two(socket, room, &mut self.bytes[..])?;
        let SocketRead::Bytes(count) = received else { return Ok(received) };
        self.end = count.saturating_sub(room.len());
        Ok(SocketRead::Bytes(count - self.end))
    }

    /// Whether the last read took all that its buffer had room for, so that there may be more.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.end == BYTES
    }
}
