//! Large payloads: how they are striped over the bulk connections, and the queue of those to send.
//! A payload stays in the queue until the peer has acknowledged its frame.
//!
//! A payload has no header on a bulk connection. Both sides compute the stripes from its length and
//! from the number of payloads before it.

use super::io;
use crate::memory::Tensor;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::ops::Range;

/// A payload is cut in stripes of at least so many bytes.
const STRIPE_BYTES: u64 = 256 << 10;
/// Stripes start at multiples of this.
const ALIGN: u64 = 4 << 10;
/// Bytes of one system call at most.
const CALL_BYTES: u64 = 1 << 20;

/// The part of the `number`-th payload, of `len` bytes, that goes by connection `stream` of
/// `streams`.
#[inline]
pub(super) fn stripe(len: u64, number: u64, stream: usize, streams: usize) -> Range<u64> {
    let streams = streams as u64;
    let count = len.div_ceil(STRIPE_BYTES).clamp(1, streams);
    let place = (stream as u64 + streams - number % streams) % streams;
    if place >= count {
        return 0..0;
    }
    if count == 1 {
        return 0..len;
    }
    let each = len.div_ceil(count).next_multiple_of(ALIGN);
    let start = (place * each).min(len);
    start..(start + each).min(len)
}

#[derive(Debug)]
struct BulkItem {
    tensor: Tensor,
    /// Where the payload is in the tensor.
    start: usize,
    len: u64,
    /// Bytes that are not sent.
    left: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// Number of the payload.
    number: u64,
    /// Bytes of its stripe that were sent.
    done: u64,
}

/// Payloads that are not acknowledged, in the order of their headers on the main connection.
#[derive(Debug)]
pub(super) struct BulkQueue {
    items: VecDeque<BulkItem>,
    /// Items that are not wholly sent.
    unsent: usize,
    /// Number of the first item.
    base: u64,
    streams: Vec<Cursor>,
    /// Whether the last [`BulkQueue::pump`] used up its budget.
    has_no_budget: bool,
    broken: Option<Errno>,
}

impl BulkQueue {
    /// An empty queue for so many connections.
    pub(super) fn new(streams: usize, room: usize) -> Self {
        let items = VecDeque::with_capacity(room);
        let streams = vec![Cursor::default(); streams];
        BulkQueue { items, unsent: 0, base: 0, streams, has_no_budget: false, broken: None }
    }

    /// Whether there is nothing to send.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.unsent == 0
    }

    /// Whether there is something to send that the kernel has not refused.
    pub(super) fn may_send_more(&self) -> bool {
        self.unsent > 0 && self.has_no_budget
    }

    /// The error that ended a connection, if a send has met it.
    #[inline]
    pub(super) fn error(&self) -> Option<Errno> {
        self.broken
    }

    /// Queues `len` bytes, at least one, of a tensor from `start` on.
    pub(super) fn add(&mut self, tensor: Tensor, start: usize, len: u64) {
        self.unsent += 1;
        self.items.push_back(BulkItem { tensor, start, len, left: len });
    }

    /// Forgets the first item, if it is wholly sent. Returns whether it was.
    pub(super) fn release_first(&mut self) -> bool {
        if self.items.pop_front_if(|item| item.left == 0).is_none() {
            return false;
        }
        self.base += 1;
        // A connection without a stripe of it may not have come by yet.
        for cursor in self.streams.iter_mut().filter(|cursor| cursor.number < self.base) {
            *cursor = Cursor { number: self.base, done: 0 };
        }
        true
    }

    /// Forgets the error of connections that are replaced.
    pub(super) fn forget_error(&mut self) {
        self.broken = None;
    }

    /// Begins again with the first item, on new connections.
    pub(super) fn resume(&mut self) {
        self.unsent = self.items.len();
        self.items.iter_mut().for_each(|item| item.left = item.len);
        self.streams.fill(Cursor { number: self.base, done: 0 });
    }

    /// Forgets what was sent: it won't be sent again.
    pub(super) fn forget_sent(&mut self) {
        while self.release_first() {}
    }

    /// Forgets all. Nothing may be added after that.
    pub(super) fn clear(&mut self) {
        self.unsent = 0;
        self.items.clear();
    }

    /// Sends about `budget` bytes at most, as many as the kernel takes.
    pub(super) fn pump(&mut self, sockets: &[TcpStream], budget: u64) {
        if self.broken.is_some() {
            return;
        }
        let mut budget = budget;
        for (at, socket) in sockets.iter().enumerate() {
            if let Err(error) = self.pump_stream(at, socket, &mut budget) {
                self.broken = Some(error);
                return;
            }
        }
        self.has_no_budget = budget == 0;
    }

    fn pump_stream(&mut self, at: usize, socket: &TcpStream, budget: &mut u64) -> Result<(), Errno> {
        let (base, streams) = (self.base, self.streams.len());
        let cursor = &mut self.streams[at];
        while let Some(item) = self.items.get_mut((cursor.number - base) as usize) {
            let range = stripe(item.len, cursor.number, at, streams);
            if range.start + cursor.done == range.end {
                *cursor = Cursor { number: cursor.number + 1, done: 0 };
                continue;
            }
            if *budget == 0 {
                return Ok(());
            }
            let from = range.start + cursor.done;
            let count = (range.end - from).min(CALL_BYTES);
            let first = item.start + from as usize;
            let sent = io::send(socket, &item.tensor.bytes()[first..first + count as usize])? as u64;
            cursor.done += sent;
            item.left -= sent;
            self.unsent -= usize::from(item.left == 0);
            *budget = budget.saturating_sub(sent);
            if sent < count {
                return Ok(());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stripes_cover_a_payload_once(len in 1u64..(1 << 40), number: u64, streams in 1usize..=15) {
            let mut stripes: Vec<_> =
                (0..streams).map(|at| stripe(len, number, at, streams)).filter(|r| !r.is_empty()).collect();
            stripes.sort_by_key(|range| range.start);
            let mut end = 0;
            for range in &stripes {
                prop_assert_eq!(range.start, end);
                end = range.end;
            }
            prop_assert_eq!(end, len);
            prop_assert!(stripes.len() as u64 <= len.div_ceil(STRIPE_BYTES));
        }
    }

    #[test]
    fn small_payloads_take_turns() {
        let of = |number| (0..3).position(|at| !stripe(1000, number, at, 3).is_empty());
        assert_eq!([of(0), of(1), of(2), of(3)], [Some(0), Some(1), Some(2), Some(0)]);
    }
}
