//! The launcher's own need of file descriptors.

use crate::error::CliError;
use rustix::process::{Resource, getrlimit};

/// Standard output and error of a process.
const EACH: u64 = 2;
/// What is open while a process is started, and for the signals.
const BEYOND: u64 = 16;

/// Fails if the limit is too low for so many processes, before the first one is started.
///
/// # Errors
/// [`CliError::Failed`] with the limit to raise.
pub fn check(processes: u32) -> Result<(), CliError> {
    // Whoever started the launcher can have left it more than the standard streams.
    let open = std::fs::read_dir("/proc/self/fd").map_or(3, |entries| entries.count() as u64);
    let need = open + EACH * u64::from(processes) + BEYOND;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < need => {
            let what = format!(
                "the launcher needs {need} open files for {processes} processes, and the limit is {limit}: \
                 raise `ulimit -n` to {need}, or start fewer processes"
            );
            Err(CliError::Failed(what))
        }
        _ => Ok(()),
    }
}
