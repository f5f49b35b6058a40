//! The names of what a test can run on.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A fabric by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum FabricName {
    /// Shared memory
    #[default]
    Shm,
    /// RDMA devices through libibverbs
    Verbs,
    /// TCP connections
    Tcp,
    /// The fastest that both sides can use, for rendezvous_lat
    Auto,
    /// No fabric: a call over gRPC for each tensor, the baseline of rendezvous_lat
    Grpc,
}

impl fmt::Display for FabricName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FabricName::Shm => "shm",
            FabricName::Verbs => "verbs",
            FabricName::Tcp => "tcp",
            FabricName::Auto => "auto",
            FabricName::Grpc => "grpc",
        })
    }
}
