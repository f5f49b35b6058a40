//! `tensorwire perf` as its users meet it: two real processes, killed, interrupted, and asked for what can't be.
#![cfg(feature = "cli")]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A bound on what should take milliseconds, for a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// Runs spin on two cores each: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn program(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire"));
    command.args(arguments.split_whitespace());
    command
}

fn run(arguments: &str) -> Output {
    program(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether there are two cores; says that the test was skipped otherwise.
fn two_cores() -> bool {
    let enough = tensorwire::process_cpus().len() >= 2;
    if !enough {
        println!("skipped: perf needs two cores, and this process may use one");
    }
    enough
}

/// A long run with the process id of its second process; killed when dropped.
struct Long {
    first: Child,
    second: u32,
}

impl Long {
    fn start(test: &str) -> Self {
        let first = program(&format!("perf {test} --local -s 8 --duration 20"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let children = format!("/proc/{0}/task/{0}/children", first.id());
        let mut long = Long { first, second: 0 };
        let since = Instant::now();
        while long.second == 0 || !is_spinning(long.second) {
            assert!(since.elapsed() < SOON, "the second process does not spin");
            std::thread::sleep(Duration::from_millis(5));
            let listed = std::fs::read_to_string(&children).unwrap_or_default();
            long.second = listed.split_whitespace().next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
        }
        long
    }

    /// Waits for the first process's end and gives what it said.
    fn end(mut self) -> (Option<i32>, String) {
        let since = Instant::now();
        while self.first.try_wait().expect("ours").is_none() {
            assert!(since.elapsed() < SOON, "the first process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut said = String::new();
        let mut stderr = self.first.stderr.take().expect("piped");
        std::io::Read::read_to_string(&mut stderr, &mut said).expect("text");
        (self.first.wait().expect("ours").code(), said)
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

/// Whether the process has used a tenth of a second of processor time, so that it is past its start.
fn is_spinning(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let ticks = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(11)?.parse::<u64>().ok());
    ticks.is_some_and(|ticks| ticks >= 10)
}

fn signal(pid: u32, name: &str) {
    let kill = Command::new("kill").args([name, &pid.to_string()]).status().expect("kill is there");
    assert!(kill.success(), "kill {name} {pid}");
}

fn ends_soon(pid: u32) -> bool {
    let since = Instant::now();
    while Path::new(&format!("/proc/{pid}")).exists() {
        if since.elapsed() > SOON {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

#[test]
fn a_link_among_idle_ones_is_measured_beside_one_alone() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let options = "perf write_lat --local -s 8 -n 500 --warmup 10 --pool 8MiB --links 50 --json";
    let output = run(&format!("{options} {}", path.display()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("idle links  : 50"));
    let report = std::fs::read_to_string(&path).expect("the report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["idle_links"], 50);
    assert_eq!(report["references"][0]["name"], "alone");
    assert!(report["references"][0]["ratio"].as_f64().expect("a number") > 0.0);
}

#[test]
fn two_processes_measure_each_test_and_report_it() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    for (test, size) in [("cache_line", 8), ("ring_64", 40)] {
        let options = format!("perf {test} --local -s {size} -n 500 --warmup 10 --json {}", path.display());
        let output = run(&options);
        assert!(output.status.success(), "{test}: {}", text(&output.stderr));
        let said = text(&output.stdout);
        for part in [
            "#bytes",
            "t_typical[usec]",
            "99.9% percentile[usec]",
            "reference",
            "cache_line",
            "kernel",
            "commit",
        ] {
            assert!(said.contains(part), "{test}: no {part} in\n{said}");
        }
        let report = std::fs::read_to_string(&path).expect("the report");
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        let result = &report["results"][0];
        assert_eq!((&report["test"], &result["bytes"]), (&test.into(), &size.into()));
        assert_eq!(result["iterations"], 500, "no sample is dropped");
        let figure = |key: &str| result[key].as_f64().expect("a number");
        assert!(0.0 < figure("min_ns") && figure("min_ns") <= figure("p50_ns"), "{result}");
        assert!(figure("p50_ns") <= figure("p99_ns") && figure("p99_ns") <= figure("max_ns"), "{result}");
        let names: Vec<_> =
            report["references"].as_array().expect("a list").iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["cache_line", "ring_64"]);
        assert!(report["references"][0]["ratio"].as_f64().expect("a number") > 0.0);
    }
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("the folder").count(),
        1,
        "something was left beside it"
    );
}

#[test]
fn ours_are_measured_at_small_and_bulk_sizes_beside_line_and_copy() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for test in ["write_lat", "rendezvous_lat"] {
        let path = folder.path().join(test);
        let options = "--local -s 2,8,4KiB,64KiB,1MiB -n 200 --warmup 20 --pool 16MiB --depth 64";
        let output = run(&format!("perf {test} {options} --json {}", path.display()));
        assert!(output.status.success(), "{test}: {}", text(&output.stderr));
        let report = std::fs::read_to_string(&path).expect("the report");
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!((&report["test"], &report["fabric"]), (&test.into(), &"shm".into()));
        let rows = report["results"].as_array().expect("a list");
        assert!(rows.iter().all(|row| row["iterations"] == 200), "{rows:?}");
        let beside: Vec<_> = report["references"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|one| (one["name"].as_str().expect("a name"), one["bytes"].as_u64().expect("bytes")))
            .collect();
        let both =
            |bytes| [("cache_line", bytes), if bytes < 64 { ("ring_64", bytes) } else { ("memcpy", bytes) }];
        assert_eq!(beside, [2, 8, 4096, 65536, 1 << 20].map(both).concat());
    }
}

#[test]
fn more_inline_bytes_than_the_fabric_has_are_refused() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let output = run("perf write_lat --local --inline 100000 --pool 16MiB -s 8");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("bytes inline, not 100000"), "{}", text(&output.stderr));
}

#[test]
fn a_duration_bounds_the_run() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let since = Instant::now();
    let output = run("perf cache_line --local --duration 0.1");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
}

#[test]
fn the_death_of_the_second_process_is_an_error_that_says_so() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    for test in ["write_lat", "rendezvous_lat", "cache_line", "ring_64"] {
        let long = Long::start(test);
        signal(long.second, "-KILL");
        let (code, said) = long.end();
        assert_eq!(code, Some(1), "{test}: {said}");
        assert!(said.contains("was killed by signal 9"), "{test}: {said}");
    }
}

#[test]
fn a_pause_of_the_second_process_is_not_its_end() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let mut long = Long::start("cache_line");
    signal(long.second, "-STOP");
    std::thread::sleep(Duration::from_secs(1));
    assert!(long.first.try_wait().expect("ours").is_none(), "a pause of a second is no failure");
    signal(long.second, "-CONT");
    std::thread::sleep(Duration::from_millis(200));
    assert!(long.first.try_wait().expect("ours").is_none(), "the run goes on after the pause");
}

#[test]
fn the_second_process_ends_with_the_first() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    for (name, test) in [("-INT", "write_lat"), ("-KILL", "rendezvous_lat")] {
        let long = Long::start(test);
        let second = long.second;
        signal(long.first.id(), name);
        long.end();
        assert!(ends_soon(second), "{name}: process {second} is still there");
    }
}

#[test]
fn what_makes_no_sense_ends_with_2_and_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let nowhere = format!("perf cache_line --local --json {}/no/such", folder.path().display());
    for (arguments, reason) in [
        ("perf cache_line", "--local"),
        ("perf cache_line --local --frobnicate", "--frobnicate"),
        ("perf cache_line --local --turns 3", "--turns"),
        ("perf", "<TEST>"),
        ("nonsense", "nonsense"),
        (nowhere.as_str(), "can't be written"),
    ] {
        let output = run(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
        assert!(said.contains(reason), "{arguments}: {said}");
        assert!(output.stdout.is_empty(), "{arguments}: it began before it refused");
    }
}

#[test]
fn cores_that_are_not_ours_or_named_twice_end_with_2() {
    if !two_cores() {
        return;
    }
    let first = tensorwire::process_cpus()[0];
    for (cores, reason) in
        [(format!("{first},99999"), "core 99999"), (format!("{first},{first}"), "named twice")]
    {
        let output = run(&format!("perf cache_line --local --cores {cores}"));
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    }
}

#[test]
fn one_core_is_refused_with_the_reason() {
    let Some(core) = tensorwire::process_cpus().first() else { return };
    let output = Command::new("taskset")
        .args(["-c", &core.to_string(), env!("CARGO_BIN_EXE_tensorwire"), "perf", "cache_line", "--local"])
        .output();
    let Ok(output) = output else {
        println!("skipped: there is no taskset here");
        return;
    };
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("needs two cores"), "{}", text(&output.stderr));
}

#[test]
fn version_and_settings_are_told() {
    let version = run("--version");
    assert_eq!(text(&version.stdout).trim(), format!("tensorwire {}", env!("CARGO_PKG_VERSION")));
    assert_eq!(text(&run("config").stdout), tensorwire::config::reference());
}

#[test]
fn nobody_else_starts_the_second_process_by_accident() {
    let output = program("perf-responder 3 1").stdin(Stdio::null()).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("taking over from the first process"), "{}", text(&output.stderr));
}
