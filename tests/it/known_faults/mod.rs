//! Known faults of the originals (specification 3.11): tests that belong to no other file.
//! `docs/testing.md` names the tests of each fault.

mod bulk;

use crate::common::other::Other;
use crate::common::{
    SOON, cluster, counting, member, over_grpc, over_verbs, run, until, values, writes_bulk,
};
use crate::log;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tensorwire::{Error, Node, PeerState};

#[test]
fn five_peers_that_send_at_once_overrun_nothing() {
    const EACH: u32 = 200;
    run(6, &[("queue_depth", "16")], |node, task| {
        let step = node.step(1).expect("new");
        if task > 0 {
            let edge = node.edge_to("w", 0, "x").expect("edge");
            for number in 0..EACH {
                step.send(&edge, counting(node, number as f32, 1 + (number as usize % 2) * 999))
                    .expect("sent");
            }
            return;
        }
        let pending: Vec<_> = (1..6)
            .flat_map(|peer| {
                let edge = node.edge_from("w", peer, "x").expect("edge");
                let step = &step;
                (0..EACH).map(move |number| (number, step.receive(&edge).begin().expect("begun")))
            })
            .collect();
        for (number, pending) in pending {
            assert_eq!(values(&pending.wait().expect("received").tensor)[0], number as f32);
        }
    });
}

#[test]
fn thousands_of_values_flow_through_the_smallest_queue() {
    const VALUES: usize = 5_000;
    run(2, &[("queue_depth", "16")], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let edge = node.edge_to("w", 1, "x").expect("edge");
            (0..VALUES).for_each(|number| step.send(&edge, counting(node, number as f32, 1)).expect("sent"));
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("edge");
        let mut number = 0;
        while number < VALUES {
            // More values at a time than the queue holds.
            let pending: Vec<_> = (0..100).map(|_| step.receive(&edge).begin().expect("begun")).collect();
            for pending in pending {
                let got = pending.wait().expect("received").tensor;
                assert_eq!(values(&got)[0], number as f32);
                number += 1;
            }
        }
    });
}

#[test]
fn a_callback_that_blocks_stops_nobody() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        let (out, back) = (
            node.edge_to("w", 1 - task, "x").expect("edge"),
            node.edge_from("w", 1 - task, "x").expect("edge"),
        );
        let called = node.edge_to("w", 1, "called").expect("edge");
        if task == 0 {
            step.send(&called, counting(node, 0.0, 1)).expect("sent");
        }
        let (unblock, blocked) = channel::<()>();
        let (began, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        if task == 1 {
            let (began, ended) = (began.clone(), ended.clone());
            let edge = node.edge_from("w", 0, "called").expect("edge");
            let wait = move |_| {
                began.store(true, Ordering::SeqCst);
                // The callback ends when the sender is dropped.
                let _ = blocked.recv();
                ended.store(true, Ordering::SeqCst);
            };
            step.receive(&edge).within(SOON).then(wait).expect("begun");
        }
        until(node, "the callback", || task == 0 || began.load(Ordering::SeqCst));
        for number in 0..100 {
            step.send(&out, counting(node, number as f32, 1)).expect("sent");
            let got = step.recv(&back, SOON).expect("the callback is in nobody's way");
            assert_eq!(values(&got.tensor)[0], number as f32);
        }
        assert!(!ended.load(Ordering::SeqCst), "it blocked all the time");
        drop(unblock);
        until(node, "the callback's end", || task == 0 || ended.load(Ordering::SeqCst));
    });
}

/// Exchanges one value with a peer.
fn exchange(node: &Node, peer: u32, id: u64) {
    let step = node.step(id).expect("new");
    let (out, back) =
        (node.edge_to("w", peer, "x").expect("edge"), node.edge_from("w", peer, "x").expect("edge"));
    step.send(&out, counting(node, id as f32, 1000)).expect("sent");
    assert_eq!(values(&step.recv(&back, SOON).expect("received").tensor)[0], id as f32);
}

/// Serves the peers until `done`.
fn serve_until(node: &Node, done: &AtomicBool) {
    until(node, "the others' end", || done.load(Ordering::SeqCst));
}

#[test]
fn a_link_that_fails_in_transfers_ends_its_own_calls_and_no_others() {
    let (cluster, done) = (Arc::new(cluster(3)), Arc::new(AtomicBool::new(false)));
    let start = |task| {
        let cluster = cluster.clone();
        move || {
            let node = member(&cluster, task).start().expect("the node starts");
            node.join().expect("the others come");
            node
        }
    };
    let (of_first, of_second, of_third) = (start(0), start(1), start(2));
    let first_done = done.clone();
    let first = std::thread::spawn(move || {
        let node = of_first();
        let step = node.step(1).expect("new");
        let (out, back) =
            (node.edge_to("w", 2, "bulk").expect("edge"), node.edge_from("w", 2, "x").expect("edge"));
        // All three members are joined.
        exchange(&node, 1, 100);
        // Values for a peer that takes the first one and then fails, perhaps before the last one is
        // sent.
        let sent = (0..20).try_for_each(|_| step.send(&out, counting(&node, 1.0, 50_000)));
        assert!(matches!(sent, Ok(()) | Err(Error::PeerLost { .. })), "{sent:?}");
        let error = step.recv(&back, SOON).expect_err("it fails");
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.task() == 2), "{error}");
        (101..200).for_each(|id| exchange(&node, 1, id));
        node.cleanup(1);
        until(&node, "the memory of what was under way", || node.pool().is_empty());
        first_done.store(true, Ordering::SeqCst);
    });
    let second = std::thread::spawn(move || {
        let node = of_second();
        (100..200).for_each(|id| exchange(&node, 0, id));
        serve_until(&node, &done);
    });
    let third = std::thread::spawn(move || {
        let node = of_third();
        let step = node.step(1).expect("new");
        let bulk = node.edge_from("w", 0, "bulk").expect("edge");
        let pending: Vec<_> = (0..20).map(|_| step.receive(&bulk).begin().expect("begun")).collect();
        until(&node, "a first value", || pending[0].is_done());
        node.fail("broken on purpose").expect("ended");
    });
    for member in [first, second, third] {
        member.join().expect("no member fails but by its own wish");
    }
}

#[test]
fn a_peer_that_restarts_is_met_again_while_the_others_go_on() {
    let cluster = Arc::new(cluster(3));
    let done = Arc::new(AtomicBool::new(false));
    let start = |task| {
        let cluster = cluster.clone();
        move || {
            let node = member(&cluster, task).start().expect("the node starts");
            node.join().expect("the others come");
            node
        }
    };
    let (of_first, of_second, of_third) = (start(0), start(1), start(2));
    let first_done = done.clone();
    let first = std::thread::spawn(move || {
        let node = of_first();
        let life = |node: &Node| match &node.peers()[1] {
            peer if matches!(peer.state, PeerState::Connected) => peer.incarnation,
            _ => None,
        };
        let before = life(&node).expect("joined");
        exchange(&node, 2, 1);
        let end = Instant::now() + SOON;
        let mut id = 1000;
        // Exchanges with the second member go on through the death of the third and its return.
        while life(&node).is_none_or(|life| life == before) {
            assert!(Instant::now() < end, "the third member did not come back: {:?}", node.peers());
            exchange(&node, 1, id);
            id += 1;
        }
        exchange(&node, 2, 2);
        // The last value of the second member.
        let step = node.step(u64::MAX).expect("new");
        step.send_dead(&node.edge_to("w", 1, "end").expect("edge")).expect("sent");
        serve_until(&node, &first_done);
    });
    let second = std::thread::spawn(move || {
        let node = of_second();
        let end = node.edge_from("w", 0, "end").expect("edge");
        let ended = node.step(u64::MAX).expect("new").receive(&end).begin().expect("begun");
        for id in 1000.. {
            let step = node.step(id).expect("new");
            let out = node.edge_to("w", 0, "x").expect("edge");
            step.send(&out, counting(&node, id as f32, 1000)).expect("sent");
            let got = step.receive(&node.edge_from("w", 0, "x").expect("edge")).begin().expect("begun");
            until(&node, "a value or the end", || got.is_done() || ended.is_done());
            if ended.is_done() {
                break;
            }
            assert_eq!(values(&got.wait().expect("received").tensor)[0], id as f32);
        }
        done.store(true, Ordering::SeqCst);
    });
    let third = std::thread::spawn(move || {
        let node = of_third();
        exchange(&node, 0, 1);
        node.stop().expect("stopped");
        drop(node);
        let node = of_third();
        exchange(&node, 0, 2);
    });
    for member in [third, first, second] {
        member.join().expect("no member fails");
    }
}

#[test]
fn a_stop_ends_while_the_peers_traffic_does_not() {
    let cluster = cluster(2);
    let of_peer = cluster.clone();
    let peer = std::thread::spawn(move || {
        let node = member(&of_peer, 1).start().expect("the node starts");
        node.join().expect("the other comes");
        let (out, back) =
            (node.edge_to("w", 0, "x").expect("edge"), node.edge_from("w", 0, "y").expect("edge"));
        for id in 0.. {
            let step = node.step(id).expect("new");
            let asked: Result<Vec<_>, _> = (0..50).map(|_| step.receive(&back).begin()).collect();
            let sent = (0..50).try_for_each(|_| step.send(&out, counting(&node, 1.0, 1)));
            let served = node.progress();
            node.cleanup(id);
            if let Err(error) = asked.map(drop).and(sent).and(served) {
                assert!(matches!(error, Error::PeerLost { .. }), "{error}");
                return;
            }
            if node.peers()[0].state.error().is_some() {
                return;
            }
        }
    });
    let node = member(&cluster, 0).start().expect("the node starts");
    node.join().expect("the peer comes");
    let step = node.step(1).expect("new");
    step.send(&node.edge_to("w", 1, "never asked for").expect("edge"), counting(&node, 1.0, 1))
        .expect("sent");
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(200) {
        node.progress().expect("the node goes on");
    }
    let began = Instant::now();
    // A late stop of the bootstrap service, on a busy machine, is not the subject of this test.
    let stopped = node.stop();
    let took = began.elapsed();
    println!("the stop took {took:?}, of which 300 ms may go to what was sent: {stopped:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    peer.join().expect("the peer sees the end");
}

/// The error says what this host lacks, and no node starts on another fabric.
#[test]
fn a_node_that_is_asked_for_rdma_and_can_t_have_it_does_not_start() {
    let has_device =
        || std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some());
    if over_verbs() || has_device() {
        return println!("skipped: this machine has an RDMA device");
    }
    let started = member(&cluster(1), 0).set("fabric", "verbs").start();
    let why =
        started.map(|node| node.peers()).expect_err("there is no device to reach anybody by").to_string();
    let lacking = [
        "install rdma-core's libibverbs",
        "load the kernel's module ib_uverbs",
        "there is no RDMA device: load the driver of the NIC",
    ];
    assert!(lacking.iter().any(|lacking| why.contains(lacking)), "{why}");
}

#[test]
fn set_up_that_failed_is_never_logged_as_a_success() {
    if writes_bulk() || over_grpc() {
        return println!("skipped: queues of any depths connect");
    }
    // The process has one subscriber, which records every event.
    Other::run_alone("known_faults::role_logs_its_set_up", "", &[]);
}

#[test]
fn steps_that_are_never_cleaned_up_are_logged() {
    // The process has one subscriber, which records every event.
    Other::run_alone("known_faults::role_leaves_steps_behind", "", &[]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_leaves_steps_behind() {
    log::log();
    let node = member(&cluster(1), 0).start().expect("the node starts");
    node.join().expect("it has no peers");
    let warnings = || log::logged_with("were not cleaned up");
    let begin = |steps: std::ops::Range<u64>| steps.for_each(|id| drop(node.step(id).expect("new")));
    begin(0..1023);
    assert_eq!(warnings(), [""; 0]);
    // A warning at 1,024 live steps and at twice as many.
    begin(1023..2048);
    let logged = warnings();
    assert_eq!(logged.len(), 2, "{logged:?}");
    for (line, live) in logged.iter().zip(["live=1024 ", "live=2048 "]) {
        assert!(line.contains(live), "{line}");
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_logs_its_set_up() {
    log::log();
    // Two members that agree and two that do not, with different job names.
    for (job, depths, connects) in [("agree", ["64", "64"], true), ("differ", ["64", "128"], false)] {
        let cluster = cluster(2).replace("w=", &format!("{job}="));
        let members = [0u32, 1].map(|task| {
            let cluster = cluster.clone();
            std::thread::spawn(move || {
                let builder = member(&cluster, task).member(job, task);
                let builder = builder.set("queue_depth", depths[task as usize]).set("join_timeout", "2s");
                let node = builder.start().expect("the node starts");
                let joined = node.join();
                (joined.is_ok(), node)
            })
        });
        let nodes = members.map(|member| member.join().expect("no panic"));
        assert_eq!(nodes.each_ref().map(|(joined, _)| *joined), [connects; 2], "{job}");
        // The executor writes the log, and a stop waits for it.
        nodes.iter().for_each(|(_, node)| drop(node.stop().expect("a clean stop")));
        let success = log::logged_with(&format!("{job}/"))
            .into_iter()
            .filter(|line| line.contains("connected"))
            .collect::<Vec<_>>();
        assert_eq!(success.is_empty(), !connects, "{job}: {success:?}");
        let fabric = std::env::var("TENSORWIRE_TEST_FABRIC").unwrap_or("shm".into());
        // With the devices in between, if it is verbs.
        let names = |line: &str| {
            let behind = line.split_once(&format!("connected by {fabric}"));
            behind.and_then(|(_, reason)| reason.split_once(" (")).is_some_and(|(_, why)| why.contains(')'))
        };
        assert!(success.iter().all(|line| names(line)), "{success:?}");
    }
}
