//! The callers that were refused last, and why none are accepted, for the error of a process that
//! waits for callers.

use crate::wire::shorten;
use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Callers and reasons that are remembered.
const MAX_CALLERS: usize = 8;
/// Bytes of a reason.
const MAX_WHY: usize = 300;

/// The last refusals, each caller and reason once. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct RefusedCallers(Arc<Mutex<Refusals>>);

#[derive(Debug, Default)]
struct Refusals {
    lines: VecDeque<String>,
    lack: Option<String>,
}

impl RefusedCallers {
    pub(super) fn note(&self, who: &dyn Display, why: &dyn Display) {
        let line = format!("{who}: {}", shorten(&why.to_string(), MAX_WHY));
        let lines = &mut self.refusals().lines;
        lines.retain(|other| *other != line);
        if lines.len() == MAX_CALLERS {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Notes what this process lacks to accept callers; `None` when it has accepted one.
    pub(super) fn set_lack(&self, lack: Option<String>) {
        self.refusals().lack = lack;
    }

    /// Why this process accepts no caller, in words about it.
    pub(super) fn lack(&self) -> Option<String> {
        let refusals = self.refusals();
        refusals.lack.as_ref().map(|lack| format!("this process can't accept connections: {lack}"))
    }

    /// Who was refused and why, the latest last. The very last says why no caller is accepted.
    pub(super) fn lines(&self) -> Vec<String> {
        let lines: Vec<String> = self.refusals().lines.iter().cloned().collect();
        lines.into_iter().chain(self.lack()).collect()
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_callers_are_told_once_each() {
        let refused = RefusedCallers::default();
        for round in 0..2 {
            (0..20).for_each(|caller| refused.note(&caller, &"no proof"));
            assert_eq!(refused.lines().len(), MAX_CALLERS, "round {round}");
        }
        refused.note(&15, &"no proof");
        assert_eq!(refused.lines().first().map(String::as_str), Some("12: no proof"));
        assert_eq!(refused.lines().last().map(String::as_str), Some("15: no proof"));
        refused.note(&1, &"x".repeat(1000));
        assert!(refused.lines()[7].len() < 400);
    }

    #[test]
    fn a_lack_is_told_until_a_caller_is_accepted() {
        let refused = RefusedCallers::default();
        refused.note(&1, &"no proof");
        refused.set_lack(Some("no descriptors".into()));
        assert_eq!(refused.lines(), ["1: no proof", "this process can't accept connections: no descriptors"]);
        refused.set_lack(None);
        assert_eq!((refused.lines().len(), refused.lack()), (1, None));
    }
}
