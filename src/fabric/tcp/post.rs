//! Posting on a link: every operation of [`Port`](crate::fabric::Port) but polls.

use super::frame::{Frame, FrameTarget, LONG_HEADER, MAX_SEND, PayloadCarrier, SHORT_HEADER};
use super::grants::TcpGranted;
use super::link::{HeldWrite, TcpLinkInner};
use super::reads::TcpPendingRead;
use crate::fabric::{MAX_MESSAGE, PostError};
use crate::memory::{Span, Tensor, TensorMut};
use crate::wire::{Grant, Immediate};

impl TcpLinkInner {
    /// Checks that the link is up and has room for an operation with a payload of `len` bytes.
    #[inline]
    fn room(&mut self, len: u64) -> Result<(), PostError> {
        self.room_for(self.out.parts_of(len))
    }

    /// As [`TcpLinkInner::room`], for a frame of which `copied` bytes are copied and `payload`
    /// bytes are not.
    #[inline]
    fn room_for(&mut self, (copied, payload): (usize, usize)) -> Result<(), PostError> {
        if !self.is_up() {
            return Err(PostError::Down);
        }
        if self.outstanding() >= self.limits.depth as usize || !self.out.has_room(copied, payload) {
            self.wants_room = true;
            return Err(PostError::Full);
        }
        Ok(())
    }

    /// Notes an operation without a completion, whose frame is posted.
    #[inline]
    fn posted(&mut self) {
        if self.out.kept.is_empty() {
            self.sent += 1;
        } else {
            self.ends.push_back(self.out.kept.progress().1);
        }
    }

    #[inline]
    pub(super) fn send_message(&mut self, bytes: &[u8]) -> Result<(), PostError> {
        self.room_for_message(bytes.len())?;
        self.out.post(Frame::Send { len: bytes.len() }, bytes);
        self.posted();
        Ok(())
    }

    /// As [`TcpLinkInner::send_message`], of a message that lies in two places.
    pub(super) fn send_parts(&mut self, parts: [&[u8]; 2]) -> Result<(), PostError> {
        self.room_for_message(parts[0].len() + parts[1].len())?;
        self.out.post_message(parts);
        self.posted();
        Ok(())
    }

    #[inline]
    fn room_for_message(&mut self, len: usize) -> Result<(), PostError> {
        if len > MAX_SEND {
            return Err(PostError::Refused("the message is too long: see the link's limits"));
        }
        self.room_for((SHORT_HEADER + len, 0))
    }

    #[inline]
    pub(super) fn write_inline(
        &mut self,
        bytes: &[u8],
        grant: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        if bytes.len() > MAX_MESSAGE {
            return Err(PostError::Refused("more bytes than can be written inline: see the link's limits"));
        }
        let target = target(grant, bytes.len() as u64)?;
        // They are copied, however long they are.
        self.room_for((LONG_HEADER + bytes.len(), 0))?;
        let by = PayloadCarrier::Main;
        self.out.post(Frame::Write { target, len: bytes.len() as u64, immediate, by }, bytes);
        self.posted();
        Ok(())
    }

    pub(super) fn write(
        &mut self,
        source: &Tensor,
        len: u64,
        grant: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let target = target(grant, len)?;
        self.check_source(source, len)?;
        self.room(len)?;
        let by = self.out.carrier(len);
        self.out.post_payload(Frame::Write { target, len, immediate, by }, source, (0, len));
        let (number, ..) = self.out.kept.counts();
        self.held.push_back(HeldWrite { number, tensor: source.clone() });
        if by == PayloadCarrier::Bulk && !self.out.in_batch {
            self.pump();
        }
        Ok(())
    }

    pub(super) fn read(&mut self, target: TensorMut, source: &Grant) -> Result<(), (PostError, TensorMut)> {
        let len = source.len;
        if len > target.bytes().len() as u64 {
            return Err((PostError::Refused("the target has fewer bytes than the source"), target));
        }
        if let Err(error) = self.room(0) {
            return Err((error, target));
        }
        let ticket = self.reads.next_ticket();
        self.reads.add(TcpPendingRead { target, len });
        self.out.post(Frame::Read { source: FrameTarget::from(source), len, ticket }, &[]);
        Ok(())
    }

    pub(super) fn grant(&mut self, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        if !self.is_up() {
            return Err((PostError::Down, target));
        }
        // Memory outside the pool gets a span of its own: only this side writes to it.
        let own = || Span { region: 0, offset: 0, len: target.bytes().len() as u64 };
        let span = target.span().unwrap_or_else(own);
        match self.grants.add(TcpGranted::Write(target), Some(span)) {
            Ok(grant) => Ok(grant),
            Err((error, TcpGranted::Write(target))) => Err((error, target)),
            Err((_, TcpGranted::Read(_))) => unreachable!("what was given comes back"),
        }
    }

    pub(super) fn expose(&mut self, source: &Tensor) -> Result<Grant, PostError> {
        if !self.is_up() {
            return Err(PostError::Down);
        }
        self.check_source(source, source.bytes().len() as u64)?;
        let added = self.grants.add(TcpGranted::Read(source.clone()), source.span());
        added.map_err(|(error, _)| error)
    }

    /// Checks that a tensor has `len` bytes, in the pool if any.
    #[inline]
    fn check_source(&self, source: &Tensor, len: u64) -> Result<(), PostError> {
        if len > source.bytes().len() as u64 {
            return Err(PostError::Refused("the source has not as many bytes"));
        }
        if len > 0 && self.pool.span_of(source).is_none() {
            return Err(PostError::Refused(match source.span() {
                Some(_) => "the source is not in the pool that this fabric shares",
                None => "the source has no memory of its own here: copy a lent tensor first",
            }));
        }
        Ok(())
    }
}

/// The target of an access of `len` bytes to a grant, as a frame carries it.
#[inline]
fn target(grant: &Grant, len: u64) -> Result<FrameTarget, PostError> {
    if len > grant.len {
        return Err(PostError::Refused("the grant is for fewer bytes"));
    }
    Ok(FrameTarget::from(grant))
}
