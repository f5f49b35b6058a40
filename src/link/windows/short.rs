//! The short path of small tensors. Their record is one [`ShortMessage`], which goes from the
//! tensor to the port, or from the port to the tensor.

use crate::fabric::{LinkId, Port, ShortTake};
use crate::link::links::{Link, Links};
use crate::link::{Destination, Received, placement_of};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::protocol::window::Record;
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::{Placement, PlainRecord, SHORT_TENSOR};
use crate::wire::{EdgeId, ShortMessage};

impl<P: Port, C> Links<P, C> {
    /// Sends the record of a small tensor, if the link needs nothing else for it. Returns whether
    /// it did. [`Links::window_to_receiver`] sends any value.
    #[inline]
    pub fn send_short(&mut self, link: LinkId, record: Record<()>, tensor: &Tensor) -> bool {
        if self.batch.is_open {
            return false;
        }
        let Some(link) = self.links.get_mut(link) else { return false };
        link.send_short(&mut self.port, &self.counters, record, tensor)
    }

    /// Takes the value of a record without a poll, if the record is the next message and its tensor
    /// is small. The destination is taken with the tensor.
    #[inline]
    pub fn take_short(
        &mut self,
        link: LinkId,
        record: Record<()>,
        destination: &mut Option<Destination>,
    ) -> ShortTake<(Received, Placement)> {
        let Some(found) = self.links.get_mut(link).filter(|link| link.takes_short()) else {
            return ShortTake::Other;
        };
        let accept = |message: &_| found.receive_short(&self.pool, record, message, destination);
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
        let data = tensor.bytes();
        let is_small = data.len() <= SHORT_TENSOR.min(self.settings.small_tensor_bytes as usize);
        if !is_small || self.is_checked(edge) {
            return false;
        }
        let Some(meta) = self.windows.told.latest(tensor.meta(), placement_of(tensor)) else { return false };
        let Some(message) = (PlainRecord { edge, n, step, meta, data }).to_short() else { return false };
        if !self.out.short(port, &message) {
            return false;
        }
        counters.increment(Counter::TensorsSent);
        counters.add(Counter::BytesSent, data.len() as u64);
        counters.increment(Counter::SmallResponses);
        counters.increment(Counter::MessagesSent);
        true
    }

    /// Whether the receiver of an edge wants checksums.
    #[inline]
    fn is_checked(&self, edge: EdgeId) -> bool {
        self.windows.asked.get(edge.number as usize).is_none_or(|asked| asked.validate)
    }

    /// Whether the next message of the peer stands for itself.
    #[inline]
    fn takes_short(&self) -> bool {
        self.windows.before_loan.is_none() && self.assembler.is_idle() && !self.is_ended
    }

    #[inline]
    fn receive_short(
        &self,
        pool: &Pool,
        record: Record<()>,
        message: &ShortMessage,
        destination: &mut Option<Destination>,
    ) -> Option<(Received, Placement)> {
        let Record { edge, n, step, .. } = record;
        let meta = PlainRecord::meta_of_short(message, edge, n, step)?;
        let told = self.windows.known.get(meta).ok()?;
        let fits = |tensor: &mut TensorMut| {
            *tensor.meta() == told.meta && PlainRecord::copy_of_short(message, tensor.bytes_mut())
        };
        // A poll handles a value that does not fit, and a pool without room.
        if let Some(Destination::Into(given)) = destination {
            if !fits(given) {
                return None;
            }
            let Some(Destination::Into(given)) = destination.take() else { return None };
            return Some((Received::Into(given), told.sender));
        }
        destination.as_ref()?;
        if told.meta.bytes() > SHORT_TENSOR as u64 {
            return None;
        }
        let mut tensor = pool.landing(&told.meta).ok()?;
        if !PlainRecord::copy_of_short(message, tensor.bytes_mut()) {
            return None;
        }
        *destination = None;
        Some((Received::Tensor(tensor.freeze()), told.sender))
    }
}
