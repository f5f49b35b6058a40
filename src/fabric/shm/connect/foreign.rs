//! Files that other processes have sent, or may have sent, and that nobody waits for when they are
//! closed.
//!
//! The last `close` of a TCP socket waits for as long as its owner has chosen (`SO_LINGER`). Any
//! process that may connect to a Unix socket can leave such a file in its queue. The `close` of the
//! Unix socket closes that file. A thread that exits does not wait, so an exiting thread closes
//! them last.
#![allow(unsafe_code)]
// The two threads wait for each other, and nobody for them.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)]

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::net::{Shutdown, shutdown};
use std::sync::mpsc;
use std::thread::Builder;

/// Name of the threads.
pub(super) const NAME: &str = "tw-shm-close";

/// Bytes of a thread's stack.
const STACK: usize = 64 * 1024;

/// A file of another process, or a socket that other processes may send files to.
#[derive(Debug)]
pub(crate) struct ForeignFd {
    /// `None` once it was trusted or closed.
    file: Option<OwnedFd>,
}

impl ForeignFd {
    /// The file, once it is known that its `close` waits for nobody.
    pub(crate) fn trust(mut self) -> OwnedFd {
        self.file.take().expect("it is taken at the end alone")
    }
}

impl From<OwnedFd> for ForeignFd {
    fn from(file: OwnedFd) -> Self {
        ForeignFd { file: Some(file) }
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("it is taken at the end alone").as_fd()
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        close(self.file.take().into_iter().collect());
    }
}

/// Closes files with one exiting thread for all of them.
pub(crate) fn close_all(files: impl IntoIterator<Item = ForeignFd>) {
    close(files.into_iter().filter_map(|mut file| file.file.take()).collect());
}

/// Without a thread, or before Linux 5.9, which can't give a thread a table of its own, whoever
/// closes the files may wait. That is this thread only if it can start no other.
fn close(files: Vec<OwnedFd>) {
    if files.is_empty() {
        return;
    }
    // Whoever connects to a socket, or waits for its words, hears of the end at once. Other files
    // have nothing to shut down.
    for file in &files {
        let _ = shutdown(file, Shutdown::Both);
    }
    let _ = thread().spawn(move || {
        let mut numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        numbers.sort_unstable();
        let ((shares, unshared), (closed, last)) = (mpsc::sync_channel(1), mpsc::sync_channel::<()>(1));
        let holder = thread().spawn(move || {
            keep_only(&numbers);
            // The receiver waits for it.
            let _ = shares.send(());
            // Until the other thread has closed the files in the table of the process.
            let _ = last.recv();
        });
        if holder.is_ok() {
            let _ = unshared.recv();
        }
        drop(files);
        drop(closed);
    });
}

fn thread() -> Builder {
    Builder::new().name(NAME.into()).stack_size(STACK)
}

/// Gives this thread a table of descriptors of its own, in which these alone are open. They are in
/// order. Changes nothing if the kernel can't do that.
fn keep_only(files: &[RawFd]) {
    let (Some(&last), mut next) = (files.last(), 0) else { return };
    if close_range(last as u32 + 1, u32::MAX, libc::CLOSE_RANGE_UNSHARE).is_err() {
        return;
    }
    for &file in files {
        if file > next {
            let _ = close_range(next as u32, file as u32 - 1, 0);
        }
        next = file + 1;
    }
}

/// Through `syscall`, as glibc has the function from 2.34 on.
fn close_range(first: u32, last: u32, flags: libc::c_uint) -> std::io::Result<()> {
    // SAFETY: the first call of a thread makes its table the thread's own, and each closes there.
    // The thread uses no descriptor afterwards, and those of the process stay as they are.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
