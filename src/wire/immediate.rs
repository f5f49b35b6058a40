//! The 32 bits of immediate data: 4 of kind, 8 of generation, 20 of slot.

/// The index of a request in a link's table: 20 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    /// How many slots a link can have at most.
    pub const COUNT: u32 = 1 << 20;

    /// The slot with this index, if the index fits in 20 bits.
    pub const fn new(index: u32) -> Option<Slot> {
        if index < Slot::COUNT { Some(Slot(index)) } else { None }
    }

    /// Its index.
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// What an immediate announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ImmediateKind {
    /// The tensor of a request has landed whole.
    Plain = 0,
    /// The value of a branch not taken: no bytes.
    Dead = 1,
    /// One lane's part of a striped tensor has landed.
    Stripe = 2,
    /// A tensor that the receiver may borrow where it lies.
    Lend = 3,
}

/// Immediate data of one write.
///
/// The generation is that of the slot: it grows by one (modulo 256) each time the slot is used again, so
/// that what was meant for an earlier use is told apart and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// What it announces.
    pub kind: ImmediateKind,
    /// Generation of the slot.
    pub generation: u8,
    /// The request that it is for.
    pub slot: Slot,
}

/// Bits that are no immediate of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("immediate data {bits:#010x} has the unknown kind {kind}")]
pub struct ImmediateError {
    /// All 32 bits.
    pub bits: u32,
    /// The four bits of kind.
    pub kind: u8,
}

impl Immediate {
    /// The 32 bits that travel.
    pub const fn to_bits(self) -> u32 {
        (self.kind as u32) << 28 | (self.generation as u32) << 20 | self.slot.0
    }

    /// Reads what a peer sent.
    ///
    /// # Errors
    /// If the kind is not one of this version.
    pub const fn from_bits(bits: u32) -> Result<Self, ImmediateError> {
        let kind = match bits >> 28 {
            0 => ImmediateKind::Plain,
            1 => ImmediateKind::Dead,
            2 => ImmediateKind::Stripe,
            3 => ImmediateKind::Lend,
            kind => return Err(ImmediateError { bits, kind: kind as u8 }),
        };
        Ok(Immediate { kind, generation: (bits >> 20) as u8, slot: Slot(bits & (Slot::COUNT - 1)) })
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
                Err(error) => prop_assert!(error.kind > ImmediateKind::Lend as u8),
            }
        }
    }

    #[test]
    fn a_slot_has_20_bits() {
        assert!(Slot::new(Slot::COUNT).is_none());
        assert_eq!(Slot::new(Slot::COUNT - 1).expect("fits").index(), 0xF_FFFF);
    }
}
