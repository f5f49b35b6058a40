//! The number of a link between two tasks.

use std::fmt;

/// The number of a link between two tasks. It grows with each link that this task makes with the
/// other, over all lives of the other. Zero stands for no link yet.
///
/// ```
/// use tensorwire::{Generation, Node, TaskId};
///
/// /// Whether a peer has been linked again since `before`.
/// fn is_back(node: &Node, peer: &TaskId, before: Generation) -> bool {
///     node.peers().iter().any(|report| report.task == *peer && report.generation > before)
/// }
/// assert!(Generation::from(2) > Generation::NONE);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(u64);

impl Generation {
    /// No link yet.
    pub const NONE: Generation = Generation(0);

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for Generation {
    fn from(number: u64) -> Self {
        Generation(number)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
