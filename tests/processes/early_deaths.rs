//! Members that are killed in the first moments of a join: who is blamed, and how soon.

use crate::common::other::Other;
use crate::common::{cluster, member};
use std::time::{Duration, Instant};
use tensorwire::{Node, NodeError};

/// Bound for the news of a death of a member that nobody has linked with.
const NEWS: Duration = Duration::from_millis(2500);

/// Rounds of kills at times that are drawn.
const ROUNDS: u32 = 6;
/// The survivors that may wait for the whole timeout: those of one round. In it the member had
/// connected, and died before it had said a word. So it may still come.
const MOST_LATE: u32 = 2;

/// A member of a cluster in which a loss ends every call.
fn start(cluster: &str, task: u32) -> Node {
    member(cluster, task).set("peer_loss", "fail_all").start().expect("the node starts")
}

/// The end of a member because of the death of w/2.
struct End {
    after: Duration,
    error: String,
    /// Its join has waited in vain until the timeout.
    is_late: bool,
}

/// Joins, and stops at once if that fails, as a process does that ends with its first error. A join
/// that ends well before the news of the death is followed by them.
fn join(node: Node, died: Instant) -> End {
    let joined = node.join();
    // Or another survivor was, and said so.
    let is_late = match &joined {
        Err(NodeError::Bootstrap(_)) => true,
        Err(error) => error.to_string().contains("gave up its join"),
        Ok(()) => false,
    };
    let mut error = joined.err().map(|error| error.to_string());
    while error.is_none() {
        assert!(died.elapsed() < NEWS * 5, "no news of the death");
        error = node.progress().err().map(|error| error.to_string());
    }
    let after = Instant::now().saturating_duration_since(died);
    drop(node);
    End { after, error: error.expect("the end of the loop"), is_late }
}

/// The ends of w/0 and w/1 by the death of w/2.
fn survive(cluster: &str, death: impl FnOnce(&[Node; 2]) -> Instant) -> [End; 2] {
    let nodes = [0, 1].map(|task| start(cluster, task));
    let died = death(&nodes);
    std::thread::scope(|scope| {
        let joins = nodes.map(|node| scope.spawn(move || join(node, died)));
        joins.map(|join| join.join().expect("no panic"))
    })
}

/// The first words of a survivor that leaves. What it saw follows.
const WORDS: [&str; 2] = ["it stopped, as ", "it gave up its join: "];

/// Whether the error blames w/2, and no survivor. The loss of a survivor must have its own words,
/// which pass on whom it blames. A timeout may also list survivors that are not linked yet.
fn blames_the_dead(error: &str) -> bool {
    let blames_survivor = [" was lost: ", ": it was lost ("].into_iter().any(|mark| {
        error.match_indices(mark).any(|(at, _)| {
            let (before, cause) = (&error[..at], &error[at + mark.len()..]);
            // After the name are two words: "(incarnation 7)" or "at 127.0.0.1:7000".
            let name = before.rsplit(' ').nth(2);
            name != Some("w/2") && !WORDS.iter().any(|words| cause.starts_with(words))
        })
    });
    // Not in the list of those who are "not connected either".
    let blames_dead = error.contains("peer w/2 (incarnation ") || error.contains(" w/2 at ");
    blames_dead && !blames_survivor
}

#[test]
fn an_error_blames_a_survivor_unless_its_own_words_blame_the_dead() {
    let lost = |name: &str, cause: &str| format!("peer {name} (incarnation 7) was lost: {cause}");
    let waited = "w/0 (incarnation 7) waited 20s for its cluster; 2 of 2 peers missing";
    let missing = |first: &str| format!("{waited}: w/1 at 127.0.0.1:1: {first}");
    let (dead, too) = (lost("w/2", "its process has ended: nobody listens"), "; not connected either: w/2");
    let (closed, last) = ("the peer has closed the link", "; w/2 at 127.0.0.1:2: nobody listens");
    let gave_up = format!("it was lost (it gave up its join: {dead}); since then: nobody listens");
    for good in [
        format!("the cluster can't be joined: {dead}; not connected either: w/1"),
        lost("w/0", &format!("it stopped, as {dead}{too}")),
        lost("w/0", &format!("it stopped, as w/1 did, which said: {dead}{too}")),
        missing(&format!("the link with it is still being made{last}")),
        missing(&format!("{gave_up}{last}")),
    ] {
        assert!(blames_the_dead(&good), "{good}");
    }
    for bad in [
        lost("w/1", &format!("{closed}{too}")),
        lost("w/1", &format!("its process has ended: nobody listens{too}")),
        lost("w/0", &format!("it stopped, as {}{too}", lost("w/1", closed))),
        lost("w/1", &format!("{closed}; {dead}")),
        missing(&format!("it was lost ({closed}); since then: nobody listens{last}")),
        missing("it has not been reached yet"),
    ] {
        assert!(!blames_the_dead(&bad), "{bad}");
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
        std::thread::sleep(Duration::from_secs(1));
        assert!(nodes.iter().all(|node| node.progress().is_ok()), "it lives");
        victim.kill();
        Instant::now()
    });
    for End { after, error, is_late } in &ended {
        println!("after {after:?}: {error}");
        assert!(!is_late && *after < NEWS * 5, "{after:?}: {error}");
        assert!(error.contains("its process has ended"), "{error}");
        assert!(blames_the_dead(error), "{error}");
    }
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_member_that_is_killed_while_three_join_is_blamed_by_both_others() {
    let (mut known, mut late) = (Vec::new(), 0);
    for round in 0..ROUNDS {
        let cluster = cluster(3);
        // From its first connection on, over about the duration of a join.
        let delay = (u64::from(round) * 3_500 + 200).to_string();
        let environment = [("TEST_PLACE", delay.as_str()), ("TEST_VICTIM", "2")];
        let mut victim = Other::start_with("kill_matrix::victim::role_joiner", &cluster, &environment);
        let ended = survive(&cluster, |_| {
            assert!(!victim.ends_well(), "it was killed");
            Instant::now()
        });
        for End { after, error, is_late } in &ended {
            println!("killed after {delay} us; {after:?} later: {error}");
            assert!(blames_the_dead(error), "{error}");
            if !is_late {
                known.push(*after);
                assert!(*after < NEWS * 5, "{after:?}: {error}");
            }
            late += u32::from(*is_late);
        }
    }
    assert!(late <= MOST_LATE, "{late} of {} members noticed nothing early", 2 * ROUNDS);
    println!("{} of {} members ended early, after {:?} at most", known.len(), 2 * ROUNDS, known.iter().max());
}
