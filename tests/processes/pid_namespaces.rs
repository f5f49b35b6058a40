//! Members in PID namespaces of their own, as containers are. Each has the same process id there.

use crate::common::other::{Other, wait_to_be_told};
use crate::common::{SOON, cluster, member, until};
use std::process::Command;
use tensorwire::{DType, Error, LossCause, Node, PeerState};

const STARTER: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

fn join(task: u32) -> Node {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, task).set("fabric", "shm").start().expect("the node starts");
    node.join().expect("joined");
    println!("ready, process {}", std::process::id());
    node
}

/// Answers one tensor when it is told to.
#[test]
#[ignore = "a role, not a test"]
fn role_member() {
    let node = join(std::env::var("TEST_ME").expect("a task").parse().expect("a number"));
    if wait_to_be_told() == "echo" {
        let ask = node.edge_from("w", 0, "ask").expect("an edge");
        let answer = node.edge_to("w", 0, "answer").expect("an edge");
        let step = node.step(1).expect("new");
        let asked = step.recv(&ask, SOON).expect("asked");
        step.send(&answer, asked.tensor.clone()).expect("sent");
    }
    // Until it is killed.
    std::thread::sleep(SOON);
}

/// Sees the deaths of the others one by one.
#[test]
#[ignore = "a role, not a test"]
fn role_survivor() {
    let node = join(0);
    let see_death = |task: usize| {
        assert_eq!(wait_to_be_told(), "killed");
        let end = || match node.peers()[task - 1].state.clone() {
            PeerState::Lost(Error::PeerLost { cause, .. }) => Some(cause),
            _ => None,
        };
        until(&node, "the death", || end().is_some());
        let Some(LossCause::Died(how)) = end() else { panic!("w/{task}: {:?}", end()) };
        // The kernel has told it, long before the heartbeats could.
        assert!(how.contains("of another PID namespace"), "w/{task}: {how}");
    };
    see_death(1);
    let step = node.step(1).expect("new");
    let ask = node.edge_to("w", 2, "ask").expect("an edge");
    let answer = node.edge_from("w", 2, "answer").expect("an edge");
    step.send(&ask, node.tensor(DType::F32, &[4]).expect("room").freeze()).expect("sent");
    step.recv(&answer, SOON).expect("w/2 lives");
    println!("answered");
    see_death(2);
}

#[test]
fn each_dies_alone_although_all_have_one_process_id() {
    let [command, arguments @ ..] = STARTER;
    let may = Command::new(command).args(arguments).arg("true").status();
    if !may.is_ok_and(|status| status.success()) {
        return println!("skipped: only root makes PID namespaces, with unshare(1)");
    }
    let cluster = cluster(3);
    let start = |role: &str, task: &str| Other::start_by(&STARTER, role, &cluster, &[("TEST_ME", task)]);
    let mut survivor = start("pid_namespaces::role_survivor", "0");
    let mut others = ["1", "2"].map(|task| start("pid_namespaces::role_member", task));
    for member in others.iter_mut().chain([&mut survivor]) {
        assert!(member.wait_for("ready").contains("process 1"));
    }
    others[0].kill();
    survivor.say("killed");
    others[1].say("echo");
    survivor.wait_for("answered");
    others[1].kill();
    survivor.say("killed");
    assert!(survivor.ends_well());
}
