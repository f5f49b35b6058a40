//! Tensors that travel by themselves, on a fabric that lends nothing.
//!
//! The record of such a tensor offers it. When a receive takes the tensor, the receiver grants its
//! destination. The sender writes to it, with an immediate. So the destination is chosen late, and
//! nothing is copied.

use super::landings::LandingFor;
use super::{LandingRefused, WindowEvent};
use crate::fabric::{LinkId, Port};
use crate::link::Value;
use crate::link::links::{Link, LinkContext, Links};
use crate::memory::{Tensor, TensorMut};
use crate::telemetry::{Counter, Gauge};
use crate::wire::message::Message;
use crate::wire::{Grant, Immediate};

impl<P: Port> Links<P> {
    /// Grants the destination of an offered tensor. The offer ends. The tensor comes back with
    /// [`WindowEvent::Landed`].
    ///
    /// # Errors
    /// The reason with the destination, if the peer can't write to it. The offer stays then.
    pub fn land(
        &mut self,
        link: LinkId,
        offer: u32,
        target: TensorMut,
    ) -> Result<Immediate, (LandingRefused, TensorMut)> {
        let Some((found, mut cx)) = self.with(link) else { return Err((LandingRefused::Down, target)) };
        let landing = found.land(&mut cx, offer, target);
        self.links.note_backlog(link);
        landing
    }

    /// Whether the record of a value would offer its tensor.
    pub fn offers(&mut self, link: LinkId, value: &Value) -> bool {
        self.with(link).is_some_and(|(found, cx)| found.offers(&cx, value))
    }

    /// Ends the offer of a tensor that no receive takes.
    pub fn decline(&mut self, link: LinkId, offer: u32) {
        if let Some((found, mut cx)) = self.with(link) {
            found.send(&mut cx, &Message::Decline { offer });
            self.links.note_backlog(link);
        }
    }
}

impl Link {
    fn land<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        offer: u32,
        target: TensorMut,
    ) -> Result<Immediate, (LandingRefused, TensorMut)> {
        let (immediate, target) = self.grant(cx, target, LandingFor::Receive)?;
        self.send(cx, &Message::Grant { offer, immediate, target });
        Ok(immediate)
    }

    /// Keeps a tensor until the peer has granted its destination. Returns its name.
    pub(super) fn offer(&mut self, tensor: Tensor) -> u32 {
        self.windows.offers.add(tensor)
    }

    /// The peer grants the destination of an offered tensor.
    pub(super) fn on_grant<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        offer: u32,
        immediate: Immediate,
        target: Grant,
    ) -> Result<(), String> {
        let tensor = self.end_offer(offer)?;
        let len = tensor.bytes().len() as u64;
        if target.len != len {
            return Err(format!("a destination of {} bytes came for a tensor of {len}", target.len));
        }
        self.write_tensor(cx, tensor, target, immediate);
        Ok(())
    }

    /// Writes a tensor to a destination of the peer. [`WindowEvent::Sent`] follows.
    pub(super) fn write_tensor<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        tensor: Tensor,
        target: Grant,
        immediate: Immediate,
    ) {
        cx.counters.increment(Counter::WritesPosted);
        cx.counters.add(Counter::BytesSent, target.len);
        self.windows.writes += 1;
        self.out.write(cx.port, cx.counters, tensor, target, immediate);
    }

    /// The peer declines an offered tensor.
    pub(super) fn on_decline<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        offer: u32,
    ) -> Result<(), String> {
        drop(self.end_offer(offer)?);
        cx.windows.push_back((self.id, WindowEvent::Sent));
        Ok(())
    }

    /// An operation with a tensor has completed or failed.
    pub(in crate::link) fn post_ended<P: Port>(&mut self, cx: &mut LinkContext<'_, P>) {
        // A fabric that lends writes no tensor.
        if self.windows.writes > 0 {
            self.windows.writes -= 1;
            cx.windows.push_back((self.id, WindowEvent::Sent));
        }
    }

    /// The link is down: no tensor leaves any more, and none comes.
    pub(in crate::link) fn end_transfers<P: Port>(&mut self, cx: &mut LinkContext<'_, P>) {
        let offers = std::mem::take(&mut self.windows.offers);
        let count = offers.iter().count() + std::mem::take(&mut self.windows.writes);
        cx.windows.extend((0..count).map(|_| (self.id, WindowEvent::Sent)));
        let landings = std::mem::take(&mut self.windows.landings);
        cx.counters.lower(Gauge::GrantedBytes, landings.bytes());
    }

    /// Ends an offer that the peer has answered.
    fn end_offer(&mut self, offer: u32) -> Result<Tensor, String> {
        self.windows
            .offers
            .remove(offer)
            .ok_or_else(|| format!("it answers offer {offer}, which was not made or is answered"))
    }
}
