//! Another process's region, mapped here for reading.

use super::bytes::Bytes;
use memmap2::{Mmap, MmapOptions};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use std::io;

/// What every region's memfd is sealed with: its size is fixed, nobody but its maker can write to it, and
/// nothing of that can be changed.
pub(super) const SEALS: SealFlags =
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
    #[error("{tried} the peer's region of {} failed: {source}", Bytes(*.claimed))]
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
