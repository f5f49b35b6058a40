//! The functions of the C library that the fake needs.

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

const O_CLOEXEC: c_int = 0o2_000_000;
const O_NONBLOCK: c_int = 0o4000;
const F_SETFL: c_int = 4;

unsafe extern "C" {
    fn pipe2(ends: *mut c_int, flags: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    fn read(fd: c_int, to: *mut c_void, len: usize) -> isize;
    fn write(fd: c_int, from: *const c_void, len: usize) -> isize;
    fn close(fd: c_int) -> c_int;
    pub fn __errno_location() -> *mut c_int;
}

pub fn set_errno(errno: c_int) {
    // SAFETY: the C library gives each thread a place for it.
    unsafe { *__errno_location() = errno };
}

/// A descriptor that is readable while its count is above 0: a pipe with one byte per count. Its
/// owner may make it non-blocking.
pub struct Counter {
    pub fd: c_int,
    /// The write end, until it hangs up.
    writer: Option<c_int>,
}

impl Counter {
    pub fn new() -> Self {
        let mut ends = [-1; 2];
        // SAFETY: two descriptors are written.
        assert_eq!(unsafe { pipe2(ends.as_mut_ptr(), O_CLOEXEC) }, 0, "pipe2");
        let [fd, writer] = ends;
        // SAFETY: no pointers. The state is locked while it is written to.
        assert_eq!(unsafe { fcntl(writer, F_SETFL, O_NONBLOCK) }, 0, "fcntl");
        Counter { fd, writer: Some(writer) }
    }

    /// Increments the count, unless the descriptor has hung up.
    pub fn add(&self) {
        let Some(writer) = self.writer else { return };
        // SAFETY: one byte is read.
        let written = unsafe { write(writer, (&raw const ONE).cast(), 1) };
        assert_eq!(written, 1, "the pipe is full");
    }

    /// Hangs up: `poll` returns `POLLHUP` from now on, at once and after the last read.
    pub fn hang_up(&mut self) {
        if let Some(writer) = self.writer.take() {
            // SAFETY: no pointers; the descriptor is this counter's.
            unsafe { close(writer) };
        }
    }
}

static ONE: u8 = 1;

/// Decrements a count. Waits for it if the descriptor blocks. `false` if there is none; `errno` has
/// the reason.
pub fn take(fd: c_int) -> bool {
    let mut byte = 0u8;
    // SAFETY: one byte is written.
    match unsafe { read(fd, (&raw mut byte).cast(), 1) } {
        1 => true,
        0 => {
            set_errno(EIO);
            false
        }
        _ => false,
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.hang_up();
        // SAFETY: no pointers; the descriptor is this counter's.
        unsafe { close(self.fd) };
    }
}
