//! Where the time comes from.

use crate::wire::Time;

/// A clock that never goes back. The node brings the system's; a simulation brings its own.
pub trait Clock: Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Time;
}
