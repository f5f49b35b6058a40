//! The virtual network. Processes are named by their numbers in the cluster.

use crate::program::{At, Program};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tensorwire::Pool;
use tensorwire::internals::engine::Clock;
use tensorwire::internals::fabric::Fabric;
use tensorwire::internals::fabric::sim::{SimFabric, SimNetwork, SimOptions, SimProcess};
use tensorwire::internals::wire::Time;

pub type Port = <SimFabric as Fabric>::Port;

pub struct Network {
    sim: SimNetwork,
    /// The present life of each number.
    processes: Vec<Option<SimProcess>>,
    /// The processes that validate. Bits flip only on the way to these.
    validates: Vec<bool>,
    flip_per_mille: u32,
}

/// The clock of a process.
pub struct VirtualClock {
    sim: SimNetwork,
    goes_on: AtomicBool,
}

/// The most by which a clock goes on with a look.
const TICK: Duration = Duration::from_micros(100);

impl VirtualClock {
    /// Calls `wait`, in which the time goes on to the next event with each look at the clock.
    pub fn while_it_goes_on<R>(&self, wait: impl FnOnce() -> R) -> R {
        self.goes_on.store(true, Ordering::Relaxed);
        let result = wait();
        self.goes_on.store(false, Ordering::Relaxed);
        result
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        let now = self.sim.now();
        if self.goes_on.load(Ordering::Relaxed) {
            let next = self.sim.next_event().filter(|next| *next > now);
            self.sim.advance_to(next.unwrap_or(now + TICK).min(now + TICK));
        }
        now
    }
}

impl Network {
    pub fn new(program: &Program, trace: bool) -> Self {
        let settings = &program.settings;
        let options = SimOptions {
            delay: Duration::ZERO..=Duration::from_micros(settings.delay),
            completion_delay: Duration::ZERO..=Duration::from_micros(settings.completion_delay),
            poll_batch: settings.poll_batch,
            full_per_mille: settings.full_per_mille,
            lends: settings.lends,
            max_lent_bytes: settings.max_lent_bytes,
            max_message: settings.max_message,
            max_write: u64::MAX,
            max_grant: u64::MAX,
            auto_advance: false,
            trace,
        };
        let sim = SimNetwork::new(program.seed, options);
        let validates = (0..settings.processes).map(|at| settings.validates(at)).collect();
        let flip_per_mille = settings.flip_per_mille;
        Network { sim, processes: vec![None; settings.processes], validates, flip_per_mille }
    }

    pub fn clock(&self) -> Arc<VirtualClock> {
        Arc::new(VirtualClock { sim: self.sim.clone(), goes_on: AtomicBool::new(false) })
    }

    pub fn now(&self) -> Time {
        self.sim.now()
    }

    /// The fabric of a new life.
    pub fn fabric(&mut self, at: At, pool: &Pool) -> SimFabric {
        let fabric = self.sim.process(pool);
        self.processes[at] = Some(fabric.process());
        if self.validates[at] {
            self.sim.flip_bits(fabric.process(), self.flip_per_mille);
        }
        fabric
    }

    pub fn next_event(&self) -> Option<Time> {
        self.sim.next_event()
    }

    pub fn advance_to(&self, time: Time) {
        self.sim.advance_to(time);
    }

    pub fn kill(&mut self, at: At) {
        if let Some(process) = self.processes[at].take() {
            self.sim.kill(process);
        }
    }

    pub fn cut(&self, a: At, b: At) {
        if let (Some(a), Some(b)) = (self.processes[a], self.processes[b]) {
            self.sim.cut(a, b);
        }
    }

    pub fn stall(&self, at: At, until: Time) {
        if let Some(process) = self.processes[at] {
            self.sim.stall(process, until);
        }
    }

    /// Ends all stalls.
    pub fn wake(&self) {
        (0..self.processes.len()).for_each(|at| self.stall(at, Time::ZERO));
    }

    /// The trace, one line per event, if it was recorded.
    pub fn trace(&self) -> Vec<String> {
        self.sim.trace()
    }

    pub fn digest(&self) -> u64 {
        self.sim.digest()
    }
}
