//! The C library, as far as this is about it.

use std::ffi::{c_int, c_void};

#[allow(non_camel_case_types)]
pub type pthread_mutex_t = [u64; 5];
#[allow(non_camel_case_types)]
pub type pthread_cond_t = [u64; 6];

pub const EPERM: c_int = 1;
pub const EIO: c_int = 5;
pub const EAGAIN: c_int = 11;
pub const ENOMEM: c_int = 12;
pub const EBUSY: c_int = 16;
pub const ENODEV: c_int = 19;
pub const EINVAL: c_int = 22;
pub const ENODATA: c_int = 61;
pub const EOPNOTSUPP: c_int = 95;

const EFD_SEMAPHORE: c_int = 1;
const EFD_CLOEXEC: c_int = 0o2_000_000;

unsafe extern "C" {
    fn eventfd(count: u32, flags: c_int) -> c_int;
    fn read(fd: c_int, to: *mut c_void, len: usize) -> isize;
    fn write(fd: c_int, from: *const c_void, len: usize) -> isize;
    fn close(fd: c_int) -> c_int;
    fn __errno_location() -> *mut c_int;
}

pub fn set_errno(errno: c_int) {
    // SAFETY: the C library gives each thread a place for it.
    unsafe { *__errno_location() = errno };
}

/// A descriptor that is readable as long as it counts more than 0. Its owner may make it non-blocking.
pub struct Counter(pub c_int);

impl Counter {
    pub fn new() -> Self {
        // SAFETY: no pointers.
        let fd = unsafe { eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC) };
        assert!(fd >= 0, "eventfd");
        Counter(fd)
    }

    pub fn add(&self) {
        // SAFETY: eight bytes are read.
        let written = unsafe { write(self.0, (&raw const ONE).cast(), 8) };
        assert_eq!(written, 8, "eventfd is full");
    }
}

static ONE: u64 = 1;

/// Takes one off a counter, waiting for it if it blocks. `false` if there is none; then `errno` says why.
pub fn take(fd: c_int) -> bool {
    let mut word = 0u64;
    // SAFETY: eight bytes are written.
    unsafe { read(fd, (&raw mut word).cast(), 8) == 8 }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: no pointers; the descriptor is this counter's.
        unsafe { close(self.0) };
    }
}
