//! The bytes of a connection that are not at the peer's host.

use rustix::ioctl::{Getter, Opcode, ioctl};
use std::ffi::c_int;
use std::net::TcpStream;

/// SIOCOUTQ of tcp(7), whose number is that of TIOCOUTQ.
const SIOCOUTQ: Opcode = libc::TIOCOUTQ as Opcode;

/// The sent bytes that the peer's kernel has not acknowledged. After a reset it never does.
#[allow(unsafe_code)]
pub(super) fn unacknowledged(socket: &TcpStream) -> usize {
    // SAFETY: a `TcpStream` is an open TCP socket. For it the kernel answers this number with one
    // `int`, which `Getter` has room for, and touches no other memory.
    let bytes = unsafe { ioctl(socket, Getter::<SIOCOUTQ, c_int>::new()) };
    bytes.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    #[test]
    fn bytes_count_until_the_peers_kernel_has_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        assert_eq!(unacknowledged(&sender), 0);
        sender.set_nonblocking(true).unwrap();
        // More than both kernels hold.
        let mut sent = 0;
        while let Ok(count) = sender.write(&[7; 1 << 16]) {
            sent += count;
        }
        assert!(unacknowledged(&sender) > 0, "{sent} bytes were sent, and nobody has read");
        receiver.read_exact(&mut vec![0; sent]).unwrap();
        let began = Instant::now();
        while unacknowledged(&sender) > 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "all were read");
            std::thread::yield_now();
        }
    }
}
