//! `tensorwire perf` as a user runs it: two real processes, killed, interrupted, and given wrong
//! options.

use crate::inherited::is_ignored;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Timeout of actions that take milliseconds on an idle machine.
pub const SOON: Duration = Duration::from_secs(10);

/// Serialises the runs, each of which spins on two cores.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub fn program(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire"));
    command.args(arguments.split_whitespace());
    command
}

pub fn run(arguments: &str) -> Output {
    program(arguments).output().expect("the program starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether there are two cores; prints otherwise that the test was skipped.
pub fn two_cores() -> bool {
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
    /// What the first process prints. It is open for as long as the run.
    _output: BufReader<ChildStdout>,
}

impl Long {
    fn start(test: &str) -> Self {
        let mut first = program(&format!("perf {test} --local -s 8 --duration 20"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let children = format!("/proc/{0}/task/{0}/children", first.id());
        let mut output = BufReader::new(first.stdout.take().expect("piped"));
        let has_joined = output.by_ref().lines().any(|line| line.expect("text").contains("#bytes"));
        assert!(has_joined, "the run has ended without its table");
        let mut long = Long { first, second: 0, _output: output };
        let since = Instant::now();
        while long.second == 0 || !is_spinning(long.second) {
            assert!(since.elapsed() < SOON, "the second process does not spin");
            std::thread::sleep(Duration::from_millis(5));
            let listed = std::fs::read_to_string(&children).unwrap_or_default();
            long.second = listed.split_whitespace().next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
        }
        long
    }

    /// Waits for the end of the first process. Returns its exit status and its standard error.
    fn end(mut self) -> (Option<i32>, String) {
        let since = Instant::now();
        while self.first.try_wait().expect("ours").is_none() {
            assert!(since.elapsed() < SOON, "the first process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut said = String::new();
        let mut stderr = self.first.stderr.take().expect("piped");
        stderr.read_to_string(&mut said).expect("text");
        (self.first.wait().expect("ours").code(), said)
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

/// Whether the process has used a tenth of a second of processor time, so that it is past its
/// start.
fn is_spinning(pid: u32) -> bool {
    ticks(pid) >= 10
}

/// The processor time of a process in user mode and in the kernel, in ticks of 10 ms.
pub fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
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

/// The kernel ends a process with a larger file by SIGXFSZ.
#[test]
fn a_limit_of_file_size_that_is_too_low_is_said() {
    if !two_cores() {
        return;
    }
    let line = format!("ulimit -f 0; exec {} perf cache_line --local", env!("CARGO_BIN_EXE_tensorwire"));
    let output = Command::new("sh").args(["-c", &line]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("raise `ulimit -f`"), "{output:?}");
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

/// The report of a run that ended well.
pub fn report(path: &Path, output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    serde_json::from_str(&std::fs::read_to_string(path).expect("the report")).expect("JSON")
}

#[test]
fn the_bare_fabrics_other_tests_run_in_two_processes_of_one_program() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (test, sizes, heading) in [
        ("write_bw", "-s 8,64KiB", "MsgRate[Mpps]"),
        ("send_lat", "-s 1,224", "half of the round trip"),
        ("read_lat", "-s 8,64KiB", "the whole round trip"),
    ] {
        let path = folder.path().join(test);
        let options = format!("{sizes} -n 200 --warmup 20 --pool 16MiB -t 32 --json {}", path.display());
        let output = run(&format!("perf {test} --local {options}"));
        let report = report(&path, &output);
        assert!(text(&output.stdout).contains(heading), "{}", text(&output.stdout));
        assert_eq!(
            (&report["test"], &report["fabric"], &report["depth"]),
            (&test.into(), &"shm".into(), &32.into())
        );
        let rows = report["results"].as_array().expect("a list");
        assert_eq!(rows.len(), 2, "{rows:?}");
        for row in rows {
            let figure = if test == "write_bw" { "gb_s" } else { "p50_ns" };
            assert!(row["iterations"] == 200 && row[figure].as_f64().expect("a number") > 0.0, "{row}");
        }
    }
}

#[test]
fn small_writes_that_are_copied_are_counted_like_others() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report");
    let options = "perf write_bw --local -s 8 -I 8 -n 1000 --pool 8MiB -t 16 --json";
    let report = report(&path, &run(&format!("{options} {}", path.display())));
    assert_eq!((&report["inline_bytes"], &report["results"][0]["iterations"]), (&8.into(), &1000.into()));
}

#[test]
fn tensors_are_measured_over_each_fabric_and_over_grpc_calls() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (fabric, chosen) in [("auto", "shm"), ("tcp", "tcp"), ("grpc", "grpc")] {
        let path = folder.path().join(fabric);
        let options = "perf rendezvous_lat --local -s 8,200KiB -n 20 --warmup 5 --fabric";
        let output = run(&format!("{options} {fabric} --json {}", path.display()));
        let report = report(&path, &output);
        assert_eq!(report["fabric"], chosen);
        let why = report["fabric_reason"].as_str().expect("the reason");
        assert!(!why.is_empty() && text(&output.stdout).contains(&format!("{chosen} ({why})")), "{report}");
        let results = report["results"].as_array().expect("the results");
        assert!(results.iter().all(|result| result["p50_ns"].as_f64().expect("a time") > 0.0), "{report}");
        assert_eq!(results.len(), 2);
    }
}

#[test]
fn a_borrowed_receive_costs_the_same_at_any_size() {
    /// Bound for the ratio of 1 GiB to 8 B. A test on a busy machine asserts five times this.
    const BOUND: f64 = 1.5;
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report");
    let options = "perf rendezvous_lat --local --borrow -s 8,64MiB -n 500 --warmup 20 --pool 130MiB --json";
    let report = report(&path, &run(&format!("{options} {}", path.display())));
    let references = report["references"].as_array().expect("a list");
    let [smallest] = references.iter().filter(|one| one["name"] == "smallest").collect::<Vec<_>>()[..] else {
        panic!("{references:?}")
    };
    assert_eq!(smallest["bytes"], 64 << 20);
    let figure = |key: &str| smallest[key].as_f64().expect("a number");
    let (ours, least, ratio) = (figure("ours_p50_ns"), figure("p50_ns"), figure("ratio"));
    println!(
        "a borrowed receive of 64 MiB took {ours} ns, one of 8 B {least} ns: {ratio:.2} (bound {BOUND})"
    );
    assert!(ratio < 5.0 * BOUND, "{smallest}");
    assert!(references.iter().all(|one| one["name"] != "memcpy"));
}

/// Batches beside single tensors, and standing requests beside plain ones.
#[test]
fn what_costs_less_is_measured_beside_what_it_replaces() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (option, name, how) in [
        ("--batch 20", "one_by_one", "20 tensors each way by one call"),
        ("--standing", "plain", "standing requests, window 16"),
        ("--standing 3 -I 0", "plain", "standing requests, window 3"),
    ] {
        let path = folder.path().join("report");
        let options = "-s 8,4KiB -n 300 --warmup 20 --pool 16MiB --json";
        let output = run(&format!("perf rendezvous_lat --local {option} {options} {}", path.display()));
        let report = report(&path, &output);
        assert!(report["poll_mode"].as_str().expect("text").contains(how), "{option}: {report}");
        let rows = report["results"].as_array().expect("a list");
        assert!(rows.iter().all(|row| row["iterations"] == 300), "{rows:?}");
        let references = report["references"].as_array().expect("a list");
        let beside: Vec<_> = references.iter().filter(|one| one["name"] == name).collect();
        assert_eq!(beside.len(), 2, "{option}: {references:?}");
        for one in beside {
            println!("{option}, {} bytes: {} times {name}", one["bytes"], one["ratio"]);
            assert!(one["ratio"].as_f64().expect("a number") > 0.0, "{one}");
        }
    }
}

#[test]
fn verbs_without_a_device_says_what_is_missing() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        println!("skipped: this machine has an RDMA device");
        return;
    }
    for test in ["write_lat", "write_bw", "send_lat", "read_lat"] {
        let output = run(&format!("perf {test} --local --fabric verbs -s 8 --pool 8MiB"));
        assert_eq!(output.status.code(), Some(1), "{test}");
        let said = text(&output.stderr);
        assert!(said.contains("verbs: "), "{test}: {said}");
        assert!(said.contains("libibverbs") || said.contains("RDMA device"), "{test}: {said}");
    }
}

#[test]
fn what_a_fabric_cannot_do_is_refused_with_the_reason() {
    for (options, reason) in [
        ("--ib-dev rxe0", "--ib-dev: shm has no device"),
        ("--gid-index 1 --fabric shm", "--gid-index: shm has no GIDs"),
        ("--cq-mod 4", "--cq-mod: shm has no completion queue"),
        ("--notify memory", "lands when its receiver polls"),
        ("--mtu 1500 --fabric verbs", "256, 512, 1024, 2048 or 4096"),
        ("-F", "-F"),
    ] {
        let output = run(&format!("perf write_lat --local {options}"));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {said}");
        assert!(said.contains(reason), "{options}: {said}");
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
        if name == "-INT" && is_ignored(2) {
            continue;
        }
        let long = Long::start(test);
        let second = long.second;
        signal(long.first.id(), name);
        long.end();
        assert!(ends_soon(second), "{name}: process {second} is still there");
    }
}

#[test]
fn what_makes_no_sense_ends_with_2_and_the_reason() {
    if !two_cores() {
        return;
    }
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
    assert_eq!(text(&run("config").stdout), tensorwire::internals::config::listing());
    assert_eq!(text(&run("config --markdown").stdout), tensorwire::internals::config::reference());
}

#[test]
fn nobody_else_starts_the_second_process_by_accident() {
    let output = program("perf-responder 3 1").stdin(Stdio::null()).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("taking over from the first process"), "{}", text(&output.stderr));
}

#[test]
fn a_profile_is_printed_and_both_processes_take_it() {
    let printed = run("config --profile few-cores");
    assert!(printed.status.success());
    assert_eq!(text(&printed.stdout), tensorwire::Profile::FewCores.text());
    if !two_cores() {
        return;
    }
    let _alone = alone();
    let length = "--local -s 8 --iterations 50 --warmup 0";
    for (options, inline) in [("--profile low-latency", 160), ("--profile low-latency -I 64", 64)] {
        let output = run(&format!("perf rendezvous_lat {length} {options}"));
        let said = text(&output.stdout);
        assert!(output.status.success(), "{options}: {said}{}", text(&output.stderr));
        let inline = format!(": {inline} bytes\n");
        assert!(said.contains(", profile low-latency") && said.contains(&inline), "{said}");
    }
}
