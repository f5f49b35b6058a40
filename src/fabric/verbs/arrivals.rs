//! What comes on the main queue pair of a link with stripes: in order, behind the parts of earlier
//! writes.
//!
//! The event of a striped write waits until its parts on the other queue pairs have landed. Later
//! events of the main queue pair wait behind it. So the order within the link is that of one queue
//! pair, and the modules above need not know of stripes. A message that was sent behind a write
//! arrives behind all of it.

use super::stripes::MAX_STRIPES;
use crate::fabric::{Completions, Event, LinkId, MAX_MESSAGE};
use crate::wire::Immediate;
use std::collections::VecDeque;

/// The bits of a write's announced length that are its length. Those above are its [`PartSet`].
const LENGTH_BITS: u32 = 48;

const _: () = assert!(LENGTH_BITS + MAX_STRIPES as u32 + 1 == u64::BITS);

/// The queue pairs on which a striped write has parts: a bit for each number. No bit stands for a
/// write that is not striped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartSet(u16);

impl PartSet {
    pub const NONE: PartSet = PartSet(0);

    /// Of the queue pair with this number, at most [`MAX_STRIPES`].
    pub fn of(number: u8) -> PartSet {
        PartSet(1 << number)
    }

    pub fn with(self, number: u8) -> PartSet {
        PartSet(self.0 | PartSet::of(number).0)
    }

    fn has(self, number: u8) -> bool {
        self.0 & PartSet::of(number).0 != 0
    }

    /// The word that announces a write of `len` bytes with these parts.
    pub fn announce(self, len: u64) -> u64 {
        len | u64::from(self.0) << LENGTH_BITS
    }

    /// The length and the parts in a word that is not 0.
    #[inline]
    pub fn read(word: u64) -> (u64, PartSet) {
        (word & ((1 << LENGTH_BITS) - 1), PartSet((word >> LENGTH_BITS) as u16))
    }
}

/// The parts on one queue pair.
pub(super) struct LandedParts {
    number: u8,
    /// Those that have landed, modulo 2^32.
    pub count: u32,
    /// Of these, the parts of writes whose announcement has not come.
    early: u32,
}

impl LandedParts {
    /// So many parts have landed, modulo 2^32. An earlier count changes nothing.
    fn raise(&mut self, count: u32) {
        let more = count.wrapping_sub(self.count);
        if more as i32 > 0 {
            self.count = count;
            self.early = self.early.wrapping_add(more);
        }
    }
}

/// Events that wait for parts.
pub(super) struct Arrivals {
    /// Of each stripe, in their order.
    pub parts: Vec<LandedParts>,
    /// All queue pairs of the link.
    known: PartSet,
    held: VecDeque<HeldArrival>,
}

/// Something that came on the main queue behind a striped write that is not whole, or its own end.
struct HeldArrival {
    /// The parts that must have landed.
    parts: PartSet,
    what: StripeArrival,
}

#[allow(clippy::large_enum_variant)] // in a box, each message would allocate
enum StripeArrival {
    Immediate { immediate: Immediate, bytes: u64 },
    Message { len: usize, bytes: [u8; MAX_MESSAGE] },
}

impl Arrivals {
    /// Of the main queue pair and of stripes with these numbers.
    pub fn new(main: u8, stripes: impl Iterator<Item = u8>, depth: u32) -> Self {
        let parts: Vec<_> = stripes.map(|number| LandedParts { number, count: 0, early: 0 }).collect();
        let known = parts.iter().fold(PartSet::of(main), |known, of| known.with(of.number));
        // Each held event has consumed a receive, so their number is bounded.
        let held = if parts.is_empty() { VecDeque::new() } else { VecDeque::with_capacity(depth as usize) };
        Arrivals { parts, known, held }
    }

    /// Whether nothing waits for parts.
    pub fn is_complete(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether the link has all these queue pairs.
    #[inline]
    pub fn knows(&self, parts: PartSet) -> bool {
        parts.0 & !self.known.0 == 0
    }

    /// Takes these parts, if all have landed.
    fn take(&mut self, parts: PartSet) -> bool {
        if self.parts.iter().any(|of| parts.has(of.number) && of.early == 0) {
            return false;
        }
        self.parts.iter_mut().filter(|of| parts.has(of.number)).for_each(|of| of.early -= 1);
        true
    }

    /// An immediate came on the main queue.
    #[inline]
    pub fn immediate(
        &mut self,
        link: LinkId,
        immediate: Immediate,
        bytes: u64,
        parts: PartSet,
        out: &mut Completions,
    ) {
        if self.held.is_empty() && (parts == PartSet::NONE || self.take(parts)) {
            return out.push(link, Event::Immediate { immediate, bytes });
        }
        self.held.push_back(HeldArrival { parts, what: StripeArrival::Immediate { immediate, bytes } });
    }

    /// A message of at most [`MAX_MESSAGE`] bytes came on the main queue.
    #[inline]
    pub fn message(&mut self, link: LinkId, message: &[u8], out: &mut Completions) {
        if self.held.is_empty() {
            return out.push_message(link, message);
        }
        let mut bytes = [0; MAX_MESSAGE];
        bytes[..message.len()].copy_from_slice(message);
        let what = StripeArrival::Message { len: message.len(), bytes };
        self.held.push_back(HeldArrival { parts: PartSet::NONE, what });
    }

    /// A part has landed on the stripe at this place.
    pub fn landed(&mut self, link: LinkId, at: usize, out: &mut Completions) {
        let next = self.parts[at].count.wrapping_add(1);
        self.landed_so_far(link, at, next, out);
    }

    /// So many parts have landed on the stripe at this place, modulo 2^32, or on another queue pair
    /// in its stead. An earlier count changes nothing.
    pub fn landed_so_far(&mut self, link: LinkId, at: usize, count: u32, out: &mut Completions) {
        self.parts[at].raise(count);
        self.release(link, out);
    }

    /// Tells of what waits for no part any more.
    fn release(&mut self, link: LinkId, out: &mut Completions) {
        while let Some(parts) = self.held.front().map(|held| held.parts)
            && self.take(parts)
        {
            match self.held.pop_front().map(|held| held.what) {
                Some(StripeArrival::Immediate { immediate, bytes }) => {
                    out.push(link, Event::Immediate { immediate, bytes });
                }
                Some(StripeArrival::Message { len, bytes }) => {
                    out.push_message(link, &bytes[..len]);
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Slot;

    const LINK: LinkId = LinkId(3);

    fn immediate(slot: u32) -> Immediate {
        Immediate { generation: 0, slot: Slot::new(slot).expect("fits") }
    }

    /// Slots of immediates, and lengths of messages plus 1,000.
    fn told(out: &mut Completions) -> Vec<u32> {
        let number = |event: &Event, message: &[u8]| match event {
            Event::Immediate { immediate, .. } => immediate.slot.index(),
            _ => 1000 + message.len() as u32,
        };
        let told = out.drain().map(|(completion, message)| number(&completion.event, message)).collect();
        out.clear();
        told
    }

    /// With arrivals of the numbers from 1 on.
    fn arrivals(arrivals: u8) -> Arrivals {
        Arrivals::new(0, 1..arrivals + 1, 16)
    }

    /// A write with parts on all queue pairs, or on the main one and one more.
    const ALL: PartSet = PartSet(0b111);
    const FIRST: PartSet = PartSet(0b11);
    const NONE: PartSet = PartSet::NONE;

    #[test]
    fn a_striped_write_is_told_once_all_its_parts_have_landed_whatever_comes_first() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (mut arrivals, mut out) = (arrivals(2), Completions::default());
            for (at, part) in order.into_iter().enumerate() {
                match part {
                    2 => arrivals.immediate(LINK, immediate(7), 5, ALL, &mut out),
                    part => arrivals.landed(LINK, part, &mut out),
                }
                let expected = if at == 2 { vec![7] } else { vec![] };
                assert_eq!(told(&mut out), expected, "{order:?} at {at}");
            }
            assert!(arrivals.is_complete());
        }
    }

    #[test]
    fn what_comes_behind_a_striped_write_stays_behind_it() {
        let (mut arrivals, mut out) = (arrivals(1), Completions::default());
        arrivals.immediate(LINK, immediate(1), 5, NONE, &mut out);
        arrivals.immediate(LINK, immediate(2), 5, FIRST, &mut out);
        arrivals.message(LINK, &[0; 10], &mut out);
        arrivals.immediate(LINK, immediate(3), 5, FIRST, &mut out);
        arrivals.immediate(LINK, immediate(4), 5, NONE, &mut out);
        assert_eq!(told(&mut out), [1]);
        arrivals.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [2, 1010]);
        arrivals.message(LINK, &[0; 20], &mut out);
        arrivals.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [3, 4, 1020]);
        assert!(arrivals.is_complete());
    }

    #[test]
    fn counts_may_wrap() {
        let (mut arrivals, mut out) = (arrivals(1), Completions::default());
        arrivals.parts[0].count = u32::MAX;
        arrivals.immediate(LINK, immediate(1), 5, FIRST, &mut out);
        assert!(!arrivals.is_complete());
        arrivals.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [1]);
    }

    #[test]
    fn a_write_waits_for_its_own_parts_alone() {
        let (mut arrivals, mut out) = (arrivals(2), Completions::default());
        arrivals.immediate(LINK, immediate(1), 5, FIRST, &mut out);
        arrivals.immediate(LINK, immediate(2), 5, PartSet(0b101), &mut out);
        arrivals.landed(LINK, 1, &mut out);
        assert_eq!(told(&mut out), [0; 0], "the second write waits behind the first");
        arrivals.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [1, 2]);
        assert!(arrivals.is_complete());
    }

    #[test]
    fn parts_that_are_counted_together_and_counts_that_are_old() {
        let (mut arrivals, mut out) = (arrivals(1), Completions::default());
        for slot in 1..4 {
            arrivals.immediate(LINK, immediate(slot), 5, FIRST, &mut out);
        }
        arrivals.landed_so_far(LINK, 0, 2, &mut out);
        arrivals.landed_so_far(LINK, 0, 1, &mut out);
        assert_eq!(told(&mut out), [1, 2]);
        arrivals.landed_so_far(LINK, 0, 3, &mut out);
        assert_eq!(told(&mut out), [3]);
    }

    #[test]
    fn queue_pairs_that_the_link_does_not_have_are_told() {
        assert!(arrivals(2).knows(ALL) && arrivals(2).knows(NONE));
        assert!(!arrivals(1).knows(ALL) && !arrivals(2).knows(PartSet(1 << 15)));
        assert_eq!(PartSet::read(ALL.announce(77)), (77, ALL));
    }
}
