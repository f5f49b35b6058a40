//! The end of a step, as all handles of the step see it.

use crate::matching::Error;
use foldhash::HashMap;
use foldhash::fast::RandomState;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// The error of a step that has ended. All handles of the step share it; the first end sets it.
pub(super) type StepEnd = Arc<OnceLock<Error>>;

/// The number of past ends that are kept for later steps.
const KEPT: usize = 64;
/// The number of past ends that a search for an unused one checks.
const MAX_CHECKED: usize = 8;

/// The ends of all live steps. Past ends are used again, so that beginning a step and cleaning it
/// up allocates nothing.
pub(super) struct StepEnds {
    live: HashMap<u64, StepEnd>,
    past: VecDeque<StepEnd>,
}

impl Default for StepEnds {
    fn default() -> Self {
        let live = HashMap::with_capacity_and_hasher(KEPT, RandomState::default());
        StepEnds { live, past: VecDeque::with_capacity(KEPT) }
    }
}

impl StepEnds {
    /// The end of a live step, added if the step is new.
    pub fn of(&mut self, step: u64) -> StepEnd {
        if let Some(ended) = self.live.get(&step) {
            return ended.clone();
        }
        let ended = self.unused().unwrap_or_default();
        self.live.insert(step, ended.clone());
        ended
    }

    /// Fails every later call on the step with `error`. The first error wins.
    pub fn end(&self, step: u64, error: Error) {
        if let Some(ended) = self.live.get(&step) {
            let _ = ended.set(error);
        }
    }

    /// Like [`StepEnds::end`], for a step that was cleaned up.
    pub fn retire(&mut self, step: u64, error: Error) {
        let Some(ended) = self.live.remove(&step) else { return };
        let _ = ended.set(error);
        if self.past.len() < KEPT {
            self.past.push_back(ended);
        }
    }

    fn unused(&mut self) -> Option<StepEnd> {
        for _ in 0..MAX_CHECKED {
            let mut oldest = self.past.pop_front()?;
            if let Some(ended) = Arc::get_mut(&mut oldest) {
                ended.take();
                return Some(oldest);
            }
            self.past.push_back(oldest);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(step: u64) -> Error {
        Error::StepGone { step: step.into() }
    }

    #[test]
    fn what_ended_a_step_first_is_what_its_handles_see() {
        let mut ends = StepEnds::default();
        let (handle, other) = (ends.of(1), ends.of(1));
        ends.end(1, Error::Stopped);
        ends.retire(1, gone(1));
        assert!(matches!(handle.get(), Some(Error::Stopped)) && Arc::ptr_eq(&handle, &other));
    }

    #[test]
    fn an_end_serves_a_later_step_only_when_no_handle_is_left() {
        let mut ends = StepEnds::default();
        let held = ends.of(1);
        ends.retire(1, gone(1));
        let second = ends.of(2);
        assert!(!Arc::ptr_eq(&held, &second) && second.get().is_none());
        assert!(matches!(held.get(), Some(Error::StepGone { step }) if step.get() == 1));
        let address = Arc::as_ptr(&held);
        drop(held);
        let third = ends.of(3);
        assert!(Arc::as_ptr(&third) == address && third.get().is_none(), "used again, as if new");
    }

    #[test]
    fn handles_that_are_held_for_ever_neither_stop_nor_fill_it() {
        let mut ends = StepEnds::default();
        let held: Vec<_> = (0..1000)
            .map(|step| {
                let ended = ends.of(step);
                ends.retire(step, gone(step));
                ended
            })
            .collect();
        assert_eq!((ends.live.len(), ends.past.len()), (0, KEPT));
        for (step, ended) in held.iter().enumerate() {
            assert!(matches!(ended.get(), Some(Error::StepGone { step: said }) if said.get() == step as u64));
        }
    }
}
