//! Counters of the engine, and the flight recorders of its links.
//!
//! Counting is on the data path: it takes no lock, allocates nothing and uses no read-modify-write
//! instruction. [`SharedCounters`] does use one, and is not on that path. Any thread reads at any
//! time. Nothing here asks the system for the time or writes a log.

mod counters;
mod flight;
mod shared;

pub use counters::{Counter, Counters, CountersWriter, Gauge, Snapshot, reference};
pub use flight::{FLIGHT_RECORDS, FlightClock, FlightEvent, FlightLog, FlightRecord, FlightRecorder};
pub use shared::SharedCounters;
