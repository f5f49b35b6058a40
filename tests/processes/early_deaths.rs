//! Members that are killed in the first moments of a join: who is blamed, and how soon.

use crate::common::other::Other;
use crate::common::{cluster, member};
use std::time::{Duration, Instant};
use tensorwire::{Node, NodeError};

/// Bound for the news of a death of a member that nobody has linked with.
const NEWS: Duration = Duration::from_millis(2500);

/// Rounds of kills at times that are drawn.
const ROUNDS: u32 = 6;

/// A member of a cluster in which a loss ends every call.
fn start(cluster: &str, task: u32) -> Node {
    member(cluster, task).set("peer_loss", "fail_all").start().expect("the node starts")
}

/// Joins, and stops at once if that fails, as a process does that ends with its first error.
fn join(node: Node) -> (Instant, NodeError) {
    let error = node.join().expect_err("w/2 is dead");
    let ended = Instant::now();
    drop(node);
    (ended, error)
}

/// The joins of w/0 and w/1 while w/2 dies. Returns when each ended after `death`, and its error.
fn survive(cluster: &str, death: impl FnOnce(&[Node; 2]) -> Instant) -> [(Duration, NodeError); 2] {
    let nodes = [0, 1].map(|task| start(cluster, task));
    let died = death(&nodes);
    std::thread::scope(|scope| {
        let joins = nodes.map(|node| scope.spawn(move || join(node)));
        joins.map(|join| {
            let (ended, error) = join.join().expect("no panic");
            (ended.saturating_duration_since(died), error)
        })
    })
}

/// The error names w/2 and its death, and no other death.
fn assert_blames_the_dead(error: &NodeError) {
    let text = error.to_string();
    assert!(text.contains("w/2"), "{text}");
    for alive in ["w/0", "w/1"] {
        let blamed = text.split(&format!("peer {alive}")).skip(1).any(|rest| {
            rest.split_once("was lost: ").is_some_and(|(_, cause)| cause.starts_with("its process has ended"))
        });
        assert!(!blamed, "{alive} lives: {text}");
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_unreachable() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    // It says Hello to all, and nobody reaches it.
    let node = member(&cluster, 2).set("bind", "127.0.0.1:0").start().expect("the node starts");
    println!("there");
    drop(node.join());
}

#[test]
fn a_member_that_dies_after_its_hello_and_before_it_is_reached_ends_the_joins_in_seconds() {
    let cluster = cluster(3);
    let ended = survive(&cluster, |nodes| {
        let mut victim = Other::start("early_deaths::role_unreachable", &cluster);
        victim.wait_for("there");
        // Its Hello is sent at once. Nobody can tell that it has come: it has no link.
        std::thread::sleep(Duration::from_millis(300));
        assert!(nodes.iter().all(|node| node.progress().is_ok()), "it lives");
        victim.kill();
        Instant::now()
    });
    for (took, error) in &ended {
        println!("after {took:?}: {error}");
        assert!(*took < NEWS * 5, "{took:?}: {error}");
        assert!(matches!(error, NodeError::Lost { .. }), "{error}");
        assert!(error.to_string().contains("its process has ended"), "{error}");
        assert_blames_the_dead(error);
    }
}

#[test]
fn a_member_that_is_killed_while_three_join_is_blamed_by_both_others() {
    let mut known = Vec::new();
    for round in 0..ROUNDS {
        let cluster = cluster(3);
        // Over about the duration of a join.
        let delay = (u64::from(round) * 3_500 + 200).to_string();
        let environment = [("TEST_PLACE", delay.as_str()), ("TEST_VICTIM", "2")];
        let mut victim = Other::start_with("kill_matrix::victim::role_joiner", &cluster, &environment);
        let ended = survive(&cluster, |_| {
            assert!(!victim.ends_well(), "it was killed");
            Instant::now()
        });
        for (took, error) in &ended {
            println!("killed after {delay} us; {took:?} later: {error}");
            assert_blames_the_dead(error);
            // A member that died before it had called anybody may still come.
            if !matches!(error, NodeError::Bootstrap(_)) {
                known.push(*took);
                assert!(*took < NEWS * 5, "{took:?}: {error}");
            }
        }
    }
    assert!(!known.is_empty(), "each kill came before the Hello");
    println!("{} of {} joins ended early, after {:?} at most", known.len(), 2 * ROUNDS, known.iter().max());
}
