//! GIDs: the addresses of ports.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// A global identifier: 128 bits that are read as an IPv6 address (InfiniBand Architecture
/// Specification, chapter 4.1.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether an entry of a GID table with this value holds nothing. Such an entry is zero, or a
    /// link-local prefix with zeros behind it, as virtual functions of some NICs have.
    pub fn is_empty(self) -> bool {
        let bits = u128::from_be_bytes(self.0);
        bits == 0 || bits == 0xfe80 << 112
    }

    /// The IPv4 address that it stands for (`::ffff:a.b.c.d`), if it is one.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// Whether it is valid on its own link only (`fe80::/10`).
    pub fn is_link_local(self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Self {
        Gid(address.octets())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ipv4() {
            Some(address) => f.pad(&address.to_string()),
            None => f.pad(&Ipv6Addr::from(self.0).to_string()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// The packet format that belongs to a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand's own global header.
    InfiniBand,
    /// RoCE v1: a global header straight in an Ethernet frame, within one layer-2 network.
    RoceV1,
    /// RoCE v2: UDP and IP, routable.
    RoceV2,
    /// The kernel did not say.
    Unknown,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GidKind::InfiniBand => "InfiniBand",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
            GidKind::Unknown => "unknown type",
        })
    }
}

/// An entry of a port's GID table that is not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the table: tables are sparse, so this is not its place among the entries.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// The format of its packets.
    pub kind: GidKind,
    /// The network interface that it belongs to, on Ethernet.
    pub interface: Option<String>,
}

impl GidEntry {
    /// The highest index that a queue pair can be told to use: `sgid_index` of `ibv_modify_qp(3)`
    /// is a byte. Tables may be longer.
    pub const LAST_USABLE: u32 = u8::MAX as u32;

    /// Whether a queue pair can use it.
    pub fn is_usable(&self) -> bool {
        self.index <= Self::LAST_USABLE && !self.gid.is_empty()
    }
}

impl fmt::Display for GidEntry {
    /// `1 (10.0.0.1, RoCE v2, eth0)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {}", self.index, self.gid, self.kind)?;
        match &self.interface {
            Some(interface) => write!(f, ", {interface})"),
            None => f.write_str(")"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        text.parse::<Ipv6Addr>().expect("address").into()
    }

    #[test]
    fn a_gid_is_shown_as_the_address_that_it_is() {
        assert_eq!(gid("::ffff:10.99.0.1").to_string(), "10.99.0.1");
        assert_eq!(gid("fe80::a:b").to_string(), "fe80::a:b");
        assert_eq!(gid("::ffff:10.99.0.1").ipv4(), Some(Ipv4Addr::new(10, 99, 0, 1)));
        assert_eq!(gid("::10.99.0.1").ipv4(), None, "not mapped");
    }

    #[test]
    fn empty_and_link_local_are_told() {
        assert!(gid("::").is_empty() && gid("fe80::").is_empty());
        assert!(!gid("fe80::1").is_empty() && !gid("::ffff:0.0.0.1").is_empty() && !gid("::1").is_empty());
        assert!(gid("fe80::1").is_link_local() && gid("febf::1").is_link_local());
        assert!(!gid("fec0::1").is_link_local() && !gid("fd00::1").is_link_local());
    }
}
