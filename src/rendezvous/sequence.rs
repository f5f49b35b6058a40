//! [`Sequence`]: steps with consecutive ids.

use crate::wire::StepId;

/// Steps with the ids base, base + 1, and so on (specification 2.5a). The node remembers
/// without limit which steps of a sequence were cleaned up.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let sequence = node.sequence(1 << 40);
/// let step = node.step(sequence.step(0))?;
/// assert_eq!(step.id().get(), 1 << 40);
/// step.cleanup();
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[must_use = "a sequence only computes the ids of its steps"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    pub(super) base: u64,
}

impl Sequence {
    /// The id of step `n` of the sequence. The first step is step 0.
    ///
    /// # Panics
    /// If `base + n` exceeds 2^64 - 1.
    pub fn step(&self, n: u64) -> StepId {
        self.base.checked_add(n).expect("a sequence has no step beyond 2^64-1").into()
    }
}
