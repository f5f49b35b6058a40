//! The mapping of a region into this process, and the system calls on it.

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, mmap_anonymous, munmap};
use std::io;
use std::ptr::{NonNull, null_mut};

/// `MPOL_F_NODE | MPOL_F_ADDR` of `linux/mempolicy.h`: "the node that holds the page at this
/// address".
const NODE_OF_ADDRESS: libc::c_ulong = 1 | 2;
/// Bits of the node mask that is passed to the kernel, whose own limit is `MAX_NUMNODES`, at most
/// 1024.
const NODES: usize = 1024;
/// How often a collapse is tried while the kernel returns `EAGAIN`.
const COLLAPSE_TRIES: usize = 3;

/// A writable shared mapping of a file at an address of a chosen alignment.
///
/// It lies inside a reserved address range with room for the alignment. The drop unmaps both.
#[derive(Debug)]
pub(crate) struct RegionMapping {
    reserved: NonNull<u8>,
    reserved_len: usize,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range of the process, not of a thread. Nothing in here is shared
// mutable state; the types that hand out parts of the mapping decide which thread accesses them.
unsafe impl Send for RegionMapping {}
// SAFETY: as above. Every method only makes system calls on the range.
unsafe impl Sync for RegionMapping {}

impl RegionMapping {
    /// Maps `len` bytes of `fd` at a multiple of `align` (a power of two, at least a page).
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize, align: usize) -> io::Result<RegionMapping> {
        debug_assert!(align.is_power_of_two());
        let reserved_len = len.checked_add(align).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new private range at an address that the kernel chooses, which nothing can
        // access (PROT_NONE): no existing memory is affected.
        let reserved = unsafe {
            mmap_anonymous(
                null_mut(),
                reserved_len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let reserved = NonNull::new(reserved.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let skip = reserved.as_ptr().align_offset(align);
        // SAFETY: skip < align and reserved_len = len + align, so the result lies inside the
        // reservation with `len` bytes after it.
        let base = unsafe { reserved.add(skip) };
        // From here on the drop of `mapping` unmaps the reservation.
        let mapping = RegionMapping { reserved, reserved_len, base, len };
        // SAFETY: base..base + len is inside the reservation, which this function made and which no
        // other code knows, so MAP_FIXED replaces nothing but the reservation.
        unsafe {
            mmap(
                base.as_ptr().cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                0,
            )?;
        }
        Ok(mapping)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Allocates every page, zeroed. A shortage is an error here, where a first access would be a
    /// SIGBUS.
    pub(crate) fn populate(&self) -> io::Result<()> {
        self.advise(libc::MADV_POPULATE_WRITE, usize::MAX)
    }

    /// Joins the pages into huge pages where the kernel can.
    pub(crate) fn collapse(&self) -> io::Result<()> {
        self.advise(libc::MADV_COLLAPSE, COLLAPSE_TRIES)
    }

    fn advise(&self, advice: libc::c_int, mut tries: usize) -> io::Result<()> {
        loop {
            // SAFETY: the range is this mapping. Both advices keep its contents.
            let result = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) };
            if result == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            tries = tries.saturating_sub(1);
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) if tries > 0 => {}
                _ => return Err(error),
            }
        }
    }

    /// Locks the first `len` bytes in memory.
    pub(crate) fn lock(&self, len: usize) -> Result<(), Errno> {
        // SAFETY: at most this mapping; locking changes no contents.
        unsafe { mlock(self.base.as_ptr().cast(), len.min(self.len)) }
    }

    /// Has pages that are not allocated yet come from this NUMA node alone.
    pub(crate) fn bind(&self, node: u32) -> io::Result<()> {
        self.set_policy(libc::MPOL_BIND, node)
    }

    /// Has pages that are not allocated yet come from this NUMA node, and from others once its
    /// memory is used up.
    pub(crate) fn prefer(&self, node: u32) -> io::Result<()> {
        self.set_policy(libc::MPOL_PREFERRED, node)
    }

    fn set_policy(&self, mode: libc::c_int, node: u32) -> io::Result<()> {
        const WORD: usize = libc::c_ulong::BITS as usize;
        let mut mask = [0 as libc::c_ulong; NODES / WORD];
        let word = mask.get_mut(node as usize / WORD).ok_or(io::ErrorKind::InvalidInput)?;
        *word = 1 << (node as usize % WORD);
        // SAFETY: the range is this mapping. The mask has NODES bits and lives until the call
        // returns. The kernel reads one bit fewer than it is told.
        let result = unsafe {
            libc::syscall(libc::SYS_mbind, self.base.as_ptr(), self.len, mode, mask.as_ptr(), NODES + 1, 0)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The NUMA node of the first, the middle and the last page. `None` if they differ or the
    /// kernel does not tell.
    pub(crate) fn node(&self) -> Option<u32> {
        let first = self.node_at(0)?;
        let same = [self.len / 2, self.len - 1].into_iter().all(|offset| self.node_at(offset) == Some(first));
        same.then_some(first)
    }

    fn node_at(&self, offset: usize) -> Option<u32> {
        let mut node: libc::c_int = -1;
        // SAFETY: the address is inside this mapping, because the callers' offsets are less than
        // its length. The kernel writes one int to `node`, and no mask is passed.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut node,
                null_mut::<libc::c_ulong>(),
                0,
                self.base.as_ptr().add(offset),
                NODE_OF_ADDRESS,
            )
        };
        if result == 0 { u32::try_from(node).ok() } else { None }
    }
}

/// Whether this thread has a memory policy, as `numactl` sets one. `false` if the kernel does not
/// tell.
pub(crate) fn has_memory_policy() -> bool {
    let mut mode: libc::c_int = libc::MPOL_DEFAULT;
    let none = null_mut::<libc::c_ulong>();
    // SAFETY: the kernel writes one int to `mode`; no mask and no address is passed.
    let result = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0, none, 0) };
    result == 0 && mode != libc::MPOL_DEFAULT
}

impl Drop for RegionMapping {
    fn drop(&mut self) {
        // SAFETY: `shared` made the reservation with everything in it, and code that holds a part
        // of it keeps this value alive. It can't fail: the range is aligned and no mapping is
        // split.
        let unmapped = unsafe { munmap(self.reserved.as_ptr().cast(), self.reserved_len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn a_mapping_is_aligned_as_asked_and_shows_the_file() {
        let file = memfd_create("mapping", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, 1 << 16).expect("size");
        let mapping = RegionMapping::shared(file.as_fd(), 1 << 16, 1 << 21).expect("mapping");
        assert_eq!(mapping.base().as_ptr() as usize % (1 << 21), 0);
        mapping.populate().expect("populate");
        // SAFETY: inside the mapping, which is 64 KiB long and alive.
        unsafe { mapping.base().add(777).write(5) };
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 777).expect("read");
        assert_eq!(byte, [5]);
    }

    #[test]
    fn a_missing_numa_node_is_refused() {
        let file = memfd_create("mapping", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, 4096).expect("size");
        let mapping = RegionMapping::shared(file.as_fd(), 4096, 4096).expect("mapping");
        assert!(mapping.bind(1023).is_err());
        assert!(mapping.bind(u32::MAX).is_err());
    }
}
