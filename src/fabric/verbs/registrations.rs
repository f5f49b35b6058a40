//! Memory outside the pool, registered once and kept for the next send: a cache by address range
//! and owner.
//!
//! With several devices a range is registered with each of them.
//!
//! The sending threads do this work, since a registration enters the kernel and pins each page.
//! Ports only take the key that comes with a tensor.
//!
//! **When pages change.** A registration has the pages that were mapped when it was made. It is
//! valid for one owner of the memory, which keeps the pages mapped, so only tensors of that owner
//! find it. Posted operations hold the owner. When the owner is gone, nothing is posted with the
//! registration any more, and the thread that dropped the owner ends it. If that handle was the
//! program's own and not a `ForeignMemory`, a later miss ends it. An owner that gives pages back
//! while it lives calls `ForeignMemory::pages_replaced`, and no look-up finds those registrations
//! any more.
//!
//! **When the process forks.** Some kernels do not copy registered pages for the child, and give a
//! copy to the first process that writes. A parent that writes then has other pages than the
//! device. The library tells whether the kernel copies; where it does not, nothing is registered.
#![allow(clippy::disallowed_types)] // the cache, looked up by threads that send memory outside the pool

use super::context::{MemoryRegion, ProtectionDomain};
use super::library::Library;
use super::range_cache::{CacheLimits, CachedRange, RangeCache};
use crate::fabric::{FabricError, Registrar, Registration};
use crate::memory::{
    ForeignLocation, ForeignMemoryObserver, ForeignRegistration, ForkGuard, Pool, Tensor, WeakOwner,
    observe_foreign_memory,
};
use std::fmt::Display;
use std::ops::Range;
use std::ptr::{NonNull, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Ranges begin and end at multiples of this many bytes, within the owner's memory. So small
/// tensors side by side share a range.
const GRAIN: usize = 2 << 20;
/// `ibv_is_fork_initialized(3)`: a fork leaves registered pages as they are.
const FORK_UNNEEDED: u32 = 2;

/// The registrations of a fabric.
pub(super) struct Registrations {
    /// Of each device, by its place.
    domains: Vec<Arc<ProtectionDomain>>,
    /// This fabric's number, which no other of the process has.
    fabric: u64,
    limits: CacheLimits,
    survives_forks: bool,
    /// A refusal was logged.
    is_logged: AtomicBool,
    /// Ended registrations that [`Registrar::take_ended`] has not returned yet.
    uncounted: AtomicU64,
    fork_guard: ForkGuard,
    ranges: Mutex<RangeCache<RegionSet>>,
}

/// The registrations of a range with each device, by its place.
struct RegionSet(Vec<MemoryRegion>);

impl RegionSet {
    fn key(&self, device: usize) -> Option<u32> {
        self.0.get(device).map(|region| region.lkey)
    }
}

impl Registrations {
    /// An empty cache.
    pub fn new(domains: Vec<Arc<ProtectionDomain>>, limits: CacheLimits) -> Arc<Self> {
        static FABRICS: AtomicU64 = AtomicU64::new(0);
        let registrations = Arc::new(Registrations {
            fabric: FABRICS.fetch_add(1, Ordering::Relaxed),
            limits,
            survives_forks: domains.iter().all(|domain| survives_forks(domain.context.library)),
            domains,
            is_logged: AtomicBool::new(false),
            uncounted: AtomicU64::new(0),
            fork_guard: ForkGuard::of_this_process(),
            ranges: Mutex::new(RangeCache::new(limits)),
        });
        if registrations.is_wanted() {
            let weak: Weak<Registrations> = Arc::downgrade(&registrations);
            observe_foreign_memory(weak);
        }
        registrations
    }

    /// Whether the limits allow any registration.
    pub fn is_wanted(&self) -> bool {
        self.limits.count > 0 && self.limits.bytes > 0
    }

    /// The key of a tensor's memory for the device at this place, if this fabric has registered it.
    #[inline]
    pub fn key_of(&self, tensor: &Tensor, device: usize) -> Option<u32> {
        let registered = tensor.registered().filter(|registered| registered.fabric == self.fabric)?;
        if device == 0 {
            return Some(registered.key);
        }
        registered.hold.downcast_ref::<RegionSet>()?.key(device)
    }

    /// Registers a tensor's memory and keeps the registration. `ended` counts the registrations
    /// that were evicted for it.
    fn make(
        &self,
        place: ForeignLocation<'_>,
        bytes: &Range<usize>,
        ended: &mut u64,
    ) -> Option<Arc<RegionSet>> {
        if !self.survives_forks {
            self.refused(
                &"after a fork the device would have other pages than this process: that takes Linux \
                 5.12 and rdma-core 35",
            );
            return None;
        }
        let wide = around(bytes, &place.addresses());
        let range = if wide.len() <= self.limits.bytes { &wide } else { bytes };
        let (has_room, changes) =
            self.evicting(ended, |ranges, out| (ranges.make_room(range.len(), out), ranges.changes()));
        if !has_room {
            self.refused(&"rdma_registrations or rdma_registered_bytes leaves no room");
            return None;
        }
        let region = Arc::new(self.ask(range, ended)?);
        let kept = self.evicting(ended, |ranges, out| {
            // Another thread may have been faster, or have taken the room.
            if let Some(known) = ranges.find(place.owner, bytes) {
                return Some(known);
            }
            if !ranges.make_room(range.len(), out) {
                return None;
            }
            ranges.add(place.owner, range.clone(), Arc::clone(&region), changes, out);
            Some(region.clone())
        });
        // The other thread's registration replaces this one, which ends here. It counts as made,
        // too.
        *ended += u64::from(kept.as_ref().is_some_and(|kept| !Arc::ptr_eq(kept, &region)));
        kept
    }

    /// Asks the devices to register. If one lacks room, evicts as many bytes and asks once
    /// more.
    fn ask(&self, range: &Range<usize>, ended: &mut u64) -> Option<RegionSet> {
        let base = NonNull::new(without_provenance_mut(range.start))?;
        // SAFETY: the memory is mapped, as its owner lives. Peers have no access. The device reads
        // the memory for requests of this side only, which are posted with a tensor that holds the
        // owner.
        let of = |domain| unsafe { MemoryRegion::new(domain, base, range.len(), 0) };
        let register = || self.domains.iter().map(of).collect::<Result<_, _>>().map(RegionSet);
        let error = match register() {
            Ok(region) => return Some(region),
            Err(error) => error,
        };
        let is_freed =
            lacks_room(&error) && self.evicting(ended, |ranges, out| ranges.evict(range.len(), out));
        let error = match if is_freed { register() } else { Err(error) } {
            Ok(region) => return Some(region),
            Err(error) => error,
        };
        self.refused(&error);
        None
    }

    /// Runs `work` on the cache. Ends the ranges that it moves out, after the lock is released.
    fn evicting<T>(
        &self,
        ended: &mut u64,
        work: impl FnOnce(&mut RangeCache<RegionSet>, &mut Vec<CachedRange<RegionSet>>) -> T,
    ) -> T {
        let mut out = Vec::new();
        let done = work(&mut self.ranges(), &mut out);
        *ended += out.len() as u64;
        done
    }

    /// Ends ranges outside of a registration, and counts them for [`Registrar::take_ended`].
    fn end(&self, work: impl FnOnce(&mut RangeCache<RegionSet>, &mut Vec<CachedRange<RegionSet>>)) {
        // In a forked child the lock may be held for ever, and the registrations are the parent's.
        if self.fork_guard.in_child() {
            return;
        }
        let mut ended = 0;
        self.evicting(&mut ended, work);
        self.uncounted.fetch_add(ended, Ordering::Relaxed);
    }

    fn refused(&self, why: &dyn Display) {
        if !self.is_logged.swap(true, Ordering::Relaxed) {
            let devices: Vec<_> = self.domains.iter().map(|domain| &*domain.context.name).collect();
            tracing::warn!(
                devices = devices.join(","),
                %why,
                "memory outside the pool can't be registered and is copied through the pool; further \
                 refusals are only counted"
            );
        }
    }

    fn ranges(&self) -> MutexGuard<'_, RangeCache<RegionSet>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registrar for Registrations {
    fn register(&self, pool: &Pool, tensor: &Tensor) -> Registration {
        let mut ended = self.take_ended();
        let Some(place) = tensor.foreign() else {
            return Registration { tensor: None, is_known: false, ended };
        };
        let bytes = tensor.bytes().as_ptr_range();
        let range = bytes.start.addr()..bytes.end.addr();
        let found = self.ranges().find(place.owner, &range);
        let is_known = found.is_some();
        let region = found.or_else(|| self.make(place, &range, &mut ended));
        let tensor = region.map(|hold| {
            let key = hold.key(0).unwrap_or_default();
            tensor.with_registration(pool, ForeignRegistration { fabric: self.fabric, key, hold })
        });
        Registration { tensor, is_known, ended }
    }

    fn take_ended(&self) -> u64 {
        match self.uncounted.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.uncounted.swap(0, Ordering::Relaxed),
        }
    }

    fn registered_bytes(&self) -> u64 {
        if self.fork_guard.in_child() { 0 } else { self.ranges().bytes() as u64 }
    }
}

impl ForeignMemoryObserver for Registrations {
    fn pages_replaced(&self, addresses: Range<usize>) {
        // Pages may be as large as a grain.
        let pages = around(&addresses, &(0..usize::MAX));
        self.end(|ranges, out| ranges.forget(&pages, out));
    }

    fn owner_dropped(&self, owner: &WeakOwner) {
        self.end(|ranges, out| ranges.end_owner(owner, out));
    }
}

/// Whether a device has refused because it lacks room for another registration.
fn lacks_room(error: &FabricError) -> bool {
    matches!(error, FabricError::Os { source, .. }
        if matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN)))
}

/// The range that is registered for these bytes, within the memory that their owner keeps mapped.
fn around(bytes: &Range<usize>, owned: &Range<usize>) -> Range<usize> {
    let start = (bytes.start / GRAIN * GRAIN).max(owned.start);
    let end = bytes.end.checked_next_multiple_of(GRAIN).unwrap_or(usize::MAX).min(owned.end);
    start..end
}

/// Whether registered pages stay this process's in a fork. A library that can't tell does not know
/// of a kernel where they do.
fn survives_forks(library: &Library) -> bool {
    // SAFETY: a question without arguments.
    library.is_fork_initialized.is_some_and(|ask| unsafe { ask() } == FORK_UNNEEDED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_goes_to_the_next_grain_and_not_beyond_its_owner() {
        let owned = 10 * GRAIN + 100..20 * GRAIN + 7;
        let of = |bytes| around(&bytes, &owned);
        assert_eq!(of(12 * GRAIN + 5..12 * GRAIN + 6), 12 * GRAIN..13 * GRAIN);
        assert_eq!(of(10 * GRAIN + 100..10 * GRAIN + 101), 10 * GRAIN + 100..11 * GRAIN);
        assert_eq!(of(20 * GRAIN..20 * GRAIN + 7), 20 * GRAIN..20 * GRAIN + 7);
        assert_eq!(of(owned.clone()), owned);
    }
}
