//! The memory of a link outside the pool: received messages, copied sends, and words that the peer
//! may write. The peer can reach only these words.

use super::context::{MemoryRegion, ProtectionDomain};
use super::failure::os;
use super::sys::*;
use crate::fabric::FabricError;
use memmap2::{Advice, MmapMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a place for a message: the longest and some more, in whole cache lines.
pub(super) const PLACE: usize = 256;
const PAGE: usize = 4096;

/// Registered memory of our own.
pub(super) struct LinkBuffer {
    region: MemoryRegion,
    base: NonNull<u8>,
    len: usize,
    /// Excluded from forked children: copy-on-write after a fork would move pages away from the
    /// device.
    map: Option<MmapMut>,
}

// SAFETY: the memory is plain bytes, and the link that owns it decides about access to them.
unsafe impl Send for LinkBuffer {}

impl LinkBuffer {
    /// `len` bytes, zero; peers may write to them if `remote` says so.
    pub fn new(domain: &Arc<ProtectionDomain>, len: usize, remote: bool) -> Result<Self, FabricError> {
        let size = Self::size(len);
        let failed = |error| os(format!("mapping {size} bytes"), error, "free memory");
        let mut map = MmapMut::map_anon(size).map_err(failed)?;
        map.advise(Advice::DontFork).map_err(failed)?;
        let base = NonNull::from(&mut map[..]).cast::<u8>();
        let access = IBV_ACCESS_LOCAL_WRITE | if remote { IBV_ACCESS_REMOTE_WRITE } else { 0 };
        // SAFETY: the registration has ended, and no references to the memory exist, see the
        // methods below.
        let region = unsafe { MemoryRegion::new(domain, base, size, access) }?;
        Ok(LinkBuffer { region, base, len: size, map: Some(map) })
    }

    /// The bytes that a buffer for `len` takes.
    pub fn size(len: usize) -> usize {
        len.max(1).next_multiple_of(PAGE)
    }

    pub fn rkey(&self) -> u32 {
        self.region.rkey
    }

    /// Leaves the memory to the device for ever.
    pub fn keep(&mut self) {
        self.region.keep();
        std::mem::forget(self.map.take());
    }

    /// The bytes from `at` on, as a work request names them.
    pub fn piece(&self, at: usize, len: usize) -> ibv_sge {
        debug_assert!(at + len <= self.len);
        ibv_sge { addr: self.base.as_ptr() as u64 + at as u64, length: len as u32, lkey: self.region.lkey }
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// If they don't fit.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.len));
        // SAFETY: inside, as was just checked; `&mut self`, and the link writes only to places that
        // the device does not have at the time.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(at), bytes.len()) };
    }

    /// Bytes that the device has written.
    ///
    /// # Panics
    /// If they are not inside.
    ///
    /// # Safety
    /// The device does not have them: their receive is complete, and they are not posted again as
    /// long as the slice is there.
    pub unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: inside, initialised (zeroed at first), and not written meanwhile, as the caller
        // vouches.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// A copy of the bytes of a piece of this buffer; `None` if it is elsewhere.
    ///
    /// # Panics
    /// If the piece has more than `MOST` bytes.
    ///
    /// # Safety
    /// If the piece is of this buffer, no receive has its place.
    pub unsafe fn copy_of<const MOST: usize>(&self, piece: &ibv_sge) -> Option<[u8; MOST]> {
        let at = usize::try_from(piece.addr.checked_sub(self.base.as_ptr() as u64)?).ok()?;
        let len = piece.length as usize;
        if len == 0 || at.checked_add(len).is_none_or(|end| end > self.len) {
            return None;
        }
        let mut copy = [0; MOST];
        // SAFETY: inside, as was just checked. No device writes there, as the caller vouches.
        copy[..len].copy_from_slice(unsafe { self.bytes(at, len) });
        Some(copy)
    }

    /// A word that the peer may write to at any time.
    ///
    /// # Panics
    /// If it is not inside.
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!((index + 1) * 8 <= self.len);
        // SAFETY: inside and aligned; words are only ever looked at as atomics, and a device writes
        // them whole.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast::<u64>().add(index)) }
    }

    /// The value that the peer has written to a word; 0 if none. Words are little-endian.
    #[inline]
    pub fn look(&self, index: usize) -> u64 {
        u64::from_le(self.word(index).load(Ordering::Acquire))
    }

    /// Takes the value that the peer has written to a word; 0 if none.
    #[inline]
    pub fn take_word(&self, index: usize) -> u64 {
        let found = self.look(index);
        if found != 0 {
            self.word(index).store(0, Ordering::Relaxed);
        }
        found
    }
}

impl Drop for LinkBuffer {
    fn drop(&mut self) {
        let map = self.map.take();
        if !self.region.end() {
            // The device has it.
            std::mem::forget(map);
        }
    }
}
