//! What the main connection has still to send: copied bytes, a bounded number.

use super::io;
use rustix::io::{Errno, IoSlice};
use std::net::TcpStream;

/// Bytes of a batch that wait for its end at most.
const BATCH_BYTES: usize = 32 << 10;
/// The longest payload that a batch copies rather than sends at once.
const COPIED_PAYLOAD: usize = 2 << 10;
/// Bytes that only goodbyes and credits take.
const RESERVE: usize = 64;

/// Unsent bytes of the main connection. A frame that was posted is sent to its end, whatever
/// happens to the memory that it was made of.
#[derive(Debug)]
pub(super) struct SendBuffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// All bytes that the kernel has taken so far.
    sent: u64,
    /// The error of the connection. Bytes are dropped from then on.
    broken: Option<Errno>,
}

impl SendBuffer {
    /// An empty one, with room for a frame with a payload of `payload` bytes behind a batch.
    pub(super) fn new(payload: usize) -> Self {
        let bytes = vec![0; payload + 2 * BATCH_BYTES].into_boxed_slice();
        SendBuffer { bytes, start: 0, end: 0, sent: 0, broken: None }
    }

    /// Whether there is nothing to send.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The bytes that the kernel has taken so far, and those posted.
    #[inline]
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.sent, self.sent + (self.end - self.start) as u64)
    }

    /// The error that ended the connection, if a send has met it.
    #[inline]
    pub(super) fn error(&self) -> Option<Errno> {
        self.broken
    }

    /// Whether a frame of `len` bytes can be posted.
    #[inline]
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.has_room_for_last(len + RESERVE)
    }

    /// As [`SendBuffer::has_room`], for credits and goodbyes.
    #[inline]
    pub(super) fn has_room_for_last(&self, len: usize) -> bool {
        len <= self.bytes.len() - (self.end - self.start)
    }

    /// Sends a frame, or as much of it as the kernel takes, and keeps the rest. In a batch it may
    /// keep all. The caller has checked that there is room.
    #[inline]
    pub(super) fn post(&mut self, socket: &TcpStream, header: &[u8], payload: &[u8], in_batch: bool) {
        if in_batch && payload.len() <= COPIED_PAYLOAD {
            self.keep(header);
            self.keep(payload);
            if self.end - self.start >= BATCH_BYTES {
                self.flush(socket);
            }
            return;
        }
        let pending = self.end - self.start;
        let sent = match self.broken {
            Some(_) => return,
            None if pending == 0 && payload.is_empty() => io::send(socket, header),
            None => io::send_all(
                socket,
                &[
                    IoSlice::new(&self.bytes[self.start..self.end]),
                    IoSlice::new(header),
                    IoSlice::new(payload),
                ],
            ),
        };
        let sent = self.note(sent);
        if self.broken.is_some() {
            return;
        }
        self.start += sent.min(pending);
        let of_header = sent.saturating_sub(pending).min(header.len());
        let of_payload = sent.saturating_sub(pending + header.len());
        if of_header + of_payload < header.len() + payload.len() {
            self.keep(&header[of_header..]);
            self.keep(&payload[of_payload..]);
        }
    }

    /// Sends what is kept, as much as the kernel takes.
    #[inline]
    pub(super) fn flush(&mut self, socket: &TcpStream) {
        if self.is_empty() || self.broken.is_some() {
            return;
        }
        let sent = io::send(socket, &self.bytes[self.start..self.end]);
        self.start += self.note(sent);
    }

    /// Counts sent bytes. An error drops what is kept.
    #[inline]
    fn note(&mut self, sent: Result<usize, Errno>) -> usize {
        match sent {
            Ok(count) => {
                self.sent += count as u64;
                count
            }
            Err(error) => {
                self.broken = Some(error);
                self.start = self.end;
                0
            }
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
        if bytes.len() > self.bytes.len() - self.end {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.bytes[self.end..self.end + bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }
}
