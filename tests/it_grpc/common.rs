//! The clusters of `tests/common`, over gRPC calls.

#[path = "../common/mod.rs"]
mod shared;

pub use shared::*;
use tensorwire::{Builder, Node};

const OVER_GRPC: (&str, &str) = ("fabric", "grpc");

#[allow(dead_code)] // the cases of this part make their members in the other ways
pub fn member(cluster: &str, task: u32) -> Builder {
    shared::member(cluster, task).set(OVER_GRPC.0, OVER_GRPC.1)
}

pub fn run(members: usize, settings: &[(&str, &str)], body: impl Fn(&Node, u32) + Send + Sync + 'static) {
    run_each(members, |_| settings.to_vec(), body);
}

pub fn run_each<'a>(
    members: usize,
    settings: impl Fn(u32) -> Vec<(&'a str, &'a str)>,
    body: impl Fn(&Node, u32) + Send + Sync + 'static,
) {
    shared::run_each(members, |task| [vec![OVER_GRPC], settings(task)].concat(), body);
}

pub fn two_members(settings: &[(&str, &str)]) -> [Node; 2] {
    shared::two_members(&[&[OVER_GRPC], settings].concat())
}

pub fn over_grpc() -> bool {
    true
}

pub fn lends_nothing() -> bool {
    println!("skipped: calls do not lend");
    true
}

pub fn calls_for_each_value() -> bool {
    println!("skipped: calls have neither windows nor pollers, and bulk is slow by them");
    true
}
