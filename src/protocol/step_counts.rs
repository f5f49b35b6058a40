//! The number of things that each step still has.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Steps that are counted without a search, if their ids are consecutive.
const NEAR: usize = 16;
/// Other steps that are counted without an allocation.
const FAR: usize = 64;

/// The number of values, waiters and needs of each step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepCounts {
    /// The step and its count, at the lowest bits of the step.
    near: [(u64, u32); NEAR],
    /// Counts of steps whose place another step had.
    far: Vec<(u64, u32)>,
    /// Those for which `far` had no room. Values or needs of many steps fill it.
    rest: BTreeMap<u64, u32>,
}

impl Default for StepCounts {
    fn default() -> Self {
        StepCounts { near: [(0, 0); NEAR], far: Vec::with_capacity(FAR), rest: BTreeMap::new() }
    }
}

impl StepCounts {
    /// Counts one thing of a step.
    #[inline]
    pub fn add(&mut self, step: u64) {
        let near = &mut self.near[step as usize % NEAR];
        if near.1 == 0 || near.0 == step {
            return *near = (step, near.1 + 1);
        }
        self.add_far(step);
    }

    #[cold]
    fn add_far(&mut self, step: u64) {
        if let Some(far) = self.far.iter_mut().find(|far| far.0 == step) {
            far.1 += 1;
        } else if self.far.len() < FAR && !self.rest.contains_key(&step) {
            self.far.push((step, 1));
        } else {
            *self.rest.entry(step).or_default() += 1;
        }
    }

    /// Takes back one [`StepCounts::add`] of the step.
    #[inline]
    pub fn remove(&mut self, step: u64) {
        let near = &mut self.near[step as usize % NEAR];
        if near.0 == step && near.1 > 0 {
            near.1 -= 1;
        } else {
            self.remove_many(step, 1);
        }
    }

    /// Takes back `count` of [`StepCounts::add`] of the step.
    #[cold]
    pub fn remove_many(&mut self, step: u64, mut count: usize) {
        let near = &mut self.near[step as usize % NEAR];
        if near.0 == step {
            take_from(&mut near.1, &mut count);
        }
        if let Some(at) = self.far.iter().position(|far| far.0 == step) {
            take_from(&mut self.far[at].1, &mut count);
            if self.far[at].1 == 0 {
                self.far.swap_remove(at);
            }
        }
        if let Some(rest) = self.rest.get_mut(&step) {
            take_from(rest, &mut count);
            if *rest == 0 {
                self.rest.remove(&step);
            }
        }
    }

    /// Takes back everything of `steps`. Returns how much that was.
    pub fn take(&mut self, steps: &RangeInclusive<u64>) -> usize {
        if steps.is_empty() {
            return 0;
        }
        let mut taken = 0;
        for (_, count) in self.near.iter_mut().filter(|(step, _)| steps.contains(step)) {
            taken += std::mem::take(count) as usize;
        }
        let far = self.far.extract_if(.., |(step, _)| steps.contains(step));
        taken += far.map(|(_, count)| count as usize).sum::<usize>();
        let rest = self.rest.extract_if(steps.clone(), |_, _| true);
        taken + rest.map(|(_, count)| count as usize).sum::<usize>()
    }

    /// Takes back everything.
    pub fn clear(&mut self) {
        self.near = [(0, 0); NEAR];
        self.far.clear();
        self.rest.clear();
    }

    /// Whether the step has nothing.
    #[inline]
    pub fn is_empty(&self, step: u64) -> bool {
        let near = self.near[step as usize % NEAR];
        let has_near = near.0 == step && near.1 > 0;
        !has_near && ((self.far.is_empty() && self.rest.is_empty()) || !self.has_far(step))
    }

    #[cold]
    fn has_far(&self, step: u64) -> bool {
        self.far.iter().any(|far| far.0 == step) || self.rest.contains_key(&step)
    }

    /// Whether any of `steps` that `is` one has something.
    pub fn has_any(&self, steps: &RangeInclusive<u64>, is: impl Fn(u64) -> bool) -> bool {
        let mut listed = self.near.iter().chain(&self.far);
        listed.any(|(step, count)| *count > 0 && steps.contains(step) && is(*step))
            || (!steps.is_empty() && self.rest.range(steps.clone()).any(|(step, _)| is(*step)))
    }
}

fn take_from(counted: &mut u32, count: &mut usize) {
    let taken = (*counted).min(u32::try_from(*count).unwrap_or(u32::MAX));
    *counted -= taken;
    *count -= taken as usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_share_a_place_are_counted_apart() {
        let mut counts = StepCounts::default();
        let steps = [3, 3 + NEAR as u64, u64::MAX];
        for step in steps {
            counts.add(step);
            counts.add(step);
        }
        counts.remove(3);
        counts.remove(3);
        counts.add(3 + NEAR as u64);
        assert!(counts.is_empty(3) && !counts.is_empty(3 + NEAR as u64));
        (0..3).for_each(|_| counts.remove(3 + NEAR as u64));
        assert!(counts.is_empty(3 + NEAR as u64) && !counts.is_empty(u64::MAX));
        let has = |counts: &StepCounts, steps| counts.has_any(&steps, |_| true);
        assert!(!has(&counts, 0..=u64::MAX - 1) && has(&counts, u64::MAX..=u64::MAX));
        counts.add(5);
        assert!(!has(&counts, 0..=4) && has(&counts, 5..=5) && !counts.has_any(&(5..=5), |_| false));
        assert!(!has(&counts, RangeInclusive::new(6, 5)), "no step");
    }

    #[test]
    fn many_steps_are_counted_wherever_their_counts_are() {
        let steps = || (0..1000u64).map(|n| n * 1_000_003);
        let mut counts = StepCounts::default();
        (0..2).for_each(|_| steps().for_each(|step| counts.add(step)));
        assert_eq!(counts.far.len(), FAR);
        assert!(steps().all(|step| !counts.is_empty(step) && counts.has_any(&(step..=step), |_| true)));
        // Whatever makes room elsewhere, a step stays where its count is.
        for step in steps().step_by(2).chain(steps().step_by(2)) {
            counts.remove(step);
        }
        steps().for_each(|step| counts.add(step));
        for step in steps() {
            let left = 1 + 2 * u32::from(!steps().step_by(2).any(|even| even == step));
            (0..left).for_each(|_| {
                assert!(!counts.is_empty(step));
                counts.remove(step);
            });
            assert!(counts.is_empty(step));
        }
        assert!(!counts.has_any(&(0..=u64::MAX), |_| true));
    }

    #[test]
    fn many_of_a_step_are_taken_back_wherever_they_are_counted() {
        let mut counts = StepCounts::default();
        (0..100).for_each(|step| counts.add(step));
        (0..100).for_each(|step| (0..3).for_each(|_| counts.add(step)));
        counts.remove(1);
        for step in 0..100 {
            counts.remove_many(step, 2);
            assert!(!counts.is_empty(step), "step {step}");
            counts.remove_many(step, if step == 1 { 1 } else { 2 });
            assert!(counts.is_empty(step), "step {step}");
        }
        assert!(!counts.has_any(&(0..=u64::MAX), |_| true));
    }

    #[test]
    fn what_ranges_of_steps_have_is_taken_wherever_it_is_counted() {
        let mut counts = StepCounts::default();
        (0..1000).for_each(|step| (0..2).for_each(|_| counts.add(step)));
        assert_eq!(counts.take(&RangeInclusive::new(6, 5)), 0, "no step");
        assert_eq!([10..=19, 5..=500, 0..=999].map(|steps| counts.take(&steps)), [20, 972, 1008]);
        assert!(!counts.has_any(&(0..=u64::MAX), |_| true));
    }
}
