//! The step between the launcher and the program. The launcher starts this program again. It has
//! the kernel kill it with the launcher, and then becomes the program of the command line.

use crate::error::{CliError, say};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// The name of the command.
const NAME: &str = "launch-member";
/// The exit status of a program that does not start, as in shells.
const NOT_STARTED: u8 = 127;

/// What the launcher passes.
#[derive(clap::Args, Debug)]
pub struct MemberArgs {
    /// The process that has started this one.
    #[arg(long)]
    parent: u32,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// A command that becomes the program and the arguments that are added to it. The kernel kills it
/// with the calling thread. `own` is the path of this program.
pub fn tied(own: &Path) -> Command {
    let mut command = Command::new(own);
    command.args([NAME, "--parent", &std::process::id().to_string(), "--"]);
    command
}

/// Becomes the program. Returns only if that fails.
pub fn become_program(args: MemberArgs) -> Result<(), CliError> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| CliError::failed("tying this process to the launcher", error))?;
    // The launcher may have ended before the call above.
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if parent != Some(args.parent) {
        return Err(CliError::Failed("the launcher that started this process is gone".into()));
    }
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(CliError::Usage("no program was named".into()));
    };
    let error = Command::new(program).args(arguments).exec();
    say(format_args!("error: {} can't be started: {error}", program.display()));
    Err(CliError::Ended(NOT_STARTED))
}
