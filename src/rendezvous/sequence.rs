//! Steps whose ids are consecutive.

use crate::wire::StepId;

/// Steps base, base + 1, and so on (specification 2.5a). Steps that were cleaned up are remembered
/// without limit.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let sequence = node.sequence(1 << 40);
/// let step = node.step(sequence.step(0))?;
/// assert_eq!(step.id().get(), 1 << 40);
/// step.cleanup();
/// # Ok::<(), tensorwire::Error>(())
/// ```
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
