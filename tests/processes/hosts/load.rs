//! A load on the link of one host, which goes on until it is told to end.

use super::{host_of, members_of};
use crate::common::{SOON, counting, values};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;
use tensorwire::Node;

/// Elements of each value.
const FLOATS: usize = 100_000;
/// Elements of the value that ends a load.
const LAST: usize = 1;

/// Threads of a member that send to the members of a host, or receive there.
pub struct Load {
    threads: Vec<JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

impl Load {
    /// Begins the part of this member. Members of other hosts send to each member of `host`.
    pub fn begin(node: &Arc<Node>, host: u32) -> Load {
        let (is_over, rounds, bytes) = (Arc::default(), Arc::default(), Arc::default());
        let mut load = Load { threads: Vec::new(), is_over, rounds, bytes };
        let me = node.task().task();
        let all = 0..node.peers().len() as u32 + 1;
        if host_of(me) == host {
            for peer in all.filter(|peer| host_of(*peer) != host) {
                let (node, bytes) = (node.clone(), load.bytes.clone());
                load.threads.push(std::thread::spawn(move || receive(&node, peer, &bytes)));
            }
        } else {
            let (node, is_over, rounds) = (node.clone(), load.is_over.clone(), load.rounds.clone());
            load.threads.push(std::thread::spawn(move || send(&node, host, &is_over, &rounds)));
        }
        load
    }

    /// Waits until a value has gone to each member of the host.
    pub fn wait_for_a_round(&self) {
        let began = Instant::now();
        while self.rounds.load(Ordering::SeqCst) == 0 {
            assert!(began.elapsed() < SOON, "the load does not begin");
            std::thread::yield_now();
        }
    }

    /// Ends the part of this member, and says what it has received.
    pub fn end(self) -> String {
        self.is_over.store(true, Ordering::SeqCst);
        self.threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        format!("received {}", self.bytes.load(Ordering::SeqCst))
    }
}

/// The step of a round. Each sender has steps of its own, as it goes at its own pace.
fn step_of(sender: u32, round: u64) -> u64 {
    1 << 50 | u64::from(sender) << 32 | round
}

/// A value to each member of the host in each round, and a word from each that it came.
fn send(node: &Node, host: u32, is_over: &AtomicBool, rounds: &AtomicU64) {
    for round in 0.. {
        let id = step_of(node.task().task(), round);
        let step = node.step(id).expect("new");
        let is_last = is_over.load(Ordering::SeqCst);
        let floats = if is_last { LAST } else { FLOATS };
        for peer in members_of(host) {
            let edge = node.edge_to("w", peer, "load").expect("an edge");
            step.send(&edge, counting(node, round as f32, floats)).expect("sent");
        }
        for peer in members_of(host) {
            step.recv(&node.edge_from("w", peer, "came").expect("an edge"), SOON).expect("received");
        }
        node.cleanup(id);
        rounds.fetch_add(1, Ordering::SeqCst);
        if is_last {
            return;
        }
    }
}

/// Receives what a sender sends, until the value that ends it.
fn receive(node: &Node, from: u32, bytes: &AtomicU64) {
    for round in 0.. {
        let id = step_of(from, round);
        let step = node.step(id).expect("new");
        let got = step.recv(&node.edge_from("w", from, "load").expect("an edge"), SOON).expect("received");
        let came = values(&got.tensor);
        assert_eq!((came[0], came[came.len() - 1]), (round as f32, round as f32 + (came.len() - 1) as f32));
        bytes.fetch_add(4 * came.len() as u64, Ordering::SeqCst);
        let is_last = came.len() == LAST;
        step.send(&node.edge_to("w", from, "came").expect("an edge"), counting(node, 0.0, 1)).expect("sent");
        // The word has left when the sender has begun its next round, which it does once it came.
        (round > 0).then(|| node.cleanup(step_of(from, round - 1)));
        if is_last {
            return;
        }
    }
}
