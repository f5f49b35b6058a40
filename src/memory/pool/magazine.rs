//! Magazines: caches of free blocks in front of the central allocator.
//!
//! A thread uses one of a few shards. A shard has a bounded lock-free queue for each size class. A
//! queue holds headers together with their blocks, so making a tensor is one pop and dropping it
//! one push. A block returns to the shard that it was taken from, whichever thread drops it:
//! consumers refill the queue that a producer empties.
//!
//! A budget bounds the size of all shards together. A shard takes a part of the budget when it
//! needs it.

use super::central::Block;
use super::class::SizeClass;
use super::header::{Storage, TensorHeader};
use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Blocks of one class that one shard holds at most.
const MAX_DEPTH: u64 = 1024;
/// Headers without blocks that one shard holds at most; more are given back to the heap.
const BARE_DEPTH: usize = 1024;

/// The magazines of a pool.
pub(crate) struct Magazines {
    shards: Box<[CachePadded<Shard>]>,
    /// Units that may be cached in all.
    capacity: u64,
    /// The part of `capacity` that no shard has taken.
    budget: AtomicU64,
}

struct Shard {
    /// One queue per class, made when the first block of the class is dropped.
    classes: Box<[OnceLock<ArrayQueue<Box<TensorHeader>>>]>,
    bare: ArrayQueue<Box<TensorHeader>>,
    /// Units in the queues. Increased before a block is pushed and decreased after one is popped.
    cached: AtomicU64,
    /// The part of the budget that this shard has taken.
    limit: AtomicU64,
}

/// Why a header was not cached. Returns the header.
pub(crate) enum CacheRefusal {
    /// The shard holds enough blocks of that class.
    Full(Box<TensorHeader>),
    /// All shards together hold as much as they may.
    Budget(Box<TensorHeader>),
}

impl Magazines {
    /// Makes `shards` shards (a power of two) for blocks of up to `units` units. They hold
    /// `capacity` units in all.
    pub(crate) fn new(shards: usize, units: u32, capacity: u64) -> Magazines {
        debug_assert!(shards.is_power_of_two());
        let shard = || {
            CachePadded::new(Shard {
                classes: SizeClass::all_within(units).map(|_| OnceLock::new()).collect(),
                bare: ArrayQueue::new(BARE_DEPTH),
                cached: AtomicU64::new(0),
                limit: AtomicU64::new(0),
            })
        };
        let shards = (0..shards).map(|_| shard()).collect();
        Magazines { shards, capacity, budget: AtomicU64::new(capacity) }
    }

    /// Number of shards.
    pub(crate) fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Index of the calling thread's shard.
    pub(crate) fn mine(&self) -> usize {
        thread_number() & (self.shards.len() - 1)
    }

    /// Whether blocks of this class are cached at all.
    pub(crate) fn caches(&self, class: SizeClass) -> bool {
        u64::from(class.units()) <= self.capacity && class.index() < self.shards[0].classes.len()
    }

    /// Takes a header with a block of this class out of a shard.
    pub(crate) fn take(&self, shard: usize, class: SizeClass) -> Option<Box<TensorHeader>> {
        let shard = &self.shards[shard];
        let header = shard.classes.get(class.index())?.get()?.pop()?;
        // Relaxed, here and below: these numbers bound and report, and guard no memory.
        shard.cached.fetch_sub(u64::from(class.units()), Ordering::Relaxed);
        Some(header)
    }

    /// Puts a header with a block of this class into a shard.
    pub(crate) fn put(
        &self,
        shard: usize,
        class: SizeClass,
        header: Box<TensorHeader>,
    ) -> Result<(), CacheRefusal> {
        let shard = &self.shards[shard];
        let Some(queue) = shard.classes.get(class.index()) else { return Err(CacheRefusal::Full(header)) };
        let units = u64::from(class.units());
        let cached = shard.cached.fetch_add(units, Ordering::Relaxed) + units;
        let result = if self.permits(shard, cached) {
            let queue = queue.get_or_init(|| ArrayQueue::new(self.depth(units)));
            queue.push(header).map_err(CacheRefusal::Full)
        } else {
            Err(CacheRefusal::Budget(header))
        };
        if result.is_err() {
            shard.cached.fetch_sub(units, Ordering::Relaxed);
        }
        result
    }

    fn depth(&self, units: u64) -> usize {
        (self.capacity / units.max(1)).clamp(1, MAX_DEPTH) as usize
    }

    /// Whether a shard may hold `cached` units. Takes the missing part from the budget if it can.
    fn permits(&self, shard: &Shard, cached: u64) -> bool {
        let missing = cached.saturating_sub(shard.limit.load(Ordering::Relaxed));
        if missing == 0 {
            return true;
        }
        let less = |budget: u64| budget.checked_sub(missing);
        if self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
            return false;
        }
        shard.limit.fetch_add(missing, Ordering::Relaxed);
        true
    }

    /// Takes a header without a block, or makes one.
    pub(crate) fn take_bare(&self, shard: usize) -> Box<TensorHeader> {
        self.shards[shard].bare.pop().unwrap_or_else(TensorHeader::empty)
    }

    /// Keeps a header without a block, or frees it if the shard holds enough.
    pub(crate) fn put_bare(&self, shard: usize, header: Box<TensorHeader>) {
        debug_assert!(matches!(header.storage, Storage::Empty));
        // A header that does not fit is dropped, which frees it.
        let _ = self.shards[shard].bare.push(header);
    }

    /// Takes every cached block out and passes it to `give`.
    pub(crate) fn drain(&self, mut give: impl FnMut(Block)) {
        for (index, shard) in self.shards.iter().enumerate() {
            for queue in shard.classes.iter().filter_map(OnceLock::get) {
                // Bounded by the present length: other threads may go on pushing.
                for mut header in std::iter::from_fn(|| queue.pop()).take(queue.len()) {
                    if let Storage::Block(block) = header.strip() {
                        shard.cached.fetch_sub(u64::from(block.units()), Ordering::Relaxed);
                        give(block);
                    }
                    self.put_bare(index, header);
                }
            }
            self.budget.fetch_add(shard.limit.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Units in all shards at some moment.
    pub(crate) fn cached(&self) -> u64 {
        self.shards.iter().map(|shard| shard.cached.load(Ordering::Relaxed)).sum()
    }
}

/// A small number for the calling thread, counted from 0 in the order in which threads first ask.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
