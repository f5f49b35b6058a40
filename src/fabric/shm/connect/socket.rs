//! The Unix socket of an endpoint: messages with files, and the identity of the peer's process.
//!
//! The sockets keep message boundaries (`SOCK_SEQPACKET`), so a message arrives whole or not at
//! all.
#![allow(unsafe_code)]

use super::foreign::{self, ForeignFd};
use super::hello::{HandshakeMessage, MAX_BYTES, MAX_REGIONS};
use rustix::event::{PollFd, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::borrow::Cow;
use std::ffi::CString;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// Files that one message can carry: more than an honest message has, so that an extra file is
/// noticed.
const MAX_FILES: usize = MAX_REGIONS + 3;

/// Connections that may wait to be accepted. Any user of the host can connect, so a few must not
/// keep the peer out.
const BACKLOG: i32 = 1024;

/// The end of a wait.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    at: Option<Instant>,
    /// The timeout from which the deadline was made, for errors.
    pub after: Duration,
}

impl Deadline {
    /// The deadline after a timeout. A timeout that is too long for the clock never ends.
    pub(crate) fn after(after: Duration) -> Self {
        Deadline { at: Instant::now().checked_add(after), after }
    }

    /// The time that is left: zero after the deadline, `None` if it never comes.
    fn left(self) -> Option<Duration> {
        self.at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn has_passed(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }

    /// Sleeps until one of `fds` is readable, or until the deadline. Returns `false` at the
    /// deadline.
    pub(crate) fn wait(self, fds: &mut [PollFd<'_>]) -> rustix::io::Result<bool> {
        loop {
            let left = self.left().and_then(|left| Timespec::try_from(left).ok());
            match poll(fds, left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A socket that accepts connections of peers.
pub(crate) struct Listener {
    /// `None` at the end.
    socket: Option<ForeignFd>,
    /// The file that it is, unless it has an abstract name.
    file: Option<CString>,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("it is taken at the end alone").as_fd()
    }
}

impl Drop for Listener {
    /// Another process may have sent files to a connection that was not accepted.
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // It may be gone already.
            let _ = rustix::fs::unlink(file);
        }
        // Nobody connects any more.
        let _ = rustix::net::shutdown(&*self, Shutdown::Both);
        let mut queued = Vec::new();
        let is_empty = loop {
            match accept(self) {
                Ok(socket) => queued.push(socket),
                Err(Errno::INTR) => {}
                // There is none, also after a shutdown.
                Err(error) => break matches!(error, Errno::AGAIN | Errno::INVAL),
            }
        };
        foreign::close_later(queued);
        if let Some(socket) = self.socket.take().filter(|_| is_empty) {
            drop(socket.trust());
        }
    }
}

/// Listens. Only this user can connect to a socket that is a file.
pub(crate) fn listen(name: &SocketAddrUnix) -> rustix::io::Result<Listener> {
    let socket = unix_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    let file = name.path().map(Cow::into_owned);
    if file.is_some() {
        // The file gets the mode that the socket has when it is bound.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    }
    rustix::net::bind(&socket, name)?;
    let listener = Listener { socket: Some(socket), file };
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// The next connection, if there is one.
pub(crate) fn accept(listener: &Listener) -> rustix::io::Result<ForeignFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::accept_with(listener, flags).map(ForeignFd::of_socket)
}

/// Connects. Waits for room in the listener's queue until the deadline, then returns `AGAIN`.
pub(crate) fn connect(name: &SocketAddrUnix, deadline: Deadline) -> rustix::io::Result<ForeignFd> {
    let socket = unix_socket(SocketFlags::CLOEXEC)?;
    loop {
        // A timeout of zero would mean none.
        let left = deadline.left().map(|left| left.max(Duration::from_millis(1)));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, left)?;
        match rustix::net::connect(&socket, name) {
            Err(Errno::INTR) => {}
            other => return other.map(|()| socket),
        }
    }
}

fn unix_socket(flags: SocketFlags) -> rustix::io::Result<ForeignFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map(ForeignFd::of_socket)
}

/// Sends a message, with files.
pub(crate) fn send(
    socket: impl AsFd,
    message: &HandshakeMessage,
    files: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    send_bytes(socket, &message.to_bytes(), files)
}

/// Sends bytes, with files.
pub(crate) fn send_bytes(
    socket: impl AsFd,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::TOOBIG);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Why a message could not be received.
#[derive(Debug)]
pub(crate) enum ReceiveFailure {
    /// The mistake of the peer, or that there is no message.
    Peer(String),
    /// This process has no descriptor left for the peer's files.
    NoDescriptor,
}

impl From<String> for ReceiveFailure {
    fn from(why: String) -> Self {
        ReceiveFailure::Peer(why)
    }
}

/// Receives the message that is there, with its files.
///
/// # Errors
/// [`ReceiveFailure`].
pub(crate) fn receive(socket: impl AsFd) -> Result<(HandshakeMessage, Vec<ForeignFd>), ReceiveFailure> {
    let mut bytes = [0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = loop {
        match rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other.map_err(|error| format!("its message can't be received: {error}"))?,
        }
    };
    // Taken out at once, so that the files are closed after every error.
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more.map(ForeignFd::received));
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // There was room in the buffer, so the kernel had no descriptor for the next file.
        if files.len() < MAX_FILES {
            return Err(ReceiveFailure::NoDescriptor);
        }
        return Err(format!("it sent more than {MAX_FILES} files").into());
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(format!("it sent a message of more than {MAX_BYTES} bytes").into());
    }
    if got.bytes == 0 {
        return Err("it hung up".to_owned().into());
    }
    Ok((HandshakeMessage::from_bytes(&bytes[..got.bytes])?, files))
}

/// The process at the other end, when it connected or began to listen.
pub(crate) struct Credentials {
    pub uid: u32,
    /// 0 if the process is in a PID namespace that this process can't see into.
    pub pid: u32,
}

/// The kernel's record of the process at the other end.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> rustix::io::Result<Credentials> {
    // Not through rustix, whose process ids can't be 0.
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: a `ucred` is what SO_PEERCRED fills, and any bits are a value of it.
    unsafe { socket_option(socket, libc::SO_PEERCRED, &mut who)? };
    Ok(Credentials { uid: who.uid, pid: who.pid.unsigned_abs() })
}

/// A pidfd of the process at the other end.
pub(crate) fn process(socket: BorrowedFd<'_>, pid: u32) -> rustix::io::Result<OwnedFd> {
    match peer_pidfd(socket) {
        // The process is at the other end of the handshake, so no other process has its id yet.
        Err(Errno::NOPROTOOPT) => {
            let pid = rustix::process::Pid::from_raw(pid as i32).ok_or(Errno::SRCH)?;
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        }
        opened => opened,
    }
}

/// Whether [`process`] opens also a process whose id means nothing here: since Linux 6.5.
pub(crate) fn has_peer_pidfd() -> bool {
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let opened = pair.and_then(|(socket, _peer)| peer_pidfd(socket.as_fd()));
    // Without a descriptor left it is not known: the handshake will tell.
    !matches!(opened, Err(Errno::NOPROTOOPT))
}

/// A pidfd of the process at the other end. `NOPROTOOPT` before Linux 6.5.
fn peer_pidfd(socket: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    // SAFETY: an `int` is what SO_PEERPIDFD fills, and any bits are a value of it.
    unsafe { socket_option(socket, libc::SO_PEERPIDFD, &mut fd)? };
    // SAFETY: the kernel has just made this descriptor for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads a socket option.
///
/// # Safety
/// `T` must be the type that the option fills, or one for which any bits are a value.
unsafe fn socket_option<T>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> rustix::io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, which has as many, and to `len`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &mut len,
        )
    };
    if rc == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
