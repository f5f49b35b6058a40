//! The network, while there is no simulated one: shared memory, and a clock.

use crate::program::{At, Program};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tensorwire::engine::Clock;
use tensorwire::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::fabric::{Fabric, Half, LinkOptions, Role};
use tensorwire::memory::Pool;
use tensorwire::wire::Time;

pub type TheFabric = ShmFabric;
pub type Link = <TheFabric as Fabric>::Link;
pub type Port = <TheFabric as Fabric>::Port;

pub struct Network {
    clock: Arc<VirtualClock>,
}

#[derive(Default)]
pub struct VirtualClock(AtomicU64);

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        Time::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

impl Network {
    pub fn new(_program: &Program) -> Self {
        Network { clock: Arc::default() }
    }

    pub fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    pub fn now(&self) -> Time {
        self.clock.now()
    }

    pub fn fabric(&self, _at: At, pool: &Pool) -> TheFabric {
        ShmFabric::new(pool, ShmOptions::default()).expect("a fabric")
    }

    pub fn next_event(&self) -> Option<Time> {
        None
    }

    pub fn advance_to(&mut self, time: Time) {
        self.clock.0.fetch_max(time.as_nanos(), Ordering::Relaxed);
    }

    pub fn kill(&mut self, _at: At) {}

    pub fn cut(&mut self, _a: At, _b: At) {}

    pub fn stall(&mut self, _at: At, _until: Time) {}

    pub fn digest(&self) -> u64 {
        0
    }
}

/// Connects two processes.
pub fn connect(a: &TheFabric, b: &TheFabric, options: &LinkOptions) -> (Link, Link) {
    const PATIENCE: Duration = Duration::from_secs(10);
    let (a, b) = (a.half(options).expect("a half"), b.half(options).expect("a half"));
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    std::thread::scope(|scope| {
        let acceptor = scope.spawn(|| a.connect(Role::Acceptor, &to_b, PATIENCE).expect("accepted"));
        let b = b.connect(Role::Initiator, &to_a, PATIENCE).expect("connected");
        (acceptor.join().expect("no panic"), b)
    })
}

/// After how many rounds without anything new there is nothing to come.
pub const QUIET_ROUNDS: u32 = 70;
