//! The 32 bits of immediate data: 4 of kind, 8 of generation, 20 of request slot.

/// The index of a request in a link's table: 20 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    /// The first slot.
    pub const ZERO: Slot = Slot(0);
    /// The largest number of request slots of a link.
    pub const COUNT: u32 = 1 << 20;

    /// The request slot with this index, if the index fits in 20 bits.
    pub const fn new(index: u32) -> Option<Slot> {
        if index < Slot::COUNT { Some(Slot(index)) } else { None }
    }

    /// Below [`Slot::COUNT`].
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// The cache position of one meta-data that both ends of a route remember. Of several versions with
/// the same position, modulo [`MetaSlot::COUNT`], the newest is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaSlot(u8);

impl MetaSlot {
    /// How many are remembered of each route.
    pub const COUNT: usize = 4;

    /// The place of the meta-data with this version.
    pub const fn of(version: u32) -> MetaSlot {
        MetaSlot((version % MetaSlot::COUNT as u32) as u8)
    }

    /// Below [`MetaSlot::COUNT`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What has landed, or what became of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImmediateKind {
    /// The tensor of a request has landed whole.
    Plain,
    /// The value of a branch not taken: no bytes.
    Dead,
    /// One lane's part of a striped tensor has landed.
    Stripe,
    /// A tensor that the receiver may borrow where it lies.
    Lend,
    /// As [`ImmediateKind::Plain`], for a tensor with other meta-data than its request named:
    /// these, of which the receiver was told before.
    PlainAs(MetaSlot),
    /// As [`ImmediateKind::Lend`], for such a tensor.
    LendAs(MetaSlot),
}

impl ImmediateKind {
    /// Its four bits.
    const fn bits(self) -> u8 {
        match self {
            ImmediateKind::Plain => 0,
            ImmediateKind::Dead => 1,
            ImmediateKind::Stripe => 2,
            ImmediateKind::Lend => 3,
            ImmediateKind::PlainAs(place) => 4 | place.0,
            ImmediateKind::LendAs(place) => 8 | place.0,
        }
    }

    const fn of(bits: u8) -> Option<ImmediateKind> {
        Some(match bits {
            0 => ImmediateKind::Plain,
            1 => ImmediateKind::Dead,
            2 => ImmediateKind::Stripe,
            3 => ImmediateKind::Lend,
            4..8 => ImmediateKind::PlainAs(MetaSlot(bits & 3)),
            8..12 => ImmediateKind::LendAs(MetaSlot(bits & 3)),
            _ => return None,
        })
    }
}

/// Immediate data of one write.
///
/// The generation is the one of the request slot. It grows by one (modulo 256) with each use of the
/// slot, so that an immediate for an earlier use is recognised and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The kind of the write.
    pub kind: ImmediateKind,
    /// Generation of the request slot.
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
        (self.kind.bits() as u32) << 28 | (self.generation as u32) << 20 | self.slot.0
    }

    /// Reads the 32 bits of a peer.
    ///
    /// # Errors
    /// If the kind is not one of this version.
    pub const fn from_bits(bits: u32) -> Result<Self, ImmediateError> {
        let Some(kind) = ImmediateKind::of((bits >> 28) as u8) else {
            return Err(ImmediateError { bits, kind: (bits >> 28) as u8 });
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
                Err(error) => prop_assert!(error.kind >= 12),
            }
        }
    }

    #[test]
    fn versions_that_follow_each_other_have_places_of_their_own() {
        let mut places: Vec<_> = (5..9).map(|version| MetaSlot::of(version).index()).collect();
        places.sort_unstable();
        assert_eq!(places, [0, 1, 2, 3]);
    }

    #[test]
    fn a_slot_has_20_bits() {
        assert!(Slot::new(Slot::COUNT).is_none());
        assert_eq!(Slot::new(Slot::COUNT - 1).expect("fits").index(), 0xF_FFFF);
    }
}
