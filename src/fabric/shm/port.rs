//! The port: the links that one poller owns.

use super::ShmContext;
use crate::fabric::shm::link::ShmLinkInner;
use crate::fabric::shm::links::PortLinks;
use crate::fabric::shm::wakeup::doorbells::OwnDoorbell;
use crate::fabric::shm::wakeup::sleeper::ShmSleeper;
use crate::fabric::{
    Accept, Completions, FabricError, LinkFailure, LinkId, LinkLimits, LoanPermit, Port, PostError, ShortTake,
};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage, UnreadMessage};
use std::sync::Arc;

/// Polls between two sweeps of orphaned loans.
const SWEEP_EVERY: u32 = 1024;

/// A connected link that no port has yet. The drop closes it.
pub struct ShmLink(pub(super) Box<ShmLinkInner>);

/// The links that one poller owns, 4096 at most. See [`Port`].
///
/// A poll costs as much as there are active links. A link becomes idle if it had no traffic during
/// 65,536 polls of links (some 300 us) and at least 7 others become idle too. The peer of an idle
/// link rings the port's doorbell, and a poll reads one cache line for all idle links.
///
/// A link that was detached, or never was this port's, behaves as one that is down.
pub struct ShmPort {
    shared: Arc<ShmContext>,
    pub(super) links: PortLinks,
    doorbell: Arc<OwnDoorbell>,
    /// Whether a batch is open: peers are rung at its end.
    is_batching: bool,
    /// The links that have a batch open.
    in_batch: Vec<LinkId>,
}

/// Links of a batch for which no memory is allocated.
const BATCH_LINKS: usize = 64;

impl ShmPort {
    pub(super) fn new(shared: Arc<ShmContext>) -> Result<Self, FabricError> {
        let doorbell = shared.doorbells.take()?;
        if !shared.has_barriers {
            doorbell.set_barriers_unsupported();
        }
        let (links, in_batch) = (PortLinks::new(Arc::clone(&doorbell)), Vec::with_capacity(BATCH_LINKS));
        Ok(ShmPort { shared, links, doorbell, is_batching: false, in_batch })
    }

    /// Whether a poll looks at some links.
    #[inline]
    pub(in crate::fabric) fn has_active_links(&self) -> bool {
        self.links.has_active()
    }

    /// The link with this id. Opens its batch if the port has one open.
    #[inline(always)] // on the short path
    fn link(&mut self, id: LinkId) -> Option<&mut ShmLinkInner> {
        let link = self.links.get_mut(id)?;
        if self.is_batching && link.rings.begin_batch() {
            self.in_batch.push(id);
        }
        Some(link)
    }

    /// Posts on a link. If the link fails, the next poll reports it.
    #[inline]
    fn post<T>(
        &mut self,
        id: LinkId,
        post: impl FnOnce(&mut ShmLinkInner) -> Result<T, PostError>,
    ) -> Result<T, PostError> {
        let Some(link) = self.link(id) else { return Err(PostError::Down) };
        let posted = post(link);
        if let Err(PostError::Down) = posted {
            self.links.activate_if_news(id);
        }
        posted
    }
}

impl Drop for ShmPort {
    /// Lets the watcher end with the links that need it. Links of a later port start another.
    fn drop(&mut self) {
        self.shared.watcher.release();
    }
}

impl Port for ShmPort {
    type Link = ShmLink;
    type Sleeper = ShmSleeper;

    fn sleeper(&self) -> ShmSleeper {
        ShmSleeper::new(Arc::clone(&self.doorbell))
    }

    fn arm(&mut self) -> bool {
        self.shared.orphans.sweep();
        self.links.arm()
    }

    fn attach(&mut self, link: ShmLink) -> Result<LinkId, FabricError> {
        self.links.insert(link.0)
    }

    fn begin_batch(&mut self) {
        self.is_batching = true;
    }

    fn end_batch(&mut self) {
        self.is_batching = false;
        while let Some(id) = self.in_batch.pop() {
            if let Some(link) = self.links.get_mut(id) {
                link.rings.end_batch();
            }
        }
    }

    fn doorbells(&self) -> u64 {
        self.doorbell.rings()
    }

    fn detach(&mut self, link: LinkId) {
        drop(self.links.remove(link));
        self.shared.orphans.sweep();
    }

    fn fail(&mut self, id: LinkId, why: LinkFailure) {
        if let Some(link) = self.links.get_mut(id) {
            link.fail(why);
            self.links.activate_if_news(id);
        }
    }

    fn limits(&self, link: LinkId) -> &LinkLimits {
        self.links.get(link).map_or(&LinkLimits::NONE, |link| &link.limits)
    }

    #[inline]
    fn poll(&mut self, completions: &mut Completions) -> usize {
        let before = completions.len();
        self.links.poll(completions);
        if self.links.polls().is_multiple_of(SWEEP_EVERY) {
            self.shared.orphans.sweep();
        }
        completions.len() - before
    }

    fn post_receives(&mut self, link: LinkId, count: u32) {
        if let Some(link) = self.links.get_mut(link) {
            link.post_receives(count);
        }
    }

    fn publish_credits(&mut self, link: LinkId, returned: u32) {
        if let Some(link) = self.link(link) {
            link.publish_credits(returned);
        }
    }

    fn peer_credits(&mut self, link: LinkId) -> u32 {
        self.links.get(link).map_or(0, |link| link.peer_credits())
    }

    #[inline]
    fn send(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), PostError> {
        self.post(link, |link| link.send(bytes))
    }

    #[inline]
    fn has_slots(&self, _link: LinkId) -> bool {
        true
    }

    #[inline(always)] // on the short path
    fn send_short(
        &mut self,
        link: LinkId,
        message: &UnreadMessage<impl Fn(usize) -> u64>,
    ) -> Result<(), PostError> {
        // Not by `post`: the compiler would not inline its closure.
        let Some(found) = self.link(link) else { return Err(PostError::Down) };
        let posted = found.send_short(message);
        if let Err(PostError::Down) = posted {
            self.links.activate_if_news(link);
        }
        posted
    }

    #[inline(always)] // on the short path
    fn take_short<R>(&mut self, link: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        let Some(link) = self.links.get_active(link) else { return ShortTake::Other };
        link.take_short(accept)
    }

    #[inline]
    fn write_inline(
        &mut self,
        link: LinkId,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        self.post(link, |link| link.write_inline(bytes, target, immediate))
    }

    fn write(
        &mut self,
        link: LinkId,
        source: &Tensor,
        len: u64,
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        self.post(link, |link| link.write(source, len, target, immediate))
    }

    fn read(
        &mut self,
        link: LinkId,
        target: TensorMut,
        source: &Grant,
    ) -> Result<(), (PostError, TensorMut)> {
        let posted = match self.link(link) {
            Some(link) => link.read(target, source),
            None => Err((PostError::Down, target)),
        };
        if let Err((PostError::Down, _)) = posted {
            self.links.activate_if_news(link);
        }
        posted
    }

    #[inline]
    fn permit_loan(&mut self, link: LinkId, bytes: u64) -> Option<LoanPermit> {
        let limiter = &self.shared.limiter;
        let link = self.links.get_mut(link)?;
        limiter.permit_after(link.spare_permit.take(), bytes).or_else(|| {
            // The loans that came back make room.
            limiter.permit_after(link.release_returned(), bytes)
        })
    }

    #[inline]
    fn lend(
        &mut self,
        link: LinkId,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> Result<(), PostError> {
        self.post(link, |link| link.lend(source, permit, message))
    }

    fn grant(&mut self, link: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        match self.links.get_mut(link) {
            Some(link) => link.grant(target),
            None => Err((PostError::Down, target)),
        }
    }

    fn revoke(&mut self, link: LinkId, grant: &Grant) -> Option<TensorMut> {
        self.links.get_mut(link)?.executor.grants.revoke(grant)
    }

    fn expose(&mut self, link: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        self.post(link, |link| link.expose(source))
    }

    fn withdraw(&mut self, link: LinkId, grant: &Grant) {
        if let Some(link) = self.links.get_mut(link) {
            link.executor.grants.withdraw(grant);
        }
    }
}
