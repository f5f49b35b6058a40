//! Where connections come from, for limits that are shared among sources.

use std::net::{IpAddr, Ipv6Addr};

/// The part of an address that counts as one source. A host has a whole /64 of IPv6.
pub fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_64_bits_is_one_source_and_each_address_of_ipv4_another() {
        let of = |ip: &str| source_of(ip.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
