//! Sleeping while nothing arrives on a port's links.

use crate::sync::Sleep;
use std::time::Duration;

/// Blocks threads while nothing arrives on a port's links. Clones share one state.
///
/// This order loses no wake-up: read [`seen`](Sleeper::seen), [`arm`](super::Port::arm) the port,
/// poll again, then sleep. A thread that leaves a wait must arm the port *after*
/// [`exit_wait`](Sleeper::exit_wait). It must also handle the arrivals of the meantime, for which
/// the background poller was not woken.
pub trait Sleeper: Clone + Send + Sync + 'static {
    /// A number that changes with every wake-up.
    fn seen(&self) -> u32;

    /// Blocks until a wake-up since `seen` was read, or for `timeout`. May return early.
    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration);

    /// Ends the sleep of every thread of that kind.
    fn wake(&self, who: Sleep);

    /// The calling thread polls or sleeps as a waiter from now on.
    fn enter_wait(&self);

    /// Ends one [`enter_wait`](Sleeper::enter_wait).
    fn exit_wait(&self);
}

/// Ends sleeps on the [`Sleeper`] of another port. A thread that watches for the arrivals of one
/// port notifies it, if the poller's threads sleep on the other one.
pub trait Wakeup: Send + Sync {
    /// Something has arrived. Wakes the waiters, or the background thread if no waiter sleeps or is
    /// in its wait.
    fn notify(&self);

    /// Ends the sleep of every thread of that kind.
    fn wake(&self, who: Sleep);
}
