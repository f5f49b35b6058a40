//! Steps whose ids are consecutive.

use crate::wire::StepId;

/// A run of steps base, base + 1, ... (specification 2.5a): those that were cleaned up are remembered without limit.
#[must_use = "a sequence tells the ids of its steps"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    pub(super) base: u64,
}

impl Sequence {
    /// The id of its n-th step, counted from 0.
    ///
    /// # Panics
    /// If base + n does not fit in 64 bits.
    pub fn step(&self, n: u64) -> StepId {
        self.base.checked_add(n).expect("a sequence has no step beyond 2^64-1").into()
    }
}
