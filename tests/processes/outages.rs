//! Nodes in processes of their own, and a network that fails between them.
//!
//! These tests run alone, as root. `TENSORWIRE_TEST_CUT` and `TENSORWIRE_TEST_MEND` are shell
//! commands that cut and mend the network; `tests/rxe` sets them.

use crate::common::other::{Other, wait_to_be_told};
use crate::common::{SOON, cluster, counting, member, until, values};
use std::process::Command;
use std::time::{Duration, Instant};
use tensorwire::{Error, Incarnation, LossCause, Node, Pending, Tensor};

/// Bound for the failure of a link that carries nothing any more.
pub(crate) const BOUND: Duration = Duration::from_secs(10);

/// Bound for the return of a link. An attempt in progress goes on for 5 s on both sides.
pub(crate) const BACK: Duration = Duration::from_secs(60);

/// Elements (`f32`) of a tensor that does not travel in a message.
const LEN: usize = 20_000;

pub(crate) fn shell(variable: &str) {
    let command = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} holds a shell command"));
    let status = Command::new("sh").args(["-ec", &command]).status();
    assert!(status.is_ok_and(|status| status.success()), "{variable}: {command}");
}

/// A cut network. Its drop mends the network, for later tests.
struct Outage;

impl Outage {
    fn begin() -> Self {
        shell("TENSORWIRE_TEST_CUT");
        Outage
    }

    fn mend(self) {
        drop(self);
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        shell("TENSORWIRE_TEST_MEND");
    }
}

/// A retry count that never ends on soft-RoCE, and one that fails within a second.
pub(crate) const FOR_EVER: &str = "7";
const FEW: &str = "3";

fn start(cluster: &str, task: u32, retries: &str) -> Node {
    let node = member(cluster, task).set("join_timeout", "300ms").set("rdma_qp_retry_count", retries);
    node.start().expect("the node starts")
}

pub(crate) fn join(node: &Node) {
    let began = Instant::now();
    while let Err(error) = node.join() {
        assert!(began.elapsed() < BACK, "{error}");
    }
}

/// The generation of the link with a worker, and the worker's incarnation.
pub(crate) fn link(node: &Node, task: u32) -> (u64, Option<Incarnation>) {
    let peers = node.peers();
    let peer = peers.iter().find(|peer| peer.task.task() == task).expect("a member");
    (peer.generation.get(), peer.incarnation)
}

/// The first step of a link. Leftovers of older links are in other steps.
pub(crate) fn first_step(node: &Node, task: u32) -> u64 {
    link(node, task).0 * 1000
}

/// Answers each `ask` of w/0, step by step, on each link with it.
#[test]
#[ignore = "a role, not a test"]
fn role_echo() {
    let text = |name: &str| std::env::var(name).expect("started by a test");
    let task = text("TEST_TASK").parse().expect("a number");
    let node = start(&text("TEST_CLUSTER"), task, &text("TEST_RETRIES"));
    join(&node);
    println!("ready");
    let ask = node.edge_from("w", 0, "ask").expect("an edge");
    let answer = node.edge_to("w", 0, "answer").expect("an edge");
    let orders = std::thread::spawn(wait_to_be_told);
    let mut id = first_step(&node, 0);
    while !orders.is_finished() {
        let served = node.step(id).and_then(|step| {
            let asked = step.receive(&ask).begin()?;
            while !asked.is_done() && !orders.is_finished() {
                node.progress()?;
            }
            match asked.is_done() {
                true => step.send(&answer, asked.wait()?.tensor),
                false => Ok(()),
            }
        });
        let Err(error) = served else {
            id += 1;
            continue;
        };
        println!("a call failed: {error}");
        node.live_steps().into_iter().for_each(|id| node.cleanup(id));
        join(&node);
        id = first_step(&node, 0);
    }
    node.stop().expect("stopped");
}

/// An exchange that w/0 has begun with a worker.
pub(crate) struct Asked {
    id: u64,
    len: usize,
    answer: Pending<Tensor>,
}

fn ask(node: &Node, task: u32, id: u64) -> Result<Asked, Error> {
    ask_for(node, task, id, LEN)
}

/// Begins an exchange of so many elements.
pub(crate) fn ask_for(node: &Node, task: u32, id: u64, len: usize) -> Result<Asked, Error> {
    let step = node.step(id)?;
    step.send(&node.edge_to("w", task, "ask").expect("an edge"), counting(node, id as f32, len))?;
    let answer = step.receive(&node.edge_from("w", task, "answer").expect("an edge")).begin()?;
    Ok(Asked { id, len, answer })
}

impl Asked {
    pub(crate) fn result(self) -> Result<(), Error> {
        let got = self.answer.wait()?.tensor;
        let right = values(&got).iter().enumerate().all(|(at, value)| *value == self.id as f32 + at as f32);
        assert!(right && values(&got).len() == self.len, "step {}: the values differ", self.id);
        Ok(())
    }
}

fn exchange(node: &Node, task: u32, id: u64) {
    ask(node, task, id).and_then(Asked::result).unwrap_or_else(|error| panic!("step {id}: {error}"));
}

/// w/0, and a process for each of the other workers.
pub(crate) fn started(others: u32, retries: &str) -> (Node, Vec<Other>) {
    let cluster = cluster(1 + others as usize);
    let echo = |task: u32| {
        let environment = [("TEST_TASK", &*task.to_string()), ("TEST_RETRIES", retries)];
        Other::start_with("outages::role_echo", &cluster, &environment)
    };
    let mut echos: Vec<_> = (1..=others).map(echo).collect();
    let node = start(&cluster, 0, retries);
    join(&node);
    echos.iter_mut().for_each(|echo| drop(echo.wait_for("ready")));
    (node, echos)
}

pub(crate) fn progress_for(node: &Node, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        node.progress().expect("usable");
    }
}

pub(crate) fn end(node: Node, echos: Vec<Other>) {
    node.live_steps().into_iter().for_each(|id| node.cleanup(id));
    until(&node, "the end of every tensor", || node.pool().is_empty());
    for mut echo in echos {
        echo.say("stop");
        assert!(echo.ends_well());
    }
    node.stop().expect("stopped");
}

/// The error of a call that needed w/1 over a dead link.
fn expect_loss(error: &Error, after: Duration, says: &str) {
    println!("after {after:?}: {error}");
    assert!(after < BOUND, "{after:?}: {error}");
    let Error::PeerLost { peer, cause, .. } = error else { panic!("{error}") };
    assert_eq!(peer.to_string(), "w/1");
    // The side that saw the failure first has reported it to the other.
    assert!(matches!(cause, LossCause::Network(_) | LossCause::Closed(_)), "{cause:?}");
    assert!(error.to_string().contains(says), "{error}");
}

/// New calls reach the same process over a new link.
fn expect_return(node: &Node, before: (u64, Option<Incarnation>)) {
    let mended = Instant::now();
    join(node);
    println!("back {:?} after the network", mended.elapsed());
    let now = link(node, 1);
    assert!(now.0 > before.0, "a new generation: {now:?} after {before:?}");
    assert_eq!(now.1, before.1, "the same life");
    let first = first_step(node, 1);
    (first..first + 20).for_each(|id| exchange(node, 1, id));
}

#[test]
#[ignore = "cuts the network"]
fn a_short_outage_holds_a_receive_up_and_ends_nothing() {
    let (node, echos) = started(1, FOR_EVER);
    let (first, before) = (first_step(&node, 1), link(&node, 1));
    (first..first + 10).for_each(|id| exchange(&node, 1, id));
    // No message of the exchanges is on its way.
    progress_for(&node, Duration::from_millis(200));
    let outage = Outage::begin();
    let began = Instant::now();
    let held = ask(&node, 1, first + 10).expect("begun");
    progress_for(&node, Duration::from_millis(100));
    assert!(!held.answer.is_done(), "the network is not cut");
    outage.mend();
    held.result().expect("the retries bridge it");
    println!("answered after {:?}", began.elapsed());
    (first + 11..first + 20).for_each(|id| exchange(&node, 1, id));
    assert_eq!(link(&node, 1), before, "the same link");
    end(node, echos);
}

#[test]
#[ignore = "cuts the network"]
fn a_port_that_stays_down_ends_the_calls_and_the_cable_brings_the_link_back() {
    let (node, echos) = started(1, FOR_EVER);
    let (first, before) = (first_step(&node, 1), link(&node, 1));
    (first..first + 10).for_each(|id| exchange(&node, 1, id));
    let outage = Outage::begin();
    let began = Instant::now();
    let lost = ask(&node, 1, first + 10).and_then(Asked::result).expect_err("nothing gets through");
    expect_loss(&lost, began.elapsed(), "the port is down");
    let late = ask(&node, 1, first + 11).err().expect("there is no link");
    assert!(matches!(&late, Error::PeerLost { peer, .. } if peer.to_string() == "w/1"), "{late}");
    // Calls that need no peer go on.
    let own = node.edge_to("w", 0, "own").expect("an edge");
    for id in first + 12..first + 20 {
        let step = node.step(id).expect("usable");
        step.send(&own, counting(&node, id as f32, LEN)).expect("sent");
        assert_eq!(values(&step.recv(&own, SOON).expect("received").tensor)[0], id as f32);
    }
    outage.mend();
    expect_return(&node, before);
    end(node, echos);
}

#[test]
#[ignore = "cuts the network"]
fn a_network_that_loses_everything_ends_one_link_and_the_others_go_on() {
    let (node, echos) = started(2, FEW);
    let (before, other) = (link(&node, 1), link(&node, 2));
    let (first, mut id) = (first_step(&node, 1), first_step(&node, 2));
    (first..first + 10).for_each(|id| exchange(&node, 1, id));
    let outage = Outage::begin();
    let began = Instant::now();
    let lost = ask(&node, 1, first + 10).expect("begun");
    let mut others = 0;
    while !lost.answer.is_done() {
        assert!(began.elapsed() < BOUND, "it did not end");
        exchange(&node, 2, id);
        (id, others) = (id + 1, others + 1);
    }
    expect_loss(&lost.result().expect_err("nothing got through"), began.elapsed(), "retries exceeded");
    // This holds during attempts to link again, too.
    let end_of_outage = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end_of_outage {
        exchange(&node, 2, id);
        (id, others) = (id + 1, others + 1);
    }
    println!("{others} exchanges with w/2 meanwhile");
    assert!(others > 1);
    outage.mend();
    expect_return(&node, before);
    assert_eq!(link(&node, 2), other, "the link that nothing was wrong with");
    end(node, echos);
}
