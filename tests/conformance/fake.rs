//! The verbs fabric over the scripted libibverbs of `tests/fake_verbs`: devices that soft-RoCE does
//! not offer, and a check for misuse of the library.

#[path = "../fake_verbs/driver.rs"]
mod driver;

use crate::harness::Harness;
use driver::{Fake, ONE_NIC};
use std::cell::RefCell;
use tensorwire::Pool;
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};

thread_local! {
    /// The library of this test.
    static FAKE: RefCell<Option<Fake>> = const { RefCell::new(None) };
}

fn fabric(script: &str, pool: &Pool, options: VerbsOptions) -> VerbsFabric {
    FAKE.with_borrow_mut(|fake| {
        let fake = fake.get_or_insert_with(|| Fake::new(script));
        VerbsFabric::with_library(fake.library, pool, options).expect("the script has a device")
    })
}

/// The peer waits a second for a missing receive, so that a busy machine causes no failures.
fn patient() -> VerbsOptions {
    VerbsOptions { min_rnr_timer: 28, ..VerbsOptions::default() }
}

/// Runs after all ends are dropped: no object is left, and no call was a misuse. A rule without a
/// fabric was skipped.
fn verify() {
    if let Some(fake) = FAKE.take() {
        fake.assert_clean();
    }
}

/// An ordinary NIC.
pub struct FakeNic;

impl Harness for FakeNic {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        driver::skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(ONE_NIC, pool, patient())
    }

    fn verify() {
        verify();
    }
}

/// A NIC with memory windows: each grant has its key and bounds.
pub struct FakeWindows;

const WINDOWS: &str = "
device name=fake_0 caps=0x1000000
port
gid index=1 type=2 gid=00000000000000000000ffff0a000001";

impl Harness for FakeWindows {
    type Fabric = VerbsFabric;
    const DRAWS_KEYS: bool = false;
    const COMPLETES_ALONE: bool = true;

    fn skipped() -> Option<String> {
        driver::skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(WINDOWS, pool, VerbsOptions { memory_windows: true, ..patient() })
    }

    fn verify() {
        verify();
    }
}

/// A slow device with narrow limits: no inline bytes, requests of 512 KiB, queues that just hold a
/// link, a sparse GID table, thread domains.
pub struct FakeNarrow;

const NARROW: &str = "
slow
device name=narrow_0 max_inline=0 max_qp_wr=100 max_cqe=200 max_sge=1 max_qp_rd_atom=1 \
max_qp_init_rd_atom=4 thread_domains=1
port max_msg_sz=524288 mtu=1 gid_len=256
gid index=37 type=1 gid=fe800000000000000000000000000001
gid index=200 type=2 gid=fe800000000000000000000000000001";

impl Harness for FakeNarrow {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        driver::skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(NARROW, pool, VerbsOptions { cq_entries: 1, ..patient() })
    }

    fn verify() {
        verify();
    }
}

/// Large writes over four queue pairs, whose requests are carried out at different times.
pub struct FakeStriped;

impl Harness for FakeStriped {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        driver::skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(&format!("slow\n{ONE_NIC}"), pool, VerbsOptions { qps_per_peer: 4, ..patient() })
    }

    fn verify() {
        verify();
    }
}

/// InfiniBand, where the address is a LID.
pub struct FakeInfiniBand;

const INFINIBAND: &str = "
device name=mlx5_0 caps=0x20000
port layer=1 lid=17 max_msg_sz=1073741824
gid index=0 type=0 gid=fe80000000000000b8599f0300a1b2c4";

impl Harness for FakeInfiniBand {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        driver::skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(INFINIBAND, pool, patient())
    }

    fn verify() {
        verify();
    }
}
