//! The victims: each goes to its phase and stays there.

use super::{BULK, PROBE, Phase};
use crate::common::other::wait_to_be_told;
use crate::common::{SOON, member, over_verbs, until, writes_bulk};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, Node};

/// A process that has begun to join is linked within this time. Over verbs the machine may be slow.
fn linked() -> Duration {
    Duration::from_millis(if over_verbs() { 3000 } else { 100 })
}

fn variable(name: &str) -> String {
    std::env::var(name).expect("started by a test")
}

fn count(node: &Node, counter: Counter) -> u64 {
    node.counters().get(counter)
}

fn until_count(node: &Node, counter: Counter, value: u64) {
    until(node, counter.name(), || count(node, counter) >= value);
}

/// Reports its phase, and does not poll from now on.
fn stay() {
    println!("there");
    wait_to_be_told();
}

fn bulk(node: &Node) -> tensorwire::Tensor {
    let mut tensor = node.tensor(DType::U8, &[BULK as u64]).expect("room");
    tensor.bytes_mut().fill(7);
    tensor.freeze()
}

fn node_of(phase: Phase) -> Node {
    let receive = if phase == Phase::Borrow { "borrow" } else { "copy" };
    let node = member(&variable("TEST_CLUSTER"), 1)
        .set("bulk_receive", receive)
        .set("max_lent_bytes", "16TiB")
        .set("stop_timeout", "20s");
    let node = node.set("poll", "inline");
    let node = node.start().expect("the node starts");
    node.join().expect("joined");
    println!("ready");
    node
}

fn phase() -> (Phase, u64) {
    let name = variable("TEST_PHASE");
    let phase = super::PHASES.into_iter().find(|phase| format!("{phase:?}") == name).expect("a phase");
    (phase, variable("TEST_STEP").parse().expect("a number"))
}

#[test]
#[ignore = "a role, not a test"]
fn role_receiver() {
    let (phase, id) = phase();
    let node = node_of(phase);
    if phase == Phase::Stop {
        return stay();
    }
    let step = node.step(id).expect("new");
    let edge = node.edge_from("w", 0, "t").expect("edge");
    let pending = step.receive(&edge).begin().expect("begun");
    match phase {
        Phase::Announce | Phase::Stop => {}
        // A destination is granted once the offer has come.
        Phase::Bulk if writes_bulk() => until(&node, "a destination", || !node.pool().is_empty()),
        Phase::Bulk => {}
        Phase::Held => {
            drop(pending);
            // The meta-data and the record.
            until_count(&node, Counter::MessagesReceived, PROBE + 2);
        }
        Phase::Borrow => {
            let got = pending.wait().expect("received");
            assert!(got.tensor.is_lent());
            stay();
            unreachable!("killed with {got:?} in hand");
        }
    }
    stay();
}

#[test]
#[ignore = "a role, not a test"]
fn role_sender() {
    let (phase, id) = phase();
    let node = node_of(phase);
    let edge = node.edge_to("w", 0, "t").expect("edge");
    if phase == Phase::Announce {
        until_count(&node, Counter::MessagesReceived, PROBE + 1);
        return stay();
    }
    let step = node.step(id).expect("new");
    step.send(&edge, bulk(&node)).expect("sent");
    match phase {
        Phase::Held => until_count(&node, Counter::TensorsSent, 1),
        Phase::Bulk => {
            until_count(&node, Counter::WritesPosted, 1);
            if writes_bulk() {
                die();
            }
        }
        Phase::Borrow => until_count(&node, Counter::LoansPosted, 1),
        Phase::Announce | Phase::Stop => {}
    }
    if phase == Phase::Stop {
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stopping = scope.spawn(|| {
                begun.store(true, Ordering::SeqCst);
                node.stop()
            });
            while !begun.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // Enters the drain of the stop, which lasts until a peer asks.
            std::thread::sleep(Duration::from_millis(3));
            assert!(!stopping.is_finished(), "nobody has asked for its value");
            println!("there");
            stopping.join().expect("no panic").expect("killed before");
        });
        unreachable!("its value was taken, or {SOON:?} are over");
    }
    stay();
}

/// Whether this process has a thread with this name.
fn has_thread(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs").flatten();
    let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.any(|comm| comm.trim() == name)
}

fn die() -> ! {
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL).expect("allowed");
    unreachable!("killed");
}

/// Dies while it joins: in a given phase, or at a given time after the start.
/// Whether this process has a connection that it has made, and that another member has taken.
fn has_called() -> bool {
    const ESTABLISHED: &str = "01";
    let cluster = variable("TEST_CLUSTER");
    let ports: Vec<u16> = cluster.split(',').filter_map(|at| at.rsplit(':').next()?.parse().ok()).collect();
    let own = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten();
    let own: Vec<String> =
        own.filter_map(|file| Some(std::fs::read_link(file.path()).ok()?.to_str()?.to_owned())).collect();
    let table = std::fs::read_to_string("/proc/net/tcp").expect("procfs");
    table.lines().skip(1).any(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let port = words[2].rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
        words[3] == ESTABLISHED
            && port.is_some_and(|port| ports.contains(&port))
            && own.contains(&format!("socket:[{}]", words[9]))
    })
}

#[test]
#[ignore = "a role, not a test"]
fn role_joiner() {
    let (task, place): (u32, _) =
        (variable("TEST_VICTIM").parse().expect("a number"), variable("TEST_PLACE"));
    match place.as_str() {
        "before" => return stay(),
        // While a thread connects the link, or at the latest soon after it has.
        "linking" => drop(std::thread::spawn(|| {
            let mut since = None;
            while !has_thread("tw-boot-block") {
                if has_thread("tw-bootstrap") && since.get_or_insert_with(Instant::now).elapsed() > linked() {
                    break;
                }
                std::thread::yield_now();
            }
            die();
        })),
        "attached" | "up" => {}
        after_call => {
            let delay = Duration::from_micros(after_call.parse().expect("a place or a number"));
            std::thread::spawn(move || {
                while !has_called() {
                    std::thread::yield_now();
                }
                std::thread::sleep(delay);
                die();
            });
        }
    }
    let node = member(&variable("TEST_CLUSTER"), task).start().expect("the node starts");
    // Attaching the link sends its ping.
    if place == "attached" {
        while count(&node, Counter::MessagesSent) == 0 {
            std::thread::yield_now();
        }
        die();
    }
    let _ = node.join();
    println!("ready");
    loop {
        let _ = node.progress();
    }
}
