//! Posting on a link: every operation of [`Port`](crate::fabric::Port) but polls.

use crate::fabric::shm::bulk;
use crate::fabric::shm::grants::ShmGranted;
use crate::fabric::shm::link::{LinkLoan, ShmLinkInner};
use crate::fabric::shm::memory::order::{FIRST_BYTES, Order, OrderLoan, OrderTarget, PAYLOAD_BYTES};
use crate::fabric::shm::memory::ring::BadAck;
use crate::fabric::shm::reads::PendingRead;
use crate::fabric::shm::rings::Rings;
use crate::fabric::{LoanPermit, MAX_LOAN_MESSAGE, NO_SOURCE, PostError};
use crate::memory::{Span, Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage};

/// The target of an access of `len` bytes to a grant, as an order carries it.
#[inline]
fn target(grant: &Grant, len: u64) -> Result<OrderTarget, PostError> {
    if len > grant.len {
        return Err(PostError::Refused("the grant is for fewer bytes"));
    }
    Ok(OrderTarget::from(grant))
}

impl ShmLinkInner {
    /// The rings, if the link is up and they have room for an order.
    #[inline(always)] // on the short path
    pub(super) fn room(&mut self) -> Result<&mut Rings, PostError> {
        if !self.is_up() {
            return Err(PostError::Down);
        }
        self.had_traffic = true;
        match self.rings.out.has_room() {
            Ok(true) => Ok(&mut self.rings),
            Ok(false) => Err(PostError::Full),
            Err(bad) => Err(self.broken(bad)),
        }
    }

    #[cold]
    fn broken(&mut self, why: BadAck) -> PostError {
        self.fail(why.into());
        PostError::Down
    }

    #[inline]
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<(), PostError> {
        if bytes.len() > PAYLOAD_BYTES {
            return Err(PostError::Refused("a message has at most 224 bytes"));
        }
        let (first, rest) = bytes.split_at(bytes.len().min(FIRST_BYTES));
        let first = first.iter().rev().fold(0, |first, byte| first << 8 | u32::from(*byte));
        self.room()?.post(Order::Send { len: bytes.len(), first }, rest);
        Ok(())
    }

    #[inline]
    pub(super) fn write_inline(
        &mut self,
        bytes: &[u8],
        grant: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let len = bytes.len();
        if len > PAYLOAD_BYTES {
            return Err(PostError::Refused("more bytes than can be written inline: see the link's limits"));
        }
        let target = target(grant, len as u64)?;
        self.room()?.post(Order::WriteInline { len, target, immediate }, bytes);
        Ok(())
    }

    pub(super) fn write(
        &mut self,
        tensor: &Tensor,
        len: u64,
        grant: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let target = target(grant, len)?;
        let source = bulk::source(&self.pool, tensor, len)?;
        let order = Order::Write { source, target, immediate };
        self.room()?.post_held(order, true, Some(tensor.clone()));
        Ok(())
    }

    pub(super) fn read(&mut self, target: TensorMut, source: &Grant) -> Result<(), (PostError, TensorMut)> {
        let len = source.len;
        if len > target.bytes().len() as u64 {
            return Err((PostError::Refused("the target has fewer bytes than the source"), target));
        }
        let rings = match self.room() {
            Ok(rings) => rings,
            Err(error) => return Err((error, target)),
        };
        if !rings.reads.has_room() {
            return Err((PostError::Full, target));
        }
        if let Some(ticket) = rings.reads.add(PendingRead { target, len }) {
            rings.post(Order::Read { exposed: OrderTarget::from(source), len, ticket }, &[]);
        }
        Ok(())
    }

    /// See [`Port::lend`](crate::fabric::Port::lend).
    #[inline]
    pub(super) fn lend(
        &mut self,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> Result<(), PostError> {
        if message.len > MAX_LOAN_MESSAGE {
            return Err(PostError::Refused("the message of a loan has at most 28 bytes"));
        }
        let tensor = source.as_ref().ok_or(PostError::Refused(NO_SOURCE))?;
        let place = bulk::source(&self.pool, tensor, tensor.bytes().len() as u64)?;
        let position = self.room()?.out.next();
        let (index, number) = match self.loans.next_loan() {
            Some(loan) => loan,
            None => {
                self.release_returned();
                self.loans.next_loan().ok_or(PostError::Full)?
            }
        };
        self.rings.post_lend(OrderLoan { source: place, index: u64::from(index), number }, message);
        // Behind the post, for which the peer waits. Only a loan with a permit wants a spare one.
        self.spare_permit = self.release_returned().filter(|_| permit.is_some());
        let tensor = source.take().unwrap_or_else(|| unreachable!("it was there"));
        // Behind the release, which would read its word and so take that line from the peer.
        self.loans.add((index, number), LinkLoan { position, tensor, permit: permit.take() });
        Ok(())
    }

    pub(super) fn post_receives(&mut self, count: u32) {
        self.rings.posted = self.rings.posted.saturating_add(count);
    }

    pub(super) fn publish_credits(&mut self, returned: u32) {
        self.rings.inc.publish_credits(returned);
        self.rings.ring_if_idle();
    }

    pub(super) fn peer_credits(&self) -> u32 {
        self.rings.out.credits()
    }

    pub(super) fn grant(&mut self, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        if !self.is_up() {
            return Err((PostError::Down, target));
        }
        // Memory outside the pool gets a span of its own: only this side writes to it, and checks
        // the key alone.
        let own = || Span { region: 0, offset: 0, len: target.bytes().len() as u64 };
        let span = target.span().unwrap_or_else(own);
        match self.executor.grants.add(ShmGranted::Write(target), Some(span)) {
            Ok(grant) => Ok(grant),
            Err((error, ShmGranted::Write(target))) => Err((error, target)),
            Err((_, ShmGranted::Read(_))) => unreachable!("what was given comes back"),
        }
    }

    pub(super) fn expose(&mut self, tensor: &Tensor) -> Result<Grant, PostError> {
        if !self.is_up() {
            return Err(PostError::Down);
        }
        bulk::source(&self.pool, tensor, tensor.bytes().len() as u64)?;
        let added = self.executor.grants.add(ShmGranted::Read(tensor.clone()), tensor.span());
        added.map_err(|(error, _)| error)
    }
}
