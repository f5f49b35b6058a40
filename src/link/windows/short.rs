//! The short path. The record of a tensor goes from its sender to the port, or from the port to its
//! receive. No queue and no event is in between.

use super::eager::{EagerReceiver, is_eager};
use super::meta::KnownMetas;
use super::{AskedOfEdge, ToldMeta, WindowLink, is_borrowable};
use crate::fabric::{Accept, LinkId, NextMessage, Port, ShortTake};
use crate::link::links::{Link, Links};
use crate::link::{Destination, DirectReceive, Received, placement_of};
use crate::memory::{LentBytes, Pool, Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::{LentRecord, Message, Placement, PlainRecord};
use crate::wire::{EdgeId, ShortMessage, UnreadMessage};

impl<P: Port> Links<P> {
    /// Sends the record of a tensor, if the link needs nothing else for it. Returns whether it did.
    /// [`Links::window_to_receiver`] sends any value. A tensor that is lent is taken.
    #[inline(never)] // one copy, so that the compiler inlines each of its parts
    pub fn send_short(
        &mut self,
        link: LinkId,
        edge: EdgeId,
        n: u16,
        step: u64, // not a `Record`, which would be passed in memory, and read back in other widths
        tensor: &mut Option<Tensor>,
    ) -> bool {
        let Some(link) = self.links.get_mut(link) else { return false };
        link.send_short(&mut self.port, (&self.pool, &self.counters), (edge, n, step), tensor)
    }

    /// Gives the value of a record to its receive without a poll, if the record is the next
    /// message. In an open batch records that share a slot are taken, too, after a poll. Then the
    /// caller calls [`Links::handle_polled`].
    #[inline(always)] // on the short path
    pub fn take_short(
        &mut self,
        link: LinkId,
        edge: EdgeId,
        n: u16,
        step: u64, // as for `send_short`
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        let in_batch = self.batch.is_open;
        if in_batch && !self.completions.is_empty() {
            return self.take_in_batch(link, edge, n, step, receive);
        }
        match self.take_alone(link, edge, n, step, receive) {
            // Behind a pack there is probably another one.
            ShortTake::Other if in_batch => self.take_in_batch(link, edge, n, step, receive),
            taken => taken,
        }
    }

    #[inline(always)] // on the short path
    fn take_alone(
        &mut self,
        link: LinkId,
        edge: EdgeId,
        n: u16,
        step: u64,
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        let Some(found) = self.links.get_mut(link).filter(|link| link.takes_short()) else {
            return ShortTake::Other;
        };
        let WindowLink { known, eager_in, .. } = &mut found.windows;
        let value = ExpectedValue { known, eager: eager_in, pool: &self.pool, edge, n, step, receive };
        let taken = self.port.take_short(link, value);
        if taken != ShortTake::Taken(()) {
            return taken;
        }
        self.counters.increment(Counter::MessagesReceived);
        if found.receive_credits.consumed_alone(&mut self.port, link) {
            self.counters.increment(Counter::CreditsPublished);
        }
        if found.windows.returns_eager() {
            self.return_eager(link);
        }
        taken
    }

    #[cold]
    fn return_eager(&mut self, link: LinkId) {
        if let Some((found, mut cx)) = self.with(link) {
            found.return_eager(&mut cx);
            self.links.note_backlog(link);
        }
    }
}

impl Link {
    #[inline(always)] // on the short path
    fn send_short<P: Port>(
        &mut self,
        port: &mut P,
        (pool, counters): (&Pool, &CountersWriter),
        (edge, n, step): (EdgeId, u16, u64),
        source: &mut Option<Tensor>,
    ) -> bool {
        let Some(tensor) = source.as_ref() else { return false };
        let placement = match tensor.is_in_pool() {
            true => Placement::POOL,
            false if tensor.meta().bytes() == 0 => placement_of(tensor),
            // It is copied first, or registered.
            false => return false,
        };
        let asked = self.windows.asked.get(edge.number as usize).filter(|asked| !asked.validate);
        let Some(&AskedOfEdge { borrow, .. }) = asked else { return false };
        let Some(meta) = self.windows.told.latest(tensor.meta(), placement) else { return false };
        let data = tensor.bytes();
        if data.len() > self.settings.small_tensor_bytes as usize {
            let may_borrow = borrow && is_borrowable(tensor.dtype());
            let (answers_need, checksum) = (false, None);
            let record = LentRecord { edge, n, step, meta, may_borrow, answers_need, checksum };
            // By reference: a copy of the record reads it in other widths than it was just written.
            return pool.has(tensor) && self.lend_short(port, counters, &record, source)
                || self.send_eager(port, counters, &record, source);
        }
        // Made where it is used, so that it need not be in memory for a short message.
        let plain = || PlainRecord { edge, n, step, meta, data };
        let has_left = match plain().to_short().filter(|_| self.out.has_slots(port)) {
            Some(message) => self.out.short(port, &message),
            None => self.send_bytes(port, plain()),
        };
        if has_left {
            counters.increment(Counter::SmallTensorsSent);
            count_sent(counters, data.len() as u64);
        }
        has_left
    }

    #[inline(never)] // keeps the path of short records short
    fn send_bytes<P: Port>(&mut self, port: &mut P, plain: PlainRecord<'_>) -> bool {
        self.out.unqueued(port, |bytes| plain.encode(bytes))
    }

    #[inline(never)] // keeps the path of small tensors short
    fn lend_short<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        record: &LentRecord,
        source: &mut Option<Tensor>,
    ) -> bool {
        let Some(bytes) = source.as_ref().map(|tensor| tensor.meta().bytes()) else { return false };
        if !self.out.leaves_now(port) {
            return false;
        }
        let mut permit = if record.may_borrow { port.permit_loan(self.id, bytes) } else { None };
        let may_borrow = permit.is_some();
        if may_borrow != record.may_borrow {
            counters.increment(Counter::LoansRefused);
        }
        let counter = if may_borrow { Counter::LoansPosted } else { Counter::WritesPosted };
        let message = LentRecord { may_borrow, ..*record }.to_message();
        let has_left = self.out.lend_now(port, source, &mut permit, &message);
        if has_left {
            counters.increment(counter);
            count_sent(counters, bytes);
        }
        has_left
    }

    /// Sends a tensor in its record, although it is not small.
    #[inline(never)] // as above
    fn send_eager<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        record: &LentRecord,
        source: &Option<Tensor>,
    ) -> bool {
        let LentRecord { edge, n, step, meta, .. } = *record;
        let Some(tensor) = source else { return false };
        let data = tensor.bytes();
        let has_left = self.windows.eager_out.has_room(data.len())
            && self.out.unqueued_parts(port, [&PlainRecord { edge, n, step, meta, data }.head(), data]);
        if has_left {
            self.windows.eager_out.sent(data.len());
            counters.increment(Counter::SmallTensorsSent);
            count_sent(counters, data.len() as u64);
            self.windows.eager_in.note_send();
            // Not queued: the caller does not note a backlog. Credit that has no room stays due.
            if let Some(returned) = self.windows.eager_in.due()
                && self.out.unqueued(port, |bytes| Message::EagerCredit { returned }.encode(bytes))
            {
                self.windows.eager_in.told(returned);
                counters.increment(Counter::MessagesSent);
            }
        }
        has_left
    }

    /// Whether the next message of the peer stands for itself.
    #[inline]
    pub(super) fn takes_short(&self) -> bool {
        self.assembler.is_idle() && !self.is_ended
    }
}

/// The value of a record that a receive waits for.
pub(super) struct ExpectedValue<'a> {
    pub known: &'a KnownMetas,
    pub eager: &'a mut EagerReceiver,
    pub pool: &'a Pool,
    pub edge: EdgeId,
    pub n: u16,
    pub step: u64,
    /// Gets the value.
    pub receive: &'a mut DirectReceive,
}

impl Accept<()> for ExpectedValue<'_> {
    #[inline(always)] // on the short path
    fn accept(self, next: NextMessage<'_>) -> Option<()> {
        match next {
            NextMessage::Short(message) => self.accept_short(message.unread()),
            NextMessage::Bytes(bytes) => self.accept_bytes(bytes),
            NextMessage::Lent(message, loan) => self.accept_lent(message, loan.bytes, || loan.keep()),
        }
    }

    #[inline(always)] // on the short path
    fn accept_short(mut self, message: UnreadMessage<impl Fn(usize) -> u64>) -> Option<()> {
        let ExpectedValue { edge, n, step, .. } = self;
        let meta = PlainRecord::meta_of_short(&message, edge, n, step)?;
        let len = PlainRecord::data_len(message.len);
        let mut landing = self.landing(meta, len)?;
        PlainRecord::copy_of_short(&message, landing.tensor.bytes_mut());
        self.finish(landing);
        Some(())
    }

    #[inline]
    fn accept_lent(
        self,
        message: &ShortMessage,
        bytes: &[u8],
        keep: impl Fn() -> Option<LentBytes>,
    ) -> Option<()> {
        let ExpectedValue { edge, n, step, .. } = self;
        let lent = LentRecord::from_message(message)?;
        let is_it = lent.edge == edge && lent.n == n && lent.step == step && !lent.answers_need;
        let is_it = is_it || is_on(Mutant::LentRecordNotCompared);
        let told = self.known.get(lent.meta).ok().filter(|_| is_it && lent.checksum.is_none())?;
        let borrows = lent.may_borrow && matches!(self.receive, DirectReceive::Waiting(Destination::Borrow));
        let is_whole = told.meta.bytes() == bytes.len() as u64;
        if !(borrows && is_whole && is_borrowable(told.meta.dtype())) {
            return self.copied(lent.meta, bytes);
        }
        let Ok(tensor) = Tensor::from_lent(self.pool, &told.meta, keep()?) else {
            unreachable!("checked above")
        };
        *self.receive = DirectReceive::Received(Received::Tensor(tensor), told.sender);
        Some(())
    }
}

impl<'a> ExpectedValue<'a> {
    #[inline(never)] // keeps the other paths short
    fn accept_bytes(self, bytes: &[u8]) -> Option<()> {
        let ExpectedValue { edge, n, step, .. } = self;
        let PlainRecord { meta, data, .. } = PlainRecord::decode(bytes)
            .filter(|plain| plain.edge == edge && plain.n == n && plain.step == step)?;
        match is_eager(data.len()) {
            true => self.accept_eager(meta, data),
            false => self.copied(meta, data),
        }
    }

    #[inline(never)] // as above
    fn accept_eager(self, meta: u16, data: &[u8]) -> Option<()> {
        // A poll reports a tensor that may not come.
        self.eager.add(data.len()).ok()?;
        let ExpectedValue { eager, .. } = self;
        let value = ExpectedValue { eager: &mut *eager, ..self };
        let taken = value.copied(meta, data);
        if taken.is_none() {
            eager.remove(data.len());
        }
        taken
    }

    fn copied(mut self, meta: u16, data: &[u8]) -> Option<()> {
        let mut landing = self.landing(meta, data.len())?;
        landing.tensor.bytes_mut().copy_from_slice(data);
        self.finish(landing);
        Some(())
    }

    /// Memory for a value of `len` bytes. A poll handles a value that does not fit, and a pool
    /// without room.
    #[inline(always)] // on the short path
    fn landing(&mut self, meta: u16, len: usize) -> Option<ValueLanding> {
        let known = self.known;
        let ToldMeta { meta, sender } = &**known.get(meta).ok()?;
        if meta.bytes() != len as u64 {
            return None;
        }
        let sender = *sender;
        match self.receive {
            DirectReceive::Waiting(Destination::Alloc | Destination::Borrow) => {
                let tensor = self.pool.landing(meta).ok()?;
                Some(ValueLanding { tensor, is_given: false, sender })
            }
            DirectReceive::Waiting(Destination::Into(given)) if given.meta() == meta => {
                let Some(Destination::Into(tensor)) = self.receive.take_destination() else { return None };
                Some(ValueLanding { tensor, is_given: true, sender })
            }
            DirectReceive::Waiting(Destination::Into(_)) | DirectReceive::Received(..) => None,
        }
    }

    /// Ends the receive with the value that was copied.
    #[inline(always)] // on the short path
    fn finish(self, ValueLanding { tensor, is_given, sender }: ValueLanding) {
        let received = if is_given { Received::Into(tensor) } else { Received::Tensor(tensor.freeze()) };
        // Neither has anything to drop: no destination is left but `Alloc` and `Borrow`.
        std::mem::forget(std::mem::replace(self.receive, DirectReceive::Received(received, sender)));
    }
}

/// Memory for the value of a record.
struct ValueLanding {
    tensor: TensorMut,
    /// Whether the receive gave it.
    is_given: bool,
    sender: Placement,
}

/// Counts a tensor that has left by its record alone.
#[inline]
pub(super) fn count_sent(counters: &CountersWriter, bytes: u64) {
    counters.add_all([(Counter::TensorsSent, 1), (Counter::BytesSent, bytes), (Counter::MessagesSent, 1)]);
}
