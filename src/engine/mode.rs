//! Who moves a poller on.

use super::Waiting;
use std::time::Duration;

/// Who moves a poller on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The calls themselves, one at a time; there is no thread.
    Inline,
    /// The calls themselves, and a thread while no call is under way. Whoever finds nothing to do sleeps.
    Adaptive,
    /// A thread that never sleeps. Calls hand over to it and wait.
    Dedicated,
}

/// How a poller is moved on.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// By whom.
    pub mode: Mode,
    /// What those who may not sleep do between two looks.
    pub waiting: Waiting,
    /// How long those who may sleep look for something before they do.
    pub spin: Duration,
    /// How many wishes can wait for the owner at once.
    pub queue: usize,
}

/// The mode for a process on a host with `cpus` CPUs where all members together have `spinners` threads that would
/// spin: more of them than CPUs would take the CPU from those that have something to do.
pub fn choose_mode(spinners: usize, cpus: usize) -> Mode {
    if spinners > cpus { Mode::Adaptive } else { Mode::Inline }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_spinners_than_cpus_sleep() {
        assert_eq!(choose_mode(2, 2), Mode::Inline);
        assert_eq!(choose_mode(3, 2), Mode::Adaptive);
    }
}
