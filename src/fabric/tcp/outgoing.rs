//! The sending half of a link. It outlives the link for a moment: what was posted before a link
//! was detached still leaves.

use super::bulk::BulkQueue;
use super::frame::{Frame, GoodbyeReason, PayloadCarrier};
use super::io::Sockets;
use super::send_buffer::SendBuffer;
use crate::memory::Tensor;
use rustix::io::Errno;

/// The connections of a link, and what is still to be sent on them.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub sockets: Sockets,
    pub unsent: SendBuffer,
    pub bulk: BulkQueue,
    /// Payloads of at most so many bytes go by the main connection.
    main_bytes: u64,
    pub in_batch: bool,
}

impl Outgoing {
    /// Nothing to send. `depth`: operations that can be outstanding.
    pub(super) fn new(sockets: Sockets, depth: u32, main_bytes: u32) -> Self {
        let bulk = BulkQueue::new(sockets.bulk.len(), depth as usize);
        let unsent = SendBuffer::new(main_bytes as usize);
        Outgoing { sockets, unsent, bulk, main_bytes: main_bytes.into(), in_batch: false }
    }

    /// Which connection carries a payload of this length.
    #[inline]
    pub(super) fn carrier(&self, len: u64) -> PayloadCarrier {
        if len <= self.main_bytes { PayloadCarrier::Main } else { PayloadCarrier::Bulk }
    }

    /// Whether a frame with this payload can be posted now. Tries to make room.
    #[inline]
    pub(super) fn has_room(&mut self, payload: u64) -> bool {
        let payload = if self.carrier(payload) == PayloadCarrier::Main { payload as usize } else { 0 };
        let len = super::frame::LONG_HEADER + payload;
        if self.unsent.has_room(len) {
            return true;
        }
        self.unsent.flush(&self.sockets.main);
        self.unsent.has_room(len)
    }

    /// Posts a frame that there is room for.
    #[inline]
    pub(super) fn post(&mut self, frame: Frame, payload: &[u8]) {
        self.unsent.post(&self.sockets.main, &frame.header(), payload, self.in_batch);
    }

    /// Posts a frame that there is room for, header and payload in one buffer.
    #[inline]
    pub(super) fn post_copied(&mut self, frame: &[u8]) {
        self.unsent.post(&self.sockets.main, frame, &[], self.in_batch);
    }

    /// Posts a frame that there is room for, with the `len` bytes of a tensor from `start` on.
    /// Returns whether they are copied or sent already.
    pub(super) fn post_payload(
        &mut self,
        frame: Frame,
        tensor: &Tensor,
        (start, len): (usize, u64),
        is_write: bool,
    ) -> bool {
        if self.carrier(len) == PayloadCarrier::Main {
            self.post(frame, &tensor.bytes()[start..start + len as usize]);
            return true;
        }
        self.post(frame, &[]);
        self.bulk.add(tensor.clone(), start, len, is_write);
        false
    }

    /// Sends what is posted, about `budget` bytes of bulk at most. Returns how many writes by bulk
    /// are sent now.
    #[inline]
    pub(super) fn pump(&mut self, budget: u64) -> usize {
        self.unsent.flush(&self.sockets.main);
        if self.bulk.is_empty() { 0 } else { self.bulk.pump(&self.sockets.bulk, budget) }
    }

    /// Whether all is sent that ever will be.
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.error().is_some() || self.unsent.is_empty() && self.bulk.is_empty()
    }

    /// The error that ended a connection, if a send has met it.
    #[inline]
    pub(super) fn error(&self) -> Option<Errno> {
        self.unsent.error().or(self.bulk.error())
    }

    /// Tells the peer that this side leaves. Nothing may be posted after it.
    pub(super) fn say_goodbye(&mut self, reason: GoodbyeReason) {
        self.in_batch = false;
        let frame = Frame::Goodbye { reason };
        self.unsent.post(&self.sockets.main, &frame.header(), &[], false);
    }
}
