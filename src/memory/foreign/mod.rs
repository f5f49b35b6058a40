//! Memory that is not ours: bytes of another allocator, as tensors.
//!
//! **Who may unmap it.** A library can't be told that memory of its process is unmapped: hooks of the allocator miss whoever
//! calls the kernel by itself, and replacing them, or `userfaultfd`, is the program's to decide. So the types say it: memory has
//! an *owner*, and stays mapped as long as the owner lives. Tensors hold the owner. What a fabric keeps with the memory,
//! as its registration with a device, it keeps for this owner: when the owner is gone, what another owner maps at the same address is
//! other memory; it ends with the owner, where that went with a tensor or a [`ForeignMemory`], and not with a handle that the program
//! keeps by itself. Where an allocator takes bytes back and hands them out again without unmapping them, its
//! arena is the owner; and if it gives pages back to the system now and then, it says which ([`ForeignMemory::pages_replaced`]).

pub(crate) mod observers;

use self::observers::WeakOwner;
use crate::memory::pool::Pool;
use crate::memory::pool::header::{NO_DATA, Storage, TensorHeader};
use crate::memory::tensor::Tensor;
use crate::memory::tensor::tensor_mut::TensorMut;
use crate::wire::TensorMeta;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// What keeps foreign memory mapped as long as it lives.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// Memory of another allocator: a framework's tensors, a file that was mapped, a vector.
///
/// Tensors of it can be sent like those of the pool. Where the device can be told of the memory it is registered once, at the first
/// send, and then read where it lies; elsewhere each send copies it into the pool. Clones are the same memory.
///
/// The owner is dropped when the last tensor and the last clone are gone: by a thread of the node's that does nothing else
/// and that no transfer waits for, where it was a tensor of a node's pool that went last. What a device was told of the memory ends
/// then, on the same thread.
///
/// ```
/// use tensorwire::memory::{ForeignMemory, Pool, PoolOptions, Region, RegionOptions};
/// use tensorwire::wire::{DType, Shape, TensorMeta};
///
/// let pool = Pool::new(Region::create(0, &RegionOptions::new(1 << 20))?, PoolOptions::default())?;
/// let memory = ForeignMemory::from_owner(vec![7u8; 4096]);
/// let meta = TensorMeta::new(DType::U8, Shape::new(&[1024])?)?;
/// let tensor = memory.tensor(&pool, meta, 2048)?; // `step.send(&edge, tensor)`
/// assert_eq!(tensor.bytes(), [7; 1024]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ForeignMemory {
    shared: Arc<ForeignArea>,
}

/// As a tensor holds it.
pub(crate) struct ForeignArea {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    owner: HeldOwner,
}

/// An owner, as a user of its memory holds it. Where the owner goes with it, those who keep something with the memory are told
/// behind the owner's drop, which is the program's own code.
pub struct HeldOwner {
    // In this order; so also where the owner's drop panics.
    owner: Owner,
    _end: OwnerEndNotice,
}

struct OwnerEndNotice(WeakOwner);

// SAFETY: `base` points to memory that the owner, which is Send and Sync, keeps mapped and that belongs to no thread, as who made
// this vouched.
unsafe impl Send for ForeignArea {}
// SAFETY: as above; through a shared `ForeignArea` nothing is written.
unsafe impl Sync for ForeignArea {}

/// What a device knows foreign memory by.
#[derive(Clone)]
pub struct ForeignRegistration {
    /// The fabric that registered it, by a number of its own.
    pub fabric: u64,
    /// The key by which work requests name it.
    pub key: u32,
    /// Keeps the registration.
    pub hold: Arc<dyn Any + Send + Sync>,
}

/// Why foreign memory has no such tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// Its bytes are not all inside.
    #[error("a tensor {meta} of {needed} bytes at {offset} is not inside foreign memory of {len} bytes")]
    Outside {
        /// The tensor.
        meta: TensorMeta,
        /// Its bytes.
        needed: u64,
        /// Where it should begin.
        offset: u64,
        /// Bytes of the memory.
        len: u64,
    },
    /// It may only be read.
    #[error("foreign memory that was given for reading can't be received into: make it with `new_writable`")]
    ReadOnly,
}

impl ForeignMemory {
    /// Memory that is read alone.
    ///
    /// # Safety
    /// As long as `owner` lives, on every thread:
    ///
    /// * The `len` bytes at `base` (at most `isize::MAX`) are mapped, readable and initialised.
    /// * Nobody writes to those of a tensor of this memory as long as the tensor or a clone of it lives, those in flight
    ///   included.
    /// * No page of them is replaced: unmapped, mapped anew or moved (`munmap`, `mmap`, `mremap`), purged (`MADV_DONTNEED`, `MADV_FREE`,
    ///   `MADV_REMOVE`), or taken out of its file (a hole, a truncation). A device may have been told of the pages that were there before, those
    ///   of tensors near by included, and would send those. An arena that does replace pages, which no tensor has at the time, calls
    ///   [`ForeignMemory::pages_replaced`] for them afterwards, before the next tensor of their bytes is made.
    pub unsafe fn new(owner: Owner, base: *const u8, len: usize) -> Self {
        ForeignMemory::of(owner, base.cast_mut(), len, false)
    }

    /// Memory that may be written as well.
    ///
    /// # Safety
    /// As [`ForeignMemory::new`], all of it, and `base` is good for writing.
    pub unsafe fn new_writable(owner: Owner, base: *mut u8, len: usize) -> Self {
        ForeignMemory::of(owner, base, len, true)
    }

    /// The bytes of a value, which is their owner: a vector, a mapped file.
    pub fn from_owner<T: AsRef<[u8]> + Send + Sync + 'static>(owner: T) -> Self {
        let owner = Arc::new(owner);
        let bytes: &[u8] = (*owner).as_ref();
        let (base, len) = (bytes.as_ptr().cast_mut(), bytes.len());
        // The slice is valid as long as the value is neither moved, written nor dropped: nobody but this has it, and shares it alone.
        ForeignMemory::of(owner, base, len, false)
    }

    fn of(owner: Owner, base: *mut u8, len: usize, writable: bool) -> Self {
        assert!(len == 0 || !base.is_null(), "{len} bytes of foreign memory at no address");
        let base = NonNull::new(base).unwrap_or(NO_DATA);
        let owner = HeldOwner { _end: OwnerEndNotice(Arc::downgrade(&owner)), owner };
        ForeignMemory { shared: Arc::new(ForeignArea { base, len, writable, owner }) }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.shared.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Says that pages of its bytes `range` were replaced: what any device in this process was told of them is not used for
    /// tensors that are sent from now on, whichever `ForeignMemory` they are of. Costs a look at all that is registered,
    /// and a system call for each registration that ends: what an arena pays when it purges, and not for each buffer.
    pub fn pages_replaced(&self, range: Range<usize>) {
        let start = self.shared.base.as_ptr().addr();
        let inside = range.start.min(self.len())..range.end.min(self.len());
        if !inside.is_empty() {
            observers::tell(|observer| observer.pages_replaced(start + inside.start..start + inside.end));
        }
    }

    /// A tensor of its bytes from `offset` on. `pool` keeps the books of it, and none of the bytes.
    ///
    /// # Errors
    /// [`ForeignError::Outside`].
    pub fn tensor(&self, pool: &Pool, meta: TensorMeta, offset: u64) -> Result<Tensor, ForeignError> {
        Ok(Tensor::new(self.header(pool, meta, offset)?))
    }

    /// A tensor of its bytes from `offset` on, to be received into. Once it is frozen it does not become writable again.
    ///
    /// # Errors
    /// [`ForeignError`] if the bytes are not all inside, or the memory may only be read.
    ///
    /// # Safety
    /// As long as the tensor lives, nobody else reads or writes its bytes, whether as a tensor or otherwise; from its
    /// freezing on, nobody writes to them. A receive that failed may have it for some more time, as the peer may still write
    /// (specification 3.4b): it is gone when nothing of this memory holds the owner any more.
    pub unsafe fn tensor_mut(
        &self,
        pool: &Pool,
        meta: TensorMeta,
        offset: u64,
    ) -> Result<TensorMut, ForeignError> {
        if !self.shared.writable {
            return Err(ForeignError::ReadOnly);
        }
        Ok(TensorMut::new(self.header(pool, meta, offset)?))
    }

    fn header(&self, pool: &Pool, meta: TensorMeta, offset: u64) -> Result<Box<TensorHeader>, ForeignError> {
        let (needed, len) = (meta.bytes(), self.shared.len as u64);
        if offset.checked_add(needed).is_none_or(|end| end > len) {
            return Err(ForeignError::Outside { meta, needed, offset, len });
        }
        let mut header = pool.bare();
        header.meta = meta;
        if needed > 0 {
            // SAFETY: inside the memory, as was just checked.
            header.data = unsafe { self.shared.base.add(offset as usize) };
            header.capacity = needed as usize;
        }
        header.storage = Storage::Foreign(self.shared.clone());
        Ok(header)
    }
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl HeldOwner {
    /// The owner itself.
    pub fn get(&self) -> &Owner {
        &self.owner
    }
}

impl Drop for OwnerEndNotice {
    fn drop(&mut self) {
        if self.0.strong_count() == 0 {
            observers::tell(|observer| observer.owner_dropped(&self.0));
        }
    }
}

impl ForeignArea {
    /// Lets go of the memory. Who was last has `end` drop its owner.
    pub(crate) fn release(self: Arc<Self>, end: Option<&(dyn Fn(HeldOwner) + Send + Sync)>) {
        let Some(ForeignArea { owner, .. }) = Arc::into_inner(self) else { return };
        if let Some(end) = end {
            end(owner);
        }
    }
}

impl fmt::Debug for ForeignArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignMemory").field("base", &self.base).field("len", &self.len).finish()
    }
}

impl fmt::Debug for ForeignRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignRegistration").field("fabric", &self.fabric).field("key", &self.key).finish()
    }
}

/// Where a tensor's foreign memory lies, for who registers it.
#[derive(Clone, Copy)]
pub struct ForeignLocation<'a> {
    /// Who keeps it mapped.
    pub owner: &'a Owner,
    /// All that this owner vouches for.
    memory: &'a ForeignArea,
}

impl ForeignLocation<'_> {
    /// The addresses of all the memory that this owner is known to keep mapped.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.memory.base.as_ptr().addr();
        start..start + self.memory.len
    }
}

impl Tensor {
    /// Where its memory lies, if it is foreign.
    pub fn foreign(&self) -> Option<ForeignLocation<'_>> {
        match &self.header().storage {
            Storage::Foreign(memory) => Some(ForeignLocation { owner: memory.owner.get(), memory }),
            Storage::Registered(of, _) => of.foreign(),
            _ => None,
        }
    }

    /// What a device knows its memory by, if it is foreign and registered.
    #[inline]
    pub fn registered(&self) -> Option<&ForeignRegistration> {
        match &self.header().storage {
            Storage::Registered(_, registered) => Some(registered),
            _ => None,
        }
    }

    /// A tensor of the same bytes that has a registration of them and lets go of it with its last handle.
    pub fn with_registration(&self, pool: &Pool, registered: ForeignRegistration) -> Tensor {
        let mut header = pool.bare();
        header.meta = self.meta().clone();
        header.data = self.header().data;
        header.capacity = self.header().capacity;
        header.storage = Storage::Registered(self.clone(), registered);
        Tensor::new(header)
    }
}
