//! The port: the links that one poller owns.

use super::link::TcpLinkInner;
use super::links::TcpPortLinks;
use super::sleeper::TcpSleeper;
use super::watcher::{Notifier, PortWatch, Watcher};
use super::{TcpShared, finish};
use crate::fabric::{
    Accept, Completions, FabricError, LinkFailure, LinkId, LinkLimits, LoanPermit, NextMessage, Port,
    PostError, ShortTake,
};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage};
use std::sync::Arc;

/// Links of a batch for which no memory is allocated.
const BATCH_LINKS: usize = 64;

/// A connected link that no port has yet. The drop closes it.
pub struct TcpLink {
    /// `None` once a port has it.
    link: Option<Box<TcpLinkInner>>,
    watcher: Arc<Watcher>,
}

impl TcpLink {
    pub(super) fn new(link: Box<TcpLinkInner>, watcher: Arc<Watcher>) -> Self {
        TcpLink { link: Some(link), watcher }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            finish(&self.watcher, link);
        }
    }
}

/// The links that one poller owns. See [`Port`].
///
/// A poll reads the connections of links with traffic. Quiet links are found by an epoll, which
/// some polls look at. A link that was detached, or never was this port's, behaves as one that is
/// down.
pub struct TcpPort {
    links: TcpPortLinks,
    watched: PortWatch,
    sleeper: TcpSleeper,
    /// Whether an event is to end the sleep of the port's sleepers.
    is_armed: bool,
    /// Whether a batch is open: frames leave at its end.
    is_batching: bool,
    /// The links that have a batch open.
    in_batch: Vec<LinkId>,
}

impl TcpPort {
    pub(super) fn new(shared: &TcpShared, notifier: Option<Notifier>) -> Result<Self, FabricError> {
        let sleeper = TcpSleeper::new();
        let own = sleeper.clone();
        let notifier = notifier.unwrap_or_else(|| Arc::new(move || own.notify()));
        let watched = shared.watcher.get()?.watch(notifier)?;
        Ok(TcpPort {
            links: TcpPortLinks::default(),
            watched,
            sleeper,
            is_armed: false,
            is_batching: false,
            in_batch: Vec::with_capacity(BATCH_LINKS),
        })
    }

    /// A link, for tests that break its connections.
    #[cfg(test)]
    pub(super) fn link_mut(&mut self, id: LinkId) -> &mut TcpLinkInner {
        self.links.get_mut(id).expect("its link")
    }

    /// Whether there is no link.
    #[inline]
    pub(in crate::fabric) fn is_vacant(&self) -> bool {
        self.links.count() == 0
    }

    /// Posts on a link. Opens its batch if the port has one open.
    #[inline]
    fn post<T>(
        &mut self,
        id: LinkId,
        post: impl FnOnce(&mut TcpLinkInner) -> Result<T, PostError>,
    ) -> Result<T, PostError> {
        let Some(link) = self.links.get_mut(id) else { return Err(PostError::Down) };
        if self.is_batching && !std::mem::replace(&mut link.out.in_batch, true) {
            self.in_batch.push(id);
        }
        let posted = post(link);
        let has_completion = link.has_completion();
        self.links.activate(id);
        if self.is_armed && has_completion {
            self.watched.notify();
        }
        posted
    }
}

impl Drop for TcpPort {
    fn drop(&mut self) {
        for link in self.links.drain() {
            finish(&self.watched.watcher, link);
        }
    }
}

impl Port for TcpPort {
    type Link = TcpLink;
    type Sleeper = TcpSleeper;

    fn sleeper(&self) -> TcpSleeper {
        self.sleeper.clone()
    }

    fn arm(&mut self) -> bool {
        self.is_armed = true;
        self.links.register(&self.watched);
        self.links.look(&self.watched);
        let is_quiet = !self.links.has_news();
        if is_quiet {
            self.watched.arm();
        }
        is_quiet
    }

    fn attach(&mut self, mut link: TcpLink) -> Result<LinkId, FabricError> {
        let Some(inner) = link.link.take() else { unreachable!("only this takes it") };
        inner.session.attached(&self.watched.repaired);
        let id = self.links.insert(inner).map_err(|(error, inner)| {
            link.link = Some(inner);
            error
        })?;
        if self.is_armed || self.links.count() > 1 {
            self.links.register(&self.watched);
        }
        if self.is_armed {
            self.watched.notify();
        }
        Ok(id)
    }

    fn begin_batch(&mut self) {
        self.is_batching = true;
    }

    fn end_batch(&mut self) {
        self.is_batching = false;
        let mut has_completion = false;
        while let Some(id) = self.in_batch.pop() {
            if let Some(link) = self.links.get_mut(id) {
                link.out.in_batch = false;
                link.pump();
                has_completion |= link.has_completion();
            }
        }
        if self.is_armed && has_completion {
            self.watched.notify();
        }
    }

    fn detach(&mut self, id: LinkId) {
        if let Some(link) = self.links.remove(id, &self.watched) {
            finish(&self.watched.watcher, link);
        }
    }

    fn fail(&mut self, id: LinkId, why: LinkFailure) {
        if let Some(link) = self.links.get_mut(id) {
            link.fail(why);
            self.links.activate(id);
            if self.is_armed {
                self.watched.notify();
            }
        }
    }

    fn limits(&self, link: LinkId) -> &LinkLimits {
        self.links.get(link).map_or(&LinkLimits::NONE, |link| &link.limits)
    }

    #[inline]
    fn poll(&mut self, completions: &mut Completions) -> usize {
        let before = completions.len();
        self.links.poll(&self.watched, completions);
        let count = completions.len() - before;
        if self.is_armed {
            if count > 0 {
                self.is_armed = false;
            } else if self.watched.has_fired() {
                // The event brought nothing for a poll, and has used up the arming.
                if !self.arm() {
                    self.watched.notify();
                }
            }
        }
        count
    }

    fn post_receives(&mut self, link: LinkId, count: u32) {
        if let Some(link) = self.links.get_mut(link) {
            link.receives = link.receives.saturating_add(count);
        }
    }

    fn publish_credits(&mut self, link: LinkId, returned: u32) {
        let _ = self.post(link, |link| {
            link.publish_credits(returned);
            Ok(())
        });
    }

    fn is_flushed(&mut self, link: LinkId) -> bool {
        self.links.get(link).is_none_or(TcpLinkInner::is_flushed)
    }

    fn peer_credits(&mut self, link: LinkId) -> u32 {
        self.links.get(link).map_or(0, |link| link.credits)
    }

    #[inline]
    fn send(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), PostError> {
        self.post(link, |link| link.send_message(bytes))
    }

    fn send_parts(&mut self, link: LinkId, parts: [&[u8]; 2]) -> Result<(), PostError> {
        self.post(link, |link| link.send_parts(parts))
    }

    #[inline]
    fn take_short<R>(&mut self, link: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        let Some(link) = self.links.get_active(link) else { return ShortTake::Other };
        let (taken, len, acknowledged) = match link.next_message() {
            None => return ShortTake::Other,
            Some(None) => return ShortTake::Nothing,
            Some(Some((message, acknowledged))) => {
                (accept.accept(NextMessage::Bytes(message)), message.len(), acknowledged)
            }
        };
        if taken.is_some() {
            link.take_message(len, acknowledged);
        }
        taken.into()
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
        let mut target = Some(target);
        let posted = self.post(link, |link| {
            let Some(tensor) = target.take() else { unreachable!("taken once") };
            link.read(tensor, source).map_err(|(error, back)| {
                target = Some(back);
                error
            })
        });
        posted.map_err(|error| match target {
            Some(target) => (error, target),
            None => unreachable!("a read that is refused gives its target back"),
        })
    }

    fn permit_loan(&mut self, _link: LinkId, _bytes: u64) -> Option<LoanPermit> {
        None
    }

    fn lend(
        &mut self,
        _link: LinkId,
        _source: &mut Option<Tensor>,
        _permit: &mut Option<LoanPermit>,
        _message: &ShortMessage,
    ) -> Result<(), PostError> {
        Err(PostError::Refused("this fabric does not lend: see the link's limits"))
    }

    fn grant(&mut self, link: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        match self.links.get_mut(link) {
            Some(link) => link.grant(target),
            None => Err((PostError::Down, target)),
        }
    }

    fn revoke(&mut self, link: LinkId, grant: &Grant) -> Option<TensorMut> {
        self.links.get_mut(link)?.grants.revoke(grant)
    }

    fn expose(&mut self, link: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        self.links.get_mut(link).ok_or(PostError::Down)?.expose(source)
    }

    fn withdraw(&mut self, link: LinkId, grant: &Grant) {
        if let Some(link) = self.links.get_mut(link) {
            link.grants.withdraw(grant);
        }
    }
}
