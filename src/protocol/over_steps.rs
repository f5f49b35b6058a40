//! The steps that have ended at the peer.

use super::message::StepsOver;
use std::collections::VecDeque;

/// Ranges of steps that are remembered, for receives that begin later.
pub const REMEMBERED_RANGES: usize = 4096;

/// Ended steps with their errors: the last [`REMEMBERED_RANGES`] ranges. Consecutive steps with one
/// error are one range.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OverSteps<E> {
    /// Disjoint, in the order of the steps.
    ranges: Vec<StepsOver<E>>,
    /// The first steps of the ranges in the order in which the ranges were told. Some may be gone.
    told: VecDeque<u64>,
}

impl<E> Default for OverSteps<E> {
    fn default() -> Self {
        OverSteps { ranges: Vec::new(), told: VecDeque::new() }
    }
}

impl<E: PartialEq> OverSteps<E> {
    /// The error of an ended step.
    #[inline]
    pub fn error(&self, step: u64) -> Option<&E> {
        // Most steps are later than all that have ended.
        if self.ranges.last().is_none_or(|last| last.last < step) {
            return None;
        }
        let at = self.ranges.partition_point(|range| range.first <= step);
        let range = self.ranges.get(at.checked_sub(1)?)?;
        range.includes(step).then_some(&range.error)
    }

    /// Adds ended steps. A known step keeps its error, unless its range begins among these.
    pub fn add(&mut self, mut over: StepsOver<E>) {
        if self.ranges.capacity() == 0 {
            // The memory of all, so that a step later costs none.
            self.ranges.reserve_exact(REMEMBERED_RANGES + 2);
            self.told.reserve_exact(REMEMBERED_RANGES + 2);
        }
        let at = self.ranges.partition_point(|range| range.first <= over.first);
        let before = at.checked_sub(1).map(|at| &mut self.ranges[at]);
        if let Some(before) = before {
            if before.last >= over.last {
                return;
            }
            // No overflow: `over` has later steps.
            over.first = over.first.max(before.last + 1);
            if before.last + 1 == over.first && before.error == over.error {
                before.last = over.last;
                self.cut(at, over.last);
                return self.forget_oldest();
            }
        }
        self.cut(at, over.last);
        self.told.push_back(over.first);
        self.ranges.insert(at, over);
        self.forget_oldest();
    }

    /// Removes the steps up to `last` from the ranges from `at` on.
    fn cut(&mut self, at: usize, last: u64) {
        let mut end = at + self.ranges[at..].partition_point(|range| range.first <= last);
        if end > at && self.ranges[end - 1].last > last {
            end -= 1;
            // No overflow: the range has later steps.
            self.ranges[end].first = last + 1;
            self.told.push_back(last + 1);
        }
        self.ranges.drain(at..end);
    }

    /// Forgets the ranges that were told first, beyond those that are remembered.
    fn forget_oldest(&mut self) {
        while self.told.len() > REMEMBERED_RANGES {
            let Some(oldest) = self.told.pop_front() else { return };
            if let Ok(oldest) = self.ranges.binary_search_by_key(&oldest, |range| range.first) {
                self.ranges.remove(oldest);
            }
        }
    }

    /// Forgets all steps.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.told.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn over(first: u64, last: u64, error: u8) -> StepsOver<u8> {
        StepsOver { first, last, error }
    }

    #[test]
    fn consecutive_steps_are_one_range_and_the_oldest_range_makes_room() {
        let mut steps = OverSteps::default();
        (0..1000).for_each(|step| steps.add(over(step, step, 1)));
        assert_eq!(steps.ranges, [over(0, 999, 1)]);
        let alone = |n: u64| 2000 + 2 * (n * 7919 % 10_000);
        let count = REMEMBERED_RANGES as u64;
        (0..count).for_each(|n| steps.add(over(alone(n), alone(n), 2)));
        assert_eq!(steps.error(5), None, "the oldest range is forgotten");
        assert!((0..count).all(|n| steps.error(alone(n)) == Some(&2)));
        steps.add(over(0, u64::MAX, 3));
        assert_eq!((steps.error(0), steps.error(u64::MAX)), (Some(&3), Some(&3)));
        steps.add(over(u64::MAX, u64::MAX, 4));
        steps.clear();
        assert_eq!(steps.error(0), None);
    }

    proptest! {
        #[test]
        fn each_step_has_an_error_that_was_told_for_it(
            told in proptest::collection::vec((0..30_u64, 0..6_u64, 0..3_u8), 0..20),
        ) {
            let mut steps = OverSteps::default();
            let mut errors: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
            for (first, more, error) in told {
                steps.add(over(first, first + more, error));
                (first..=first + more).for_each(|step| errors.entry(step).or_default().push(error));
                for step in 0..40 {
                    let known = errors.get(&step);
                    prop_assert_eq!(steps.error(step).is_some(), known.is_some(), "step {}", step);
                    let is_told = known.zip(steps.error(step)).is_none_or(|(all, one)| all.contains(one));
                    prop_assert!(is_told, "step {}", step);
                }
                let is_sorted = steps.ranges.is_sorted_by(|a, b| a.last < b.first);
                prop_assert!(is_sorted && steps.ranges.iter().all(|range| range.first <= range.last));
            }
        }
    }
}
