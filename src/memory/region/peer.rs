//! Another process's region, mapped here for reading.

use super::limits::{self, ReadFile};
use crate::memory::byte_count::ByteCount;
use memmap2::{Mmap, MmapOptions};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::param::page_size;
use std::ffi::c_void;
use std::io;

/// What every region's memfd is sealed with: its size is fixed, nobody but its maker can write to it, and
/// nothing of that can be changed.
pub(crate) const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Why a peer's region was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerRegionError {
    /// It is no memfd, or a seal is missing.
    #[error(
        "the peer's region is not sealed as it must be (has seals {have:#x}, needs {SEALS_BITS:#x}): it could be \
         shortened or written to while it is read here"
    )]
    Seals {
        /// The seals that it has, as `F_SEAL_*` bits.
        have: u32,
    },
    /// It is shorter than the peer says.
    #[error("the peer's region has {size} bytes, but the peer says {claimed}")]
    TooShort {
        /// Its size in bytes.
        size: u64,
        /// What the peer says, in bytes.
        claimed: u64,
    },
    /// A call to the operating system failed.
    #[error("{tried} the peer's region of {} failed: {source}", ByteCount(*.claimed))]
    Os {
        /// What was tried.
        tried: &'static str,
        /// What the peer says the size is, in bytes.
        claimed: u64,
        /// The system's error.
        source: io::Error,
    },
}

const SEALS_BITS: u32 = SEALS.bits();

/// Checks that nobody can shorten `fd` or map it for writing any more, and that it has at least `min_len`
/// bytes. Returns its size in bytes.
///
/// A receiver calls this before it maps a peer's memory: a file that gets shorter under a mapping kills the
/// process that reads it.
///
/// # Errors
/// [`PeerRegionError`].
pub fn verify_seals(fd: impl AsFd, min_len: u64) -> Result<u64, PeerRegionError> {
    let os = |tried| {
        move |error: rustix::io::Errno| PeerRegionError::Os { tried, claimed: min_len, source: error.into() }
    };
    let have = match fcntl_get_seals(&fd) {
        // Not a kind of file that can be sealed.
        Err(rustix::io::Errno::INVAL) => SealFlags::empty(),
        other => other.map_err(os("reading the seals of"))?,
    };
    if !have.contains(SEALS) {
        return Err(PeerRegionError::Seals { have: have.bits() });
    }
    let size = fstat(&fd).map_err(os("reading the size of"))?.st_size as u64;
    if size < min_len {
        return Err(PeerRegionError::TooShort { size, claimed: min_len });
    }
    Ok(size)
}

/// The same parts in order, those that overlap or share a page as one, and how many bytes are in any of them: what is kept of
/// them is kept and counted once.
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

/// Looks whether there is memory for these parts: who goes over a cgroup's limit is killed.
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

/// What maps a file over what is there, for reading, at an address and with this length.
pub(crate) type MapOver = unsafe fn(*mut c_void, usize, &OwnedFd) -> Result<(), Errno>;

/// A [`MapOver`].
///
/// # Safety
/// The range must be the caller's, and what is read there afterwards must be what the file has.
pub(crate) unsafe fn map_over(base: *mut c_void, len: usize, file: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the caller's word.
    unsafe { map_at(base, len, MapFlags::FIXED, file) }
}

/// Maps a file for reading at an address.
///
/// # Safety
/// With [`MapFlags::FIXED`] as [`map_over`].
unsafe fn map_at(base: *mut c_void, len: usize, how: MapFlags, file: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the caller's word.
    unsafe { mmap(base, len, ProtFlags::READ, MapFlags::SHARED | how, file, 0) }.map(|_| ())
}

/// The number of the file that is mapped from an address on, as far as the system tells.
fn file_at(base: *const c_void) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let start = format!("{:x}-", base.addr());
    let line = maps.lines().find(|line| line.starts_with(&start))?;
    line.split_whitespace().nth(4)?.parse().ok()
}

/// Ends the process, whose readers would fault at any moment, and not know why.
fn abort_unmapped(len: u64, error: Errno, again: Errno) -> ! {
    let what = ByteCount(len);
    tracing::error!(
        "the mapping of a dead peer's region of {what}, of which tensors are borrowed here, was lost when it was replaced ({error}), \
         and can't be put back ({again}): the process is aborted, as its readers would fault"
    );
    std::process::abort()
}

/// Another process's region, mapped here for reading. Pages come in when they are first read.
#[derive(Debug)]
pub struct PeerRegion {
    map: Mmap,
    len: u64,
}

impl PeerRegion {
    /// Maps a peer's region, of which the peer says that it has `len` bytes.
    ///
    /// The descriptor is closed; the mapping keeps the memory alive, also after the peer's death.
    ///
    /// # Errors
    /// [`PeerRegionError`] if it is not sealed, shorter than `len`, or can't be mapped.
    pub fn map(fd: OwnedFd, len: u64) -> Result<PeerRegion, PeerRegionError> {
        let size = verify_seals(&fd, len)?;
        // The whole file: a mapping of reserved huge pages can be undone only in whole pages.
        let bytes = usize::try_from(size).unwrap_or(usize::MAX);
        // SAFETY: the seals that were just verified hold for good, so the file can't get shorter and a read
        // can't fault. Its maker can still change bytes through its own mapping; that is why this type hands
        // out a pointer and no slice, and why `LentBytes` states who vouches for the bytes.
        let map = unsafe { MmapOptions::new().len(bytes).map(&fd) };
        let map = map.map_err(|source| PeerRegionError::Os { tried: "mapping", claimed: len, source })?;
        Ok(PeerRegion { map, len })
    }

    /// Replaces the mapping, at the same addresses, by private memory with just these parts of it, each an offset and a
    /// length; the rest reads as zeros and takes no room. If nobody else has the region, its memory goes back to the system.
    ///
    /// Whoever reads one of the parts meanwhile sees the same bytes before, during and after it: the kernel puts the new
    /// mapping in place of the old one under the lock that page faults wait for. After an error everything is as it was.
    ///
    /// One thing can't be promised. Where the kernel has not even the few hundred bytes that a mapping takes in itself, it may find out
    /// when the old one is gone already. Then the new one is put into the gap, in which a reader may have died; and if that fails
    /// too, the process is aborted, with a message, as its readers would fault.
    ///
    /// # Errors
    /// [`PeerRegionError::Os`] if there is no room for the parts, or one is not inside.
    ///
    /// # Safety
    /// Nobody may write to the region any more: its maker has ended. And until the region is dropped nothing but
    /// these parts may be read, by [`PeerRegion::bytes_at`] or as [`LentBytes`](super::LentBytes).
    pub unsafe fn relocate(&self, parts: &[(u64, u64)]) -> Result<(), PeerRegionError> {
        // SAFETY: the caller's word.
        unsafe { self.relocate_with(parts, &|path| std::fs::read_to_string(path).ok(), map_over) }
    }

    /// As [`PeerRegion::relocate`], with the files that tell the limits of memory read by `read`, and the new mapping made by
    /// `map_over`.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn relocate_with(
        &self,
        parts: &[(u64, u64)],
        read: ReadFile<'_>,
        map_over: MapOver,
    ) -> Result<(), PeerRegionError> {
        let failed = |tried| move |source| PeerRegionError::Os { tried, claimed: self.len, source };
        let fill = || {
            room_for(parts, read)?;
            let kept = memfd_create("tensorwire-relocated", MemfdFlags::CLOEXEC)?;
            ftruncate(&kept, self.map.len() as u64)?;
            parts.iter().try_for_each(|part| self.copy_part(&kept, *part)).map(|()| kept)
        };
        let kept = fill().map_err(failed("copying what is borrowed of"))?;
        let base = self.map.as_ptr().cast_mut().cast();
        let before = file_at(base);
        // SAFETY: the range is this value's own mapping, whole. The new one is as long and readable, and has the same bytes wherever
        // anyone may still look.
        let Err(error) = (unsafe { map_over(base, self.map.len(), &kept) }) else { return Ok(()) };
        // Into the gap, if there is one.
        // SAFETY: as above, and nothing that is mapped is replaced.
        match unsafe { map_at(base, self.map.len(), MapFlags::FIXED_NOREPLACE, &kept) } {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) if file_at(base) == before => {
                Err(failed("replacing the mapping of")(error.into()))
            }
            Err(again) => abort_unmapped(self.map.len() as u64, error, again),
        }
    }

    /// Writes a part to the same place of another file.
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

    /// How many bytes the peer said that it has.
    #[allow(clippy::len_without_is_empty)] // nobody asks whether a region is empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Where `len` bytes at `offset` lie here; `None` if they are not all inside.
    ///
    /// The pointer is good for reading as long as this value lives. The peer may write to the bytes unless
    /// it has promised not to.
    pub fn bytes_at(&self, offset: u64, len: u64) -> Option<*const u8> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        Some(self.map.as_ptr().wrapping_add(usize::try_from(offset).ok()?))
    }
}
