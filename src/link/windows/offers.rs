//! Tensors that travel by themselves, on a fabric that lends nothing.
//!
//! The record of such a tensor offers it. When a receive takes the tensor, the receiver grants its
//! destination. The sender writes to it, with an immediate. So the destination is chosen late, and
//! nothing is copied.

use super::{LandingId, LandingRefused, WindowEvent};
use crate::fabric::{LinkId, Port, PostError};
use crate::link::Value;
use crate::link::links::{Link, LinkContext, Links};
use crate::memory::{Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::protocol::Slab;
use crate::telemetry::{Counter, Gauge};
use crate::wire::message::Message;
use crate::wire::{Grant, Immediate, Slot};

/// The destinations that the peer may write to now.
#[derive(Debug, Default)]
pub(super) struct Landings {
    grants: Slab<Grant>,
    /// The generation of each place.
    generations: Vec<u8>,
}

impl Landings {
    /// Adds a grant; `None` if all places are taken.
    fn add(&mut self, grant: Grant) -> Option<LandingId> {
        let place = self.grants.add(grant);
        let Some(slot) = Slot::new(place) else {
            self.grants.remove(place);
            return None;
        };
        if self.generations.len() <= place as usize {
            self.generations.resize(place as usize + 1, 0);
        }
        let generation = &mut self.generations[place as usize];
        *generation = generation.wrapping_add(1);
        Some(LandingId { slot, generation: *generation })
    }

    fn take(&mut self, id: LandingId) -> Option<Grant> {
        let place = id.slot.index();
        let is_open = self.generations.get(place as usize) == Some(&id.generation);
        is_open.then(|| self.grants.remove(place)).flatten()
    }

    /// Number of the open grants.
    #[cfg(any(test, feature = "sim"))]
    pub fn len(&self) -> usize {
        self.grants.iter().count()
    }
}

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
    ) -> Result<LandingId, (LandingRefused, TensorMut)> {
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
    ) -> Result<LandingId, (LandingRefused, TensorMut)> {
        if !cx.port.reaches(&target) {
            return Err((LandingRefused::Unreachable, target));
        }
        let full = LandingRefused::Full { limit: cx.port.limits(self.id).grants };
        let grant = cx.port.grant(self.id, target).map_err(|(why, target)| match why {
            PostError::Down => (LandingRefused::Down, target),
            PostError::Full | PostError::Refused(_) => (full, target),
        })?;
        let Some(landing) = self.windows.landings.add(grant) else {
            let target = cx.port.revoke(self.id, &grant);
            let target = target.unwrap_or_else(|| unreachable!("it was granted just now"));
            return Err((full, target));
        };
        cx.counters.raise(Gauge::GrantedBytes, grant.len);
        let immediate = Immediate { generation: landing.generation, slot: landing.slot };
        self.send(cx, &Message::Grant { offer, immediate, target: grant });
        Ok(landing)
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
        cx.counters.increment(Counter::WritesPosted);
        cx.counters.add(Counter::BytesSent, len);
        self.windows.writes += 1;
        self.out.write(cx.port, cx.counters, tensor, target, immediate);
        Ok(())
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
        cx.counters.lower(Gauge::GrantedBytes, landings.grants.iter().map(|(_, grant)| grant.len).sum());
    }

    /// Ends an offer that the peer has answered.
    fn end_offer(&mut self, offer: u32) -> Result<Tensor, String> {
        self.windows
            .offers
            .remove(offer)
            .ok_or_else(|| format!("it answers offer {offer}, which was not made or is answered"))
    }

    /// A write to a granted destination has landed.
    pub(in crate::link) fn on_written<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        immediate: Immediate,
        bytes: u64,
    ) -> Result<(), String> {
        let Immediate { generation, slot } = immediate;
        let id = LandingId { slot, generation };
        let Some(grant) = self.windows.landings.take(id) else {
            return Err(format!("a write came for landing {}, which is not granted", slot.index()));
        };
        if bytes != grant.len && !is_on(Mutant::PartLanded) {
            return Err(format!("a write of {bytes} bytes came for a tensor of {}", grant.len));
        }
        cx.counters.lower(Gauge::GrantedBytes, grant.len);
        let Some(tensor) = cx.port.revoke(self.id, &grant) else {
            return Err("a granted destination is gone".into());
        };
        cx.windows.push_back((self.id, WindowEvent::Landed(id, tensor)));
        Ok(())
    }
}
