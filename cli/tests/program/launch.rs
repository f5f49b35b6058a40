//! `tensorwire launch` as a user runs it.

use crate::inherited::is_ignored;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Timeout of each wait, on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A launch of a shell script.
fn script(options: &str, script: &str) -> Command {
    let mut command = launch(options);
    command.args(["--", "sh", "-c", script]);
    command
}

fn launch(options: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire"));
    command.arg("launch").args(options.split_whitespace());
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("TENSORWIRE_") {
            command.env_remove(variable);
        }
    }
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The lines that it printed, in any order.
fn lines(output: &Output) -> BTreeSet<String> {
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn set(lines: &[&str]) -> BTreeSet<String> {
    lines.iter().map(|line| line.to_string()).collect()
}

#[test]
fn each_process_finds_who_it_is_in_its_environment() {
    let what = "echo $TENSORWIRE_JOB $TENSORWIRE_TASK $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE \
                $TENSORWIRE_CORES ${MASTER_ADDR:+master} ${MASTER_PORT:+port} ${TENSORWIRE_STORE:-none}";
    let mut command = script("--jobs ps=1,worker=2 --cores 0-2", what);
    let output = command.env("TENSORWIRE_STORE", "file:///elsewhere").output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let expected = set(&[
        "[ps:0] ps 0 0 3 0 3 0 master port none",
        "[worker:0] worker 0 1 3 1 3 1 master port none",
        "[worker:1] worker 1 2 3 2 3 2 master port none",
    ]);
    assert_eq!(lines(&output), expected);
    let output = script("--jobs worker=1,ps=1", "echo $RANK").output().expect("it starts");
    assert_eq!(lines(&output), set(&["[ps:0] 0", "[worker:0] 1"]));
    let output = script("-n 2 --job peer", "echo $TENSORWIRE_CLUSTER").output().expect("it starts");
    let clusters: BTreeSet<String> =
        lines(&output).iter().map(|line| line.split_once("] ").expect("a prefix").1.to_owned()).collect();
    let cluster: tensorwire::Cluster = clusters.first().expect("a line").parse().expect("a cluster");
    assert_eq!((clusters.len(), cluster.task_count("peer")), (1, Some(2)));
}

#[test]
fn variables_of_an_outer_launcher_reach_no_process() {
    let outer = [
        ("TENSORWIRE_BIND", "127.0.0.1:0"),
        ("TORCHELASTIC_RUN_ID", "outer"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("GROUP_RANK", "1"),
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("PMIX_RANK", "1"),
        ("MPI_LOCALRANKID", "1"),
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
    ];
    let kept = [("SLURM_JOB_ID", "7"), ("TENSORWIRE_POOL_SIZE", "1MiB"), ("OMPI_MCA_btl", "tcp")];
    let mut command = script("-n 2", "env");
    let output = command.envs(outer).envs(kept).env("RANK", "1").output().expect("it starts");
    let said = lines(&output);
    for (name, value) in kept {
        assert!(said.contains(&format!("[worker:0] {name}={value}")), "{output:?}");
    }
    for (name, _) in outer {
        assert!(!said.iter().any(|line| line.starts_with(&format!("[worker:0] {name}="))), "{name}");
    }
    let variables = said.iter().filter_map(|line| line.strip_prefix("[worker:0] ")?.split_once('='));
    let found = tensorwire::LaunchedRank::of(variables.map(|(name, value)| (name.into(), value.into())));
    assert_eq!(found.expect("no contradiction").map(|found| (found.rank, found.size)), Some((0, 2)));
}

#[test]
fn lines_of_several_processes_are_whole() {
    let what = "for i in 1 2 3 4 5 6 7 8 9; do echo 0123456789012345678901234567890123456789; done; \
                printf error >&2; printf 'no end'";
    let output = script("-n 3", what).output().expect("it starts");
    let line = |rank: &str| format!("[worker:{rank}] 0123456789012345678901234567890123456789");
    for rank in ["0", "1", "2"] {
        assert_eq!(text(&output.stdout).lines().filter(|at| *at == line(rank)).count(), 9);
        assert!(lines(&output).contains(&format!("[worker:{rank}] no end")));
        assert!(text(&output.stderr).contains(&format!("[worker:{rank}] error\n")));
    }
}

#[test]
fn output_is_complete_however_late_it_is_read() {
    // The process ends at once: its output fits in a pipe, and the prefixes of its lines do not.
    let mut launcher =
        script("-n 1", "yes | head -c 60000").stdout(Stdio::piped()).spawn().expect("it starts");
    std::thread::sleep(Duration::from_millis(2500));
    let mut all = String::new();
    launcher.stdout.take().expect("piped").read_to_string(&mut all).expect("text");
    assert!(launcher.wait().expect("it ends").success());
    assert_eq!(all.lines().filter(|line| *line == "[worker:0] y").count(), 30_000);
}

/// As with a pager that shows the first page.
#[test]
fn a_failure_ends_the_others_while_nobody_reads_standard_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let asked = folder.path().join("asked");
    let what = format!(
        "trap 'touch {}; exit 9' TERM; \
         if [ $RANK = 1 ]; then yes >&2 & sleep 0.5; exit 7; fi; while :; do sleep 0.05; done",
        asked.display()
    );
    let mut launcher = script("-n 2", &what).stderr(Stdio::piped()).spawn().expect("it starts");
    let begin = Instant::now();
    while !asked.exists() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the other process was not asked to end");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut all = Vec::new();
    launcher.stderr.take().expect("piped").read_to_end(&mut all).expect("bytes");
    assert_eq!(launcher.wait().expect("it ends").code(), Some(7));
    assert!(text(&all).contains("tensorwire launch: worker/1 (process "), "the failure is not named");
}

#[test]
fn the_first_failure_ends_all_is_named_and_is_the_exit_status() {
    let what = "trap 'echo asked to end; exit 9' TERM; \
                if [ $RANK = 1 ]; then sleep 0.3; exit 7; fi; while :; do sleep 0.05; done";
    let output = script("-n 3", what).output().expect("it starts");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(lines(&output), set(&["[worker:0] asked to end", "[worker:2] asked to end"]));
    let said = text(&output.stderr);
    assert!(
        said.contains("worker/1 (process ") && said.contains(") ended with status 7; the others are"),
        "{said}"
    );
    assert_eq!(said.matches("tensorwire launch").count(), 1, "{said}");
}

#[test]
fn a_process_that_was_killed_is_told_from_one_that_failed() {
    let output = script("-n 1", "kill -SEGV $$").output().expect("it starts");
    assert_eq!(output.status.code(), Some(128 + 11));
    let said = text(&output.stderr);
    assert!(said.contains("was killed by signal 11 (SIGSEGV)"), "{said}");
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let output = launch("-n 1").args(["--", "./no such program"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("./no such program can't be started: No such file"), "{output:?}");
}

#[test]
fn a_process_that_does_not_end_is_killed_with_all_that_it_has_started() {
    let folder = tempfile::tempdir().expect("a folder");
    let what = "trap '' TERM; if [ $RANK = 0 ]; then \
                sh -c 'echo $$ > child.pid; trap \"\" TERM; while :; do sleep 0.05; done' & wait; fi; \
                while [ ! -s child.pid ]; do sleep 0.02; done; exit 3";
    let mut command = script("-n 2 --grace 1", what);
    let begin = Instant::now();
    let output = command.current_dir(folder.path()).output().expect("it starts");
    assert_eq!(output.status.code(), Some(3));
    assert!(begin.elapsed() >= Duration::from_secs(1) && begin.elapsed() < LONG);
    let child = std::fs::read_to_string(folder.path().join("child.pid")).expect("it was started");
    wait_for_end(child.trim());
}

/// A part of a script: starts a process that ignores SIGTERM and writes its number to `child.pid`.
const STAYS: &str = "sh -c 'trap \"\" TERM; echo $$ > child.new; mv child.new child.pid; exec sleep 777' & \
                     while [ ! -e child.pid ]; do sleep 0.02; done;";

/// The output and the duration of a launch. The process of `child.pid` must have ended.
fn with_child(options: &str, what: &str) -> (Output, Duration) {
    let folder = tempfile::tempdir().expect("a folder");
    let begin = Instant::now();
    let output = script(options, what).current_dir(folder.path()).output().expect("it starts");
    let child = std::fs::read_to_string(folder.path().join("child.pid")).expect("it was started");
    assert!(!runs(child.trim()), "{output:?}");
    (output, begin.elapsed())
}

#[test]
fn what_a_failed_process_has_started_ends_too() {
    let what = "if [ $RANK = 0 ]; then sleep 777 & echo $! > child.pid; exit 3; fi; sleep 0.5";
    let (output, _) = with_child("-n 2 --grace 3600", what);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_program_that_outlives_its_wrapper_is_killed() {
    // The wrapper dies of SIGTERM at once.
    let what = format!(
        "if [ $RANK = 0 ]; then {STAYS} wait; fi; while [ ! -e child.pid ]; do sleep 0.02; done; exit 3"
    );
    let (output, duration) = with_child("-n 2 --grace 1", &what);
    assert_eq!(output.status.code(), Some(3));
    assert!(duration >= Duration::from_secs(1) && duration < LONG, "{duration:?}");
}

#[test]
fn the_second_signal_kills_also_what_outlives_its_wrapper() {
    let what =
        "trap 'echo ends; exit' TERM; sh -c 'trap \"\" TERM; echo $$; exec sleep 777' & sleep 776 & wait";
    let mut running = Running::start(script("-n 1 --grace 3600", what));
    let child = running.line();
    running.signal("TERM");
    assert_eq!(running.line(), "ends");
    running.signal("TERM");
    assert_eq!(running.end().0, Some(128 + 15));
    assert!(!runs(&child));
}

#[test]
fn what_a_process_leaves_behind_runs_until_the_others_have_ended() {
    let left = "sh -c 'trap \"echo asked to end; exit\" TERM; echo $$ > child.new; mv child.new child.pid; \
                while :; do sleep 0.05; done' &";
    let what = format!(
        "if [ $RANK = 0 ]; then {left} exit 0; fi; while [ ! -e child.pid ]; do sleep 0.02; done; \
         sleep 0.5; kill -0 $(cat child.pid) && echo there"
    );
    let (output, _) = with_child("-n 2 --grace 3600", &what);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output), set(&["[worker:0] asked to end", "[worker:1] there"]));
    let (output, duration) = with_child("-n 1 --grace 1", STAYS);
    assert!(output.status.success() && duration >= Duration::from_secs(1), "{duration:?}: {output:?}");
}

#[test]
fn a_failure_is_seen_also_where_sigchld_is_ignored() {
    let line =
        format!("trap '' CHLD; exec {} launch -n 1 -- sh -c 'exit 7'", env!("CARGO_BIN_EXE_tensorwire"));
    let output = Command::new("bash").args(["-c", &line]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}

fn runs(process: &str) -> bool {
    Path::new("/proc").join(process).join("exe").read_link().is_ok()
}

/// Waits until no process has this number.
fn wait_for_end(process: &str) {
    let begin = Instant::now();
    while runs(process) {
        assert!(begin.elapsed() < LONG, "process {process} lives");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A launch in progress, killed when it is dropped.
struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = started.expect("it starts");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        Running { child, out }
    }

    /// The next line without its prefix.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("text");
        line.trim().split_once("] ").expect("a prefix").1.to_owned()
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.expect("kill starts").success());
    }

    fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
        (self.child.wait().expect("it ends").code(), said)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_signal_is_passed_on_and_is_no_failure() {
    for (signal, number) in [("INT", 2), ("TERM", 15), ("QUIT", 3)] {
        if is_ignored(number) {
            continue;
        }
        let what = format!("trap 'echo got it; exit 1' {signal}; echo ready; while :; do sleep 0.05; done");
        let mut running = Running::start(script("-n 2", &what));
        assert_eq!([running.line(), running.line()], ["ready", "ready"]);
        running.signal(signal);
        assert_eq!([running.line(), running.line()], ["got it", "got it"]);
        let (status, said) = running.end();
        assert_eq!(status, Some(128 + number as i32));
        assert!(said.contains(&format!("signal {number} (SIG{signal}) is passed on")), "{said}");
        assert!(!said.contains("ended with status"), "{said}");
    }
}

#[test]
fn a_signal_that_nohup_has_ignored_ends_nothing() {
    let launcher = script("-n 2", "echo ready; sleep 0.5; echo done");
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' HUP; exec \"$@\"", "sh"])
        .arg(launcher.get_program())
        .args(launcher.get_args());
    let mut running = Running::start(command);
    assert_eq!([running.line(), running.line()], ["ready", "ready"]);
    running.signal("HUP");
    assert_eq!([running.line(), running.line()], ["done", "done"]);
    assert_eq!(running.end(), (Some(0), String::new()));
}

#[test]
fn the_second_signal_kills() {
    let what = "trap 'echo stays' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(script("-n 1", what));
    assert_eq!(running.line(), "ready");
    running.signal("TERM");
    assert_eq!(running.line(), "stays");
    running.signal("TERM");
    assert_eq!(running.end().0, Some(128 + 15));
}

#[test]
fn user_signals_are_passed_on_and_end_nothing() {
    let what = "trap 'echo one' USR1; trap 'echo two' USR2; trap 'echo ends; exit' TERM; echo ready; \
                while :; do sleep 0.05 & wait; done";
    let mut running = Running::start(script("-n 2", what));
    assert_eq!([running.line(), running.line()], ["ready", "ready"]);
    for (signal, said) in [("USR1", "one"), ("USR2", "two"), ("USR1", "one"), ("TERM", "ends")] {
        running.signal(signal);
        assert_eq!([running.line(), running.line()], [said, said]);
    }
    let (status, said) = running.end();
    assert_eq!(status, Some(128 + 15));
    assert!(!said.contains("USR"), "{said}");
}

#[test]
fn a_process_that_ignores_the_signal_is_killed_after_the_grace_period() {
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        if is_ignored(number) {
            continue;
        }
        // The other process ends by the signal.
        let what = format!("if [ $RANK = 0 ]; then trap '' {signal}; fi; echo $$; exec sleep 30");
        let mut running = Running::start(script("-n 2 --grace 1", &what));
        let processes = [running.line(), running.line()];
        let begin = Instant::now();
        running.signal(signal);
        let (status, said) = running.end();
        let duration = begin.elapsed();
        assert_eq!(status, Some(128 + number as i32));
        assert!((1..29).contains(&duration.as_secs()), "{duration:?}");
        assert!(said.contains("what runs after 1s (--grace), or at another signal, is killed"), "{said}");
        assert!(!processes.iter().any(|process| runs(process)));
    }
}

#[test]
fn processes_end_with_the_launcher() {
    let mut running = Running::start(script("-n 2", "echo $$; while :; do sleep 0.05; done"));
    let processes = [running.line(), running.line()];
    running.signal("KILL");
    assert_eq!(running.child.wait().expect("it ends").signal(), Some(9));
    processes.iter().for_each(|process| wait_for_end(process));
}

#[test]
fn a_command_line_that_can_t_be_carried_out_is_refused() {
    for (options, part) in [
        ("", "-n <N>"),
        ("-n 0", "0 is not in 1..=2048"),
        ("-n 2 --job a/b", "job \"a/b\""),
        ("-n 2 --jobs ps=1", "cannot be used with"),
        ("--jobs ps", "is not JOB=TASKS"),
        ("-n 2 --cores 0-2", "3 cores for 2 processes"),
        ("--hosts a:2 --jobs ps=1", "--jobs has 1 processes, and --hosts has room for 2"),
        ("--hosts a:1 --host-rank 1", "--hosts has 1 hosts, from 0 on"),
        ("-n 1 --host-rank 0", "cannot be used with"),
        ("--jobs ps=1 --host-rank 0", "--hosts"),
        ("--hosts a:2 --host-rank 0 --port 65535", "port 65536 of a does not exist"),
        ("--hosts a:4,b:4 --plan", "run it on each host, with its number: --host-rank"),
    ] {
        let output = script(options, "exit 0").output().expect("it starts");
        assert_eq!(output.status.code(), Some(2), "{options}: {output:?}");
        assert!(text(&output.stderr).contains(part), "{options}: {}", text(&output.stderr));
    }
    let output = launch("-n 1").output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    let other = OsStr::from_bytes(b"caf\xe9");
    let output = script("--hosts a:1,b:1", "exit 0").arg(other).output().expect("it starts");
    assert!(text(&output.stderr).contains("is no UTF-8"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn of_several_hosts_each_starts_its_part() {
    let what = "echo $RANK $LOCAL_RANK $TENSORWIRE_CLUSTER";
    let options = "--hosts 127.1.2.3:1,127.1.2.4:2 --jobs ps=1,worker=2 --port 4000";
    let output = script(options, what).output().expect("it starts");
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("127.1.2.4:\n  tensorwire launch"), "{said}");
    assert!(said.contains(&format!("--host-rank 1 --port 4000 -- sh -c '{what}'\n")), "{said}");
    let output = script(&format!("{options} --host-rank 1"), what).output().expect("it starts");
    let cluster = "ps=127.1.2.3:4000;worker=127.1.2.4:4000,127.1.2.4:4001";
    let expected = [format!("[worker:0] 1 0 {cluster}"), format!("[worker:1] 2 1 {cluster}")];
    assert_eq!(lines(&output), expected.into());
}

#[test]
fn the_command_of_each_host_has_the_settings_of_the_launcher() {
    let what = "echo $RANK ${TENSORWIRE_FABRIC:-auto} $TENSORWIRE_SECRET_FILE $RDMA_DEVICE ${OTHER:-none}";
    let mut command = script("--hosts 127.1.2.3:1,127.1.2.4:1", what);
    let settings = [
        ("TENSORWIRE_FABRIC", "tcp"),
        ("TENSORWIRE_SECRET_FILE", "/it's $HOME"),
        ("RDMA_DEVICE", "mlx5_0"),
        ("OTHER", "here"),
    ];
    let said = text(&command.envs(settings).output().expect("it starts").stdout);
    let printed: Vec<&str> = said.lines().filter(|line| line.contains("tensorwire launch --hosts")).collect();
    assert_eq!(printed.len(), 2, "{said}");
    let program = Path::new(env!("CARGO_BIN_EXE_tensorwire")).parent().expect("a folder");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").expect("a path"));
    for (rank, line) in printed.iter().enumerate() {
        // As on a host where nothing is set.
        let output = Command::new("sh").args(["-c", line]).env_clear().env("PATH", &path).output();
        let said = text(&output.expect("it starts").stdout);
        assert_eq!(said, format!("[worker:{rank}] {rank} tcp /it's $HOME mlx5_0 none\n"));
    }
    let mut command = script("--hosts a:1", what);
    let output = command.env("TENSORWIRE_SECRET_FILE", OsStr::from_bytes(b"caf\xe9")).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("TENSORWIRE_SECRET_FILE is \"caf\\xE9\""), "{output:?}");
}

#[test]
fn one_process_of_a_host_can_listen_behind_a_forwarded_port() {
    let bound = |host: &str, bind: &str| {
        let options = format!("--hosts 127.1.2.3:1,127.1.2.4:2 --host-rank {host}");
        let mut command = script(&options, "echo ${TENSORWIRE_BIND:-none}");
        text(&command.env("TENSORWIRE_BIND", bind).output().expect("it starts").stdout)
    };
    assert_eq!(bound("0", "127.0.0.1:4000"), "[worker:0] 127.0.0.1:4000\n");
    assert_eq!(bound("0", "127.0.0.1:0"), "[worker:0] none\n");
    assert!(!bound("1", "127.0.0.1:4000").contains("4000"));
}

/// A launch of a program, with a limit of open files.
fn limited(files: u32, line: &str) -> Output {
    let line = format!("ulimit -n {files}; exec {} launch {line}", env!("CARGO_BIN_EXE_tensorwire"));
    Command::new("sh").args(["-c", &line]).output().expect("it starts")
}

#[test]
fn a_process_of_another_user_is_named_and_the_launcher_ends_without_it() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can make a program that runs as root");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let allow = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode));
    let [program, as_root, began] = ["tensorwire", "as-root", "began"].map(|name| folder.path().join(name));
    std::fs::copy(env!("CARGO_BIN_EXE_tensorwire"), &program).expect("copied");
    let copied = std::fs::copy("/usr/bin/setpriv", &as_root);
    for (path, mode) in [(folder.path(), 0o755), (&program, 0o755)] {
        allow(path, mode).expect("it is ours");
    }
    let usable = copied.is_ok() && allow(&as_root, 0o4755).is_ok();
    let tried = Command::new(&as_root).args(["--reuid=0", "true"]).uid(NOBODY).gid(NOBODY).status();
    if !usable || !tried.is_ok_and(|status| status.success()) {
        return println!("skipped: no setpriv(1), or no set-user-ID programs in {}", folder.path().display());
    }
    let what = "case $RANK in 0) until [ -e $1 ]; do sleep 0.01; done; exit 3;; \
                1) sleep 30 & exec $0 --reuid=0 sh -c \"touch $1; exec sleep 30\";; esac";
    let since = Instant::now();
    let output = Command::new(&program)
        .args(["launch", "-n", "2", "--grace", "0", "--", "sh", "-c", what])
        .args([as_root, began])
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("it starts");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    let named = said.split_once("tensorwire launch: processes [").expect("they are named").1;
    let (process, rest) = named.split_once(']').expect("a number");
    assert!(rest.starts_with(" can't be ended") && since.elapsed() < Duration::from_secs(25), "{said}");
    let process = process.parse().ok().and_then(rustix::process::Pid::from_raw).expect("one process");
    rustix::process::kill_process(process, rustix::process::Signal::KILL).expect("it runs");
}

#[test]
fn a_launcher_that_can_start_no_thread_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("tensorwire");
    std::fs::copy(env!("CARGO_BIN_EXE_tensorwire"), &program).expect("copied");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("it is ours");
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -u 0; exec $0 launch -n 1 -- true"]).arg(&program);
    // The limit does not bind root.
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("raise the limit of threads (ulimit -u)"), "{output:?}");
}

#[test]
fn too_few_descriptors_of_the_launcher_are_told_before_the_first_process_is_started() {
    for line in ["-n 256 -- echo started", "--hosts a:256 --host-rank 0 -- echo started"] {
        for limit in [100, 400] {
            let output = limited(limit, line);
            assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()));
            let said = text(&output.stderr);
            assert!(
                said.contains("the launcher needs 5") && said.contains("raise `ulimit -n` to 5"),
                "{said}"
            );
        }
    }
    // The number that it says is enough, and few more than are needed.
    let said = text(&limited(20, "-n 20 -- true").stderr);
    let need = said.split_once("raise `ulimit -n` to ").expect("the need").1;
    let need: u32 = need.split_once(',').expect("a number").0.parse().expect("a number");
    assert!(need < 80, "{need}");
    let output = limited(need, "-n 20 -- sh -c 'sleep 0.3'");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_plan_is_printed_and_starts_nothing() {
    let mut command = launch("-n 256 --plan");
    let output = command.env("TENSORWIRE_POOL_SIZE", "1MiB").output().expect("it starts");
    let said = text(&output.stdout);
    // Whoever started the test can have left it more than the standard streams.
    assert!(said.starts_with("256 processes on this host, each with:\npeers: 255\nopen files: 1"), "{said}");
    assert!(said.contains(" are open, 16, and 5 per peer"), "{said}");
    for line in ["threads", "memory of the cgroup", "address space", "locked memory: 1 MiB"] {
        assert!(said.contains(&format!("\n{line}")), "{line}: {said}");
    }
    let mut command = launch("-n 2 --plan");
    let command = command.env("TENSORWIRE_FABRIC", "verbs").env("RDMA_DEVICE", "no_such_device");
    let said = text(&command.output().expect("it starts").stdout);
    let line = said.lines().find(|line| line.starts_with("queue pairs: 2 (")).expect("planned");
    assert!(line.contains("no limit known (verbs: "), "{said}");
    let output = launch("--hosts a:4,b:2 --host-rank 1 --plan").output().expect("it starts");
    assert!(text(&output.stdout).starts_with("2 processes on this host, each with:\n"), "{output:?}");
    let output = limited(200, "-n 256 --plan");
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("a limit is too low: open files: 1") && said.contains("raise `ulimit -n` to"),
        "{said}"
    );
    let line = format!("ulimit -v 4000000; exec {} launch -n 2 --plan", env!("CARGO_BIN_EXE_tensorwire"));
    let mut command = Command::new("sh");
    let output = command.args(["-c", &line]).env("TENSORWIRE_POOL_SIZE", "4GiB").output().expect("it starts");
    let said = text(&output.stderr);
    assert!(said.contains("a limit is too low: address space: ") && said.contains("(RLIMIT_AS)"), "{said}");
}
