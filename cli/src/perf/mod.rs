//! `tensorwire perf`: latency and bandwidth between two pinned processes, in turns with references.
//!
//! The *initiator* (the first process, or the client) measures. The *responder* (the second
//! process, or the server) answers. Between turns they exchange messages on a socket
//! ([`control_channel`]). Within a turn only the workload moves bytes ([`workload`]).

mod bandwidth;
mod bare_link;
mod busy_loops;
mod cache_line;
mod channel_message;
mod command;
mod compare;
mod control_channel;
mod cores;
mod exchange;
mod fabric_name;
mod fabrics;
mod layout;
mod machine;
mod measure;
mod one_sided;
mod open;
mod options;
mod peer_watch;
mod plan;
mod proofs;
mod read_lat;
mod recorder;
mod remote;
mod rendezvous_batch;
mod rendezvous_lat;
mod rendezvous_standing;
mod report;
mod responder_process;
mod ring_64;
mod run;
mod send_lat;
mod session;
mod workload;
mod write_bw;
mod write_lat;

pub use command::PerfCommand;
pub use plan::given;
pub use responder_process::ResponderArgs;
pub use run::{respond, run};
