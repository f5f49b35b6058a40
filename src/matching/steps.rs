//! The state of each step: begun, aborted, or retired.

use super::Error;
use super::gone_steps::GoneSteps;
use crate::wire::Status;
use foldhash::HashMap;
use foldhash::fast::RandomState;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Live steps that are found without a search, if their ids are consecutive.
const NEAR: usize = 64;
/// Other live steps for which memory is allocated at the start.
const FAR: usize = 64;

/// Aborted steps that were cleaned up whose handles still see their statuses.
pub(crate) const MAX_ABORTED: usize = 256;

/// The number of live steps at which a missing cleanup is likely.
pub(crate) const MANY_STEPS: usize = 1024;

/// The state of every step. The tables have their capacity from the start, as each step passes
/// through them.
#[derive(Debug)]
pub(crate) struct Steps {
    /// A live step for each value of the lowest bits of its id, or its worker from before.
    near: [LiveStep; NEAR],
    /// Live steps whose place another step had.
    far: HashMap<u64, LiveStep>,
    /// The number of steps in `near`.
    near_count: usize,
    /// The number of steps that have begun.
    begun: u64,
    gone: GoneSteps,
    /// The numbers and statuses of aborted steps that were cleaned up, oldest first.
    aborted: VecDeque<(u64, Status)>,
}

/// A live step, or a place for one.
#[derive(Clone, Debug)]
struct LiveStep {
    id: u64,
    /// The number of the step, or 0 if the place is free.
    number: u64,
    worker: Arc<str>,
    aborted: Option<Status>,
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

/// The outcome of [`Steps::begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    /// The number of the step among all that have begun here, from 1 on. No other step has it.
    pub number: u64,
    /// Whether the step has begun now, and is live. Otherwise its worker had begun it, or it is in
    /// an aborted range.
    pub is_new: bool,
}

/// The reason why a step can't begin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BeginError {
    Gone,
    Taken { owner: Arc<str> },
}

impl Default for Steps {
    fn default() -> Self {
        let free = LiveStep { id: 0, number: 0, worker: Arc::from(""), aborted: None };
        Steps {
            near: std::array::from_fn(|_| free.clone()),
            far: HashMap::with_capacity_and_hasher(FAR, RandomState::default()),
            near_count: 0,
            begun: 0,
            gone: GoneSteps::default(),
            aborted: VecDeque::new(),
        }
    }
}

impl LiveStep {
    #[inline]
    fn is(&self, step: u64) -> bool {
        self.number != 0 && self.id == step
    }

    fn check_worker(&self, worker: &Arc<str>) -> Result<Begun, BeginError> {
        match self.worker == *worker {
            true => Ok(Begun { number: self.number, is_new: false }),
            false => Err(BeginError::Taken { owner: self.worker.clone() }),
        }
    }
}

impl Steps {
    /// Begins a step for `worker`, unless this worker has begun it already.
    #[inline]
    pub fn begin(&mut self, step: u64, worker: &Arc<str>) -> Result<Begun, BeginError> {
        if let Some(live) = self.find(step) {
            return live.check_worker(worker);
        }
        if self.gone.is_over(step) {
            return self.begin_over(step, worker);
        }
        Ok(self.begin_new(step, worker))
    }

    /// Begins a step that was aborted before with a range, unless it is retired.
    #[cold]
    fn begin_over(&mut self, step: u64, worker: &Arc<str>) -> Result<Begun, BeginError> {
        let Some(status) = self.gone.aborted().status(step).filter(|_| !self.gone.contains(step)).cloned()
        else {
            return Err(BeginError::Gone);
        };
        let Begun { number, .. } = self.begin_new(step, worker);
        self.abort(step, status);
        Ok(Begun { number, is_new: false })
    }

    #[inline(always)] // else each begin is a call more
    fn begin_new(&mut self, step: u64, worker: &Arc<str>) -> Begun {
        self.begun += 1;
        let number = self.begun;
        let near = &mut self.near[step as usize % NEAR];
        if near.number == 0 {
            (near.id, near.number) = (step, number);
            // The worker of the step before is usually the same, whose name costs no count then.
            if !Arc::ptr_eq(&near.worker, worker) {
                near.worker = worker.clone();
            }
            self.near_count += 1;
        } else {
            self.far.insert(step, LiveStep { id: step, number, worker: worker.clone(), aborted: None });
        }
        Begun { number, is_new: true }
    }

    #[inline]
    fn find(&self, step: u64) -> Option<&LiveStep> {
        let near = &self.near[step as usize % NEAR];
        if near.is(step) { Some(near) } else { self.far.get(&step) }
    }

    pub fn state(&self, step: u64) -> StepState {
        match self.find(step) {
            Some(LiveStep { aborted: Some(status), .. }) => StepState::Aborted(status.clone()),
            Some(_) => StepState::Live,
            None if self.gone.contains(step) => StepState::Gone,
            None => match self.gone.aborted().status(step) {
                Some(status) => StepState::Aborted(status.clone()),
                None => StepState::NotBegun,
            },
        }
    }

    /// Whether the step is [`StepState::Live`]: one lookup at most.
    #[inline]
    pub fn is_live(&self, step: u64) -> bool {
        self.find(step).is_some_and(|live| live.aborted.is_none())
    }

    /// Aborts a step that has begun. Returns its number, or `None` if the step is not live.
    pub fn abort(&mut self, step: u64, status: Status) -> Option<u64> {
        let near = &mut self.near[step as usize % NEAR];
        let live = if near.is(step) { near } else { self.far.get_mut(&step)? };
        if live.aborted.is_some() {
            return None;
        }
        live.aborted = Some(status);
        Some(live.number)
    }

    /// Aborts steps, whether they have begun or not. A later begin of one of them begins an aborted
    /// step. Returns the ids and numbers of those that were live.
    pub fn abort_all(&mut self, steps: &RangeInclusive<u64>, status: &Status) -> Vec<(u64, u64)> {
        self.gone.abort(steps, status);
        let mut begun: Vec<_> = self.live().filter(|step| steps.contains(step)).collect();
        begun.sort_unstable();
        let aborted = begun.into_iter().map(|step| Some((step, self.abort(step, status.clone())?)));
        aborted.flatten().collect()
    }

    /// Retires a step. Returns its number, or 0 if the step has not begun here. Returns `None` if
    /// the step was retired before.
    #[inline]
    pub fn cleanup(&mut self, step: u64) -> Option<u64> {
        let near = &mut self.near[step as usize % NEAR];
        let number = if near.is(step) {
            self.near_count -= 1;
            let number = std::mem::take(&mut near.number);
            if near.aborted.is_some() {
                let aborted = near.aborted.take();
                self.note_aborted(number, aborted);
            }
            number
        } else {
            self.cleanup_far(step)?
        };
        self.gone.insert(step);
        Some(number)
    }

    #[cold]
    fn cleanup_far(&mut self, step: u64) -> Option<u64> {
        match self.far.remove(&step) {
            Some(LiveStep { number, aborted, .. }) => {
                self.note_aborted(number, aborted);
                Some(number)
            }
            None => (!self.gone.contains(step)).then_some(0),
        }
    }

    #[cold]
    fn note_aborted(&mut self, number: u64, aborted: Option<Status>) {
        let Some(status) = aborted else { return };
        if self.aborted.len() == MAX_ABORTED {
            self.aborted.pop_front();
        }
        self.aborted.push_back((number, status));
    }

    /// The state of a step with the number that it has begun under. A step that was aborted stays
    /// so when it is cleaned up, until [`MAX_ABORTED`] others were.
    pub fn state_of(&self, step: u64, number: u64) -> StepState {
        if self.find(step).is_some_and(|live| live.number == number) {
            return self.state(step);
        }
        let aborted = self.aborted.iter().find(|(aborted, _)| *aborted == number);
        aborted.map_or(StepState::Gone, |(_, status)| StepState::Aborted(status.clone()))
    }

    /// See [`GoneSteps::sequence`].
    pub fn sequence(&mut self, base: u64) {
        self.gone.sequence(base);
    }

    /// See [`GoneSteps::steps_of`].
    pub fn steps_of(&self, base: u64) -> Option<RangeInclusive<u64>> {
        self.gone.steps_of(base)
    }

    /// The number of live steps, aborted ones included.
    #[inline]
    pub fn live_count(&self) -> usize {
        self.near_count + self.far.len()
    }

    /// Whether a warning about the live steps may be due.
    #[inline]
    pub fn may_be_many(&self) -> bool {
        self.far.len() >= MANY_STEPS - NEAR
    }

    /// Whether a warning about `live` steps is due: at 1,024 and at each doubling.
    pub fn is_warning_due(live: usize) -> bool {
        live >= MANY_STEPS && live.is_power_of_two()
    }

    /// The live steps, in no order, aborted ones included.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        let near = self.near.iter().filter(|live| live.number != 0);
        near.chain(self.far.values()).map(|live| live.id)
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

    fn worker(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn a_step_belongs_to_one_worker() {
        let mut steps = Steps::default();
        for step in [1, 1 + NEAR as u64] {
            let number = 1 + step / NEAR as u64;
            assert_eq!(steps.begin(step, &worker("a")), Ok(Begun { number, is_new: true }));
            assert_eq!(steps.begin(step, &worker("a")), Ok(Begun { number, is_new: false }));
            assert_eq!(steps.begin(step, &worker("b")), Err(BeginError::Taken { owner: worker("a") }));
        }
        assert!(steps.cleanup(1).is_some());
        let next = 1 + 2 * NEAR as u64;
        assert_eq!(steps.begin(next, &worker("b")), Ok(Begun { number: 3, is_new: true }));
        assert_eq!(steps.begin(next, &worker("a")), Err(BeginError::Taken { owner: worker("b") }));
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
        assert_eq!(steps.abort(1, first.clone()), None, "not begun");
        steps.begin(1, &worker("a")).expect("new");
        assert_eq!((steps.abort(1, first.clone()), steps.abort(1, second)), (Some(1), None));
        assert_eq!(steps.state(1), StepState::Aborted(first.clone()));
        assert_eq!((steps.cleanup(1), steps.cleanup(1), steps.state(1)), (Some(1), None, StepState::Gone));
        assert_eq!(steps.state_of(1, 1), StepState::Aborted(first));
    }

    #[test]
    fn a_range_aborts_its_live_steps_and_each_later_one_as_it_begins() {
        let mut steps = Steps::default();
        steps.sequence(100);
        let [early, late] = ["early", "late"].map(|text| Status::new(Code::Internal, text));
        for step in [99, 100, 101, 103, 101 + NEAR as u64] {
            steps.begin(step, &worker("a")).expect("new");
        }
        steps.abort(103, early.clone());
        steps.cleanup(102);
        assert_eq!(steps.steps_of(100), Some(100..=u64::MAX));
        let aborted = steps.abort_all(&(101..=u64::MAX), &late);
        assert_eq!(aborted, [(101, 3), (101 + NEAR as u64, 5)], "those that were live, in their order");
        assert!(steps.is_live(99) && steps.is_live(100));
        let aborted = |steps: &Steps, step| steps.state(step) == StepState::Aborted(late.clone());
        assert!([101, 104, 101 + NEAR as u64, u64::MAX].into_iter().all(|step| aborted(&steps, step)));
        assert_eq!((steps.state(102), steps.state(103)), (StepState::Gone, StepState::Aborted(early)));
        let begun = steps.begin(104, &worker("a"));
        assert_eq!(begun, Ok(Begun { number: 6, is_new: false }));
        let again = steps.begin(104, &worker("a"));
        assert_eq!(again, Ok(Begun { number: 6, is_new: false }));
        assert!(!steps.is_live(104) && aborted(&steps, 104));
        assert_eq!(steps.cleanup(104), Some(6));
        assert_eq!((steps.state(104), steps.state_of(104, 6)), (StepState::Gone, StepState::Aborted(late)));
        assert_eq!(steps.begin(104, &worker("a")), Err(BeginError::Gone));
        assert_eq!((steps.cleanup(105), steps.state(105)), (Some(0), StepState::Gone));
    }

    #[test]
    fn the_steps_of_a_sequence_go_on_to_the_next_one() {
        let mut steps = Steps::default();
        [100, 200, 0].into_iter().for_each(|base| steps.sequence(base));
        let expected = [Some(0..=99), Some(100..=199), Some(200..=u64::MAX), None];
        assert_eq!([0, 100, 200, 150].map(|base| steps.steps_of(base)), expected);
    }

    #[test]
    fn a_cleaned_step_stays_gone_for_4096_more() {
        let mut steps = Steps::default();
        steps.begin(0, &worker("a")).expect("new");
        assert!(steps.cleanup(0).is_some() && steps.cleanup(0).is_none());
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
        assert!(steps.gone.are_consecutive());
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
        assert_eq!((steps.state(11), steps.state(13)), (StepState::Gone, StepState::NotBegun));
    }

    #[test]
    fn a_sequence_ends_where_the_next_begins() {
        let mut steps = Steps::default();
        steps.sequence(100);
        steps.sequence(0);
        steps.cleanup(100);
        assert_eq!((steps.state(99), steps.state(100)), (StepState::NotBegun, StepState::Gone));
    }

    #[test]
    fn steps_that_share_a_place_are_told_apart() {
        let mut steps = Steps::default();
        let all = [3, 3 + NEAR as u64, 3 + ((NEAR as u64) << 40), u64::MAX];
        for (step, number) in all.into_iter().zip(1..) {
            assert_eq!(steps.begin(step, &worker("a")), Ok(Begun { number, is_new: true }));
        }
        let mut live: Vec<u64> = steps.live().collect();
        live.sort_unstable();
        assert_eq!((live.as_slice(), steps.live_count()), (all.as_slice(), 4));
        assert_eq!(steps.abort(all[1], Status::new(Code::Internal, "1")), Some(2));
        assert!(!steps.is_live(all[1]) && [all[0], all[2], all[3]].iter().all(|step| steps.is_live(*step)));
        assert_eq!((steps.cleanup(all[0]), steps.cleanup(7)), (Some(1), Some(0)), "7 has not begun");
        let states = [(0, 1), (2, 3), (2, 9)].map(|(at, number)| steps.state_of(all[at], number));
        assert_eq!(states, [StepState::Gone, StepState::Live, StepState::Gone]);
        all[1..].iter().for_each(|step| assert!(steps.cleanup(*step).is_some()));
        assert_eq!(steps.live_count(), 0);
        assert!(all.iter().all(|step| steps.state(*step) == StepState::Gone));
    }

    #[test]
    fn the_statuses_of_the_last_aborts_outlive_their_steps() {
        let mut steps = Steps::default();
        let status = |step: u64| Status::new(Code::Internal, step.to_string());
        let last = 2 * MAX_ABORTED as u64;
        // In the far table too.
        for step in (1..=last).map(|n| n * (1 + n % 2 * 63)) {
            steps.begin(step, &worker("a")).expect("new");
        }
        let live: Vec<u64> = steps.live().collect();
        for step in live {
            let number = steps.abort(step, status(step)).expect("live");
            assert_eq!(steps.cleanup(step), Some(number));
            assert_eq!(steps.state_of(step, number), StepState::Aborted(status(step)));
        }
        assert_eq!((steps.aborted.len(), steps.live_count()), (MAX_ABORTED, 0));
        assert_eq!(steps.state_of(NEAR as u64, 1), StepState::Gone, "the first one is forgotten");
    }
}
