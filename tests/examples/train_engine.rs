//! Runs with several processes, in which every tensor goes through the engine.

use crate::network::Network;
use crate::program::{Running, Train, send};
use std::path::Path;
use std::time::{Duration, Instant};

/// Ten times as long as all members need to notice a death on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// The gate has the main job beside this.
#[ignore = "takes long: tests/nightly"]
#[test]
fn processes_end_with_the_weights_of_a_single_run_bit_for_bit() {
    for (servers, workers, standing) in [(1, 1, "on"), (2, 3, "on"), (2, 3, "off"), (2, 6, "on")] {
        let args =
            format!("--servers {servers} --workers {workers} --steps 10 --seed 9 --standing {standing}");
        let (apart, alone) = (Train::new(&args).summary(), Train::new(&format!("{args} --single")).summary());
        assert_eq!(apart["weights_digest"], alone["weights_digest"], "{args}");
        assert_eq!((&apart["accuracy"], &apart["loss"]), (&alone["accuracy"], &alone["loss"]), "{args}");
    }
}

#[test]
fn processes_end_with_the_same_weights_over_tcp_and_grpc_calls() {
    let args = "--servers 2 --workers 3 --steps 10 --seed 9";
    let alone = Train::new(&format!("{args} --single")).summary();
    for fabric in ["tcp", "grpc"] {
        let apart = Train::new(&format!("{args} --fabric {fabric}")).summary();
        assert_eq!(apart["weights_digest"], alone["weights_digest"], "{fabric}");
        assert_eq!((&apart["accuracy"], &apart["loss"]), (&alone["accuracy"], &alone["loss"]), "{fabric}");
        assert_eq!(apart["fabric"], fabric);
    }
}

#[ignore = "takes long: tests/nightly"]
#[test]
fn processes_on_three_hosts_end_with_the_same_weights_over_tcp() {
    let Some(network) = Network::of(3) else { return };
    let host = |number| format!("{}={}", Network::address(number), network.starter(number).join(" "));
    let hosts = (0..3).map(host).collect::<Vec<_>>().join(",");
    let args = "--servers 2 --workers 4 --steps 20 --seed 9";
    let alone = Train::new(&format!("{args} --single")).summary();
    for (fabric, carried) in [("auto", "shm, tcp"), ("tcp", "tcp")] {
        let apart = Train::new(&format!("{args} --fabric {fabric} --hosts")).with(&hosts).summary();
        assert_eq!(apart["weights_digest"], alone["weights_digest"], "{fabric}");
        assert_eq!((&apart["accuracy"], &apart["loss"]), (&alone["accuracy"], &alone["loss"]), "{fabric}");
        println!("{apart}");
        assert_eq!(apart["fabric"], carried);
    }
}

#[test]
fn tensors_and_bytes_are_those_of_the_formula_and_go_through_shared_memory() {
    let summary = Train::new("--servers 2 --workers 3 --steps 20").summary();
    let moves = (2 * 20 + 1) * 3;
    let numbers = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10;
    assert_eq!(summary["tensors_moved"], moves * 6);
    assert_eq!(summary["bytes_moved"], moves * 4 * numbers);
    // Each tensor needs at least one operation, in any protocol.
    assert!(summary["fabric_ops"].as_u64().expect("operations") >= moves * 6, "{summary}");
    assert_eq!(summary["fabric"], "shm");
    assert_ne!(summary["pages"], "none");
    let (p50, p99) = (summary["receive_p50_ns"].as_u64(), summary["receive_p99_ns"].as_u64());
    assert!(p50.expect("p50") > 0 && p99 >= p50, "{summary}");
    let share = summary["comm_share"].as_f64().expect("share");
    assert!(share > 0.0 && share < 1.0, "{summary}");
}

#[ignore = "takes long: tests/nightly"]
#[test]
fn a_tensor_takes_a_record_and_a_loan_and_hardly_more_with_or_without_a_standing_request() {
    let operations = |standing: &str| {
        let args = format!("--workers 2 --steps 100 --standing {standing}");
        let summary = Train::new(&args).summary();
        let number = |name: &str| summary[name].as_u64().expect("a number") as f64;
        number("fabric_ops") / number("tensors_moved")
    };
    let (on, off) = (operations("on"), operations("off"));
    println!("operations of a tensor: {on:.2} with standing requests, {off:.2} without");
    // The edges are announced once. Each window costs two messages, and each step one for each
    // peer.
    assert!(on < 2.3 && off < 2.3, "{on} and {off}");
}

#[test]
fn a_worker_killed_in_the_middle_ends_all_others_with_an_error_that_names_it() {
    let (run, members) = training();
    let victim = members.iter().find(|member| member.name == "worker/1").expect("worker 1");
    let killed = Instant::now();
    send("KILL", victim.pid);
    let output = run.end();
    let took = killed.elapsed();
    println!("all had ended {took:?} after the kill");
    assert!(took < SOON, "{took:?}");
    assert_eq!(output.status.code(), Some(1));
    let lines: Vec<&str> = output.stderr.lines().filter(|line| line.starts_with("train: ")).collect();
    let cause = format!("worker/1 (process {}) was killed by signal 9 (SIGKILL)", victim.pid);
    assert_eq!(lines.len(), members.len(), "one for each process: {lines:?}");
    assert!(lines[0].contains(&cause) && lines.iter().all(|line| line.contains("worker/1")), "{lines:?}");
    // Each member ends by an error of its own; the program neither ended nor informed it.
    for line in &lines[1..] {
        assert!(line.contains("ended with status 1: ") && !line.contains("[after"), "{line}");
    }
    assert_gone(&members);
}

#[test]
fn a_member_that_dies_before_all_have_joined_ends_the_others_at_once() {
    let run = Train::new("--servers 1 --workers 3 --steps 1000000").start();
    let started = |name: &str| {
        let deadline = Instant::now() + SOON;
        loop {
            if let Some(found) = children(run.id()).into_iter().find(|member| member.name == name) {
                break found;
            }
            assert!(Instant::now() < deadline, "{name} is not started");
        }
    };
    // A member that does not go on keeps all others in their joins.
    let stopped = started("worker/1");
    send("STOP", stopped.pid);
    let victim = started("worker/2");
    let killed = Instant::now();
    send("KILL", victim.pid);
    let output = run.end();
    println!("all had ended {:?} after the kill", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
    let lines: Vec<&str> = output.stderr.lines().filter(|line| line.starts_with("train: ")).collect();
    assert!(
        lines.len() == 4 && lines[0].contains("worker/2 (process") && lines[0].contains("SIGKILL"),
        "{lines:?}"
    );
    assert!(lines.iter().all(|line| line.contains("worker/2")), "{lines:?}");
    assert!(!stopped.lives());
}

#[test]
fn each_member_that_cannot_start_shows_its_own_error() {
    let devices = "--fabric verbs --devices none_0,none_1,none_2,none_3";
    let output = Train::new(&format!("--servers 1 --workers 3 {devices}")).start().end();
    let lines: Vec<&str> = output.stderr.lines().filter(|line| line.starts_with("train: ")).collect();
    assert_eq!((output.status.code(), lines.len()), (Some(1), 4), "{lines:?}");
    for line in lines {
        assert!(line.contains("ended with status 1: ") && line.contains("verbs"), "{line}");
    }
}

#[test]
fn ctrl_c_ends_every_process_with_status_130() {
    let (run, members) = training();
    send("INT", run.id());
    let output = run.end();
    assert_eq!(output.status.code(), Some(130), "{}", output.stderr);
    assert!(output.stderr.ends_with("train: ended by SIGINT\n"), "{}", output.stderr);
    assert_gone(&members);
}

#[test]
fn the_processes_end_when_the_one_that_started_them_is_killed() {
    let (run, members) = training();
    send("KILL", run.id());
    run.end();
    let deadline = Instant::now() + SOON;
    while members.iter().any(Member::lives) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_gone(&members);
}

/// A process that the example has started.
#[derive(Debug)]
struct Member {
    name: String,
    pid: u32,
}

impl Member {
    fn lives(&self) -> bool {
        // A zombie has ended. Its command line is empty.
        command_line(self.pid).is_some_and(|words| words.contains(&self.name))
    }
}

/// A run of 2 servers and 3 workers that goes on until the test ends it, in the middle of its
/// steps.
fn training() -> (Running, Vec<Member>) {
    let mut run = Train::new("--servers 2 --workers 3 --steps 16000000").start();
    run.wait_for_line();
    let members = children(run.id());
    assert_eq!(members.len(), 5, "{members:?}");
    (run, members)
}

fn children(parent: u32) -> Vec<Member> {
    let pids = std::fs::read_dir("/proc").expect("/proc").filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    });
    let ours = pids.filter(|pid| parent_of(*pid) == Some(parent));
    ours.filter_map(|pid| Some(Member { name: command_line(pid)?.get(2)?.clone(), pid })).collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

fn command_line(pid: u32) -> Option<Vec<String>> {
    let line = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("cmdline")).ok()?;
    Some(line.split('\0').map(str::to_owned).collect())
}

fn assert_gone(members: &[Member]) {
    let alive: Vec<_> = members.iter().filter(|member| member.lives()).collect();
    assert!(alive.is_empty(), "still there: {alive:?}");
}
