//! The callers that were refused last, for the error of a process that waits for callers.

use crate::wire::shorten;
use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::{Arc, Mutex, PoisonError};

/// Callers and reasons that are remembered.
const MAX_CALLERS: usize = 8;
/// Bytes of a reason.
const MAX_WHY: usize = 300;

/// The last refusals, each caller and reason once. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct RefusedCallers(Arc<Mutex<VecDeque<String>>>);

impl RefusedCallers {
    pub(super) fn note(&self, who: &dyn Display, why: &dyn Display) {
        let line = format!("{who}: {}", shorten(&why.to_string(), MAX_WHY));
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|other| *other != line);
        if lines.len() == MAX_CALLERS {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Who was refused and why, the latest last.
    pub(super) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
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
}
