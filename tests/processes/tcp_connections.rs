//! The connections over TCP between members that are other processes, and how they break.
//!
//! This process takes duplicates of the members' sockets (`pidfd_getfd(2)`) and breaks them.

use crate::common::other::Other;
use rustix::net::{AddressFamily, Shutdown, connect_unspec, getpeername, getsockname, shutdown, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};

/// Breaks connections of the members of a cluster, one after the other.
pub struct Breaker {
    /// Those of the bootstrap service, whose connections stay.
    ports: Vec<u16>,
    /// Calls of [`Breaker::break_next`].
    tries: usize,
    /// Connections that were broken.
    pub broken: usize,
}

impl Breaker {
    pub fn new(cluster: &str) -> Self {
        let addresses = cluster.trim_start_matches("w=").split(',');
        let port = |it: &str| it.parse::<SocketAddr>().expect("an address").port();
        Breaker { ports: addresses.map(port).collect(), tries: 0, broken: 0 }
    }

    /// Breaks a connection of the next member. In time it comes to each of its connections, in each
    /// way.
    pub fn break_next(&mut self, members: &[Other]) {
        let (member, round) = (self.tries % members.len(), self.tries / members.len());
        self.tries += 1;
        let sockets = self.connections(&members[member]);
        if let Some(socket) = sockets.get(round % sockets.len().max(1)) {
            break_connection(socket, member + round / sockets.len());
            self.broken += 1;
        }
    }

    /// The connections of a member over TCP.
    fn connections(&self, member: &Other) -> Vec<OwnedFd> {
        let pid = Pid::from_raw(member.pid()).expect("a process");
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return Vec::new() };
        let Ok(files) = std::fs::read_dir(format!("/proc/{}/fd", member.pid())) else { return Vec::new() };
        let numbers = files.flatten().filter_map(|file| file.file_name().to_str()?.parse().ok());
        numbers.filter_map(|number| self.connection(&handle, number)).collect()
    }

    /// The socket of a member's connection to another one over TCP, if that is one.
    fn connection(&self, member: &OwnedFd, number: RawFd) -> Option<OwnedFd> {
        let socket = pidfd_getfd(member, number, PidfdGetfdFlags::empty()).ok()?;
        let family = sockopt::socket_domain(&socket).ok()?;
        if family != AddressFamily::INET || sockopt::socket_acceptconn(&socket).ok()? {
            return None;
        }
        let own = SocketAddr::try_from(getsockname(&socket).ok()?).ok()?;
        let peer = SocketAddr::try_from(getpeername(&socket).ok()??).ok()?;
        (!self.ports.contains(&own.port()) && !self.ports.contains(&peer.port())).then_some(socket)
    }
}

/// Breaks a connection in one of three ways.
fn break_connection(socket: &OwnedFd, how: usize) {
    // It may have ended meanwhile.
    match how % 3 {
        0 => _ = shutdown(socket, Shutdown::Both),
        1 => _ = shutdown(socket, Shutdown::Write),
        // A reset: what is under way is lost.
        _ => _ = connect_unspec(socket),
    }
}
