//! How a thread waits while nothing comes.

/// What a waiter does between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Looks again at once: for waiters with a CPU of their own.
    Spin,
    /// Gives the CPU to another thread first: where there are more waiters than CPUs.
    Yield,
}

impl Waiting {
    /// The right way for `waiters` busy waiters on `cpus` CPUs.
    pub fn choose(waiters: usize, cpus: usize) -> Waiting {
        if waiters > cpus { Waiting::Yield } else { Waiting::Spin }
    }

    /// How many looks a waiter takes before it pauses and lets others own the poller.
    pub(super) fn looks(self) -> u32 {
        match self {
            Waiting::Spin => 64,
            Waiting::Yield => 4,
        }
    }

    pub(super) fn pause(self) {
        match self {
            Waiting::Spin => std::hint::spin_loop(),
            Waiting::Yield => std::thread::yield_now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_waiters_than_cpus_yield() {
        assert_eq!(Waiting::choose(2, 2), Waiting::Spin);
        assert_eq!(Waiting::choose(3, 2), Waiting::Yield);
    }
}
