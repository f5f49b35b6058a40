//! Starts the processes of a run, reads their messages, and ends them.

use crate::error::Result;
use crate::exchange::Traffic;
use crate::hosts::{Secret, TrainHost};
use crate::member::{Assignment, FINISH, Job, Member, Message};
use crate::options::Options;
use crate::signals;
use crate::worker::{Outcome, Progress};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// The first argument of a process that [`run`] started. The second is its name, for `ps`.
pub const ASSIGNED: &str = "--assigned";

/// How long the other processes have to notice and report that one has ended.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long those of them that wait in their joins have to report errors of their own.
const JOIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a run has no result.
#[derive(Debug)]
pub enum Failure {
    /// The user ended it with this signal.
    Interrupted(&'static str),
    /// One line for each process that failed, the cause first.
    Failed(Vec<String>),
}

impl<E: Into<crate::error::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Failed(vec![crate::error::one_line(error.into().as_ref())])
    }
}

/// The results of the processes.
#[derive(Debug, Default)]
pub struct Results {
    /// The outcome of each worker, in order.
    pub outcomes: Vec<Outcome>,
    /// The traffic of each process.
    pub traffic: Vec<Traffic>,
}

enum Event {
    Message(usize, Message),
    /// A line that could not be parsed.
    Noise(usize, String),
    /// The process has closed its output.
    Closed(usize),
    Signal(&'static str),
}

/// Runs the plan in processes of their own. All have ended when this returns.
///
/// Call it once, before any thread is started.
pub fn run(options: &Options, show: impl FnMut(Progress)) -> std::result::Result<Results, Failure> {
    let (events, news) = mpsc::channel();
    let to_us = events.clone();
    // Fails when the run is over: then the signal came too late.
    signals::on_ending(move |signal| to_us.send(Event::Signal(signal)).unwrap_or_default())?;
    let mut crew = Crew::start(options, &events)?;
    crew.listen(&news, show)?;
    crew.results()
}

/// A started process.
struct Process {
    member: Member,
    child: Child,
    input: Option<ChildStdin>,
    done: bool,
    summary: Option<(Option<Outcome>, Traffic)>,
    error: Option<String>,
    joined: bool,
    ended: bool,
    stuck: bool,
    /// The member whose end has ended the join of this process.
    waited_for: Option<Member>,
}

/// How a process failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    /// A signal killed it. The errors of the others follow from this.
    Killed,
    /// It reported an error.
    Error,
    /// It was ended, as another had ended before all had joined.
    Waited,
    /// It did not end in time and was killed.
    Stuck,
}

/// The failure of a process.
struct Failed {
    member: Member,
    end: End,
    line: String,
}

/// All processes. Dropping this kills the running ones.
#[derive(Default)]
struct Crew {
    processes: Vec<Process>,
    /// The failures, in the order of their detection.
    failures: Vec<Failed>,
    /// When the first process has ended.
    first_end: Option<Instant>,
    has_ended_joins: bool,
    /// The secret of processes on several hosts.
    secret: Option<Secret>,
}

impl Crew {
    fn start(options: &Options, events: &Sender<Event>) -> Result<Crew> {
        let plan = options.plan();
        let members = Member::all(&plan);
        let (addresses, secret) = match &options.hosts {
            Some(hosts) => (hosts.addresses(members.len()), Some(Secret::draw()?)),
            None => (free_addresses(members.len())?, None),
        };
        let (servers, workers) = addresses.split_at(plan.servers);
        let mut crew = Crew::default();
        crew.secret = secret;
        for (index, member) in members.into_iter().enumerate() {
            let assignment = Assignment {
                member,
                plan: plan.clone(),
                servers: servers.to_vec(),
                workers: workers.to_vec(),
                pool_bytes: options.pool_bytes(),
                core: options.cores.as_ref().map(|cores| cores.of(index)),
                poll: options.poll.clone(),
                fabric: options.fabric.clone(),
                standing: options.has_standing_requests(),
                device: options.devices.as_ref().map(|devices| devices.of(index).to_string()),
                secret_file: crew.secret.as_ref().map(|secret| secret.path().to_owned()),
                parent: std::process::id(),
            };
            let host = options.hosts.as_ref().map(|hosts| hosts.of(index));
            let (process, output) = Process::start(&assignment, host)?;
            crew.processes.push(process);
            let events = events.clone();
            std::thread::spawn(move || forward(index, output, &events));
        }
        Ok(crew)
    }

    /// Handles messages of the processes until all have ended.
    fn listen(
        &mut self,
        news: &Receiver<Event>,
        mut show: impl FnMut(Progress),
    ) -> std::result::Result<(), Failure> {
        while self.processes.iter().any(|process| !process.ended) {
            match next(news, self.deadline()) {
                Some(Event::Message(_, Message::Progress(progress))) => show(progress),
                Some(Event::Message(from, message)) => self.take(from, message),
                Some(Event::Noise(from, line)) => eprintln!("{}: {line}", self.processes[from].member),
                Some(Event::Closed(from)) => self.end(from)?,
                Some(Event::Signal(signal)) => return Err(Failure::Interrupted(signal)),
                None if self.has_ended_joins => self.give_up(),
                None => self.end_joins(),
            }
        }
        Ok(())
    }

    /// When processes that have not ended are killed: first those in their joins, then all.
    fn deadline(&self) -> Option<Instant> {
        let timeout = if self.has_ended_joins { STOP_TIMEOUT } else { JOIN_TIMEOUT };
        self.first_end.map(|first| first + timeout)
    }

    fn take(&mut self, from: usize, message: Message) {
        let process = &mut self.processes[from];
        match message {
            Message::Progress(_) => {}
            Message::Joined => process.joined = true,
            Message::Done => process.done = true,
            Message::Summary { outcome, traffic } => process.summary = Some((outcome, traffic)),
            Message::Failed { error } => process.error = Some(error),
        }
        if self.processes.iter().all(|process| process.done) {
            for process in &mut self.processes {
                process.finish();
            }
        }
    }

    /// A process has closed its output: it ends, and its exit status tells how.
    fn end(&mut self, index: usize) -> Result<()> {
        let process = &mut self.processes[index];
        let status = process.child.wait()?;
        process.ended = true;
        self.failures.extend(process.failure(status));
        self.first_end.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Ends the processes that wait in their joins for one that has failed: nobody can join any
    /// more. Those that have joined notice by themselves.
    fn end_joins(&mut self) {
        self.has_ended_joins = true;
        let Some(failed) = self.failures.first().map(|failure| failure.member) else { return };
        for process in self.processes.iter_mut().filter(|process| !process.ended && !process.joined) {
            process.waited_for.get_or_insert(failed);
            // Fails only for a process that has ended.
            let _ = process.child.kill();
        }
    }

    /// Kills the processes that did not end after others had.
    fn give_up(&mut self) {
        for process in self.processes.iter_mut().filter(|process| !process.ended) {
            process.stuck = true;
            // Fails only for a process that has ended.
            let _ = process.child.kill();
        }
    }

    fn results(mut self) -> std::result::Result<Results, Failure> {
        if !self.failures.is_empty() {
            return Err(Failure::Failed(self.failure_lines()));
        }
        let mut results = Results::default();
        for process in &mut self.processes {
            let (outcome, traffic) = process.summary.take().unwrap_or_default();
            results.outcomes.extend(outcome);
            results.traffic.push(traffic);
        }
        Ok(results)
    }

    /// A line for each process that failed, killed processes first. The errors of the others should
    /// name one of the killed.
    fn failure_lines(&self) -> Vec<String> {
        let mut failures: Vec<_> = self.failures.iter().collect();
        failures.sort_by_key(|failure| failure.end);
        let killed =
            failures.first().filter(|failure| failure.end == End::Killed).map(|failure| failure.member);
        let line = |failure: &Failed| match killed.map(|member| member.to_string()) {
            Some(member) if !failure.line.contains(&member) => {
                format!("{} [after the loss of {member}]", failure.line)
            }
            _ => failure.line.clone(),
        };
        failures.into_iter().map(line).collect()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().filter(|process| !process.ended) {
            // The kernel frees everything of a process, shared memory included.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

impl Process {
    fn start(assignment: &Assignment, host: Option<&TrainHost>) -> Result<(Process, BufReader<ChildStdout>)> {
        let member = assignment.member;
        let this = std::env::current_exe()?;
        let mut command = match host.and_then(|host| host.starter.split_first()) {
            Some((starter, words)) => {
                let mut command = Command::new(starter);
                command.args(words).arg(this);
                command
            }
            None => Command::new(this),
        };
        let started = command
            .args([ASSIGNED, &member.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C goes to a whole process group. In a group of its own a child is ended by the
            // parent only.
            .process_group(0)
            .spawn();
        let mut child = started.map_err(|e| format!("{member} could not be started: {e}"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let mut process = Process {
            member,
            child,
            input,
            done: false,
            summary: None,
            error: None,
            joined: false,
            ended: false,
            stuck: false,
            waited_for: None,
        };
        process.write(&serde_json::to_string(assignment)?);
        let output = output.ok_or_else(|| format!("{member} has no output"))?;
        Ok((process, BufReader::new(output)))
    }

    /// Writing to a process fails if it has ended, which its closed output reports.
    fn write(&mut self, line: &str) {
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{line}");
        }
    }

    /// Tells the process, once, that all are done.
    fn finish(&mut self) {
        self.write(FINISH);
        self.input = None;
    }

    /// The failure of a process that ended with this status, if it failed.
    fn failure(&self, status: ExitStatus) -> Option<Failed> {
        let error = self.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        let (end, what) = match (status.signal(), status.code()) {
            // It was about to end.
            (Some(_), _) if self.error.is_some() && (self.stuck || self.waited_for.is_some()) => {
                (End::Error, "failed".to_owned())
            }
            (Some(_), _) if let Some(other) = self.waited_for => {
                (End::Waited, format!("was ended, as it waited for {other} in its join"))
            }
            (Some(_), _) if self.stuck => {
                (End::Stuck, format!("did not end within {STOP_TIMEOUT:?} after another had"))
            }
            (Some(signal), _) => (End::Killed, format!("was killed by signal {}", signals::name(signal))),
            (None, Some(0)) if self.is_complete() => return None,
            (None, Some(0)) => (End::Error, "ended without a summary".to_owned()),
            (None, code) => (End::Error, format!("ended with status {}", code.unwrap_or(-1))),
        };
        let (member, pid) = (self.member, self.child.id());
        Some(Failed { member, end, line: format!("{member} (process {pid}) {what}{error}") })
    }

    fn is_complete(&self) -> bool {
        let is_worker = self.member.job == Job::Worker;
        self.summary.as_ref().is_some_and(|(outcome, _)| outcome.is_some() == is_worker)
    }
}

/// The next event; `None` at the deadline.
fn next(news: &Receiver<Event>, deadline: Option<Instant>) -> Option<Event> {
    let left = match deadline {
        Some(deadline) => deadline.saturating_duration_since(Instant::now()),
        None => Duration::MAX,
    };
    match news.recv_timeout(left) {
        Ok(event) => Some(event),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => unreachable!("`run` holds a sender"),
    }
}

/// Turns the output of a process into events.
fn forward(from: usize, output: impl BufRead, events: &Sender<Event>) {
    for line in output.lines() {
        let Ok(line) = line else { break };
        let event = match serde_json::from_str(&line) {
            Ok(message) => Event::Message(from, message),
            Err(_) => Event::Noise(from, line),
        };
        if events.send(event).is_err() {
            return;
        }
    }
    // Fails if the run was given up.
    let _ = events.send(Event::Closed(from));
}

/// Free addresses, as `address:port`.
///
/// Another program could take one before the child does. To make this unlikely, each run uses a
/// loopback address of its own (all of 127.0.0.0/8 is loopback).
fn free_addresses(count: usize) -> Result<Vec<String>> {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, 64 | a & 63, b, c);
    // All sockets stay open until the last port is known, or a port could come twice.
    let bound: std::io::Result<Vec<TcpListener>> =
        (0..count).map(|_| TcpListener::bind((address, 0))).collect();
    let bound = bound.map_err(|e| format!("no free port at {address}: {e}"))?;
    bound.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_process_that_was_ended_is_shown_as_its_own() {
        let first = Member { job: Job::Server, task: 0 };
        let process = |error: Option<&str>, waited_for, stuck| {
            let mut child = Command::new("true").spawn().expect("it starts");
            child.wait().expect("it ends");
            let process = Process {
                member: Member { job: Job::Worker, task: 1 },
                child,
                input: None,
                done: false,
                summary: None,
                error: error.map(str::to_owned),
                joined: false,
                ended: true,
                stuck,
                waited_for,
            };
            let failed = process.failure(ExitStatus::from_raw(9)).expect("it was killed");
            (failed.end, failed.line)
        };
        for (waited_for, stuck) in [(Some(first), false), (None, true)] {
            let (end, line) = process(Some("no device"), waited_for, stuck);
            assert!(end == End::Error && line.ends_with(" failed: no device"), "{line}");
        }
        let (end, line) = process(None, Some(first), false);
        assert!(end == End::Waited && line.contains("was ended, as it waited for ps/0"), "{line}");
        let (end, line) = process(Some("no device"), None, false);
        assert!(end == End::Killed && line.contains("SIGKILL") && line.ends_with(": no device"), "{line}");
    }
}
