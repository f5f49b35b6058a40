//! `tensorwire perf compare` as a user runs it, beside programs that stand in for the peers.

use crate::perf::{SOON, alone, program, text, two_cores};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

/// The folder of the programs that stand in for the peers.
fn peers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/peers")
}

/// Compares with few round trips, with these folders before the system's on `PATH`.
fn compare(arguments: &str, path: &[PathBuf], variables: &[(&str, &str)]) -> Output {
    let mut command = program(&format!("perf compare -s 8 -n 50 --warmup 0 {arguments}"));
    let system = std::env::var_os("PATH").unwrap_or_default();
    let folders = path.iter().cloned().chain(std::env::split_paths(&system));
    command.env("PATH", std::env::join_paths(folders).expect("no colon"));
    command.env_remove("UCX_PERFTEST").env_remove("ICEORYX2_BENCHMARK");
    command.envs(variables.iter().copied()).output().expect("the program starts")
}

fn names(report: &Value, measure: &str) -> Vec<String> {
    let rows = report["rows"].as_array().expect("rows").iter();
    let mut names: Vec<String> = rows
        .filter(|row| row["measure"] == measure)
        .map(|row| row["name"].as_str().expect("a name").to_owned())
        .collect();
    names.sort();
    names.dedup();
    names
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn the_peers_on_path_are_compared_in_turns_as_text_json_and_picture() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (json, svg) = (folder.path().join("report.json"), folder.path().join("report.svg"));
    let files = format!("--json {} --svg {}", json.display(), svg.display());
    let output = compare(&files, &[peers()], &[]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    for part in ["commit", "latency, one way", "bandwidth, one direction", "tensorwire", "ucx-posix", "ratio"]
    {
        assert!(said.contains(part), "no {part} in\n{said}");
    }

    let report: Value =
        serde_json::from_str(&std::fs::read_to_string(json).expect("the report")).expect("JSON");
    assert_eq!(
        names(&report, "latency"),
        [
            "cache_line",
            "iceoryx2",
            "ring_64",
            "tensorwire",
            "tensorwire-borrow",
            "tensorwire-grpc",
            "ucx",
            "ucx-posix",
            "ucx-tcp"
        ]
    );
    assert_eq!(names(&report, "bandwidth"), ["tensorwire", "ucx", "ucx-posix", "ucx-put", "ucx-tcp"]);
    let figures = report["figures"].as_array().expect("figures");
    let of = |name: &str, measure: &str| {
        let of = figures.iter().filter(|figure| figure["name"] == name && figure["measure"] == measure);
        of.map(|figure| figure["value"].as_f64().expect("a number")).collect::<Vec<_>>()
    };
    assert_eq!(of("ucx-posix", "latency"), [95.0; 5]);
    assert_eq!(of("iceoryx2", "latency"), [490.0; 5]);
    assert!((of("ucx", "bandwidth")[0] - 0.1).abs() < 0.001, "100 MB/s: {:?}", of("ucx", "bandwidth"));
    assert!(of("tensorwire", "latency").iter().all(|nanos| *nanos > 0.0));

    let picture = std::fs::read_to_string(svg).expect("the picture");
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 2, "something was left");
}

#[test]
fn a_peer_that_hangs_and_one_that_is_missing_are_named_and_the_rest_runs() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let ucx = peers().join("ucx_perftest");
    let options = "--measures latency --peers ucx-posix,ucx,iceoryx2 --timeout 1 --iceoryx2 /no/such";
    let hang = ("TENSORWIRE_TEST_HANG", "1");
    let named = ("UCX_PERFTEST", ucx.to_str().expect("UTF-8"));
    let output = compare(options, &[], &[hang, named]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let end: Vec<&str> = said.lines().rev().take(2).collect();
    assert!(end[0].contains("iceoryx2 is left out: /no/such is no file; install it with: "), "{said}");
    assert!(end[1].contains(" ucx is left out: `") && end[1].contains("-t tag_lat -s 8 -n 50"), "{said}");
    assert!(end[1].contains("did not end within 1s and was killed"), "{said}");
    let rows = said.lines().filter(|line| line.contains(" shm ")).collect::<Vec<_>>();
    assert!(rows.iter().any(|row| row.contains(" ucx-posix ")), "{said}");
    assert!(!rows.iter().any(|row| row.contains(" ucx ")), "{said}");
}

/// The processes that a process has started.
fn children(process: &str) -> Vec<String> {
    let listed = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    listed.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// The two processes of a run of ours that measures latency, once it has begun.
fn measuring(comparison: &str) -> Option<[String; 2]> {
    let first = children(comparison).pop()?;
    let line = std::fs::read_to_string(format!("/proc/{first}/cmdline")).ok()?;
    let second = children(&first).pop()?;
    line.contains("rendezvous_lat").then_some([first, second])
}

#[test]
fn a_signal_leaves_neither_processes_nor_files() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for signal in [Signal::TERM, Signal::KILL] {
        let mut command = program("perf compare -s 8 -n 1000000000 --warmup 0 --measures latency");
        command.env("TMPDIR", folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut comparison = command.spawn().expect("it starts");
        let since = Instant::now();
        let processes = loop {
            match measuring(&comparison.id().to_string()) {
                Some(processes) => break processes,
                None => assert!(since.elapsed() < 3 * SOON, "it does not measure"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        kill_process(Pid::from_child(&comparison), signal).expect("it runs");
        let ended = comparison.wait().expect("ours").signal();
        assert_eq!(ended, Some(signal.as_raw()));
        let runs = |process: &String| Path::new("/proc").join(process).join("exe").read_link().is_ok();
        let since = Instant::now();
        while processes.iter().any(runs) {
            assert!(since.elapsed() < SOON, "{processes:?} live on after {signal:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Nothing can be done about it after SIGKILL.
        if signal == Signal::TERM {
            assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 0, "a folder is left");
        }
    }
}

#[test]
fn a_comparison_that_makes_no_sense_is_refused() {
    if !two_cores() {
        return;
    }
    for (options, reason) in [
        ("--turns 4", "4 is not in 5..=1000"),
        ("--peers nccl", "[possible values: ucx-posix, ucx, ucx-put, ucx-tcp, iceoryx2, perftest]"),
        ("--svg /no/such/folder/x.svg", "--svg: /no/such/folder/x.svg can't be written"),
        ("--json /no/such/folder/x", "--json: /no/such/folder/x can't be written"),
        ("--cores 1,1", "named twice"),
        ("--depth 5", "unexpected argument '--depth'"),
    ] {
        let output = compare(options, &[], &[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {said}");
        assert!(said.contains(reason), "{options}: {said}");
    }
    for (options, reason) in [
        ("--duration 1", "--duration: the peers count round trips"),
        ("--unpinned", "--unpinned: a comparison is of two pinned cores"),
    ] {
        let output = program(&format!("perf compare {options}")).output().expect("the program starts");
        assert!(text(&output.stderr).contains(reason), "{options}");
        assert_eq!(output.status.code(), Some(2), "{options}");
    }
}
