//! Messages of a thread that holds the poller: from the main connection to the caller, without a
//! completion in between.

use super::frame::{DecodedFrame, Frame, SHORT_HEADER};
use super::link::{TcpLinkInner, TcpLinkPhase};

impl TcpLinkInner {
    /// The next message, if it is complete, the next to be handled, and has a receive. With its
    /// length comes what its header acknowledges.
    #[inline]
    pub(super) fn next_message(&mut self) -> Option<Option<(&[u8], u32)>> {
        let is_plain = matches!(self.phase, TcpLinkPhase::Up)
            && self.incoming.is_none()
            && self.receives > 0
            && self.main_end.is_none()
            && !self.has_output()
            && !self.has_completion();
        if !is_plain {
            return None;
        }
        let mut wanted = 1;
        loop {
            if self.received.bytes().len() < wanted && !self.fill() {
                return if self.main_end.is_some() || self.out.error().is_some() { None } else { Some(None) };
            }
            match Frame::decode(self.received.bytes()) {
                Ok(Some(DecodedFrame { frame: Frame::Send { len }, header, acknowledged: Some(number) }))
                    if self.out.kept.may_acknowledge(number) =>
                {
                    wanted = header + len;
                    if self.received.bytes().len() >= wanted {
                        return Some(Some((&self.received.bytes()[header..wanted], number)));
                    }
                }
                _ => return None,
            }
        }
    }

    /// Takes the message of [`TcpLinkInner::next_message`].
    #[inline]
    pub(super) fn take_message(&mut self, len: usize, acknowledged: u32) {
        self.received.consume(SHORT_HEADER + len);
        // It was checked.
        let _ = self.out.kept.acknowledge(acknowledged);
        self.out.received.add_message(len);
        self.receives = self.receives.saturating_sub(1);
        self.quiet_polls = 0;
        // Its place is free: a look is a poll as well.
        self.sent = 0;
    }
}
