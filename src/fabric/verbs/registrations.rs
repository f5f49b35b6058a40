//! Memory outside the pool, registered once and kept for the next time: a cache by address range and owner.
//!
//! All this is done on the threads of who sends: a registration enters the kernel and pins each page. Ports only take the key
//! that a tensor brings along.
//!
//! **When memory is unmapped.** A registration has the pages that were mapped when it was made. So it is good for this owner
//! of the memory alone, which keeps them mapped: a range is found only by the same owner, told by the place of its `Arc`, which
//! nobody else can have as long as the cache has a `Weak` of it. When the owner is gone, nothing finds the registration
//! any more, nothing is posted with it, as what is posted holds the owner, and the next miss ends it. Until then it keeps its pages,
//! and no others.
//!
//! **When the process forks.** Where the kernel does not copy registered pages for the child, but lets the first writer have a copy,
//! a parent that writes has other pages than the device. That is asked of the library, once; in such a place nothing is registered.
#![allow(clippy::disallowed_types)] // the ranges, looked up by who sends memory outside the pool

use super::context::{Domain, MemoryRegion};
use super::library::Library;
use crate::fabric::{Registrar, Registration};
use crate::memory::{ForeignPlace, Owner, Pool, Registered, Tensor};
use std::any::Any;
use std::fmt::Display;
use std::ops::Range;
use std::ptr::{NonNull, addr_eq, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Ranges begin and end at multiples of this, as far as the owner's memory goes: small tensors side by side share one.
const GRAIN: usize = 2 << 20;
/// `ibv_is_fork_initialized(3)`: a fork leaves registered pages as they are.
const FORK_UNNEEDED: i32 = 2;

/// The registrations of a fabric.
pub(super) struct Registrations {
    domain: Arc<Domain>,
    /// This fabric's number, which no other of the process has.
    fabric: u64,
    limits: Limits,
    survives_forks: bool,
    /// A refusal was logged.
    told: AtomicBool,
    ranges: Mutex<Ranges>,
}

/// What is kept at most.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub count: usize,
    pub bytes: usize,
}

#[derive(Default)]
struct Ranges {
    /// In no order: a look at all of them costs less than one registration by far.
    all: Vec<Known>,
    bytes: usize,
    /// Counts lookups, for who was used last.
    time: u64,
}

struct Known {
    range: Range<usize>,
    owner: Weak<dyn Any + Send + Sync>,
    used: u64,
    /// Others have it as long as requests may name it.
    region: Arc<MemoryRegion>,
}

impl Known {
    fn is_for(&self, owner: &Owner, range: &Range<usize>) -> bool {
        self.range.start <= range.start
            && range.end <= self.range.end
            && addr_eq(self.owner.as_ptr(), Arc::as_ptr(owner))
    }

    /// Whether no tensor has it. It stays so as long as the ranges are locked, as tensors are given it under the lock.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }
}

impl Ranges {
    fn find(&mut self, owner: &Owner, range: &Range<usize>) -> Option<Arc<MemoryRegion>> {
        self.time += 1;
        let known = self.all.iter_mut().find(|known| known.is_for(owner, range))?;
        known.used = self.time;
        Some(known.region.clone())
    }

    fn remove(&mut self, at: usize) -> Known {
        let known = self.all.swap_remove(at);
        self.bytes -= known.range.len();
        known
    }

    /// Takes out those whose owner is gone.
    fn take_stale(&mut self, out: &mut Vec<Known>) {
        for at in (0..self.all.len()).rev() {
            if self.all[at].owner.strong_count() == 0 && self.all[at].is_idle() {
                out.push(self.remove(at));
            }
        }
    }

    /// Takes out the one that was used longest ago, of those that no tensor has.
    fn take_oldest(&mut self) -> Option<Known> {
        let idle = self.all.iter().enumerate().filter(|(_, known)| known.is_idle());
        let (at, _) = idle.min_by_key(|(_, known)| known.used)?;
        Some(self.remove(at))
    }

    /// Takes out what is in the way of one more range of so many bytes. `false` if tensors have too much of it.
    fn make_room(&mut self, bytes: usize, limits: Limits, out: &mut Vec<Known>) -> bool {
        self.take_stale(out);
        if bytes > limits.bytes {
            return false;
        }
        while self.all.len() >= limits.count || self.bytes > limits.bytes - bytes {
            let Some(oldest) = self.take_oldest() else { return false };
            out.push(oldest);
        }
        true
    }
}

impl Registrations {
    /// None yet.
    pub fn new(domain: &Arc<Domain>, limits: Limits) -> Self {
        static FABRICS: AtomicU64 = AtomicU64::new(0);
        Registrations {
            domain: Arc::clone(domain),
            fabric: FABRICS.fetch_add(1, Ordering::Relaxed),
            limits,
            survives_forks: survives_forks(domain.context.library),
            told: AtomicBool::new(false),
            ranges: Mutex::default(),
        }
    }

    /// Whether there may be any.
    pub fn is_wanted(&self) -> bool {
        self.limits.count > 0
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
        place: ForeignPlace<'_>,
        range: &Range<usize>,
        ended: &mut u64,
    ) -> Option<Arc<MemoryRegion>> {
        if !self.survives_forks {
            self.refused(
                &"after a fork the device would have other pages than this process: that takes Linux 5.12 and rdma-core 35",
            );
            return None;
        }
        let wide = around(range, &place.addresses());
        let range = if wide.len() <= self.limits.bytes { wide } else { range.clone() };
        if !self.without(ended, |ranges, out| ranges.make_room(range.len(), self.limits, out)) {
            self.refused(&"rdma_registrations or rdma_registered_bytes leaves no room");
            return None;
        }
        let region = Arc::new(self.ask(&range, ended)?);
        self.without(ended, |ranges, out| {
            // Another thread may have been faster, or have taken the room.
            if let Some(known) = ranges.find(place.owner, &range) {
                return Some(known);
            }
            if !ranges.make_room(range.len(), self.limits, out) {
                return None;
            }
            ranges.bytes += range.len();
            let (owner, used) = (Arc::downgrade(place.owner), ranges.time);
            ranges.all.push(Known { range: range.clone(), owner, used, region: region.clone() });
            Some(region.clone())
        })
    }

    /// Asks the device; where it refuses, once more with nothing else registered that no tensor has.
    fn ask(&self, range: &Range<usize>, ended: &mut u64) -> Option<MemoryRegion> {
        let base = NonNull::new(without_provenance_mut(range.start))?;
        // SAFETY: the memory is mapped, as its owner lives. For peers there is no access, and the device reads it for requests of this
        // side alone, which are posted with a tensor that holds the owner.
        let register = || unsafe { MemoryRegion::new(&self.domain, base, range.len(), 0) };
        let error = match register() {
            Ok(region) => return Some(region),
            Err(error) => error,
        };
        let before = *ended;
        self.without(ended, |ranges, out| out.extend(std::iter::from_fn(|| ranges.take_oldest())));
        let again = if *ended > before { register() } else { Err(error) };
        again.inspect_err(|error| self.refused(error)).ok()
    }

    /// Does something with the ranges, and ends those that it takes out, after the lock.
    fn without<T>(&self, ended: &mut u64, work: impl FnOnce(&mut Ranges, &mut Vec<Known>) -> T) -> T {
        let mut out = Vec::new();
        let done = work(&mut self.ranges(), &mut out);
        *ended += out.len() as u64;
        done
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

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registrar for Registrations {
    fn register(&self, pool: &Pool, tensor: &Tensor) -> Registration {
        let mut ended = 0;
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
            tensor.with_registration(pool, Registered { fabric: self.fabric, key, hold })
        });
        Registration { tensor, is_known, ended }
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
