//! What the peer of a link sends.

use super::ending::LinkEnd;
use super::frame::{DecodedFrame, Frame, FrameTarget, GoodbyeReason, PayloadCarrier};
use super::incoming::{IncomingPayload, PayloadPurpose, Progress};
use super::link::{MainEnd, TcpLinkInner, TcpLinkPhase};
use super::reads::TcpReadAnswer;
use super::violation::TcpViolation;
use crate::fabric::{Completions, Event, LinkFailure};
use crate::wire::Immediate;
use rustix::io::Errno;

/// Frames that one poll handles at most.
const POLL_FRAMES: usize = 64;
/// Reads of the main connection that one poll makes at most.
const POLL_READS: usize = 4;

impl TcpLinkInner {
    /// Handles what has come. Returns whether anything had.
    #[inline]
    pub(super) fn receive(&mut self, out: &mut Completions) -> Result<bool, LinkEnd> {
        let mut budget = self.poll_bytes;
        let (mut frames, mut reads, mut any) = (0, 0, false);
        loop {
            if self.incoming.is_some() {
                any = true;
                if !self.pull(&mut budget, out)? {
                    return Ok(any);
                }
            }
            if frames == POLL_FRAMES {
                return Ok(any);
            }
            if self.next_frame(out)? {
                frames += 1;
                any = true;
                continue;
            }
            // Without bytes for another frame.
            if let Some(end) = self.main_end {
                return Err(self.ended(end));
            }
            if reads == POLL_READS
                || reads > 0 && !self.received.is_full() && self.received.bytes().is_empty()
            {
                return Ok(any);
            }
            reads += 1;
            let had = self.received.bytes().len();
            if !self.fill() && self.main_end.is_none() {
                self.check_sending()?;
                return Ok(any);
            }
            any |= self.received.bytes().len() > had;
        }
    }

    /// A connection that can't send any more ends the link, once nothing more is received.
    fn check_sending(&mut self) -> Result<(), LinkEnd> {
        match self.out.error() {
            Some(error) => Err(self.ended(MainEnd::Broken(error))),
            None => Ok(()),
        }
    }

    /// Whether a poll would handle what has come and waits. A part of a frame waits for the rest.
    pub(super) fn has_frame(&self) -> bool {
        let bytes = self.received.bytes();
        if bytes.is_empty() || self.incoming.is_some() {
            return false;
        }
        if self.skip > 0 {
            return true;
        }
        match Frame::decode(bytes) {
            Ok(Some(DecodedFrame { frame: Frame::Send { len }, header, .. })) => {
                !matches!(self.phase, TcpLinkPhase::Up) || bytes.len() >= header + len
            }
            Ok(frame) => frame.is_some(),
            // The poll ends the link.
            Err(_) => true,
        }
    }

    /// Handles the next frame, if its header is complete.
    #[inline]
    fn next_frame(&mut self, out: &mut Completions) -> Result<bool, LinkEnd> {
        let bytes = self.received.bytes();
        if self.skip > 0 {
            let count = self.skip.min(bytes.len() as u64);
            self.skip -= count;
            self.received.consume(count as usize);
            return Ok(count > 0);
        }
        let Some(DecodedFrame { frame, header, acknowledged }) = Frame::decode(bytes)? else {
            return Ok(false);
        };
        if let (Frame::Send { len }, TcpLinkPhase::Up) = (frame, &self.phase) {
            let Some(message) = bytes.get(header..header + len) else { return Ok(false) };
            if let Some(number) = acknowledged {
                self.out.kept.acknowledge(number)?;
            }
            self.receives = self.receives.checked_sub(1).ok_or(LinkFailure::NoReceive)?;
            out.push_message(self.id, message);
            self.received.consume(header + len);
            self.out.received.add_message(len);
            return Ok(true);
        }
        self.received.consume(header);
        match self.phase {
            TcpLinkPhase::Cut => self.handle_when_cut(frame)?,
            _ if matches!(frame, Frame::Resume) != matches!(self.phase, TcpLinkPhase::Resuming) => {
                return Err(TcpViolation::Resume.into());
            }
            _ => {
                if let Some(number) = acknowledged {
                    self.out.kept.acknowledge(number)?;
                }
                self.handle(frame, out)?;
            }
        }
        Ok(true)
    }

    /// Handles a frame other than a message.
    fn handle(&mut self, frame: Frame, out: &mut Completions) -> Result<(), LinkEnd> {
        match frame {
            Frame::Send { .. } | Frame::Acknowledge => {}
            Frame::Resume => self.resume(out)?,
            Frame::Credits { returned } => {
                self.credits = returned;
                self.out.received.add(&frame);
            }
            Frame::Goodbye { reason } => return Err(self.goodbye(reason).into()),
            Frame::Write { target, len, immediate, by } => {
                // Before anything is written.
                if immediate.is_some() && self.receives == 0 {
                    return Err(LinkFailure::NoReceive.into());
                }
                self.expect(PayloadPurpose::Write { target, immediate }, len, by)?;
            }
            Frame::Answer { ticket, len, by } => self.expect(PayloadPurpose::Answer { ticket }, len, by)?,
            Frame::Read { source, len, ticket } => {
                self.asked(source, len, ticket)?;
                self.out.received.add(&frame);
            }
        }
        Ok(())
    }

    fn handle_when_cut(&mut self, frame: Frame) -> Result<(), LinkEnd> {
        match frame {
            Frame::Goodbye { reason } => return Err(self.goodbye(reason).into()),
            Frame::Send { len } => self.skip = len as u64,
            Frame::Write { len, by: PayloadCarrier::Main, .. }
            | Frame::Answer { len, by: PayloadCarrier::Main, .. } => {
                self.skip = len;
            }
            _ => {}
        }
        Ok(())
    }

    fn goodbye(&self, reason: GoodbyeReason) -> LinkFailure {
        if !self.received.bytes().is_empty() {
            return TcpViolation::AfterGoodbye.into();
        }
        match reason {
            GoodbyeReason::Closed => LinkFailure::Closed,
            GoodbyeReason::Resources => LinkFailure::PeerResources,
            GoodbyeReason::Protocol => {
                LinkFailure::Protocol("the peer says so of this side, and its error says how".into())
            }
            GoodbyeReason::NoReceive => LinkFailure::NoReceive,
        }
    }

    /// Begins to receive a payload, if it is allowed.
    fn expect(&mut self, purpose: PayloadPurpose, len: u64, by: PayloadCarrier) -> Result<(), LinkEnd> {
        let incoming = IncomingPayload::new(purpose, len, by, self.bulk_number);
        incoming.room(&mut self.grants, &mut self.reads)?;
        self.incoming = Some(incoming);
        Ok(())
    }

    /// The peer reads.
    fn asked(&mut self, source: FrameTarget, len: u64, ticket: u32) -> Result<(), LinkEnd> {
        let source = match len {
            0 => None,
            len => {
                let (tensor, start) = self.grants.readable(source, len)?;
                Some((tensor.clone(), start))
            }
        };
        let posted = self.out.answers();
        Ok(self.answers.add(TcpReadAnswer { ticket, len, source }, posted)?)
    }

    /// Receives more of the present payload. Returns whether that was the rest.
    #[inline]
    fn pull(&mut self, budget: &mut u64, out: &mut Completions) -> Result<bool, LinkEnd> {
        let Some(incoming) = &mut self.incoming else { return Ok(true) };
        let room = incoming.room(&mut self.grants, &mut self.reads)?;
        let pulled = incoming.pull(room, &mut self.received, &self.out.sockets, budget);
        match pulled {
            Ok(Progress::Complete) => {}
            Ok(Progress::More | Progress::Waiting) => {
                self.may_read = true;
                return Ok(false);
            }
            Ok(Progress::Drained) => {
                self.may_read = false;
                self.check_sending()?;
                return Ok(false);
            }
            Err(error) if !matches!(error, Errno::CONNRESET | Errno::PIPE) => {
                return Err(self.ended(MainEnd::Broken(error)));
            }
            Ok(Progress::Cut) | Err(_) => {
                self.cut();
                return Ok(true);
            }
        }
        let IncomingPayload { purpose, len, by, .. } = *incoming;
        self.incoming = None;
        self.bulk_number += u64::from(by == PayloadCarrier::Bulk);
        self.out.received.add_payload(len, by);
        self.landed(purpose, len, out)?;
        Ok(true)
    }

    /// Waits for a goodbye, or the end of the main connection. A peer that lives and knows nothing
    /// of an end sees this side's. The watcher ends a wait that is too long.
    #[cold]
    fn cut(&mut self) {
        self.phase = TcpLinkPhase::Cut;
        self.incoming = None;
        self.may_read = true;
        self.out.kept.pause();
        self.out.sockets.shut_down();
        self.session.cut();
    }

    #[inline]
    fn landed(&mut self, purpose: PayloadPurpose, len: u64, out: &mut Completions) -> Result<(), LinkEnd> {
        match purpose {
            PayloadPurpose::Write { immediate: None, .. } => {}
            PayloadPurpose::Write { immediate: Some(immediate), .. } => self.signal(immediate, len, out)?,
            PayloadPurpose::Answer { .. } => {
                if let Some(target) = self.reads.take() {
                    out.push(self.id, Event::ReadDone { target });
                }
            }
        }
        Ok(())
    }

    fn signal(&mut self, immediate: Immediate, bytes: u64, out: &mut Completions) -> Result<(), LinkEnd> {
        self.receives = self.receives.checked_sub(1).ok_or(LinkFailure::NoReceive)?;
        out.push(self.id, Event::Immediate { immediate, bytes });
        Ok(())
    }
}
