//! Steps that have ended here, as the owner of a poller knows them.

use crate::matching::Error;
use crate::matching::gone_steps::GoneSteps;
use crate::wire::Status;
use foldhash::HashMap;
use std::ops::RangeInclusive;

/// Steps that are found going on without a search, if their ids are consecutive.
const NEAR: usize = 64;

/// Aborted and retired steps. A step that has not begun here may begin, so it counts as going on.
pub(super) struct EndedSteps {
    /// Steps that were aborted and not cleaned up.
    aborted: HashMap<u64, Status>,
    gone: GoneSteps,
    /// Steps that were found going on, each at the lowest bits of its id. A place that is unused
    /// has an id with other bits.
    known: [u64; NEAR],
}

/// Why a step has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepEnd<'a> {
    Aborted(&'a Status),
    CleanedUp,
}

impl StepEnd<'_> {
    /// The error of calls on the step.
    pub fn error(self, step: u64) -> Error {
        match self {
            StepEnd::Aborted(status) => Error::Aborted { step: step.into(), status: status.clone() },
            StepEnd::CleanedUp => Error::StepGone { step: step.into() },
        }
    }
}

impl Default for EndedSteps {
    fn default() -> Self {
        let known = std::array::from_fn(unused);
        EndedSteps { aborted: HashMap::default(), gone: GoneSteps::default(), known }
    }
}

/// No step of this place.
fn unused(place: usize) -> u64 {
    place as u64 + 1
}

impl EndedSteps {
    /// Whether the step has not ended: one comparison, if the step was asked for lately.
    #[inline]
    pub fn goes_on(&mut self, step: u64) -> bool {
        self.known[step as usize % NEAR] == step || self.examine(step)
    }

    #[cold]
    fn examine(&mut self, step: u64) -> bool {
        let goes_on = self.end_of(step).is_none();
        if goes_on {
            self.known[step as usize % NEAR] = step;
        }
        goes_on
    }

    /// Why the step has ended, if it has.
    pub fn end_of(&self, step: u64) -> Option<StepEnd<'_>> {
        match self.aborted.get(&step) {
            Some(status) => Some(StepEnd::Aborted(status)),
            None if self.gone.contains(step) => Some(StepEnd::CleanedUp),
            None => self.gone.aborted().status(step).map(StepEnd::Aborted),
        }
    }

    /// Aborts one step, or a range. Returns false if all of them have ended.
    pub fn abort(&mut self, steps: &RangeInclusive<u64>, status: &Status) -> bool {
        if steps.start() != steps.end() {
            self.known = std::array::from_fn(unused);
            return self.gone.abort(steps, status);
        }
        let step = *steps.start();
        if self.end_of(step).is_some() {
            return false;
        }
        self.forget_known(step);
        self.aborted.insert(step, status.clone());
        true
    }

    /// Retires a step. Returns false if the step had ended.
    #[inline(always)] // on the short path
    pub fn cleanup(&mut self, step: u64) -> bool {
        if !self.aborted.is_empty() && self.aborted.remove(&step).is_some() {
            self.gone.insert(step);
            return false;
        }
        self.forget_known(step);
        self.gone.insert(step)
    }

    #[inline]
    fn forget_known(&mut self, step: u64) {
        let place = step as usize % NEAR;
        if self.known[place] == step {
            self.known[place] = unused(place);
        }
    }

    /// See [`GoneSteps::sequence`].
    pub fn sequence(&mut self, base: u64) {
        self.gone.sequence(base);
    }

    /// See [`GoneSteps::ranges`].
    pub fn retired(&self) -> Vec<(u64, u64)> {
        self.gone.ranges()
    }

    /// The aborted steps that were not cleaned up, and the aborted ranges, with their statuses.
    pub fn aborted(&self) -> impl Iterator<Item = (RangeInclusive<u64>, &Status)> {
        let mut single: Vec<_> = self.aborted.iter().map(|(step, status)| (*step..=*step, status)).collect();
        // The order of the hashes would make runs differ.
        single.sort_unstable_by_key(|(steps, _)| *steps.start());
        single.into_iter().chain(self.gone.aborted().iter().map(|(steps, status)| (steps.clone(), status)))
    }
}

/// Ranges of steps of which the peers are told together, at most.
const MAX_RANGES: usize = 8;
/// Steps of which the peers are told together, at most. A process that polls tells them earlier.
const MAX_UNTOLD: u32 = 64;

/// Steps that were cleaned up, of which the peers have not been told.
#[derive(Debug, Default)]
pub(super) struct UntoldSteps {
    /// The first and the last step of each range.
    ranges: [(u64, u64); MAX_RANGES],
    /// The number of ranges.
    len: usize,
    /// The number of steps.
    steps: u32,
}

impl UntoldSteps {
    /// Adds a step. Returns whether the peers are to be told now.
    #[inline]
    pub fn add(&mut self, step: u64) -> bool {
        let ranges = self.ranges[..self.len].iter_mut();
        match ranges.rev().find(|(_, last)| last.checked_add(1) == Some(step)) {
            Some((_, last)) => *last = step,
            None => {
                self.ranges[self.len] = (step, step);
                self.len += 1;
            }
        }
        self.steps += 1;
        self.steps == MAX_UNTOLD || self.len == MAX_RANGES
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ranges, each as its first and its last step.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.ranges[..self.len].iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Code;

    #[test]
    fn a_step_goes_on_until_it_ends_and_never_again() {
        let mut ended = EndedSteps::default();
        let steps = [0, 1, NEAR as u64, NEAR as u64 + 1, u64::MAX];
        assert!(steps.iter().chain(&steps).all(|step| ended.goes_on(*step)));
        assert!(ended.cleanup(0) && !ended.cleanup(0));
        assert!(!ended.goes_on(0) && steps[1..].iter().all(|step| ended.goes_on(*step)));
        let status = Status::new(Code::Internal, "1");
        assert!(ended.abort(&(1..=1), &status));
        assert!(!ended.abort(&(1..=1), &Status::new(Code::Internal, "2")), "the first abort wins");
        assert!(!ended.abort(&(0..=0), &status), "it is gone");
        assert_eq!(
            (ended.end_of(0), ended.end_of(1)),
            (Some(StepEnd::CleanedUp), Some(StepEnd::Aborted(&status)))
        );
        assert_eq!(ended.aborted().collect::<Vec<_>>(), [(1..=1, &status)]);
        assert!(!ended.cleanup(1), "it had ended");
        assert_eq!((ended.end_of(1), ended.aborted().count()), (Some(StepEnd::CleanedUp), 0));
        assert_eq!(ended.retired(), [(0, 1)]);
        assert!(!ended.goes_on(1) && steps[2..].iter().all(|step| ended.goes_on(*step)));
    }

    #[test]
    fn an_aborted_range_has_each_of_its_steps_whether_it_was_asked_for_or_not() {
        let mut ended = EndedSteps::default();
        let [early, late] = ["early", "late"].map(|text| Status::new(Code::Internal, text));
        ended.sequence(10);
        assert!((5..20).all(|step| ended.goes_on(step)));
        assert!(ended.cleanup(12) && ended.abort(&(11..=11), &early));
        assert!(ended.abort(&(10..=u64::MAX), &late));
        assert!(!ended.abort(&(13..=u64::MAX), &early), "all of them have ended");
        assert!((5..10).all(|step| ended.goes_on(step)) && (10..20).all(|step| !ended.goes_on(step)));
        assert_eq!(ended.end_of(10), Some(StepEnd::Aborted(&late)));
        assert_eq!(ended.end_of(11), Some(StepEnd::Aborted(&early)), "the first abort wins");
        assert_eq!(ended.end_of(12), Some(StepEnd::CleanedUp));
        assert!(!ended.cleanup(u64::MAX) && !ended.cleanup(11), "they had ended");
        assert_eq!(ended.end_of(u64::MAX), Some(StepEnd::CleanedUp));
        assert_eq!(ended.aborted().collect::<Vec<_>>(), [(10..=u64::MAX, &late)]);
    }

    #[test]
    fn untold_steps_are_told_in_ranges_before_they_are_many() {
        let told = |steps: &mut dyn Iterator<Item = u64>| {
            let mut untold = UntoldSteps::default();
            let count = 1 + steps.take_while(|step| !untold.add(*step)).count();
            (count, untold.ranges().collect::<Vec<_>>())
        };
        assert_eq!(told(&mut (5..)), (MAX_UNTOLD as usize, vec![(5, 4 + u64::from(MAX_UNTOLD))]));
        let alone: Vec<_> = (0..MAX_RANGES as u64).map(|n| (10 * n, 10 * n)).collect();
        assert_eq!(told(&mut (0..).map(|n| 10 * n)), (MAX_RANGES, alone));
        let (count, ranges) = told(&mut (0..).flat_map(|n| [n, u64::MAX - 100 + n]));
        assert_eq!((count, ranges), (64, vec![(0, 31), (u64::MAX - 100, u64::MAX - 69)]));
    }
}
