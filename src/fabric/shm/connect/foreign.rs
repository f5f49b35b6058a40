//! Files that other processes have sent, or may have sent, and that nobody waits for when they are
//! closed.
//!
//! The last `close` of a TCP socket waits for as long as its owner has chosen (`SO_LINGER`). Any
//! process that may connect to a Unix socket can leave such a file in its queue. The `close` of the
//! Unix socket closes that file. A thread that exits does not wait, so an exiting thread closes
//! them last.
#![allow(unsafe_code)]
// Two threads wait for each other, and others for a bounded time.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)]

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::net::{Shutdown, shutdown};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// Name of the threads.
pub(super) const NAME: &str = "tw-shm-close";

/// Bytes of a thread's stack.
const STACK: usize = 64 * 1024;

/// How long files are waited for whose number matters. It takes 1 ms, unless a file holds the
/// threads.
const CLOSED: Duration = Duration::from_millis(20);

/// Held while a thread makes its own table of descriptors, and while files leave that of the
/// process. So no file that is being closed is in the table of a thread that goes on.
static TABLES: Mutex<()> = Mutex::new(());

/// A file of another process, or a socket that processes of other users may send files to.
#[derive(Debug)]
pub(crate) struct ForeignFd {
    /// `None` once it was trusted or closed.
    file: Option<OwnedFd>,
    is_received: bool,
}

impl ForeignFd {
    /// A socket of this process.
    pub(super) fn of_socket(socket: OwnedFd) -> Self {
        ForeignFd { file: Some(socket), is_received: false }
    }

    /// A file that came over a socket.
    pub(super) fn received(file: OwnedFd) -> Self {
        ForeignFd { file: Some(file), is_received: true }
    }

    /// The file, once it is known that its `close` waits for nobody.
    pub(crate) fn trust(mut self) -> OwnedFd {
        self.file.take().expect("it is taken at the end alone")
    }

    /// Takes the file out. Whoever connects to a socket, or waits for its words, hears of its end.
    fn end(&mut self) -> Option<OwnedFd> {
        let file = self.file.take()?;
        if !self.is_received {
            let _ = shutdown(&file, Shutdown::Both);
        }
        Some(file)
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("it is taken at the end alone").as_fd()
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        let _ = close(self.end().into_iter().collect(), self.is_received);
    }
}

/// Closes sockets with one exiting thread for all of them, and does not wait for it.
pub(super) fn close_later(sockets: Vec<ForeignFd>) {
    let _ = close(sockets.into_iter().filter_map(|mut socket| socket.end()).collect(), false);
}

/// The same. Waits until they count no more as open files of this process, but for 20 ms at most.
pub(super) fn close_all(sockets: Vec<ForeignFd>) {
    if !sockets.is_empty() {
        let closed = close(sockets.into_iter().filter_map(|mut socket| socket.end()).collect(), false);
        let _ = closed.recv_timeout(CLOSED);
    }
}

/// Closes files. The result disconnects once that is done.
///
/// Before Linux 5.9, or where `close_range` is refused, no thread can have a table of its own. The
/// thread that closes the files may wait then. That is this one only if it can start no other.
fn close(files: Vec<OwnedFd>, are_received: bool) -> Receiver<()> {
    let (done, closed) = mpsc::sync_channel::<()>(0);
    if files.is_empty() {
        return closed;
    }
    let _ = thread().spawn(move || {
        let mut numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        numbers.sort_unstable();
        let ((shares, shared), (goes, may_go)) = (mpsc::sync_channel(1), mpsc::sync_channel::<()>(0));
        let holder = thread().spawn(move || {
            // The receiver waits for it.
            let _ = shares.send(keep_only(&numbers));
            // Until the process has closed the files.
            let _ = may_go.recv();
        });
        let is_kept = holder.is_ok() && shared.recv() == Ok(true);
        // A file that was received may be one of FUSE, whose server each `close` waits for.
        let tables =
            (is_kept && !are_received).then(|| TABLES.lock().unwrap_or_else(PoisonError::into_inner));
        drop(files);
        drop(tables);
        drop((goes, done));
    });
    closed
}

fn thread() -> Builder {
    Builder::new().name(NAME.into()).stack_size(STACK)
}

/// Gives this thread a table of descriptors of its own, in which these alone are open. They are in
/// order. Returns `false`, and changes nothing, if the kernel can't do that.
fn keep_only(files: &[RawFd]) -> bool {
    let _tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(&last) = files.last() else { return false };
    if close_range(last as u32 + 1, u32::MAX, libc::CLOSE_RANGE_UNSHARE).is_err() {
        return false;
    }
    let mut next = 0;
    for &file in files {
        if file > next {
            let _ = close_range(next as u32, file as u32 - 1, 0);
        }
        next = file + 1;
    }
    true
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
