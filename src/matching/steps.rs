//! The state of each step: begun, aborted, or retired.

use super::Error;
use crate::mutants::{Mutant, is_on};
use crate::wire::Status;
use foldhash::fast::RandomState;
use foldhash::{HashMap, HashSet};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// The initial capacity, in live steps.
const LIVE: usize = 64;
/// The number of retired steps outside all sequences that are remembered (specification 2.5).
pub(crate) const MAX_RETIRED_STEPS: usize = 4096;

/// The number of live steps at which a missing cleanup is likely.
pub(crate) const MANY_STEPS: usize = 1024;

/// The state of every step. The tables have their full capacity from the start, as each step passes
/// through them.
#[derive(Debug)]
pub(crate) struct Steps {
    live: HashMap<u64, Live>,
    /// The live step that has begun last, if it is still live.
    newest: Option<u64>,
    sequences: Vec<StepRange>,
    retired: HashSet<u64>,
    order: VecDeque<u64>,
}

#[derive(Debug)]
struct Live {
    worker: Arc<str>,
    aborted: Option<Status>,
}

/// The steps of a sequence. The steps below `watermark` are retired, and those in `early`.
#[derive(Debug)]
struct StepRange {
    base: u64,
    watermark: u64,
    early: BTreeSet<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StepState {
    /// The step has not begun here.
    NotBegun,
    /// The step has begun and was neither aborted nor cleaned up.
    Live,
    /// The step was aborted with this status.
    Aborted(Status),
    /// The step was cleaned up.
    Gone,
}

/// The reason why a step can't begin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BeginError {
    Gone,
    Taken { owner: Arc<str> },
}

impl Default for Steps {
    fn default() -> Self {
        // Twice the capacity: a hash table that is more than half full reallocates now and then
        // instead of rehashing in place.
        let retired = HashSet::with_capacity_and_hasher(2 * MAX_RETIRED_STEPS + 2, RandomState::default());
        let order = VecDeque::with_capacity(MAX_RETIRED_STEPS);
        let live = HashMap::with_capacity_and_hasher(LIVE, RandomState::default());
        Steps { live, newest: None, sequences: Vec::new(), retired, order }
    }
}

impl Steps {
    /// Begins a step for `worker`. Returns false if this worker has begun it already.
    pub fn begin(&mut self, step: u64, worker: &Arc<str>) -> Result<bool, BeginError> {
        if let Some(live) = self.live.get(&step) {
            if live.worker == *worker {
                return Ok(false);
            }
            return Err(BeginError::Taken { owner: live.worker.clone() });
        }
        if self.is_gone(step) {
            return Err(BeginError::Gone);
        }
        self.live.insert(step, Live { worker: worker.clone(), aborted: None });
        self.newest = Some(step);
        Ok(true)
    }

    pub fn state(&self, step: u64) -> StepState {
        match self.live.get(&step) {
            Some(Live { aborted: Some(status), .. }) => StepState::Aborted(status.clone()),
            Some(_) => StepState::Live,
            None if self.is_gone(step) => StepState::Gone,
            None => StepState::NotBegun,
        }
    }

    /// Whether the step is [`StepState::Live`]: one lookup at most.
    #[inline]
    pub fn is_live(&self, step: u64) -> bool {
        self.newest == Some(step) || self.is_live_of_many(step)
    }

    fn is_live_of_many(&self, step: u64) -> bool {
        self.live.get(&step).is_some_and(|live| live.aborted.is_none())
    }

    /// Aborts a step that has begun. Returns false if the step is not live.
    pub fn abort(&mut self, step: u64, status: Status) -> bool {
        match self.live.get_mut(&step) {
            Some(live) if live.aborted.is_none() => {
                live.aborted = Some(status);
                self.newest = self.newest.filter(|newest| *newest != step);
                true
            }
            _ => false,
        }
    }

    /// Retires a step. Returns false if the step was retired before.
    pub fn cleanup(&mut self, step: u64) -> bool {
        if self.is_gone(step) {
            return false;
        }
        self.live.remove(&step);
        self.newest = self.newest.filter(|newest| *newest != step);
        match self.range_of(step) {
            Some(run) => run.retire(step),
            None => self.retire(step),
        }
        true
    }

    /// Declares a sequence, whose retired steps are remembered without limit.
    pub fn sequence(&mut self, base: u64) {
        if self.sequences.iter().any(|run| run.base == base) {
            return;
        }
        self.sequences.push(StepRange { base, watermark: base, early: BTreeSet::new() });
        self.sequences.sort_by_key(|run| run.base);
    }

    /// The first step of the sequence `base` that is not retired, and the base of the next
    /// sequence, or 2^64-1.
    pub fn open(&self, base: u64) -> (u64, u64) {
        let after = self.sequences.partition_point(|run| run.base < base);
        let first =
            self.sequences.get(after).filter(|run| run.base == base).map_or(base, |run| run.watermark);
        let next = self.sequences.iter().map(|run| run.base).find(|other| *other > base);
        (first, next.unwrap_or(u64::MAX))
    }

    /// The last live step of the sequence `base`.
    pub fn last_begun(&self, base: u64) -> Option<u64> {
        let (_, end) = self.open(base);
        self.live().filter(|step| (base..end).contains(step)).max()
    }

    /// The number of live steps, aborted ones included.
    pub fn live_count(&self) -> usize {
        self.live.len()
    }

    /// Whether a warning about `live` steps is due: at 1,024 and at each doubling.
    pub fn is_warning_due(live: usize) -> bool {
        live >= MANY_STEPS && live.is_power_of_two()
    }

    /// The live steps, in no order, aborted ones included.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        self.live.keys().copied()
    }

    /// The retired steps that are remembered, as ranges from a first to a last one.
    pub fn retired(&self) -> Vec<(u64, u64)> {
        let run = |run: &StepRange| (run.base < run.watermark).then(|| (run.base, run.watermark - 1));
        let mut ranges: Vec<(u64, u64)> = self.sequences.iter().filter_map(run).collect();
        let early = self.sequences.iter().flat_map(|run| &run.early);
        let mut alone: Vec<u64> = self.retired.iter().chain(early).copied().collect();
        alone.sort_unstable();
        for step in alone {
            match ranges.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(step) => *last = step,
                _ => ranges.push((step, step)),
            }
        }
        ranges
    }

    /// The aborted steps that were not cleaned up, with their statuses.
    pub fn aborted(&self) -> impl Iterator<Item = (u64, &Status)> {
        self.live.iter().filter_map(|(step, live)| Some((*step, live.aborted.as_ref()?)))
    }

    fn is_gone(&self, step: u64) -> bool {
        if is_on(Mutant::CleanedStepReturns) {
            return false;
        }
        let run = self.sequences.iter().rfind(|run| run.base <= step);
        run.is_some_and(|run| step < run.watermark || run.early.contains(&step))
            || self.retired.contains(&step)
    }

    /// The sequence that holds `step`. A sequence ends at the base of the next one.
    fn range_of(&mut self, step: u64) -> Option<&mut StepRange> {
        self.sequences.iter_mut().rfind(|run| run.base <= step)
    }

    fn retire(&mut self, step: u64) {
        if self.order.len() == MAX_RETIRED_STEPS
            && let Some(oldest) = self.order.pop_front()
        {
            self.retired.remove(&oldest);
        }
        self.order.push_back(step);
        self.retired.insert(step);
    }
}

impl StepRange {
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

/// The error of a call on a step that is not live, or `Ok`.
pub(crate) fn check_live(steps: &Steps, step: u64) -> Result<(), Error> {
    if steps.is_live(step) {
        return Ok(());
    }
    match steps.state(step) {
        StepState::Live | StepState::NotBegun => Ok(()),
        StepState::Aborted(status) => Err(Error::Aborted { step: step.into(), status }),
        StepState::Gone => Err(Error::StepGone { step: step.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Code;

    #[test]
    fn retired_steps_are_told_as_ranges() {
        let mut steps = Steps::default();
        steps.sequence(100);
        [1, 2, 3, 7, 100, 101, 105].iter().for_each(|step| assert!(steps.cleanup(*step)));
        let mut ranges = steps.retired();
        ranges.sort_unstable();
        assert_eq!(ranges, [(1, 3), (7, 7), (100, 101), (105, 105)]);
    }

    fn worker(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn a_step_belongs_to_one_worker() {
        let mut steps = Steps::default();
        assert_eq!(steps.begin(1, &worker("a")), Ok(true));
        assert_eq!(steps.begin(1, &worker("a")), Ok(false));
        assert_eq!(steps.begin(1, &worker("b")), Err(BeginError::Taken { owner: worker("a") }));
    }

    #[test]
    fn a_warning_is_due_at_1024_live_steps_and_at_each_doubling() {
        let due: Vec<_> = (0..5000).filter(|live| Steps::is_warning_due(*live)).collect();
        assert_eq!(due, [1024, 2048, 4096]);
    }

    #[test]
    fn the_first_abort_wins() {
        let mut steps = Steps::default();
        let (first, second) = (Status::new(Code::Internal, "1"), Status::new(Code::Internal, "2"));
        assert!(!steps.abort(1, first.clone()), "not begun");
        steps.begin(1, &worker("a")).expect("new");
        assert!(steps.abort(1, first.clone()) && !steps.abort(1, second));
        assert_eq!(steps.state(1), StepState::Aborted(first));
    }

    #[test]
    fn a_cleaned_step_stays_gone_for_4096_more() {
        let mut steps = Steps::default();
        steps.begin(0, &worker("a")).expect("new");
        assert!(steps.cleanup(0) && !steps.cleanup(0));
        for step in 1..4096 {
            steps.cleanup(step * 7919);
        }
        assert_eq!(steps.state(0), StepState::Gone);
        assert_eq!(steps.begin(0, &worker("a")), Err(BeginError::Gone));
        steps.cleanup(u64::MAX);
        assert_eq!(steps.state(0), StepState::NotBegun, "the oldest of 4,097 is forgotten");
    }

    #[test]
    fn a_sequence_remembers_all_its_steps() {
        let mut steps = Steps::default();
        steps.sequence(1000);
        for step in 1000..20_000 {
            steps.begin(step, &worker("a")).expect("new");
            steps.cleanup(step);
        }
        assert_eq!(steps.state(1000), StepState::Gone);
        assert_eq!(steps.sequences[0].early.len(), 0);
        assert_eq!((steps.state(20_000), steps.state(999)), (StepState::NotBegun, StepState::NotBegun));
    }

    #[test]
    fn steps_of_a_sequence_may_end_out_of_order() {
        let mut steps = Steps::default();
        steps.sequence(10);
        steps.cleanup(12);
        assert_eq!((steps.state(10), steps.state(12)), (StepState::NotBegun, StepState::Gone));
        steps.cleanup(10);
        steps.cleanup(11);
        assert_eq!(steps.sequences[0].watermark, 13);
    }

    #[test]
    fn the_open_part_of_a_sequence_goes_from_its_watermark_to_the_next_base() {
        let mut steps = Steps::default();
        steps.sequence(100);
        assert_eq!((steps.open(100), steps.last_begun(100)), ((100, u64::MAX), None));
        steps.sequence(200);
        for step in [99, 100, 104, 102, 200] {
            steps.begin(step, &worker("a")).expect("new");
        }
        steps.cleanup(100);
        steps.cleanup(101);
        assert_eq!((steps.open(100), steps.last_begun(100)), ((102, 200), Some(104)));
        assert_eq!(steps.open(150), (150, 200), "not a base");
    }

    #[test]
    fn a_sequence_ends_where_the_next_begins() {
        let mut steps = Steps::default();
        steps.sequence(100);
        steps.sequence(0);
        steps.cleanup(100);
        assert_eq!((steps.state(99), steps.state(100)), (StepState::NotBegun, StepState::Gone));
    }
}
