//! Segments as files and mappings: the only place that turns mapped memory into words.
#![allow(unsafe_code)]

use super::layout::Layout;
use super::words::{Load, Store};
use crate::fabric::{FabricError, FabricKind};
use crate::memory::SharedMapping;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A shared mapping, unmapped on drop.
struct Mapping {
    base: NonNull<u64>,
    words: usize,
    /// Keeps a forked child from what it could write to.
    unforked: Option<SharedMapping>,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is only ever accessed atomically.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of a file that has at least as many and can't become shorter.
    fn new(fd: BorrowedFd<'_>, bytes: usize, access: ProtFlags) -> rustix::io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of ours.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, flags, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        // The file need not stay open for as long as the mapping, so a child sees zeros: it has no use for a link.
        let writable = access.contains(ProtFlags::WRITE);
        let unforked = writable.then(|| SharedMapping::register(base.cast(), bytes, None));
        Ok(Mapping { base, words: bytes / 8, unforked })
    }

    /// The address of the first word of a range, once that is known to be inside.
    fn part(&self, range: &Range<usize>) -> NonNull<u64> {
        assert!(range.start <= range.end && range.end <= self.words, "{range:?} of {} words", self.words);
        // SAFETY: just checked to stay inside the mapping.
        unsafe { self.base.add(range.start) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.unforked = None;
        // SAFETY: mapped in `new` with this length, and whoever has a pointer into it holds it by `Arc`.
        // It can only fail for an address that is not a mapping's; then there is nothing to give back.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * 8) };
    }
}

/// A range of words in a peer's segment, which stays mapped for as long as this or a clone lives: readable, and changing under us at any time.
#[derive(Clone)]
pub(super) struct PeerWords {
    base: NonNull<u64>,
    len: usize,
    _mapping: Arc<Mapping>,
}

/// A range of words in this process's own segment.
pub(super) struct OwnWords {
    base: NonNull<u64>,
    len: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: points into a `Mapping`, which is `Send` and `Sync`, and is only accessed atomically.
unsafe impl Send for PeerWords {}
// SAFETY: as above.
unsafe impl Sync for PeerWords {}
// SAFETY: as above.
unsafe impl Send for OwnWords {}
// SAFETY: as above.
unsafe impl Sync for OwnWords {}

/// Reads word `index` of the `len` at `base`.
///
/// # Safety
/// The words must be mapped.
#[inline]
unsafe fn load(base: NonNull<u64>, len: usize, index: usize, order: Ordering) -> u64 {
    assert!(index < len);
    // SAFETY: mapped, says the caller, and inside, says the assertion; mappings and words are aligned. The
    // reference lives for one access. It is to an atomic, so that others may write the word meanwhile.
    // In a read-only mapping a load is allowed where it is a plain instruction (`std::sync::atomic`, "Atomic
    // accesses to read-only memory"), as one of 8 bytes is on the 64-bit targets that this crate is for.
    unsafe { &*base.as_ptr().add(index).cast::<AtomicU64>() }.load(order)
}

impl Load for PeerWords {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        // SAFETY: `_mapping` keeps the words mapped.
        unsafe { load(self.base, self.len, index, order) }
    }
}

impl Load for OwnWords {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        // SAFETY: `_mapping` keeps the words mapped.
        unsafe { load(self.base, self.len, index, order) }
    }
}

impl Store for OwnWords {
    #[inline]
    fn store(&self, index: usize, value: u64, order: Ordering) {
        assert!(index < self.len);
        // SAFETY: mapped readable and writable for as long as `_mapping` lives; inside, says the assertion.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index)) }.store(value, order);
    }

    #[inline]
    fn prefetch(&self, index: usize) {
        let word = self.base.as_ptr().wrapping_add(index);
        // Not the intrinsic: without a target feature that one fetches the line for reading only.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch reads and writes nothing and does not fault, whatever the address.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) word, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = word;
    }
}

/// This process's segment of a link.
pub(super) struct OwnSegment {
    mapping: Arc<Mapping>,
    file: OwnedFd,
}

/// The seals of a segment: its size is fixed, and only mappings that exist already can write.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

impl OwnSegment {
    /// A new segment, zeroed and sealed. It vanishes with the last process that has it.
    ///
    /// # Errors
    /// If the memory can't be had.
    pub(super) fn new(layout: &Layout) -> Result<Self, FabricError> {
        let bytes = layout.bytes();
        Self::make(bytes).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("making a link segment of {bytes} bytes"),
            remedy: "free memory, raise the limit of open files, or make links with a smaller depth",
            source: error.into(),
        })
    }

    fn make(bytes: usize) -> rustix::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("tensorwire-link", flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        let mapping = Mapping::new(file.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(OwnSegment { mapping: Arc::new(mapping), file })
    }

    /// The file, for the peer to map.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(super) fn words(&self, range: Range<usize>) -> OwnWords {
        let base = self.mapping.part(&range);
        OwnWords { base, len: range.len(), _mapping: Arc::clone(&self.mapping) }
    }
}

/// The peer's segment of a link.
pub(super) struct PeerSegment {
    mapping: Arc<Mapping>,
}

impl PeerSegment {
    /// Maps a segment that a peer has sent.
    ///
    /// # Errors
    /// If it can't be mapped. The caller has seen to its seals and its size: it has at least the layout's bytes, and
    /// can't become shorter.
    pub(super) fn map(file: BorrowedFd<'_>, layout: &Layout) -> Result<Self, FabricError> {
        let bytes = layout.bytes();
        let mapping = Mapping::new(file, bytes, ProtFlags::READ).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("mapping the peer's link segment of {bytes} bytes"),
            remedy: "free memory or address space",
            source: error.into(),
        })?;
        Ok(PeerSegment { mapping: Arc::new(mapping) })
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(super) fn words(&self, range: Range<usize>) -> PeerWords {
        let base = self.mapping.part(&range);
        PeerWords { base, len: range.len(), _mapping: Arc::clone(&self.mapping) }
    }
}
