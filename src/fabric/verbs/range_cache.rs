//! The registered ranges of foreign memory. To make room, the least recently used range that no
//! tensor holds is evicted, as in UCX's registration cache.
//!
//! A range is found by its owner only. The owner's key is the address of its `Arc`, which no other
//! owner can have while the cache holds a `Weak` of it. No range of an owner lies inside another of
//! the same owner. So the last range that begins no later than some bytes is the only one that can
//! contain them.

use crate::memory::{Owner, WeakOwner};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// The bounds of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheLimits {
    /// Ranges, at most.
    pub count: usize,
    /// Bytes of all ranges, at most.
    pub bytes: usize,
}

/// The registered ranges. A range whose `R` is held by the cache alone is idle.
pub(super) struct RangeCache<R> {
    limits: CacheLimits,
    /// By the address of the owner's `Arc`.
    owners: HashMap<usize, OwnerRanges<R>>,
    /// Ranges that no look-up finds. They stay until no tensor holds them.
    retired: Vec<CachedRange<R>>,
    /// Ranges and bytes, the retired ones included.
    count: usize,
    bytes: usize,
    /// Counts look-ups.
    time: u64,
    /// Counts the calls of [`RangeCache::forget`].
    changes: u64,
    /// The time of the last search for owners that are gone.
    swept: u64,
}

struct OwnerRanges<R> {
    owner: WeakOwner,
    /// By their first byte.
    ranges: BTreeMap<usize, CachedRange<R>>,
}

/// A registered range.
pub(super) struct CachedRange<R> {
    range: Range<usize>,
    /// The time of the last look-up that found it.
    used: u64,
    region: Arc<R>,
}

impl<R> CachedRange<R> {
    /// Whether no tensor holds the range. An idle range stays idle while the cache is locked, since
    /// tensors get ranges under the lock.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }
}

/// The key of an owner, unique as long as there is a `Weak` of it.
fn key_of(owner: &Owner) -> usize {
    Arc::as_ptr(owner).cast::<()>().addr()
}

impl<R> RangeCache<R> {
    /// An empty cache.
    pub fn new(limits: CacheLimits) -> Self {
        RangeCache {
            limits,
            owners: HashMap::new(),
            retired: Vec::new(),
            count: 0,
            bytes: 0,
            time: 0,
            changes: 0,
            swept: 0,
        }
    }

    /// Bytes of all registered ranges.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Differs if [`RangeCache::forget`] was called in between.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The registration that contains these bytes.
    pub fn find(&mut self, owner: &Owner, bytes: &Range<usize>) -> Option<Arc<R>> {
        self.time += 1;
        let ranges = &mut self.owners.get_mut(&key_of(owner))?.ranges;
        let (_, cached) = ranges.range_mut(..=bytes.start).next_back()?;
        if cached.range.end < bytes.end {
            return None;
        }
        cached.used = self.time;
        Some(Arc::clone(&cached.region))
    }

    /// Makes room for a range of `len` bytes: moves ranges to `out`, for the caller to end. Moves
    /// none and returns `false` if all idle ranges together are not enough.
    pub fn make_room(&mut self, len: usize, out: &mut Vec<CachedRange<R>>) -> bool {
        self.sweep(out);
        let CacheLimits { count: most, bytes: most_bytes } = self.limits;
        let Some(others) = most_bytes.checked_sub(len) else { return false };
        let (mut count, mut bytes) = (self.count, self.bytes);
        let fits = |count: usize, bytes: usize| count < most && bytes <= others;
        if fits(count, bytes) {
            return true;
        }
        let mut idle = self.least_recently_used();
        let enough = idle.iter().position(|(_, _, len)| {
            (count, bytes) = (count - 1, bytes - len);
            fits(count, bytes)
        });
        let Some(last) = enough else { return false };
        idle.truncate(last + 1);
        out.extend(idle.into_iter().filter_map(|(owner, start, _)| self.remove(owner, start)));
        true
    }

    /// Moves idle ranges of `len` bytes together, or as many as there are, to `out`. Returns
    /// whether there were any.
    pub fn evict(&mut self, len: usize, out: &mut Vec<CachedRange<R>>) -> bool {
        let mut left = len;
        for (owner, start, len) in self.least_recently_used() {
            if left == 0 {
                break;
            }
            out.extend(self.remove(owner, start));
            left = left.saturating_sub(len);
        }
        left < len
    }

    /// The idle ranges in the order of their last use: owner's key, first byte and length.
    fn least_recently_used(&self) -> Vec<(usize, usize, usize)> {
        let mut idle = Vec::new();
        for (owner, owned) in &self.owners {
            let ranges = owned.ranges.iter().filter(|(_, cached)| cached.is_idle());
            idle.extend(ranges.map(|(start, cached)| (cached.used, (*owner, *start, cached.range.len()))));
        }
        idle.sort_unstable();
        idle.into_iter().map(|(_, range)| range).collect()
    }

    /// Adds a registration. It replaces those that lie inside it. No look-up finds a registration
    /// that was made before `changes` moved on.
    pub fn add(
        &mut self,
        owner: &Owner,
        range: Range<usize>,
        region: Arc<R>,
        changes: u64,
        out: &mut Vec<CachedRange<R>>,
    ) {
        self.bytes += range.len();
        self.count += 1;
        let cached = CachedRange { range: range.clone(), used: self.time, region };
        if changes != self.changes {
            return self.retired.push(cached);
        }
        let owned = self
            .owners
            .entry(key_of(owner))
            .or_insert_with(|| OwnerRanges { owner: Arc::downgrade(owner), ranges: BTreeMap::new() });
        let is_inside = |_: &usize, cached: &mut CachedRange<R>| cached.range.end <= range.end;
        let inside: Vec<_> =
            owned.ranges.extract_if(range.clone(), is_inside).map(|(_, cached)| cached).collect();
        owned.ranges.insert(range.start, cached);
        self.retire(inside, out);
    }

    fn remove(&mut self, owner: usize, start: usize) -> Option<CachedRange<R>> {
        let owned = self.owners.get_mut(&owner)?;
        let cached = owned.ranges.remove(&start)?;
        if owned.ranges.is_empty() {
            self.owners.remove(&owner);
        }
        self.count_out(&cached);
        Some(cached)
    }

    fn count_out(&mut self, cached: &CachedRange<R>) {
        self.count -= 1;
        self.bytes -= cached.range.len();
    }

    /// Moves idle ranges to `out`. The others are retired: no look-up finds them.
    fn retire(&mut self, ranges: impl IntoIterator<Item = CachedRange<R>>, out: &mut Vec<CachedRange<R>>) {
        for cached in ranges {
            if cached.is_idle() {
                self.count_out(&cached);
                out.push(cached);
            } else {
                self.retired.push(cached);
            }
        }
    }

    /// Takes out retired ranges that are idle now. Searches for owners that are gone, once for as
    /// many look-ups as there are owners.
    fn sweep(&mut self, out: &mut Vec<CachedRange<R>>) {
        let retired = std::mem::take(&mut self.retired);
        self.retire(retired, out);
        if self.time - self.swept < self.owners.len() as u64 {
            return;
        }
        self.swept = self.time;
        let gone = self.owners.iter().filter(|(_, owned)| owned.owner.strong_count() == 0);
        let gone: Vec<usize> = gone.map(|(key, _)| *key).collect();
        gone.into_iter().for_each(|key| self.take_owner(key, out));
    }

    /// Takes out the ranges of an owner that is gone.
    pub fn end_owner(&mut self, owner: &WeakOwner, out: &mut Vec<CachedRange<R>>) {
        let retired = std::mem::take(&mut self.retired);
        self.retire(retired, out);
        self.take_owner(owner.as_ptr().cast::<()>().addr(), out);
    }

    fn take_owner(&mut self, key: usize, out: &mut Vec<CachedRange<R>>) {
        if let Some(owned) = self.owners.remove(&key) {
            self.retire(owned.ranges.into_values(), out);
        }
    }

    /// Retires every range that has any of these addresses, whoever is its owner.
    pub fn forget(&mut self, addresses: &Range<usize>, out: &mut Vec<CachedRange<R>>) {
        self.changes += 1;
        let mut forgotten = Vec::new();
        for owned in self.owners.values_mut() {
            let is_hit = |_: &usize, cached: &mut CachedRange<R>| {
                cached.range.start < addresses.end && addresses.start < cached.range.end
            };
            forgotten.extend(owned.ranges.extract_if(.., is_hit).map(|(_, cached)| cached));
        }
        self.owners.retain(|_, owned| !owned.ranges.is_empty());
        self.retire(forgotten, out);
    }
}
