//! Kills during a join.

use super::survivor::{is_lost, join};
use super::{NEWS, Row, rounds};
use crate::common::other::{Other, counts};
use crate::common::{cluster, member, over_verbs};
use std::time::{Duration, Instant};
use tensorwire::{Error, Incarnation, LossCause, Node, NodeError, PeerState};

/// The range of random kill times: about the duration of a join.
const WHOLE: Duration = Duration::from_millis(20);

/// Rounds in which missed cells are tried again.
const MORE: u32 = 30;

/// The phase of the victim, derived from what this side has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    /// This side has not heard of the victim.
    Nothing,
    /// The victim has said hello, or the link was being made.
    Hello,
    /// The link was attached, and not both sides had confirmed ready.
    Attached,
    Up,
}

fn variable(name: &str) -> String {
    std::env::var(name).expect("started by a test")
}

#[test]
#[ignore = "a role, not a test"]
fn role_join_survivor() {
    let cluster = variable("TEST_CLUSTER");
    let (me, other) = (variable("TEST_ME").parse().expect("a number"), variable("TEST_VICTIM"));
    let node = member(&cluster, me).set("join_timeout", "100ms").start().expect("the node starts");
    // The two cases differ in how a process of the same host is watched.
    let attached = if over_verbs() { Reached::Hello } else { Reached::Attached };
    let places = [
        ("before", Reached::Nothing, "before Hello"),
        ("linking", Reached::Hello, "while the link is made"),
        ("attached", attached, "between attach and ready"),
        ("up", Reached::Up, "just up"),
    ];
    let mut rows = places.map(|(_, _, name)| Row::new(format!("Join, {name}, w/{other} killed")));
    let mut drawn = Row::new(format!("Join, at a time that is drawn, w/{other} killed"));
    let mut settled = None;
    let mut random = 0x9E37_79B9_7F4A_7C15_u64 ^ u64::from(me);
    let mut tried = 0;
    // On a busy machine some cells are missed now and then.
    while tried < rounds() || rows.iter().any(|row| row.hits == 0) {
        assert!(tried < rounds() + MORE, "{rows:?}");
        tried += 1;
        for ((place, aim, _), row) in places.iter().zip(&mut rows) {
            if tried > rounds() && row.hits > 0 {
                continue;
            }
            let (reached, news) = die_at(&node, &cluster, place);
            row.add(reached == *aim, news);
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let delay = random % WHOLE.as_micros() as u64;
        drawn.add(true, die_at(&node, &cluster, &delay.to_string()).1);
        settled.get_or_insert_with(counts);
    }
    let settled = settled.expect("a round");
    let end = Instant::now() + NEWS * 5;
    while !counts().is_within(settled) {
        assert!(Instant::now() < end, "{:?}, {settled:?} before", counts());
        let _ = node.progress();
    }
    rows.iter().chain([&drawn]).for_each(Row::print);
    let kills: u32 = rows.iter().chain([&drawn]).map(|row| row.kills).sum();
    println!("{kills} kills; {:?}, {settled:?} after the first round", counts());
    node.stop().expect("stopped");
}

/// Starts a victim that dies in this phase. Returns its phase, and the time from its death to the
/// end of a join.
fn die_at(node: &Node, cluster: &str, place: &str) -> (Reached, Duration) {
    let before = node.peers()[0].clone();
    let environment = [("TEST_PLACE", place), ("TEST_VICTIM", &variable("TEST_VICTIM"))];
    let mut victim = Other::start_with("kill_matrix::victim::role_joiner", cluster, &environment);
    let mut was_up = false;
    match place {
        "before" => victim.wait_for("there"),
        "up" => {
            join(node);
            victim.wait_for("ready")
        }
        _ => String::new(),
    };
    if matches!(place, "before" | "up") {
        victim.kill();
        was_up = place == "up";
    }
    while !victim.has_ended() {
        let _ = node.progress();
        was_up |= matches!(node.peers()[0].state, PeerState::Connected);
    }
    let died = Instant::now();
    // The kernel's report takes a moment. A join that begins later ends with an error in time.
    let (error, news) = loop {
        let result = node.join();
        let news = died.elapsed();
        assert!(news < NEWS * 5, "{news:?}: {result:?}");
        if let Err(error) = result {
            break (error.to_string(), news);
        }
    };
    let name = format!("w/{}", variable("TEST_VICTIM"));
    assert!(error.contains(&name), "{error}");
    (reached(node, before.incarnation, place, was_up), news)
}

/// The time after which an unreported death counts as never reported. The pauses between two
/// attempts to reach a peer are at most half a second. Over verbs nothing else reports a death, and
/// the machine may be slow.
fn untold() -> Duration {
    Duration::from_millis(if over_verbs() { 2000 } else { 700 })
}

/// The phase of a dead victim; `earlier` is the life before it.
fn reached(node: &Node, earlier: Option<Incarnation>, place: &str, was_up: bool) -> Reached {
    let began = Instant::now();
    loop {
        let now = node.peers()[0].clone();
        let is_news = now.incarnation != earlier;
        if is_news && is_lost(node) {
            let loss = now.state.error().expect("lost").to_string();
            assert!(loss.contains("has ended"), "{loss}");
            return match (was_up, loss.contains("pid")) {
                (true, _) => Reached::Up,
                (false, true) => Reached::Attached,
                (false, false) => Reached::Hello,
            };
        }
        let is_over = place == "before" || began.elapsed() > untold();
        if !is_news && !was_up && is_over {
            return Reached::Nothing;
        }
        assert!(began.elapsed() < NEWS * 5, "{now:?}");
        let _ = node.progress();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Joins a victim that dies before its link is up, with `peer_loss = fail_all` and a join timeout
/// of 20 s. Returns whether the joins ended by the loss: a kill may land after the link is up.
pub(crate) fn join_with_the_doomed(me: u32, other: &str) -> bool {
    let cluster = cluster(2);
    let node = member(&cluster, me).set("peer_loss", "fail_all").start().expect("the node starts");
    let environment = [("TEST_PLACE", "attached"), ("TEST_VICTIM", other)];
    let mut victim = Other::start_with("kill_matrix::victim::role_joiner", &cluster, &environment);
    let (result, ended) = std::thread::scope(|scope| {
        let joining = scope.spawn(|| (node.join(), Instant::now()));
        assert!(!victim.ends_well(), "it was killed");
        let died = Instant::now();
        let (result, ended) = joining.join().expect("no panic");
        (result, ended.saturating_duration_since(died))
    });
    assert!(ended < NEWS * 5, "{ended:?}: {result:?}");
    let Err(error) = result else { return false };
    println!("the join ended {ended:?} after the death: {error}");
    let NodeError::Lost { error, .. } = error else { panic!("expected a loss: {error}") };
    let Error::PeerLost { peer, cause: LossCause::Died(_), .. } = *error else {
        panic!("expected a death: {error}")
    };
    assert_eq!(peer.to_string(), format!("w/{other}"));
    true
}
