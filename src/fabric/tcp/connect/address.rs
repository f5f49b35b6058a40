//! The address of an endpoint. Only the endpoint that it connects to reads it.

use super::super::failure::{differs, os, peer};
use super::super::options::{MAX_ADDRESSES, MAX_STREAMS};
use crate::fabric::FabricError;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Version of the address, the hello and the frames. They change together.
pub(crate) const VERSION: u16 = 2;

const MAGIC: [u8; 8] = *b"twtcpadr";

/// A random number that proves that a connection comes from the endpoint that it should: nobody
/// else was told.
#[derive(Clone, Copy)]
pub(crate) struct Token(pub [u8; 16]);

impl Token {
    /// Draws a token.
    ///
    /// # Errors
    /// If the kernel has no random numbers.
    pub(crate) fn draw() -> Result<Self, FabricError> {
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(|error| {
            let error = std::io::Error::other(error.to_string());
            os("drawing a random token", error, "let the process call getrandom(2)")
        })?;
        Ok(Token(token))
    }

    /// Compares in a time that does not depend on the bytes.
    pub(crate) fn is(&self, other: &Token) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for Token {
    /// Without its bytes, which are for the peer alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Where an endpoint listens, and what the other side must know to make the same link.
#[derive(Clone, Debug)]
pub(crate) struct TcpAddress {
    pub token: Token,
    pub pid: u32,
    pub depth: u32,
    pub generation: u8,
    /// Bulk connections.
    pub streams: u8,
    pub port: u16,
    /// In the order in which they are to be tried.
    pub hosts: Vec<IpAddr>,
}

impl TcpAddress {
    /// Encodes the address.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.token.0);
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend(self.depth.to_le_bytes());
        bytes.extend([self.generation, self.streams]);
        bytes.extend(self.port.to_le_bytes());
        bytes.push(self.hosts.len() as u8);
        for host in &self.hosts {
            match host {
                IpAddr::V4(host) => {
                    bytes.push(4);
                    bytes.extend(host.octets());
                }
                IpAddr::V6(host) => {
                    bytes.push(6);
                    bytes.extend(host.octets());
                }
            }
        }
        bytes
    }

    /// Decodes an address that a peer has sent.
    ///
    /// # Errors
    /// [`FabricError::Disagreement`] if it is of another version. [`FabricError::Peer`] if it is no
    /// address, or its values are out of range.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, FabricError> {
        let mut reader = TcpByteReader(bytes);
        if reader.take::<8>() != Some(MAGIC) {
            return Err(peer(format!("its address of {} bytes is not one of this fabric", bytes.len())));
        }
        let wrong = || peer(format!("its address of {} bytes is cut short, too long or wrong", bytes.len()));
        match reader.take().map(u16::from_le_bytes) {
            Some(VERSION) => {}
            Some(version) => {
                return Err(differs(format!(
                    "its address has version {version}, this side speaks {VERSION}: run the same release on \
                     both"
                )));
            }
            None => return Err(wrong()),
        }
        let address = reader.address().filter(|_| reader.0.is_empty()).ok_or_else(wrong)?;
        let is_fine = address.depth > 0
            && (1..=MAX_STREAMS).contains(&address.streams)
            && address.port > 0
            && (1..=MAX_ADDRESSES).contains(&address.hosts.len());
        if is_fine { Ok(address) } else { Err(wrong()) }
    }
}

/// Reads fields from the front of a peer's bytes.
pub(super) struct TcpByteReader<'a>(pub &'a [u8]);

impl TcpByteReader<'_> {
    /// The next bytes, if there are so many.
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn address(&mut self) -> Option<TcpAddress> {
        let token = Token(self.take()?);
        let (pid, depth) = (u32::from_le_bytes(self.take()?), u32::from_le_bytes(self.take()?));
        let [generation, streams] = self.take()?;
        let port = u16::from_le_bytes(self.take()?);
        let [count] = self.take()?;
        if usize::from(count) > MAX_ADDRESSES {
            return None;
        }
        let hosts = (0..count).map(|_| self.host()).collect::<Option<_>>()?;
        Some(TcpAddress { token, pid, depth, generation, streams, port, hosts })
    }

    fn host(&mut self) -> Option<IpAddr> {
        match self.take()? {
            [4] => Some(Ipv4Addr::from(self.take::<4>()?).into()),
            [6] => Some(Ipv6Addr::from(self.take::<16>()?).into()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> TcpAddress {
        TcpAddress {
            token: Token([7; 16]),
            pid: 4711,
            depth: 1024,
            generation: 3,
            streams: 4,
            port: 4000,
            hosts: vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        }
    }

    #[test]
    fn an_address_comes_back_and_a_cut_or_longer_one_is_refused() {
        let bytes = address().to_bytes();
        let back = TcpAddress::from_bytes(&bytes).expect("an address");
        assert_eq!(back.to_bytes(), bytes);
        assert_eq!(back.hosts, address().hosts);
        for end in 0..bytes.len() {
            assert!(TcpAddress::from_bytes(&bytes[..end]).is_err(), "cut at {end}");
        }
        assert!(TcpAddress::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn values_out_of_range_and_other_versions_are_refused() {
        type Change = fn(&mut TcpAddress);
        let changes: [Change; 6] = [
            |a| a.depth = 0,
            |a| a.streams = 0,
            |a| a.streams = 16,
            |a| a.port = 0,
            |a| a.hosts.clear(),
            |a| a.hosts = vec![Ipv4Addr::LOCALHOST.into(); MAX_ADDRESSES + 1],
        ];
        for change in changes {
            let mut wrong = address();
            change(&mut wrong);
            assert!(TcpAddress::from_bytes(&wrong.to_bytes()).is_err(), "{wrong:?}");
        }
        let mut other = address().to_bytes();
        other[8] = 9;
        let error = TcpAddress::from_bytes(&other).expect_err("refused");
        assert!(matches!(error, FabricError::Disagreement { .. }), "no further attempt mends it: {error}");
        assert!(error.to_string().contains("version 9"), "{error}");
    }

    #[test]
    fn a_token_is_itself_alone_and_in_no_text() {
        let (one, other) = (Token::draw().expect("random"), Token::draw().expect("random"));
        assert!(one.is(&one) && !one.is(&other));
        for bit in 0..128 {
            let mut close = one;
            close.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!one.is(&close), "bit {bit}");
        }
        assert_eq!(format!("{one:?}"), "Token");
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(tail in proptest::collection::vec(any::<u8>(), 0..80)) {
            let bytes = [&address().to_bytes()[..10], &tail[..]].concat();
            if let Ok(address) = TcpAddress::from_bytes(&bytes) {
                prop_assert_eq!(address.to_bytes(), bytes);
            }
        }
    }
}
