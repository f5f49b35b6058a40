//! The second process: this program started again, watched, and ended with the first one.

use super::ResponderArgs;
use super::control_channel::{ControlChannel, PATIENCE};
use crate::CliError;
use crate::reference::SharedMapping;
use rustix::io::FdFlags;
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a process that was told to end may take.
const PARTING: Duration = Duration::from_secs(10);

/// The second process, as the first one holds it. Dropped, it is killed.
#[derive(Debug)]
pub struct PeerProcess {
    child: Child,
}

impl PeerProcess {
    /// Starts it with its end of a new channel, which hangs up when it dies, and the mapping's file inherited.
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
        Ok((PeerProcess { child }, ControlChannel::new(ours, PATIENCE)?))
    }

    /// Waits for it to end by itself, as it does after it was told to quit.
    pub fn finish(mut self) -> Result<(), CliError> {
        match self.wait(PARTING)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(CliError::Failed(format!("the second process {}", how(status)))),
            None => Err(CliError::Failed(format!("the second process did not end within {PARTING:?}"))),
        }
    }

    /// Says how it ended, if it has ended or is about to.
    pub fn exit_status(&mut self) -> Option<String> {
        let status = self.wait(Duration::from_millis(500)).ok()??;
        Some(format!("the second process (pid {}) {}", self.child.id(), how(status)))
    }

    fn wait(&mut self, patience: Duration) -> Result<Option<ExitStatus>, CliError> {
        let since = Instant::now();
        loop {
            let status = self.child.try_wait();
            match status.map_err(|error| CliError::failed("waiting for the second process", error))? {
                None if since.elapsed() < patience => std::thread::sleep(Duration::from_millis(2)),
                status => return Ok(status),
            }
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn how(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("was killed by signal {signal}"),
        None => format!("ended with {status}"),
    }
}

/// In the second process: takes what the first one has left it, and makes sure not to outlive it.
pub fn inherit(args: &ResponderArgs) -> Result<(Arc<SharedMapping>, ControlChannel), CliError> {
    let tried = "taking over from the first process";
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| CliError::failed(tried, error))?;
    // It may have died before the line above.
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    if parent != args.parent {
        return Err(CliError::failed(tried, format!("its process {} is gone", args.parent)));
    }
    let file = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", args.memfd))
        .map_err(|error| CliError::failed(tried, error))?;
    let shared = Arc::new(SharedMapping::open(&file)?);
    let stdin =
        std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| CliError::failed(tried, error))?;
    Ok((shared, ControlChannel::new(UnixStream::from(stdin), PATIENCE)?))
}
