//! Starts the members of this host, waits for them, and ends them.

use super::environment::{Launched, inherited};
use super::{groups, member, output};
use crate::error::CliError;
use crate::signals;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tensorwire::TaskId;

/// How long output is waited for after the end of all. A process that has left its group may have
/// the pipe.
const REST: Duration = Duration::from_secs(1);
/// How long the processes of a group may take to end after the kill. Some can't be killed: those of
/// another user.
const DYING: Duration = Duration::from_secs(2);
/// The shortest and the longest time between two looks at the groups.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(100)];

enum LaunchEvent {
    /// The process has ended, and was not waited for.
    Ended(usize, End),
    /// A stream of a process has ended, or a line of the launcher was written.
    Closed,
    /// A signal that ends the launch.
    Signal(i32),
    /// A signal whose meaning the program alone knows.
    UserSignal(Signal),
}

impl LaunchEvent {
    fn of(signal: i32) -> Self {
        match signal {
            SIGUSR1 => LaunchEvent::UserSignal(Signal::USR1),
            SIGUSR2 => LaunchEvent::UserSignal(Signal::USR2),
            signal => LaunchEvent::Signal(signal),
        }
    }
}

struct Member {
    name: TaskId,
    /// It is waited for when its group has ended too. Until then nobody else gets its number, which
    /// is also that of the group.
    child: Child,
    has_ended: bool,
    /// It runs as another user, so this process may not kill it. Others of its group may be killed.
    refuses_kill: bool,
}

impl Member {
    fn group(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

/// How a process has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Status(i32),
    Signal(i32),
}

impl End {
    /// Waits for the end of a process, which stays to be waited for.
    fn of(process: Pid) -> Self {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        loop {
            match waitid(WaitId::Pid(process), options) {
                Err(Errno::INTR) => {}
                Ok(Some(status)) => {
                    let signal = status.terminating_signal().map(End::Signal);
                    return signal.unwrap_or(End::Status(status.exit_status().unwrap_or(-1)));
                }
                // Only for a process that was waited for.
                Ok(None) | Err(_) => return End::Status(-1),
            }
        }
    }

    /// As shells have it.
    fn exit_status(self) -> u8 {
        let (End::Status(code) | End::Signal(code)) = self;
        let base = if matches!(self, End::Signal(_)) { 128 } else { 0 };
        u8::try_from(base + code).ok().filter(|code| *code != 0).unwrap_or(1)
    }
}

/// A process that failed first.
struct Failure {
    name: TaskId,
    process: u32,
    end: End,
}

/// What was done to end what runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    NotBegun,
    /// A signal was passed on, and what runs is killed then. It need not be SIGTERM: what members
    /// leave behind is asked to end all the same.
    PassedOn {
        kill_at: Instant,
    },
    /// All were asked to end, and are killed then.
    Asked {
        kill_at: Instant,
    },
    Killed,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {}) ", self.name, self.process)?;
        match self.end {
            End::Signal(signal) => write!(f, "was killed by signal {}", signal_name(signal)),
            End::Status(code) => write!(f, "ended with status {code}"),
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

/// Runs the program as each of the members, and waits for them. When this returns, they and all
/// processes of their groups have ended, but for those of another user.
///
/// # Errors
/// [`CliError::Ended`] with the exit status, if one failed or a signal came.
pub fn run(members: &[Launched], command: &[OsString], grace: Duration) -> Result<(), CliError> {
    let (events, news) = mpsc::channel();
    // The members ignore the others, too.
    let handled = signals::not_ignored(&[SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2]);
    // If whoever started the launcher ignores SIGCHLD, the kernel drops how processes have ended.
    let mut signals = Signals::new(handled.chain([SIGCHLD]))
        .map_err(|error| CliError::failed("waiting for signals", error))?;
    let of_signals = events.clone();
    // It ends with this process.
    let _: JoinHandle<_> = std::thread::Builder::new()
        .spawn(move || {
            let mut passed_on = signals.forever().filter(|signal| *signal != SIGCHLD);
            passed_on.try_for_each(|signal| of_signals.send(LaunchEvent::of(signal)))
        })
        .map_err(|error| {
            CliError::failed(
                "waiting for signals",
                format!("{error}; raise the limit of threads (ulimit -u)"),
            )
        })?;
    let mut crew =
        Crew { members: Vec::new(), first: None, signal: None, ending: Ending::NotBegun, open: 0, events };
    for launched in members {
        crew.start(launched, command)?;
    }
    crew.listen(&news, grace);
    crew.outcome()
}

/// All members of this host. Dropping it kills what runs of their groups.
struct Crew {
    members: Vec<Member>,
    /// The first one that failed.
    first: Option<Failure>,
    /// The signal that was passed on.
    signal: Option<i32>,
    ending: Ending,
    /// Streams that have not ended, and lines of the launcher that were not written.
    open: usize,
    events: Sender<LaunchEvent>,
}

impl Crew {
    fn start(&mut self, launched: &Launched, command: &[OsString]) -> Result<(), CliError> {
        let Launched { name, variables } = launched;
        let failed = |error: &dyn fmt::Display| CliError::failed(format!("starting {name}"), error);
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let mut start = member::tied(&program);
        start.args(command);
        start.env_clear().envs(inherited()).envs(variables.iter().map(|(name, value)| (name, value)));
        start.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C goes to the group of the launcher, which passes it on. What a member starts is in
        // its group too, so that the launcher can end it.
        start.process_group(0);
        let mut child = start.spawn().map_err(|error| failed(&error))?;
        let prefix = format!("[{}:{}] ", name.job(), name.task());
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let process = Pid::from_child(&child);
        let index = self.members.len();
        let member = Member { name: name.clone(), child, has_ended: false, refuses_kill: false };
        self.members.push(member);
        let thread = |work: Box<dyn FnOnce() + Send>| -> Result<(), CliError> {
            let _: JoinHandle<()> =
                std::thread::Builder::new().spawn(work).map_err(|error| failed(&error))?;
            Ok(())
        };
        if let Some(out) = out {
            self.open += 1;
            let (prefix, events) = (prefix.clone(), self.events.clone());
            thread(Box::new(move || {
                output::forward(&prefix, out, output::to_stdout);
                let _ = events.send(LaunchEvent::Closed);
            }))?;
        }
        if let Some(err) = err {
            self.open += 1;
            let events = self.events.clone();
            thread(Box::new(move || {
                output::forward(&prefix, err, output::to_stderr);
                let _ = events.send(LaunchEvent::Closed);
            }))?;
        }
        let events = self.events.clone();
        thread(Box::new(move || {
            let _ = events.send(LaunchEvent::Ended(index, End::of(process)));
        }))
    }

    /// Handles events until all have ended that can be ended.
    fn listen(&mut self, news: &Receiver<LaunchEvent>, grace: Duration) {
        while self.members.iter().any(|member| !member.has_ended && !member.refuses_kill) {
            let kill_at = match self.ending {
                Ending::PassedOn { kill_at } | Ending::Asked { kill_at } => Some(kill_at),
                Ending::NotBegun | Ending::Killed => None,
            };
            match next(news, kill_at) {
                Some(event) => self.handle(event, grace),
                None => self.kill(),
            }
        }
        self.end_groups(news, grace);
        let mut rest = Instant::now() + REST;
        while self.open > 0 {
            match next(news, Some(rest)) {
                // Whoever reads the output is slow: a pager, for example.
                None if output::is_writing() => rest = Instant::now() + REST,
                Some(LaunchEvent::Signal(_)) | None => return,
                Some(event) => self.handle(event, grace),
            }
        }
    }

    /// Ends what members that have ended have left in their groups.
    fn end_groups(&mut self, news: &Receiver<LaunchEvent>, grace: Duration) {
        let groups: HashSet<i32> =
            self.members.iter().map(|member| member.group().as_raw_nonzero().get()).collect();
        let (mut pause, mut killed_at) = (LOOKS[0], None);
        loop {
            let left = groups::living(&groups);
            if left.is_empty() {
                return;
            }
            let now = Instant::now();
            match self.ending {
                Ending::NotBegun | Ending::PassedOn { .. } => self.ask(grace),
                Ending::Asked { kill_at } if kill_at <= now => self.kill(),
                Ending::Asked { .. } => {}
                Ending::Killed if now >= *killed_at.get_or_insert(now) + DYING => {
                    let what = format!("tensorwire launch: processes {left:?} can't be ended\n");
                    return self.say(what);
                }
                Ending::Killed => {}
            }
            match next(news, Some(now + pause)) {
                Some(event) => self.handle(event, grace),
                None => pause = LOOKS[1].min(pause * 2),
            }
        }
    }

    fn handle(&mut self, event: LaunchEvent, grace: Duration) {
        match event {
            LaunchEvent::Ended(index, end) => self.end(index, end, grace),
            LaunchEvent::Closed => self.open -= 1,
            LaunchEvent::Signal(signal) => self.pass_on(signal, grace),
            LaunchEvent::UserSignal(signal) => self.signal_all(signal),
        }
    }

    fn end(&mut self, index: usize, end: End, grace: Duration) {
        let member = &mut self.members[index];
        member.has_ended = true;
        // After a signal all end, each in its own way.
        if end == End::Status(0) || self.first.is_some() || self.signal.is_some() {
            return;
        }
        let failure = Failure { name: member.name.clone(), process: member.child.id(), end };
        let are_others = self.members.iter().any(|member| !member.has_ended);
        let then = match are_others {
            true => format!("; the others are ended, and killed after {grace:?} (--grace)"),
            false => String::new(),
        };
        self.say(format!("tensorwire launch: {failure}{then}\n"));
        self.first = Some(failure);
        self.ask(grace);
    }

    /// Has a thread write a line to standard error: what reads it may be a pager, and signals are
    /// not to wait for that.
    fn say(&mut self, line: String) {
        self.open += 1;
        let events = self.events.clone();
        let write = {
            let line = line.clone();
            move || {
                output::to_stderr(line.as_bytes());
                let _ = events.send(LaunchEvent::Closed);
            }
        };
        if std::thread::Builder::new().spawn(write).is_err() {
            self.open -= 1;
            output::to_stderr(line.as_bytes());
        }
    }

    /// Asks all to end, before they are killed.
    fn ask(&mut self, grace: Duration) {
        self.ending = Ending::Asked { kill_at: Instant::now() + grace };
        self.signal_all(Signal::TERM);
    }

    fn kill(&mut self) {
        self.ending = Ending::Killed;
        self.signal_all(Signal::KILL);
        for member in &mut self.members {
            member.refuses_kill =
                kill_process(Pid::from_child(&member.child), Signal::KILL) == Err(Errno::PERM);
        }
    }

    /// The first signal is passed on. The second one kills, as does the end of the grace period.
    fn pass_on(&mut self, signal: i32, grace: Duration) {
        if self.signal.replace(signal).is_some() {
            return self.kill();
        }
        let name = signal_name(signal);
        let what = format!(
            "tensorwire launch: signal {name} is passed on; what runs after {grace:?} (--grace), or at \
             another signal, is killed\n"
        );
        self.say(what);
        // After a failure the time runs already.
        if self.ending == Ending::NotBegun {
            self.ending = Ending::PassedOn { kill_at: Instant::now() + grace };
        }
        self.signal_all(match signal {
            SIGINT => Signal::INT,
            SIGHUP => Signal::HUP,
            SIGQUIT => Signal::QUIT,
            _ => Signal::TERM,
        });
    }

    fn signal_all(&self, signal: Signal) {
        for member in &self.members {
            // Also of one that has ended: the processes that it has started may run. Fails only for
            // a group that has ended.
            let _ = kill_process_group(member.group(), signal);
        }
    }

    fn outcome(&self) -> Result<(), CliError> {
        match (&self.first, self.signal) {
            (Some(failure), _) => Err(CliError::Ended(failure.end.exit_status())),
            (None, Some(signal)) => Err(CliError::Ended(u8::try_from(128 + signal).unwrap_or(1))),
            (None, None) => Ok(()),
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.kill();
        for member in self.members.iter_mut().filter(|member| member.has_ended || !member.refuses_kill) {
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
