//! The links that one poller owns.

use super::Shared;
use super::link::Link;
use crate::fabric::{
    Completions, FabricError, Lane, LinkFailure, LinkId, LinkLimits, OpId, Port, PostError, Sleep, Sleeper,
};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Immediate};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Polls between two looks at loans that outlived their links.
const SWEEP_EVERY: u32 = 1024;

/// How long a sleeper naps.
const NAP: Duration = Duration::from_micros(100);

/// What a link that is not there can do.
static NOTHING: LinkLimits = LinkLimits { lanes: 0, depth: 0, max_inline: 0, lends: false };

/// A connected link that no port has yet. Dropping it closes it.
pub struct ShmLink(pub(super) Box<Link>);

/// The links that one poller owns. See [`Port`].
///
/// A link that was detached, or never was this port's, is treated as one that is down.
pub struct ShmPort {
    shared: Arc<Shared>,
    /// The link with id `i` is in place `i % links.len()`, a power of two.
    links: Vec<Option<Box<Link>>>,
    next: u32,
    polls: u32,
}

impl ShmPort {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        ShmPort { shared, links: vec![None], next: 0, polls: 0 }
    }

    fn place(&self, id: LinkId) -> usize {
        id.0 as usize & (self.links.len() - 1)
    }

    fn link(&self, id: LinkId) -> Option<&Link> {
        self.links[self.place(id)].as_deref().filter(|link| link.id == id)
    }

    #[inline]
    fn link_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        let place = self.place(id);
        self.links[place].as_deref_mut().filter(|link| link.id == id)
    }

    fn post(&mut self, id: LinkId) -> Result<&mut Link, PostError> {
        self.link_mut(id).ok_or(PostError::Down)
    }

    /// Doubles the table. Ids that differ in a small table differ in a larger one.
    fn grow(&mut self) {
        let mut larger: Vec<Option<Box<Link>>> = Vec::new();
        larger.resize_with(self.links.len() * 2, || None);
        let mask = larger.len() - 1;
        for link in self.links.drain(..).flatten() {
            let place = link.id.0 as usize & mask;
            larger[place] = Some(link);
        }
        self.links = larger;
    }
}

/// Sleeps in naps, until the fabric has a doorbell.
#[derive(Clone, Debug)]
pub struct ShmSleeper;

impl Sleeper for ShmSleeper {
    fn seen(&self) -> u32 {
        0
    }

    fn sleep(&self, _who: Sleep, _seen: u32, timeout: Duration) {
        std::thread::sleep(timeout.min(NAP));
    }

    fn wake(&self, _who: Sleep) {}
}

impl Drop for ShmPort {
    /// The watcher ends with the links that need it; a later port's links start another.
    fn drop(&mut self) {
        *self.shared.watcher.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Port for ShmPort {
    type Link = ShmLink;
    type Sleeper = ShmSleeper;

    fn sleeper(&self) -> ShmSleeper {
        ShmSleeper
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn attach(&mut self, link: ShmLink) -> Result<LinkId, FabricError> {
        if self.links.iter().all(Option::is_some) {
            self.grow();
        }
        // Ids only grow; those whose place is taken are passed over.
        while self.links[self.place(LinkId(self.next))].is_some() {
            self.next += 1;
        }
        let id = LinkId(self.next);
        self.next += 1;
        let place = self.place(id);
        let mut link = link.0;
        link.attach(id);
        self.links[place] = Some(link);
        Ok(id)
    }

    fn detach(&mut self, link: LinkId) {
        if self.link(link).is_some() {
            let place = self.place(link);
            self.links[place] = None;
        }
        self.shared.limbo.sweep();
    }

    fn fail(&mut self, link: LinkId, why: LinkFailure) {
        if let Some(link) = self.link_mut(link) {
            link.fail(why);
        }
    }

    fn limits(&self, link: LinkId) -> &LinkLimits {
        self.link(link).map_or(&NOTHING, |link| &link.limits)
    }

    #[inline]
    fn poll(&mut self, completions: &mut Completions) -> usize {
        let before = completions.len();
        for link in self.links.iter_mut().flatten() {
            link.poll(completions);
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(SWEEP_EVERY) {
            self.shared.limbo.sweep();
        }
        completions.len() - before
    }

    fn post_receives(&mut self, link: LinkId, lane: Lane, count: u32) {
        if let Some(link) = self.link_mut(link) {
            link.post_receives(lane, count);
        }
    }

    fn publish_credits(&mut self, link: LinkId, lane: Lane, returned: u32) {
        if let Some(link) = self.link_mut(link) {
            link.publish_credits(lane, returned);
        }
    }

    fn peer_credits(&mut self, link: LinkId, lane: Lane) -> u32 {
        self.link(link).map_or(0, |link| link.peer_credits(lane))
    }

    #[inline]
    fn send(&mut self, link: LinkId, lane: Lane, bytes: &[u8]) -> Result<(), PostError> {
        self.post(link)?.send(lane, bytes)
    }

    #[inline]
    fn write_inline(
        &mut self,
        link: LinkId,
        lane: Lane,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        self.post(link)?.write_inline(lane, bytes, target, immediate)
    }

    fn write(
        &mut self,
        link: LinkId,
        lane: Lane,
        id: OpId,
        source: &Tensor,
        skip: u64,
        len: u64,
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        self.post(link)?.write(lane, id, source, skip, len, target, immediate)
    }

    fn read(
        &mut self,
        link: LinkId,
        lane: Lane,
        id: OpId,
        target: TensorMut,
        source: &Grant,
    ) -> Result<(), (PostError, TensorMut)> {
        match self.link_mut(link) {
            Some(link) => link.read(lane, id, target, source),
            None => Err((PostError::Down, target)),
        }
    }

    fn lend(
        &mut self,
        link: LinkId,
        lane: Lane,
        id: OpId,
        source: &Tensor,
        immediate: Immediate,
    ) -> Result<(), PostError> {
        self.post(link)?.lend(lane, id, source, immediate)
    }

    fn grant(&mut self, link: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        match self.link_mut(link) {
            Some(link) => link.grant(target),
            None => Err((PostError::Down, target)),
        }
    }

    fn revoke(&mut self, link: LinkId, grant: &Grant) -> Option<TensorMut> {
        self.link_mut(link)?.incoming.grants.revoke(grant)
    }

    fn expose(&mut self, link: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        self.post(link)?.expose(source)
    }

    fn withdraw(&mut self, link: LinkId, grant: &Grant) {
        if let Some(link) = self.link_mut(link) {
            link.incoming.grants.withdraw(grant);
        }
    }
}
