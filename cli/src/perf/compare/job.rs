//! Child processes with a time limit, whose output is kept for their figures and for errors.

use crate::launch::tied;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a server may take until it listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may take to end after its client.
const SERVER_END_TIMEOUT: Duration = Duration::from_secs(5);
/// Characters of a program's output in an error.
const QUOTED: usize = 600;

/// A program with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// As found on `PATH`, or as the user named it.
    pub program: PathBuf,
    /// All but the program.
    pub arguments: Vec<String>,
    /// Environment variables that are set, or removed (`None`).
    pub variables: Vec<(&'static str, Option<OsString>)>,
    /// The path of this program. It starts the job so that the kernel kills it with this process.
    pub tied_by: Option<PathBuf>,
}

impl Job {
    /// A job in the environment of this process, with arguments that spaces separate.
    pub fn new(program: &Path, arguments: &str) -> Self {
        let arguments = arguments.split_whitespace().map(str::to_owned).collect();
        Job { program: program.to_owned(), arguments, variables: Vec::new(), tied_by: None }
    }

    fn command(&self) -> Command {
        match &self.tied_by {
            Some(own) => {
                let mut command = tied(own);
                command.arg(&self.program);
                command
            }
            None => Command::new(&self.program),
        }
    }

    fn start(&self, output: &Path) -> io::Result<StartedJob> {
        let file = File::create(output)?;
        let mut command = self.command();
        command.args(&self.arguments).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        for (name, value) in &self.variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Ok(StartedJob { child: command.spawn()?, output: output.to_owned() })
    }
}

/// As in a shell.
impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.variables {
            if let Some(value) = value {
                write!(f, "{name}={} ", value.to_string_lossy())?;
            }
        }
        write!(f, "{}", self.program.display())?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// A started job. Dropping it kills the process.
struct StartedJob {
    child: Child,
    output: PathBuf,
}

impl StartedJob {
    /// Waits for the end; `None` after the timeout. The wait does not wake up meanwhile.
    fn wait(&mut self, timeout: Duration) -> io::Result<Option<ExitStatus>> {
        // The number of a process that was waited for may be that of another one.
        if let Some(status) = self.child.try_wait()? {
            return Ok(Some(status));
        }
        let pidfd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout))?;
        self.child.try_wait()
    }

    /// Everything that the process has printed.
    fn printed(&self) -> String {
        std::fs::read(&self.output)
            .map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into())
    }
}

impl Drop for StartedJob {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the job to its end. Returns the text that it printed.
///
/// # Errors
/// If it can't be started, fails, or takes longer than `timeout`: the command, and its output.
pub fn run(job: &Job, folder: &Path, timeout: Duration) -> Result<String, String> {
    let cannot = |error: io::Error| format!("`{job}` can't be run: {error}");
    let mut running = job.start(&folder.join("client")).map_err(cannot)?;
    let status = running.wait(timeout).map_err(cannot)?;
    let printed = running.printed();
    match status {
        Some(status) if status.success() => Ok(printed),
        Some(status) => Err(format!("`{job}` ended with {status}; {}", quoted(&printed))),
        None => Err(format!("`{job}` did not end within {timeout:?} and was killed; {}", quoted(&printed))),
    }
}

/// Runs a server that listens at `port` for one client, and the client to its end. Returns the text
/// that the client printed.
///
/// # Errors
/// As [`run`], with the output of both.
pub fn run_pair(
    server: &Job,
    client: &Job,
    port: u16,
    folder: &Path,
    timeout: Duration,
) -> Result<String, String> {
    let cannot = |error: io::Error| format!("`{server}` can't be run: {error}");
    let mut serving = server.start(&folder.join("server")).map_err(cannot)?;
    let since = Instant::now();
    while since.elapsed() < LISTEN_TIMEOUT && !is_listened_at(port) {
        if serving.wait(Duration::from_millis(10)).map_err(cannot)?.is_some() {
            break; // the error of its client has the output
        }
    }
    let printed = run(client, folder, timeout)
        .map_err(|error| format!("{error}; its server `{server}`: {}", quoted(&serving.printed())))?;
    serving.wait(SERVER_END_TIMEOUT).map_err(cannot)?;
    Ok(printed)
}

/// The end of a program's output in one line, for an error.
pub fn quoted(printed: &str) -> String {
    let words: Vec<&str> = printed.split_whitespace().collect();
    let line = words.join(" ");
    let skipped = line.chars().count().saturating_sub(QUOTED);
    let end: String = line.chars().skip(skipped).collect();
    match (end.is_empty(), skipped) {
        (true, _) => "it printed nothing".into(),
        (false, 0) => format!("it printed: {end}"),
        (false, _) => format!("it printed at the end: {end}"),
    }
}

/// A TCP port that nobody uses.
pub fn free_port() -> Result<u16, String> {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr());
    port.map(|address| address.port()).map_err(|error| format!("looking for a free TCP port: {error}"))
}

/// Whether a process listens at the port. A connection would be taken for the client's.
fn is_listened_at(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    tables.into_iter().flatten().any(|table| lists_listener(&table, port))
}

/// Whether the text of `/proc/net/tcp` has a socket in the state of listening (0A) at the port.
fn lists_listener(table: &str, port: u16) -> bool {
    let port = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next().is_some_and(|local| local.ends_with(&port)) && fields.nth(1) == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Job {
        let arguments = vec!["-c".into(), script.into()];
        Job { arguments, ..Job::new(Path::new("/bin/sh"), "") }
    }

    #[test]
    fn the_output_of_a_job_is_returned_and_an_error_has_it_too() {
        let folder = tempfile::tempdir().unwrap();
        let timeout = Duration::from_secs(20);
        assert_eq!(run(&shell("echo 5; echo 6 >&2"), folder.path(), timeout), Ok("5\n6\n".into()));
        let error = run(&shell("echo why; exit 3"), folder.path(), timeout).unwrap_err();
        assert!(error.contains("echo why; exit 3") && error.contains("exit status: 3"), "{error}");
        assert!(error.ends_with("it printed: why"), "{error}");
        let error = run(&Job::new(Path::new("/no/such"), "-n 5"), folder.path(), timeout).unwrap_err();
        assert!(error.contains("`/no/such -n 5` can't be run: No such file"), "{error}");
    }

    #[test]
    fn a_job_that_hangs_is_killed_after_the_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let since = Instant::now();
        let hangs = shell("echo begun; exec sleep 60");
        let error = run(&hangs, folder.path(), Duration::from_millis(300)).unwrap_err();
        assert!(since.elapsed() < Duration::from_secs(20));
        assert!(error.contains("did not end within 300ms") && error.contains("begun"), "{error}");
    }

    #[test]
    fn an_error_of_a_pair_has_the_output_of_both() {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port().unwrap();
        let (server, client) = (shell("echo no device; exit 1"), shell("echo refused; exit 2"));
        let error = run_pair(&server, &client, port, folder.path(), Duration::from_secs(20)).unwrap_err();
        assert!(error.contains("refused") && error.contains("no device"), "{error}");
    }

    #[test]
    fn variables_are_set_and_removed_and_shown() {
        let folder = tempfile::tempdir().unwrap();
        let mut job = shell("echo $A-${HOME:-none}");
        job.variables = vec![("A", Some("x".into())), ("HOME", None)];
        assert_eq!(run(&job, folder.path(), Duration::from_secs(20)), Ok("x-none\n".into()));
        assert!(job.to_string().starts_with("A=x /bin/sh -c "), "{job}");
    }

    #[test]
    fn a_listener_is_found_in_the_kernels_table() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        assert!(is_listened_at(listener.local_addr().unwrap().port()));
        let table = "  sl  local_address rem_address   st\n   0: 0100007F:1F90 00000000:0000 0A 00000000\n   \
                     1: 0100007F:1F91 0100007F:9999 01 00000000\n";
        assert!(lists_listener(table, 0x1f90));
        assert!(!lists_listener(table, 0x1f91), "a connection is no listener");
        assert!(!lists_listener(table, 0x9999) && !lists_listener("", 1));
    }

    #[test]
    fn a_long_output_is_quoted_from_its_end() {
        assert_eq!(quoted(" \n"), "it printed nothing");
        let long = quoted(&format!("begin {} end", "x".repeat(1000)));
        assert!(long.starts_with("it printed at the end: xx") && long.ends_with("x end"), "{long}");
    }
}
