//! Executes the orders in the peer's ring, after checking that they are allowed.

use crate::fabric::shm::bulk::PeerPool;
use crate::fabric::shm::grants::ShmGrants;
use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::memory::order::{
    FIRST_BYTES, Order, OrderLoan, OrderSource, OrderTarget, PAYLOAD_BYTES, ReadTicket, short_message,
};
use crate::fabric::shm::memory::segment::PeerWords;
use crate::fabric::shm::memory::slot::FirstWord;
use crate::fabric::shm::memory::state;
use crate::fabric::shm::reads::{PendingRead, ReadAnswer};
use crate::fabric::shm::rings::{OrderInProgress, Rings};
use crate::fabric::shm::violation::ShmViolation;
use crate::fabric::{Completions, Event, LinkFailure};
use crate::memory::LentBytes;
use crate::wire::{Immediate, ShortMessage};
use std::sync::Arc;

/// Orders that one poll takes from a ring, at most.
const POLL_ORDERS: u32 = 16;

/// Executes the orders of one peer.
pub(super) struct OrderExecutor {
    pub grants: ShmGrants,
    pub memory: PeerPool,
    pub loans: Arc<LoanTable>,
    pub peer_state: PeerWords,
    /// Bytes that one poll pulls, at most.
    poll_bytes: u64,
    /// A message, while it is read.
    pub message: [u8; PAYLOAD_BYTES],
}

/// State of an order after one step.
enum OrderProgress {
    Done,
    /// The rest of its bytes needs another poll.
    More,
}

impl OrderExecutor {
    /// Starts without grants and loans.
    pub(super) fn new(
        memory: PeerPool,
        loans: Arc<LoanTable>,
        peer_state: PeerWords,
        poll_bytes: u64,
    ) -> Self {
        let grants = ShmGrants::new();
        OrderExecutor { grants, memory, loans, peer_state, poll_bytes, message: [0; PAYLOAD_BYTES] }
    }

    /// Takes a bounded number of orders. Returns whether there was any.
    #[inline(always)] // one caller, on the path of each poll
    pub(super) fn poll(&mut self, rings: &mut Rings, out: &mut Completions) -> Result<bool, LinkFailure> {
        let Some(first) = rings.inc.peek() else {
            rings.tell();
            return Ok(false);
        };
        self.take(rings, first, out)?;
        Ok(true)
    }

    fn take(
        &mut self,
        rings: &mut Rings,
        mut first: FirstWord,
        out: &mut Completions,
    ) -> Result<(), LinkFailure> {
        rings.prefetch_reply();
        let mut bytes = self.poll_bytes;
        let mut told = false;
        for _ in 0..POLL_ORDERS {
            rings.acknowledge(first.ack(), out)?;
            match self.execute(rings, &mut bytes, out)? {
                OrderProgress::More => break,
                OrderProgress::Done => told |= rings.inc.advance(first),
            }
            match rings.inc.peek() {
                Some(next) => first = next,
                None => break,
            }
        }
        if told {
            rings.ringer.ring_if_idle();
        }
        Ok(rings.post_answers()?)
    }

    #[inline]
    fn execute(
        &mut self,
        rings: &mut Rings,
        bytes: &mut u64,
        out: &mut Completions,
    ) -> Result<OrderProgress, LinkFailure> {
        if let Some(current) = rings.current {
            return self.execute_bulk(rings, current, bytes, out);
        }
        let word_0 = rings.inc.short()(0);
        let message = short_message(word_0, rings.inc.short()).map(|message| message.read());
        if let Some(message) = message {
            receive(rings)?;
            out.push_message(rings.link, &message.to_bytes()[..message.len]);
            return Ok(OrderProgress::Done);
        }
        let order = Order::from_words(|k| if k == 0 { word_0 } else { rings.inc.word(k) })?;
        match order {
            Order::Send { len, first } => {
                receive(rings)?;
                let (start, rest) = self.message.split_at_mut(FIRST_BYTES);
                start.copy_from_slice(&first.to_le_bytes());
                rings.inc.bytes(order.word_count(), &mut rest[..len.saturating_sub(FIRST_BYTES)]);
                out.push_message(rings.link, &self.message[..len]);
                Ok(OrderProgress::Done)
            }
            Order::WriteInline { len, target, immediate } => {
                self.write_inline(rings, (order.word_count(), len), target, immediate, out)?;
                Ok(OrderProgress::Done)
            }
            order => self.execute_bulk(rings, OrderInProgress { order, pulled: 0 }, bytes, out),
        }
    }

    /// As [`OrderExecutor::execute`], for orders whose bytes are not in the ring.
    #[inline(never)] // keeps the path of small orders short
    fn execute_bulk(
        &mut self,
        rings: &mut Rings,
        current: OrderInProgress,
        bytes: &mut u64,
        out: &mut Completions,
    ) -> Result<OrderProgress, LinkFailure> {
        rings.current = None;
        match current.order {
            Order::Write { source, target, immediate } => {
                return self.write(rings, current, (source, target, immediate), bytes, out);
            }
            Order::Lend { loan, message } => self.borrow(rings, loan, message, out)?,
            Order::Read { exposed, len, ticket } => self.read(rings, exposed, len, ticket)?,
            Order::Answer { source, ticket } => {
                return self.answered(rings, current, source, ticket, bytes, out);
            }
            Order::Send { .. } | Order::WriteInline { .. } => {}
        }
        Ok(OrderProgress::Done)
    }

    #[inline]
    fn write_inline(
        &mut self,
        rings: &mut Rings,
        (payload, len): (usize, usize),
        target: OrderTarget,
        immediate: Option<Immediate>,
        out: &mut Completions,
    ) -> Result<(), LinkFailure> {
        may_receive(rings, immediate)?;
        if len > 0 {
            rings.inc.bytes(payload, self.grants.writable(target, len as u64)?);
        }
        landed(rings, len as u64, immediate, out)
    }

    fn write(
        &mut self,
        rings: &mut Rings,
        current: OrderInProgress,
        (source, target, immediate): (OrderSource, OrderTarget, Option<Immediate>),
        bytes: &mut u64,
        out: &mut Completions,
    ) -> Result<OrderProgress, LinkFailure> {
        may_receive(rings, immediate)?;
        if source.len > 0 {
            let room = self.grants.writable(target, source.len)?;
            if !pull(&self.memory, &mut rings.current, current, source, room, bytes)? {
                return Ok(OrderProgress::More);
            }
            self.check_peer_took_part()?;
        }
        landed(rings, source.len, immediate, out)?;
        Ok(OrderProgress::Done)
    }

    fn borrow(
        &mut self,
        rings: &mut Rings,
        loan: OrderLoan,
        message: ShortMessage,
        out: &mut Completions,
    ) -> Result<(), LinkFailure> {
        receive(rings)?;
        let bytes = self.borrowed(loan)?;
        out.push_lent(rings.link, &message.to_bytes()[..message.len], bytes);
        Ok(())
    }

    /// The bytes of a loan.
    fn borrowed(&self, loan: OrderLoan) -> Result<LentBytes, ShmViolation> {
        let OrderLoan { source, index, number } = loan;
        let len = source.len;
        let lender = self.memory.lender(source.region, len == 0)?;
        let offset = if len == 0 { 0 } else { source.offset };
        let place = self.loans.free_place(index, number)?;
        let Some(part) = lender.part(offset, len) else {
            self.loans.give_back_untaken(index, number);
            let region_len = lender.region().len();
            return Err(ShmViolation::OutsideRegion { named: source, region_len });
        };
        Ok(place.take(part))
    }

    fn read(
        &mut self,
        rings: &mut Rings,
        exposed: OrderTarget,
        len: u64,
        ticket: ReadTicket,
    ) -> Result<(), LinkFailure> {
        let (source, tensor) = if len == 0 {
            (OrderSource { region: 0, offset: 0, len }, None)
        } else {
            let tensor = self.grants.readable(exposed, len)?.clone();
            (OrderSource { region: exposed.region, offset: exposed.offset, len }, Some(tensor))
        };
        Ok(rings.answers.add(ReadAnswer { source, ticket, tensor })?)
    }

    fn answered(
        &mut self,
        rings: &mut Rings,
        current: OrderInProgress,
        source: OrderSource,
        ticket: ReadTicket,
        bytes: &mut u64,
        out: &mut Completions,
    ) -> Result<OrderProgress, LinkFailure> {
        let Some(read) = rings.reads.get(ticket) else {
            return Err(ShmViolation::UnknownRead(ticket).into());
        };
        if source.len != read.len {
            return Err(ShmViolation::ReadLength { asked: read.len, answered: source.len }.into());
        }
        if source.len > 0 {
            let room = &mut read.target.bytes_mut()[..source.len as usize];
            if !pull(&self.memory, &mut rings.current, current, source, room, bytes)? {
                return Ok(OrderProgress::More);
            }
            self.check_peer_took_part()?;
        }
        if let Some(PendingRead { target, .. }) = rings.reads.take(ticket) {
            out.push(rings.link, Event::ReadDone { target });
        }
        Ok(OrderProgress::Done)
    }

    /// Checks that the peer still took part after its memory was read: only then were the bytes
    /// valid.
    fn check_peer_took_part(&self) -> Result<(), LinkFailure> {
        state::after_pulling(&self.peer_state).map_or(Ok(()), Err)
    }
}

/// Pulls at most `bytes` of the bytes that are left into `room`, which is for all of them. Returns
/// whether that was the rest; if not, `waiting` continues the order.
fn pull(
    memory: &PeerPool,
    waiting: &mut Option<OrderInProgress>,
    current: OrderInProgress,
    source: OrderSource,
    room: &mut [u8],
    bytes: &mut u64,
) -> Result<bool, ShmViolation> {
    let left = source.len - current.pulled;
    let now = left.min(*bytes);
    *bytes -= now;
    let start = current.pulled as usize;
    memory.pull(source, current.pulled, &mut room[start..start + now as usize])?;
    if now < left {
        *waiting = Some(OrderInProgress { pulled: current.pulled + now, ..current });
    }
    Ok(now == left)
}

/// Consumes a posted receive.
#[inline]
fn receive(rings: &mut Rings) -> Result<(), LinkFailure> {
    match rings.posted.checked_sub(1) {
        Some(left) => {
            rings.posted = left;
            Ok(())
        }
        None => Err(LinkFailure::NoReceive),
    }
}

/// Checks that there is a receive for an immediate, before anything is written.
#[inline]
fn may_receive(rings: &Rings, immediate: Option<Immediate>) -> Result<(), LinkFailure> {
    if immediate.is_some() && rings.posted == 0 {
        return Err(LinkFailure::NoReceive);
    }
    Ok(())
}

/// Completes a write, if it has an immediate.
#[inline]
fn landed(
    rings: &mut Rings,
    bytes: u64,
    immediate: Option<Immediate>,
    out: &mut Completions,
) -> Result<(), LinkFailure> {
    if let Some(immediate) = immediate {
        receive(rings)?;
        out.push(rings.link, Event::Immediate { immediate, bytes });
    }
    Ok(())
}
