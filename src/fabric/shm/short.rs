//! Messages of a thread that holds the poller. They go from the caller to the ring, and from the
//! ring to the caller, without a completion in between.

use crate::fabric::shm::link::ShmLinkInner;
use crate::fabric::shm::memory::order::{FIRST_BYTES, OrderLoan, ShortOrder, send_word, short_message};
use crate::fabric::shm::memory::slot::{FirstWord, IN_SLOT};
use crate::fabric::{Accept, NextMessage, PostError, ShortTake};
use crate::mutants::{Mutant, is_on};
use crate::wire::{SHORT_MESSAGE, ShortMessage, UnreadMessage};
use std::cell::Cell;
use std::hint::spin_loop;

/// Looks for a message of one call: with their pauses some 100 ns on the CPUs of the benchmarks.
const LOOKS: u32 = 4;

impl ShmLinkInner {
    /// As [`ShmLinkInner::send`].
    #[inline(always)] // on the short path
    pub(super) fn send_short(
        &mut self,
        message: &UnreadMessage<impl Fn(usize) -> u64>,
    ) -> Result<(), PostError> {
        let UnreadMessage { len, first, word } = message;
        // Word 0 has the first bytes of the message in its high half. A division would cost more.
        let count = (len + 8 - FIRST_BYTES + 7) >> 3;
        let order = |k: usize| match k.checked_sub(1) {
            None => send_word(*len, *first),
            Some(k) => word(k),
        };
        self.room()?.post_short(count, order);
        Ok(())
    }

    /// See [`Port::take_short`](crate::fabric::Port::take_short).
    #[inline(always)] // on the short path
    pub(super) fn take_short<R>(&mut self, accept: impl Accept<R>) -> ShortTake<R> {
        // A poll handles everything but a message, alone or with a loan.
        let has_receive = self.rings.posted > 0 || is_on(Mutant::TakenWithoutReceive);
        if !(self.is_up() && self.rings.is_quiet() && has_receive) {
            return ShortTake::Other;
        }
        let Some(order) = self.rings.inc.peek() else { return self.take_later(accept) };
        self.take_order(order, accept).into()
    }

    /// As [`ShmLinkInner::take_short`], if the message is not there at the first look.
    #[inline(never)] // keeps the path of a message that is there short
    fn take_later<R>(&mut self, accept: impl Accept<R>) -> ShortTake<R> {
        let look = |_| {
            // A look takes the slot's cache line away from the peer, which may have fetched it for
            // the stores of the message.
            spin_loop();
            self.rings.inc.peek()
        };
        match (1..LOOKS).find_map(look) {
            Some(order) => self.take_order(order, accept).into(),
            None => ShortTake::Nothing,
        }
    }

    #[inline(always)] // on the short path
    fn take_order<R>(&mut self, order: FirstWord, accept: impl Accept<R>) -> Option<R> {
        // A wrong number is for the poll to find.
        self.rings.out.acknowledge(order.ack()).ok()?;
        self.rings.prefetch_reply();
        let word_0 = self.rings.inc.short()(0);
        let accepted = if let Some(message) = short_message(word_0, self.rings.inc.short()) {
            accept.accept_short(message)
        } else {
            self.accept_other(word_0, accept)
        }?;
        self.had_traffic = true;
        self.rings.posted = self.rings.posted.saturating_sub(1);
        if self.rings.inc.advance(order) {
            self.rings.ringer.ring_if_idle();
        }
        Some(accepted)
    }

    #[inline(never)] // keeps the path of short messages short
    fn accept_other<R>(&mut self, word_0: u64, accept: impl Accept<R>) -> Option<R> {
        let words = {
            let word = self.rings.inc.short();
            std::array::from_fn(|k| if k == 0 { word_0 } else { word(k) })
        };
        match ShortOrder::from_words(words)? {
            ShortOrder::Send(message) => self.accept_long(&message, accept),
            ShortOrder::Lend(loan, message) => self.accept_lent(loan, &message, accept),
        }
    }

    fn accept_long<R>(&mut self, start: &ShortMessage, accept: impl Accept<R>) -> Option<R> {
        let message = self.executor.message.get_mut(..start.len)?;
        message[..SHORT_MESSAGE].copy_from_slice(&start.to_bytes());
        self.rings.inc.bytes(IN_SLOT, &mut message[SHORT_MESSAGE..]);
        accept.accept(NextMessage::Bytes(message))
    }

    fn accept_lent<R>(
        &mut self,
        loan: OrderLoan,
        message: &ShortMessage,
        accept: impl Accept<R>,
    ) -> Option<R> {
        let executor = &self.executor;
        let place = executor.loans.free_place(loan.index, loan.number).ok()?;
        let part = executor.memory.lent(loan.source)?;
        executor.loans.prefetch(loan.index);
        self.loans.prefetch();
        // Without a place once the loan is kept.
        let place = Cell::new(Some(place));
        let keep = || place.take().map(|place| place.take(part));
        let accepted = accept.accept_lent(message, part.bytes(), keep)?;
        let is_read = place.take().is_some() && !is_on(Mutant::ReadLoanKept);
        if is_read || is_on(Mutant::KeptLoanGivenBack) {
            executor.loans.give_back_untaken(loan.index, loan.number);
        }
        Some(accepted)
    }
}
