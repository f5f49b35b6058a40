//! Destinations that the peer may write to.

use super::{LandingRefused, WindowEvent};
use crate::fabric::{LinkLimits, Port, PostError};
use crate::link::Links;
use crate::link::links::{Link, LinkContext};
use crate::memory::TensorMut;
use crate::mutants::{Mutant, is_on};
use crate::protocol::Slab;
use crate::telemetry::Gauge;
use crate::wire::{EdgeId, Grant, Immediate, Slot, TaskId};

/// Whose tensor lands in a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LandingFor {
    /// That of the receive which has taken the offer.
    Receive,
    /// The next one of this edge.
    Edge(EdgeId),
}

/// The destinations that the peer may write to now.
#[derive(Debug, Default)]
pub(super) struct Landings {
    granted: Slab<(Grant, LandingFor)>,
    /// The generation of each place.
    generations: Vec<u8>,
}

impl Landings {
    /// Adds a grant; `None` if all places are taken.
    fn add(&mut self, grant: Grant, lands_for: LandingFor) -> Option<Immediate> {
        let place = self.granted.add((grant, lands_for));
        let Some(slot) = Slot::new(place) else {
            self.granted.remove(place);
            return None;
        };
        if self.generations.len() <= place as usize {
            self.generations.resize(place as usize + 1, 0);
        }
        let generation = &mut self.generations[place as usize];
        *generation = generation.wrapping_add(1);
        Some(Immediate { slot, generation: *generation })
    }

    fn take(&mut self, id: Immediate) -> Option<(Grant, LandingFor)> {
        let place = id.slot.index();
        let is_open = self.generations.get(place as usize) == Some(&id.generation);
        is_open.then(|| self.granted.remove(place)).flatten()
    }

    /// Bytes of all destinations.
    pub fn bytes(&self) -> u64 {
        self.granted.iter().map(|(_, (grant, _))| grant.len).sum()
    }

    /// Bytes of the destinations of offered tensors.
    fn offered(&self) -> u64 {
        self.for_receives().map(|grant| grant.len).sum()
    }

    /// Number of the destinations of offered tensors.
    #[cfg(any(test, feature = "sim"))]
    pub fn of_receives(&self) -> usize {
        self.for_receives().count()
    }

    fn for_receives(&self) -> impl Iterator<Item = &Grant> {
        let all = self.granted.iter().map(|(_, granted)| granted);
        all.filter(|(_, lands_for)| *lands_for == LandingFor::Receive).map(|(grant, _)| grant)
    }
}

impl<P: Port> Links<P> {
    /// The peer with the most bytes in destinations of tensors that it has offered and not written
    /// yet, if any has some.
    pub fn most_granted(&self) -> Option<(&TaskId, u64)> {
        let granted = self.links.iter().map(|link| (&link.identity.peer, link.windows.landings.offered()));
        granted.filter(|(_, bytes)| *bytes > 0).max_by_key(|(_, bytes)| *bytes)
    }
}

impl Link {
    /// Lets the peer write to a tensor.
    ///
    /// # Errors
    /// The reason with the tensor, if the peer can't.
    pub(super) fn grant<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        target: TensorMut,
        lands_for: LandingFor,
    ) -> Result<(Immediate, Grant), (LandingRefused, TensorMut)> {
        if !cx.port.reaches(self.id, &target) {
            return Err((LandingRefused::Unreachable, target));
        }
        let &LinkLimits { grants, max_grant, .. } = cx.port.limits(self.id);
        if target.meta().bytes() > max_grant {
            return Err((LandingRefused::TooLong { limit: max_grant }, target));
        }
        let full = LandingRefused::Full { limit: grants };
        let grant = cx.port.grant(self.id, target).map_err(|(why, target)| match why {
            PostError::Down => (LandingRefused::Down, target),
            PostError::Full | PostError::Refused(_) => (full, target),
        })?;
        let Some(immediate) = self.windows.landings.add(grant, lands_for) else {
            let target = cx.port.revoke(self.id, &grant);
            let target = target.unwrap_or_else(|| unreachable!("it was granted just now"));
            return Err((full, target));
        };
        cx.counters.raise(Gauge::GrantedBytes, grant.len);
        Ok((immediate, grant))
    }

    /// Ends a grant. Returns its tensor, and whose tensor it was granted for.
    ///
    /// # Errors
    /// If there is no such grant.
    pub(super) fn revoke<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        id: Immediate,
    ) -> Result<(TensorMut, LandingFor), String> {
        let Some((grant, lands_for)) = self.windows.landings.take(id) else {
            return Err(format!("a write came for landing {}, which is not granted", id.slot.index()));
        };
        cx.counters.lower(Gauge::GrantedBytes, grant.len);
        let Some(tensor) = cx.port.revoke(self.id, &grant) else {
            return Err("a granted destination is gone".into());
        };
        Ok((tensor, lands_for))
    }

    /// A write to a granted destination has landed.
    pub(in crate::link) fn on_written<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        immediate: Immediate,
        bytes: u64,
    ) -> Result<(), String> {
        let (tensor, lands_for) = self.revoke(cx, immediate)?;
        let granted = tensor.meta().bytes();
        if bytes != granted && !is_on(Mutant::PartLanded) {
            return Err(format!("a write of {bytes} bytes came for a tensor of {granted}"));
        }
        match lands_for {
            LandingFor::Receive => cx.windows.push_back((self.id, WindowEvent::Landed(immediate, tensor))),
            LandingFor::Edge(edge) => self.fill(edge, tensor),
        }
        Ok(())
    }
}
