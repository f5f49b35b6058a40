//! The resources of one port: completion queues, their channel, the wake-ups. They exist before
//! the port, because a link's queue pairs are bound to a completion queue when they are created.
#![allow(clippy::disallowed_types)] // making links and ports

use super::context::ProtectionDomain;
use super::cq::{CompletionChannel, CompletionQueue, CqPlaces};
use super::events::DeviceWatcher;
use super::sleeper::PortWakeup;
use super::sys::{IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, ibv_wc};
use crate::fabric::{FabricError, LinkId};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) struct PortResources {
    pub number: usize,
    pub wakeup: Arc<PortWakeup>,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    queues: Mutex<Vec<Arc<CompletionQueue>>>,
    /// The number of `queues`.
    count: AtomicUsize,
    cq_entries: u32,
    /// The completion vector of the queues.
    vector: c_int,
    /// The number of the next link.
    next: AtomicU32,
    /// Links that are not attached yet, with their completions.
    awaited: Mutex<HashMap<LinkId, Vec<ibv_wc>>>,
}

/// Registers a link that is being made. Its completions are kept until it is attached.
pub(super) struct PendingLink {
    pub link: LinkId,
    resources: Arc<PortResources>,
}

impl PendingLink {
    /// Attaches a link. Returns its completions so far.
    pub fn came(&self) -> Vec<ibv_wc> {
        self.resources.awaited().remove(&self.link).unwrap_or_default()
    }
}

impl PendingLink {
    /// The failed completions of the link so far.
    pub fn failed(&self) -> Option<ibv_wc> {
        let awaited = self.resources.awaited();
        let failed = |wc: &&ibv_wc| ![IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR].contains(&wc.status);
        awaited.get(&self.link)?.iter().find(failed).copied()
    }
}

impl Drop for PendingLink {
    fn drop(&mut self) {
        self.came();
    }
}

impl PortResources {
    fn new(
        number: usize,
        domain: &Arc<ProtectionDomain>,
        watcher: &DeviceWatcher,
        cq_entries: u32,
        vector: c_int,
    ) -> Result<Self, FabricError> {
        let channel = CompletionChannel::new(&domain.context)?;
        let wakeup = Arc::new(PortWakeup::new());
        watcher.watch_port(&channel, &wakeup);
        Ok(PortResources {
            number,
            wakeup,
            domain: Arc::clone(domain),
            channel,
            queues: Mutex::default(),
            count: AtomicUsize::new(0),
            cq_entries,
            vector,
            next: AtomicU32::new(0),
            awaited: Mutex::default(),
        })
    }

    fn awaited(&self) -> MutexGuard<'_, HashMap<LinkId, Vec<ibv_wc>>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers a link that will be the port's.
    pub fn await_link(self: &Arc<Self>) -> PendingLink {
        let link = LinkId(self.next.fetch_add(1, Ordering::Relaxed));
        self.awaited().insert(link, Vec::new());
        PendingLink { link, resources: Arc::clone(self) }
    }

    /// Handles a completion of a link that the port does not have. If the link is being made, the
    /// completion is kept: there are at most as many as receives. Otherwise the queue pairs are
    /// destroyed already.
    #[cold]
    pub fn keep(&self, link: LinkId, wc: &ibv_wc) {
        if let Some(kept) = self.awaited().get_mut(&link) {
            kept.push(*wc);
        }
    }

    /// Adds new completion queues to those that the port polls. That includes queues of endpoints
    /// that became no link, because their places are freed only when the queue is polled.
    #[inline]
    pub fn adopt(&self, known: &mut Vec<Arc<CompletionQueue>>) {
        if self.count.load(Ordering::Acquire) != known.len() {
            self.adopt_more(known);
        }
    }

    #[cold]
    fn adopt_more(&self, known: &mut Vec<Arc<CompletionQueue>>) {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(queues[known.len()..].iter().map(Arc::clone));
    }

    /// Places for a link's completions, in a queue that has them or in a new one.
    ///
    /// # Errors
    /// If the device has no queue of that size, or no more queues.
    pub fn reserve(&self, places: u32) -> Result<CqPlaces, FabricError> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reserved) = queues.iter().find_map(|queue| queue.reserve(places)) {
            return Ok(reserved);
        }
        // The port may not have polled for long while endpoints failed: completions of those need
        // no poll.
        if queues.last().is_some_and(|queue| Arc::strong_count(queue) == 1 && queue.is_deserted()) {
            queues.pop();
            self.count.store(queues.len(), Ordering::Release);
        }
        let most = u32::try_from(self.domain.context.attr().max_cqe).unwrap_or(u32::MAX);
        let queue = CompletionQueue::new(&self.channel, self.cq_entries.min(most).max(places), self.vector)?;
        let reserved = queue.reserve(places);
        queues.push(queue);
        self.count.store(queues.len(), Ordering::Release);
        match reserved {
            Some(reserved) => Ok(reserved),
            None => unreachable!("a new queue has at least as many places"),
        }
    }
}

/// The resources of all ports of a fabric, in the order of the ports.
pub(super) struct PortTable {
    all: Mutex<(Vec<Arc<PortResources>>, usize)>,
    cq_entries: u32,
    /// [`VerbsOptions::comp_vector`](super::VerbsOptions::comp_vector).
    first_vector: u32,
}

impl PortTable {
    pub fn new(cq_entries: u32, first_vector: u32) -> Self {
        PortTable { all: Mutex::default(), cq_entries, first_vector }
    }

    /// The resources of the port with this number.
    pub fn get(
        &self,
        number: usize,
        domain: &Arc<ProtectionDomain>,
        watcher: &DeviceWatcher,
    ) -> Result<Arc<PortResources>, FabricError> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        while all.0.len() <= number {
            let at = all.0.len();
            let vector = (u64::from(self.first_vector) + at as u64) % domain.context.vectors();
            // Less than a count of type `c_int`.
            let resources = PortResources::new(at, domain, watcher, self.cq_entries, vector as c_int)?;
            all.0.push(Arc::new(resources));
        }
        Ok(Arc::clone(&all.0[number]))
    }

    /// The resources of the next port.
    pub fn next(
        &self,
        domain: &Arc<ProtectionDomain>,
        watcher: &DeviceWatcher,
    ) -> Result<Arc<PortResources>, FabricError> {
        let number = {
            let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
            all.1 += 1;
            all.1 - 1
        };
        self.get(number, domain, watcher)
    }
}
