//! The 32 bits of immediate data: 4 that are 0, 8 of generation, 20 of the slot of a destination.

/// The index of a destination in the table of its link: 20 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    /// The first slot.
    pub const ZERO: Slot = Slot(0);
    /// The largest number of slots of a link.
    pub const COUNT: u32 = 1 << 20;

    /// The slot with this index, if the index fits in 20 bits.
    pub const fn new(index: u32) -> Option<Slot> {
        if index < Slot::COUNT { Some(Slot(index)) } else { None }
    }

    /// Below [`Slot::COUNT`].
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// Immediate data of one write.
///
/// The generation is the one of the slot. It grows by one (modulo 256) with each use of the slot,
/// so that an immediate for an earlier use is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Immediate {
    /// Generation of the slot.
    pub generation: u8,
    /// The destination that was written.
    pub slot: Slot,
}

/// Bits that are no immediate of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("immediate data {bits:#010x} has highest bits that are not 0")]
pub struct ImmediateError {
    /// All 32 bits.
    pub bits: u32,
}

impl Immediate {
    /// The 32 bits that travel.
    pub const fn to_bits(self) -> u32 {
        (self.generation as u32) << 20 | self.slot.0
    }

    /// Reads the 32 bits of a peer.
    ///
    /// # Errors
    /// If one of the highest 4 bits is not 0.
    pub const fn from_bits(bits: u32) -> Result<Self, ImmediateError> {
        match bits >> 28 {
            0 => Ok(Immediate { generation: (bits >> 20) as u8, slot: Slot(bits & (Slot::COUNT - 1)) }),
            _ => Err(ImmediateError { bits }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bits_are_refused_or_come_back(bits: u32) {
            match Immediate::from_bits(bits) {
                Ok(immediate) => prop_assert_eq!(immediate.to_bits(), bits),
                Err(error) => prop_assert!(error.bits >= 1 << 28),
            }
        }
    }

    #[test]
    fn a_slot_has_20_bits() {
        assert!(Slot::new(Slot::COUNT).is_none());
        assert_eq!(Slot::new(Slot::COUNT - 1).expect("fits").index(), 0xF_FFFF);
    }
}
