//! Small tensors whose records share slots: those of an open batch, and those that the thread that
//! waits for them takes one by one.

use super::WindowLink;
use super::short::{ExpectedValue, count_sent};
use crate::fabric::{Accept, Event, LinkId, NextMessage, Port, ShortTake};
use crate::link::control::batch::unpack_slot;
use crate::link::links::{Link, Links};
use crate::link::{DirectReceive, placement_of};
use crate::memory::Tensor;
use crate::mutants::{Mutant, is_on};
use crate::protocol::Record;
use crate::telemetry::Counter;
use crate::wire::EdgeId;
use crate::wire::message::PlainRecord;
use crate::wire::message::pack::{Unpacked, is_packed};

/// The place of the next message among the completions of a poll, whose first messages were taken.
#[derive(Debug, Default)]
pub(in crate::link) struct PolledPlace {
    /// Completions before that of the message.
    pub completions: usize,
    /// Bytes of its pack before the message. 0 if none of the pack was taken.
    pub bytes: usize,
}

impl<P: Port> Links<P> {
    /// As [`Links::send_short`]. In an open batch small records share slots.
    #[inline(never)] // keeps the path of single tensors short
    pub fn send_packed(&mut self, link: LinkId, record: Record<()>, tensor: &mut Option<Tensor>) -> bool {
        if !self.batch.is_open {
            let Record { edge, n, step, .. } = record;
            return self.send_short(link, edge, n, step, tensor);
        }
        let (Some(found), Some(tensor)) = (self.links.get_mut(link), tensor) else { return false };
        let Some(plain) = found.plain(record, tensor) else { return false };
        if !found.out.packed(&mut self.port, &self.counters, &plain) {
            return false;
        }
        self.counters.increment(Counter::SmallTensorsSent);
        count_sent(&self.counters, plain.data.len() as u64);
        if !found.is_backlogged {
            self.links.note_backlog(link);
        }
        true
    }

    /// As [`Links::take_short`], in an open batch.
    #[inline(never)] // as above
    pub(super) fn take_in_batch(
        &mut self,
        link: LinkId,
        edge: EdgeId,
        n: u16,
        step: u64,
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        if self.polled.completions == self.completions.len() {
            self.handle_polled();
            self.counters.increment(Counter::Polls);
            if self.port.poll(&mut self.completions) == 0 {
                self.counters.increment(Counter::IdlePolls);
                return ShortTake::Nothing;
            }
        }
        self.take_polled(link, edge, n, step, receive).into()
    }

    /// Handles the messages of the last poll that were not taken. Returns whether there were any.
    pub fn handle_polled(&mut self) -> bool {
        let is_left = self.polled.completions < self.completions.len();
        if !self.completions.is_empty() {
            self.handle_completions();
        }
        is_left
    }

    #[inline]
    fn take_polled(
        &mut self,
        link: LinkId,
        edge: EdgeId,
        n: u16,
        step: u64,
        receive: &mut DirectReceive,
    ) -> Option<()> {
        let completion = self.completions.entries().get(self.polled.completions)?;
        let Event::Message(range) = completion.event else { return None };
        let found = self.links.get_mut(link).filter(|link| link.takes_short())?;
        if completion.link != link {
            return None;
        }
        let bytes = self.completions.message(range);
        let (message, rest) = first_of(bytes, self.polled.bytes)?;
        let WindowLink { known, eager_in, .. } = &mut found.windows;
        let value = ExpectedValue { known, eager: eager_in, pool: &self.pool, edge, n, step, receive };
        value.accept(NextMessage::Bytes(message))?;
        self.counters.increment(Counter::MessagesReceived);
        self.polled.bytes = bytes.len() - rest;
        if rest == 0 {
            self.polled = PolledPlace { completions: self.polled.completions + 1, bytes: 0 };
            found.receive_credits.consumed();
            self.links.note_use(link);
        }
        Some(())
    }
}

/// The first message in `bytes`, of which `taken` were taken, and the number of bytes behind it.
#[inline]
fn first_of(bytes: &[u8], taken: usize) -> Option<(&[u8], usize)> {
    let mut messages = match taken {
        0 if !is_packed(bytes) => return Some((bytes, 0)),
        // The general way reports a pack that is not correct.
        0 => unpack_slot(bytes).ok()?,
        _ => Unpacked::of_rest(&bytes[taken..]),
    };
    if is_on(Mutant::FirstOfPackSkipped) {
        messages.next();
    }
    let message = messages.next()?;
    Some((message, messages.rest().len()))
}

impl Link {
    /// The record with a small tensor, if the link needs nothing else for it.
    #[inline]
    fn plain<'a>(&self, record: Record<()>, tensor: &'a Tensor) -> Option<PlainRecord<'a>> {
        let Record { edge, n, step, .. } = record;
        let data = tensor.bytes();
        let asked = self.windows.asked.get(edge.number as usize)?;
        if asked.validate || data.len() > self.settings.small_tensor_bytes as usize {
            return None;
        }
        let meta = self.windows.told.latest(tensor.meta(), placement_of(tensor))?;
        Some(PlainRecord { edge, n, step, meta, data })
    }
}
