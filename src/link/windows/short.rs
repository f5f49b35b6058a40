//! The short path. The record of a tensor goes from its sender to the port, or from the port to its
//! receive. No queue and no event is in between.

use super::{AskedOfEdge, ToldMeta, is_borrowable};
use crate::fabric::{LinkId, NextLoan, NextMessage, Port, ShortTake};
use crate::link::links::{Link, Links};
use crate::link::{Destination, Received, placement_of};
use crate::memory::{Pool, Tensor};
use crate::mutants::{Mutant, is_on};
use crate::protocol::window::Record;
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::{LentRecord, Placement, PlainRecord};

impl<P: Port, C> Links<P, C> {
    /// Sends the record of a tensor, if the link needs nothing else for it. Returns whether it did.
    /// In an open batch small records share slots. [`Links::window_to_receiver`] sends any value.
    #[inline]
    pub fn send_short(&mut self, link: LinkId, record: Record<()>, tensor: &Tensor) -> bool {
        if self.batch.is_open {
            return self.send_packed(link, record, tensor);
        }
        let Some(link) = self.links.get_mut(link) else { return false };
        link.send_short(&mut self.port, &self.counters, record, tensor)
    }

    /// Takes the value of a record without a poll, if the record is the next message. The
    /// destination is taken with the tensor. In an open batch records that share a slot are taken,
    /// too, after a poll. Then the caller calls [`Links::handle_polled`].
    #[inline]
    pub fn take_short(
        &mut self,
        link: LinkId,
        record: Record<()>,
        destination: &mut Option<Destination>,
    ) -> ShortTake<(Received, Placement)> {
        if self.batch.is_open {
            return self.take_in_batch(link, record, destination);
        }
        self.take_alone(link, record, destination)
    }

    #[inline]
    pub(super) fn take_alone(
        &mut self,
        link: LinkId,
        record: Record<()>,
        destination: &mut Option<Destination>,
    ) -> ShortTake<(Received, Placement)> {
        let Some(found) = self.links.get_mut(link).filter(|link| link.takes_short()) else {
            return ShortTake::Other;
        };
        let accept = |message: NextMessage<'_>| found.receive_short(&self.pool, record, message, destination);
        let taken = self.port.take_short(link, accept);
        if !matches!(taken, ShortTake::Taken(_)) {
            return taken;
        }
        self.counters.increment(Counter::MessagesReceived);
        let Link { id, depth, receive_credits, .. } = found;
        if receive_credits.consumed_alone(&mut self.port, *id, *depth) {
            self.counters.increment(Counter::CreditsPublished);
        }
        taken
    }
}

impl<C> Link<C> {
    #[inline]
    fn send_short<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        record: Record<()>,
        tensor: &Tensor,
    ) -> bool {
        let Record { edge, n, step, .. } = record;
        let asked = self.windows.asked.get(edge.number as usize).filter(|asked| !asked.validate);
        let Some(&AskedOfEdge { borrow, .. }) = asked else { return false };
        let Some(meta) = self.windows.told.latest(tensor.meta(), placement_of(tensor)) else { return false };
        let data = tensor.bytes();
        let has_left = if data.len() <= self.settings.small_tensor_bytes as usize {
            self.send_plain(port, counters, PlainRecord { edge, n, step, meta, data })
        } else {
            let may_borrow = borrow && is_borrowable(tensor.dtype());
            let (answers_need, checksum) = (false, None);
            let record = LentRecord { edge, n, step, meta, may_borrow, answers_need, checksum };
            self.lend_short(port, counters, record, tensor)
        };
        if has_left {
            counters.increment(Counter::TensorsSent);
            counters.add(Counter::BytesSent, data.len() as u64);
            counters.increment(Counter::MessagesSent);
        }
        has_left
    }

    #[inline]
    fn send_plain<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        plain: PlainRecord<'_>,
    ) -> bool {
        let has_left = match plain.to_short() {
            Some(message) => self.out.short(port, &message),
            None => self.out.unqueued(port, |bytes| plain.encode(bytes)),
        };
        counters.add(Counter::SmallResponses, has_left.into());
        has_left
    }

    #[inline(never)] // keeps the path of small tensors short
    fn lend_short<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        mut record: LentRecord,
        tensor: &Tensor,
    ) -> bool {
        if !self.out.leaves_now(port) {
            return false;
        }
        let bytes = tensor.bytes().len() as u64;
        let permit = if record.may_borrow { self.permit_borrow(port, counters, bytes) } else { None };
        record.may_borrow = permit.is_some();
        let counter = if record.may_borrow { Counter::LoansPosted } else { Counter::WritesPosted };
        let has_left = self.out.lend_now(port, tensor, permit, &record.to_message());
        counters.add(counter, has_left.into());
        has_left
    }

    /// Whether the next message of the peer stands for itself.
    #[inline]
    pub(super) fn takes_short(&self) -> bool {
        self.assembler.is_idle() && !self.is_ended
    }

    #[inline]
    pub(super) fn receive_short(
        &self,
        pool: &Pool,
        record: Record<()>,
        next: NextMessage<'_>,
        destination: &mut Option<Destination>,
    ) -> Option<(Received, Placement)> {
        let Record { edge, n, step, .. } = record;
        match next {
            NextMessage::Short(message) => {
                let told = self.told(PlainRecord::meta_of_short(message, edge, n, step)?)?;
                let copy = |out: &mut [u8]| PlainRecord::copy_of_short(message, out);
                place(pool, told, destination, PlainRecord::data_len(message.len), copy)
            }
            NextMessage::Long(bytes) => {
                let PlainRecord { meta, data, .. } = PlainRecord::decode(bytes)
                    .filter(|plain| plain.edge == edge && plain.n == n && plain.step == step)?;
                let copy = |out: &mut [u8]| {
                    out.copy_from_slice(data);
                    true
                };
                place(pool, self.told(meta)?, destination, data.len(), copy)
            }
            NextMessage::Lent(message, loan) => {
                let lent = LentRecord::from_message(message)?;
                let is_it = lent.edge == edge && lent.n == n && lent.step == step && !lent.answers_need;
                let is_it = is_it || is_on(Mutant::LentRecordNotCompared);
                let told = self.told(lent.meta).filter(|_| is_it && lent.checksum.is_none())?;
                receive_lent(pool, told, loan, lent.may_borrow, destination)
            }
        }
    }

    #[inline]
    fn told(&self, meta: u16) -> Option<&ToldMeta> {
        self.windows.known.get(meta).ok().map(|told| &**told)
    }
}

/// Puts the `len` bytes that `copy` copies where a receive wants them. A poll handles a value that
/// does not fit, and a pool without room.
#[inline]
fn place(
    pool: &Pool,
    told: &ToldMeta,
    destination: &mut Option<Destination>,
    len: usize,
    copy: impl FnOnce(&mut [u8]) -> bool,
) -> Option<(Received, Placement)> {
    if told.meta.bytes() != len as u64 {
        return None;
    }
    if let Some(Destination::Into(given)) = destination {
        if *given.meta() != told.meta || !copy(given.bytes_mut()) {
            return None;
        }
        let Some(Destination::Into(given)) = destination.take() else { return None };
        return Some((Received::Into(given), told.sender));
    }
    destination.as_ref()?;
    let mut tensor = pool.landing(&told.meta).ok()?;
    if !copy(tensor.bytes_mut()) {
        return None;
    }
    *destination = None;
    Some((Received::Tensor(tensor.freeze()), told.sender))
}

/// As [`place`], for lent bytes, which the receive may borrow.
fn receive_lent(
    pool: &Pool,
    told: &ToldMeta,
    loan: NextLoan<'_>,
    may_borrow: bool,
    destination: &mut Option<Destination>,
) -> Option<(Received, Placement)> {
    let bytes = loan.bytes;
    let borrows = matches!(destination, Some(Destination::Borrow));
    let is_whole = told.meta.bytes() == bytes.len() as u64;
    if borrows && may_borrow && is_whole && is_borrowable(told.meta.dtype()) {
        let Ok(tensor) = Tensor::from_lent(pool, told.meta.clone(), loan.keep()?) else {
            unreachable!("checked above")
        };
        *destination = None;
        return Some((Received::Tensor(tensor), told.sender));
    }
    let copy = |out: &mut [u8]| {
        out.copy_from_slice(bytes);
        true
    };
    place(pool, told, destination, bytes.len(), copy)
}
