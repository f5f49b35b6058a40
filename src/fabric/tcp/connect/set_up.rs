//! The options of a link's connections.

use super::super::io::Sockets;
use super::super::options::TcpOptions;
use rustix::net::sockopt;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The connections of a link, the main one first, with their options set.
pub(super) fn into_link(sockets: Vec<TcpStream>, options: &TcpOptions) -> io::Result<Sockets> {
    sockets.iter().try_for_each(|socket| set_up(socket, options))?;
    let mut sockets = sockets.into_iter();
    let Some(main) = sockets.next() else { unreachable!("the main connection is always made") };
    Ok(Sockets { main, bulk: sockets.collect() })
}

fn set_up(socket: &TcpStream, options: &TcpOptions) -> io::Result<()> {
    let (timeout, own) = (options.time_to_notice(), socket.local_addr()?);
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(socket, timeout.as_millis() as u32)?; // at most an hour
    let interval = options.keep_alive();
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, interval)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    // Without a peer's address the connection has ended, as its first use will tell.
    if socket.peer_addr().is_ok_and(|peer| is_within_a_host(own.ip(), peer.ip())) {
        spare_congestion_control(socket);
    }
    if !options.busy_poll.is_zero() {
        poll_the_nic(socket, options.busy_poll);
    }
    Ok(())
}

/// Whether a connection between these addresses stays on its host.
fn is_within_a_host(own: IpAddr, peer: IpAddr) -> bool {
    let (own, peer) = (own.to_canonical(), peer.to_canonical());
    own == peer || own.is_loopback() || peer.is_loopback()
}

/// A connection within a host is never congested. BBR takes 2 to 3 % of a round trip more than
/// Reno, which each kernel has.
fn spare_congestion_control(socket: &TcpStream) {
    if let Err(error) = socket2::SockRef::from(socket).set_tcp_congestion(b"reno") {
        tracing::debug!(%error, "the system's congestion control stays in use within the host");
    }
}

fn poll_the_nic(socket: &TcpStream, time: Duration) {
    /// Somebody was told.
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    let micros = time.as_micros() as u32; // at most a second
    let Err(error) = socket2::SockRef::from(socket).set_busy_poll(micros) else { return };
    if is_news(time, &IS_TOLD) {
        tracing::warn!(
            "tcp_busy_poll is {time:?}, and the kernel refuses it, so connections go without: {error}. It \
             takes CAP_NET_ADMIN, or a net.core.busy_read of {micros}. Or set tcp_busy_poll to 0s. Further \
             refusals are not told"
        );
    } else {
        tracing::debug!(
            micros,
            %error,
            "no busy polling: it takes CAP_NET_ADMIN, or as large a net.core.busy_read"
        );
    }
}

/// Whether somebody has asked for this time, and was not told yet. Nobody has for the default.
fn is_news(time: Duration, is_told: &AtomicBool) -> bool {
    time != TcpOptions::default().busy_poll && !is_told.swap(true, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn addresses_of_one_host_are_told_from_those_of_two() {
        let within = |own: &str, peer: &str| {
            is_within_a_host(own.parse().expect("an address"), peer.parse().expect("an address"))
        };
        assert!(within("127.0.0.1", "127.0.0.2") && within("::1", "::1"));
        assert!(within("10.0.0.1", "10.0.0.1") && within("::ffff:10.0.0.1", "10.0.0.1"));
        assert!(!within("10.0.0.1", "10.0.0.2") && !within("fd00::1", "fd00::2"));
    }

    #[test]
    fn a_busy_poll_that_is_not_the_default_is_told_once() {
        let is_told = AtomicBool::new(false);
        let news = |micros| is_news(Duration::from_micros(micros), &is_told);
        assert_eq!([news(50), news(60), news(60), news(70)], [false, true, false, false]);
    }

    #[test]
    fn a_connection_within_a_host_has_the_congestion_control_that_costs_least() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let opened = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (accepted, _) = listener.accept().expect("a connection");
        let sockets = into_link(vec![opened, accepted], &TcpOptions::default()).expect("set up");
        for socket in sockets.all() {
            let name = socket2::SockRef::from(socket).tcp_congestion().expect("a name");
            assert!(name.starts_with(b"reno"), "{}", name.escape_ascii());
        }
    }
}
