//! Whole nodes in one process. Tests that need a process, an allocator or a system call filter of
//! their own are in `processes`, `memory`, `hot_path` and `poll_modes`.

mod aborts;
mod batches;
mod causes;
#[path = "../common/mod.rs"]
mod common;
mod defaults;
mod edges;
mod errors;
mod flush;
mod foreign;
#[path = "../common/foreign.rs"]
mod foreign_cases;
mod futures;
mod known_faults;
mod log;
mod receive;
mod rendezvous;
mod serialized;
mod sets;
mod soak;
mod standing;
mod stops;
mod strings;
mod validation;
mod watching;
