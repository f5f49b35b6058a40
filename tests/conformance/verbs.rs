//! The verbs fabric: on any RDMA device that there is, as soft-RoCE in a virtual machine.

use crate::harness::{Harness, pool};
use std::sync::OnceLock;
use tensorwire::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::memory::Pool;

/// Why there is no verbs fabric here; the same for all tests, looked up once.
fn skipped() -> Option<String> {
    static WHY: OnceLock<Option<String>> = OnceLock::new();
    let why =
        || VerbsFabric::new(&pool(1 << 20), VerbsOptions::default()).err().map(|error| error.to_string());
    WHY.get_or_init(why).clone()
}

fn fabric(pool: &Pool, options: VerbsOptions) -> VerbsFabric {
    VerbsFabric::new(pool, options).expect("there is a device, as `skipped` has seen")
}

pub struct VerbsOneLane;

impl Harness for VerbsOneLane {
    type Fabric = VerbsFabric;
    const LANES: u8 = 1;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(pool, VerbsOptions::default())
    }
}

/// With small packets and small completion queues.
pub struct VerbsTwoLanes;

impl Harness for VerbsTwoLanes {
    type Fabric = VerbsFabric;
    const LANES: u8 = 2;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(pool, VerbsOptions { mtu: Some(512), cq_entries: 16, ..VerbsOptions::default() })
    }
}
