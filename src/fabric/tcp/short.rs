//! Messages of a thread that holds the poller: from the main connection to the caller, without a
//! completion in between.

use super::frame::Frame;
use super::link::{TcpLinkInner, TcpLinkPhase};

impl TcpLinkInner {
    /// The next message, if it is complete, the next to be handled, and has a receive. Its header's
    /// and its own length come with it.
    #[inline]
    pub(super) fn next_message(&mut self) -> Option<Option<(&[u8], usize)>> {
        let is_plain = matches!(self.phase, TcpLinkPhase::Up)
            && self.incoming.is_none()
            && self.receives > 0
            && self.main_end.is_none()
            && !self.has_output()
            && !self.has_completion();
        if !is_plain {
            return None;
        }
        if self.received.bytes().is_empty() && !self.fill() {
            return if self.main_end.is_some() || self.out.error().is_some() { None } else { Some(None) };
        }
        let bytes = self.received.bytes();
        match Frame::decode(bytes) {
            Ok(Some((Frame::Send { len }, header))) => {
                Some(Some((bytes.get(header..header + len)?, header + len)))
            }
            _ => None,
        }
    }

    /// Takes the message of [`TcpLinkInner::next_message`].
    #[inline]
    pub(super) fn take_message(&mut self, bytes: usize) {
        self.received.consume(bytes);
        self.receives = self.receives.saturating_sub(1);
        self.quiet_polls = 0;
        // Its place is free: a look is a poll as well.
        self.sent = 0;
    }
}
