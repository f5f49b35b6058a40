//! What a tensor's handles point to.

use super::PoolShard;
use super::central::Block;
use super::refcount::RefCount;
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

/// Where the bytes of a tensor are.
#[derive(Debug)]
pub(crate) enum Storage {
    /// It has none.
    Empty,
    /// In the pool's region.
    Block(Block),
    /// In a peer's region.
    Lent(#[expect(dead_code, reason = "held for its drop, which ends the loan")] LentBytes),
    /// In memory of another allocator.
    Foreign(Arc<ForeignArea>),
    /// In the memory of this tensor, which a device knows.
    Registered(Tensor, ForeignRegistration),
}

/// One tensor: element type, shape, where its bytes are, and where they go when its last handle is gone.
///
/// A `Box<TensorHeader>` is a tensor with one owner, or one that lies in a cache between two uses, together with
/// its block. While it is shared, the box is taken apart and `refs` counts the handles.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct TensorHeader {
    pub(crate) refs: RefCount,
    pub(crate) meta: TensorMeta,
    /// The first byte: aligned, unless the storage is lent or foreign, and good for `capacity` bytes as long as `storage` and `anchor` are held.
    /// Readable; writable for the one owner of a header whose storage is a block, or foreign and made to be written.
    pub(crate) data: NonNull<u8>,
    pub(crate) capacity: usize,
    pub(crate) storage: Storage,
    /// Keeps the pool alive, and says to which shard the header returns; `None` while it is cached and for
    /// tensors that came from no pool.
    pub(crate) anchor: Option<Arc<PoolShard>>,
    /// The ring that it returns to instead, if it is of one.
    pub(crate) ring: Option<Arc<RingBuffers>>,
    /// Its block is never used again ([`Tensor::leak`]). A flag that only rises, while the header is shared.
    pub(crate) is_leaked: AtomicBool,
}

// SAFETY: `data` is what keeps this from being Send by itself. It points into a mapping that `storage` and
// `anchor` keep alive and that belongs to no thread; the bytes are written only through the one owner of a
// header (`&mut`), and read through shared handles only when there is no owner.
unsafe impl Send for TensorHeader {}
// SAFETY: as above; a shared `&TensorHeader` gives only reads.
unsafe impl Sync for TensorHeader {}

/// An address for tensors without bytes.
pub(crate) const NO_DATA: NonNull<u8> = NonNull::<AlignedUnit>::dangling().cast();

#[repr(align(64))]
struct AlignedUnit;

const _: () = assert!(align_of::<AlignedUnit>() == ALIGN);

impl TensorHeader {
    /// A header without bytes, of no pool.
    pub(crate) fn empty() -> Box<TensorHeader> {
        Box::new(TensorHeader {
            refs: RefCount::one(),
            meta: PLACEHOLDER.clone(),
            data: NO_DATA,
            capacity: 0,
            storage: Storage::Empty,
            anchor: None,
            ring: None,
            is_leaked: AtomicBool::new(false),
        })
    }

    /// Whether its block is never used again. Certain for who has the last handle.
    pub(crate) fn is_leaked(&self) -> bool {
        // Relaxed: who was last to drop, or is alone, has seen everything that the others did (`RefCount`).
        self.is_leaked.load(Ordering::Relaxed)
    }

    /// Takes the storage out and leaves a header without bytes.
    pub(crate) fn strip(&mut self) -> Storage {
        self.data = NO_DATA;
        self.capacity = 0;
        std::mem::replace(&mut self.storage, Storage::Empty)
    }

    /// Gives a tensor whose last handle is gone back to its ring, its pool, or the heap.
    ///
    /// Takes no lock, allocates nothing and waits for nothing, but where the shard's cache has no room for
    /// the block.
    pub(crate) fn release(mut self: Box<Self>) {
        debug_assert!(self.refs.is_one());
        if self.anchor.as_ref().is_some_and(|anchor| anchor.in_child()) {
            // A forked child: the pool and the lender are the parent's, whose own handle is still there.
            std::mem::forget(self);
            return;
        }
        match self.ring.take() {
            Some(ring) if !self.is_leaked() => ring.put_back(self),
            _ => self.release_to_pool(),
        }
    }

    /// As [`TensorHeader::release`], for a header that is of no ring any more.
    pub(crate) fn release_to_pool(mut self: Box<Self>) {
        // The anchor goes last: it keeps the pool alive, and the pool counts a tensor as live while there is
        // one.
        if let Some(anchor) = self.anchor.take() {
            anchor.put_back(self);
        }
    }
}
