//! Runs the examples.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;
use tempfile::TempDir;

/// Timeout of a run, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A call of the example, with a folder of its own.
pub struct Train {
    args: Vec<String>,
    folder: TempDir,
}

/// How a run ended.
pub struct Output {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Train {
    /// The example with these arguments.
    pub fn new(args: &str) -> Train {
        let args = args.split_whitespace().map(str::to_owned).collect();
        Train { args, folder: tempfile::tempdir().expect("folder") }
    }

    /// One more argument, which may have spaces.
    pub fn with(mut self, argument: &str) -> Train {
        self.args.push(argument.to_owned());
        self
    }

    /// The file into which [`Train::summary`] has the summary written.
    pub fn json_file(&self) -> PathBuf {
        self.folder.path().join("summary.json")
    }

    /// Runs the example to its end.
    pub fn output(&self) -> Output {
        self.start().end()
    }

    /// Runs the example to its end, which must be success. Returns the summary that it wrote.
    pub fn summary(mut self) -> Value {
        self.args.extend(["--json".to_owned(), self.json_file().display().to_string()]);
        let output = self.output();
        assert!(output.status.success(), "{:?}: {}", self.args, output.stderr);
        let text = std::fs::read_to_string(self.json_file()).expect("summary");
        serde_json::from_str(&text).expect("json")
    }

    /// Starts the example outside the source folder, which it must not need.
    pub fn start(&self) -> Running {
        let mut command = Command::new(example("train"));
        command.args(&self.args).current_dir(self.folder.path());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        let stderr = BufReader::new(child.stderr.take().expect("stderr"));
        let over = watch(child.id());
        Running { child, stderr, told: String::new(), _over: over }
    }
}

/// The built example of this name, up to date.
pub fn example(name: &str) -> &'static Path {
    built("example", name)
}

/// The built program `tensorwire`, up to date.
pub fn tensorwire() -> &'static Path {
    built("bin", "tensorwire")
}

/// The path of a program of this kind and name. Only Cargo knows it, and `cargo test --test ...`
/// builds no examples.
///
/// Cargo builds everything with the features that `cargo test --workspace` has, so that it builds
/// nothing twice.
fn built(kind: &str, name: &str) -> &'static Path {
    static PROGRAMS: OnceLock<Vec<Program>> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(build);
    let found = programs.iter().find(|program| program.kind == kind && program.name == name);
    let found = found.unwrap_or_else(|| panic!("cargo built no {kind} {name}: {programs:?}"));
    &found.path
}

/// A program that Cargo built.
#[derive(Debug)]
struct Program {
    kind: String,
    name: String,
    path: PathBuf,
}

fn build() -> Vec<Program> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--message-format=json", "--workspace"]);
    cargo.args(["--examples", "--bin", "tensorwire"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout).expect("text");
    let messages = messages.lines().map(|line| serde_json::from_str(line).expect("json"));
    let program = |message: Value| {
        let target = &message["target"];
        let (kind, name) = (target["kind"][0].as_str()?.into(), target["name"].as_str()?.into());
        Some(Program { kind, name, path: message["executable"].as_str()?.into() })
    };
    messages.filter_map(program).collect()
}

/// A run in progress.
pub struct Running {
    child: Child,
    stderr: BufReader<ChildStderr>,
    told: String,
    /// Dropped with the run, which ends the watchdog.
    _over: Sender<()>,
}

/// A watchdog: it kills a run that takes too long, so that the test fails instead of hanging.
fn watch(process: u32) -> Sender<()> {
    let (over, is_over) = mpsc::channel();
    std::thread::spawn(move || {
        if is_over.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            send("KILL", process);
        }
    });
    over
}

impl Running {
    /// Waits until the run has reported progress, and sends it a signal.
    pub fn after_first_line(mut self, signal: &str) -> Running {
        self.wait_for_line();
        send(signal, self.child.id());
        self
    }

    /// Waits for a line of output.
    pub fn wait_for_line(&mut self) {
        let read = self.stderr.read_line(&mut self.told).expect("stderr");
        assert!(read > 0, "it ended before it told anything");
    }

    /// The process of the launcher.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the run has ended.
    pub fn end(mut self) -> Output {
        let mut stdout = String::new();
        self.stderr.read_to_string(&mut self.told).expect("stderr");
        self.child.stdout.take().expect("stdout").read_to_string(&mut stdout).expect("stdout");
        Output { status: self.child.wait().expect("status"), stdout, stderr: std::mem::take(&mut self.told) }
    }
}

/// Sends a signal by its short name, such as `INT`.
pub fn send(signal: &str, process: u32) {
    let sent = Command::new("kill").args([format!("-{signal}"), process.to_string()]).status().expect("kill");
    assert!(sent.success(), "kill -{signal} {process}");
}
