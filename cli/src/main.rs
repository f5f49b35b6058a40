//! The program `tensorwire`: benchmarks and diagnostics of the library.
//!
//! Exit status: 0 after success, 1 after a failure, 2 for a command line that can't be carried out.
//! `launch` ends with the status of the first process that failed.
// They panic where nobody reads: see `error::print` and `error::say`.
#![cfg_attr(not(test), deny(clippy::disallowed_macros))]

mod auth;
mod devices;
mod error;
mod launch;
mod perf;
mod reference;
mod signals;

use clap::builder::PossibleValuesParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use error::{CliError, print, say};
use std::ffi::OsString;
use std::process::ExitCode;
use tensorwire::Profile;

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
    Perf(Box<perf::PerfCommand>),
    Devices(devices::DevicesArgs),
    Launch(Box<launch::LaunchArgs>),
    #[command(subcommand)]
    Auth(auth::AuthCommand),
    /// Prints every setting: meaning, default, allowed values, environment variables.
    Config {
        /// Prints the page `docs/reference/settings.md`.
        #[arg(long, conflicts_with = "profile")]
        markdown: bool,
        /// Prints a profile: its settings, with the reason and the effect of each.
        #[arg(
            long, value_name = "NAME",
            value_parser = PossibleValuesParser::new(Profile::ALL.map(Profile::name))
        )]
        profile: Option<String>,
    },
    /// A process of `launch`, before it is the program.
    #[command(hide = true)]
    LaunchMember(launch::MemberArgs),
    /// The second process of `perf --local`, which starts it.
    #[command(hide = true)]
    PerfResponder(perf::ResponderArgs),
}

fn main() -> ExitCode {
    // Prints help, the version and errors of the command line, and exits with 2 after an error.
    let matches = matches(std::env::args_os().collect()).unwrap_or_else(|error| error.exit());
    let outcome = match Cli::from_arg_matches(&matches) {
        Ok(cli) => run(cli.command, &matches),
        Err(error) => error.exit(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ (CliError::Reported | CliError::Ended(_))) => error.exit_code(),
        Err(error) => {
            say(format_args!("error: {error}"));
            error.exit_code()
        }
    }
}

/// Reads the command line. The error for a command or test that does not exist lists those that do.
fn matches(arguments: Vec<OsString>) -> Result<clap::ArgMatches, clap::Error> {
    let mut command = Cli::command();
    let first = arguments.get(1).cloned();
    command.try_get_matches_from_mut(arguments).map_err(|mut error| {
        if error.kind() == ErrorKind::InvalidSubcommand {
            let parent = first.and_then(|name| command.find_subcommand(name)).unwrap_or(&command);
            let visible = parent.get_subcommands().filter(|command| !command.is_hide_set());
            let names: Vec<_> = visible.map(clap::Command::get_name).collect();
            let tip = format!("there are {}", names.join(", "));
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        error
    })
}

fn run(command: Command, matches: &clap::ArgMatches) -> Result<(), CliError> {
    match command {
        Command::Perf(args) => {
            let given = matches.subcommand_matches("perf").map(perf::given);
            perf::run(*args, &given.unwrap_or_default())
        }
        Command::Devices(args) => devices::run(args),
        Command::Auth(command) => auth::run(command),
        Command::Config { profile: Some(name), .. } => {
            let named = Profile::ALL.into_iter().find(|profile| profile.name() == name);
            print(named.map_or("", Profile::text))
        }
        Command::Config { markdown: true, .. } => print(&tensorwire::internals::config::reference()),
        Command::Config { .. } => print(&tensorwire::internals::config::listing()),
        Command::Launch(args) => launch::run(*args),
        Command::LaunchMember(args) => launch::become_program(args),
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
    fn the_error_for_an_unknown_test_or_command_lists_those_there_are() {
        let said = |arguments: &[&str]| {
            let error = matches(arguments.iter().map(OsString::from).collect()).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        };
        let text = said(&["tensorwire", "perf", "foo"]);
        assert!(text.contains("there are write_lat, write_bw, send_lat, read_lat"), "{text}");
        let text = said(&["tensorwire", "foo"]);
        assert!(
            text.contains("there are perf, devices, launch, auth, config") && !text.contains("responder"),
            "{text}"
        );
    }

    #[test]
    fn a_flag_that_does_not_exist_is_named() {
        let error = Cli::try_parse_from(["tensorwire", "perf", "cache_line", "--locall"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--locall"));
    }
}
