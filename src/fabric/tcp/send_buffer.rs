//! The frames of the main connection, from their post until the peer has acknowledged them.
//!
//! Frames are numbered by their order. Headers and small payloads are copied; larger payloads are
//! kept where they are. A connection that replaces a broken one gets all frames again that the peer
//! has not received.

use super::bulk::BulkQueue;
use super::byte_ring::ByteRing;
use super::frame::{DecodedFrame, Frame, LONG_HEADER, PayloadCarrier, SHORT_HEADER};
use super::io;
use super::violation::TcpViolation;
use crate::memory::Tensor;
use rustix::io::{Errno, IoSlice};
use std::collections::VecDeque;
use std::net::TcpStream;

/// Bytes of headers and copied payloads that are not acknowledged, at most. All eager tensors that
/// a link can have on their way fit, and as many bytes of other messages.
pub(super) const KEPT_BYTES: usize = 256 << 10;
/// Bytes of a batch that wait for its end at most.
const BATCH_BYTES: usize = 32 << 10;
/// The longest payload that is copied.
pub(super) const COPIED_PAYLOAD: u64 = 2 << 10;
/// A payload in two parts, of which the second is longer than this, is sent before it is copied if
/// nothing waits.
const COPIED_LATER: usize = 1 << 10;
/// Bytes that only goodbyes and credits take.
const RESERVE: usize = 64;
/// Buffers of one system call at most.
const BUFFERS: usize = 8;

/// A payload behind its header, in the memory of its owner.
#[derive(Debug)]
struct KeptPayload {
    /// Position in the ring behind its header.
    at: u64,
    bytes: KeptBytes,
}

#[derive(Debug)]
enum KeptBytes {
    OfTensor { tensor: Tensor, start: usize, len: usize },
    Copied(Box<[u8]>),
}

impl KeptPayload {
    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            KeptBytes::OfTensor { tensor, start, len } => &tensor.bytes()[*start..*start + *len],
            KeptBytes::Copied(bytes) => bytes,
        }
    }
}

/// How far the kernel has taken what was posted.
#[derive(Clone, Copy, Debug, Default)]
struct SendCursor {
    /// Position in the ring.
    position: u64,
    /// Payloads that it has wholly, of those that are kept.
    payloads: usize,
    /// Bytes that it has of the next one.
    offset: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendState {
    Open,
    /// Without a connection, or before the peer has said what it lacks.
    Paused,
    /// A send has met this error of the connection.
    Broken(Errno),
}

/// The frames of the main connection that the peer has not acknowledged.
#[derive(Debug)]
pub(super) struct SendBuffer {
    /// Headers and copied payloads.
    ring: ByteRing,
    payloads: VecDeque<KeptPayload>,
    sent: SendCursor,
    /// Bytes of `payloads` that are not sent.
    unsent_payloads: usize,
    /// Bytes that may be posted and not sent.
    most_unsent: usize,
    /// Frames so far that were posted, that the peer has acknowledged, and that are not kept any
    /// more.
    posted: u64,
    acknowledged: u64,
    released: u64,
    /// The rest of an acknowledgement that the kernel did not take wholly.
    rest: [u8; SHORT_HEADER],
    rest_len: usize,
    state: SendState,
}

impl SendBuffer {
    /// An empty one, with room for a frame with a payload of `payload` bytes behind a batch.
    /// `payloads`: how many payloads can be kept before memory is allocated.
    pub(super) fn new(payload: usize, payloads: usize) -> Self {
        SendBuffer {
            ring: ByteRing::new(KEPT_BYTES),
            payloads: VecDeque::with_capacity(payloads),
            sent: SendCursor::default(),
            unsent_payloads: 0,
            most_unsent: payload + 2 * BATCH_BYTES,
            posted: 0,
            acknowledged: 0,
            released: 0,
            rest: [0; SHORT_HEADER],
            rest_len: 0,
            state: SendState::Open,
        }
    }

    /// Whether there is nothing to send.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.unsent() == 0 && self.rest_len == 0
    }

    #[inline]
    fn unsent(&self) -> usize {
        (self.ring.end() - self.sent.position) as usize + self.unsent_payloads
    }

    /// The position up to which the kernel has taken headers and copied payloads, and the end of
    /// those posted.
    #[inline]
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.sent.position, self.ring.end())
    }

    /// How many frames were posted, acknowledged, and released so far.
    #[inline]
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        (self.posted, self.acknowledged, self.released)
    }

    /// The error that ended the connection, if a send has met it.
    #[inline]
    pub(super) fn error(&self) -> Option<Errno> {
        match self.state {
            SendState::Broken(error) => Some(error),
            SendState::Open | SendState::Paused => None,
        }
    }

    /// Whether something can be sent, as far as is known.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.state == SendState::Open
    }

    /// Whether a frame can be posted, of which `copied` bytes are copied and `payload` bytes are
    /// not.
    #[inline]
    pub(super) fn has_room(&self, copied: usize, payload: usize) -> bool {
        self.has_room_for_last(copied + RESERVE) && self.unsent() + copied + payload <= self.most_unsent
    }

    /// Whether credits or a goodbye of so many bytes can be posted.
    #[inline]
    pub(super) fn has_room_for_last(&self, len: usize) -> bool {
        len <= self.ring.room()
    }

    /// Posts a frame with a payload, which is copied. In a batch it may be sent later. The caller
    /// has checked that there is room.
    #[inline]
    pub(super) fn post(&mut self, socket: &TcpStream, header: &[u8], payload: &[u8], in_batch: bool) {
        self.ring.push(header);
        self.ring.push(payload);
        self.posted += 1;
        self.send_or_wait(socket, in_batch);
    }

    /// As [`SendBuffer::post`], with a payload that lies in two places. A long one is sent from
    /// there if nothing waits before it. The copy that is kept does not delay it then.
    pub(super) fn post_parts(
        &mut self,
        socket: &TcpStream,
        header: &[u8],
        payload: [&[u8]; 2],
        in_batch: bool,
    ) {
        let is_next = !in_batch && self.is_open() && self.is_empty();
        let start = self.ring.end();
        self.ring.push(header);
        self.ring.push(payload[0]);
        // Each buffer of a call costs about 100 ns, so the first two go as one.
        let sent = match self.ring.parts(start, self.ring.end()) {
            [head, []] if is_next && payload[1].len() > COPIED_LATER => {
                Some(io::send_all(socket, &[head, payload[1]].map(IoSlice::new)))
            }
            _ => None,
        };
        self.ring.push(payload[1]);
        self.posted += 1;
        match sent {
            None => self.send_or_wait(socket, in_batch),
            Some(Ok(count)) => self.advance(count),
            Some(Err(error)) => self.state = SendState::Broken(error),
        }
    }

    /// As [`SendBuffer::post`], with `len` bytes of a tensor from `start` on, which are kept there.
    pub(super) fn post_tensor(
        &mut self,
        socket: &TcpStream,
        header: &[u8],
        (tensor, start, len): (&Tensor, usize, usize),
        in_batch: bool,
    ) {
        self.ring.push(header);
        let bytes = KeptBytes::OfTensor { tensor: tensor.clone(), start, len };
        self.payloads.push_back(KeptPayload { at: self.ring.end(), bytes });
        self.unsent_payloads += len;
        self.posted += 1;
        self.send_or_wait(socket, in_batch);
    }

    /// Posts a goodbye: nothing may be posted after it, and nothing is kept until it is
    /// acknowledged.
    pub(super) fn post_goodbye(&mut self, socket: &TcpStream, header: &[u8]) {
        self.ring.push(header);
        self.flush(socket);
    }

    #[inline]
    fn send_or_wait(&mut self, socket: &TcpStream, in_batch: bool) {
        if !in_batch || self.unsent() >= BATCH_BYTES {
            self.flush(socket);
        }
    }

    /// Sends a frame that is neither numbered nor kept. Nothing else may be unsent. Returns whether
    /// the kernel has taken it wholly.
    pub(super) fn send_alone(&mut self, socket: &TcpStream, header: &[u8; SHORT_HEADER]) -> bool {
        debug_assert!(self.rest_len == 0);
        match io::send(socket, header) {
            Ok(count) => {
                self.rest = *header;
                self.rest_len = SHORT_HEADER - count;
                self.rest_len == 0
            }
            Err(error) => {
                self.state = SendState::Broken(error);
                false
            }
        }
    }

    /// Sends what is posted, as much as the kernel takes.
    #[inline]
    pub(super) fn flush(&mut self, socket: &TcpStream) {
        if !self.is_open() {
            return;
        }
        while !self.is_empty() {
            let (wanted, sent) = self.send_some(socket);
            match sent {
                Ok(count) => {
                    self.advance(count);
                    if count < wanted {
                        return;
                    }
                }
                Err(error) => {
                    self.state = SendState::Broken(error);
                    return;
                }
            }
        }
    }

    /// One system call. Returns how many bytes it was given, and how many the kernel has taken.
    #[inline]
    fn send_some(&self, socket: &TcpStream) -> (usize, Result<usize, Errno>) {
        if self.rest_len > 0 {
            return (self.rest_len, io::send(socket, &self.rest[SHORT_HEADER - self.rest_len..]));
        }
        if self.sent.payloads == self.payloads.len() {
            let [first, second] = self.ring.parts(self.sent.position, self.ring.end());
            if second.is_empty() {
                return (first.len(), io::send(socket, first));
            }
        }
        let mut buffers = [IoSlice::new(&[]); BUFFERS];
        let (mut count, mut wanted) = (0, 0);
        for buffer in self.unsent_buffers().filter(|buffer| !buffer.is_empty()).take(BUFFERS) {
            buffers[count] = IoSlice::new(buffer);
            count += 1;
            wanted += buffer.len();
        }
        (wanted, io::send_all(socket, &buffers[..count]))
    }

    /// What is not sent, in order.
    fn unsent_buffers(&self) -> impl Iterator<Item = &[u8]> {
        let SendCursor { mut position, payloads, mut offset } = self.sent;
        let of_payloads = self.payloads.iter().skip(payloads).flat_map(move |payload| {
            let [first, second] = self.ring.parts(position, payload.at);
            position = payload.at;
            [first, second, &payload.bytes()[std::mem::take(&mut offset)..]]
        });
        let behind = self.payloads.back().filter(|_| payloads < self.payloads.len());
        let behind = behind.map_or(self.sent.position, |payload| payload.at);
        of_payloads.chain(self.ring.parts(behind, self.ring.end()))
    }

    /// Notes that the kernel has taken so many more bytes.
    fn advance(&mut self, mut count: usize) {
        if self.rest_len > 0 {
            self.rest_len -= count;
            return;
        }
        while count > 0 {
            let next = self.payloads.get(self.sent.payloads);
            let until = next.map_or(self.ring.end(), |payload| payload.at);
            let of_ring = count.min((until - self.sent.position) as usize);
            self.sent.position += of_ring as u64;
            count -= of_ring;
            let Some(payload) = next.filter(|_| self.sent.position == until) else { continue };
            let left = payload.bytes().len() - self.sent.offset;
            let of_payload = count.min(left);
            count -= of_payload;
            self.unsent_payloads -= of_payload;
            self.sent.offset += of_payload;
            if of_payload == left {
                self.sent = SendCursor { payloads: self.sent.payloads + 1, offset: 0, ..self.sent };
            }
        }
    }

    /// Notes an acknowledgement. The frames are kept until [`SendBuffer::release`].
    ///
    /// # Errors
    /// If it is older than an earlier one, or of frames that were not posted.
    #[inline]
    pub(super) fn acknowledge(&mut self, number: u32) -> Result<(), TcpViolation> {
        if !self.may_acknowledge(number) {
            return Err(self.wrong(number));
        }
        self.acknowledged += u64::from(number.wrapping_sub(self.acknowledged as u32));
        Ok(())
    }

    /// Whether the peer may acknowledge this now.
    #[inline]
    pub(super) fn may_acknowledge(&self, number: u32) -> bool {
        u64::from(number.wrapping_sub(self.acknowledged as u32)) <= self.posted - self.acknowledged
    }

    #[cold]
    fn wrong(&self, number: u32) -> TcpViolation {
        TcpViolation::Acknowledgement { number, from: self.acknowledged as u32, to: self.posted as u32 }
    }

    /// Forgets the frames that are acknowledged. Returns how many answers to reads were among them.
    ///
    /// # Errors
    /// If one of them was not sent.
    pub(super) fn release(&mut self, bulk: &mut BulkQueue) -> Result<usize, TcpViolation> {
        let mut answers = 0;
        while self.released < self.acknowledged {
            let kept = self.frame_at(self.ring.start(), self.payloads.front());
            let is_sent = kept.end <= self.sent.position
                && (!kept.has_payload || self.sent.payloads > 0)
                && (!kept.is_bulk || bulk.release_first());
            if !is_sent {
                return Err(self.wrong(self.acknowledged as u32));
            }
            if kept.has_payload {
                self.payloads.pop_front();
                self.sent.payloads -= 1;
            }
            self.ring.release(kept.end);
            self.released += 1;
            answers += usize::from(matches!(kept.frame, Frame::Answer { .. }));
        }
        Ok(answers)
    }

    /// The frame at a position of the ring. `next`: the first payload that is not before it.
    #[inline]
    fn frame_at(&self, at: u64, next: Option<&KeptPayload>) -> KeptFrame {
        let header = self.ring.peek::<LONG_HEADER>(at);
        let Ok(Some(DecodedFrame { frame, header, .. })) = Frame::decode(&header) else {
            unreachable!("this side has encoded it")
        };
        let behind = at + header as u64;
        let has_payload = next.is_some_and(|payload| payload.at == behind);
        let (copied, is_bulk) = match frame {
            Frame::Send { len } => (len as u64, false),
            Frame::Write { len, by, .. } | Frame::Answer { len, by, .. } => match by {
                PayloadCarrier::Bulk => (0, true),
                PayloadCarrier::Main if has_payload => (0, false),
                PayloadCarrier::Main => (len, false),
            },
            _ => (0, false),
        };
        KeptFrame { frame, end: behind + copied, has_payload, is_bulk }
    }

    /// Sends nothing until [`SendBuffer::resume`]: the connection is broken.
    pub(super) fn pause(&mut self) {
        self.state = SendState::Paused;
        self.rest_len = 0;
    }

    /// Begins again with the oldest frame that is kept, on a new connection. `acknowledged`: what
    /// the frames acknowledge of the peer's.
    pub(super) fn resume(&mut self, acknowledged: u32) {
        debug_assert!(self.released == self.acknowledged);
        let (mut at, mut passed) = (self.ring.start(), 0);
        self.sent = SendCursor { position: at, payloads: 0, offset: 0 };
        self.unsent_payloads = self.payloads.iter().map(|payload| payload.bytes().len()).sum();
        self.state = SendState::Open;
        // They were posted with older numbers.
        while at < self.ring.end() {
            let kept = self.frame_at(at, self.payloads.get(passed));
            if let Some(offset) = kept.frame.acknowledgement_at() {
                self.ring.replace(at + offset as u64, &acknowledged.to_le_bytes());
            }
            passed += usize::from(kept.has_payload);
            at = kept.end;
        }
    }

    /// Forgets the payloads that were sent: they won't be sent again.
    pub(super) fn forget_sent(&mut self) {
        self.payloads.drain(..std::mem::take(&mut self.sent.payloads));
    }

    /// Lets all tensors go: copies what is not sent of them, a bounded number of bytes. Nothing is
    /// sent again after that. What was not sent on a broken connection never will be.
    pub(super) fn release_tensors(&mut self) {
        self.forget_sent();
        if !self.is_open() {
            self.payloads.clear();
            self.unsent_payloads = 0;
            self.ring.clear();
            self.sent = SendCursor { position: self.ring.end(), payloads: 0, offset: 0 };
            self.state = SendState::Open;
        }
        for payload in &mut self.payloads {
            payload.bytes = KeptBytes::Copied(payload.bytes().into());
        }
    }
}

/// A frame in the ring, and what belongs to it elsewhere.
struct KeptFrame {
    frame: Frame,
    /// Position behind it.
    end: u64,
    /// Whether it has a payload that is not in the ring, and is none by bulk.
    has_payload: bool,
    is_bulk: bool,
}
