//! The address of an endpoint, as the other endpoint needs it. Other modules treat it as opaque
//! bytes.

use super::data_queue::RemoteAddr;
use super::device::{Gid, GidKind, MAX_RAILS};
use super::failure::{disagreement, peer};
use super::stripes::MAX_STRIPES;
use super::sys::*;
use crate::fabric::FabricError;
use std::fmt;

/// Version of the address, of the ping and of the control messages. They change together.
pub(super) const VERSION: u16 = 5;

const MAGIC: [u8; 8] = *b"twibvadr";
/// Bytes before the rails.
const HEAD: usize = 8 + 2 + 1 + 4 + 1 + 1;
/// Bytes of a rail before its queue pairs.
const RAIL: usize = 1 + 1 + 4 + 1 + 1 + 2 + 16 + 1 + 1 + 1 + (2 + 8 + 4) + (8 + 4 + 8) + PAIR;
/// Bytes of a queue pair.
const PAIR: usize = 4 + 4;

/// Kinds of GIDs by their numbers in an address.
const KINDS: [GidKind; 4] = [GidKind::InfiniBand, GidKind::RoceV1, GidKind::RoceV2, GidKind::Unknown];

fn code(kind: GidKind) -> u8 {
    KINDS.iter().position(|other| *other == kind).unwrap_or(KINDS.len() - 1) as u8
}

/// Memory that a process has registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    pub id: u16,
    pub base: u64,
    pub rkey: u32,
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRegion").field("id", &self.id).field("base", &self.base).finish_non_exhaustive()
    }
}

/// The words into which the peer writes this side's token: the ping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct PingTarget {
    pub addr: u64,
    pub rkey: u32,
    pub token: u64,
}

impl fmt::Debug for PingTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PingTarget").field("addr", &self.addr).finish_non_exhaustive()
    }
}

/// One end of a link: everything that the other needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LinkAddress {
    pub generation: u8,
    pub depth: u32,
    /// Rails that this side uses in a link, at most.
    pub most_rails: u8,
    /// The devices that can make rails, by their numbers.
    pub rails: Vec<RailAddress>,
}

/// One end of a rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RailAddress {
    /// The ends of a rail have the same number.
    pub number: u8,
    /// Whether the device is on another NUMA node than the process.
    pub is_far: bool,
    /// Megabits per second; 0 if the device does not say.
    pub megabits: u32,
    pub gid_kind: GidKind,
    pub global: bool,
    pub lid: u16,
    pub gid: ibv_gid,
    /// Code of the path MTU, at most.
    pub mtu: u32,
    /// Reads that it answers at a time.
    pub reads: u8,
    pub region: RemoteRegion,
    pub hello: PingTarget,
    /// Number and first packet's number of each queue pair: the control queue pair, the first for
    /// data, each stripe.
    pub pairs: Vec<(u32, u32)>,
    /// The queue pair that becomes the main one if the first rail is lost. A side with one device
    /// has none.
    pub backup: Option<(u32, u32)>,
}

/// The bits of a ping that are the token. The others are the rail that the acceptor has chosen as
/// the first one.
const TOKEN: u64 = !0xFE;

impl PingTarget {
    /// A token of these random bits. It is not 0, as a word that nobody wrote is.
    pub fn token(random: u64) -> u64 {
        random & TOKEN | 1
    }

    /// The word to write: with the rail that becomes the first one, by its place among the common
    /// ones.
    pub fn ping(&self, first: usize) -> u64 {
        self.token | (first as u64) << 1
    }

    /// The first rail in a ping; `None` if the word is no ping to this target.
    pub fn read(&self, word: u64) -> Option<usize> {
        (word & TOKEN == self.token).then_some((word & !TOKEN) as usize >> 1)
    }
}

impl LinkAddress {
    /// The bytes that travel.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.rails.len() * (RAIL + 2 * PAIR));
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.push(self.generation);
        bytes.extend(self.depth.to_le_bytes());
        // There are few rails.
        bytes.extend([self.most_rails, self.rails.len() as u8]);
        self.rails.iter().for_each(|rail| rail.write(&mut bytes));
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
        reader.link(bytes.len())
    }

    /// The rails that this end and the peer's have in common, each by its places here and there.
    /// The one that both prefer is the first: near both, and of the lowest number. Both ends get
    /// the same ones in the same order.
    ///
    /// # Errors
    /// Why no link can be made.
    pub fn common(&self, peers: &LinkAddress) -> Result<Vec<(usize, usize)>, FabricError> {
        if peers.generation != self.generation {
            return Err(peer(format!(
                "its endpoint is of generation {}, this side's of {}: it is not of this link",
                peers.generation, self.generation
            )));
        }
        let there = |own: &RailAddress| peers.rails.iter().position(|rail| rail.number == own.number);
        let mut pairs: Vec<_> =
            (0..self.rails.len()).filter_map(|at| Some((at, there(&self.rails[at])?))).collect();
        if pairs.is_empty() {
            pairs.push((0, 0));
        }
        let checked = pairs
            .into_iter()
            .map(|(own, of_peer)| peers.rails[of_peer].check_fits(&self.rails[own]).map(|()| (own, of_peer)));
        let (fit, mut refused): (Vec<_>, Vec<_>) = checked.partition(Result::is_ok);
        let mut pairs: Vec<_> = fit.into_iter().flatten().collect();
        if pairs.is_empty() {
            return Err(refused.swap_remove(0).err().unwrap_or_else(|| peer("its address has no rail")));
        }
        pairs.sort_by_key(|(own, of_peer)| {
            let (own, of_peer) = (&self.rails[*own], &peers.rails[*of_peer]);
            (u8::from(own.is_far) + u8::from(of_peer.is_far), own.number)
        });
        pairs.truncate(usize::from(self.most_rails.min(peers.most_rails)).max(1));
        Ok(pairs)
    }
}

impl RailAddress {
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

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend([self.number, u8::from(self.is_far)]);
        bytes.extend(self.megabits.to_le_bytes());
        bytes.extend([code(self.gid_kind), u8::from(self.global)]);
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend(self.gid.raw);
        bytes.extend([self.mtu as u8, self.reads, self.stripes()]);
        bytes.extend(self.region.id.to_le_bytes());
        bytes.extend(self.region.base.to_le_bytes());
        bytes.extend(self.region.rkey.to_le_bytes());
        bytes.extend(self.hello.addr.to_le_bytes());
        bytes.extend(self.hello.rkey.to_le_bytes());
        bytes.extend(self.hello.token.to_le_bytes());
        // No queue pair for data has the number 0.
        for (number, psn) in [self.backup.unwrap_or_default()].iter().chain(&self.pairs) {
            bytes.extend(number.to_le_bytes());
            bytes.extend(psn.to_le_bytes());
        }
    }

    /// Whether a rail can be made between two ends.
    ///
    /// # Errors
    /// Why not.
    pub fn check_fits(&self, own: &RailAddress) -> Result<(), FabricError> {
        if self.gid_kind != own.gid_kind {
            return Err(disagreement(format!(
                "its GID is of type {}, this side's of type {}: choose GID indices of the same type \
                 (`tensorwire devices`)",
                self.gid_kind, own.gid_kind
            )));
        }
        let is_ipv4 = |end: &RailAddress| Gid(end.gid.raw).ipv4().is_some();
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
    fn link(&mut self, have: usize) -> Result<LinkAddress, FabricError> {
        let cant_be = || peer(format!("its address has {have} bytes, and a value that can't be"));
        let mut link = self.head().ok_or_else(cant_be)?;
        let [rails] = self.take().ok_or_else(cant_be)?;
        if !(1..=MAX_RAILS).contains(&usize::from(rails)) {
            return Err(disagreement(format!(
                "its address has {rails} rails, 1 to {MAX_RAILS} are allowed: run the same release on both"
            )));
        }
        for _ in 0..rails {
            let rail = self.rail(have)?;
            if link.rails.last().is_some_and(|last| last.number >= rail.number) {
                return Err(peer("its address has rails whose numbers do not grow"));
            }
            link.rails.push(rail);
        }
        if !self.0.is_empty() {
            return Err(peer(format!("its address has {} bytes behind its end", self.0.len())));
        }
        Ok(link)
    }

    fn head(&mut self) -> Option<LinkAddress> {
        let [generation] = self.take()?;
        let depth = self.u32()?;
        let [most_rails] = self.take()?;
        let is_possible = depth > 0 && most_rails > 0;
        is_possible.then_some(LinkAddress { generation, depth, most_rails, rails: Vec::new() })
    }

    fn rail(&mut self, have: usize) -> Result<RailAddress, FabricError> {
        let rail = self.rail_head();
        let (mut rail, stripes) =
            rail.ok_or_else(|| peer(format!("its address has {have} bytes, and a value that can't be")))?;
        if stripes > MAX_STRIPES {
            return Err(disagreement(format!(
                "its address has {stripes} stripes, {MAX_STRIPES} is the most: run the same release on both"
            )));
        }
        for _ in 0..2 + stripes {
            let pair = self.u24().zip(self.u24());
            rail.pairs.push(pair.ok_or_else(|| {
                peer(format!(
                    "its address of {have} bytes ends early, or has a queue pair whose numbers can't be"
                ))
            })?);
        }
        Ok(rail)
    }

    /// The bytes of a rail before its queue pairs, and the number of stripes.
    fn rail_head(&mut self) -> Option<(RailAddress, u8)> {
        let [number, is_far] = self.take()?;
        let megabits = self.u32()?;
        let [kind, global] = self.take()?;
        let lid = u16::from_le_bytes(self.take()?);
        let gid = ibv_gid { raw: self.take()? };
        let [mtu, reads, stripes] = self.take()?;
        let region =
            RemoteRegion { id: u16::from_le_bytes(self.take()?), base: self.u64()?, rkey: self.u32()? };
        let hello = PingTarget { addr: self.u64()?, rkey: self.u32()?, token: self.u64()? };
        let backup = match self.u24().zip(self.u24())? {
            (0, 0) => None,
            (0, _) => return None,
            pair => Some(pair),
        };
        let is_mtu = (IBV_MTU_256..=IBV_MTU_4096).contains(&u32::from(mtu));
        if !is_mtu || global > 1 || is_far > 1 || reads == 0 || PingTarget::token(hello.token) != hello.token
        {
            return None;
        }
        let rail = RailAddress {
            number,
            is_far: is_far == 1,
            megabits,
            gid_kind: *KINDS.get(usize::from(kind))?,
            global: global == 1,
            lid,
            gid,
            mtu: mtu.into(),
            reads,
            region,
            hello,
            pairs: Vec::new(),
            backup,
        };
        Some((rail, stripes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rail(number: u8) -> RailAddress {
        RailAddress {
            number,
            is_far: false,
            megabits: 100_000,
            gid_kind: GidKind::RoceV2,
            global: true,
            lid: 7,
            gid: ibv_gid { raw: [3; 16] },
            mtu: IBV_MTU_1024,
            reads: 16,
            region: RemoteRegion { id: 3, base: 0x7000, rkey: 0xABCD },
            hello: PingTarget { addr: 0x9000, rkey: 5, token: PingTarget::token(77) },
            pairs: vec![(1, 2), (3, 4), (0xFF_FFFF, 6), (7, 8)],
            backup: (number > 0).then_some((9, 10)),
        }
    }

    fn link(rails: Vec<RailAddress>) -> LinkAddress {
        LinkAddress { generation: 9, depth: 100, most_rails: 4, rails }
    }

    fn end() -> LinkAddress {
        link(vec![rail(0), rail(3)])
    }

    #[test]
    fn an_address_comes_back_as_it_was_and_each_shorter_or_longer_one_is_refused() {
        let bytes = end().to_bytes();
        assert_eq!(bytes.len(), HEAD + 2 * (RAIL + 4 * PAIR));
        assert_eq!(LinkAddress::from_bytes(&bytes).expect("ours"), end());
        for len in 0..bytes.len() {
            assert!(LinkAddress::from_bytes(&bytes[..len]).is_err(), "{len} bytes passed");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(LinkAddress::from_bytes(&longer).expect_err("too long").to_string().contains("bytes"));
    }

    #[test]
    fn what_can_t_be_is_refused() {
        let refused = |change: fn(&mut Vec<u8>)| {
            let mut bytes = end().to_bytes();
            change(&mut bytes);
            LinkAddress::from_bytes(&bytes).expect_err("refused").to_string()
        };
        assert!(refused(|b| b[0] = 0).contains("not one of this fabric"));
        assert!(refused(|b| b[8] = 9).contains("version 9"));
        assert!(refused(|b| b[11..15].fill(0)).contains("can't be"), "a queue without places");
        assert!(refused(|b| b[15] = 0).contains("can't be"), "no rails at most");
        assert!(refused(|b| b[16] = 0).contains("0 rails"));
        assert!(refused(|b| b[16] = 5).contains("5 rails, 1 to 4"));
        assert!(refused(|b| b[HEAD] = 3).contains("numbers do not grow"));
        assert!(refused(|b| b[HEAD + 1] = 2).contains("can't be"), "far");
        assert!(refused(|b| b[HEAD + 6] = 4).contains("can't be"), "GID type");
        assert!(refused(|b| b[HEAD + 26] = 6).contains("can't be"), "MTU");
        assert!(refused(|b| b[HEAD + 28] = 16).contains("16 stripes"));
        assert!(refused(|b| b[HEAD + RAIL - PAIR - 8] = 0).contains("can't be"), "a token that is none");
        assert!(refused(|b| b[HEAD + RAIL - 4] = 1).contains("can't be"), "a packet of no queue pair");
        let last = |b: &mut Vec<u8>| {
            let at = b.len() - 1;
            b[at] = 1;
        };
        assert!(refused(last).contains("can't be"), "a packet number of 32 bits");
    }

    #[test]
    fn ends_that_do_not_fit_are_refused_by_name() {
        let said = |change: fn(&mut LinkAddress)| {
            let mut other = end();
            change(&mut other);
            end().common(&other).expect_err("refused").to_string()
        };
        let kind = |e: &mut LinkAddress| e.rails.iter_mut().for_each(|r| r.gid_kind = GidKind::RoceV1);
        assert!(said(kind).contains("of type RoCE v1, this side's of type RoCE v2"));
        let address = |e: &mut LinkAddress| {
            let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 1];
            e.rails.iter_mut().for_each(|r| r.gid.raw = ipv4);
        };
        assert!(said(address).contains(
            "its GID 10.0.0.1 is an IPv4 address, this side's 303:303:303:303:303:303:303:303 an IPv6 one"
        ));
        assert!(said(|e| e.generation = 1).contains("generation 1"));
    }

    #[test]
    fn both_ends_find_the_same_rails_in_the_same_order() {
        let far = |number| RailAddress { is_far: true, ..rail(number) };
        let odd = |number| RailAddress { gid_kind: GidKind::RoceV1, ..rail(number) };
        for (one, other, common) in [
            (vec![rail(0)], vec![rail(0)], vec![(0, 0)]),
            (vec![rail(0), rail(1), rail(5)], vec![rail(1), rail(2), rail(5)], vec![(1, 0), (2, 2)]),
            (vec![far(0), rail(1)], vec![rail(0), rail(1)], vec![(1, 1), (0, 0)]),
            (vec![far(0), rail(1)], vec![rail(0), far(1)], vec![(0, 0), (1, 1)]),
            (vec![rail(0), rail(1)], vec![odd(0), rail(1)], vec![(1, 1)]),
            // Without a number in common, the first of each.
            (vec![rail(0), rail(1)], vec![rail(2), rail(3)], vec![(0, 0)]),
        ] {
            let (one, other) = (link(one), link(other));
            assert_eq!(one.common(&other).expect("fits"), common);
            let turned: Vec<_> = common.iter().map(|(own, of_peer)| (*of_peer, *own)).collect();
            assert_eq!(other.common(&one).expect("fits"), turned);
        }
        let few = LinkAddress { most_rails: 1, ..end() };
        assert_eq!(end().common(&few).expect("fits"), [(0, 0)]);
    }

    #[test]
    fn a_ping_says_which_rail_is_the_first() {
        let target = rail(0).hello;
        assert_eq!(target.read(target.ping(3)), Some(3));
        assert_eq!((target.read(0), target.read(target.token ^ 1 << 40)), (None, None));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = LinkAddress::from_bytes(&bytes);
            let mut ours = end().to_bytes();
            for (place, byte) in bytes.iter().enumerate().skip(10).take(ours.len().saturating_sub(10)) {
                if let Some(there) = ours.get_mut(place) { *there = *byte; }
            }
            if let Ok(mut other) = LinkAddress::from_bytes(&ours) {
                let _ = end().common(&other);
                other.rails[0].keep_stripes(0);
                prop_assert_eq!(other.rails[0].pairs.len(), 2);
            }
        }
    }
}
