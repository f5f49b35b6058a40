//! The sending half of a link. It outlives the link for a moment: what was posted before a link
//! was detached still leaves.

use super::bulk::BulkQueue;
use super::frame::{Frame, GoodbyeReason, LONG_HEADER, PayloadCarrier, SHORT_HEADER};
use super::io::Sockets;
use super::received_frames::ReceivedFrames;
use super::send_buffer::{COPIED_PAYLOAD, SendBuffer};
use super::unacknowledged::unacknowledged;
use super::violation::TcpViolation;
use crate::memory::Tensor;
use rustix::io::Errno;

/// The connections of a link, and what is still to be sent on them.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub sockets: Sockets,
    pub kept: SendBuffer,
    pub bulk: BulkQueue,
    /// What each frame that leaves acknowledges.
    pub received: ReceivedFrames,
    /// Answers to reads of the peer that are posted and not acknowledged.
    answers: usize,
    /// Payloads of at most so many bytes go by the main connection.
    main_bytes: u64,
    pub in_batch: bool,
}

impl Outgoing {
    /// Nothing to send. `depth`: operations that can be outstanding.
    pub(super) fn new(sockets: Sockets, depth: u32, main_bytes: u32) -> Self {
        let bulk = BulkQueue::new(sockets.bulk.len(), depth as usize);
        let kept = SendBuffer::new(main_bytes as usize, depth as usize);
        let received = ReceivedFrames::new(depth);
        Outgoing { sockets, kept, bulk, received, answers: 0, main_bytes: main_bytes.into(), in_batch: false }
    }

    /// Which connection carries a payload of this length.
    #[inline]
    pub(super) fn carrier(&self, len: u64) -> PayloadCarrier {
        if len <= self.main_bytes { PayloadCarrier::Main } else { PayloadCarrier::Bulk }
    }

    /// Of a frame with this payload, the bytes that are copied and those that are not.
    #[inline]
    pub(super) fn parts_of(&self, payload: u64) -> (usize, usize) {
        match self.carrier(payload) {
            PayloadCarrier::Bulk => (LONG_HEADER, 0),
            PayloadCarrier::Main if payload > COPIED_PAYLOAD => (LONG_HEADER, payload as usize),
            PayloadCarrier::Main => (LONG_HEADER + payload as usize, 0),
        }
    }

    /// Whether a frame can be posted now, of which `copied` bytes are copied and `payload` bytes
    /// are not. Tries to make room.
    #[inline]
    pub(super) fn has_room(&mut self, copied: usize, payload: usize) -> bool {
        self.kept.has_room(copied, payload) || {
            // A wrong acknowledgement is for the next poll.
            let _ = self.release();
            self.kept.flush(&self.sockets.main);
            self.kept.has_room(copied, payload)
        }
    }

    /// Posts a frame that there is room for. The payload is copied.
    #[inline]
    pub(super) fn post(&mut self, frame: Frame, payload: &[u8]) {
        let header = match frame {
            // They acknowledge nothing.
            Frame::Credits { .. } => frame.header(0),
            _ => frame.header(self.received.tell()),
        };
        self.kept.post(&self.sockets.main, &header, payload, self.in_batch);
    }

    /// Posts a message that there is room for, and that lies in two places.
    pub(super) fn post_message(&mut self, parts: [&[u8]; 2]) {
        let frame = Frame::Send { len: parts[0].len() + parts[1].len() };
        let header = frame.header(self.received.tell());
        self.kept.post_parts(&self.sockets.main, &header, parts, self.in_batch);
    }

    /// Posts a frame that there is room for, with the `len` bytes of a tensor from `start` on.
    pub(super) fn post_payload(&mut self, frame: Frame, tensor: &Tensor, (start, len): (usize, u64)) {
        let by = self.carrier(len);
        let bytes = || &tensor.bytes()[start..start + len as usize];
        match by {
            PayloadCarrier::Main if len <= COPIED_PAYLOAD => self.post(frame, bytes()),
            PayloadCarrier::Main => {
                let header = frame.header(self.received.tell());
                let payload = (tensor, start, len as usize);
                self.kept.post_tensor(&self.sockets.main, &header, payload, self.in_batch);
            }
            PayloadCarrier::Bulk => {
                self.post(frame, &[]);
                self.bulk.add(tensor.clone(), start, len);
            }
        }
    }

    /// How many answers to reads of the peer it may not have got.
    #[inline]
    pub(super) fn answers(&self) -> usize {
        self.answers
    }

    /// Posts an answer that there is room for.
    pub(super) fn post_answer(&mut self, ticket: u32, len: u64, source: Option<&(Tensor, usize)>) {
        self.answers += 1;
        let frame = Frame::Answer { ticket, len, by: self.carrier(len) };
        match source {
            Some((tensor, start)) => self.post_payload(frame, tensor, (*start, len)),
            None => self.post(frame, &[]),
        }
    }

    /// Forgets what the peer has acknowledged.
    ///
    /// # Errors
    /// If it was not sent.
    #[inline]
    pub(super) fn release(&mut self) -> Result<(), TcpViolation> {
        let (_, acknowledged, released) = self.kept.counts();
        if acknowledged > released {
            self.answers -= self.kept.release(&mut self.bulk)?;
        }
        Ok(())
    }

    /// Sends what is posted, about `budget` bytes of bulk at most.
    #[inline]
    pub(super) fn pump(&mut self, budget: u64) {
        self.kept.flush(&self.sockets.main);
        if !self.bulk.is_empty() && self.kept.is_open() {
            self.bulk.pump(&self.sockets.bulk, budget);
        }
    }

    /// Whether another pump would send more at once.
    pub(super) fn may_send_more(&self) -> bool {
        self.kept.is_open() && self.bulk.may_send_more()
    }

    /// Whether all is sent that ever will be on these connections.
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.error().is_some() || self.kept.is_empty() && self.bulk.is_empty()
    }

    /// Whether the peer's kernel has all that was posted.
    pub(super) fn is_with_peers_kernel(&self) -> bool {
        self.kept.is_empty()
            && self.bulk.is_empty()
            && self.sockets.all().all(|socket| unacknowledged(socket) == 0)
    }

    /// The error that ended a connection, if a send has met it.
    #[inline]
    pub(super) fn error(&self) -> Option<Errno> {
        self.kept.error().or(self.bulk.error())
    }

    /// Acknowledges what has come by a frame of its own. What waits to be sent goes first, so this
    /// may have to be tried again.
    pub(super) fn acknowledge(&mut self) {
        self.kept.flush(&self.sockets.main);
        if self.kept.is_open() && self.kept.is_empty() {
            self.send_alone(Frame::Acknowledge);
        }
    }

    fn send_alone(&mut self, frame: Frame) -> bool {
        let header = frame.header(self.received.tell());
        let Some(header) = header.first_chunk::<SHORT_HEADER>() else { unreachable!("a header") };
        self.kept.send_alone(&self.sockets.main, header)
    }

    /// Sends nothing more on these connections, and takes nothing more from them.
    pub(super) fn abandon(&mut self) {
        self.kept.pause();
        self.sockets.abandon();
    }

    /// Goes on with new connections, once the peer has said what it lacks. Returns whether they
    /// work.
    pub(super) fn replace(&mut self, sockets: Sockets) -> bool {
        self.kept.pause();
        self.bulk.forget_error();
        self.sockets = sockets;
        self.send_alone(Frame::Resume)
    }

    /// Sends again what the peer has not acknowledged.
    pub(super) fn resume(&mut self) {
        self.bulk.resume();
        self.kept.resume(self.received.tell());
    }

    /// Forgets what was sent: it won't be sent again. What was posted still leaves.
    pub(super) fn forget_sent(&mut self) {
        self.kept.forget_sent();
        self.bulk.forget_sent();
    }

    /// Tells the peer that this side leaves. Nothing may be posted after it.
    pub(super) fn say_goodbye(&mut self, reason: GoodbyeReason) {
        self.in_batch = false;
        let header = Frame::Goodbye { reason }.header(self.received.tell());
        self.kept.post_goodbye(&self.sockets.main, &header);
    }
}
