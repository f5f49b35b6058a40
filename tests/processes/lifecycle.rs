//! Real processes: one is this test; the other is this test's program, started again in a role and
//! killed.

use crate::common::other::{Other, holdings, holdings_after_joins};
use crate::common::{SOON, cluster, counting, lends_nothing, member, over_verbs, until};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::{Duration, Instant};
use tensorwire::{DType, Error, LossCause, Node};

/// Bound for the report of a death. The kernel reports it, so this is generous.
const NEWS: Duration = Duration::from_secs(1);

/// Number of kills in a transfer, each a little later. Large tensors take long over soft-RoCE.
fn rounds() -> u64 {
    if over_verbs() { 2 } else { 5 }
}

/// The node of a role, in a process that a test has started.
fn other_node() -> Node {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 1).start().expect("the node starts");
    node.join().expect("joined");
    println!("ready");
    node
}

fn this_node(cluster: &str) -> Node {
    let node = member(cluster, 0).start().expect("the node starts");
    node.join().expect("joined");
    node
}

#[test]
#[ignore = "a role, not a test"]
fn role_idle() {
    let node = other_node();
    loop {
        let _ = node.progress();
    }
}

/// Says so before it joins.
#[test]
#[ignore = "a role, not a test"]
fn role_first() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 1).start().expect("the node starts");
    println!("started");
    node.join().expect("joined");
    loop {
        let _ = node.progress();
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_sender() {
    let node = other_node();
    let edge = node.edge_to("w", 0, "bulk").expect("edge");
    for id in 0.. {
        let step = node.step(id).expect("new");
        step.send(&edge, counting(&node, id as f32, 1 << 18)).expect("sent");
        until(&node, "the peer's pull", || node.pool().is_empty() || node.peers()[0].state.error().is_some());
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_receiver() {
    let node = other_node();
    let edge = node.edge_from("w", 0, "bulk").expect("edge");
    for id in 0.. {
        node.step(id).expect("new").recv(&edge, SOON).expect("received");
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_borrower() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 1).set("bulk_receive", "borrow").start().expect("the node starts");
    node.join().expect("joined");
    let got = node.step(0).expect("new").recv(&node.edge_from("w", 0, "bulk").expect("edge"), SOON);
    let got = got.expect("received");
    assert!(got.tensor.is_lent());
    println!("ready");
    loop {
        let _ = node.progress();
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_tidy() {
    let before = holdings();
    {
        let node = other_node();
        let step = node.step(0).expect("new");
        step.send(&node.edge_to("w", 0, "x").expect("edge"), counting(&node, 0.0, 10_000)).expect("sent");
        step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
        let during = holdings();
        assert!(during.0.len() > before.0.len() && during.1.len() > before.1.len() && during.2 > before.2);
        node.stop().expect("stopped");
        assert_eq!(holdings_after_joins().0, before.0, "a thread has outlived the stop");
    }
    assert_eq!(holdings_after_joins(), before, "something of the node is left");
    println!("nothing is left");
}

#[test]
fn after_a_stop_no_thread_socket_memfd_or_mapping_is_left() {
    let cluster = cluster(2);
    let mut other = Other::start("lifecycle::role_tidy", &cluster);
    let node = this_node(&cluster);
    let step = node.step(0).expect("new");
    step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(&node, 0.0, 10_000)).expect("sent");
    step.recv(&node.edge_from("w", 1, "x").expect("edge"), SOON).expect("received");
    until(&node, "the peer's stop", || node.peers()[0].state.error().is_some());
    other.wait_for("nothing is left");
    assert!(other.ends_well());
}

/// Waits for the loss of the peer, and checks its cause.
fn expect_death(node: &Node, killed: Instant, calls: impl FnOnce() -> Error) {
    let error = calls();
    let news = killed.elapsed();
    println!("the death was known after {news:?}");
    assert!(news < NEWS * 5);
    match &error {
        Error::PeerLost { peer, incarnation, cause: LossCause::Died(_) } => {
            assert_eq!(peer.to_string(), "w/1");
            assert_eq!(Some(*incarnation), node.peers()[0].incarnation);
        }
        other => panic!("expected a death, got {other}"),
    }
}

#[test]
fn a_peer_that_is_killed_while_idle_fails_the_calls_that_need_it() {
    let cluster = cluster(2);
    let mut other = Other::start("lifecycle::role_idle", &cluster);
    let node = this_node(&cluster);
    let step = node.step(0).expect("new");
    let edge = node.edge_from("w", 1, "never").expect("edge");
    let given = node.tensor(DType::F32, &[1000]).expect("room");
    let pending = step.receive(&edge).into(given).begin().expect("begun");
    other.wait_for("ready");
    other.kill();
    expect_death(&node, Instant::now(), || pending.wait().map(|_| ()).expect_err("it is dead"));
    assert!(matches!(step.recv(&edge, SOON), Err(Error::PeerLost { .. })), "later calls fail too");
    let to = node.edge_to("w", 1, "x").expect("edge");
    assert!(matches!(step.send(&to, counting(&node, 0.0, 1)), Err(Error::PeerLost { .. })));
    assert!(node.pool().is_empty());
}

#[test]
fn a_sender_that_is_killed_in_a_transfer_fails_the_receive_and_leaks_nothing() {
    for round in 0..rounds() {
        let cluster = cluster(2);
        let mut other = Other::start("lifecycle::role_sender", &cluster);
        let node = this_node(&cluster);
        let edge = node.edge_from("w", 1, "bulk").expect("edge");
        other.wait_for("ready");
        let mut killed = None;
        for id in 0.. {
            if id == 20 + round * 7 {
                other.kill();
                killed = Some(Instant::now());
            }
            match node.step(id).expect("new").recv(&edge, SOON) {
                Ok(got) => assert_eq!(got.tensor.as_slice::<f32>().expect("f32")[0], id as f32),
                Err(error) => {
                    expect_death(&node, killed.expect("not before the kill"), || error);
                    break;
                }
            }
            node.cleanup(id);
        }
        if over_verbs() {
            // The link keeps a granted destination until its queue pair is destroyed.
            until(&node, "the end of the link", || node.pool().is_empty());
        }
        assert!(node.pool().is_empty());
    }
}

#[test]
fn a_receiver_that_is_killed_in_a_transfer_gives_the_senders_memory_back() {
    for round in 0..rounds() {
        let cluster = cluster(2);
        let mut other = Other::start("lifecycle::role_receiver", &cluster);
        let node = this_node(&cluster);
        let edge = node.edge_to("w", 1, "bulk").expect("edge");
        other.wait_for("ready");
        for id in 0..20 + round * 7 {
            node.step(id).expect("new").send(&edge, counting(&node, 0.0, 1 << 18)).expect("sent");
            if id < 15 {
                until(&node, "the pull", || node.pool().is_empty());
            } else if node.pool().stats().free < 2 << 20 {
                break;
            }
        }
        other.kill();
        let killed = Instant::now();
        until(&node, "the news", || node.peers()[0].state.error().is_some());
        expect_death(&node, killed, || node.peers()[0].state.error().cloned().expect("lost"));
        node.live_steps().into_iter().for_each(|id| node.cleanup(id));
        until(&node, "the end of all steps", || node.pool().is_empty());
    }
}

#[test]
fn a_borrower_that_is_killed_gives_its_loans_back() {
    if lends_nothing() {
        return;
    }
    let cluster = cluster(2);
    let mut other = Other::start("lifecycle::role_borrower", &cluster);
    let node = this_node(&cluster);
    let step = node.step(0).expect("new");
    step.send(&node.edge_to("w", 1, "bulk").expect("edge"), counting(&node, 0.0, 1 << 18)).expect("sent");
    until(&node, "the loan", || node.counters().get(tensorwire::Counter::LoansPosted) == 1);
    other.wait_for("ready");
    assert!(!node.pool().is_empty(), "the tensor is borrowed");
    other.kill();
    until(&node, "the end of the loan", || node.pool().is_empty());
}

#[test]
#[ignore = "a role, not a test"]
fn role_witness() {
    let before = holdings();
    {
        let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
        let node = this_node(&cluster);
        println!("ready");
        until(&node, "the news", || node.peers()[0].state.error().is_some());
    }
    assert_eq!(holdings_after_joins(), before, "something of the dead peer is left");
    println!("tidy");
}

#[test]
fn nothing_of_a_killed_process_is_left_at_its_peer_or_on_the_host() {
    let cluster = cluster(2);
    let files = || -> BTreeSet<_> {
        let all = std::fs::read_dir("/dev/shm").expect("there is one").filter_map(Result::ok);
        all.map(|file| file.file_name()).collect()
    };
    let before = files();
    let mut other = Other::start("lifecycle::role_idle", &cluster);
    let mut witness = Other::start("lifecycle::role_witness", &cluster);
    other.wait_for("ready");
    witness.wait_for("ready");
    other.kill();
    witness.wait_for("tidy");
    let after = files();
    let ours = after.difference(&before).filter(|name| name.to_string_lossy().contains("tensorwire"));
    assert_eq!(ours.collect::<Vec<_>>(), Vec::<&OsString>::new(), "no file in /dev/shm");
}

#[test]
fn where_a_loss_is_fatal_every_call_ends_with_an_error_that_names_the_lost() {
    let cluster = cluster(3);
    let mut other = Other::start("lifecycle::role_idle", &cluster);
    let fatal = |task| member(&cluster, task).set("peer_loss", "fail_all").start().expect("the node starts");
    let (node, third) = (fatal(0), fatal(2));
    std::thread::scope(|scope| {
        scope.spawn(|| third.join().expect("joined"));
        node.join().expect("joined");
    });
    other.wait_for("ready");
    let step = node.step(0).expect("new");
    let pending = step.receive(&node.edge_from("w", 2, "never").expect("edge")).begin().expect("begun");
    let local = step.receive(&node.edge_to("w", 0, "never").expect("edge")).begin().expect("begun");
    other.kill();
    for error in [pending.wait().map(|_| ()), local.wait().map(|_| ()), node.step(1).map(|_| ())] {
        let error = error.expect_err("a peer was lost");
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.to_string() == "w/1"), "{error}");
    }
}

/// The median of five. The join of the first one waits for the start of the last.
#[test]
fn the_join_of_the_member_that_starts_last_takes_little() {
    let join = || {
        let cluster = cluster(2);
        let mut other = Other::start("lifecycle::role_first", &cluster);
        other.wait_for("started");
        let node = member(&cluster, 0).start().expect("the node starts");
        let begin = Instant::now();
        node.join().expect("joined");
        let took = begin.elapsed();
        other.kill();
        took
    };
    let mut times = [(); 5].map(|()| join());
    times.sort();
    println!("{times:?}");
    assert!(times[2] < 5 * Duration::from_millis(50), "{times:?}");
}

#[test]
fn a_second_process_under_a_taken_name_is_refused() {
    let cluster = cluster(2);
    let mut other = Other::start("lifecycle::role_idle", &cluster);
    let node = this_node(&cluster);
    other.wait_for("ready");
    let error = member(&cluster, 1).start().map(|_| ()).expect_err("the name is taken").to_string();
    assert!(error.contains("w/1") && error.contains("another"), "{error}");
    let elsewhere = member(&cluster, 1).set("bind", "127.0.0.1:0").set("join_timeout", "1s").start();
    let error = match elsewhere {
        Ok(second) => second.join().expect_err("the name is taken").to_string(),
        Err(error) => error.to_string(),
    };
    assert!(error.contains("w/1"), "{error}");
    assert!(node.peers()[0].state.error().is_none(), "the first is not disturbed");
}

#[test]
fn a_join_that_times_out_names_who_is_missing() {
    let cluster = cluster(3);
    let node = member(&cluster, 0).set("join_timeout", "300ms").start().expect("the node starts");
    let started = Instant::now();
    let error = node.join().expect_err("nobody comes").to_string();
    println!("the join ended after {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_millis(300) * 5);
    assert!(error.contains("w/1") && error.contains("w/2") && !error.contains("w/0 is missing"), "{error}");
}

#[test]
fn a_pool_that_demands_pages_which_are_not_there_says_what_to_do() {
    if std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .is_ok_and(|n| n.trim() != "0")
    {
        println!("skipped: this host has huge pages reserved");
        return;
    }
    let cluster = cluster(1);
    let node = member(&cluster, 0).set("pool_pages", "2m").set("pool_require", "true").start();
    let error = node.map(|_| ()).expect_err("no huge pages").to_string();
    assert!(error.contains("nr_hugepages") && error.contains("2 MiB"), "{error}");
    let node = member(&cluster, 0).set("pool_pages", "2m").start().expect("without the demand it starts");
    assert!(node.pool_report().to_string().contains("not on 2 MiB"), "{}", node.pool_report());
}
