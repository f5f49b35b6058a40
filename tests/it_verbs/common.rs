//! The clusters of `tests/common`, over the scripted libibverbs.

#[path = "../common/mod.rs"]
mod shared;
#[path = "../common/with_settings.rs"]
mod with_settings;

use crate::driver::{Fake, ONE_NIC};
pub use shared::*;
use std::sync::OnceLock;
pub use with_settings::{member, run, run_each, two_members};

/// The settings of a member whose device is scripted.
fn settings() -> &'static [(&'static str, &'static str)] {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    // With memory windows, for `TENSORWIRE_TEST_WINDOWS=on`.
    let script = || ONE_NIC.replace("name=fake_0", "name=fake_0 caps=0x1000000");
    FAKE.get_or_init(|| Fake::system(&script()));
    &[("fabric", "verbs"), ("rdma_device", "fake_0")]
}

pub fn over_verbs() -> bool {
    true
}

pub fn writes_bulk() -> bool {
    true
}

pub fn lacks_processes() -> bool {
    println!("skipped: the scripted library links members of one process");
    true
}

pub fn lends_nothing() -> bool {
    println!("skipped: this fabric does not lend");
    true
}
