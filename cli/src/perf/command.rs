//! The command line of `perf`: a test, or the comparison.

use super::compare::CompareOptions;
use super::options::{RunOptions, Test};
use clap::{Args, Subcommand};

/// Measures latency and bandwidth between two processes, in turns with bare references.
///
/// One process measures, the other answers. With --local, `perf` starts both on this host. Without
/// --local and without HOST, this process is the server: it answers one client and ends. It listens
/// on loopback unless --listen says otherwise. With HOST it is the client of the server there, and
/// it measures. Each option that is given to the server must have the same value at the client.
///
/// Both prove who they are: on one host they must be of one user. Else both need
/// TENSORWIRE_SECRET_FILE, certificates, or TENSORWIRE_AUTH=plain.
///
/// Each round trip is a sample. Round trips of less than a microsecond are timed in chunks of 16,
/// because reading the clock would lengthen them. Each then counts with the mean of its chunk.
/// rendezvous_lat times round trips with more than 256 bytes alone, as it writes their sources in
/// between.
#[derive(Args, Clone, Debug)]
#[command(disable_help_subcommand = true, subcommand_value_name = "TEST", subcommand_help_heading = "Tests")]
pub struct PerfCommand {
    /// A test or the comparison, with its own options.
    #[command(subcommand)]
    pub subcommand: PerfSubcommand,
    /// Options of every test.
    #[command(flatten)]
    pub run: RunOptions,
}

/// What `perf` does.
#[derive(Subcommand, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub enum PerfSubcommand {
    #[command(flatten)]
    Test(Test),
    /// Ours and the installed peers in turns: UCX, iceoryx2, perftest, cache line, ring, memcpy
    ///
    /// Each run is a process of its own. A row is near or far by the cache line before and after
    /// each run. A ratio is that of ours and a peer in one turn, if both had the same distance.
    Compare(CompareOptions),
}
