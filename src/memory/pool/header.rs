//! The header that all handles of a tensor point to.

use super::central::Block;
use super::chain::Linked;
use super::magazine::MagazineList;
use super::refcount::RefCount;
use super::state::PoolState;
use crate::memory::foreign::{ForeignArea, ForeignRegistration};
use crate::memory::loan::LentBytes;
use crate::memory::tensor::Tensor;
use crate::memory::tensor::ring::RingBuffers;
use crate::memory::tensor::view::PLACEHOLDER;
use crate::wire::TensorMeta;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Alignment of every tensor's bytes: a cache line.
pub(crate) const ALIGN: usize = 64;

/// The memory that holds a tensor's bytes.
#[derive(Debug)]
pub(crate) enum Storage {
    /// A tensor without bytes.
    Empty,
    /// In the pool's region.
    Block(Block),
    /// In a peer's region.
    Lent(LentBytes),
    /// In memory of another allocator.
    Foreign(Arc<ForeignArea>),
    /// In the foreign memory of this tensor, which a device has registered.
    Registered(Tensor, ForeignRegistration),
}

/// One tensor: element type, shape, its bytes, and the place that takes them back after the last
/// handle.
///
/// A `Box<TensorHeader>` is a tensor with one owner, or lies in a magazine, with its block or
/// without one. While the tensor is shared, the box is leaked and `refs` counts the handles.
///
/// Cached or not, a header does not outlive its pool: see `pool`.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct TensorHeader {
    pub(crate) refs: RefCount,
    /// The link of the list that the header is in.
    next: *mut TensorHeader,
    pub(crate) meta: TensorMeta,
    /// Address of the first byte. Aligned unless the storage is lent or foreign, and good for
    /// `capacity` bytes as long as the header has `storage`. Readable; writable for the one owner
    /// of a header whose storage is a block, or foreign and made to be written.
    pub(crate) data: NonNull<u8>,
    pub(crate) capacity: usize,
    pub(crate) storage: Storage,
    /// The pool that the header returns to. `None` for a tensor of no pool.
    ///
    /// The pool lives as long as the header. It owns the headers in its magazines, counts the
    /// others as live tensors, and waits for these.
    pub(crate) pool: Option<NonNull<PoolState>>,
    /// The magazine that the header returns to. [`NO_MAGAZINE`] if there is none.
    pub(crate) magazine: u32,
    /// The list of that magazine that the header returns to with its block. `None` if the storage
    /// is no block, or one that goes straight back to [`Central`](super::central::Central).
    pub(crate) list: Option<MagazineList>,
    /// The ring that the header returns to instead, if it is of one.
    pub(crate) ring: Option<Arc<RingBuffers>>,
    /// Whether the block must never be reused ([`Tensor::leak`]). Only set, never cleared, while
    /// the header is shared.
    pub(crate) is_leaked: AtomicBool,
}

// SAFETY: three pointers keep this from being Send. `data` points into a mapping that `storage` and
// the pool keep alive and that belongs to no thread. The bytes are written only through the one
// owner of a header (`&mut`), and read through shared handles only when there is no owner. `pool`
// outlives the header, and is Sync. `next` is the list's that has the header (`Linked`).
unsafe impl Send for TensorHeader {}
// SAFETY: as above. A shared `&TensorHeader` gives only reads.
unsafe impl Sync for TensorHeader {}

/// The address of a tensor without bytes.
pub(crate) const NO_DATA: NonNull<u8> = NonNull::<AlignedUnit>::dangling().cast();

#[repr(align(64))]
struct AlignedUnit;

const _: () = assert!(align_of::<AlignedUnit>() == ALIGN);

/// A place that no magazine has.
pub(crate) const NO_MAGAZINE: u32 = u32::MAX;

// SAFETY: always the same field. It is private, and nothing else here touches it.
unsafe impl Linked for TensorHeader {
    #[inline]
    fn next(&mut self) -> &mut *mut Self {
        &mut self.next
    }
}

impl TensorHeader {
    /// A header without bytes and without a pool.
    pub(crate) fn empty() -> Box<TensorHeader> {
        Box::new(TensorHeader {
            refs: RefCount::one(),
            next: std::ptr::null_mut(),
            meta: PLACEHOLDER.clone(),
            data: NO_DATA,
            capacity: 0,
            storage: Storage::Empty,
            pool: None,
            magazine: NO_MAGAZINE,
            list: None,
            ring: None,
            is_leaked: AtomicBool::new(false),
        })
    }

    /// Whether the block must never be reused. Certain for the holder of the last handle.
    pub(crate) fn is_leaked(&self) -> bool {
        // Relaxed: the holder of the last handle has seen everything that former handles did
        // (`RefCount`).
        self.is_leaked.load(Ordering::Relaxed)
    }

    /// Takes the storage out and leaves a header without bytes.
    pub(crate) fn strip(&mut self) -> Storage {
        self.data = NO_DATA;
        self.capacity = 0;
        self.list = None;
        std::mem::replace(&mut self.storage, Storage::Empty)
    }

    /// Gives a header without bytes those of a loan.
    #[inline]
    pub(crate) fn hold_lent(&mut self, bytes: LentBytes) {
        debug_assert!(matches!(self.storage, Storage::Empty));
        if !bytes.is_empty() {
            self.data = bytes.data();
            self.capacity = bytes.len();
        }
        // There is nothing to drop.
        std::mem::forget(std::mem::replace(&mut self.storage, Storage::Lent(bytes)));
    }

    /// Whether the header has bytes in a region.
    #[inline]
    pub(crate) fn has_span(&self) -> bool {
        matches!(self.storage, Storage::Block(_)) && self.pool.is_some() && self.meta.bytes() > 0
    }

    /// The pool that owns the block and counts the tensor, if the header has one.
    pub(crate) fn pool(&self) -> Option<&PoolState> {
        // SAFETY: the pool outlives the header (see `pool`).
        self.pool.map(|pool| unsafe { pool.as_ref() })
    }

    /// Gives a tensor without handles back to its ring, its pool, or the heap.
    ///
    /// Takes no lock, allocates nothing and waits for nothing in steady state. It takes a lock if
    /// the magazines have no room for the block, or if another thread empties them at this moment.
    #[inline(never)]
    pub(crate) fn release(self: Box<Self>) {
        debug_assert!(self.refs.is_one());
        let header = match self.pool {
            // SAFETY: as in `release_to_pool`.
            Some(pool) if self.ring.is_none() => match unsafe { PoolState::put_back_own(pool, self) } {
                Ok(()) => return,
                Err(header) => header,
            },
            _ => self,
        };
        header.release_elsewhere();
    }

    #[cold]
    fn release_elsewhere(mut self: Box<Self>) {
        if self.pool().is_some_and(PoolState::in_child) {
            // A forked child: pool and lender belong to the parent, which has its own handle.
            std::mem::forget(self);
            return;
        }
        if self.ring.is_none() {
            return self.release_to_pool();
        }
        match self.ring.take() {
            Some(ring) if !self.is_leaked() => ring.put_back(self),
            _ => self.release_to_pool(),
        }
    }

    /// As [`TensorHeader::release`], for a header that does not return to a ring.
    pub(crate) fn release_to_pool(self: Box<Self>) {
        if let Some(pool) = self.pool {
            // SAFETY: a box that is not in a magazine is a live tensor of its pool.
            unsafe { PoolState::put_back(pool, self) };
        }
    }
}
