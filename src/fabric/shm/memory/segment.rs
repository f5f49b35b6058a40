//! Segments as files and mappings: the only code that turns mapped memory into words.
#![allow(unsafe_code)]

use super::layout::SegmentLayout;
use crate::fabric::words::{LoadWords, ShareWords, StoreWords};
use crate::fabric::{FabricError, FabricKind};
use crate::memory::{SharedMapping, grow_memfd, is_in_huge_pages};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// A shared mapping, unmapped on drop.
struct SegmentMapping {
    base: NonNull<u64>,
    words: usize,
    /// Keeps a forked child from writing to the mapping.
    unforked: Option<SharedMapping>,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is only ever accessed atomically.
unsafe impl Send for SegmentMapping {}
// SAFETY: as above.
unsafe impl Sync for SegmentMapping {}

impl SegmentMapping {
    /// Maps the first `bytes` bytes of a file that has at least as many and can't become shorter.
    /// The first `used` bytes get their memory now.
    fn new(fd: BorrowedFd<'_>, bytes: usize, used: usize, access: ProtFlags) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of ours.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, 0)? };
        let populate = match access.contains(ProtFlags::WRITE) {
            true => Advice::LinuxPopulateWrite,
            false => Advice::LinuxPopulateRead,
        };
        // A kernel before 5.14 refuses: pages then get their memory with their first use.
        // SAFETY: this call maps the pages of the new mapping and changes no content.
        let _ = unsafe { rustix::mm::madvise(base, used.min(bytes), populate) };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        // The file may be closed before the mapping ends, so a child sees zeros: it has no use for
        // a link.
        let writable = access.contains(ProtFlags::WRITE);
        let unforked = writable.then(|| SharedMapping::register(base.cast(), bytes, None));
        Ok(SegmentMapping { base, words: bytes / 8, unforked })
    }

    /// Address of the first word of a range, which must be inside.
    fn part(&self, range: &Range<usize>) -> NonNull<u64> {
        assert!(range.start <= range.end && range.end <= self.words, "{range:?} of {} words", self.words);
        // SAFETY: just checked to stay inside the mapping.
        unsafe { self.base.add(range.start) }
    }
}

impl Drop for SegmentMapping {
    fn drop(&mut self) {
        self.unforked = None;
        // SAFETY: mapped in `new` with this length. Code with a pointer into it holds it by `Arc`.
        // The call can fail only for an address that is not mapped; then there is nothing to unmap.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * 8) };
    }
}

/// Words of a peer's segment. They stay mapped as long as this or a clone lives, are read-only, and
/// change at any time.
#[derive(Clone)]
pub(crate) struct PeerWords {
    base: NonNull<u64>,
    len: usize,
    _mapping: Arc<SegmentMapping>,
}

/// Words of this process's own segment.
pub(crate) struct OwnWords {
    base: NonNull<u64>,
    len: usize,
    _mapping: Arc<SegmentMapping>,
}

/// Words that several processes write.
pub(crate) struct SharedWords {
    base: NonNull<u64>,
    len: usize,
    _mapping: Arc<SegmentMapping>,
}

// SAFETY: points into a `SegmentMapping`, which is `Send` and `Sync`, and is only accessed
// atomically.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}
// SAFETY: as above.
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
    // SAFETY: mapped, as the caller promises, and inside, as the assertion checks.
    unsafe { load_inside(base, index, order) }
}

/// As [`load`], without the check.
///
/// # Safety
/// The word must be mapped.
#[inline]
unsafe fn load_inside(base: NonNull<u64>, index: usize, order: Ordering) -> u64 {
    // SAFETY: mapped, as the caller promises; mappings and words are aligned. The reference lives
    // for one access. It is to an atomic, so that others may write the word meanwhile. In a
    // read-only mapping a load is allowed where it is a plain instruction (`std::sync::atomic`,
    // "Atomic accesses to read-only memory"). A load of 8 bytes is one on the 64-bit targets of
    // this crate.
    unsafe { &*base.as_ptr().add(index).cast::<AtomicU64>() }.load(order)
}

impl LoadWords for PeerWords {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        // SAFETY: `_mapping` keeps the words mapped.
        unsafe { load(self.base, self.len, index, order) }
    }

    #[inline(always)] // on the short path
    fn words<const N: usize>(&self, index: usize) -> impl Fn(usize, Ordering) -> u64 {
        assert!(index < self.len && N <= self.len - index);
        move |k, order| {
            assert!(k < N);
            // SAFETY: `_mapping` keeps the words mapped; inside, as the assertions check.
            unsafe { load_inside(self.base, index + k, order) }
        }
    }

    #[inline]
    fn prefetch_load(&self, index: usize) {
        let word = self.base.as_ptr().wrapping_add(index);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch reads and writes nothing and does not fault, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(word.cast());
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = word;
    }
}

impl LoadWords for OwnWords {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        // SAFETY: `_mapping` keeps the words mapped.
        unsafe { load(self.base, self.len, index, order) }
    }
}

impl StoreWords for OwnWords {
    #[inline]
    fn store(&self, index: usize, value: u64, order: Ordering) {
        assert!(index < self.len);
        // SAFETY: mapped readable and writable for as long as `_mapping` lives; inside, as the
        // assertion checks.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index)) }.store(value, order);
    }

    #[inline]
    fn writer<const N: usize>(&self, index: usize) -> impl Fn(usize, u64, Ordering) {
        assert!(index <= self.len && N <= self.len - index);
        // SAFETY: the assertion checks that the word `index` is inside of the words or their end.
        let base = unsafe { self.base.as_ptr().add(index) };
        move |place, value, order| {
            assert!(place < N);
            // SAFETY: mapped and writable as in `store`: the function borrows `self`. Inside, as
            // the assertions check: `index + place` is below `index + N`.
            unsafe { AtomicU64::from_ptr(base.add(place)) }.store(value, order);
        }
    }

    #[inline]
    fn prefetch(&self, index: usize) {
        let word = self.base.as_ptr().wrapping_add(index);
        // Not the intrinsic, which without a target feature fetches the line for reading only.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch reads and writes nothing and does not fault, whatever the address.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) word, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = word;
    }
}

impl LoadWords for SharedWords {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        // SAFETY: `_mapping` keeps the words mapped.
        unsafe { load(self.base, self.len, index, order) }
    }
}

impl SharedWords {
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len);
        // SAFETY: mapped readable and writable for as long as `_mapping` lives; inside, as the
        // assertion checks.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index)) }
    }

    /// The low half of a word, for the kernel.
    fn low_half(&self, index: usize) -> &AtomicU32 {
        let halves = ptr::from_ref(self.word(index)).cast::<AtomicU32>();
        // SAFETY: half of a mapped word, and aligned. Only the kernel reads it.
        unsafe { &*halves.add(usize::from(cfg!(target_endian = "big"))) }
    }
}

impl ShareWords for SharedWords {
    fn fetch_add(&self, index: usize, value: u64) -> u64 {
        self.word(index).fetch_add(value, Ordering::SeqCst)
    }

    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.word(index).fetch_or(bits, Ordering::SeqCst)
    }

    fn swap(&self, index: usize, value: u64) -> u64 {
        self.word(index).swap(value, Ordering::SeqCst)
    }

    fn fence(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    fn wait(&self, index: usize, seen: u32, timeout: Duration) {
        // A timeout that does not fit is endless. An error means that the word has changed, a
        // signal arrived, or the timeout passed.
        let timeout = futex::Timespec::try_from(timeout).ok();
        let _ = futex::wait(self.low_half(index), futex::Flags::empty(), seen, timeout.as_ref());
    }

    fn wake(&self, index: usize) {
        // The word is mapped and aligned, so there is no error.
        let _ = futex::wake(self.low_half(index), futex::Flags::empty(), i32::MAX as u32);
    }
}

/// This process's segment of a link.
pub(crate) struct OwnSegment {
    mapping: Arc<SegmentMapping>,
    file: OwnedFd,
}

/// The seals of a segment: its size is fixed, and only existing mappings can write.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

impl OwnSegment {
    /// Makes a segment, zeroed and sealed. It ends with the last process that maps it.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn new(layout: &SegmentLayout) -> Result<Self, FabricError> {
        let bytes = layout.bytes();
        Self::make(bytes, layout.used_bytes()).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("making a link segment of {bytes} bytes"),
            remedy: "free memory, raise the limit of open files (ulimit -n), or use a smaller queue_depth",
            source: error,
        })
    }

    fn make(bytes: usize, used: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("tensorwire-link", flags)?;
        grow_memfd(&file, bytes as u64)?;
        let mapping = SegmentMapping::new(file.as_fd(), bytes, used, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(OwnSegment { mapping: Arc::new(mapping), file })
    }

    /// The file, for the peer to map.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The words of a range.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn words(&self, range: Range<usize>) -> OwnWords {
        let base = self.mapping.part(&range);
        OwnWords { base, len: range.len(), _mapping: Arc::clone(&self.mapping) }
    }
}

/// The peer's segment of a link.
pub(crate) struct PeerSegment {
    mapping: Arc<SegmentMapping>,
}

impl PeerSegment {
    /// Maps a segment that a peer has sent. The caller has checked its seals and its size.
    ///
    /// # Errors
    /// If it can't be mapped.
    pub(crate) fn map(file: BorrowedFd<'_>, layout: &SegmentLayout) -> Result<Self, FabricError> {
        let (bytes, used) = (layout.bytes(), layout.used_bytes());
        let mapping =
            SegmentMapping::new(file, bytes, used, ProtFlags::READ).map_err(|error| FabricError::Os {
                fabric: FabricKind::Shm,
                tried: format!("mapping the peer's link segment of {bytes} bytes"),
                remedy: "free memory, or raise the limit of address space (ulimit -v)",
                source: error.into(),
            })?;
        Ok(PeerSegment { mapping: Arc::new(mapping) })
    }

    /// The words of a range.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn words(&self, range: Range<usize>) -> PeerWords {
        let base = self.mapping.part(&range);
        PeerWords { base, len: range.len(), _mapping: Arc::clone(&self.mapping) }
    }
}

/// Memory that several processes write.
pub(crate) struct SharedSegment {
    mapping: Arc<SegmentMapping>,
}

/// The seals of shared memory: its size is fixed.
const SHARED_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl SharedSegment {
    /// Makes a segment of `bytes` bytes, zeroed and sealed, and returns the file for the peers. It
    /// ends with the last process that maps it.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn new(bytes: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("tensorwire-doorbells", flags)?;
        grow_memfd(&file, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&file, SHARED_SEALS)?;
        Ok((Self::map(file.as_fd(), bytes)?, file))
    }

    /// Checks that a file can be mapped safely.
    ///
    /// # Errors
    /// The reason.
    pub(crate) fn check(file: impl AsFd, bytes: usize) -> Result<(), String> {
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SHARED_SEALS) {
            return Err(format!("its doorbells are not sealed: the file has seals {:#x}", seals.bits()));
        }
        let have = rustix::fs::fstat(&file).map_err(|error| error.to_string())?.st_size;
        if have < bytes as i64 {
            return Err(format!("its doorbells have {have} bytes, not {bytes}"));
        }
        // A page of the reserve that is gone is an access that kills.
        if is_in_huge_pages(&file).map_err(|error| error.to_string())? {
            return Err("its doorbells are in reserved huge pages".into());
        }
        Ok(())
    }

    /// Maps the first bytes of a file that [`SharedSegment::check`] has accepted.
    ///
    /// # Errors
    /// If it can't be mapped.
    pub(crate) fn map(file: BorrowedFd<'_>, bytes: usize) -> rustix::io::Result<Self> {
        let mapping = SegmentMapping::new(file, bytes, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(SharedSegment { mapping: Arc::new(mapping) })
    }

    /// The words of a range.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn words(&self, range: Range<usize>) -> SharedWords {
        let base = self.mapping.part(&range);
        SharedWords { base, len: range.len(), _mapping: Arc::clone(&self.mapping) }
    }
}
