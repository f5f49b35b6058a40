//! The pollers of a node: their start, their poll mode, and their end.

use super::clock::MonotonicClock;
use super::error::NodeError;
use crate::config::Config;
use crate::engine::{
    Clock, Engine, EngineOptions, PollMode, Poller, PollingThread, Unusable, WaitStrategy, start,
};
use crate::fabric::{Fabric, LoanFigures, LoanLimiter, Port};
use crate::link::Links;
use crate::matching::{PeerIndex, RemoteCommand, WindowHandler};
use crate::memory::Pool;
use crate::rendezvous::{Paths, RemotePath};
use crate::telemetry::{Counter, Counters, CountersWriter, Gauge, Snapshot};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The capacity of a poller's submission queue, in commands.
const QUEUE: usize = 4096;

/// All pollers of a node. Each peer belongs to one of them.
pub(super) struct Pollers<P: Port> {
    engines: Vec<Arc<Engine<P, WindowHandler>>>,
    counters: Vec<Arc<Counters>>,
    loans: Option<Arc<LoanLimiter>>,
    polling: Polling,
    threads: Mutex<Vec<PollingThread>>,
}

/// The poll mode, the wait strategy and the CPUs of a node's pollers.
#[derive(Clone, Debug)]
pub(super) struct Polling {
    mode: PollMode,
    /// Whether the setting `poll` is auto.
    auto: bool,
    wait: WaitStrategy,
    spin: Duration,
    hung_after: Duration,
    /// The CPU of each polling thread; empty if none is pinned.
    cores: Vec<usize>,
    count: usize,
}

/// The poll mode that the configuration means.
pub(super) fn poll_mode(config: &Config) -> PollMode {
    match config.poll {
        Some(mode) => mode,
        // Who says how calls wait does not want them to sleep.
        None if config.wait.is_some() => PollMode::Inline,
        None => PollMode::Adaptive,
    }
}

impl Polling {
    /// The choice for a host with `cpus` CPUs and a cluster of `members` tasks.
    pub fn new(config: &Config, members: usize, cpus: usize) -> Polling {
        // A pinned thread can't know whether another member is pinned to the same CPU.
        let shared = config.cores.is_some() && members > 1 && config.poll != Some(PollMode::Dedicated);
        let wait = match config.wait {
            Some(wait) => wait,
            None if shared => WaitStrategy::Yield,
            None if config.poll == Some(PollMode::Dedicated) => WaitStrategy::choose(2 * members, cpus),
            None => WaitStrategy::choose(members, cpus),
        };
        let mode = poll_mode(config);
        let auto = config.poll.is_none();
        let cores = config.cores.clone().unwrap_or_default();
        let (spin, hung_after) = (config.spin_budget, config.hung_after);
        Polling { mode, auto, wait, spin, hung_after, cores, count: config.poller_count() }
    }

    /// One poller in inline mode.
    #[cfg(test)]
    pub fn inline() -> Polling {
        let (mode, wait, spin) = (PollMode::Inline, WaitStrategy::Yield, Duration::ZERO);
        let hung_after = Duration::MAX;
        Polling { mode, auto: false, wait, spin, hung_after, cores: Vec::new(), count: 1 }
    }

    /// The CPU of the thread that starts the node, which polls if no polling thread does.
    pub fn caller_core(&self) -> Option<usize> {
        if self.auto || self.mode == PollMode::Inline { self.cores.first().copied() } else { None }
    }
}

/// The pollers of a node, for any fabric.
pub(super) trait PollerSet: Send + Sync {
    /// Starts the polling threads of the poll mode.
    fn start(&self) -> Result<(), NodeError>;

    /// The poll mode.
    fn mode(&self) -> PollMode;

    /// The paths to all peers.
    fn paths(&self) -> Paths;

    /// The sum of all pollers' counters.
    fn counted(&self) -> Snapshot;

    /// Closes every link, ends every call and every polling thread. Does nothing the second time.
    fn close(&self);
}

/// The pollers of a node, for the links of one fabric.
pub(super) trait LinkPollers<L>: Send + Sync {
    /// Runs a command on the poller that serves a peer.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    fn submit(&self, peer: PeerIndex, command: RemoteCommand<L>) -> Result<(), Unusable>;

    /// Makes progress on the poller that serves a peer. Returns the number of completions.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    fn progress(&self, peer: PeerIndex) -> Result<usize, Unusable>;

    /// The number of pollers.
    fn count(&self) -> usize;
}

fn count_loans(figures: LoanFigures, sum: &mut Snapshot) {
    let LoanFigures { out, bytes, overdue, relocated_tensors, relocated_bytes, relocation_failures } =
        figures;
    sum.raise(Gauge::LoansOut, out);
    sum.raise(Gauge::LentBytes, bytes);
    sum.add(Counter::LoansOverdue, overdue);
    sum.add(Counter::TensorsRelocated, relocated_tensors);
    sum.add(Counter::BytesRelocated, relocated_bytes);
    sum.add(Counter::RelocationFailures, relocation_failures);
}

impl<P: Port> Pollers<P> {
    /// The pollers, without their threads. `handler` makes the handler of each.
    pub fn new<F: Fabric<Port = P>>(
        polling: Polling,
        fabric: &F,
        pool: &Pool,
        handler: impl Fn() -> WindowHandler,
    ) -> Result<Self, NodeError> {
        let Polling { mode, wait, spin, hung_after, .. } = polling;
        let options = EngineOptions { mode, wait, spin, hung_after, queue: QUEUE };
        let clock = Arc::new(MonotonicClock::start());
        let (mut engines, mut counters) = (Vec::new(), Vec::new());
        for _ in 0..polling.count {
            let writer = CountersWriter::new();
            counters.push(writer.counters());
            let flight = clock.clone();
            let links = Links::new(fabric.port()?, pool.clone(), writer);
            let links = links.timed_by(Arc::new(move || flight.now()));
            engines.push(Arc::new(Engine::new(Poller::new(links, handler()), clock.clone(), &options)));
        }
        let (loans, threads) = (fabric.loan_limiter(), Mutex::default());
        Ok(Pollers { engines, counters, loans, polling, threads })
    }

    /// The poller that serves a peer.
    pub fn of(&self, peer: PeerIndex) -> &Arc<Engine<P, WindowHandler>> {
        &self.engines[Paths::index_of(peer, self.engines.len())]
    }
}

impl<P: Port> LinkPollers<P::Link> for Pollers<P> {
    fn submit(&self, peer: PeerIndex, command: RemoteCommand<P::Link>) -> Result<(), Unusable> {
        self.of(peer).submit(command)
    }

    fn progress(&self, peer: PeerIndex) -> Result<usize, Unusable> {
        Engine::progress(self.of(peer))
    }

    fn count(&self) -> usize {
        self.engines.len()
    }
}

impl<P: Port> PollerSet for Pollers<P> {
    fn start(&self) -> Result<(), NodeError> {
        if self.polling.mode == PollMode::Inline {
            return Ok(());
        }
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, engine) in self.engines.iter().enumerate() {
            threads.push(start(engine, self.polling.cores.get(number).copied(), number)?);
        }
        Ok(())
    }

    fn mode(&self) -> PollMode {
        self.polling.mode
    }

    fn paths(&self) -> Paths {
        Paths::new(
            self.engines.iter().map(|engine| Box::new(engine.clone()) as Box<dyn RemotePath>).collect(),
        )
    }

    fn counted(&self) -> Snapshot {
        let mut sum = Snapshot::ZERO;
        for counters in &self.counters {
            sum += &counters.snapshot();
        }
        if let Some(loans) = &self.loans {
            count_loans(loans.figures(), &mut sum);
        }
        sum
    }

    fn close(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for engine in &self.engines {
            engine.close();
        }
        drop(threads);
    }
}
