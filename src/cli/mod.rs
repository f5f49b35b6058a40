//! The `tensorwire` program: reads the command line, runs a command, prints what went wrong in one line.
//!
//! It uses the library as anybody would. Bare measurements that the library is compared with are in `reference`,
//! which alone may touch raw memory.

mod perf;
mod reference;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Measures and explains tensorwire on this host.
#[derive(Parser)]
#[command(name = "tensorwire", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures latency between two processes, beside bare references in the same run
    Perf(perf::PerfOptions),
    /// Prints every setting: key, variable, default, what is allowed
    Config,
    /// The second process of `perf --local`
    #[command(hide = true)]
    PerfPeer(perf::PeerOptions),
}

/// Runs the program. Exit status: 0 done, 1 failed, 2 wrong command line.
pub fn run() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Perf(options) => perf::run(&options),
        Command::PerfPeer(options) => perf::run_peer(&options),
        Command::Config => {
            print!("{}", tensorwire::config::reference());
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tensorwire: {error}");
            error.exit_code()
        }
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// The command line makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The work failed.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    fn failed(error: impl std::fmt::Display) -> Self {
        CliError::Failed(error.to_string())
    }

    fn exit_code(&self) -> ExitCode {
        match self {
            CliError::Usage(_) => ExitCode::from(2),
            CliError::Failed(_) => ExitCode::FAILURE,
        }
    }
}
