//! Kills while a member joins.

use crate::common::member;
use crate::common::other::{Other, counts};
use crate::survivor::{is_lost, join};
use crate::{NEWS, Row, rounds};
use std::time::{Duration, Instant};
use tensorwire::{Node, PeerState};

/// Tries until each phase was hit.
const MOST: u32 = 400;

/// How far the victim was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    /// This side has not heard of it.
    Nothing,
    /// It has said hello, or the link was being made.
    Hello,
    /// The link was handed to the poller, and not both sides had said that they are ready.
    Attached,
    Up,
}

const REACHED: [(Reached, &str); 4] = [
    (Reached::Nothing, "join, before Hello"),
    (Reached::Hello, "join, from Hello until the link is made"),
    (Reached::Attached, "join, from attach until ready"),
    (Reached::Up, "join, up"),
];

fn variable(name: &str) -> String {
    std::env::var(name).expect("started by a test")
}

#[test]
#[ignore = "a role, not a test"]
fn role_join_survivor() {
    let cluster = variable("TEST_CLUSTER");
    let me: u32 = variable("TEST_ME").parse().expect("a number");
    let node = member(&cluster, me).set("join_timeout", "100ms").start().expect("the node starts");
    let mut rows = REACHED.map(|(_, name)| Row::new(format!("{name}, w/{} killed", 1 - me)));
    // How long a whole join takes here tells what times to draw from.
    let mut whole = Duration::ZERO;
    for _ in 0..3 {
        let mut victim = victim(&cluster, 1_000_000);
        let began = Instant::now();
        join(&node);
        whole = whole.max(began.elapsed());
        victim.kill();
        settle(&node);
    }
    let settled = counts();
    let wanted = rounds() * 2;
    let mut tried = 0;
    let mut random = 0x9E37_79B9_7F4A_7C15_u64 ^ u64::from(me);
    while tried < wanted || rows[1].hits == 0 || rows[2].hits == 0 {
        assert!(tried < MOST, "after {tried} kills: {rows:?}");
        tried += 1;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let delay = 1 + random % (whole.as_micros() as u64 + 2000);
        let (reached, news) = die_after(&node, &cluster, delay);
        let row = REACHED.iter().position(|(known, _)| *known == reached).expect("one of them");
        rows[row].add(true, news);
    }
    for _ in 0..rounds() {
        let (reached, news) = die_after(&node, &cluster, 0);
        assert_eq!(reached, Reached::Nothing);
        rows[0].add(true, news);
    }
    let end = Instant::now() + NEWS * 5;
    while counts() > settled {
        assert!(Instant::now() < end, "(threads, files, mappings) {:?}, {settled:?} before", counts());
        let _ = node.progress();
    }
    println!("a whole join takes {whole:?}, of which the process's start is most");
    rows.iter().filter(|row| row.kills > 0).for_each(Row::print);
    let kills: u32 = rows.iter().map(|row| row.kills).sum();
    println!("{kills} kills; (threads, files, mappings) {:?}, {settled:?} before", counts());
    node.stop().expect("stopped");
}

fn victim(cluster: &str, delay: u64) -> Other {
    let (delay, task) = (delay.to_string(), variable("TEST_VICTIM"));
    let environment = [("TEST_DELAY_US", delay.as_str()), ("TEST_VICTIM", &task)];
    Other::start_with("victim::role_joiner", cluster, &environment)
}

/// Until the loss of the present life is known.
fn settle(node: &Node) {
    let began = Instant::now();
    while !is_lost(node) {
        assert!(began.elapsed() < NEWS * 5, "{:?}", node.peers());
        let _ = node.progress();
    }
}

/// Starts a victim that dies by itself, and watches. Says how far it came, and how long after its death this side's
/// calls had ended.
fn die_after(node: &Node, cluster: &str, delay: u64) -> (Reached, Duration) {
    let before = node.peers()[0].clone();
    let mut victim = victim(cluster, delay);
    let mut was_up = false;
    if delay == 0 {
        victim.wait_for("there");
        victim.kill();
    }
    while !victim.has_ended() {
        let _ = node.progress();
        was_up |= matches!(node.peers()[0].state, PeerState::Connected);
    }
    let died = Instant::now();
    // What it was takes a moment to come round; a call that needs it must end meanwhile.
    let error = node.join().expect_err("it is dead").to_string();
    let news = died.elapsed();
    assert!(news < NEWS * 5, "{news:?}: {error}");
    let name = format!("w/{}", variable("TEST_VICTIM"));
    assert!(error.contains(&name), "{error}");
    if was_up {
        settle(node);
        return (Reached::Up, news);
    }
    let heard = Instant::now();
    loop {
        let now = node.peers()[0].clone();
        let is_news = now.incarnation != before.incarnation;
        if is_news && let PeerState::Lost(loss) = &now.state {
            assert!(loss.to_string().contains("has ended"), "{loss}");
            let by_the_kernel = loss.to_string().contains("pid");
            return (if by_the_kernel { Reached::Attached } else { Reached::Hello }, news);
        }
        // The pauses between two tries to reach a peer are half a second at most.
        if !is_news && heard.elapsed() > Duration::from_millis(700) {
            return (Reached::Nothing, news);
        }
        let _ = node.progress();
        std::thread::sleep(Duration::from_millis(1));
    }
}
