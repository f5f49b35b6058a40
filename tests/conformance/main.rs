//! The rules of the fabric contract (`tensorwire::fabric`), each tested on every fabric.
//!
//! `rules`, `holding`, `batches` and `sleeping` have the tests, generic over the fabric. A new
//! fabric implements `Harness` and adds one line of `conformance!`. `processes` and `many` have the
//! tests that need two real processes, `verbs` and `verbs_network` those that need an RDMA device.

mod batches;
mod fake;
mod harness;
mod holding;
mod many;
mod processes;
mod rules;
mod sleeping;
mod verbs;
mod verbs_network;

use harness::Harness;
use std::time::Duration;
use tensorwire::Pool;
use tensorwire::internals::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::internals::fabric::sim::{SimFabric, SimNetwork, SimOptions};

struct Shm;

impl Harness for Shm {
    type Fabric = ShmFabric;

    fn fabric(pool: &Pool) -> ShmFabric {
        ShmFabric::new(pool, ShmOptions::default()).expect("a fabric")
    }
}

struct ShmSmallPolls;

impl Harness for ShmSmallPolls {
    type Fabric = ShmFabric;

    fn fabric(pool: &Pool) -> ShmFabric {
        // Bulk is pulled in small parts, so that every larger tensor takes several polls.
        ShmFabric::new(pool, ShmOptions { poll_bytes: 4096, ..ShmOptions::default() }).expect("a fabric")
    }
}

/// A virtual network whose time advances with each poll.
fn sim(pools: [&Pool; 2], options: SimOptions) -> [SimFabric; 2] {
    let network = SimNetwork::new(7, SimOptions { auto_advance: true, ..options });
    pools.map(|pool| network.process(pool))
}

struct Sim;

impl Harness for Sim {
    type Fabric = SimFabric;

    fn fabric(pool: &Pool) -> SimFabric {
        SimNetwork::new(7, SimOptions::default()).process(pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [SimFabric; 2] {
        sim(pools, SimOptions::default())
    }
}

/// A network with delays, late completions and full queues.
struct SimNarrow;

impl Harness for SimNarrow {
    type Fabric = SimFabric;

    fn fabric(pool: &Pool) -> SimFabric {
        SimNetwork::new(7, SimOptions::default()).process(pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [SimFabric; 2] {
        let completion_delay = Duration::ZERO..=Duration::from_millis(1);
        sim(pools, SimOptions { completion_delay, poll_batch: 1, ..SimOptions::default() })
    }
}

/// A network without loans, whose local completions come last.
struct SimWithoutLoans;

impl Harness for SimWithoutLoans {
    type Fabric = SimFabric;

    fn fabric(pool: &Pool) -> SimFabric {
        SimNetwork::new(7, SimOptions::default()).process(pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [SimFabric; 2] {
        let completion_delay = Duration::from_millis(1)..=Duration::from_millis(2);
        sim(pools, SimOptions { completion_delay, lends: false, poll_batch: 3, ..SimOptions::default() })
    }
}

conformance!(verbs_on_a_device, verbs::VerbsDevice);
conformance!(verbs_in_small_pieces, verbs::VerbsSmall);
conformance!(verbs_on_a_fake_nic, fake::FakeNic);
conformance!(verbs_on_a_narrow_fake, fake::FakeNarrow);
conformance!(verbs_on_a_striped_fake, fake::FakeStriped);
conformance!(verbs_on_fake_infiniband, fake::FakeInfiniBand);
conformance!(sim, Sim);
conformance!(sim_slow_and_narrow, SimNarrow);
conformance!(sim_without_loans, SimWithoutLoans);
conformance!(shm, Shm);
conformance!(shm_in_small_polls, ShmSmallPolls);
