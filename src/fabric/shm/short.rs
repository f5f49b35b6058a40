//! Short messages: from the caller to the ring, and from the ring to the caller, without an order
//! or a completion in between.

use crate::fabric::shm::link::ShmLinkInner;
use crate::fabric::shm::memory::order::{send_of_word, send_word};
use crate::fabric::shm::memory::slot::FirstWord;
use crate::fabric::{PostError, ShortTake};
use crate::wire::{SHORT_MESSAGE, ShortMessage};

impl ShmLinkInner {
    /// As [`ShmLinkInner::send`].
    #[inline]
    pub(super) fn send_short(&mut self, message: &ShortMessage) -> Result<(), PostError> {
        let ShortMessage { len, first, words: [a, b, c, d, e, f] } = *message;
        self.room()?.post_short(&[send_word(len, first), a, b, c, d, e, f]);
        Ok(())
    }

    /// See [`Port::take_short`](crate::fabric::Port::take_short).
    #[inline]
    pub(super) fn take_short<R>(&mut self, accept: impl FnOnce(&ShortMessage) -> Option<R>) -> ShortTake<R> {
        match self.rings.inc.peek() {
            Some(order) => self.take_short_of(order, accept).into(),
            None => ShortTake::Nothing,
        }
    }

    #[inline]
    fn take_short_of<R>(
        &mut self,
        order: FirstWord,
        accept: impl FnOnce(&ShortMessage) -> Option<R>,
    ) -> Option<R> {
        // A poll handles everything but a short message alone.
        let is_alone = self.is_up() && self.rings.is_quiet() && self.rings.posted > 0;
        let [head, words @ ..] = self.rings.inc.short();
        let (len, first) = send_of_word(head).filter(|(len, _)| is_alone && *len <= SHORT_MESSAGE)?;
        // A wrong number is for the poll to find.
        self.rings.out.acknowledge(order.ack()).ok()?;
        self.rings.prefetch_reply();
        let accepted = accept(&ShortMessage { len, first, words })?;
        self.had_traffic = true;
        self.rings.posted -= 1;
        if self.rings.inc.advance(order) {
            self.rings.ringer.ring_if_idle();
        }
        Some(accepted)
    }
}
