//! Connections over TCP that break again and again between two members that live: nothing is lost,
//! and no receive fails.

use crate::common::other::Other;
use crate::common::{SOON, cluster, counting, member, values};
use crate::tcp_connections::Breaker;
use std::time::{Duration, Instant};
use tensorwire::{Counter, Edge, Node, Step};

/// Repairs and steps that each member must have come through.
const REPAIRS: u64 = 20;
const STEPS: u64 = 20;
/// Elements (`f32`) of the values of a step: in a record, by the main connection, by the others.
const LENGTHS: [usize; 4] = [2, 500, 10_000, 200_000];
/// Edges of a batch.
const BATCH: usize = 10;

#[test]
fn values_come_once_and_in_order_over_connections_that_break_again_and_again() {
    for poll in ["inline", "adaptive"] {
        let cluster = cluster(2);
        let start = |task| {
            let environment = [("TEST_TASK", task), ("TEST_POLL", poll)];
            Other::start_with("broken_connections::role_exchange", &cluster, &environment)
        };
        let mut members = ["0", "1"].map(start);
        for member in &mut members {
            member.wait_for("joined");
        }
        let (began, mut breaker) = (Instant::now(), Breaker::new(&cluster));
        while !members.iter_mut().all(Other::has_ended) {
            assert!(began.elapsed() < 6 * SOON, "no end after {} breaks", breaker.broken);
            breaker.break_next(&members);
            std::thread::sleep(Duration::from_millis(5 + breaker.broken as u64 % 50));
        }
        for member in &mut members {
            println!("{poll}: {}", member.wait_for("repairs"));
            assert!(member.ends_well());
        }
        println!("{} breaks in {:?}", breaker.broken, began.elapsed());
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_exchange() {
    let text = |name: &str| std::env::var(name).expect("started by a test");
    let task: u32 = text("TEST_TASK").parse().expect("a number");
    let node = member(&text("TEST_CLUSTER"), task).set("fabric", "tcp").set("poll", text("TEST_POLL"));
    let node = node.set("pool_size", "64MiB").set("stop_timeout", "10s").start().expect("the node starts");
    node.join().expect("the other comes");
    println!("joined");
    let sequence = node.sequence(1 << 40);
    let edges = Edges::new(&node, 1 - task);
    let _standing = node.standing(&edges.standing.1, sequence, 16).expect("new");
    let mut rounds = 0;
    loop {
        let step = node.step(sequence.step(rounds)).expect("a step");
        // Both go on until both have seen enough. A step's first value says so.
        let has_enough = rounds >= STEPS && node.counters().get(Counter::LinksRepaired) >= REPAIRS;
        let theirs_have = edges.exchange(&node, &step, rounds, has_enough);
        drop(step);
        // The other side has taken its values: it sent this step's after that.
        if rounds > 0 {
            node.cleanup(sequence.step(rounds - 1));
        }
        rounds += 1;
        if has_enough && theirs_have {
            break;
        }
    }
    let counters = node.counters();
    assert_eq!((counters.get(Counter::PeersLost), counters.get(Counter::ValuesLost)), (0, 0));
    println!("w/{task}: {} repairs in {rounds} steps", counters.get(Counter::LinksRepaired));
    // The other side counts before it says this.
    let last = node.step(1).expect("a step");
    last.send_dead(&edges.of_lengths[0].0).expect("sent");
    last.recv(&edges.of_lengths[0].1, SOON).expect("received");
    // Nothing repairs a link whose owner leaves. An error says that the other side has left, which
    // had taken this side's word before.
    let _ = node.flush(SOON);
    node.stop().expect("the node stops");
}

/// Edges to the other member and from it.
struct Edges {
    standing: (Edge, Edge),
    of_lengths: Vec<(Edge, Edge)>,
    of_batch: Vec<(Edge, Edge)>,
}

impl Edges {
    fn new(node: &Node, other: u32) -> Self {
        let edge = |name: &str| {
            let to = node.edge_to("w", other, name).expect("an edge");
            (to, node.edge_from("w", other, name).expect("an edge"))
        };
        Edges {
            standing: edge("standing"),
            of_lengths: LENGTHS.iter().map(|len| edge(&format!("of {len}"))).collect(),
            of_batch: (0..BATCH).map(|at| edge(&format!("batch {at}"))).collect(),
        }
    }

    /// Sends values of each kind, and receives the other side's. Says `word`, and returns theirs.
    fn exchange(&self, node: &Node, step: &Step, round: u64, word: bool) -> bool {
        let first = (round % 1000) as f32;
        let say = |at: f32| f32::from(u8::from(word)) + 2.0 * at;
        // Several values of one edge arrive in their order.
        for at in 0..3 {
            step.send(&self.standing.0, counting(node, say(first + at as f32), 3)).expect("sent");
        }
        for (len, (to, _)) in LENGTHS.into_iter().zip(&self.of_lengths) {
            step.send(to, counting(node, first, len)).expect("sent");
        }
        let batch = self.of_batch.iter().enumerate();
        step.send_all(batch.map(|(at, (to, _))| (to, counting(node, first + at as f32, 40 * at))))
            .expect("sent");
        let mut theirs = false;
        for at in 0..3 {
            let came = step.recv(&self.standing.1, SOON).expect("received").tensor;
            let value = values(&came)[0];
            theirs = value % 2.0 == 1.0;
            assert_eq!((value / 2.0).floor(), first + at as f32, "in its order, once");
        }
        for (len, (_, from)) in LENGTHS.into_iter().zip(&self.of_lengths) {
            let came = step.recv(from, SOON).expect("received").tensor;
            let all = values(&came);
            assert_eq!(all.len(), len);
            assert!(all.iter().enumerate().all(|(k, value)| *value == first + k as f32), "other bytes");
        }
        let came = step
            .recv_all(&self.of_batch.iter().map(|(_, from)| from).collect::<Vec<_>>(), SOON)
            .expect("received");
        for (at, delivery) in came.iter().enumerate() {
            let all = values(&delivery.tensor);
            assert_eq!(all.len(), 40 * at);
            assert!(
                all.iter().enumerate().all(|(k, value)| *value == first + (at + k) as f32),
                "other bytes"
            );
        }
        theirs
    }
}
