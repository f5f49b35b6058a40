//! The `tensorwire` program as a user meets it.
#![cfg(feature = "cli")]

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn tensorwire(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tensorwire")).args(line.split_whitespace()).output().expect("it starts")
}

fn cpus() -> usize {
    tensorwire::process_cpus().len()
}

#[test]
fn the_benchmarks_print_perftests_table_and_write_their_figures() {
    if cpus() < 2 {
        println!("skipped: two polling processes need two CPUs, and this host gives {}", cpus());
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for test in ["write_lat", "rendezvous_lat"] {
        let file = folder.path().join(test);
        let line = format!(
            "perf {test} --local -s 8,4KiB,64KiB -n 200 --warmup 20 --pool 16MiB --json {}",
            file.display()
        );
        let output = tensorwire(&line);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(
            text.contains("t_typical[usec]") && text.contains("cache_line") && text.contains("memcpy"),
            "{text}"
        );
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
        assert_eq!((&json["test"], &json["fabric"]), (&test.into(), &"shm".into()));
        let results = json["results"].as_array().expect("a list");
        assert_eq!(
            results.iter().map(|result| result["bytes"].as_u64()).collect::<Vec<_>>(),
            [Some(8), Some(4096), Some(65536)]
        );
        for result in results {
            assert_eq!(result["iterations"], 200);
            let figures = ["min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"]
                .map(|key| result[key].as_f64().expect(key));
            assert!(figures[0] > 0.0 && figures.is_sorted(), "{figures:?}");
            assert!(result["mean_ns"].as_f64().is_some() && result["stdev_ns"].as_f64().is_some());
        }
        for reference in json["references"].as_array().expect("a list") {
            assert!(reference["name"].is_string() && reference["bytes"].is_u64());
            assert!(reference["p50_ns"].as_f64() > Some(0.0) && reference["ratio"].as_f64() > Some(0.0));
        }
        assert!(!folder.path().join(format!("{test}.part")).exists());
    }
}

#[test]
fn a_wrong_command_line_gets_one_clear_line_and_status_2() {
    for (line, part) in [
        ("perf write_lat", "add --local"),
        ("perf nothing --local", "nothing"),
        ("perf write_lat --local --cores 0,0", "twice"),
        ("perf write_lat --local --sizes huge", "number of bytes"),
        ("fly", "fly"),
    ] {
        let output = tensorwire(line);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {error}");
        assert!(error.contains(part), "{line}: {error}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let started = Instant::now();
    let output = tensorwire("perf write_lat --local --json /nonexistent/file.json -n 100000000");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(if cpus() < 2 { 2 } else { 1 }), "{error}");
    assert!(cpus() < 2 || error.contains("/nonexistent/file.json"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_settings_are_listed() {
    let output = tensorwire("config");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("TENSORWIRE_POOL_SIZE") && text.contains("silence_bound"),
        "{text}"
    );
}

#[test]
fn a_second_process_that_is_killed_ends_the_benchmark_with_an_error() {
    if cpus() < 2 {
        println!("skipped: two polling processes need two CPUs, and this host gives {}", cpus());
        return;
    }
    for test in ["write_lat", "rendezvous_lat"] {
        let program = Command::new(env!("CARGO_BIN_EXE_tensorwire"))
            .args(["perf", test, "--local", "-s", "8", "--duration", "20", "--pool", "16MiB"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let second = child_of(program.id());
        std::thread::sleep(Duration::from_millis(300));
        let killed = Instant::now();
        let kill = Command::new("kill").args(["-9", &second.to_string()]).status().expect("kill");
        assert!(kill.success());
        let output = program.wait_with_output().expect("it ends");
        println!("{test} ended {:?} after the kill", killed.elapsed());
        assert!(killed.elapsed() < Duration::from_secs(10));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("signal: 9"), "{error}");
    }
}

/// The second process of a benchmark.
fn child_of(parent: u32) -> u32 {
    let is_second = |child: &u32| {
        std::fs::read_to_string(format!("/proc/{child}/cmdline")).is_ok_and(|line| line.contains("perf-peer"))
    };
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
        let children = children.unwrap_or_default();
        if let Some(child) = children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_second) {
            return child;
        }
        assert!(Instant::now() < end, "the program started no second process");
        std::thread::sleep(Duration::from_millis(5));
    }
}
