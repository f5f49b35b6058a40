//! The kernel's word on a connection within this host: the user who owns the socket at its other
//! end.
//!
//! The kernel is asked for the socket by its two addresses. Only an established socket counts:
//! others have no owner, and some kernels report user 0 for them. A connection from another host
//! has no such socket here.

use super::error::AuthError;
use crate::wire::is_lack;
use crate::wire::own_user;
use rustix::fd::OwnedFd;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};

/// Numbers of the kernel's interface (linux/sock_diag.h, linux/inet_diag.h, linux/netlink.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_TCP: u8 = 6;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TCP_ESTABLISHED: u8 = 1;
/// Bytes of `nlmsghdr`, of a request and of an answer.
const HEADER: usize = 16;
const REQUEST: usize = HEADER + 56;
const ANSWER: usize = HEADER + 72;
/// Where an answer has the state of the socket and the number of its user.
const STATE_AT: usize = HEADER + 1;
const UID_AT: usize = HEADER + 64;

/// The tables of sockets, for kernels without sock_diag.
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// Asks the kernel for the users of sockets.
pub(super) struct SocketOwners {
    source: Source,
    me: u32,
}

enum Source {
    SockDiag { socket: OwnedFd, asked: AtomicU32 },
    Tables,
}

/// Whom the other end of a connection belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketOwner {
    ThisUser,
    OtherUser(u32),
    /// No established socket of this host.
    Nobody,
}

impl SocketOwners {
    #[cfg(test)]
    pub(super) fn by_tables() -> Self {
        SocketOwners { source: Source::Tables, me: rustix::process::geteuid().as_raw() }
    }

    /// Whether a question takes as long as there are sockets on this host.
    pub(super) fn is_slow(&self) -> bool {
        matches!(self.source, Source::Tables)
    }

    /// Finds out which source of the kernel works here.
    pub(super) fn open() -> Result<Self, AuthError> {
        let me = own_user().map_err(|shared| AuthError::Kernel { why: shared.to_string() })?;
        let probe = Probe::new().map_err(not_told)?;
        let mut failures = Vec::new();
        for source in [Source::sock_diag(), Ok(Source::Tables)] {
            let owners = match source {
                Ok(source) => SocketOwners { source, me },
                Err(error) if is_lack(&error) => return Err(not_told(error)),
                Err(error) => {
                    failures.push(error.to_string());
                    continue;
                }
            };
            match probe.ask(&owners) {
                Ok(SocketOwner::ThisUser) => return Ok(owners),
                Ok(other) => failures.push(format!("a connection of this process is {other:?}'s")),
                Err(error) if is_lack(&error) => return Err(not_told(error)),
                Err(error) => failures.push(error.to_string()),
            }
        }
        Err(AuthError::Kernel { why: failures.join("; ") })
    }

    /// The owner of the socket with local address `local` that is connected with `remote`.
    pub(super) fn owner(&self, local: SocketAddr, remote: SocketAddr) -> io::Result<SocketOwner> {
        let (local, remote) = (canonical(local), canonical(remote));
        let uid = match &self.source {
            Source::SockDiag { socket, asked } => {
                let number = asked.fetch_add(1, Ordering::Relaxed);
                ask(socket, number, local, remote)?
            }
            Source::Tables => find_in_tables(local, remote)?,
        };
        Ok(match uid {
            Some(uid) if uid == self.me => SocketOwner::ThisUser,
            Some(uid) => SocketOwner::OtherUser(uid),
            None => SocketOwner::Nobody,
        })
    }
}

fn not_told(source: io::Error) -> AuthError {
    match is_lack(&source) {
        true => AuthError::Lack { source },
        false => AuthError::Kernel { why: source.to_string() },
    }
}

impl Source {
    fn sock_diag() -> io::Result<Self> {
        let family = AddressFamily::NETLINK;
        let socket = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(SOCK_DIAG))?;
        Ok(Source::SockDiag { socket, asked: AtomicU32::new(1) })
    }
}

/// A connection of this process with itself.
struct Probe {
    ends: [SocketAddr; 2],
    _open: (TcpStream, TcpStream),
}

impl Probe {
    fn new() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .or_else(|_| TcpListener::bind((Ipv6Addr::LOCALHOST, 0)))?;
        let caller = TcpStream::connect(listener.local_addr()?)?;
        let ends = [caller.local_addr()?, caller.peer_addr()?];
        // Another process may have connected in between.
        loop {
            let (accepted, from) = listener.accept()?;
            if from == ends[0] {
                return Ok(Probe { ends, _open: (caller, accepted) });
            }
        }
    }

    fn ask(&self, owners: &SocketOwners) -> io::Result<SocketOwner> {
        owners.owner(self.ends[0], self.ends[1])
    }
}

/// The kernel keeps connections of IPv4 under their IPv4 addresses, also of sockets of IPv6.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Asks by sock_diag. The kernel answers within the call of `sendto`.
fn ask(socket: &OwnedFd, number: u32, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
    let question = question(number, local, remote);
    sendto(socket, &question, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    loop {
        let mut bytes = [0; 512];
        let (len, _) = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT)?;
        match answer(&bytes[..len.min(bytes.len())], number) {
            Some(outcome) => return outcome,
            // It answers an earlier question, whose asker has failed.
            None => continue,
        }
    }
}

fn question(number: u32, local: SocketAddr, remote: SocketAddr) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
    put(0, &(REQUEST as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &NLM_F_REQUEST.to_ne_bytes());
    put(8, &number.to_ne_bytes());
    put(HEADER, &[if local.is_ipv4() { AF_INET } else { AF_INET6 }, IPPROTO_TCP]);
    put(HEADER + 4, &u32::MAX.to_ne_bytes()); // every state
    put(HEADER + 8, &local.port().to_be_bytes());
    put(HEADER + 10, &remote.port().to_be_bytes());
    for (at, ip) in [(HEADER + 12, local.ip()), (HEADER + 28, remote.ip())] {
        match ip {
            IpAddr::V4(ip) => put(at, &ip.octets()),
            IpAddr::V6(ip) => put(at, &ip.octets()),
        }
    }
    put(HEADER + 48, &[0xff; 8]); // no cookie
    bytes
}

/// `None` for an answer to another question.
fn answer(bytes: &[u8], number: u32) -> Option<io::Result<Option<u32>>> {
    let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    if word(8)? != number {
        return None;
    }
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    Some(match kind {
        NLMSG_ERROR => match word(HEADER)?.cast_signed() {
            error if -error == libc::ENOENT => Ok(None),
            error => Err(io::Error::from_raw_os_error(-error)),
        },
        SOCK_DIAG_BY_FAMILY if bytes.len() >= ANSWER => {
            Ok(word(UID_AT).filter(|_| bytes[STATE_AT] == TCP_ESTABLISHED))
        }
        _ => Err(ErrorKind::InvalidData.into()),
    })
}

/// Looks for an established socket. One of IPv6 with addresses of IPv4 is in the table of IPv6.
fn find_in_tables(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
    let [v4, v6] = TABLES;
    if local.is_ipv4() {
        let found = find(&fs::read_to_string(v4)?, local, remote);
        if found.is_some() {
            return Ok(found);
        }
    }
    match fs::read_to_string(v6) {
        Ok(table) => Ok(find(&table, mapped(local), mapped(remote))),
        // This kernel has no IPv6.
        Err(error) if error.kind() == ErrorKind::NotFound && local.is_ipv4() => Ok(None),
        Err(error) => Err(error),
    }
}

/// As a socket of IPv6 has the address.
fn mapped(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// Looks for an established socket in a table of `/proc/net`.
fn find(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let (local, remote) = (in_table(local), in_table(remote));
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_it = fields.next()? == local && fields.next()? == remote && fields.next()? == "01";
        is_it.then(|| fields.nth(3)?.parse().ok())?
    })
}

/// The table has each word of an address as a number of this machine.
fn in_table(address: SocketAddr) -> String {
    let octets = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let words = octets.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    let ip: String = words.map(|word| format!("{word:08X}")).collect();
    format!("{ip}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources() -> Vec<SocketOwners> {
        [SocketOwners::open().unwrap(), SocketOwners::by_tables()].into()
    }

    #[test]
    fn both_ends_of_an_own_connection_are_this_users() {
        for owners in sources() {
            for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
                let Ok(listener) = TcpListener::bind((ip, 0)) else { continue };
                let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                let (accepted, _) = listener.accept().unwrap();
                for end in [&caller, &accepted] {
                    let ends = (end.peer_addr().unwrap(), end.local_addr().unwrap());
                    assert_eq!(owners.owner(ends.0, ends.1).unwrap(), SocketOwner::ThisUser);
                }
            }
        }
    }

    /// Sockets of IPv6 whose connections are of IPv4: the listener's side, the caller's, and both.
    #[test]
    fn sockets_of_both_families_with_addresses_of_ipv4_are_found() {
        let Ok(both) = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) else {
            println!("skipped: this host has no IPv6");
            return;
        };
        let v4 = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mapped = IpAddr::from(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
        for (listener, to) in [(&both, Ipv4Addr::LOCALHOST.into()), (&both, mapped), (&v4, mapped)] {
            let to = SocketAddr::new(to, listener.local_addr().unwrap().port());
            let caller = match TcpStream::connect(to) {
                Ok(caller) => caller,
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    println!("skipped: sockets of IPv6 take no connections of IPv4 here");
                    continue;
                }
                Err(error) => panic!("{to}: {error}"),
            };
            let (accepted, _) = listener.accept().unwrap();
            for owners in sources() {
                for end in [&caller, &accepted] {
                    let ends = (end.peer_addr().unwrap(), end.local_addr().unwrap());
                    let owner = owners.owner(ends.0, ends.1).unwrap();
                    assert_eq!(owner, SocketOwner::ThisUser, "{ends:?}");
                }
            }
        }
    }

    #[test]
    fn a_socket_that_does_not_exist_listens_or_has_ended_is_nobodys() {
        for owners in sources() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let listening = listener.local_addr().unwrap();
            let far = "192.0.2.7:4000".parse().unwrap();
            assert_eq!(owners.owner(far, listening).unwrap(), SocketOwner::Nobody);
            let caller = TcpStream::connect(listening).unwrap();
            let (accepted, from) = listener.accept().unwrap();
            drop(caller);
            // The kernel ends a socket that nobody holds; its peer is not told of a user.
            assert_eq!(owners.owner(from, listening).unwrap(), SocketOwner::Nobody);
            drop(accepted);
            // A question about no connection finds the listener, which is not one either.
            let wild = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 1);
            assert_eq!(owners.owner(listening, wild).unwrap(), SocketOwner::Nobody);
        }
    }

    #[test]
    fn answers_of_the_kernel_are_read_with_care() {
        let local = "127.0.0.1:80".parse().unwrap();
        assert_eq!(question(1, local, local).len(), 72);
        for len in 0..ANSWER {
            let mut cut = vec![0; len];
            if len >= 12 {
                cut[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
                cut[8..12].copy_from_slice(&5u32.to_ne_bytes());
            }
            assert!(!matches!(answer(&cut, 5), Some(Ok(Some(_)))), "{len} bytes");
        }
        let mut whole = vec![0; ANSWER];
        whole[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        whole[8..12].copy_from_slice(&5u32.to_ne_bytes());
        whole[UID_AT..UID_AT + 4].copy_from_slice(&77u32.to_ne_bytes());
        assert!(matches!(answer(&whole, 5), Some(Ok(None))), "no state");
        whole[STATE_AT] = TCP_ESTABLISHED;
        assert!(matches!(answer(&whole, 5), Some(Ok(Some(77)))));
        assert!(answer(&whole, 6).is_none(), "another question");
    }
}
