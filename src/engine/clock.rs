//! The source of time.

use crate::wire::Time;

/// A monotonic clock. A node uses the system's; a simulation uses virtual time.
pub trait Clock: Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Time;
}
