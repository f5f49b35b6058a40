//! The address of an endpoint, as the other endpoint needs it. Other modules treat it as opaque
//! bytes.

use super::data_queue::RemoteAddr;
use super::device::{Gid, GidKind};
use super::failure::{disagreement, peer};
use super::stripes::MAX_STRIPES;
use super::sys::*;
use crate::fabric::FabricError;

/// Version of the address, of the ping and of the control messages. They change together.
pub(super) const VERSION: u16 = 3;

const MAGIC: [u8; 8] = *b"twibvadr";
/// Bytes before the queue pairs.
const HEAD: usize = 8 + 2 + 1 + 1 + 2 + 16 + 1 + 1 + 1 + 4 + 1 + (2 + 8 + 4) + (8 + 4 + 8);
/// Bytes of a queue pair.
const PAIR: usize = 4 + 4;

/// Kinds of GIDs by their numbers in an address.
const KINDS: [GidKind; 4] = [GidKind::InfiniBand, GidKind::RoceV1, GidKind::RoceV2, GidKind::Unknown];

fn code(kind: GidKind) -> u8 {
    KINDS.iter().position(|other| *other == kind).unwrap_or(KINDS.len() - 1) as u8
}

/// Memory that a process has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    pub id: u16,
    pub base: u64,
    pub rkey: u32,
}

/// The words into which the peer writes this side's token: the ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PingTarget {
    pub addr: u64,
    pub rkey: u32,
    pub token: u64,
}

/// One end of a link: everything that the other needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EndpointInfo {
    pub gid_kind: GidKind,
    pub global: bool,
    pub lid: u16,
    pub gid: ibv_gid,
    /// Code of the path MTU, at most.
    pub mtu: u32,
    /// Reads that it answers at a time.
    pub reads: u8,
    pub depth: u32,
    pub generation: u8,
    pub region: RemoteRegion,
    pub hello: PingTarget,
    /// Number and first packet's number of each queue pair: the control queue pair, the main data
    /// queue, each stripe.
    pub pairs: Vec<(u32, u32)>,
}

impl EndpointInfo {
    /// The first of the words for lengths of writes that take several requests. There is one per
    /// place of the queue, behind those for pings.
    pub fn totals(&self) -> RemoteAddr {
        let addr = self.hello.addr.wrapping_add(8 * self.first_total() as u64);
        RemoteAddr { addr, rkey: self.hello.rkey }
    }

    /// The number of the first of those words.
    pub fn first_total(&self) -> usize {
        self.pairs.len() - 1
    }

    /// Queue pairs for data besides the main one.
    pub fn stripes(&self) -> u8 {
        (self.pairs.len() - 2) as u8
    }

    /// Leaves this many stripes.
    pub fn keep_stripes(&mut self, count: u8) {
        self.pairs.truncate(2 + usize::from(count));
    }

    /// The bytes that travel.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.pairs.len() * PAIR);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([code(self.gid_kind), u8::from(self.global)]);
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend(self.gid.raw);
        bytes.extend([self.mtu as u8, self.reads, self.generation]);
        bytes.extend(self.depth.to_le_bytes());
        bytes.push(self.stripes());
        bytes.extend(self.region.id.to_le_bytes());
        bytes.extend(self.region.base.to_le_bytes());
        bytes.extend(self.region.rkey.to_le_bytes());
        bytes.extend(self.hello.addr.to_le_bytes());
        bytes.extend(self.hello.rkey.to_le_bytes());
        bytes.extend(self.hello.token.to_le_bytes());
        for (number, psn) in &self.pairs {
            bytes.extend(number.to_le_bytes());
            bytes.extend(psn.to_le_bytes());
        }
        bytes
    }

    /// Reads an address that a peer has sent.
    ///
    /// # Errors
    /// If it is none of this version, or has a value that can't be. Another version is a
    /// [`FabricError::Disagreement`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FabricError> {
        let mut reader = AddressReader(bytes);
        if reader.take::<8>() != Some(MAGIC) {
            return Err(peer(format!("its address of {} bytes is not one of this fabric", bytes.len())));
        }
        match reader.take().map(u16::from_le_bytes) {
            Some(VERSION) => {}
            version => {
                return Err(disagreement(format!(
                    "its address has version {}, this side speaks {VERSION}: run the same release on both",
                    version.unwrap_or(0)
                )));
            }
        }
        reader.end(bytes.len())
    }

    /// Whether a link can be made between two ends.
    ///
    /// # Errors
    /// Why not.
    pub fn check_fits(&self, own: &EndpointInfo) -> Result<(), FabricError> {
        if self.gid_kind != own.gid_kind {
            return Err(disagreement(format!(
                "its GID is of type {}, this side's of type {}: choose GID indices of the same type \
                 (`tensorwire devices`)",
                self.gid_kind, own.gid_kind
            )));
        }
        let is_ipv4 = |end: &EndpointInfo| Gid(end.gid.raw).ipv4().is_some();
        if self.gid_kind == GidKind::RoceV2 && is_ipv4(self) != is_ipv4(own) {
            let family = |end| if is_ipv4(end) { "IPv4" } else { "IPv6" };
            return Err(disagreement(format!(
                "its GID {} is an {} address, this side's {} an {} one: choose GID indices of the same \
                 family (`tensorwire devices`)",
                Gid(self.gid.raw),
                family(self),
                Gid(own.gid.raw),
                family(own)
            )));
        }
        if self.generation != own.generation {
            return Err(peer(format!(
                "its endpoint is of generation {}, this side's of {}: it is not of this link",
                self.generation, own.generation
            )));
        }
        Ok(())
    }
}

struct AddressReader<'a>(&'a [u8]);

impl AddressReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// A number of 24 bits.
    fn u24(&mut self) -> Option<u32> {
        self.u32().filter(|number| *number < 1 << 24)
    }

    /// The bytes behind the version.
    fn end(&mut self, have: usize) -> Result<EndpointInfo, FabricError> {
        let head = self
            .head()
            .ok_or_else(|| peer(format!("its address has {have} bytes, and a value that can't be")))?;
        let (mut end, stripes) = head;
        if stripes > MAX_STRIPES {
            return Err(disagreement(format!(
                "its address has {stripes} stripes, {MAX_STRIPES} is the most: run the same release on both"
            )));
        }
        let pairs = 2 + usize::from(stripes);
        if self.0.len() != PAIR * pairs {
            let length = HEAD + PAIR * pairs;
            return Err(peer(format!(
                "its address has {have} bytes, with {pairs} queue pairs it should have {length}"
            )));
        }
        for _ in 0..pairs {
            let pair = self.u24().zip(self.u24());
            end.pairs.push(pair.ok_or_else(|| peer("its address has a queue pair whose numbers can't be"))?);
        }
        Ok(end)
    }

    /// The bytes before the queue pairs, and the number of stripes.
    fn head(&mut self) -> Option<(EndpointInfo, u8)> {
        let [kind, global] = self.take()?;
        let lid = u16::from_le_bytes(self.take()?);
        let gid = ibv_gid { raw: self.take()? };
        let [mtu, reads, generation] = self.take()?;
        let depth = self.u32()?;
        let [stripes] = self.take()?;
        let region =
            RemoteRegion { id: u16::from_le_bytes(self.take()?), base: self.u64()?, rkey: self.u32()? };
        let hello = PingTarget { addr: self.u64()?, rkey: self.u32()?, token: self.u64()? };
        if !(IBV_MTU_256..=IBV_MTU_4096).contains(&u32::from(mtu)) || global > 1 || reads == 0 || depth == 0 {
            return None;
        }
        let end = EndpointInfo {
            gid_kind: *KINDS.get(usize::from(kind))?,
            global: global == 1,
            lid,
            gid,
            mtu: mtu.into(),
            reads,
            depth,
            generation,
            region,
            hello,
            pairs: Vec::new(),
        };
        Some((end, stripes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn end() -> EndpointInfo {
        EndpointInfo {
            gid_kind: GidKind::RoceV2,
            global: true,
            lid: 7,
            gid: ibv_gid { raw: [3; 16] },
            mtu: IBV_MTU_1024,
            reads: 16,
            depth: 100,
            generation: 9,
            region: RemoteRegion { id: 3, base: 0x7000, rkey: 0xABCD },
            hello: PingTarget { addr: 0x9000, rkey: 5, token: 77 },
            pairs: vec![(1, 2), (3, 4), (0xFF_FFFF, 6), (7, 8)],
        }
    }

    #[test]
    fn an_address_comes_back_as_it_was_and_each_shorter_or_longer_one_is_refused() {
        let bytes = end().to_bytes();
        assert_eq!(EndpointInfo::from_bytes(&bytes).expect("ours"), end());
        for len in 0..bytes.len() {
            assert!(EndpointInfo::from_bytes(&bytes[..len]).is_err(), "{len} bytes passed");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(EndpointInfo::from_bytes(&longer).expect_err("too long").to_string().contains("bytes"));
    }

    #[test]
    fn what_can_t_be_is_refused() {
        let refused = |change: fn(&mut Vec<u8>)| {
            let mut bytes = end().to_bytes();
            change(&mut bytes);
            EndpointInfo::from_bytes(&bytes).expect_err("refused").to_string()
        };
        assert!(refused(|b| b[0] = 0).contains("not one of this fabric"));
        assert!(refused(|b| b[8] = 9).contains("version 9"));
        assert!(refused(|b| b[10] = 4).contains("can't be"), "GID type");
        assert!(refused(|b| b[30] = 6).contains("can't be"), "MTU");
        assert!(refused(|b| b[33] = 0).contains("can't be"), "a queue without places");
        let last = |b: &mut Vec<u8>| {
            let at = b.len() - 1;
            b[at] = 1;
        };
        assert!(refused(last).contains("can't be"), "a packet number of 32 bits");
    }

    #[test]
    fn ends_that_do_not_fit_are_refused_by_name() {
        let said = |change: fn(&mut EndpointInfo)| {
            let mut other = end();
            change(&mut other);
            other.check_fits(&end()).expect_err("refused").to_string()
        };
        assert!(end().check_fits(&end()).is_ok());
        assert!(
            said(|e| e.gid_kind = GidKind::RoceV1).contains("of type RoCE v1, this side's of type RoCE v2")
        );
        assert!(said(|e| e.gid.raw = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 1]).contains(
            "its GID 10.0.0.1 is an IPv4 address, this side's 303:303:303:303:303:303:303:303 an IPv6 one"
        ));
        assert!(said(|e| e.generation = 1).contains("generation 1"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = EndpointInfo::from_bytes(&bytes);
            let mut ours = end().to_bytes();
            for (place, byte) in bytes.iter().enumerate().skip(10).take(ours.len().saturating_sub(10)) {
                if let Some(there) = ours.get_mut(place) { *there = *byte; }
            }
            if let Ok(mut other) = EndpointInfo::from_bytes(&ours) {
                let _ = other.check_fits(&end());
                other.keep_stripes(0);
                prop_assert_eq!(other.pairs.len(), 2);
            }
        }
    }
}
