//! The pool: allocates tensors from a region.
#![allow(clippy::disallowed_types)] // the central allocator, when a magazine is refilled

pub(crate) mod central;
pub(crate) mod class;
pub(crate) mod error;
pub(crate) mod header;
pub(crate) mod magazine;
pub(crate) mod refcount;

use self::central::{Block, Central};
use self::class::SizeClass;
use self::error::PoolError;
use self::header::{ALIGN, Storage, TensorHeader};
use self::magazine::{CacheRefusal, Magazines};
use crate::memory::foreign::HeldOwner;
use crate::memory::fork::ForkGuard;
use crate::memory::region::Region;
use crate::memory::region::report::RegionReport;
use crate::memory::tensor::Tensor;
use crate::memory::tensor::tensor_mut::TensorMut;
use crate::wire::TensorMeta;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Units that the allocator can count.
const MAX_UNITS: u64 = 1 << 31;
/// Freed blocks are filled with this byte if `PoolOptions::poison` is set.
const POISON: u8 = 0xA5;
const MAX_SHARDS: usize = 64;

/// Settings of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Number of magazine shards, 1 to 64; rounded up to a power of two. Each thread uses one.
    pub shards: usize,
    /// Bytes of freed blocks that all magazines together keep for the next tensor of the same size.
    /// `None` means an eighth of the pool.
    ///
    /// A larger block is never cached: making and dropping such a tensor takes a lock. The best
    /// value is larger than what a training step drops and makes again. The magazines are emptied
    /// when they reach the bound, and before a tensor is refused.
    pub cache: Option<u64>,
    /// Blocks that the pool may consist of, free ones included: 16 to 16,777,216. Each takes 32
    /// bytes of heap.
    pub max_blocks: u32,
    /// Whether freed blocks are filled with 0xA5, so that a use of freed memory shows. On in debug
    /// builds.
    pub poison: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        PoolOptions {
            shards: cpus.min(MAX_SHARDS),
            cache: None,
            max_blocks: 1 << 17,
            poison: cfg!(debug_assertions),
        }
    }
}

/// State of a pool, in bytes but for the number of tensors. Other threads may change the pool while
/// it is read, so the figures need not add up exactly.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::DType;
/// let tensor = node.tensor(DType::F32, &[1024])?;
/// let stats = node.pool().stats();
/// assert!(stats.live_tensors >= 1 && stats.allocated >= 4096);
/// assert!(stats.peak >= stats.allocated && stats.capacity == 16 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes of the pool.
    pub capacity: u64,
    /// Bytes of the tensors' blocks: the tensors' sizes, rounded up.
    pub allocated: u64,
    /// Bytes that magazines keep for the next tensors.
    pub cached: u64,
    /// Bytes that are neither allocated nor cached.
    pub free: u64,
    /// Bytes that surely fit in one piece without emptying the magazines; up to an eighth more may
    /// fit.
    pub largest_free: u64,
    /// The largest sum of allocated and cached bytes so far.
    pub peak: u64,
    /// Tensors that have a handle or belong to a ring. Includes tensors without bytes, lent and
    /// foreign ones.
    pub live_tensors: usize,
}

/// Allocates tensors from a region. Clones are handles to the same pool. The memory lives until the
/// last handle *and* the last tensor are gone, in any order.
///
/// A trainer uses the pool of its [`Node`](crate::Node):
///
/// ```
/// use tensorwire::{DType, Node, Shape, Tensor, TensorMeta};
///
/// fn zeros(node: &Node) -> Result<Tensor, Box<dyn std::error::Error>> {
///     let pool = node.pool();
///     let tensor = pool.zeroed(TensorMeta::new(DType::F32, Shape::new(&[2, 3])?)?)?.freeze();
///     assert!(pool.stats().allocated >= 24);
///     Ok(tensor)
/// }
/// ```
#[derive(Clone)]
pub struct Pool {
    shards: Arc<[Arc<PoolShard>]>,
}

/// One shard of a pool. Each live tensor of the shard holds a reference.
///
/// The number of references is the number of live tensors, so two threads that make tensors share
/// no counter.
#[derive(Debug)]
pub(crate) struct PoolShard {
    shared: Arc<PoolState>,
    index: usize,
}

struct PoolState {
    // First: cached headers are dropped before the region that they point into.
    magazines: Magazines,
    central: Mutex<Central>,
    /// Bytes of a unit, a multiple of `ALIGN`.
    unit: u64,
    units: u32,
    max_blocks: u32,
    poison: bool,
    fork_guard: ForkGuard,
    /// Drops the owners of foreign memory, if set.
    drop_owner: OnceLock<DropOwner>,
    region: Region,
}

type DropOwner = Box<dyn Fn(HeldOwner) + Send + Sync>;

impl Pool {
    internal! {
        /// A pool that uses the whole region.
        ///
        /// # Errors
        /// [`PoolError::Option`] if an option is out of range.
        fn new(region: Region, options: PoolOptions) -> Result<Pool, PoolError> {
            check("shards", options.shards as u64, 1, MAX_SHARDS as u64, "it must be 1 to 64")?;
            let max_blocks = u64::from(options.max_blocks);
            check("max_blocks", max_blocks, 16, 1 << 24, "it must be 16 to 16,777,216")?;
            // Small units waste little; a large region has larger units, so that a `u32` can count
            // them.
            let unit = region.len().div_ceil(MAX_UNITS).next_power_of_two().max(ALIGN as u64);
            let units = (region.len() / unit) as u32;
            let cache = options.cache.unwrap_or(region.len() / 8).min(region.len());
            let shared = Arc::new(PoolState {
                magazines: Magazines::new(options.shards.next_power_of_two(), units, cache / unit),
                central: Mutex::new(Central::new(units, options.max_blocks)),
                unit,
                units,
                max_blocks: options.max_blocks,
                poison: options.poison,
                fork_guard: ForkGuard::of_this_process(),
                drop_owner: OnceLock::new(),
                region,
            });
            let shard = |index| Arc::new(PoolShard { shared: Arc::clone(&shared), index });
            Ok(Pool { shards: (0..shared.magazines.shards()).map(shard).collect() })
        }
    }

    /// A tensor of this element type and shape. Its contents are unspecified: old bytes of the
    /// block.
    ///
    /// Takes no lock and no heap memory if a tensor of about this size was dropped before.
    ///
    /// # Errors
    /// [`PoolError`] if there is no room.
    pub fn tensor(&self, meta: TensorMeta) -> Result<TensorMut, PoolError> {
        if self.shared().fork_guard.in_child() {
            return Err(PoolError::Forked);
        }
        let shard = &self.shards[self.shared().magazines.mine()];
        let mut header = match meta.bytes() {
            0 => shard.shared.magazines.take_bare(shard.index),
            _ => shard.shared.allocate(shard.index, &meta)?,
        };
        header.meta = meta;
        header.shard = Some(Arc::clone(shard));
        Ok(TensorMut::new(header))
    }

    /// As [`Pool::tensor`], with all bytes zero.
    ///
    /// # Errors
    /// As [`Pool::tensor`].
    pub fn zeroed(&self, meta: TensorMeta) -> Result<TensorMut, PoolError> {
        let mut tensor = self.tensor(meta)?;
        tensor.bytes_mut().fill(0);
        Ok(tensor)
    }

    /// A tensor without elements, as [`Tensor::empty`].
    pub fn empty(&self) -> Tensor {
        Tensor::without_elements(self.bare())
    }

    /// A header without bytes that returns to this pool's magazines.
    pub(crate) fn bare(&self) -> Box<TensorHeader> {
        let shard = &self.shards[self.shared().magazines.mine()];
        let mut header = shard.shared.magazines.take_bare(shard.index);
        header.shard = Some(Arc::clone(shard));
        header
    }

    internal! {
        /// Calls `end` to drop an owner of foreign memory whose last user was a tensor of this
        /// pool. Without `end` the owner is dropped on the tensor's thread, which may be a poller.
        /// Only the first call has an effect.
        fn drop_owners_with(&self, end: impl Fn(HeldOwner) + Send + Sync + 'static) {
            let _ = self.shared().drop_owner.set(Box::new(end));
        }
    }

    /// State of the pool. In a forked child, which has no part in the pool, everything but the
    /// capacity is 0.
    pub fn stats(&self) -> PoolStats {
        let shared = self.shared();
        if shared.fork_guard.in_child() {
            let capacity = u64::from(shared.units) * shared.unit;
            return PoolStats {
                capacity,
                allocated: 0,
                cached: 0,
                free: 0,
                largest_free: 0,
                peak: 0,
                live_tensors: 0,
            };
        }
        let room = shared.central().room();
        let cached = shared.magazines.cached();
        let bytes = |units: u32| u64::from(units) * shared.unit;
        let taken = shared.units - room.free;
        PoolStats {
            capacity: bytes(shared.units),
            allocated: u64::from(taken).saturating_sub(cached) * shared.unit,
            cached: cached * shared.unit,
            free: bytes(room.free),
            largest_free: bytes(room.largest),
            peak: bytes(shared.units - room.least_free),
            live_tensors: self.live(),
        }
    }

    /// The pages that the region got from the kernel.
    pub fn report(&self) -> &RegionReport {
        self.region().report()
    }

    internal! {
        /// The region that holds the tensors.
        fn region(&self) -> &Region {
            &self.shared().region
        }
    }

    /// Whether the pool has no live tensor.
    pub fn is_empty(&self) -> bool {
        self.live() == 0
    }

    fn live(&self) -> usize {
        self.shards.iter().map(|shard| Arc::strong_count(shard) - 1).sum()
    }

    fn shared(&self) -> &PoolState {
        &self.shards[0].shared
    }
}

fn check(
    option: &'static str,
    value: u64,
    least: u64,
    most: u64,
    allowed: &'static str,
) -> Result<(), PoolError> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(PoolError::Option { option, value, allowed }) }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.shared().fork_guard.in_child() {
            // A forked child: another thread of the parent may have been at the magazines, so they
            // are not dropped.
            std::mem::forget(Arc::clone(&self.shards));
        }
    }
}

impl PoolShard {
    /// Whether this process was forked from the one that made the pool.
    pub(crate) fn in_child(&self) -> bool {
        self.shared.fork_guard.in_child()
    }

    /// Takes back a header whose last handle is gone.
    pub(crate) fn put_back(&self, mut header: Box<TensorHeader>) {
        if header.is_leaked() {
            // The block stays allocated and unchanged as long as the pool exists.
            return std::mem::forget(header.strip());
        }
        let PoolState { magazines, poison, .. } = &*self.shared;
        let Storage::Block(block) = &header.storage else {
            match header.strip() {
                Storage::Foreign(memory) => memory.release(self.shared.drop_owner.get().map(|end| &**end)),
                // The registration goes first: the thread that drops the owner then finds no
                // registration in use.
                Storage::Registered(tensor, registered) => {
                    drop(registered);
                    drop(tensor);
                }
                // Ends the loan of a lent tensor.
                storage => drop(storage),
            }
            return magazines.put_bare(self.index, header);
        };
        let class = block.class;
        if *poison {
            // SAFETY: the last handle is gone, so no thread reads these bytes; they belong to the
            // block.
            unsafe { header.data.write_bytes(POISON, header.capacity) };
        }
        let refused = match class {
            Some(class) => self.cache(class, header).err(),
            None => Some(header),
        };
        let Some(mut header) = refused else { return };
        if let Storage::Block(block) = header.strip() {
            self.shared.central().free(block);
        }
        magazines.put_bare(self.index, header);
    }

    /// Keeps a header with its block for the next tensor of its class.
    ///
    /// If the magazines are full, they are emptied first: blocks of sizes that are no longer used
    /// would otherwise fill them for ever.
    fn cache(&self, class: SizeClass, header: Box<TensorHeader>) -> Result<(), Box<TensorHeader>> {
        let PoolState { magazines, .. } = &*self.shared;
        let header = match magazines.put(self.index, class, header) {
            Ok(()) => return Ok(()),
            Err(CacheRefusal::Full(header)) => return Err(header),
            Err(CacheRefusal::Budget(header)) => header,
        };
        self.shared.empty_caches(&mut self.shared.central());
        magazines
            .put(self.index, class, header)
            .map_err(|(CacheRefusal::Full(header) | CacheRefusal::Budget(header))| header)
    }

    /// Number of the region, and offset of a block in it in bytes.
    pub(crate) fn place(&self, block: &Block) -> (u16, u64) {
        (self.shared.region.id(), u64::from(block.offset()) * self.shared.unit)
    }
}

impl PoolState {
    /// A header with a block for a tensor of at least one byte.
    fn allocate(&self, shard: usize, meta: &TensorMeta) -> Result<Box<TensorHeader>, PoolError> {
        let asked = meta.bytes();
        let units = match u32::try_from(asked.div_ceil(self.unit)) {
            Ok(units) if units <= self.units => units,
            _ => {
                let capacity = u64::from(self.units) * self.unit;
                return Err(PoolError::TooLarge { meta: meta.clone(), asked, capacity });
            }
        };
        let class = SizeClass::holding(units);
        if let Some(header) = self.magazines.take(shard, class) {
            return Ok(header);
        }
        let block = self.refill(units, class).ok_or_else(|| self.why_not(asked))?;
        let mut header = self.magazines.take_bare(shard);
        // SAFETY: the block lies inside the region: the allocator was made with the number of whole
        // units in it. So the sum is inside the mapping, and below isize::MAX.
        header.data = unsafe { self.region.base().add(block.offset() as usize * self.unit as usize) };
        header.capacity = block.units() as usize * self.unit as usize;
        header.storage = Storage::Block(block);
        Ok(header)
    }

    /// Takes a block from the central allocator. If that has no room, all magazines are emptied
    /// first.
    fn refill(&self, units: u32, class: SizeClass) -> Option<Block> {
        let mut central = self.central();
        let of_class = |central: &mut Central| {
            self.magazines.caches(class).then(|| central.allocate_class(class)).flatten()
        };
        if let Some(block) = of_class(&mut central) {
            return Some(block);
        }
        if !self.magazines.caches(class)
            && let Some(block) = central.allocate_exact(units)
        {
            return Some(block);
        }
        self.empty_caches(&mut central);
        of_class(&mut central).or_else(|| central.allocate_exact(units))
    }

    /// Runs under the lock: the second of two threads that empty the magazines finds what the first
    /// one freed.
    fn empty_caches(&self, central: &mut Central) {
        self.magazines.drain(|block| central.free(block));
    }

    fn why_not(&self, asked: u64) -> PoolError {
        let room = self.central().room();
        let free = u64::from(room.free) * self.unit;
        if room.table_full {
            return PoolError::TableFull { max_blocks: self.max_blocks, free };
        }
        PoolError::Exhausted {
            asked,
            free,
            largest_free: u64::from(room.largest) * self.unit,
            capacity: u64::from(self.units) * self.unit,
        }
    }

    /// No critical section can panic halfway, so the state under a poisoned lock is sound.
    fn central(&self) -> MutexGuard<'_, Central> {
        self.central.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.stats()).finish()
    }
}

impl fmt::Debug for PoolState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolState").field("region", &self.region.id()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{PagePolicy, RegionOptions};
    use crate::wire::{DType, Shape};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn a_size_that_was_seen_before_is_made_and_dropped_without_the_lock() {
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
        let region = Region::create(0, &region).expect("region");
        let pool = Pool::new(region, PoolOptions { shards: 1, ..PoolOptions::default() }).expect("pool");
        let sizes = [0, 1, 64, 1000, 5000, 40_000];
        let round = move |pool: &Pool| {
            let meta = |size| TensorMeta::new(DType::U8, Shape::new(&[size]).expect("shape")).expect("meta");
            let tensors = sizes.map(|size| pool.tensor(meta(size)).expect("room").freeze());
            drop(tensors.clone());
        };
        round(&pool);
        let locked = pool.shared().central();
        let (send, receive) = mpsc::channel();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            round(&other);
            send.send(()).expect("main thread");
        });
        let result = receive.recv_timeout(Duration::from_secs(10));
        drop(locked);
        thread.join().expect("no panic");
        result.expect("it waited for the lock");
    }
}
