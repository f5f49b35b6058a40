//! Steps that were cleaned up, and ranges of steps that were aborted.

use super::aborted_steps::AbortedSteps;
use crate::mutants::{Mutant, is_on};
use crate::wire::Status;
use foldhash::HashMap;
use foldhash::fast::RandomState;
use std::collections::{BTreeMap, VecDeque};
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
    sequences: Vec<StepRanges>,
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

/// The retired steps of a sequence, as disjoint ranges that do not touch. Usually there is one.
#[derive(Debug)]
struct StepRanges {
    base: u64,
    /// The first and the last step of the range that grew last.
    newest: Option<(u64, u64)>,
    /// The last steps of the other ranges, by their first ones.
    others: BTreeMap<u64, u64>,
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
    /// Declares a sequence, whose retired steps are remembered without limit. Steps that were
    /// retired before are among them.
    pub fn sequence(&mut self, base: u64) {
        let at = self.sequences.partition_point(|run| run.base < base);
        if self.sequences.get(at).is_some_and(|run| run.base == base) {
            return;
        }
        let mut run = match at.checked_sub(1) {
            Some(before) => self.sequences[before].split_off(base),
            None => StepRanges::new(base),
        };
        let end = self.sequences.get(at).map_or(u64::MAX, |next| next.base - 1);
        let of_it = Page::of(base).number..=Page::of(end).number;
        let pages = self.pages().filter(|page| of_it.contains(&page.number));
        let ranges = pages.flat_map(Page::ranges);
        for step in ranges.flat_map(|(first, last)| first.max(base)..=last.min(end)) {
            if !run.contains(step) {
                run.insert(step);
            }
        }
        self.sequences.insert(at, run);
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
        match self.newest_page_has(step) {
            Some(is_retired) => is_retired && !is_on(Mutant::CleanedStepReturns),
            None => self.is_over_elsewhere(step),
        }
    }

    #[inline(never)] // keeps the other way short
    fn is_over_elsewhere(&self, step: u64) -> bool {
        match self.last_sequence_has(step) {
            Some(is_retired) if self.aborted.is_empty() => is_retired && !is_on(Mutant::CleanedStepReturns),
            _ => self.contains(step) || self.aborted.status(step).is_some(),
        }
    }

    /// Whether a step of no sequence is retired, if it is on the newest page.
    #[inline(always)] // as above
    fn newest_page_has(&self, step: u64) -> Option<bool> {
        let is_there = self.sequences.first().is_none_or(|first| step < first.base)
            && Page::of(step).number == self.newest.number;
        is_there.then(|| self.newest.retired & Page::of(step).retired != 0)
    }

    /// Whether a step is retired, if it is of the sequence with the highest base.
    #[inline]
    fn last_sequence_has(&self, step: u64) -> Option<bool> {
        let last = self.sequences.last().filter(|last| last.base <= step)?;
        Some(last.contains(step))
    }

    /// Whether the step is retired.
    #[inline(never)] // as above
    pub fn contains(&self, step: u64) -> bool {
        let near = self.newest_page_has(step).or_else(|| self.last_sequence_has(step));
        near.unwrap_or_else(|| self.contains_far(step)) && !is_on(Mutant::CleanedStepReturns)
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
        if let Some(is_retired) = self.newest_page_has(step) {
            self.newest.retired |= Page::of(step).retired;
            return !is_retired;
        }
        match self.sequences.last_mut() {
            Some(last) if self.aborted.is_empty() && last.is_next(step) => {
                last.newest = last.newest.map(|(first, _)| (first, step));
                true
            }
            _ => self.insert_far(step),
        }
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
            return run.insert(step);
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

    /// Whether the retired steps of each sequence are consecutive.
    #[cfg(test)]
    pub fn are_consecutive(&self) -> bool {
        self.sequences.iter().all(|run| run.others.is_empty())
    }

    /// The retired steps that are remembered, as ranges from a first to a last one.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<_> = self.sequences.iter().flat_map(StepRanges::all).collect();
        ranges.extend(self.pages().flat_map(Page::ranges));
        ranges.sort_unstable();
        ranges.dedup_by(|next, before| {
            // A step that was retired before its sequence was declared is on a page, too.
            let goes_on = next.0 <= before.1.saturating_add(1);
            before.1 = if goes_on { before.1.max(next.1) } else { before.1 };
            goes_on
        });
        ranges
    }

    /// The pages, in no order. The newest one has all steps of an earlier page with its number.
    fn pages(&self) -> impl Iterator<Item = Page> {
        let page = |(number, former): (&u64, &FormerPage)| Page { number: *number, retired: former.retired };
        let newest = self.newest;
        self.pages.iter().map(page).filter(move |page| page.number != newest.number).chain([newest])
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

impl StepRanges {
    fn new(base: u64) -> Self {
        StepRanges { base, newest: None, others: BTreeMap::new() }
    }

    #[inline]
    fn contains(&self, step: u64) -> bool {
        self.newest.is_some_and(|(first, last)| (first..=last).contains(&step))
            || (!self.others.is_empty() && self.others_contain(step))
    }

    #[cold]
    fn others_contain(&self, step: u64) -> bool {
        self.others.range(..=step).next_back().is_some_and(|(_, last)| step <= *last)
    }

    /// Whether the step is the next one of the only range.
    #[inline]
    fn is_next(&self, step: u64) -> bool {
        self.newest.is_some_and(|(_, last)| last.checked_add(1) == Some(step)) && self.others.is_empty()
    }

    /// Adds a step that is in no range.
    fn insert(&mut self, step: u64) {
        self.others.extend(self.newest.take());
        let before = self.others.range(..step).next_back().map(|(first, last)| (*first, *last));
        let before = before.filter(|(_, last)| last + 1 == step);
        let first = before.map_or(step, |(first, _)| first);
        let behind = step.checked_add(1).and_then(|next| self.others.remove(&next));
        self.others.remove(&first);
        self.newest = Some((first, behind.unwrap_or(step)));
    }

    /// Takes out the steps from `base` on.
    fn split_off(&mut self, base: u64) -> Self {
        self.others.extend(self.newest.take());
        let mut others = self.others.split_off(&base);
        if let Some(mut last) = self.others.last_entry().filter(|last| *last.get() >= base) {
            others.insert(base, last.insert(base - 1));
        }
        StepRanges { base, newest: None, others }
    }

    /// The ranges, in no order.
    fn all(&self) -> impl Iterator<Item = (u64, u64)> {
        self.others.iter().map(|(first, last)| (*first, *last)).chain(self.newest)
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

    #[test]
    fn a_sequence_that_goes_on_at_a_later_step_takes_one_range() {
        let mut gone = GoneSteps::default();
        gone.sequence(1000);
        (5000..9000).for_each(|step| assert!(gone.insert(step)));
        assert!(gone.are_consecutive());
        assert!(!gone.contains(4999) && gone.contains(5000) && !gone.contains(9000));
        assert!([u64::MAX, 4999, u64::MAX - 1].into_iter().all(|step| gone.insert(step)));
        assert!(!gone.insert(u64::MAX));
        assert_eq!(gone.ranges(), [(4999, 8999), (u64::MAX - 1, u64::MAX)]);
    }

    proptest! {
        #[test]
        fn a_step_is_gone_if_it_was_retired(
            steps in proptest::collection::vec(0..300_u64, 0..100),
            bases in proptest::collection::vec((0..250_u64, 0..100_usize), 0..4),
        ) {
            let mut gone = GoneSteps::default();
            let mut known = std::collections::BTreeSet::new();
            for (at, step) in steps.into_iter().enumerate() {
                // Some sequences are declared when steps of theirs are gone.
                bases.iter().filter(|(_, when)| *when == at).for_each(|(base, _)| gone.sequence(*base));
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
