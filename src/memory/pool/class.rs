//! Size classes: powers of two with eight steps between them.
//!
//! They are the bins of `offset-allocator` (a float with three bits of mantissa). A block of a
//! class's size therefore fits its bin exactly, and a freed one serves the next request of its
//! class. Rounding up to a class costs at most an eighth.

/// Index of a size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SizeClass(u8);

const STEP_BITS: u32 = 3;
const STEPS: u32 = 1 << STEP_BITS;

impl SizeClass {
    /// The smallest class that holds `units`, which must be at most 2^31.
    #[inline]
    pub(crate) fn holding(units: u32) -> SizeClass {
        debug_assert!(units <= 1 << 31);
        if units < STEPS {
            return SizeClass(units as u8);
        }
        let floor = SizeClass::within(units);
        if floor.units() == units { floor } else { SizeClass(floor.0 + 1) }
    }

    /// The largest class that fits in `units`.
    pub(crate) fn within(units: u32) -> SizeClass {
        if units < STEPS {
            return SizeClass(units as u8);
        }
        let shift = 31 - units.leading_zeros() - STEP_BITS;
        let step = (units >> shift) & (STEPS - 1);
        SizeClass((((shift + 1) << STEP_BITS) | step) as u8)
    }

    /// Size of the class, in units.
    pub(crate) fn units(self) -> u32 {
        let (exponent, step) = (u32::from(self.0) >> STEP_BITS, u32::from(self.0) & (STEPS - 1));
        if exponent == 0 { step } else { (step | STEPS) << (exponent - 1) }
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Every class up to the largest that fits in `units`.
    pub(crate) fn all_within(units: u32) -> impl Iterator<Item = SizeClass> {
        (0..=SizeClass::within(units).0).map(SizeClass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_size_lies_between_its_two_classes_and_rounding_costs_an_eighth(units in 1u32..=1 << 31) {
            let (floor, ceiling) = (SizeClass::within(units), SizeClass::holding(units));
            prop_assert!(floor.units() <= units && units <= ceiling.units());
            prop_assert!(ceiling.index() - floor.index() <= 1);
            prop_assert!(u64::from(ceiling.units()) * 8 <= u64::from(units) * 9);
        }

        #[test]
        fn classes_are_the_bins_of_offset_allocator(units in 1u32..=1 << 30) {
            let bin = offset_allocator::ext::min_allocator_size(units);
            prop_assert_eq!(SizeClass::holding(units).units(), bin);
        }
    }
}
