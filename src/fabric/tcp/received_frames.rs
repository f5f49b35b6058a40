//! What has come of the peer's frames, and when the peer is told.
//!
//! Each frame that goes anyway tells the peer. A frame of its own does so if the peer keeps much,
//! or waits for the end of a write.

use super::frame::{Frame, LONG_HEADER, PayloadCarrier, SHORT_HEADER};
use super::send_buffer::{COPIED_PAYLOAD, KEPT_BYTES};

/// Bytes of the peer's send buffer that it keeps without being told, about.
const UNTOLD_BYTES: usize = KEPT_BYTES / 4;
/// Bytes of tensors that it keeps so.
const UNTOLD_TENSORS: u64 = 256 << 10;
/// Polls that find nothing before it is told that its tensors have come. An answer of this side's
/// owner usually comes first.
const IDLE_POLLS: u32 = 16;

/// The frames of the peer that have come whole.
#[derive(Debug)]
pub(super) struct ReceivedFrames {
    count: u64,
    /// What the peer was not told of: bytes of its send buffer, writes and answers, their bytes.
    copied: usize,
    payloads: u32,
    tensors: u64,
    most_payloads: u32,
    idle_polls: u32,
}

impl ReceivedFrames {
    /// None yet. `depth`: operations that the peer can have outstanding.
    pub(super) fn new(depth: u32) -> Self {
        let most_payloads = (depth / 4).max(1);
        ReceivedFrames { count: 0, copied: 0, payloads: 0, tensors: 0, most_payloads, idle_polls: 0 }
    }

    /// How many have come.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Counts a message.
    #[inline]
    pub(super) fn add_message(&mut self, len: usize) {
        self.count += 1;
        self.copied += SHORT_HEADER + len;
    }

    /// Counts a frame without a payload.
    #[inline]
    pub(super) fn add(&mut self, frame: &Frame) {
        self.count += 1;
        self.copied += if matches!(frame, Frame::Read { .. }) { LONG_HEADER } else { SHORT_HEADER };
    }

    /// Counts a write or an answer, whose payload has come.
    #[inline]
    pub(super) fn add_payload(&mut self, len: u64, by: PayloadCarrier) {
        let is_copied = by == PayloadCarrier::Main && len <= COPIED_PAYLOAD;
        self.count += 1;
        self.copied += LONG_HEADER + if is_copied { len as usize } else { 0 };
        self.payloads += 1;
        self.tensors += if is_copied { 0 } else { len };
        self.idle_polls = 0;
    }

    /// The acknowledgement for a frame that tells the peer now.
    #[inline]
    pub(super) fn tell(&mut self) -> u32 {
        (self.copied, self.payloads, self.tensors) = (0, 0, 0);
        self.count as u32
    }

    /// Whether the peer waits to be told of a write or an answer.
    #[inline]
    pub(super) fn is_awaited(&self) -> bool {
        self.payloads > 0
    }

    /// Whether the peer is to be told at the end of a poll, which found something or not.
    #[inline]
    pub(super) fn is_due(&mut self, found: bool) -> bool {
        if self.payloads == 0 {
            return self.copied >= UNTOLD_BYTES;
        }
        self.idle_polls = self.idle_polls.saturating_add(u32::from(!found));
        self.idle_polls >= IDLE_POLLS
            || self.payloads >= self.most_payloads
            || self.tensors >= UNTOLD_TENSORS
            || self.copied >= UNTOLD_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_of_when_they_fill_a_quarter_of_the_peers_buffer() {
        let mut frames = ReceivedFrames::new(1024);
        let messages = (0..).find(|_| {
            frames.add_message(24);
            frames.is_due(true)
        });
        assert_eq!(messages, Some(UNTOLD_BYTES as u32 / 32 - 1));
        assert!(!frames.is_awaited());
        assert_eq!(u64::from(frames.tell()), frames.count());
        assert!(!(0..10 * IDLE_POLLS).any(|_| frames.is_due(false)), "nobody waits for it");
    }

    #[test]
    fn a_write_is_told_of_after_some_polls_or_with_others_at_once() {
        let mut frames = ReceivedFrames::new(1024);
        frames.add_payload(10, PayloadCarrier::Main);
        assert!(frames.is_awaited() && !(1..IDLE_POLLS).any(|_| frames.is_due(false)));
        assert!(!frames.is_due(true) && frames.is_due(false));
        frames.tell();
        frames.add_payload(UNTOLD_TENSORS, PayloadCarrier::Bulk);
        assert!(frames.is_due(true));
        frames.tell();
        let mut few = ReceivedFrames::new(1);
        few.add_payload(0, PayloadCarrier::Main);
        assert!(few.is_due(true), "the peer can post nothing before it is told");
    }
}
