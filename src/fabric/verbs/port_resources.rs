//! The resources of one port: completion queues, a channel of each device, the wake-ups. They exist
//! before the port, because a link's queue pairs are bound to a completion queue when they are
//! created.
#![allow(clippy::disallowed_types)] // making links and ports

use super::context::ProtectionDomain;
use super::cq::{CompletionChannel, CompletionQueue, CqPlaces};
use super::events::DeviceWatcher;
use super::post_list::queue_of;
use super::sleeper::PortWakeup;
use super::sys::{IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, ibv_wc};
use crate::fabric::{FabricError, LinkId};
use std::collections::HashMap;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) struct PortResources {
    pub number: usize,
    pub wakeup: Arc<PortWakeup>,
    /// Of each device, by its place.
    channels: Vec<Arc<CompletionChannel>>,
    queues: Mutex<Vec<Arc<CompletionQueue>>>,
    /// The number of `queues`.
    count: AtomicUsize,
    cq_entries: u32,
    /// The completion vector of the queues, modulo the number that a device has.
    vector: u64,
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
    /// A failed completion of one of these queue pairs of the link so far.
    pub fn failed(&self, queues: Range<u8>) -> Option<ibv_wc> {
        let awaited = self.resources.awaited();
        let failed = |wc: &&ibv_wc| {
            ![IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR].contains(&wc.status)
                && queues.contains(&queue_of(wc.wr_id))
        };
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
        domains: &[Arc<ProtectionDomain>],
        watcher: &DeviceWatcher,
        cq_entries: u32,
        vector: u64,
    ) -> Result<Self, FabricError> {
        let channels = domains.iter().map(|domain| CompletionChannel::new(&domain.context));
        let channels = channels.collect::<Result<Vec<_>, _>>()?;
        let wakeup = Arc::new(PortWakeup::new());
        watcher.watch_port(&channels, &wakeup);
        Ok(PortResources {
            number,
            wakeup,
            channels,
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

    /// Places for a link's completions, in a queue of the device that has them or in a new one.
    ///
    /// # Errors
    /// If the device has no queue of that size, or no more queues.
    pub fn reserve(&self, device: usize, places: u32) -> Result<CqPlaces, FabricError> {
        let channel = &self.channels[device];
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of_device = queues.iter().filter(|queue| Arc::ptr_eq(queue.channel(), channel));
        if let Some(reserved) = of_device.find_map(|queue| queue.reserve(places)) {
            return Ok(reserved);
        }
        // The port may not have polled for long while endpoints failed: completions of those need
        // no poll.
        if queues.last().is_some_and(|queue| Arc::strong_count(queue) == 1 && queue.is_deserted()) {
            queues.pop();
            self.count.store(queues.len(), Ordering::Release);
        }
        let context = channel.context();
        let most = u32::try_from(context.attr().max_cqe).unwrap_or(u32::MAX);
        // Less than a count of type `c_int`.
        let vector = (self.vector % context.vectors()) as c_int;
        let queue = CompletionQueue::new(channel, self.cq_entries.min(most).max(places), vector)?;
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
    /// Of each device, by its place.
    domains: Vec<Arc<ProtectionDomain>>,
    cq_entries: u32,
    /// [`VerbsOptions::comp_vector`](super::VerbsOptions::comp_vector).
    first_vector: u32,
}

impl PortTable {
    pub fn new(domains: Vec<Arc<ProtectionDomain>>, cq_entries: u32, first_vector: u32) -> Self {
        PortTable { all: Mutex::default(), domains, cq_entries, first_vector }
    }

    /// The resources of the port with this number.
    pub fn get(&self, number: usize, watcher: &DeviceWatcher) -> Result<Arc<PortResources>, FabricError> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        while all.0.len() <= number {
            let at = all.0.len();
            let vector = u64::from(self.first_vector) + at as u64;
            let resources = PortResources::new(at, &self.domains, watcher, self.cq_entries, vector)?;
            all.0.push(Arc::new(resources));
        }
        Ok(Arc::clone(&all.0[number]))
    }

    /// The resources of the next port.
    pub fn next(&self, watcher: &DeviceWatcher) -> Result<Arc<PortResources>, FabricError> {
        let number = {
            let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
            all.1 += 1;
            all.1 - 1
        };
        self.get(number, watcher)
    }
}
