//! Other processes: this test program, started again in a role. A role is a test that is ignored
//! otherwise.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A process in a role. Its drop kills it.
pub struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts the test of this name, modules included, for this cluster.
    pub fn start(role: &str, cluster: &str) -> Self {
        Self::start_with(role, cluster, &[])
    }

    /// Like [`Other::start`], with more environment variables.
    pub fn start_with(role: &str, cluster: &str, environment: &[(&str, &str)]) -> Self {
        Self::start_by(&[], role, cluster, environment)
    }

    /// Like [`Other::start_with`], by a program that starts another one, with its arguments.
    pub fn start_by(starter: &[&str], role: &str, cluster: &str, environment: &[(&str, &str)]) -> Self {
        let this = std::env::current_exe().expect("own path");
        let mut words = starter.iter().map(AsRef::as_ref).chain([this.as_os_str()]);
        let mut command = Command::new(words.next().expect("this program at least"));
        command.args(words);
        Self::spawn(command, role, cluster, environment)
    }

    /// Like [`Other::start_with`], as this user. Only root may.
    pub fn start_as(user: u32, role: &str, cluster: &str, environment: &[(&str, &str)]) -> Self {
        // By its descriptor, as another user may not enter the folder.
        let this = std::env::current_exe().and_then(File::open).expect("own program");
        let mut command = Command::new(format!("/proc/self/fd/{}", this.as_raw_fd()));
        command.uid(user).gid(user).current_dir("/");
        Self::spawn(command, role, cluster, environment)
    }

    fn spawn(mut command: Command, role: &str, cluster: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = command
            .args([role, "--exact", "--ignored", "--nocapture"])
            .env("TEST_CLUSTER", cluster)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the other process");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Other { child, lines }
    }

    /// Waits for an output line that contains `part`, and returns it.
    pub fn wait_for(&mut self, part: &str) -> String {
        let found = self.lines.by_ref().map_while(Result::ok).find(|read| read.contains(part));
        found.unwrap_or_else(|| panic!("the other process ended without saying '{part}'"))
    }

    /// Sends a line to its standard input.
    pub fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{line}").expect("it listens");
    }

    /// Runs a role in a process of its own, so that its threads, files and mappings are its own.
    pub fn run_alone(role: &str, cluster: &str, environment: &[(&str, &str)]) {
        Self::run_alone_by(&[], role, cluster, environment);
    }

    /// Like [`Other::run_alone`], by a program that starts another one, with its arguments.
    pub fn run_alone_by(starter: &[&str], role: &str, cluster: &str, environment: &[(&str, &str)]) {
        let mut alone = Self::start_by(starter, role, cluster, environment);
        for line in alone.lines.by_ref().map_while(Result::ok) {
            println!("{line}");
        }
        assert!(alone.ends_well(), "{role} failed");
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        // A wait closes it, and a program behind a starter would end by that before the kill.
        let orders = self.child.stdin.take();
        self.child.kill().expect("alive");
        self.child.wait().expect("reaped");
        drop(orders);
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    /// Waits for its end. Returns whether it succeeded.
    pub fn ends_well(&mut self) -> bool {
        self.child.wait().expect("reaped").success()
    }

    /// Pauses it with SIGSTOP. Returns when every thread has stopped.
    pub fn suspend(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.pid());
        let has_stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        };
        while !std::fs::read_dir(&tasks).expect("procfs").flatten().all(has_stopped) {
            std::thread::yield_now();
        }
    }

    /// Sends a signal by its name, as in kill(1).
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status();
        assert!(sent.expect("kill(1)").success(), "it is gone");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A user that is not this one and owns nothing. `None` unless this process may act as others.
pub fn other_user() -> Option<u32> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can start a process of another user");
    }
    is_root.then_some(65534)
}

/// In a role: waits for a line from the test.
pub fn wait_to_be_told() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the test is there");
    line.trim().to_owned()
}

/// Resources of a process: threads and file descriptors, without those of the test harness, and
/// mappings of memfds.
pub fn holdings() -> (BTreeSet<String>, BTreeSet<String>, usize) {
    let names =
        |dir: &str| std::fs::read_dir(dir).expect("procfs").filter_map(Result::ok).map(|entry| entry.path());
    let threads = names("/proc/self/task")
        .filter_map(|path| std::fs::read_to_string(path.join("comm")).ok())
        .filter(|name| name.starts_with("tw-"))
        .collect();
    let files = names("/proc/self/fd")
        .filter_map(|path| std::fs::read_link(path).ok())
        .map(|target| target.display().to_string())
        .filter(|target| {
            target.contains("memfd:") || target.contains("socket:") || target.contains("anon_inode")
        })
        .collect();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    (threads, files, maps.lines().filter(|line| line.contains("memfd:")).count())
}

/// The [`holdings`] once no thread of the library is listed, or a second later. The kernel lists a
/// thread that was joined for a moment.
pub fn holdings_after_joins() -> (BTreeSet<String>, BTreeSet<String>, usize) {
    let end = Instant::now() + Duration::from_secs(1);
    loop {
        let now = holdings();
        if now.0.is_empty() || Instant::now() > end {
            return now;
        }
        std::thread::yield_now();
    }
}

/// Counts the library's threads, the file descriptors and the mappings of memfds of a process.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    pub threads: usize,
    pub files: usize,
    pub mappings: usize,
}

impl Counts {
    /// Whether no resource has grown.
    pub fn is_within(self, before: Counts) -> bool {
        self.threads <= before.threads && self.files <= before.files && self.mappings <= before.mappings
    }
}

/// The resources of this process while a node runs. Short-lived threads are not counted.
pub fn counts() -> Counts {
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs").filter_map(Result::ok);
    let threads = threads
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .filter(|name| name.starts_with("tw-") && !name.starts_with("tw-boot-block"))
        .count();
    let files = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    Counts { threads, files, mappings: maps.lines().filter(|line| line.contains("memfd:")).count() }
}
