//! Size classes: powers of two with eight steps between them.
//!
//! They are the bins of `offset-allocator` (a float with three bits of mantissa). A block of a
//! class's size therefore fits its bin exactly, and a freed one serves the next request of its
//! class. Rounding up to a class costs at most an eighth.

/// Index of a size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SizeClass(u32);

const STEP_BITS: u32 = 3;
const STEPS: u32 = 1 << STEP_BITS;

impl SizeClass {
    /// The smallest class that holds `units`, which must be at least 1.
    #[inline]
    pub(crate) fn holding(units: u64) -> SizeClass {
        SizeClass(SizeClass::within(units - 1).0 + 1)
    }

    /// The largest class that fits in `units`.
    #[inline]
    pub(crate) fn within(units: u64) -> SizeClass {
        // Up to twice `STEPS` each size is a class.
        let shift = (units | u64::from(STEPS)).ilog2() - STEP_BITS;
        SizeClass((shift << STEP_BITS) + (units >> shift) as u32)
    }

    /// Size of the class, in units. For classes within 2^31 units.
    pub(crate) fn units(self) -> u32 {
        let (exponent, step) = (self.0 >> STEP_BITS, self.0 & (STEPS - 1));
        if exponent == 0 { step } else { (step | STEPS) << (exponent - 1) }
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// Every class up to the largest that fits in `units`.
    pub(crate) fn all_within(units: u64) -> impl Iterator<Item = SizeClass> {
        (0..=SizeClass::within(units).0).map(SizeClass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_size_lies_between_its_two_classes_and_rounding_costs_an_eighth(units in 1u64..=1 << 31) {
            let (floor, ceiling) = (SizeClass::within(units), SizeClass::holding(units));
            prop_assert!(u64::from(floor.units()) <= units && units <= ceiling.units().into());
            prop_assert!(ceiling.index() - floor.index() <= 1);
            prop_assert!(u64::from(ceiling.units()) * 8 <= units * 9);
        }

        #[test]
        fn classes_are_the_bins_of_offset_allocator(units in 1u32..=1 << 30) {
            let bin = offset_allocator::ext::min_allocator_size(units);
            prop_assert_eq!(SizeClass::holding(units.into()).units(), bin);
        }
    }
}
