//! The `tensorwire` program: what it understands, and how it ends.
//!
//! Exit codes: 0 when it did what was asked, 1 when that failed, 2 when the command line asks for something
//! that can't be. These modules belong to the program alone; the library shows nothing of them.

mod devices;
mod perf;
mod reference;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Moves tensors between the processes of a trainer: benchmarks and diagnostics.
#[derive(Parser, Debug)]
#[command(name = "tensorwire", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Measures latency between two pinned processes, beside bare references, in turns.
    Perf(perf::PerfArgs),
    /// Shows the RDMA devices of this machine, and which device, port and GID would be chosen and why.
    Devices(devices::DevicesArgs),
    /// Prints every setting: key, variable, default, what is allowed.
    Config,
    /// The second process of `perf --local`; only that one starts it.
    #[command(hide = true)]
    PerfResponder(perf::ResponderArgs),
}

/// Why the program did not do what was asked.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// The command line asks for something that can't be: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// It was tried and failed: exit code 1.
    #[error("{0}")]
    Failed(String),
    /// It failed, and another process has been told and says so: exit code 1.
    #[error("reported by the first process")]
    Reported,
}

impl CliError {
    /// A failed attempt: what was tried, and the error that it ended in.
    fn failed(tried: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        CliError::Failed(format!("{tried}: {error}"))
    }

    fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::Usage(_) => 2,
            CliError::Failed(_) | CliError::Reported => 1,
        })
    }
}

/// Prints text. A reader that has seen enough and closed the pipe is no failure.
fn print(text: &str) -> Result<(), CliError> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CliError::failed("writing to stdout", error))
        }
        _ => Ok(()),
    }
}

/// Runs the program on this process's command line.
fn main() -> ExitCode {
    let cli = Cli::parse(); // prints help, version and mistakes itself, and exits with 2 on a mistake
    let outcome = match cli.command {
        Command::Perf(args) => perf::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Config => print(&tensorwire::internals::config::reference()),
        Command::PerfResponder(args) => perf::respond(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::Reported) => CliError::Reported.exit_code(),
        Err(error) => {
            eprintln!("error: {error}");
            error.exit_code()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_flag_that_does_not_exist_is_named() {
        let error = Cli::try_parse_from(["tensorwire", "perf", "cache_line", "--locall"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--locall"));
    }
}
