//! The links that one poller owns.

use super::VerbsShared;
use super::cq::CompletionQueue;
use super::data_queue::{PostedOp, RemoteAddr};
use super::link::VerbsLinkInner;
use super::options::refuse;
use super::port_resources::PortResources;
use super::rails::LinkDevices;
use super::sleeper::VerbsSleeper;
use super::stripes::AnnouncedLength;
use super::sys::ibv_wc;
use crate::fabric::{
    Accept, Completions, FabricError, LinkFailure, LinkId, LinkLimits, LoanPermit, MAX_MESSAGE, Port,
    PostError, ShortTake,
};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage};
use std::sync::Arc;

/// Completions that one poll takes out of a queue.
const BATCH: usize = 64;
/// Looks for a message of one call, each a poll of one completion queue for one entry. Together
/// they take about as long as a poll of all links. A message that a poll finds takes longer.
const LOOKS: usize = 8;
/// How often one poll of an armed port arms it again after completions that bring no event. A peer
/// may cause such completions without end.
const ROUNDS: usize = 4;
/// How long, in ticks of 100 ms, a port that ends gives its links to say so. Those that lose a rail
/// do that first.
const DISCONNECT_TICKS: u32 = 10;

/// A connected link that no port has yet. Dropping it ends it; the peer learns that from its next
/// operation.
pub struct VerbsLink(pub(super) Box<VerbsLinkInner>);

impl VerbsLink {
    /// This side's devices on the rails of the link, also after it was attached.
    pub fn devices(&self) -> Arc<LinkDevices> {
        Arc::clone(&self.0.devices)
    }
}

/// The links that one poller owns. See [`Port`].
///
/// A poll reads completions of the port's queues: several, if the links need more places than one
/// has. A detached link lives for up to two seconds, until its posted requests have arrived and the
/// peer knows of the end.
pub struct VerbsPort {
    pub(super) shared: Arc<VerbsShared>,
    pub(super) resources: Arc<PortResources>,
    // In the order of their numbers. Dropped before the queues.
    #[allow(clippy::vec_box)] // a link is large, and inserting and removing moves those behind it
    links: Vec<Box<VerbsLinkInner>>,
    queues: Vec<Arc<CompletionQueue>>,
    /// Completions that arming or a wait has found, for the next poll.
    pub(super) pending: Vec<ibv_wc>,
    /// Where a poll puts completions: kept, as clearing it costs more than an empty poll.
    pub(super) batch: Box<[ibv_wc]>,
    /// Completions of detached links, which make no events.
    discarded: Completions,
    armed: bool,
    /// Some link may want a look.
    pub(super) needs_service: bool,
    /// The number of asynchronous news that were looked at.
    news: u32,
    /// Whether posts may wait for the end of a batch.
    in_batch: bool,
    /// Links of which something may.
    batched: Vec<LinkId>,
}

impl VerbsPort {
    pub(super) fn new(shared: Arc<VerbsShared>) -> Result<Self, FabricError> {
        let resources = shared.ports.next(&shared.watcher)?;
        let news = shared.watcher.news();
        Ok(VerbsPort {
            shared,
            resources,
            links: Vec::new(),
            queues: Vec::new(),
            pending: Vec::with_capacity(BATCH),
            batch: vec![ibv_wc::default(); BATCH].into_boxed_slice(),
            discarded: Completions::default(),
            armed: false,
            needs_service: false,
            news,
            in_batch: false,
            batched: Vec::with_capacity(BATCH),
        })
    }

    /// Whether there is no link, not even a detached one that still has to tell its peer.
    pub(in crate::fabric) fn is_vacant(&self) -> bool {
        self.links.is_empty()
    }

    #[inline]
    fn place(&self, id: LinkId) -> Option<usize> {
        self.links.binary_search_by_key(&id, |link| link.id).ok()
    }

    /// A link that its owner has not let go.
    #[inline]
    pub(super) fn link(&mut self, id: LinkId) -> Option<&mut VerbsLinkInner> {
        let place = self.place(id)?;
        Some(&mut *self.links[place]).filter(|link| link.detached_at.is_none())
    }

    /// A link to post on.
    #[inline]
    pub(super) fn usable(&mut self, id: LinkId) -> Result<&mut VerbsLinkInner, PostError> {
        let place = self.place(id).ok_or(PostError::Down)?;
        let link = &mut *self.links[place];
        if link.detached_at.is_some() {
            return Err(PostError::Down);
        }
        if self.in_batch && link.begin_batch() {
            self.batched.push(id);
        }
        if link.is_up() { Ok(link) } else { Err(PostError::Down) }
    }

    #[inline]
    fn dispatch(&mut self, wc: &ibv_wc, out: &mut Completions) {
        let id = LinkId((wc.wr_id >> 32) as u32);
        let Some(place) = self.place(id) else { return self.resources.keep(id, wc) };
        let link = &mut self.links[place];
        if link.detached_at.is_none() {
            link.complete(wc, out);
        } else {
            link.complete(wc, &mut self.discarded);
        }
        self.needs_service |= link.needs_service();
    }

    /// Reads a bounded number of completions. Returns whether there were any, and whether the
    /// queues are empty.
    #[inline]
    fn drain(&mut self, out: &mut Completions) -> (bool, bool) {
        let (mut came, mut emptied) = (false, true);
        if !self.pending.is_empty() {
            came = true;
            self.unpack(out);
        }
        self.resources.adopt(&mut self.queues);
        for at in 0..self.queues.len() {
            match self.queues[at].poll(&mut self.batch) {
                Ok(0) => {}
                Ok(count) => {
                    came = true;
                    emptied &= count < BATCH;
                    for k in 0..count {
                        let wc = self.batch[k];
                        self.dispatch(&wc, out);
                    }
                }
                Err(()) => self.broken(&Arc::clone(&self.queues[at])),
            }
        }
        (came, emptied)
    }

    /// Handles completions that were read before.
    fn unpack(&mut self, out: &mut Completions) {
        let mut pending = std::mem::take(&mut self.pending);
        for wc in pending.drain(..) {
            self.dispatch(&wc, out);
        }
        self.pending = pending;
    }

    #[cold]
    pub(super) fn broken(&mut self, queue: &Arc<CompletionQueue>) {
        self.needs_service = true;
        for link in &mut self.links {
            link.broken(queue, "a completion queue can't be polled");
        }
    }

    /// Services links that need more than completions.
    #[inline]
    fn service(&mut self, emptied: bool, out: &mut Completions) {
        let news = self.shared.watcher.news();
        let events = news != self.news;
        if events || self.needs_service {
            self.news = news;
            self.service_links(emptied, events, out);
        }
    }

    fn service_links(&mut self, emptied: bool, events: bool, out: &mut Completions) {
        let discarded = &mut self.discarded;
        self.links.retain_mut(|link| {
            if !events && !link.needs_service() {
                return true;
            }
            let out = if link.detached_at.is_none() { &mut *out } else { &mut *discarded };
            !link.service(emptied, events, out)
        });
        self.needs_service = self.links.iter().any(|link| link.needs_service());
        self.discarded.clear();
    }

    /// Tells a link why a request was not posted.
    #[cold]
    pub(super) fn note_refusal(&mut self, id: LinkId, why: PostError) {
        let Some(link) = self.link(id) else { return };
        match why {
            PostError::Full => link.make_room(),
            PostError::Down => {
                link.refused(link.main.number());
                self.needs_service = true;
            }
            PostError::Refused(_) => {}
        }
    }

    /// Whether so many bytes of a source can be written.
    #[inline]
    fn check_source(source: &Tensor, len: u64) -> Result<(), PostError> {
        match len > source.bytes().len() as u64 {
            true => Err(PostError::Refused("the source has fewer bytes")),
            false => Ok(()),
        }
    }

    /// The remote address and rkey of `len` bytes of a grant. An access that the peer cannot have
    /// granted gets values that the peer's device refuses.
    #[inline]
    fn remote(link: &VerbsLinkInner, grant: &Grant, len: u64) -> RemoteAddr {
        let region = &link.peer.region;
        if len == 0 {
            return RemoteAddr { addr: region.base, rkey: region.rkey };
        }
        let addr = region.base.wrapping_add(grant.offset);
        // A key that is not the pool's gives no right to its addresses.
        let rkey = match grant.region == region.id {
            true if grant.key == region.rkey || link.former_keys.is_empty() => grant.key,
            true => link.current_key(grant.key),
            false => !region.rkey,
        };
        RemoteAddr { addr, rkey }
    }
}

impl Drop for VerbsPort {
    /// Gives the links a moment to tell their peers.
    fn drop(&mut self) {
        let start = self.shared.watcher.ticks();
        for link in &mut self.links {
            link.detached_at.get_or_insert(start);
        }
        self.needs_service = true;
        let mut discarded = Completions::default();
        loop {
            let ticks = self.shared.watcher.ticks().wrapping_sub(start);
            if !self.links.iter().any(|link| ticks < DISCONNECT_TICKS || link.has_time(DISCONNECT_TICKS)) {
                return;
            }
            let (came, emptied) = self.drain(&mut discarded);
            self.service(emptied, &mut discarded);
            discarded.clear();
            if !came {
                std::thread::yield_now();
            }
        }
    }
}

impl Port for VerbsPort {
    type Link = VerbsLink;
    type Sleeper = VerbsSleeper;

    fn sleeper(&self) -> VerbsSleeper {
        VerbsSleeper { port: Arc::clone(&self.resources.wakeup) }
    }

    fn arm(&mut self) -> bool {
        for queue in &self.queues {
            queue.arm();
        }
        self.armed = true;
        // Completions from before the arming make no event.
        if self.pending.is_empty() {
            for queue in &self.queues {
                let count = queue.poll(&mut self.batch[..BATCH - self.pending.len()]).unwrap_or(0);
                self.pending.extend_from_slice(&self.batch[..count]);
                if self.pending.len() == BATCH {
                    break;
                }
            }
        }
        self.pending.is_empty()
            && self.news == self.shared.watcher.news()
            && !(self.needs_service && self.links.iter().any(|link| link.has_news()))
    }

    fn attach(&mut self, link: VerbsLink) -> Result<LinkId, FabricError> {
        let link = link.0;
        if !Arc::ptr_eq(&link.resources, &self.resources) {
            let allowed = "a link is attached to the port of the number that its endpoint was made for";
            return Err(refuse("port", self.resources.number as u64, allowed));
        }
        self.resources.adopt(&mut self.queues);
        let id = link.id;
        // The next poll delivers earlier completions of the link, and handles earlier events.
        self.pending.splice(0..0, link.awaited.came());
        self.news = self.shared.watcher.news().wrapping_sub(1);
        let place = self.links.partition_point(|other| other.id < id);
        self.links.insert(place, link);
        // An armed port heeds it too.
        self.queues.iter().filter(|_| self.armed).for_each(|queue| queue.arm());
        Ok(id)
    }

    fn begin_batch(&mut self) {
        self.in_batch = true;
    }

    fn end_batch(&mut self) {
        self.in_batch = false;
        while let Some(id) = self.batched.pop() {
            if let Some(link) = self.link(id) {
                link.end_batch();
                let needs_service = link.needs_service();
                self.needs_service |= needs_service;
            }
        }
    }

    fn doorbells(&self) -> u64 {
        self.queues.iter().map(|queue| queue.posts()).sum()
    }

    fn detach(&mut self, id: LinkId) {
        let ticks = self.shared.watcher.ticks();
        self.needs_service = true;
        if let Some(link) = self.link(id) {
            link.end_batch();
            link.detached_at = Some(ticks);
            let mut discarded = Completions::default();
            if link.service(false, true, &mut discarded)
                && let Some(place) = self.place(id)
            {
                self.links.remove(place);
            }
        }
    }

    fn fail(&mut self, id: LinkId, why: LinkFailure) {
        self.needs_service = true;
        if let Some(link) = self.link(id) {
            link.fail(why);
        }
    }

    fn limits(&self, id: LinkId) -> &LinkLimits {
        match self.place(id) {
            Some(place) if self.links[place].detached_at.is_none() => &self.links[place].limits,
            _ => &LinkLimits::NONE,
        }
    }

    fn poll(&mut self, out: &mut Completions) -> usize {
        let before = out.len();
        for _ in 0..ROUNDS {
            let (came, emptied) = self.drain(out);
            self.service(emptied, out);
            if out.len() > before {
                self.armed = false;
                break;
            }
            if !(came && self.armed) {
                break;
            }
            // The completion makes no event for a poll, and has used up the arming.
            self.queues.iter().for_each(|queue| queue.arm());
        }
        out.len() - before
    }

    fn post_receives(&mut self, id: LinkId, count: u32) {
        if let Some(link) = self.link(id) {
            link.main.allow_receives(count);
            link.main.refill(&link.local, false);
        }
    }

    fn publish_credits(&mut self, id: LinkId, returned: u32) {
        if let Some(link) = self.link(id) {
            link.publish_credits(returned);
            let needs_service = link.needs_service();
            self.needs_service |= needs_service;
        }
    }

    fn is_flushed(&mut self, id: LinkId) -> bool {
        self.link(id).is_none_or(VerbsLinkInner::is_flushed)
    }

    fn peer_credits(&mut self, id: LinkId) -> u32 {
        self.link(id).map_or(0, |link| link.main.returned)
    }

    #[inline]
    fn take_short<R>(&mut self, id: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        let Some(place) = self.place(id).filter(|_| !self.armed) else { return ShortTake::Other };
        let link = &mut *self.links[place];
        if !link.is_up() {
            return ShortTake::Other;
        }
        if let Some(first) = self.pending.first() {
            let taken = link.take_message(first, accept);
            if taken.is_some() {
                self.pending.remove(0);
            }
            return taken.into();
        }
        let queue = &link.places.queue;
        match (0..LOOKS).map(|_| queue.poll(&mut self.batch[..1])).find(|found| *found != Ok(0)) {
            None => ShortTake::Nothing,
            Some(Ok(_)) => {
                let taken = link.take_message(&self.batch[0], accept);
                if taken.is_none() {
                    // For the next poll.
                    self.pending.push(self.batch[0]);
                }
                taken.into()
            }
            Some(Err(())) => ShortTake::Other,
        }
    }

    #[inline]
    fn send(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), PostError> {
        if bytes.len() > MAX_MESSAGE {
            return Err(PostError::Refused("a message has at most 224 bytes"));
        }
        let link = self.usable(id)?;
        let posted = link.main.post_copied(&mut link.local, bytes, None, None);
        posted.inspect_err(|error| self.note_refusal(id, *error))
    }

    #[inline]
    fn write_inline(
        &mut self,
        id: LinkId,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let len = bytes.len() as u64;
        let link = self.usable(id)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(PostError::Refused("more bytes than can be written inline: see the link's limits"));
        }
        if len > target.len {
            return Err(PostError::Refused("the grant is for fewer bytes"));
        }
        let remote = Some(Self::remote(link, target, len));
        let posted = link.main.post_copied(&mut link.local, bytes, remote, immediate);
        posted.inspect_err(|error| self.note_refusal(id, *error))
    }

    fn write(
        &mut self,
        id: LinkId,
        source: &Tensor,
        len: u64,
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        if len > target.len {
            return Err(PostError::Refused("the grant is for fewer bytes"));
        }
        Self::check_source(source, len)?;
        let longest = self.shared.max_message;
        let link = self.usable(id)?;
        let remote = Self::remote(link, target, len);
        let bytes = link.source(source, len)?;
        let op = PostedOp::Write(source.clone());
        let posted = match immediate {
            Some(immediate) if link.stripes.takes(len) && remote.rkey == link.peer.region.rkey => {
                let posted = link.write_striped(source, bytes, remote, immediate, op);
                let needs_service = link.needs_service();
                self.needs_service |= needs_service;
                posted
            }
            _ => {
                let total = AnnouncedLength::IfSplit(link.peer.totals());
                let of = &mut link.main;
                of.post_write(&mut link.local, bytes, remote, immediate, longest, total, op)
            }
        };
        posted.inspect_err(|error| self.note_refusal(id, *error))
    }

    fn read(&mut self, id: LinkId, target: TensorMut, source: &Grant) -> Result<(), (PostError, TensorMut)> {
        let len = source.len;
        if len > target.bytes().len() as u64 {
            return Err((PostError::Refused("the target has fewer bytes than the source"), target));
        }
        if len > 0 && !self.shared.is_ours(target.as_ptr() as u64, len) {
            return Err((
                PostError::Refused("the target is not in the pool that this fabric shares"),
                target,
            ));
        }
        let longest = self.shared.max_message;
        let link = match self.usable(id) {
            Ok(link) => link,
            Err(error) => return Err((error, target)),
        };
        let lkey = link.shared.devices[link.device].region.lkey;
        let remote = Self::remote(link, source, len);
        let of = &mut link.main;
        let posted = of.post_read(target, (len, lkey), remote, longest);
        if of.pair().is_none() {
            self.note_refusal(id, PostError::Down);
        }
        posted.inspect_err(|(error, _)| self.note_refusal(id, *error))
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

    fn reaches(&self, _link: LinkId, target: &TensorMut) -> bool {
        let len = target.bytes().len() as u64;
        len == 0 || self.shared.is_ours(target.as_ptr() as u64, len)
    }

    fn grant(&mut self, id: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        if !self.reaches(id, &target) {
            return Err((
                PostError::Refused("the target is not in the pool that this fabric shares"),
                target,
            ));
        }
        if self.shared.options.memory_windows && !target.bytes().is_empty() {
            return self.grant_window(id, target);
        }
        match self.link(id).filter(|link| link.is_up()) {
            Some(link) => {
                let (region, key) = link.pool_key();
                link.grants.add(target, region, key)
            }
            None => Err((PostError::Down, target)),
        }
    }

    fn revoke(&mut self, id: LinkId, grant: &Grant) -> Option<TensorMut> {
        let link = self.link(id)?;
        let Some(at) = link.grants.window_of(grant, true) else { return link.grants.revoke(grant) };
        let is_closed = self.close_window(id, at);
        let tensor = self.link(id)?.grants.end_write(grant)?;
        if !is_closed {
            // The peer may write to it as long as this process lives.
            std::mem::forget(tensor);
            return None;
        }
        Some(tensor)
    }

    fn expose(&mut self, id: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        let has_windows = self.shared.options.memory_windows;
        let len = source.bytes().len() as u64;
        let is_ours = len == 0 || self.shared.is_ours(source.as_ptr() as u64, len);
        let link = self.link(id).filter(|link| link.is_up()).ok_or(PostError::Down)?;
        if !is_ours {
            return Err(PostError::Refused("the source is not in the pool that this fabric shares"));
        }
        if has_windows && len > 0 {
            return self.expose_window(id, source);
        }
        let (region, key) = link.pool_key();
        link.grants.expose(source, region, key)
    }

    fn withdraw(&mut self, id: LinkId, grant: &Grant) {
        let Some(link) = self.link(id) else { return };
        let Some(at) = link.grants.window_of(grant, false) else { return link.grants.withdraw(grant) };
        let is_closed = self.close_window(id, at);
        let source = self.link(id).and_then(|link| link.grants.end_read(grant));
        if !is_closed {
            std::mem::forget(source);
        }
    }
}
