//! Starts the members of this host, waits for them, and ends them.

use super::environment::{Launched, REMOVED};
use super::{member, output};
use crate::error::CliError;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tensorwire::TaskId;

/// How long output is waited for after the end of its process. A process that it has started may
/// have the pipe.
const REST: Duration = Duration::from_secs(1);

enum LaunchEvent {
    /// The process has ended, and was not waited for.
    Ended(usize),
    /// A stream of a process has ended.
    Closed,
    Signal(i32),
}

struct Member {
    name: TaskId,
    child: Child,
    has_ended: bool,
}

/// A process that failed first.
struct Failure {
    name: TaskId,
    process: u32,
    status: ExitStatus,
}

impl Failure {
    /// As shells have it.
    fn exit_status(&self) -> u8 {
        let code = self.status.code().or_else(|| self.status.signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {}) ", self.name, self.process)?;
        match (self.status.signal(), self.status.code()) {
            (Some(signal), _) => write!(f, "was killed by signal {}", signal_name(signal)),
            (None, code) => write!(f, "ended with status {}", code.unwrap_or(-1)),
        }
    }
}

/// The number and name of a signal: `9 (SIGKILL)`.
fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("{signal} ({name})"),
        None => signal.to_string(),
    }
}

/// Runs the program as each of the members, and waits for them. All have ended when this returns.
///
/// # Errors
/// [`CliError::Ended`] with the exit status, if one failed or a signal came.
pub fn run(members: &[Launched], command: &[OsString], grace: Duration) -> Result<(), CliError> {
    let (events, news) = mpsc::channel();
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|error| CliError::failed("waiting for signals", error))?;
    let of_signals = events.clone();
    // It ends with this process.
    std::thread::spawn(move || {
        signals.forever().try_for_each(|signal| of_signals.send(LaunchEvent::Signal(signal)))
    });
    let mut crew = Crew { members: Vec::new(), first: None, signal: None, kill_at: None, open: 0 };
    for launched in members {
        crew.start(launched, command, &events)?;
    }
    crew.listen(&news, grace);
    crew.outcome()
}

/// All members of this host. Dropping it kills those that run.
struct Crew {
    members: Vec<Member>,
    /// The first one that failed.
    first: Option<Failure>,
    /// The signal that was passed on.
    signal: Option<i32>,
    /// When those that run are killed.
    kill_at: Option<Instant>,
    /// Streams that have not ended.
    open: usize,
}

impl Crew {
    fn start(
        &mut self,
        launched: &Launched,
        command: &[OsString],
        events: &Sender<LaunchEvent>,
    ) -> Result<(), CliError> {
        let Launched { name, variables } = launched;
        let failed = |error: &dyn fmt::Display| CliError::failed(format!("starting {name}"), error);
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let mut start = Command::new(program);
        start.args([member::NAME, "--parent", &std::process::id().to_string(), "--"]).args(command);
        for name in REMOVED {
            start.env_remove(name);
        }
        start.envs(variables.iter().map(|(name, value)| (name, value)));
        start.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C goes to the group of the launcher, which passes it on. What a member starts is in
        // its group, and ends with it.
        start.process_group(0);
        let mut child = start.spawn().map_err(|error| failed(&error))?;
        let prefix = format!("[{}:{}] ", name.job(), name.task());
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let process = Pid::from_child(&child);
        let index = self.members.len();
        self.members.push(Member { name: name.clone(), child, has_ended: false });
        let thread = |work: Box<dyn FnOnce() + Send>| -> Result<(), CliError> {
            let _: JoinHandle<()> =
                std::thread::Builder::new().spawn(work).map_err(|error| failed(&error))?;
            Ok(())
        };
        if let Some(out) = out {
            self.open += 1;
            let (prefix, events) = (prefix.clone(), events.clone());
            thread(Box::new(move || {
                output::forward(&prefix, out, output::to_stdout);
                let _ = events.send(LaunchEvent::Closed);
            }))?;
        }
        if let Some(err) = err {
            self.open += 1;
            let events = events.clone();
            thread(Box::new(move || {
                output::forward(&prefix, err, output::to_stderr);
                let _ = events.send(LaunchEvent::Closed);
            }))?;
        }
        let events = events.clone();
        thread(Box::new(move || {
            // It stays to be waited for, so that its number is nobody else's.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(process), options), Err(rustix::io::Errno::INTR)) {}
            let _ = events.send(LaunchEvent::Ended(index));
        }))
    }

    /// Handles events until all have ended.
    fn listen(&mut self, news: &Receiver<LaunchEvent>, grace: Duration) {
        while self.members.iter().any(|member| !member.has_ended) {
            match next(news, self.kill_at) {
                Some(LaunchEvent::Ended(index)) => self.end(index, grace),
                Some(LaunchEvent::Closed) => self.open -= 1,
                Some(LaunchEvent::Signal(signal)) => self.pass_on(signal),
                None => {
                    self.kill_at = None;
                    self.signal_all(Signal::KILL);
                }
            }
        }
        let rest = Instant::now() + REST;
        while self.open > 0 {
            match next(news, Some(rest)) {
                Some(LaunchEvent::Closed) => self.open -= 1,
                Some(LaunchEvent::Ended(_)) => {}
                Some(LaunchEvent::Signal(_)) | None => return,
            }
        }
    }

    fn end(&mut self, index: usize, grace: Duration) {
        let member = &mut self.members[index];
        member.has_ended = true;
        let Ok(status) = member.child.wait() else { return };
        // After a signal all end, each in its own way.
        if status.success() || self.first.is_some() || self.signal.is_some() {
            return;
        }
        let failure = Failure { name: member.name.clone(), process: member.child.id(), status };
        let are_others = self.members.iter().any(|member| !member.has_ended);
        let then = if are_others { "; the others are ended" } else { "" };
        output::to_stderr(format!("tensorwire launch: {failure}{then}\n").as_bytes());
        self.first = Some(failure);
        self.kill_at = Some(Instant::now() + grace);
        self.signal_all(Signal::TERM);
    }

    /// The first signal is passed on, the second one kills.
    fn pass_on(&mut self, signal: i32) {
        if self.signal.replace(signal).is_some() {
            return self.signal_all(Signal::KILL);
        }
        let name = signal_name(signal);
        let what = format!("tensorwire launch: signal {name} is passed on; another one kills\n");
        output::to_stderr(what.as_bytes());
        self.signal_all(match signal {
            SIGINT => Signal::INT,
            SIGHUP => Signal::HUP,
            _ => Signal::TERM,
        });
    }

    fn signal_all(&self, signal: Signal) {
        for member in self.members.iter().filter(|member| !member.has_ended) {
            // Fails only for a group that has ended.
            let _ = kill_process_group(Pid::from_child(&member.child), signal);
        }
    }

    fn outcome(&self) -> Result<(), CliError> {
        match (&self.first, self.signal) {
            (Some(failure), _) => Err(CliError::Ended(failure.exit_status())),
            (None, Some(signal)) => Err(CliError::Ended(u8::try_from(128 + signal).unwrap_or(1))),
            (None, None) => Ok(()),
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for member in self.members.iter_mut().filter(|member| !member.has_ended) {
            let _ = member.child.wait();
        }
    }
}

/// The next event; `None` at the deadline.
fn next(news: &Receiver<LaunchEvent>, deadline: Option<Instant>) -> Option<LaunchEvent> {
    let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
    match news.recv_timeout(left) {
        Ok(event) => Some(event),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => unreachable!("the thread of the signals has a sender"),
    }
}
