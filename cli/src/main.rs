//! The program `tensorwire`: benchmarks and diagnostics of the library.
//!
//! Exit status: 0 after success, 1 after a failure, 2 for a command line that can't be carried out.

mod devices;
mod error;
mod perf;
mod reference;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use error::{CliError, print};
use std::process::ExitCode;

/// Benchmarks and diagnostics of tensorwire, which moves tensors between the processes of a
/// trainer.
#[derive(Parser, Debug)]
#[command(name = "tensorwire", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Perf(perf::PerfArgs),
    Devices(devices::DevicesArgs),
    /// Prints every setting: meaning, default, allowed values, environment variables.
    Config {
        /// Prints the page `docs/reference/settings.md`.
        #[arg(long)]
        markdown: bool,
    },
    /// The second process of `perf --local`, which starts it.
    #[command(hide = true)]
    PerfResponder(perf::ResponderArgs),
}

fn main() -> ExitCode {
    // Prints help, the version and errors of the command line, and exits with 2 after an error.
    let matches = Cli::command().get_matches();
    let outcome = match Cli::from_arg_matches(&matches) {
        Ok(cli) => run(cli.command, &matches),
        Err(error) => error.exit(),
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

fn run(command: Command, matches: &clap::ArgMatches) -> Result<(), CliError> {
    match command {
        Command::Perf(args) => {
            let given = matches.subcommand_matches("perf").map(perf::given);
            perf::run(args, &given.unwrap_or_default())
        }
        Command::Devices(args) => devices::run(args),
        Command::Config { markdown: true } => print(&tensorwire::internals::config::reference()),
        Command::Config { markdown: false } => print(&tensorwire::internals::config::listing()),
        Command::PerfResponder(args) => perf::respond(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
