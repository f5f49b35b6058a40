//! The state of a pool: the central allocator, and the way of a block out of it and back.
#![allow(clippy::disallowed_types)] // the central allocator, when a magazine is refilled or emptied

use super::central::{Block, Central, CentralStats};
use super::chain::Chain;
use super::class::SizeClass;
use super::error::PoolError;
use super::header::{ALIGN, NO_MAGAZINE, Storage, TensorHeader};
use super::magazine::{Collected, Entered, MagazineList, Magazines, NotEntered, Purpose};
use super::{DropOwner, POISON, PoolOptions};
use crate::memory::fork::ForkGuard;
use crate::memory::region::Region;
use crate::wire::TensorMeta;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Units that the allocator can count.
const MAX_UNITS: u64 = 1 << 31;

/// A pool as its tensors see it. Lives until the [`OpenPool`] and the last tensor are gone.
pub(crate) struct PoolState {
    // First: cached headers are dropped before the region that they point into.
    magazines: Magazines,
    central: Mutex<CentralAndCollected>,
    /// Held by the thread that stops the owners of the magazines, while they are stopped. Taken
    /// after `central`.
    pausing: Mutex<()>,
    /// Bytes of a unit, as a power of two: a multiple of `ALIGN`.
    unit_bits: u32,
    units: u32,
    max_blocks: u32,
    poison: bool,
    fork_guard: ForkGuard,
    /// Drops the owners of foreign memory, if set.
    pub(super) drop_owner: OnceLock<DropOwner>,
    region: Region,
}

pub(super) struct CentralAndCollected {
    central: Central,
    collected: Collected,
    /// [`Magazines::dropped`] when the magazines were emptied.
    emptied_at: u64,
}

/// All handles of a pool. Its drop closes the pool.
pub(crate) struct OpenPool(NonNull<PoolState>);

// SAFETY: a shared reference to the state, which is Sync; its drop, on any thread, may drop the
// state, which is Send.
unsafe impl Send for OpenPool {}
// SAFETY: as above.
unsafe impl Sync for OpenPool {}
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<PoolState>();
};

impl OpenPool {
    /// `has_membarrier`: as for [`super::gate::Gate::new`].
    pub(crate) fn new(region: Region, options: &PoolOptions, has_membarrier: bool) -> OpenPool {
        // Small units waste little; a large region has larger units, so that a `u32` can count
        // them.
        let unit = region.len().div_ceil(MAX_UNITS).next_power_of_two().max(ALIGN as u64);
        let units = (region.len() / unit) as u32;
        let cache = options.cache.unwrap_or(region.len() / 8).min(region.len());
        let central = CentralAndCollected {
            // A pool has no more blocks than units. The allocator wants two more places.
            central: Central::new(units, options.max_blocks.min(units.saturating_add(2))),
            collected: Collected::default(),
            emptied_at: 0,
        };
        let state = Box::new(PoolState {
            magazines: Magazines::new(units, cache / unit, has_membarrier),
            central: Mutex::new(central),
            pausing: Mutex::new(()),
            unit_bits: unit.trailing_zeros(),
            units,
            max_blocks: options.max_blocks,
            poison: options.poison,
            fork_guard: ForkGuard::of_this_process(),
            drop_owner: OnceLock::new(),
            region,
        });
        OpenPool(NonNull::from(Box::leak(state)))
    }

    /// Whether the header is of this pool.
    #[inline]
    pub(super) fn owns(&self, header: &TensorHeader) -> bool {
        header.pool == Some(self.0)
    }

    /// A header with a block for so many bytes, if this thread's magazine has one at hand. Counts
    /// it as a live tensor.
    #[inline(always)] // on the short path
    pub(super) fn cached(&self, purpose: Purpose, bytes: u64) -> Option<Box<TensorHeader>> {
        if self.in_child() {
            return None;
        }
        // 0 bytes wrap around to more than the largest class that is cached.
        let last_unit = bytes.wrapping_sub(1) >> self.unit_bits;
        self.magazines.take_own(purpose, SizeClass::holding(last_unit + 1))
    }

    /// A header with a block for a tensor of at least one byte. Counts it as a live tensor.
    pub(super) fn allocate(
        &self,
        purpose: Purpose,
        meta: &TensorMeta,
    ) -> Result<Box<TensorHeader>, PoolError> {
        let asked = meta.bytes();
        let units = match u32::try_from(asked.div_ceil(1 << self.unit_bits)) {
            Ok(units) if units <= self.units => units,
            _ => {
                let capacity = self.bytes(self.units);
                return Err(PoolError::TooLarge { meta: meta.clone(), asked, capacity });
            }
        };
        let class = SizeClass::holding(units.into());
        let cached = self.in_magazine(|magazine| magazine.take(purpose, class));
        if let Some(header) = cached.flatten() {
            return Ok(header);
        }
        let block = self.refill(units, class).ok_or_else(|| self.why_not(asked))?;
        let mut header = self.bare();
        if header.magazine != NO_MAGAZINE && block.units() == class.units() {
            header.list = self.magazines.list(purpose, class);
        }
        // SAFETY: the block lies inside the region: the allocator was made with the number of whole
        // units in it. So the sum is inside the mapping, and below isize::MAX.
        header.data = unsafe { self.region.base().add(self.bytes(block.offset()) as usize) };
        header.capacity = self.bytes(block.units()) as usize;
        header.storage = Storage::Block(block);
        Ok(header)
    }

    /// A header without a block. Counts it as a live tensor.
    #[inline]
    pub(super) fn bare(&self) -> Box<TensorHeader> {
        self.magazines.take_bare_own().unwrap_or_else(|| self.bare_elsewhere())
    }

    /// As [`OpenPool::bare`], if this thread has no header at hand.
    #[cold]
    fn bare_elsewhere(&self) -> Box<TensorHeader> {
        let taken = self.in_magazine(|magazine| {
            magazine.count_made();
            (magazine.take_bare(), magazine.index() as u32)
        });
        let (header, magazine) = taken.unwrap_or_else(|| {
            self.magazines.count_made();
            (None, NO_MAGAZINE)
        });
        let mut header = header.unwrap_or_else(TensorHeader::empty);
        header.pool = Some(self.0);
        header.magazine = magazine;
        header
    }

    /// Runs `body` in this thread's magazine, which `body` must not enter again. `None` if the
    /// thread has no magazine.
    #[inline]
    fn in_magazine<R>(&self, body: impl FnOnce(&mut Entered<'_>) -> R) -> Option<R> {
        loop {
            match self.magazines.enter() {
                Ok(mut magazine) => return Some(body(&mut magazine)),
                Err(NotEntered::Paused) => self.wait_for_resume(),
                Err(NotEntered::NoMagazine) => return None,
            }
        }
    }
}

impl std::ops::Deref for OpenPool {
    type Target = PoolState;

    #[inline]
    fn deref(&self) -> &PoolState {
        // SAFETY: the state is not freed before this is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for OpenPool {
    fn drop(&mut self) {
        if self.in_child() {
            // A forked child: another thread of the parent may have been at the magazines, so they
            // are not dropped.
            return;
        }
        let closed = {
            let _pausing = self.lock_pausing();
            self.magazines.close()
        };
        // Without a count of the live tensors the state stays for ever.
        if closed.is_some_and(|live| self.magazines.end(live)) {
            // SAFETY: no handle and no tensor is left (`Magazines::end`), so nothing refers to the
            // leaked box.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

impl PoolState {
    /// Whether this process was forked from the one that made the pool.
    #[inline]
    pub(crate) fn in_child(&self) -> bool {
        self.fork_guard.in_child()
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Number of the region, and offset of a block in it in bytes.
    pub(crate) fn place(&self, block: &Block) -> (u16, u64) {
        (self.region.id(), self.bytes(block.offset()))
    }

    /// Bytes of so many units.
    pub(super) fn bytes(&self, units: u32) -> u64 {
        u64::from(units) << self.unit_bits
    }

    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// State of the central allocator, and the number of units in the magazines.
    pub(super) fn room(&self) -> (CentralStats, u32) {
        let locked = self.lock_central();
        (locked.central.room(), self.magazines.cached() as u32)
    }

    /// Live tensors.
    pub(super) fn live(&self) -> usize {
        usize::try_from(self.magazines.live()).unwrap_or(0)
    }

    /// Takes a block from the central allocator. If that has no room, all magazines are emptied
    /// first.
    fn refill(&self, units: u32, class: SizeClass) -> Option<Block> {
        let is_cached = self.magazines.caches(class);
        let of_class = |central: &mut Central| is_cached.then(|| central.allocate_class(class)).flatten();
        let mut locked = self.lock_central();
        let block = of_class(&mut locked.central)
            .or_else(|| (!is_cached).then(|| locked.central.allocate_exact(units)).flatten());
        if block.is_some() {
            return block;
        }
        let bare = self.empty_magazines(&mut locked, None);
        let block = of_class(&mut locked.central).or_else(|| locked.central.allocate_exact(units));
        drop(locked);
        self.keep_bare(bare);
        block
    }

    /// Makes room in the magazines for a block of a list.
    #[cold]
    fn make_room(&self, list: MagazineList) {
        let mut locked = self.lock_central();
        let bare = self.empty_magazines(&mut locked, Some(list));
        drop(locked);
        self.keep_bare(bare);
    }

    /// Frees the blocks in all magazines. With a list, only if the magazines have no room for one
    /// more block of it. Returns the blocks' headers.
    ///
    /// Runs under the lock: the second of two threads that empty the magazines finds what the first
    /// one freed.
    fn empty_magazines(
        &self,
        locked: &mut CentralAndCollected,
        list: Option<MagazineList>,
    ) -> Chain<TensorHeader> {
        let CentralAndCollected { central, collected, emptied_at } = locked;
        if list.is_none() && *emptied_at == self.magazines.dropped() {
            // A caller that waits for room tries again and again: it must not stop the owners each
            // time.
            return Chain::new();
        }
        {
            // The owners are stopped while the lists change hands, and go on while their blocks are
            // freed.
            let _pausing = self.lock_pausing();
            let paused = self.magazines.pause();
            match (paused, list) {
                (Some(paused), Some(list)) => paused.make_room(list, collected),
                (Some(paused), None) => {
                    paused.collect(collected);
                    *emptied_at = self.magazines.dropped();
                }
                (None, _) => {}
            }
        }
        let mut bare = Chain::new();
        collected.drain(|mut header| {
            if let Storage::Block(block) = header.strip() {
                central.free(block);
            }
            bare.push(header);
        });
        bare
    }

    /// Keeps headers without blocks for this thread's next tensors.
    fn keep_bare(&self, mut headers: Chain<TensorHeader>) {
        // A thread that cannot enter now frees them.
        let Ok(mut magazine) = self.magazines.enter() else { return };
        while let Some(header) = headers.pop() {
            magazine.put_bare(header);
        }
    }

    fn why_not(&self, asked: u64) -> PoolError {
        let room = self.lock_central().central.room();
        let free = self.bytes(room.free);
        if room.table_full {
            return PoolError::TableFull { max_blocks: self.max_blocks, free };
        }
        let (largest_free, capacity) = (self.bytes(room.largest), self.bytes(self.units));
        PoolError::Exhausted { asked, free, largest_free, capacity }
    }

    /// Takes back the header of a tensor whose last handle is gone, if its block goes to this
    /// thread's magazine as it is. Refuses others.
    ///
    /// # Safety
    /// As for [`PoolState::put_back`].
    #[inline]
    pub(crate) unsafe fn put_back_own(
        this: NonNull<PoolState>,
        header: Box<TensorHeader>,
    ) -> Result<(), Box<TensorHeader>> {
        // SAFETY: as in `put_back`.
        let pool = unsafe { this.as_ref() };
        if pool.poison || pool.in_child() || header.is_leaked() {
            return Err(header);
        }
        let Some(list) = header.list else {
            // SAFETY: the caller's promise.
            return unsafe { PoolState::put_back_lent(this, header) };
        };
        let Some(mut magazine) = pool.magazines.enter_own() else { return Err(header) };
        let put = magazine.put_own(header, list);
        // The pool may be gone from here on, unless the header was refused.
        drop(magazine);
        put
    }

    /// As [`PoolState::put_back_own`], for a lent tensor. Ends the loan.
    ///
    /// # Safety
    /// As for [`PoolState::put_back`].
    #[inline(never)] // keeps the way back of a block short
    unsafe fn put_back_lent(
        this: NonNull<PoolState>,
        mut header: Box<TensorHeader>,
    ) -> Result<(), Box<TensorHeader>> {
        if !matches!(header.storage, Storage::Lent(_)) {
            return Err(header);
        }
        if let Storage::Lent(bytes) = header.strip() {
            drop(bytes);
        }
        // SAFETY: as in `put_back`.
        let pool = unsafe { this.as_ref() };
        let Some(mut magazine) = pool.magazines.enter_own() else { return Err(header) };
        let put = magazine.put_bare_own(header);
        // As above.
        drop(magazine);
        put
    }

    /// Takes back the header of a tensor whose last handle is gone.
    ///
    /// # Safety
    /// The header is that of a live tensor of this pool.
    pub(crate) unsafe fn put_back(this: NonNull<PoolState>, mut header: Box<TensorHeader>) {
        // SAFETY: the pool does not end before this live tensor is counted as dropped, which is the
        // last use of `pool` below.
        let pool = unsafe { this.as_ref() };
        pool.take_storage(&mut header);
        let mut list = header.list;
        loop {
            match pool.magazines.enter() {
                Ok(mut magazine) => {
                    let put = magazine.put(header);
                    // The pool may be gone from here on, unless the header was refused.
                    drop(magazine);
                    let Err(refused) = put else { return };
                    header = refused;
                }
                Err(NotEntered::Paused) => {
                    pool.wait_for_resume();
                    continue;
                }
                Err(NotEntered::NoMagazine) => {
                    pool.free_block(&mut header);
                    drop(header);
                    if pool.magazines.count_dropped() {
                        // SAFETY: the pool is closed, and this was its last tensor, so nothing else
                        // refers to the leaked box (`OpenPool::new`).
                        drop(unsafe { Box::from_raw(this.as_ptr()) });
                    }
                    return;
                }
            }
            // The magazines are full. Blocks of sizes that are no longer used would otherwise fill
            // them for ever. If others fill them meanwhile, the block is not cached.
            match list.take() {
                Some(list) => pool.make_room(list),
                None => pool.free_block(&mut header),
            }
        }
    }

    /// Takes out of a dropped tensor's header what the magazines do not keep.
    fn take_storage(&self, header: &mut TensorHeader) {
        if header.is_leaked() {
            // The block stays allocated and unchanged as long as the pool exists.
            header.is_leaked = AtomicBool::new(false);
            return std::mem::forget(header.strip());
        }
        match &header.storage {
            Storage::Empty => {}
            Storage::Block(_) => {
                if self.poison {
                    // SAFETY: the last handle is gone, so no thread reads these bytes; they belong
                    // to the block.
                    unsafe { header.data.write_bytes(POISON, header.capacity) };
                }
                if header.list.is_none() {
                    self.free_block(header);
                }
            }
            Storage::Lent(_) | Storage::Foreign(_) | Storage::Registered(..) => match header.strip() {
                Storage::Foreign(memory) => memory.release(self.drop_owner.get().map(|end| &**end)),
                // The registration goes first: the thread that drops the owner then finds no
                // registration in use.
                Storage::Registered(tensor, registered) => {
                    drop(registered);
                    drop(tensor);
                }
                // Ends the loan of a lent tensor.
                storage => drop(storage),
            },
        }
    }

    /// Gives a header's block back to the central allocator, if the header has one.
    fn free_block(&self, header: &mut TensorHeader) {
        if let Storage::Block(block) = header.strip() {
            self.lock_central().central.free(block);
        }
    }

    /// Waits until the thread that has stopped the owners of the magazines lets them go on.
    #[cold]
    fn wait_for_resume(&self) {
        drop(self.lock_pausing());
    }

    /// No critical section can panic halfway, so the state under a poisoned lock is sound.
    pub(super) fn lock_central(&self) -> MutexGuard<'_, CentralAndCollected> {
        self.central.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_pausing(&self) -> MutexGuard<'_, ()> {
        self.pausing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PoolState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolState").field("region", &self.region.id()).finish_non_exhaustive()
    }
}
