//! Two real handlers over a real fabric in one thread, in every interleaving of their sends, polls
//! and cancels.
//!
//! Each run begins in a step of its own and follows a list of choices. The next run follows the
//! next list, until there is none. So the explored code is the real code, not a model of it.

mod cases;
mod errors;
mod pair;
mod standing;

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Describes a run, if it fails.
fn traced<A: Debug>(case: &impl Debug, run: impl FnOnce(&mut Vec<A>)) {
    let mut trace = Vec::new();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut trace))) {
        println!("{case:?}\nafter {trace:?}");
        resume_unwind(panic);
    }
}

/// The choices of a run, and the enumeration of all runs.
#[derive(Default)]
pub(super) struct Choices {
    /// The choices of this run, each with the number of alternatives.
    made: Vec<(usize, usize)>,
    at: usize,
    /// If set, the runs are random instead of all.
    random: Option<u64>,
}

impl Choices {
    fn random(seed: u64) -> Self {
        Choices { random: Some(seed), ..Choices::default() }
    }

    /// Chooses one of `count` alternatives.
    fn choose(&mut self, count: usize) -> usize {
        if count < 2 {
            return 0;
        }
        if let Some(state) = &mut self.random {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            return (*state >> 33) as usize % count;
        }
        if self.at == self.made.len() {
            self.made.push((0, count));
        }
        let (chosen, of) = self.made[self.at];
        assert_eq!(of, count, "the same choices lead to the same place");
        self.at += 1;
        chosen
    }

    /// Moves to the next run. Returns `false` after the last.
    fn next_run(&mut self) -> bool {
        self.at = 0;
        if self.random.is_some() {
            return true;
        }
        while let Some((chosen, of)) = self.made.pop() {
            if chosen + 1 < of {
                self.made.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

#[test]
fn every_list_of_choices_comes_once() {
    let (mut choices, mut seen) = (Choices::default(), Vec::new());
    loop {
        let first = choices.choose(3);
        let second = if first == 1 { choices.choose(2) } else { 7 };
        seen.push((first, second));
        if !choices.next_run() {
            break;
        }
    }
    assert_eq!(seen, [(0, 7), (1, 0), (1, 1), (2, 7)]);
}
