//! Where connections come from, for limits that are shared among sources.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The part of an address that counts as one source. A host has a whole /64 of IPv6, and each of
/// its users has all loopback addresses.
pub fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        ip if ip.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_64_bits_is_one_source_and_so_are_all_loopback_addresses() {
        let of = |ip: &str| source_of(ip.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert!(["127.0.0.1", "127.77.3.2", "::1", "::ffff:127.0.0.2"].map(of) == [of("127.0.0.1"); 4]);
    }
}
