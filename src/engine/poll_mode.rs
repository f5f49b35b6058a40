//! Which threads move a poller on.

use super::WaitStrategy;
use std::time::Duration;

/// Which threads move a poller on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PollMode {
    /// The calls themselves, one at a time. There is no thread.
    Inline,
    /// The calls themselves, and a background poller while no call is under way. A thread that
    /// finds nothing to do sleeps.
    Adaptive,
    /// A background poller that never sleeps. Calls submit commands to it and wait.
    Dedicated,
}

/// How a poller is moved on.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The threads that move the poller on.
    pub mode: PollMode,
    /// How a thread that may not sleep pauses between two polls. In the adaptive mode: whether a
    /// thread spins for `spin` before it yields.
    pub wait: WaitStrategy,
    /// How long a thread that may sleep polls before it sleeps.
    pub spin: Duration,
    /// How long a wait may hold the poller. It then goes on by a command, which reports can see.
    pub hung_after: Duration,
    /// Capacity of the shared submission queue, in commands.
    pub queue: usize,
}
