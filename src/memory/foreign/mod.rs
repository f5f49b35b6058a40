//! Foreign memory: bytes of another allocator, as tensors.
//!
//! **Lifetime.** A library cannot learn that memory of its process is unmapped. Hooks of the
//! allocator miss direct system calls, and replacing the allocator or using `userfaultfd` is the
//! program's decision. Therefore foreign memory has an *owner*: it stays mapped as long as the
//! owner lives, and tensors hold the owner.
//!
//! A fabric keeps a registration with a device for one owner. When the owner is gone, the
//! registration ends: another owner may map other memory at the same address. The registration ends
//! with the owner if the owner's last user was a tensor or a [`ForeignMemory`]. It does not end if
//! the last user was a handle of the program.
//!
//! An arena that hands out the same bytes again without unmapping them is the owner of these bytes.
//! An arena that gives pages back to the system reports them with
//! [`ForeignMemory::pages_replaced`].

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

/// Keeps foreign memory mapped as long as it lives.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// Memory of another allocator: a framework's tensors, a mapped file, a vector. Clones are the same
/// memory.
///
/// Its tensors are sent like those of the pool. A device that can register the memory does so at
/// the first send, and reads it in place. Elsewhere each send copies the tensor into the pool.
///
/// The owner is dropped when the last tensor and the last clone are gone. If the last one was a
/// tensor of a node's pool, a separate thread of the node drops the owner. It also ends the owner's
/// registrations, so that no transfer waits for that.
///
/// ```
/// use tensorwire::{DType, ForeignMemory, Node, Shape, Tensor, TensorMeta};
///
/// fn weights(node: &Node) -> Result<Tensor, Box<dyn std::error::Error>> {
///     let memory = ForeignMemory::from_owner(vec![7u8; 4096]);
///     let meta = TensorMeta::new(DType::U8, Shape::new(&[1024])?)?;
///     let tensor = memory.tensor(node.pool(), meta, 2048)?; // to be sent as any other
///     assert_eq!(tensor.bytes(), [7; 1024]);
///     Ok(tensor)
/// }
/// ```
#[derive(Clone)]
pub struct ForeignMemory {
    shared: Arc<ForeignArea>,
}

/// Foreign memory as its tensors hold it.
pub(crate) struct ForeignArea {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    owner: HeldOwner,
}

/// One reference to an owner. The drop of the last reference drops the owner and then tells the
/// [`ForeignMemoryObserver`](super::ForeignMemoryObserver)s. The owner's drop is the program's own
/// code.
pub struct HeldOwner {
    // Dropped in this order, also where the owner's drop panics.
    owner: Owner,
    _end: OwnerEndNotice,
}

struct OwnerEndNotice(WeakOwner);

// SAFETY: `base` points to memory that the owner keeps mapped. The owner is Send and Sync. The
// caller of the constructor vouched that the memory belongs to no thread.
unsafe impl Send for ForeignArea {}
// SAFETY: as above. Through a shared `ForeignArea` nothing is written.
unsafe impl Sync for ForeignArea {}

/// A device's registration of foreign memory.
#[derive(Clone)]
pub struct ForeignRegistration {
    /// Number of the fabric that registered the memory.
    pub fabric: u64,
    /// Key that work requests present for the memory.
    pub key: u32,
    /// Its drop ends the registration.
    pub hold: Arc<dyn Any + Send + Sync>,
}

/// Why foreign memory has no such tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// Some bytes of the tensor are outside the memory.
    #[error("a tensor {meta} of {needed} bytes at {offset} is not inside foreign memory of {len} bytes")]
    Outside {
        /// Element type and shape of the tensor.
        meta: TensorMeta,
        /// Bytes of the tensor.
        needed: u64,
        /// Offset of the tensor in the memory, in bytes.
        offset: u64,
        /// Bytes of the memory.
        len: u64,
    },
    /// The memory may only be read.
    #[error("foreign memory that was given for reading can't be received into: make it with `new_writable`")]
    ReadOnly,
}

impl ForeignMemory {
    /// Memory that is only read.
    ///
    /// # Panics
    /// If `base` is null and `len` is not 0.
    ///
    /// # Safety
    /// As long as `owner` lives, on every thread:
    ///
    /// * The `len` bytes at `base` (at most `isize::MAX`) are mapped, readable and initialised.
    /// * No thread writes to the bytes of a tensor of this memory while the tensor or a clone
    ///   lives. Tensors in flight count.
    /// * No page is replaced: unmapped, mapped anew or moved (`munmap`, `mmap`, `mremap`). No page
    ///   is purged (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`) or taken out of its file (a hole,
    ///   a truncation). A device may have registered the old pages, also those of neighbouring
    ///   tensors, and would send their contents. An arena may replace pages that no tensor uses. It
    ///   then calls [`ForeignMemory::pages_replaced`] before it makes the next tensor of these
    ///   bytes.
    pub unsafe fn new(owner: Owner, base: *const u8, len: usize) -> Self {
        ForeignMemory::of(owner, base.cast_mut(), len, false)
    }

    /// Memory that can also be received into.
    ///
    /// # Panics
    /// As [`ForeignMemory::new`].
    ///
    /// # Safety
    /// All of [`ForeignMemory::new`], and `base` is good for writing.
    pub unsafe fn new_writable(owner: Owner, base: *mut u8, len: usize) -> Self {
        ForeignMemory::of(owner, base, len, true)
    }

    /// The bytes of a value, which becomes their owner: a vector, a mapped file.
    pub fn from_owner<T: AsRef<[u8]> + Send + Sync + 'static>(owner: T) -> Self {
        let owner = Arc::new(owner);
        let bytes: &[u8] = (*owner).as_ref();
        let (base, len) = (bytes.as_ptr().cast_mut(), bytes.len());
        // The slice is valid as long as the value is neither moved, written nor dropped. Only this
        // `Arc` holds the value, and it gives out shared references only.
        ForeignMemory::of(owner, base, len, false)
    }

    fn of(owner: Owner, base: *mut u8, len: usize, writable: bool) -> Self {
        assert!(len == 0 || !base.is_null(), "{len} bytes of foreign memory at no address");
        let base = NonNull::new(base).unwrap_or(NO_DATA);
        let owner = HeldOwner { _end: OwnerEndNotice(Arc::downgrade(&owner)), owner };
        ForeignMemory { shared: Arc::new(ForeignArea { base, len, writable, owner }) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.shared.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reports that pages of the bytes `range` were replaced. No device of this process uses older
    /// registrations of these addresses for later sends, whichever `ForeignMemory` they belong to.
    ///
    /// The call visits all registrations, and makes a system call for each one that ends. Call it
    /// when an arena purges pages, not for each buffer.
    pub fn pages_replaced(&self, range: Range<usize>) {
        let start = self.shared.base.as_ptr().addr();
        let inside = range.start.min(self.len())..range.end.min(self.len());
        if !inside.is_empty() {
            observers::notify(|observer| observer.pages_replaced(start + inside.start..start + inside.end));
        }
    }

    /// A tensor of the bytes from `offset` on. `pool` supplies only the header.
    ///
    /// # Errors
    /// [`ForeignError::Outside`].
    pub fn tensor(&self, pool: &Pool, meta: TensorMeta, offset: u64) -> Result<Tensor, ForeignError> {
        Ok(Tensor::new(self.header(pool, meta, offset)?))
    }

    /// A tensor of the bytes from `offset` on, to receive into. After it was frozen it does not
    /// become writable again.
    ///
    /// # Errors
    /// [`ForeignError`] if some bytes are outside, or the memory may only be read.
    ///
    /// # Safety
    /// As long as the tensor lives, no other code reads or writes its bytes; after it was frozen,
    /// no code writes them. A receive that failed may keep the tensor for some time, because the
    /// peer may still write (specification 3.4b). The tensor is gone when nothing of this memory
    /// holds the owner any more.
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
    /// Lives at least as long as this value.
    pub fn get(&self) -> &Owner {
        &self.owner
    }
}

impl Drop for OwnerEndNotice {
    fn drop(&mut self) {
        if self.0.strong_count() == 0 {
            observers::notify(|observer| observer.owner_dropped(&self.0));
        }
    }
}

impl ForeignArea {
    /// Drops this reference. If it was the last one, `end` drops the owner.
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
        f.debug_struct("ForeignRegistration").field("fabric", &self.fabric).finish_non_exhaustive()
    }
}

/// The address range of a tensor's foreign memory, for registration.
#[derive(Clone, Copy)]
pub struct ForeignLocation<'a> {
    /// Keeps the memory mapped.
    pub owner: &'a Owner,
    /// All memory that the owner vouches for.
    memory: &'a ForeignArea,
}

impl ForeignLocation<'_> {
    /// The addresses of all memory that this owner is known to keep mapped.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.memory.base.as_ptr().addr();
        start..start + self.memory.len
    }
}

impl Tensor {
    /// The foreign memory that holds the tensor's bytes, if they are foreign.
    pub(crate) fn foreign(&self) -> Option<ForeignLocation<'_>> {
        match &self.header().storage {
            Storage::Foreign(memory) => Some(ForeignLocation { owner: memory.owner.get(), memory }),
            Storage::Registered(of, _) => of.foreign(),
            _ => None,
        }
    }

    internal! {
        /// The device's registration of the bytes, if they are foreign and registered.
        #[inline]
        fn registered(&self) -> Option<&ForeignRegistration> {
            match &self.header().storage {
                Storage::Registered(_, registered) => Some(registered),
                _ => None,
            }
        }
    }

    /// A tensor of the same bytes that also holds a registration of them.
    pub(crate) fn with_registration(&self, pool: &Pool, registered: ForeignRegistration) -> Tensor {
        let mut header = pool.bare();
        header.meta = self.meta().clone();
        header.data = self.header().data;
        header.capacity = self.header().capacity;
        header.storage = Storage::Registered(self.clone(), registered);
        Tensor::new(header)
    }
}

impl std::fmt::Debug for HeldOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldOwner").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ForeignLocation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForeignLocation").finish_non_exhaustive()
    }
}
