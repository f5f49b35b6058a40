//! Steps that were cleaned up, and ranges of steps that were aborted.

use super::aborted_steps::AbortedSteps;
use crate::mutants::{Mutant, is_on};
use crate::wire::Status;
use foldhash::HashMap;
use foldhash::fast::RandomState;
use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;

/// The number of retired steps outside all sequences that are remembered (specification 2.5).
pub(crate) const MAX_RETIRED_STEPS: usize = 4096;

/// Steps of a [`Page`].
const PAGE: u64 = u64::BITS as u64;

/// The retired steps. Outside of sequences they are kept in pages of 64 consecutive ids, so that a
/// step that follows the one before it takes no look-up.
#[derive(Debug)]
pub(crate) struct GoneSteps {
    /// Disjoint, in the order of their bases.
    sequences: Vec<StepRange>,
    /// The page of the step that was retired last. It has all retired steps of the page that are
    /// remembered.
    newest: Page,
    /// The pages that were newest before, by their numbers.
    pages: HashMap<u64, FormerPage>,
    /// The numbers of these pages, in the order in which they ceased to be newest.
    order: VecDeque<u64>,
    /// Ranges of steps that were aborted. Each lies in a sequence.
    aborted: AbortedSteps,
}

/// Retired steps among 64 consecutive ids.
#[derive(Clone, Copy, Debug, Default)]
struct Page {
    /// The ids, divided by 64.
    number: u64,
    /// One bit for each retired step.
    retired: u64,
}

#[derive(Debug, Default)]
struct FormerPage {
    retired: u64,
    /// How often the page is in [`GoneSteps::order`].
    listed: u32,
}

/// The steps of a sequence. The steps below `watermark` are retired, and those in `early`.
#[derive(Debug)]
struct StepRange {
    base: u64,
    watermark: u64,
    early: BTreeSet<u64>,
}

impl Default for GoneSteps {
    fn default() -> Self {
        // Twice the capacity: a hash table that is more than half full reallocates now and then
        // instead of rehashing in place.
        let pages = HashMap::with_capacity_and_hasher(2 * MAX_RETIRED_STEPS + 2, RandomState::default());
        let order = VecDeque::with_capacity(MAX_RETIRED_STEPS);
        GoneSteps {
            sequences: Vec::new(),
            newest: Page::default(),
            pages,
            order,
            aborted: AbortedSteps::default(),
        }
    }
}

impl GoneSteps {
    /// Declares a sequence, whose retired steps are remembered without limit.
    pub fn sequence(&mut self, base: u64) {
        if self.sequences.iter().any(|run| run.base == base) {
            return;
        }
        self.sequences.push(StepRange { base, watermark: base, early: BTreeSet::new() });
        self.sequences.sort_by_key(|run| run.base);
    }

    /// The steps of the sequence `base`; `None` if it was not declared.
    pub fn steps_of(&self, base: u64) -> Option<RangeInclusive<u64>> {
        let at = self.sequences.iter().position(|run| run.base == base)?;
        let next = self.sequences.get(at + 1);
        Some(base..=next.map_or(u64::MAX, |next| next.base - 1))
    }

    /// Aborts steps of a sequence. Returns false if an earlier range includes them.
    pub fn abort(&mut self, steps: &RangeInclusive<u64>, status: &Status) -> bool {
        // Without a sequence `is_over` looks for no range.
        debug_assert!(!self.sequences.is_empty(), "{steps:?} are of no sequence");
        self.aborted.add(steps, status)
    }

    /// The aborted ranges with their statuses.
    pub fn aborted(&self) -> &AbortedSteps {
        &self.aborted
    }

    /// Whether the step is retired, or in an aborted range.
    #[inline(always)] // at each begin of a step
    pub fn is_over(&self, step: u64) -> bool {
        let page = Page::of(step);
        match page.number == self.newest.number && self.sequences.is_empty() {
            true => self.newest.retired & page.retired != 0 && !is_on(Mutant::CleanedStepReturns),
            false => self.is_over_far(step),
        }
    }

    #[cold]
    fn is_over_far(&self, step: u64) -> bool {
        self.contains(step) || self.aborted.status(step).is_some()
    }

    /// Whether the step is retired.
    #[inline]
    pub fn contains(&self, step: u64) -> bool {
        let page = Page::of(step);
        let is_gone = match page.number == self.newest.number && self.sequences.is_empty() {
            true => self.newest.retired & page.retired != 0,
            false => self.contains_far(step),
        };
        is_gone && !is_on(Mutant::CleanedStepReturns)
    }

    #[cold]
    fn contains_far(&self, step: u64) -> bool {
        let page = Page::of(step);
        let retired = match page.number == self.newest.number {
            true => self.newest.retired,
            false => self.pages.get(&page.number).map_or(0, |former| former.retired),
        };
        let run = self.sequences.iter().rfind(|run| run.base <= step);
        retired & page.retired != 0 || run.is_some_and(|run| run.contains(step))
    }

    /// Retires a step. Returns false if the step was over before.
    #[inline]
    pub fn insert(&mut self, step: u64) -> bool {
        let page = Page::of(step);
        if page.number == self.newest.number && self.sequences.is_empty() {
            let before = self.newest.retired;
            self.newest.retired |= page.retired;
            return self.newest.retired != before;
        }
        self.insert_far(step)
    }

    #[cold]
    fn insert_far(&mut self, step: u64) -> bool {
        let was_over = self.is_over(step);
        if !self.contains(step) {
            self.retire(step);
        }
        !was_over
    }

    fn retire(&mut self, step: u64) {
        // A sequence ends at the base of the next one.
        if let Some(run) = self.sequences.iter_mut().rfind(|run| run.base <= step) {
            return run.retire(step);
        }
        let page = Page::of(step);
        if page.number != self.newest.number {
            self.turn_to(page.number);
        }
        self.newest.retired |= page.retired;
    }

    /// Makes another page the newest one. The oldest page is forgotten beyond those that are
    /// remembered.
    #[cold]
    fn turn_to(&mut self, number: u64) {
        let retired = self.pages.get(&number).map_or(0, |former| former.retired);
        let newest = std::mem::replace(&mut self.newest, Page { number, retired });
        if newest.retired != 0 {
            let former = self.pages.entry(newest.number).or_default();
            former.retired |= newest.retired;
            former.listed += 1;
            self.order.push_back(newest.number);
        }
        // With the newest page there are as many as are remembered.
        if self.order.len() == MAX_RETIRED_STEPS
            && let Some(oldest) = self.order.pop_front()
            && let Some(former) = self.pages.get_mut(&oldest)
        {
            former.listed -= 1;
            if former.listed == 0 {
                self.pages.remove(&oldest);
            }
        }
    }

    /// Whether no sequence has steps that were retired before earlier ones.
    #[cfg(test)]
    pub fn has_no_early_steps(&self) -> bool {
        self.sequences.iter().all(|run| run.early.is_empty())
    }

    /// The retired steps that are remembered, as ranges from a first to a last one.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let run = |run: &StepRange| (run.base < run.watermark).then(|| (run.base, run.watermark - 1));
        let mut ranges: Vec<(u64, u64)> = self.sequences.iter().filter_map(run).collect();
        ranges.extend(self.sequences.iter().flat_map(|run| &run.early).map(|step| (*step, *step)));
        let former =
            self.pages.iter().map(|(number, former)| Page { number: *number, retired: former.retired });
        // The newest page has all steps of an earlier page with its number.
        let former = former.filter(|page| page.number != self.newest.number);
        ranges.extend(former.chain([self.newest]).flat_map(Page::ranges));
        ranges.sort_unstable();
        ranges.dedup_by(|next, before| {
            let goes_on = before.1.checked_add(1) == Some(next.0);
            before.1 = if goes_on { next.1 } else { before.1 };
            goes_on
        });
        ranges
    }
}

impl Page {
    /// The page of a step, with the bit of the step.
    fn of(step: u64) -> Page {
        Page { number: step / PAGE, retired: 1 << (step % PAGE) }
    }

    /// The retired steps, as ranges from a first to a last one.
    fn ranges(self) -> impl Iterator<Item = (u64, u64)> {
        let is_retired = move |bit: &u64| self.retired & (1 << bit) != 0;
        let step = move |bit: u64| self.number * PAGE + bit;
        let is_first = move |bit: &u64| is_retired(bit) && (*bit == 0 || !is_retired(&(bit - 1)));
        (0..PAGE).filter(is_first).map(move |first| {
            let len = u64::from((self.retired >> first).trailing_ones());
            (step(first), step(first + len - 1))
        })
    }
}

impl StepRange {
    fn contains(&self, step: u64) -> bool {
        step < self.watermark || self.early.contains(&step)
    }

    fn retire(&mut self, step: u64) {
        if step == self.watermark
            && let Some(next) = step.checked_add(1)
        {
            self.watermark = next;
        } else {
            self.early.insert(step);
        }
        while let Some(next) = self.watermark.checked_add(1)
            && self.early.remove(&self.watermark)
        {
            self.watermark = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn retired(steps: impl IntoIterator<Item = u64>) -> GoneSteps {
        let mut gone = GoneSteps::default();
        steps.into_iter().for_each(|step| assert!(gone.insert(step)));
        gone
    }

    #[test]
    fn retired_steps_are_told_as_ranges() {
        let mut gone = GoneSteps::default();
        gone.sequence(100);
        [1, 2, 3, 7, 63, 64, 100, 101, 105].iter().for_each(|step| assert!(gone.insert(*step)));
        let mut ranges = gone.ranges();
        ranges.sort_unstable();
        assert_eq!(ranges, [(1, 3), (7, 7), (63, 64), (100, 101), (105, 105)]);
    }

    #[test]
    fn a_page_that_is_used_again_is_remembered_longer() {
        let count = MAX_RETIRED_STEPS as u64;
        let others = |from: u64| (from..from + count - 1).map(|n| n * PAGE);
        let mut gone = retired([5].into_iter().chain(others(10)));
        assert!(gone.contains(5));
        gone.insert(6);
        assert!(gone.contains(5) && gone.contains(6), "it comes with the page");
        others(10_000).for_each(|step| assert!(gone.insert(step)));
        assert!(gone.contains(5) && gone.contains(6));
        gone.insert(u64::MAX);
        assert!(!gone.contains(5) && !gone.contains(6));
        assert!(gone.pages.len() < MAX_RETIRED_STEPS && gone.order.len() < MAX_RETIRED_STEPS);
    }

    #[test]
    fn pages_in_turns_take_no_more_memory() {
        let mut gone = GoneSteps::default();
        (0..20_000).for_each(|n| _ = gone.insert((n % 2) * 1000 * PAGE + n % 997 % PAGE));
        assert_eq!(gone.pages.len(), 2);
        assert!(gone.order.len() < MAX_RETIRED_STEPS);
    }

    proptest! {
        #[test]
        fn a_step_is_gone_if_it_was_retired(
            steps in proptest::collection::vec(0..300_u64, 0..100),
            base in 100..250_u64,
        ) {
            let mut gone = GoneSteps::default();
            gone.sequence(base);
            let mut known = std::collections::BTreeSet::new();
            for step in steps {
                prop_assert_eq!(gone.insert(step), known.insert(step));
                prop_assert!((0..300).all(|step| gone.contains(step) == known.contains(&step)));
            }
            let told = gone.ranges().into_iter().flat_map(|(first, last)| first..=last);
            let mut told: Vec<u64> = told.collect();
            told.sort_unstable();
            prop_assert_eq!(told, known.into_iter().collect::<Vec<_>>());
        }
    }
}
