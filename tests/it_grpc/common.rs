//! The clusters of `tests/common`, over gRPC calls.

#[path = "../common/mod.rs"]
mod shared;
#[path = "../common/with_settings.rs"]
mod with_settings;

pub use shared::*;
pub use with_settings::{member, run, run_each, two_members};

fn settings() -> &'static [(&'static str, &'static str)] {
    &[("fabric", "grpc")]
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
