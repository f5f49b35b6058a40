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

impl PollMode {
    /// The mode for a process on a host with `cpus` CPUs, where all members of the cluster together
    /// have `spinners` threads that would spin. With more spinners than CPUs, spinning would take
    /// the CPU from threads that have work.
    pub(crate) fn choose(spinners: usize, cpus: usize) -> PollMode {
        if spinners > cpus { PollMode::Adaptive } else { PollMode::Inline }
    }
}

/// How a poller is moved on.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The mode in which the engine begins.
    pub mode: PollMode,
    /// How a thread that may not sleep pauses between two polls.
    pub wait: WaitStrategy,
    /// How long a thread that may sleep polls before it sleeps.
    pub spin: Duration,
    /// Capacity of the shared submission queue, in commands.
    pub queue: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_spinners_than_cpus_sleep() {
        assert_eq!(PollMode::choose(2, 2), PollMode::Inline);
        assert_eq!(PollMode::choose(3, 2), PollMode::Adaptive);
    }
}
