//! The region of another process, mapped read-only.

use super::limits::{self, ReadFile};
use super::memfd::grow_memfd;
use crate::memory::byte_count::ByteCount;
use memmap2::{Mmap, MmapOptions};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, fstat, fstatfs, memfd_create};
use rustix::io::{Errno, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::param::page_size;
use rustix::system::sysinfo;
use std::ffi::c_void;
use std::io;

/// The seals of every region: its size is fixed, only its maker can write to it, and no seal can be
/// removed or added.
pub(crate) const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Why a peer's region was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerRegionError {
    /// The file is no memfd, or a seal is missing.
    #[error(
        "the peer's region is not sealed as it must be (has seals {have:#x}, needs {SEALS_BITS:#x}): it \
         could be shortened or written to while it is read here"
    )]
    Seals {
        /// The seals of the file, as `F_SEAL_*` bits.
        have: u32,
    },
    /// The file is shorter than the peer says.
    #[error("the peer's region has {size} bytes, but the peer says {claimed}")]
    TooShort {
        /// Size of the file in bytes.
        size: u64,
        /// Size that the peer says, in bytes.
        claimed: u64,
    },
    /// The file is in reserved huge pages that it does not have all. To read one that is missing
    /// takes one of this process's own reserve, and kills the process if it has none.
    #[error(
        "the peer's region of {} has {} in reserved huge pages: it must have all of them",
        ByteCount(*.size),
        ByteCount(*.there)
    )]
    Holes {
        /// Size of the file in bytes.
        size: u64,
        /// Bytes that have pages.
        there: u64,
    },
    /// The region can't be mapped, and is larger than the memory of the host.
    #[error(
        "the peer's region of {} can't be mapped: this host has {} of memory and swap",
        ByteCount(*.size),
        ByteCount(*.memory)
    )]
    TooLarge {
        /// Size of the file in bytes.
        size: u64,
        /// Memory and swap of this host, in bytes.
        memory: u64,
    },
    /// A call to the operating system failed.
    #[error("{tried} the peer's region of {} failed: {source}", ByteCount(*.claimed))]
    Os {
        /// The step that failed.
        tried: &'static str,
        /// Size that the peer says, in bytes.
        claimed: u64,
        /// The system's error.
        source: io::Error,
    },
}

const SEALS_BITS: u32 = SEALS.bits();
/// Bytes of a block of `st_blocks`.
const BLOCK: u64 = 512;
/// The kind of file system of memory in reserved huge pages.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Whether a file is in reserved huge pages.
///
/// # Errors
/// Of `fstatfs`.
pub(crate) fn is_in_huge_pages(file: impl AsFd) -> rustix::io::Result<bool> {
    Ok(fstatfs(file)?.f_type as u64 == HUGETLBFS)
}

/// Checks that nobody can shorten `fd` or map it for writing any more, and that it has at least
/// `min_len` bytes. Returns its size in bytes.
///
/// Call it before mapping a peer's memory: a read of a mapping whose file was shortened kills the
/// process.
///
/// # Errors
/// [`PeerRegionError`].
pub fn verify_seals(fd: impl AsFd, min_len: u64) -> Result<u64, PeerRegionError> {
    let os = |tried| {
        move |error: rustix::io::Errno| PeerRegionError::Os { tried, claimed: min_len, source: error.into() }
    };
    let have = match fcntl_get_seals(&fd) {
        // A kind of file that can't be sealed.
        Err(rustix::io::Errno::INVAL) => SealFlags::empty(),
        other => other.map_err(os("reading the seals of"))?,
    };
    if !have.contains(SEALS) {
        return Err(PeerRegionError::Seals { have: have.bits() });
    }
    let file = fstat(&fd).map_err(os("reading the size of"))?;
    let size = file.st_size as u64;
    if size < min_len {
        return Err(PeerRegionError::TooShort { size, claimed: min_len });
    }
    // Its seals keep all others from taking pages out.
    let there = file.st_blocks as u64 * BLOCK;
    if there < size && is_in_huge_pages(&fd).map_err(os("reading the kind of"))? {
        return Err(PeerRegionError::Holes { size, there });
    }
    Ok(size)
}

/// Sorts spans (offset and length) and merges those that overlap or share a page. Also returns the
/// number of distinct bytes.
pub(crate) fn merge_spans(mut parts: Vec<(u64, u64)>) -> (Vec<(u64, u64)>, u64) {
    let page = page_size() as u64;
    parts.retain(|(_, len)| *len > 0);
    parts.sort_unstable();
    let (mut merged, mut bytes) = (Vec::<(u64, u64)>::with_capacity(parts.len()), 0);
    for (offset, len) in parts {
        let end = offset.saturating_add(len);
        match merged.last_mut() {
            Some((first, so_far)) if offset / page <= (*first + *so_far - 1) / page => {
                let until = *first + *so_far;
                bytes += end.saturating_sub(until.max(offset));
                *so_far = until.max(end) - *first;
            }
            _ => {
                bytes += end - offset;
                merged.push((offset, end - offset));
            }
        }
    }
    (merged, bytes)
}

/// Checks that there is memory for copies of these spans: the kernel kills a process that exceeds
/// its cgroup's limit.
fn room_for(parts: &[(u64, u64)], read: ReadFile<'_>) -> io::Result<()> {
    let page = page_size() as u64;
    let needed = parts.iter().map(|(_, len)| len.next_multiple_of(page) + page).sum::<u64>();
    match limits::tightest(read).filter(|room| room.available < needed) {
        Some(room) => {
            let why = format!("{} are needed, and {}", ByteCount(needed), room.limit);
            Err(io::Error::new(io::ErrorKind::OutOfMemory, why))
        }
        None => Ok(()),
    }
}

/// Maps a file for reading over the mapping at an address. A parameter, so that tests can let it
/// fail.
pub(crate) type MapOver = unsafe fn(*mut c_void, usize, &OwnedFd) -> Result<(), Errno>;

/// The [`MapOver`] of the system.
///
/// # Safety
/// The range must be the caller's, and bytes that are read there later must be the same in the
/// file.
pub(crate) unsafe fn map_over(base: *mut c_void, len: usize, file: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { map_at(base, len, MapFlags::FIXED, file) }
}

/// Maps a file for reading at an address.
///
/// # Safety
/// With [`MapFlags::FIXED`] as [`map_over`].
unsafe fn map_at(base: *mut c_void, len: usize, how: MapFlags, file: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { mmap(base, len, ProtFlags::READ, MapFlags::SHARED | how, file, 0) }.map(|_| ())
}

/// The inode of the file that is mapped at an address, as far as the kernel tells.
fn file_at(base: *const c_void) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let start = format!("{:x}-", base.addr());
    let line = maps.lines().find(|line| line.starts_with(&start))?;
    line.split_whitespace().nth(4)?.parse().ok()
}

/// Why a file of `size` bytes was not mapped. A sparse file costs its maker nothing, so one that is
/// larger than all memory is the maker's fault.
fn not_mapped(claimed: u64, size: u64, source: io::Error) -> PeerRegionError {
    let has = sysinfo();
    let memory = (has.totalram as u64 + has.totalswap as u64).saturating_mul(u64::from(has.mem_unit));
    match size > memory {
        true => PeerRegionError::TooLarge { size, memory },
        false => PeerRegionError::Os { tried: "mapping", claimed, source },
    }
}

/// Ends the process: its readers would fault at any moment, without a reason in the log.
fn abort_unmapped(len: u64, error: Errno, again: Errno) -> ! {
    let what = ByteCount(len);
    tracing::error!(
        "replacing the mapping of a dead peer's region of {what} failed ({error}), the old mapping is gone, \
         and mapping the copy failed too ({again}): aborting, because borrowed tensors would fault"
    );
    std::process::abort()
}

/// The region of another process, mapped read-only. Pages are mapped at the first read.
#[derive(Debug)]
pub struct PeerRegion {
    map: Mmap,
    len: u64,
}

impl PeerRegion {
    /// Maps a peer's region of `len` bytes, as the peer says.
    ///
    /// The descriptor is closed. The mapping keeps the memory alive, also after the peer's death.
    ///
    /// # Errors
    /// [`PeerRegionError`] if it is not sealed, shorter than `len`, or can't be mapped.
    pub fn map(fd: OwnedFd, len: u64) -> Result<PeerRegion, PeerRegionError> {
        let size = verify_seals(&fd, len)?;
        // The whole file: a mapping of reserved huge pages can be unmapped only in whole pages.
        let bytes = usize::try_from(size).unwrap_or(usize::MAX);
        // SAFETY: the seals that were just verified hold for good, so the file can't get shorter
        // and a read can't fault. Its maker can still change bytes through its own mapping. For
        // this reason the type hands out a pointer and no slice, and `LentBytes` states who vouches
        // for the bytes.
        let map = unsafe { MmapOptions::new().len(bytes).map(&fd) };
        Ok(PeerRegion { map: map.map_err(|error| not_mapped(len, size, error))?, len })
    }

    /// Copies `parts` (offset and length) into private memory and maps it at the same addresses.
    /// The rest of the region reads as zeros and takes no memory. If no other process maps the
    /// region, its memory goes back to the system.
    ///
    /// A reader of one of the parts sees the same bytes before, during and after the call. The
    /// kernel replaces the mapping under the lock that page faults take. After an error everything
    /// is unchanged.
    ///
    /// There is one exception. If the kernel lacks the few hundred bytes for its own record of a
    /// mapping, it may fail after it removed the old mapping. The call then fills the gap, in which
    /// a reader may have faulted. If filling fails too, the process is aborted with a message.
    ///
    /// # Errors
    /// [`PeerRegionError::Os`] if there is no memory for the parts, or one is outside the region.
    ///
    /// # Safety
    /// The process that sent the region has ended. If it was the maker, nobody writes to the region
    /// any more. What another process writes meanwhile may be missing in the copy. Until the region
    /// is dropped, only these parts are read, by [`PeerRegion::bytes_at`] or as
    /// [`LentBytes`](super::LentBytes).
    pub unsafe fn relocate(&self, parts: &[(u64, u64)]) -> Result<(), PeerRegionError> {
        // SAFETY: the caller's promise.
        unsafe { self.relocate_with(parts, &|path| std::fs::read_to_string(path).ok(), map_over) }
    }

    /// As [`PeerRegion::relocate`]; `read` reads the files with the limits, and `map_over` makes
    /// the new mapping.
    ///
    /// # Safety
    /// As [`PeerRegion::relocate`].
    pub(crate) unsafe fn relocate_with(
        &self,
        parts: &[(u64, u64)],
        read: ReadFile<'_>,
        map_over: MapOver,
    ) -> Result<(), PeerRegionError> {
        let failed = |tried| move |source| PeerRegionError::Os { tried, claimed: self.len, source };
        let fill = || {
            room_for(parts, read)?;
            let copy = memfd_create("tensorwire-relocated", MemfdFlags::CLOEXEC)?;
            grow_memfd(&copy, self.map.len() as u64)?;
            parts.iter().try_for_each(|part| self.copy_part(&copy, *part)).map(|()| copy)
        };
        let copy = fill().map_err(failed("copying the borrowed parts of"))?;
        let base = self.map.as_ptr().cast_mut().cast();
        let before = file_at(base);
        // SAFETY: the range is this value's own mapping, whole. The new mapping is as long and
        // readable, and has the same bytes wherever code may still read.
        let Err(error) = (unsafe { map_over(base, self.map.len(), &copy) }) else { return Ok(()) };
        // Fills the gap, if there is one.
        // SAFETY: as above, and no existing mapping is replaced.
        match unsafe { map_at(base, self.map.len(), MapFlags::FIXED_NOREPLACE, &copy) } {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) if file_at(base) == before => {
                Err(failed("replacing the mapping of")(error.into()))
            }
            Err(again) => abort_unmapped(self.map.len() as u64, error, again),
        }
    }

    /// Copies a part to the same offset of another file.
    fn copy_part(&self, to: &OwnedFd, (mut offset, len): (u64, u64)) -> io::Result<()> {
        let start = self.bytes_at(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: inside the mapping; by the rule of `relocate` nobody writes there.
        let mut bytes = unsafe { std::slice::from_raw_parts(start, len as usize) };
        while !bytes.is_empty() {
            match pwrite(to, bytes, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => (bytes, offset) = (&bytes[written..], offset + written as u64),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Bytes of the region, as the peer says.
    #[allow(clippy::len_without_is_empty)] // a region is never empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Address of `len` bytes at `offset`; `None` if some are outside.
    ///
    /// The pointer is readable as long as this value lives. The peer may write to the bytes unless
    /// it lent them.
    pub fn bytes_at(&self, offset: u64, len: u64) -> Option<*const u8> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        Some(self.map.as_ptr().wrapping_add(usize::try_from(offset).ok()?))
    }
}
