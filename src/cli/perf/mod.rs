//! `tensorwire perf`: latency between two pinned processes, in turns with bare references.

mod options;
mod peer;
mod report;
mod rounds;
mod run;
mod stats;

pub use options::{PeerOptions, PerfOptions};
pub use peer::run_peer;
pub use run::run;
