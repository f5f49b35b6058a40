//! Slots: their places in a ring, and their word 0.
//!
//! A slot is one cache line of 8 words:
//!
//! | word | content |
//! |---|---|
//! | 0, bits 0..31 | sequence number, stored last |
//! | 0, bit 31 | whether the next order lies in a deep slot |
//! | 0, high half | how many orders of the *other* ring of the link have been consumed |
//! | 1..8 | the first 7 words of the order |
//!
//! Each slot has an extension of 24 words for the rest of a longer order. The extensions lie
//! behind the slots, so that short orders touch neighbouring lines only.

/// Words of a slot: one cache line.
pub(super) const SLOT_WORDS: usize = 8;
/// Words of an order that its slot holds.
pub(crate) const IN_SLOT: usize = SLOT_WORDS - 1;
/// Words of a slot's extension.
pub(super) const EXTENSION_WORDS: usize = 24;
/// Words of the longest order.
pub(crate) const MAX_WORDS: usize = IN_SLOT + EXTENSION_WORDS;
/// Hot slots of a deep ring: 2 KiB, so that two rings fill an eighth of a first-level cache.
const MAX_HOT: u32 = 32;

/// The first position of every ring: 300 orders before the 32 bits wrap.
pub(crate) const FIRST: u64 = (1 << 32) - 300;

/// The bit of word 0 which says that the next order lies in a deep slot.
const NEXT_IS_DEEP: u32 = 1 << 31;

/// The sequence number of the order at a position.
#[inline]
fn sequence(position: u64) -> u32 {
    (position as u32).wrapping_add(1) & !NEXT_IS_DEEP
}

/// Word 0 of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstWord(pub(super) u64);

impl FirstWord {
    #[inline]
    pub(super) fn new(position: u64, next_is_deep: bool, ack: u32) -> Self {
        let deep = if next_is_deep { NEXT_IS_DEEP } else { 0 };
        FirstWord(u64::from(ack) << 32 | u64::from(sequence(position) | deep))
    }

    #[inline]
    pub(super) fn is_of(self, position: u64) -> bool {
        self.0 as u32 & !NEXT_IS_DEEP == sequence(position)
    }

    #[inline]
    pub(super) fn next_is_deep(self) -> bool {
        self.0 as u32 & NEXT_IS_DEEP != 0
    }

    /// How many orders the sender has consumed of the other ring, modulo 2^32.
    #[inline]
    pub(crate) fn ack(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The slots of a ring. Hot slots come first, then deep slots, then the extensions of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingShape {
    /// A power of two.
    pub(super) hot: u32,
    /// Orders that can be outstanding, and the number of deep slots: a power of two.
    pub(super) depth: u32,
}

impl RingShape {
    /// The shape of a ring of `depth` orders.
    ///
    /// # Panics
    /// If `depth` is not a power of two, or below 2.
    pub(crate) fn new(depth: u32) -> Self {
        assert!(depth.is_power_of_two() && depth >= 2, "a ring of {depth} orders");
        RingShape { hot: (depth / 8).clamp(2, MAX_HOT), depth }
    }

    /// Consumed orders after which a consumer publishes its position.
    #[inline]
    pub(super) fn tell_after(self) -> u64 {
        u64::from(self.depth >> 2).max(1)
    }

    /// The number of words of all slots and their extensions.
    pub(crate) fn words(self) -> usize {
        self.slots() * (SLOT_WORDS + EXTENSION_WORDS)
    }

    /// The number of slots.
    #[inline]
    pub(crate) fn slots(self) -> usize {
        (self.hot + self.depth) as usize
    }

    /// The hot or the deep slots.
    #[inline]
    pub(super) fn kind(self, is_deep: bool) -> SlotKind {
        match is_deep {
            false => SlotKind { is_deep, first: 0, mask: self.hot - 1 },
            true => SlotKind { is_deep, first: self.hot, mask: self.depth - 1 },
        }
    }

    /// Number of a position's slot.
    #[inline]
    pub(super) fn slot(self, position: u64, is_deep: bool) -> usize {
        self.kind(is_deep).slot(position)
    }

    /// Index of word `k` of the order in a slot.
    #[inline]
    pub(crate) fn word(self, slot: usize, k: usize) -> usize {
        match k.checked_sub(IN_SLOT) {
            None => first_word(slot) + 1 + k,
            Some(k) => self.slots() * SLOT_WORDS + slot * EXTENSION_WORDS + k,
        }
    }
}

/// The hot or the deep slots of a ring.
#[derive(Clone, Copy)]
pub(super) struct SlotKind {
    pub is_deep: bool,
    /// Number of the first one.
    first: u32,
    /// Their number, less one.
    mask: u32,
}

impl SlotKind {
    /// Number of the slot of a position.
    #[inline]
    pub fn slot(self, position: u64) -> usize {
        (self.first + (position as u32 & self.mask)) as usize
    }

    /// How many there are.
    pub fn count(self) -> u64 {
        u64::from(self.mask) + 1
    }
}

/// Index of word 0 of a slot.
#[inline]
pub(super) fn first_word(slot: usize) -> usize {
    slot * SLOT_WORDS
}
