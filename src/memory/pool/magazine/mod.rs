//! Magazines: caches of free blocks in front of the central allocator.
//!
//! Each thread that makes or drops tensors owns one magazine of the pool: the one at its
//! [`thread_index`]. A magazine has a last-in first-out list of headers with their blocks for each
//! size class and purpose. Its owner makes and drops tensors with plain loads and stores, and gets
//! the block that it used last.
//!
//! A block returns to the magazine of the thread that took it from the central allocator. Another
//! thread that drops it pushes it to a lock-free list of that magazine. The owner takes over that
//! list as a whole when its own list is empty. A thread's successor at its index takes over its
//! magazine.
//!
//! Blocks that receive a peer's bytes ([`Purpose::Landing`]) have lists of their own. A peer's
//! cache still holds the lines of a block that the peer has just read. Each line that is written
//! there costs a message between the caches.
//!
//! A budget bounds the size of all magazines together. An owner takes a part of the budget for what
//! it drops, whichever magazine that goes to. An owner whose blocks are mostly dropped by others
//! gives budget back.
//!
//! A [`Gate`] stops the owners while another thread collects from all magazines. Between
//! [`Magazines::enter`] and the drop of [`Entered`] no code runs that could come back here.

mod paused;

pub(crate) use self::paused::{Collected, Paused};
use super::chain::{Chain, RemoteList};
use super::class::SizeClass;
use super::gate::{Gate, Presence, Stopped};
use super::header::{Storage, TensorHeader};
use crate::memory::sync::{AtomicI64, AtomicPtr, AtomicU64, AtomicUsize, Ordering, UnsafeCell, fence};
use crate::sync::{MAX_THREADS, known_thread_index, thread_index};
use crossbeam_utils::CachePadded;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::ptr;

/// Headers without blocks that an owner keeps at most; more are given back to the heap.
const BARE_DEPTH: usize = 1024;
/// Parts of the capacity: an owner takes at least one from the budget.
const BATCHES: i64 = 64;
/// Batches that an owner has too many before it gives budget back.
const SPARE_BATCHES: i64 = 8;
/// In [`SharedCounts::live`] until the pool is closed, so that it is not 0 before.
const OPEN: i64 = 1 << 62;

/// What a block is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// This process writes it, and may send it.
    Source,
    /// It receives what a peer sends.
    Landing,
}

/// The list of a magazine for the blocks of one class and purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MagazineList {
    /// In [`ClassLists`].
    index: u32,
    /// Units of each block.
    pub(crate) units: NonZeroU32,
}

/// The lists of a magazine: one for each class and purpose, and an empty one. [`Collected`] has the
/// blocks of the remote list there.
type ClassLists = Box<[Chain<TensorHeader>]>;

/// The magazines of a pool.
#[derive(Debug)]
pub(crate) struct Magazines {
    gate: Gate,
    /// The magazine of each thread index, made when that thread first makes or drops a tensor. Only
    /// that thread makes it. It then stays until the pool ends.
    table: Box<[AtomicPtr<Magazine>]>,
    classes: usize,
    /// Units that may be cached in all.
    capacity: i64,
    /// The least that an owner takes from the budget, and gives back.
    batch: i64,
    shared: CachePadded<SharedCounts>,
}

#[derive(Debug)]
struct SharedCounts {
    /// The part of the capacity that no owner has taken.
    budget: AtomicI64,
    /// All magazines are below this index.
    used: AtomicUsize,
    /// Live tensors that the magazines do not count, and [`OPEN`] until the pool is closed.
    /// A tensor that a magazine counted as made, and that was dropped without one, counts -1.
    live: AtomicI64,
}

#[derive(Debug)]
struct Magazine {
    /// Headers that other threads have dropped, with and without blocks.
    remote: CachePadded<RemoteList<TensorHeader>>,
    presence: Presence,
    // Written only by the owner and by the thread that stopped all owners. Others read them.
    /// Tensors that the owner has made.
    made: AtomicU64,
    /// Tensors that the owner has dropped, of any magazine.
    dropped: AtomicU64,
    /// Units that the owner has put into any magazine, less those that were taken out of this one.
    /// The sum over all magazines is the number of cached units.
    cached: AtomicI64,
    owned: UnsafeCell<Owned>,
}

/// What only the owner touches, between entering and leaving, and the thread that stopped all
/// owners.
#[derive(Debug)]
struct Owned {
    lists: ClassLists,
    bare: Chain<TensorHeader>,
    bare_len: usize,
    /// The part of the budget that the owner has. `cached` is not above it.
    limit: i64,
}

// SAFETY: `owned` is reached only through `Entered` and `Paused`. An `Entered` is on the one thread
// that has the index. `Gate` keeps it and a `Paused` apart, and orders them. An index passes to the
// next thread with everything that the former one did (`thread_index`).
unsafe impl Sync for Magazine {}
// SAFETY: the lists own headers, which are Send.
unsafe impl Send for Magazine {}

/// The calling thread in its magazine.
pub(crate) struct Entered<'a> {
    magazines: &'a Magazines,
    magazine: &'a Magazine,
    index: usize,
    /// Stays on the thread.
    _thread: PhantomData<*const ()>,
}

/// Why a thread could not enter a magazine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotEntered {
    /// Another thread has stopped the owners for a moment.
    Paused,
    /// The pool is closed, or the thread has no index.
    NoMagazine,
}

impl Magazines {
    /// Magazines for blocks of up to `units` units, which hold `capacity` units in all.
    pub(crate) fn new(units: u32, capacity: u64, has_membarrier: bool) -> Magazines {
        Magazines::with_threads(MAX_THREADS, units, capacity, has_membarrier)
    }

    fn with_threads(threads: usize, units: u32, capacity: u64, has_membarrier: bool) -> Magazines {
        let capacity = capacity as i64;
        Magazines {
            gate: Gate::new(has_membarrier),
            table: (0..threads).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            classes: SizeClass::all_within(units.into()).count(),
            capacity,
            batch: (capacity / BATCHES).max(1),
            shared: CachePadded::new(SharedCounts {
                budget: AtomicI64::new(capacity),
                used: AtomicUsize::new(0),
                live: AtomicI64::new(OPEN),
            }),
        }
    }

    /// Whether blocks of this class are cached at all.
    pub(crate) fn caches(&self, class: SizeClass) -> bool {
        i64::from(class.units()) <= self.capacity && class.index() < self.classes
    }

    /// The list of blocks of this class, if they are cached.
    pub(crate) fn list(&self, purpose: Purpose, class: SizeClass) -> Option<MagazineList> {
        let units = NonZeroU32::new(class.units())?;
        self.caches(class).then(|| MagazineList { index: list_index(purpose, class) as u32, units })
    }

    /// A header as of [`Entered::take`], if the calling thread finds one in its own lists.
    #[inline(always)] // on the short path
    pub(crate) fn take_own(&self, purpose: Purpose, class: SizeClass) -> Option<Box<TensorHeader>> {
        self.enter_own()?.take_own(purpose, class)
    }

    /// A header as of [`Entered::take_bare`], if the calling thread finds one in its own list.
    /// Counts it as a live tensor.
    #[inline]
    pub(crate) fn take_bare_own(&self) -> Option<Box<TensorHeader>> {
        let mut magazine = self.enter_own()?;
        let mut header = magazine.owned(Owned::take_bare)?;
        header.magazine = magazine.index as u32;
        magazine.count_made();
        Some(header)
    }

    /// As [`Magazines::enter`], for a thread that has been in its magazine before.
    #[inline(always)] // on the short path
    pub(crate) fn enter_own(&self) -> Option<Entered<'_>> {
        let index = known_thread_index();
        let magazine = self.at(index)?;
        self.gate.enter(&magazine.presence).ok()?;
        Some(Entered { magazines: self, magazine, index, _thread: PhantomData })
    }

    /// Lets the calling thread into its magazine, which it must not be in yet.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, NotEntered> {
        self.enter_at(thread_index().ok_or(NotEntered::NoMagazine)?)
    }

    /// `index` is the calling thread's.
    fn enter_at(&self, index: usize) -> Result<Entered<'_>, NotEntered> {
        let magazine = match self.at(index) {
            Some(magazine) => magazine,
            None => self.first(index),
        };
        match self.gate.enter(&magazine.presence) {
            Ok(()) => Ok(Entered { magazines: self, magazine, index, _thread: PhantomData }),
            Err(Stopped::Paused) => Err(NotEntered::Paused),
            Err(Stopped::Closed) => Err(NotEntered::NoMagazine),
        }
    }

    #[inline]
    fn at(&self, index: usize) -> Option<&Magazine> {
        // Acquire: pairs with the release in `first`.
        let magazine = self.table.get(index)?.load(Ordering::Acquire);
        // SAFETY: null, or a leaked box that is freed with `self`.
        unsafe { magazine.as_ref() }
    }

    #[cold]
    fn first(&self, index: usize) -> &Magazine {
        let magazine = Box::into_raw(Box::new(Magazine {
            remote: CachePadded::new(RemoteList::new()),
            presence: Presence::new(),
            made: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            cached: AtomicI64::new(0),
            owned: UnsafeCell::new(Owned { lists: self.lists(), bare: Chain::new(), bare_len: 0, limit: 0 }),
        }));
        // Release: whoever finds the magazine finds all of it.
        self.table[index].store(magazine, Ordering::Release);
        // Relaxed: only the table leads to the magazine. Both are stored, in any order, before the
        // owner enters: the thread that stops the owners reads them behind its barrier.
        self.shared.used.fetch_max(index + 1, Ordering::Relaxed);
        // SAFETY: as in `at`.
        unsafe { &*magazine }
    }

    fn lists(&self) -> ClassLists {
        (0..2 * self.classes + 1).map(|_| Chain::new()).collect()
    }

    fn iter(&self) -> impl Iterator<Item = &Magazine> {
        let used = self.shared.used.load(Ordering::Relaxed);
        (0..used).filter_map(|index| self.at(index))
    }

    /// Counts a tensor that a thread without a magazine has made.
    pub(crate) fn count_made(&self) {
        // Relaxed: no thread waits for this number to rise.
        self.shared.live.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a tensor that was dropped without a magazine. Returns whether the pool is closed and
    /// this was its last tensor. Otherwise the pool may be gone when this returns.
    pub(crate) fn count_dropped(&self) -> bool {
        self.change_live(-1)
    }

    fn change_live(&self, by: i64) -> bool {
        // Release: what this thread did with the pool happened before the pool ends.
        if self.shared.live.fetch_add(by, Ordering::Release) + by != 0 {
            return false;
        }
        // Acquire: and so did what the others did.
        fence(Ordering::Acquire);
        true
    }

    /// Stops all owners. One thread at a time may do that. `None` if the pool is closed, or the
    /// kernel refuses the barrier.
    pub(crate) fn pause(&self) -> Option<Paused<'_>> {
        if self.gate.is_closed() || !self.gate.pause() {
            return None;
        }
        // Only now: a magazine that was not in the table before the barrier lets nobody in.
        self.iter().for_each(|magazine| magazine.presence.wait());
        Some(Paused(self))
    }

    /// Stops all owners for good. The thread that calls this must be the only one to stop them, and
    /// no more tensors may be made.
    ///
    /// Returns the live tensors, for [`Magazines::end`]. `None` if the kernel refuses the barrier:
    /// the number of live tensors is not known then.
    pub(crate) fn close(&self) -> Option<i64> {
        if !self.gate.close() {
            return None;
        }
        self.iter().for_each(|magazine| magazine.presence.wait());
        Some(self.counted())
    }

    /// The second half of [`Magazines::close`]. Returns whether there are no tensors. Otherwise the
    /// pool may be gone when this returns: the thread that drops the last tensor ends it.
    pub(crate) fn end(&self, counted: i64) -> bool {
        self.change_live(counted - OPEN)
    }

    /// Live tensors. Exact while no thread makes or drops one; otherwise not too small.
    pub(crate) fn live(&self) -> i64 {
        self.shared.live.load(Ordering::Acquire) - OPEN + self.counted()
    }

    /// Live tensors, less those that were dropped and plus those that were made without a magazine.
    fn counted(&self) -> i64 {
        // Drops are counted first: a tensor that is made meanwhile does not stand for another one.
        let dropped = self.dropped();
        let made = self.iter().map(|magazine| magazine.made.load(Ordering::Relaxed));
        made.fold(0, u64::wrapping_add).wrapping_sub(dropped) as i64
    }

    /// Tensors that were dropped so far, by threads with a magazine. While it stays the same, no
    /// block is put into a magazine.
    pub(crate) fn dropped(&self) -> u64 {
        // Acquire: pairs with the release in `Entered::put`.
        let dropped = self.iter().map(|magazine| magazine.dropped.load(Ordering::Acquire));
        dropped.fold(0, u64::wrapping_add)
    }

    /// Units in all magazines at some moment.
    pub(crate) fn cached(&self) -> u64 {
        let cached: i64 = self.iter().map(|magazine| magazine.cached.load(Ordering::Relaxed)).sum();
        cached.clamp(0, self.capacity) as u64
    }

    /// Whether an owner with so many units of the budget too many gives them back.
    fn is_surplus(&self, units: i64) -> bool {
        units > SPARE_BATCHES * self.batch
    }

    /// Takes a part of the budget: at least `least` or nothing, and a whole batch if there is one.
    #[cold]
    fn take_budget(&self, least: i64) -> Option<i64> {
        let part = |budget: i64| least.max(self.batch.min(budget));
        let less = |budget: i64| Some(budget - part(budget)).filter(|rest| *rest >= 0);
        // Relaxed, here and below: these numbers bound and report, and guard no memory.
        let before = self.shared.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(part(before))
    }
}

/// In [`ClassLists`]. Beyond the last list, or the empty one, for a class that is not cached.
#[inline]
fn list_index(purpose: Purpose, class: SizeClass) -> usize {
    2 * class.index() + purpose as usize
}

impl Drop for Magazines {
    fn drop(&mut self) {
        for place in &self.table {
            let magazine = place.load(Ordering::Acquire);
            if !magazine.is_null() {
                // SAFETY: a leaked box (`first`), and no thread uses the magazines any more.
                drop(unsafe { Box::from_raw(magazine) });
            }
        }
    }
}

impl Entered<'_> {
    #[inline]
    fn owned<R>(&mut self, body: impl FnOnce(&mut Owned) -> R) -> R {
        // SAFETY: this thread is the owner, and inside: see `Sync for Magazine`. It is inside once
        // (`Magazines::enter`), and `&mut self` keeps it from a second reference.
        self.magazine.owned.with_mut(|owned| body(unsafe { &mut *owned }))
    }

    /// Index of the magazine.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Takes a header with a block out, and counts it as a live tensor.
    pub(crate) fn take(&mut self, purpose: Purpose, class: SizeClass) -> Option<Box<TensorHeader>> {
        self.take_own(purpose, class).or_else(|| {
            let index = list_index(purpose, class);
            if !self.owned(|owned| owned.has(index)) {
                self.take_over();
            }
            if self.owned(|owned| owned.has(index)) {
                self.give_budget_back(class.units());
            }
            self.take_own(purpose, class)
        })
    }

    /// As [`Entered::take`], if the block lies in the own lists and no budget is to be given back.
    #[inline(always)] // on the short path
    fn take_own(&mut self, purpose: Purpose, class: SizeClass) -> Option<Box<TensorHeader>> {
        let Magazine { cached, owned, .. } = self.magazine;
        let owned = owned.get_mut();
        // SAFETY: as in `owned`; the reference ends before any other access.
        let owned = unsafe { owned.deref() };
        let list = owned.lists.get_mut(list_index(purpose, class))?;
        let header = list.pop()?;
        let units = header.list.map_or(0, |list| list.units.get());
        let rest = cached.load(Ordering::Relaxed) - i64::from(units);
        if rest < 0 && self.magazines.is_surplus(owned.limit - rest) {
            list.push(header);
            return None;
        }
        cached.store(rest, Ordering::Relaxed);
        self.count_made();
        Some(header)
    }

    /// Takes a header without a block out.
    pub(crate) fn take_bare(&mut self) -> Option<Box<TensorHeader>> {
        self.owned(Owned::take_bare).or_else(|| {
            self.take_over();
            self.owned(Owned::take_bare)
        })
    }

    /// Keeps a header without a block, or frees it if there are enough.
    pub(crate) fn put_bare(&mut self, header: Box<TensorHeader>) {
        self.owned(|owned| owned.put_bare(header));
    }

    /// Counts a live tensor that was not taken out here.
    #[inline]
    pub(crate) fn count_made(&mut self) {
        let made = &self.magazine.made;
        made.store(made.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Puts a dropped tensor's header into its magazine, and counts the tensor as dropped. Refuses
    /// a block that the budget does not hold.
    ///
    /// The pool may be gone when `self` is dropped afterwards.
    pub(crate) fn put(&mut self, mut header: Box<TensorHeader>) -> Result<(), Box<TensorHeader>> {
        if let Some(list) = header.list {
            match self.put_own(header, list) {
                Ok(()) => return Ok(()),
                Err(refused) => header = refused,
            }
            if !self.charge(list.units) {
                return Err(header);
            }
        }
        let index = header.magazine as usize;
        if index == self.index {
            self.keep(header);
        } else if let Some(magazine) = self.magazines.at(index) {
            magazine.remote.push(header);
        } else {
            // Made without a magazine, so it has no block.
            drop(header);
        }
        self.count_dropped();
        Ok(())
    }

    /// As [`Entered::put`], for a block of this list of this magazine that needs no more budget.
    /// Refuses others.
    #[inline]
    pub(crate) fn put_own(
        &mut self,
        header: Box<TensorHeader>,
        MagazineList { index, units }: MagazineList,
    ) -> Result<(), Box<TensorHeader>> {
        if header.magazine as usize != self.index {
            return Err(header);
        }
        let Magazine { cached, .. } = self.magazine;
        self.owned(|owned| {
            let Some(list) = owned.lists.get_mut(index as usize) else { return Err(header) };
            let sum = cached.load(Ordering::Relaxed) + i64::from(units.get());
            if sum > owned.limit {
                return Err(header);
            }
            cached.store(sum, Ordering::Relaxed);
            list.push(header);
            Ok(())
        })?;
        self.count_dropped();
        Ok(())
    }

    /// As [`Entered::put`], for a header of this magazine without a block. Refuses others.
    #[inline]
    pub(crate) fn put_bare_own(&mut self, header: Box<TensorHeader>) -> Result<(), Box<TensorHeader>> {
        if header.magazine as usize != self.index {
            return Err(header);
        }
        self.put_bare(header);
        self.count_dropped();
        Ok(())
    }

    #[inline]
    fn count_dropped(&mut self) {
        let dropped = &self.magazine.dropped;
        // Release: a thread that counts this drop also counts that the tensor was made.
        dropped.store(dropped.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Sorts what other threads have put back into the own lists, so that the latest is on top.
    #[cold]
    fn take_over(&mut self) {
        let mut chain = self.magazine.remote.take().reversed();
        while let Some(header) = chain.pop() {
            self.keep(header);
        }
    }

    /// Keeps a header, with its block if it has one.
    fn keep(&mut self, header: Box<TensorHeader>) {
        self.owned(|owned| match header.list {
            Some(list) => owned.lists[list.index as usize].push(header),
            None => owned.put_bare(header),
        });
    }

    /// Counts units as cached, if the budget holds them.
    fn charge(&mut self, units: NonZeroU32) -> bool {
        let magazine = self.magazine;
        let magazines = self.magazines;
        let cached = magazine.cached.load(Ordering::Relaxed) + i64::from(units.get());
        let permitted = self.owned(|owned| {
            if cached > owned.limit {
                let Some(part) = magazines.take_budget(cached - owned.limit) else { return false };
                owned.limit += part;
            }
            true
        });
        if permitted {
            magazine.cached.store(cached, Ordering::Relaxed);
        }
        permitted
    }

    /// Gives budget back if other threads put the blocks of this one into its magazine: they need
    /// it. Leaves what the owner needs once it has taken out a block of so many units.
    fn give_budget_back(&mut self, units: u32) {
        let magazines = self.magazines;
        let cached = self.magazine.cached.load(Ordering::Relaxed);
        self.owned(|owned| {
            let rest = cached - i64::from(units);
            let surplus = owned.limit - rest;
            if rest < 0 && magazines.is_surplus(surplus) {
                owned.limit = rest;
                magazines.shared.budget.fetch_add(surplus, Ordering::Relaxed);
            }
        });
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        self.magazine.presence.leave();
    }
}

impl Owned {
    /// Whether the list with this index has a block.
    fn has(&self, index: usize) -> bool {
        self.lists.get(index).is_some_and(|list| !list.is_empty())
    }

    #[inline]
    fn take_bare(&mut self) -> Option<Box<TensorHeader>> {
        let header = self.bare.pop()?;
        self.bare_len -= 1;
        Some(header)
    }

    fn put_bare(&mut self, header: Box<TensorHeader>) {
        debug_assert!(matches!(header.storage, Storage::Empty));
        if self.bare_len < BARE_DEPTH {
            self.bare.push(header);
            self.bare_len += 1;
        }
    }
}

#[cfg(test)]
mod tests;
