//! The second process of `perf --local`: this program, started again. It ends with the first one.

use super::control_channel::{CHANNEL_TIMEOUT, ControlChannel};
use crate::error::CliError;
use crate::reference::word_mapping::WordMapping;
use rustix::io::FdFlags;
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the second process may take to end after it was told to.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long its exit status may take to be known after the channel has hung up.
const EXIT_STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// How the second process is started.
#[derive(clap::Parser, Debug)]
pub struct ResponderArgs {
    /// The file descriptor of the shared mapping, inherited
    memfd: i32,
    /// The process id of the first process
    parent: i32,
}

/// The first process's handle of the second one. Dropping it kills the process.
#[derive(Debug)]
pub struct ResponderProcess {
    child: Child,
}

impl ResponderProcess {
    /// Starts it with one end of a new channel and the mapping's file.
    pub fn start(memfd: OwnedFd) -> Result<(Self, ControlChannel), CliError> {
        let tried = "starting the second process";
        let failed = |error: std::io::Error| CliError::failed(tried, error);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let program = std::env::current_exe().map_err(failed)?;
        rustix::io::fcntl_setfd(&memfd, FdFlags::empty()).map_err(|error| failed(error.into()))?;
        let child = Command::new(program)
            .arg("perf-responder")
            .arg(memfd.as_raw_fd().to_string())
            .arg(std::process::id().to_string())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        Ok((ResponderProcess { child }, ControlChannel::new(ours, CHANNEL_TIMEOUT)?))
    }

    /// Waits for its exit, after it was told to quit.
    pub fn finish(mut self) -> Result<(), CliError> {
        match self.wait(EXIT_TIMEOUT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(CliError::Failed(format!("the second process {}", in_words(status)))),
            None => Err(CliError::Failed(format!("the second process did not end within {EXIT_TIMEOUT:?}"))),
        }
    }

    /// How it ended, in words; `None` if it has not ended within half a second.
    pub fn exit_status(&mut self) -> Option<String> {
        let status = self.wait(EXIT_STATUS_TIMEOUT).ok()??;
        Some(format!("the second process (pid {}) {}", self.child.id(), in_words(status)))
    }

    fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>, CliError> {
        let since = Instant::now();
        loop {
            let status = self.child.try_wait();
            match status.map_err(|error| CliError::failed("waiting for the second process", error))? {
                None if since.elapsed() < timeout => std::thread::sleep(Duration::from_millis(2)),
                status => return Ok(status),
            }
        }
    }
}

impl Drop for ResponderProcess {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn in_words(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("was killed by signal {signal}"),
        None => format!("ended with {status}"),
    }
}

/// In the second process: opens the inherited mapping and channel. The kernel will kill it when the
/// first process dies.
pub fn inherit(args: &ResponderArgs) -> Result<(Arc<WordMapping>, ControlChannel), CliError> {
    let tried = "taking over from the first process";
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| CliError::failed(tried, error))?;
    // The parent may have died before the line above.
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    if parent != args.parent {
        return Err(CliError::failed(tried, format!("its process {} is gone", args.parent)));
    }
    let file = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", args.memfd))
        .map_err(|error| CliError::failed(tried, error))?;
    let shared = Arc::new(WordMapping::open(&file)?);
    let stdin =
        std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| CliError::failed(tried, error))?;
    Ok((shared, ControlChannel::new(UnixStream::from(stdin), CHANNEL_TIMEOUT)?))
}
