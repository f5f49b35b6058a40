//! How the program fails and prints.

use std::process::ExitCode;

/// Why the program did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line asks for the impossible: exit status 2.
    #[error("{0}")]
    Usage(String),
    /// An attempt failed: exit status 1.
    #[error("{0}")]
    Failed(String),
    /// A process that this one has started failed, and the reason is printed: its exit status.
    #[error("a process ended with status {0}")]
    Ended(u8),
    /// An attempt failed, and another process prints the reason: exit status 1.
    #[error("reported by the first process")]
    Reported,
}

impl CliError {
    /// A failed attempt: what was tried, and the error that ended it.
    pub fn failed(tried: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        CliError::Failed(format!("{tried}: {error}"))
    }

    /// The exit status of the program.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::Usage(_) => 2,
            CliError::Ended(status) => *status,
            CliError::Failed(_) | CliError::Reported => 1,
        })
    }
}

/// Says a line on standard error. Nobody may be able to read it, which ends nothing.
pub fn say(line: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints text. A reader that has closed the pipe is no error.
pub fn print(text: &str) -> Result<(), CliError> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CliError::failed("writing to stdout", error))
        }
        _ => Ok(()),
    }
}
