//! The clusters of `tests/common`, over the scripted libibverbs.

#[path = "../common/mod.rs"]
mod shared;

use crate::driver::{Fake, ONE_NIC};
pub use shared::*;
use std::sync::OnceLock;
use tensorwire::{Builder, Node};

/// The settings of a member whose device is scripted.
const ON_FAKE: [(&str, &str); 2] = [("fabric", "verbs"), ("rdma_device", "fake_0")];

fn load_fake() {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    // With memory windows, for `TENSORWIRE_TEST_WINDOWS=on`.
    let script = || ONE_NIC.replace("name=fake_0", "name=fake_0 caps=0x1000000");
    FAKE.get_or_init(|| Fake::system(&script()));
}

pub fn member(cluster: &str, task: u32) -> Builder {
    load_fake();
    ON_FAKE.into_iter().fold(shared::member(cluster, task), |builder, (key, value)| builder.set(key, value))
}

pub fn run(members: usize, settings: &[(&str, &str)], body: impl Fn(&Node, u32) + Send + Sync + 'static) {
    run_each(members, |_| settings.to_vec(), body);
}

pub fn run_each<'a>(
    members: usize,
    settings: impl Fn(u32) -> Vec<(&'a str, &'a str)>,
    body: impl Fn(&Node, u32) + Send + Sync + 'static,
) {
    load_fake();
    shared::run_each(members, |task| [ON_FAKE.to_vec(), settings(task)].concat(), body);
}

pub fn two_members(settings: &[(&str, &str)]) -> [Node; 2] {
    load_fake();
    shared::two_members(&[&ON_FAKE, settings].concat())
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
