//! The sleeper of a port of several parts: that of its first part.

use crate::fabric::shm::ShmSleeper;
use crate::fabric::tcp::TcpSleeper;
use crate::fabric::verbs::VerbsSleeper;
use crate::fabric::{Sleep, Sleeper};
use std::time::Duration;

/// Blocks threads while nothing arrives on any part of a port. See [`Sleeper`].
#[derive(Clone, Debug)]
pub enum MultiSleeper {
    /// On shared memory, which the threads of other parts wake.
    Shm(ShmSleeper),
    /// On RDMA verbs, whose thread and those of TCP wake it.
    Verbs(VerbsSleeper),
    /// On TCP alone.
    Tcp(TcpSleeper),
}

/// Calls the same method of the sleeper inside.
macro_rules! inner {
    ($sleeper:expr, $method:ident($($argument:expr),*)) => {
        match $sleeper {
            MultiSleeper::Shm(sleeper) => Sleeper::$method(sleeper $(, $argument)*),
            MultiSleeper::Verbs(sleeper) => Sleeper::$method(sleeper $(, $argument)*),
            MultiSleeper::Tcp(sleeper) => Sleeper::$method(sleeper $(, $argument)*),
        }
    };
}

impl Sleeper for MultiSleeper {
    fn seen(&self) -> u32 {
        inner!(self, seen())
    }

    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        inner!(self, sleep(who, seen, timeout));
    }

    fn wake(&self, who: Sleep) {
        inner!(self, wake(who));
    }

    fn enter_wait(&self) {
        inner!(self, enter_wait());
    }

    fn exit_wait(&self) {
        inner!(self, exit_wait());
    }
}
