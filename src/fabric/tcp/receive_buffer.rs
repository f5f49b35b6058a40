//! What the main connection has received and nobody has handled yet.

use super::frame::{MAX_SEND, SHORT_HEADER};
use super::io::{self, SocketRead};
use crate::memory::copy;
use rustix::io::Errno;
use std::net::TcpStream;

/// Bytes that wait at most: more than the longest message with its header.
pub(super) const RECEIVE_BYTES: usize = 48 << 10;
/// Bytes that one read takes at most besides a payload. A longer payload than that goes straight to
/// its destination, save for the part that comes with its header. Where a long message has come,
/// reads take as much as there is room for, so that one takes the next message.
const READ: usize = 8 << 10;

const _: () = assert!(SHORT_HEADER + MAX_SEND < RECEIVE_BYTES);

/// Bytes of the main connection that were received and not handled yet.
#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    bytes: Box<[u8; RECEIVE_BYTES]>,
    start: usize,
    end: usize,
    /// Where the last read had to end.
    limit: usize,
    /// Messages longer than a usual read come, and no payload has come since.
    has_long: bool,
}

impl Default for ReceiveBuffer {
    fn default() -> Self {
        ReceiveBuffer { bytes: Box::new([0; RECEIVE_BYTES]), start: 0, end: 0, limit: READ, has_long: false }
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
        self.has_long |= count > READ;
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
        copy(&mut room[..count], &self.bytes()[..count]);
        self.start += count;
        self.has_long = false;
        count
    }

    /// Reads what has come behind the bytes that wait, once.
    ///
    /// # Errors
    /// That of the connection.
    #[inline]
    pub(super) fn fill(&mut self, socket: &TcpStream) -> Result<SocketRead, Errno> {
        if self.start > 0 {
            // A part of a frame, or nothing.
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.limit = if self.has_long || self.end > 0 { RECEIVE_BYTES } else { READ };
        if self.end == self.limit {
            return Ok(SocketRead::Nothing);
        }
        let received = io::receive(socket, &mut self.bytes[self.end..self.limit])?;
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
        (self.start, self.end, self.limit) = (0, 0, READ);
        let received = io::receive_two(socket, room, &mut self.bytes[..READ])?;
        let SocketRead::Bytes(count) = received else { return Ok(received) };
        self.end = count.saturating_sub(room.len());
        Ok(SocketRead::Bytes(count - self.end))
    }

    /// Whether the last read took all that its buffer had room for, so that there may be more.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.end == self.limit
    }
}
