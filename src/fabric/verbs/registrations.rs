//! Memory outside the pool, registered once and kept for the next time: a cache by address range and owner.
//!
//! All this is done on the threads of who sends: a registration enters the kernel and pins each page. Ports only take the key
//! that a tensor brings along.
//!
//! **When pages change.** A registration has the pages that were mapped when it was made. So it is good for this owner
//! of the memory alone, which keeps them: a range is found only by the same owner. When the owner is gone, nothing finds the registration
//! any more, and nothing is posted with it, as what is posted holds the owner: whoever dropped it ends the registration, behind the
//! owner's own drop. Only where that was a handle of the program's own, and no `ForeignMemory`, it is left to a later miss.
//! An owner that gives pages back while it lives says so (`ForeignMemory::pages_replaced`), and then nothing finds theirs any more either.
//!
//! **When the process forks.** Where the kernel does not copy registered pages for the child, but lets the first writer have a copy,
//! a parent that writes has other pages than the device. That is asked of the library, once; in such a place nothing is registered.
#![allow(clippy::disallowed_types)] // the ranges, looked up by who sends memory outside the pool

use super::context::{Domain, MemoryRegion};
use super::library::Library;
use super::ranges::{Known, Lack, Limits, Ranges, Wish};
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

/// Ranges begin and end at multiples of this, as far as the owner's memory goes: small tensors side by side share one.
const GRAIN: usize = 2 << 20;
/// `ibv_is_fork_initialized(3)`: a fork leaves registered pages as they are.
const FORK_UNNEEDED: u32 = 2;

/// The registrations of a fabric.
pub(super) struct Registrations {
    domain: Arc<Domain>,
    /// This fabric's number, which no other of the process has.
    fabric: u64,
    limits: Limits,
    survives_forks: bool,
    /// A refusal was logged.
    told: AtomicBool,
    /// Ended, and told to nobody who counts yet.
    uncounted: AtomicU64,
    fork_guard: ForkGuard,
    ranges: Mutex<Ranges<MemoryRegion>>,
}

impl Registrations {
    /// None yet.
    pub fn new(domain: &Arc<Domain>, limits: Limits) -> Arc<Self> {
        static FABRICS: AtomicU64 = AtomicU64::new(0);
        let registrations = Arc::new(Registrations {
            domain: Arc::clone(domain),
            fabric: FABRICS.fetch_add(1, Ordering::Relaxed),
            limits,
            survives_forks: survives_forks(domain.context.library),
            told: AtomicBool::new(false),
            uncounted: AtomicU64::new(0),
            fork_guard: ForkGuard::new(),
            ranges: Mutex::new(Ranges::new(limits)),
        });
        if registrations.is_wanted() {
            let weak: Weak<Registrations> = Arc::downgrade(&registrations);
            observe_foreign_memory(weak);
        }
        registrations
    }

    /// Whether there may be any.
    pub fn is_wanted(&self) -> bool {
        self.limits.count > 0 && self.limits.bytes > 0
    }

    /// The key of a tensor's memory, if this fabric has registered it.
    #[inline]
    pub fn key_of(&self, tensor: &Tensor) -> Option<u32> {
        let registered = tensor.registered()?;
        (registered.fabric == self.fabric).then_some(registered.key)
    }

    /// Registers a tensor's memory and keeps it. What has to go for it is counted in `ended`.
    fn make(
        &self,
        place: ForeignLocation<'_>,
        bytes: &Range<usize>,
        ended: &mut u64,
    ) -> Option<Arc<MemoryRegion>> {
        if !self.survives_forks {
            self.refused(
                &"after a fork the device would have other pages than this process: that takes Linux 5.12 and rdma-core 35",
            );
            return None;
        }
        let wide = around(bytes, &place.addresses());
        let range = if wide.len() <= self.limits.bytes { &wide } else { bytes };
        let wish = Wish { owner: place.owner, bytes, range };
        let (is_admitted, changes) =
            self.without(ended, |ranges, out| (ranges.admit(&wish, out), ranges.changes()));
        if !is_admitted {
            self.refused(&"rdma_registrations or rdma_registered_bytes leaves no room, or the device has refused before");
            return None;
        }
        let region = Arc::new(self.ask(&wish, ended)?);
        let kept = self.without(ended, |ranges, out| {
            // Another thread may have been faster, or have taken the room.
            if let Some(known) = ranges.find(place.owner, bytes) {
                return Some(known);
            }
            if !ranges.make_room(&wish, out) {
                ranges.refuse(&wish, None);
                return None;
            }
            ranges.add(&wish, Arc::clone(&region), changes, out);
            Some(region.clone())
        });
        // Another's is taken in the place of this one, which ends here. It counts as made, too.
        *ended += u64::from(kept.as_ref().is_some_and(|kept| !Arc::ptr_eq(kept, &region)));
        kept
    }

    /// Asks the device; where it lacks room, once more with as many bytes less of what gives way.
    fn ask(&self, wish: &Wish<'_>, ended: &mut u64) -> Option<MemoryRegion> {
        let base = NonNull::new(without_provenance_mut(wish.range.start))?;
        // SAFETY: the memory is mapped, as its owner lives. For peers there is no access, and the device reads it for requests of this
        // side alone, which are posted with a tensor that holds the owner.
        let register = || unsafe { MemoryRegion::new(&self.domain, base, wish.range.len(), 0) };
        let error = match register() {
            Ok(region) => return Some(region),
            Err(error) => error,
        };
        let is_freed =
            lack(&error) == Lack::Room && self.without(ended, |ranges, out| ranges.free(wish, out));
        let error = match if is_freed { register() } else { Err(error) } {
            Ok(region) => return Some(region),
            Err(error) => error,
        };
        self.refused(&error);
        self.ranges().refuse(wish, Some(lack(&error)));
        None
    }

    /// Does something with the ranges, and ends those that it takes out, after the lock.
    fn without<T>(
        &self,
        ended: &mut u64,
        work: impl FnOnce(&mut Ranges<MemoryRegion>, &mut Vec<Known<MemoryRegion>>) -> T,
    ) -> T {
        let mut out = Vec::new();
        let done = work(&mut self.ranges(), &mut out);
        *ended += out.len() as u64;
        done
    }

    /// Has ranges end that nobody sends from at the time.
    fn end(&self, work: impl FnOnce(&mut Ranges<MemoryRegion>, &mut Vec<Known<MemoryRegion>>)) {
        // In a forked child the lock may be held for ever, and the registrations are the parent's.
        if self.fork_guard.in_child() {
            return;
        }
        let mut ended = 0;
        self.without(&mut ended, work);
        self.uncounted.fetch_add(ended, Ordering::Relaxed);
    }

    fn refused(&self, why: &dyn Display) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                device = %self.domain.context.name,
                %why,
                "memory outside the pool can't be registered and is copied through the pool; further refusals are only counted"
            );
        }
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges<MemoryRegion>> {
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
            let key = hold.lkey;
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

/// What a device lacked that has refused.
fn lack(error: &FabricError) -> Lack {
    match error {
        FabricError::Os { source, .. }
            if matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN)) =>
        {
            Lack::Room
        }
        _ => Lack::Other,
    }
}

/// The range that is registered for these bytes, of what their owner keeps mapped.
fn around(bytes: &Range<usize>, owned: &Range<usize>) -> Range<usize> {
    let start = (bytes.start / GRAIN * GRAIN).max(owned.start);
    let end = bytes.end.checked_next_multiple_of(GRAIN).unwrap_or(usize::MAX).min(owned.end);
    start..end
}

/// Whether registered pages stay this process's in a fork. A library that can't tell does not know of a kernel where they do.
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
