//! The rules of the fabric contract (`tensorwire::fabric`), each tested on every fabric.
//!
//! `rules` and `sleeping` hold the tests, generic over the fabric; a fabric is added by implementing `Harness` and
//! one line of `conformance!`. `processes` and `many` hold what only two real processes can show.

mod harness;
mod many;
mod processes;
mod rules;
mod sleeping;

use harness::Harness;
use tensorwire::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::memory::Pool;

struct ShmOneLane;

impl Harness for ShmOneLane {
    type Fabric = ShmFabric;
    const LANES: u8 = 1;

    fn fabric(pool: &Pool) -> ShmFabric {
        ShmFabric::new(pool, ShmOptions::default()).expect("a fabric")
    }
}

struct ShmTwoLanes;

impl Harness for ShmTwoLanes {
    type Fabric = ShmFabric;
    const LANES: u8 = 2;

    fn fabric(pool: &Pool) -> ShmFabric {
        // Bulk is pulled in small parts, so that every larger tensor takes several polls.
        ShmFabric::new(pool, ShmOptions { poll_bytes: 4096 }).expect("a fabric")
    }
}

conformance!(shm_with_one_lane, ShmOneLane);
conformance!(shm_with_two_lanes, ShmTwoLanes);
