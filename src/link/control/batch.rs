//! Batches: short messages share control slots, and devices and sleeping peers are notified once.

use crate::fabric::{Event, MAX_MESSAGE, Port};
use crate::link::links::{Link, LinkContext, Links};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::Counter;
use crate::wire::message::pack::{Unpacked, is_packed, unpack};

#[derive(Debug, Default)]
pub(in crate::link) struct BatchState {
    /// A batch is open: messages are packed until no event is left.
    pub is_open: bool,
    /// Doorbells of the port that were counted.
    doorbells: u64,
}

impl<P: Port> Links<P> {
    /// Whether the poll has brought more than one message. If so, the answers share slots too.
    pub(in crate::link) fn polled_several(&self) -> bool {
        let mut messages = self.completions.entries().iter().filter_map(|came| match came.event {
            Event::Message(range) => Some(range),
            _ => None,
        });
        match (messages.next(), messages.next()) {
            (Some(first), None) => is_packed(self.completions.message(first)),
            (first, _) => first.is_some(),
        }
    }

    /// Opens a batch. Short messages share control slots, and devices and sleeping peers are
    /// notified once, when [`Links::next_event`] finds no event.
    pub fn begin_batch(&mut self) {
        if !std::mem::replace(&mut self.batch.is_open, true) {
            self.port.begin_batch();
        }
    }

    /// Whether there is no event, no message of edge windows and no open batch.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.events.is_empty() && self.windows.is_empty() && !self.batch.is_open
    }

    pub(in crate::link) fn end_batch(&mut self) {
        if std::mem::take(&mut self.batch.is_open) {
            self.links.for_each_backlogged(|link| link.out.flush(&mut self.port, &self.counters, false));
            if !is_on(Mutant::BatchNeverEnds) {
                self.port.end_batch();
            }
        }
        self.count_doorbells();
    }

    /// Arms the port. The port may ring doorbells for operations that its peers were not notified
    /// of yet.
    pub(in crate::link) fn arm_port(&mut self) -> bool {
        let armed = self.port.arm();
        self.count_doorbells();
        armed
    }

    fn count_doorbells(&mut self) {
        let doorbells = self.port.doorbells();
        if doorbells != self.batch.doorbells {
            self.counters.add(Counter::Doorbells, doorbells.wrapping_sub(self.batch.doorbells));
            self.batch.doorbells = doorbells;
        }
    }
}

/// Takes a pack apart. None is longer than a message of all fabrics, also where longer ones travel.
/// So a poll handles a bounded number of messages.
///
/// # Errors
/// If it is longer, or no pack.
pub(in crate::link) fn unpack_slot(bytes: &[u8]) -> Result<Unpacked<'_>, String> {
    if bytes.len() > MAX_MESSAGE {
        return Err(format!("a pack of {} bytes came, of at most {MAX_MESSAGE}", bytes.len()));
    }
    unpack(bytes).map_err(|error| error.to_string())
}

impl Link {
    /// Handles a control slot: a message, or `PACKED` with several.
    pub(in crate::link) fn on_packed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        bytes: &[u8],
    ) -> Result<(), String> {
        if !is_packed(bytes) {
            return self.on_message(cx, bytes);
        }
        let mut messages = unpack_slot(bytes)?;
        if is_on(Mutant::LastOfPackLost) {
            let handled = messages.clone().count() - 1;
            return messages.take(handled).try_for_each(|message| self.on_message(cx, message));
        }
        messages.try_for_each(|message| self.on_message(cx, message))
    }

    /// Handles the rest of a pack that was checked, whose first messages were taken.
    pub(in crate::link) fn on_rest_of_pack<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        rest: &[u8],
    ) -> Result<(), String> {
        if self.is_ended {
            return Ok(());
        }
        self.receive_credits.consumed();
        Unpacked::of_rest(rest).try_for_each(|message| self.on_message(cx, message))
    }
}
