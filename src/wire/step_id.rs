//! The name of a step.

use std::fmt;

/// Names a training step: the same number at every member of the cluster.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::StepId;
/// let step = node.step(7)?;
/// assert_eq!(step.id(), StepId::from(7));
/// node.cleanup(step.id());
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(u64);

impl StepId {
    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for StepId {
    fn from(number: u64) -> Self {
        StepId(number)
    }
}

impl fmt::Display for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
