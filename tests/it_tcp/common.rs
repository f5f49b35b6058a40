//! The clusters of `tests/common`, over TCP.

#[path = "../common/mod.rs"]
mod shared;
#[path = "../common/with_settings.rs"]
mod with_settings;

pub use shared::*;
pub use with_settings::{member, run, run_each, two_members};

fn settings() -> &'static [(&'static str, &'static str)] {
    &[("fabric", "tcp")]
}

pub fn writes_bulk() -> bool {
    true
}

pub fn lends_nothing() -> bool {
    println!("skipped: this fabric does not lend");
    true
}
