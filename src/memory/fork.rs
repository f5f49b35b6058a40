//! Shared memory in a forked child.
//!
//! A child of `fork(2)` inherits every mapping of its parent, and a shared mapping is the same
//! memory. A tensor that the child filled, dropped or poisoned would change under the parent and
//! its peers. Therefore a handler runs first in the child and replaces the mappings registered here
//! by private ones: writes of the child stay in the child.
//!
//! A private mapping is no snapshot. A page that the child has not written shows the parent's later
//! writes. A child can therefore read its parent's tensors only while the parent holds them.
//! Everything that must not be used in a child holds a [`ForkGuard`].
//!
//! `fork(3)` of the C library calls the handler, as do Rust's `std::process` and Python. A child of
//! the bare system call or of `vfork` is not detected: it must call `exec` and nothing else.

use rustix::fd::{AsRawFd, BorrowedFd};
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Forks between the first process and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Remembers the process that made something, since threads, locks and queues do not work in a
/// forked child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkGuard(u64);

impl ForkGuard {
    /// A guard for this process.
    pub fn of_this_process() -> ForkGuard {
        watch_forks();
        ForkGuard(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this process is a child that was forked by `fork(3)` since the guard was made. Costs
    /// one load.
    #[inline]
    pub fn in_child(self) -> bool {
        // Relaxed: written only in a new process, before its first thread goes on.
        FORKS.load(Ordering::Relaxed) != self.0
    }
}

/// A shared mapping that forked children see as a private one, until this is dropped.
#[derive(Debug)]
pub struct SharedMapping {
    base: usize,
    len: usize,
}

#[derive(Clone, Copy)]
struct MappingEntry {
    base: usize,
    len: usize,
    /// The file whose bytes the child sees. Without a file the child sees zeros.
    file: Option<i32>,
}

/// The registered mappings, behind a lock that `before` takes for the time of a fork. The child
/// therefore finds a complete list.
struct Registry {
    held: AtomicBool,
    entries: UnsafeCell<Vec<MappingEntry>>,
}

// SAFETY: `entries` is touched only by the thread that holds `held`.
unsafe impl Sync for Registry {}

static REGISTRY: Registry = Registry { held: AtomicBool::new(false), entries: UnsafeCell::new(Vec::new()) };

impl Registry {
    /// A spin lock that is held briefly. A fork takes it in one handler and releases it in another,
    /// which a mutex guard cannot do.
    fn acquire(&self) {
        while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    fn with<R>(&self, body: impl FnOnce(&mut Vec<MappingEntry>) -> R) -> R {
        self.acquire();
        // SAFETY: this thread holds the lock, and `body` does not come back here.
        let result = body(unsafe { &mut *self.entries.get() });
        self.release();
        result
    }
}

impl SharedMapping {
    /// Registers the caller's mapping of `len` bytes at `base`, which starts at the first byte of
    /// `file`. A child sees the file, or zeros without one; writes of the child stay in the child.
    pub fn register(base: NonNull<u8>, len: usize, file: Option<BorrowedFd<'_>>) -> SharedMapping {
        watch_forks();
        let base = base.as_ptr() as usize;
        let file = file.map(|file| file.as_raw_fd());
        REGISTRY.with(|entries| entries.push(MappingEntry { base, len, file }));
        SharedMapping { base, len }
    }
}

impl Drop for SharedMapping {
    /// Must come before the unmapping: a fork in between would put a private mapping over whatever
    /// is there by then.
    fn drop(&mut self) {
        REGISTRY.with(|entries| {
            if let Some(at) =
                entries.iter().position(|entry| (entry.base, entry.len) == (self.base, self.len))
            {
                entries.swap_remove(at);
            }
        });
    }
}

/// Installs the fork handlers, once.
fn watch_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: three functions that live as long as the program. It fails only without memory,
        // as every allocation would at this point.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        assert_eq!(failed, 0, "no memory for a fork handler");
    });
}

extern "C" fn before() {
    REGISTRY.acquire();
}

extern "C" fn in_parent() {
    REGISTRY.release();
}

/// Runs in the child's only thread, where only async-signal-safe functions may be called.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `before` has taken the lock in the parent, so the list is whole, and this process has
    // one thread.
    let entries = unsafe { &mut *REGISTRY.entries.get() };
    for entry in entries.iter() {
        make_private(*entry);
    }
    // The mappings are private from now on, for grandchildren too. `clear` keeps the list's memory:
    // nothing may be freed here.
    entries.clear();
    REGISTRY.release();
}

fn make_private(MappingEntry { base, len, file }: MappingEntry) {
    let map = |access, kind, file| {
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE | kind;
        // SAFETY: the range is a mapping that its owner has registered and, by the rule of
        // `SharedMapping`, has not unmapped. It stays readable and writable, so code of this
        // process that holds a part of it still may.
        unsafe { libc::mmap(base as *mut libc::c_void, len, access, flags, file, 0) }
    };
    let (kind, fd) = file.map_or((libc::MAP_ANONYMOUS, -1), |fd| (0, fd));
    if map(libc::PROT_READ | libc::PROT_WRITE, kind, fd) == libc::MAP_FAILED {
        // No private copy is possible: a fault in the child is better than a write to the parent's
        // memory.
        map(libc::PROT_NONE, libc::MAP_ANONYMOUS, -1);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::memory::{PagePolicy, Pool, PoolError, PoolOptions, Region, RegionOptions};
    use crate::wire::{DType, Shape, TensorMeta};

    /// Runs `body` in a forked child, which exits without running code of the test harness. Returns
    /// the result of `body`; `false` if it hangs.
    pub(crate) fn in_a_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls `body` and `_exit`. It was forked off a process with other
        // threads, so `body` must not wait for them. The allocator works after a fork, and `body`
        // tests the rest.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: only arranges for a signal, which ends this process.
            unsafe { libc::alarm(20) };
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: ends this process.
            unsafe { libc::_exit(if good { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child, and writes one int.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }

    #[test]
    fn a_child_knows_that_it_is_one() {
        let home = ForkGuard::of_this_process();
        assert!(!home.in_child());
        assert!(in_a_child(|| home.in_child() && !ForkGuard::of_this_process().in_child()));
        assert!(!home.in_child());
    }

    #[test]
    fn a_childs_writes_to_tensors_stay_in_the_child() {
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 16) };
        let region = Region::create(0, &region).expect("region");
        let pool = Pool::new(region, PoolOptions { poison: true, ..PoolOptions::default() }).expect("pool");
        let meta = TensorMeta::new(DType::U8, Shape::new(&[5000]).expect("shape")).expect("meta");
        let mut held = Some(pool.tensor(meta.clone()).expect("room"));
        let mut frozen = pool.tensor(meta.clone()).expect("room");
        frozen.bytes_mut().fill(7);
        let mut frozen = Some(frozen.freeze());
        held.as_mut().expect("held").bytes_mut().fill(1);
        let good = in_a_child(|| {
            let Some((mut held, frozen)) = held.take().zip(frozen.take()) else { return false };
            let sees = held.bytes() == [1; 5000] && frozen.bytes() == [7; 5000];
            held.bytes_mut().fill(99);
            let refused = matches!(pool.tensor(meta.clone()), Err(PoolError::Forked));
            drop((held, frozen, pool.clone()));
            sees && refused && pool.stats().live_tensors == 0
        });
        assert!(good, "the child found something else");
        assert_eq!(held.as_ref().expect("held").bytes(), [1; 5000]);
        assert_eq!(frozen.as_ref().expect("held").bytes(), [7; 5000]);
        drop((held, frozen));
        assert!(pool.is_empty());
        pool.tensor(meta).expect("the parent goes on");
    }
}
