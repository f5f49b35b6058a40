//! Counters of the engine.
//!
//! Recording is on the data path, so it takes no lock, allocates nothing and uses no read-modify-write
//! instruction ([`SharedCounters`], which does, is not on it); reading is for anybody, at any time. Nothing here asks for the time or writes a log.

mod counters;
mod shared;

pub use counters::{Counter, Counters, CountersWriter, Gauge, Snapshot, reference};
pub use shared::SharedCounters;
