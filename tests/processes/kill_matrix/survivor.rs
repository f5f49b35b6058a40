//! The side that survives.

use super::{BULK, Killed, NEWS, PROBE, Phase, Row, phases, rounds};
use crate::common::other::{Other, counts};
use crate::common::{SOON, cluster, member, until, writes_bulk};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, Error, LossCause, Node, Pending, Snapshot, Tensor};

fn count(node: &Node, counter: Counter) -> u64 {
    node.counters().get(counter)
}

pub fn join(node: &Node) {
    let began = Instant::now();
    while let Err(error) = node.join() {
        assert!(began.elapsed() < SOON, "{error}");
    }
}

pub fn is_lost(node: &Node) -> bool {
    node.peers()[0].state.error().is_some()
}

fn bulk(node: &Node) -> Tensor {
    let mut tensor = node.tensor(DType::U8, &[BULK as u64]).expect("room");
    tensor.bytes_mut().fill(7);
    tensor.freeze()
}

fn start(cluster: &str, receive: &str) -> Node {
    let node = member(cluster, 0)
        .set("bulk_receive", receive)
        .set("max_lent_bytes", "16TiB")
        .set("stop_timeout", "20s");
    node.set("poll", "inline").start().expect("the node starts")
}

/// Additional rounds for cells that were never hit. A kill hits some of them within microseconds
/// only.
const MORE: u32 = 6;

#[test]
#[ignore = "a role, not a test"]
fn role_exchange_survivor() {
    let clusters = [std::env::var("TEST_CLUSTER").expect("started by a test"), cluster(2)];
    let (copying, borrowing) = (start(&clusters[0], "copy"), start(&clusters[1], "borrow"));
    let mut rows = Vec::new();
    for killed in [Killed::Sender, Killed::Receiver] {
        let row = |phase| (killed, phase, Row::new(format!("{phase:?}, {killed:?} killed")));
        rows.extend(phases().map(row));
    }
    let mut settled = None;
    let mut step = 0;
    for round in 0..rounds() + MORE {
        for (killed, phase, row) in &mut rows {
            if round >= rounds() && row.hits > 0 {
                continue;
            }
            step += 1;
            let (node, cluster) = match phase {
                Phase::Borrow => (&borrowing, &clusters[1]),
                _ => (&copying, &clusters[0]),
            };
            let (hit, news) = match (*killed, *phase) {
                (Killed::Receiver, Phase::Stop) => drain_for_the_dead(step),
                (killed, phase) => Round::new(node, cluster, killed, phase, step).run(),
            };
            row.add(hit, news);
            assert!(
                copying.pool().is_empty() && borrowing.pool().is_empty(),
                "after {killed:?} in {phase:?}"
            );
            assert!(copying.live_steps().is_empty() && borrowing.live_steps().is_empty());
        }
        if round == 0 {
            settled = Some(counts());
        }
    }
    let settled = settled.expect("a round");
    until(&copying, "the same holdings as after the first round", || counts().is_within(settled));
    rows.iter().for_each(|(_, _, row)| row.print());
    let kills: u32 = rows.iter().map(|(_, _, row)| row.kills).sum();
    println!("{kills} kills; {:?}, {settled:?} after the first round", counts());
    for node in [copying, borrowing] {
        node.stop().expect("stopped");
    }
    let stopped = Instant::now();
    // A thread that was joined may be listed for a moment.
    while counts().threads > 0 && stopped.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
    assert_eq!(counts().threads, 0, "threads are left");
}

/// One kill and its survivor.
struct Round<'a> {
    node: &'a Node,
    victim: Other,
    killed: Killed,
    phase: Phase,
    id: u64,
    /// The counters before the victim came.
    before: Snapshot,
}

impl<'a> Round<'a> {
    fn new(node: &'a Node, cluster: &str, killed: Killed, phase: Phase, id: u64) -> Self {
        let before = node.counters();
        let role = format!("{killed:?}").to_lowercase();
        let environment = [("TEST_PHASE", format!("{phase:?}")), ("TEST_STEP", id.to_string())];
        let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
        let mut victim =
            Other::start_with(&format!("kill_matrix::victim::role_{role}"), cluster, &environment);
        join(node);
        victim.wait_for("ready");
        Round { node, victim, killed, phase, id, before }
    }

    /// Whether the phase was hit, and the time from the kill to the end of all calls that needed
    /// the victim.
    fn run(mut self) -> (bool, Duration) {
        let outcome = match self.killed {
            Killed::Sender => self.sender(),
            Killed::Receiver => self.receiver(),
        };
        assert!(outcome.1 < NEWS * 5, "{:?} in {:?}: known after {:?}", self.killed, self.phase, outcome.1);
        self.node.cleanup(self.id);
        let node = self.node;
        until(node, "the end of every tensor", || node.pool().is_empty());
        outcome
    }

    /// Polls until the counter has grown by one since `before`.
    fn until_one_more(&self, counter: Counter, before: u64) {
        until(self.node, counter.name(), || count(self.node, counter) > before);
    }

    /// Messages received before an announcement of the victim.
    fn announced(&self) -> u64 {
        self.before.get(Counter::MessagesReceived) + PROBE
    }

    fn kill(&mut self) -> Instant {
        self.victim.kill();
        Instant::now()
    }

    fn until_lost(&self) {
        until(self.node, "the news", || is_lost(self.node));
        self.expect_death(self.node.peers()[0].state.error().expect("lost"));
    }

    fn expect_death(&self, error: &Error) {
        let life = self.node.peers()[0].incarnation;
        let right = matches!(error, Error::PeerLost { peer, incarnation, cause: LossCause::Died(_) }
            if peer.to_string() == "w/1" && Some(*incarnation) == life);
        assert!(right, "{:?} in {:?}: {error}", self.killed, self.phase);
    }

    fn ends_with_death(&self, pending: Pending<Tensor>) {
        self.expect_death(&pending.wait().map(|_| ()).expect_err("its sender is dead"));
    }

    /// The victim sends, and this side receives.
    fn sender(&mut self) -> (bool, Duration) {
        let node = self.node;
        let step = node.step(self.id).expect("new");
        let edge = node.edge_from("w", 1, "t").expect("edge");
        if self.phase == Phase::Stop {
            self.victim.wait_for("there");
            let killed = self.kill();
            // A clean stop would be reported as one.
            self.expect_death(&step.recv(&edge, SOON).map(|_| ()).expect_err("its sender is dead"));
            return (true, killed.elapsed());
        }
        let pending = step.receive(&edge).begin().expect("begun");
        match self.phase {
            Phase::Announce | Phase::Stop => {
                self.victim.wait_for("there");
                let killed = self.kill();
                self.ends_with_death(pending);
                (true, killed.elapsed())
            }
            Phase::Bulk => {
                if writes_bulk() {
                    // Waits until the offer has a destination. Nothing is polled from then on.
                    until(node, "a destination", || !node.pool().is_empty());
                    return self.sender_dies_in_a_write(pending);
                }
                self.victim.wait_for("there");
                let hit = !pending.is_done();
                let killed = self.kill();
                // The bytes may still be copied out of the dead process's memory.
                self.ends_whole_or_with_death(pending);
                self.until_lost();
                (hit, killed.elapsed())
            }
            Phase::Held => {
                drop(pending);
                // The meta-data and the record.
                self.until_one_more(Counter::MessagesReceived, self.announced() + 1);
                self.victim.wait_for("there");
                let killed = self.kill();
                self.until_lost();
                let news = killed.elapsed();
                let got = step.recv(&edge, SOON).map(|got| got.tensor);
                match writes_bulk() {
                    true => self.expect_death(&got.expect_err("the offer went with its sender")),
                    false => {
                        let got = got.expect("it had come");
                        assert!(got.bytes().len() == BULK && got.bytes().iter().all(|byte| *byte == 7));
                    }
                }
                (true, news)
            }
            Phase::Borrow => {
                until(node, "the loan", || pending.is_done());
                let got = pending.wait().expect("received").tensor;
                self.victim.wait_for("there");
                let killed = self.kill();
                self.until_lost();
                let news = killed.elapsed();
                assert!(got.bytes().len() == BULK && got.bytes().iter().all(|byte| *byte == 7));
                (got.is_lent(), news)
            }
        }
    }

    /// Over verbs a write goes on without polls, so the victim ends itself as soon as it has posted
    /// the write. How much of it has landed is unknown: soft-RoCE carries it out in the call that
    /// posts it.
    fn sender_dies_in_a_write(&mut self, pending: Pending<Tensor>) -> (bool, Duration) {
        while !self.victim.has_ended() {
            std::thread::yield_now();
        }
        let died = Instant::now();
        // Nothing was polled since the post, so its completion has not been seen.
        let hit = !pending.is_done();
        self.ends_whole_or_with_death(pending);
        self.until_lost();
        (hit, died.elapsed())
    }

    fn ends_whole_or_with_death(&self, pending: Pending<Tensor>) {
        match pending.wait() {
            Ok(got) => assert!(got.tensor.bytes().iter().all(|byte| *byte == 7)),
            Err(error) => self.expect_death(&error),
        }
    }

    /// The victim receives, and this side sends.
    fn receiver(&mut self) -> (bool, Duration) {
        let node = self.node;
        let edge = node.edge_to("w", 1, "t").expect("edge");
        if self.phase == Phase::Announce {
            self.victim.wait_for("there");
            self.until_one_more(Counter::MessagesReceived, self.announced());
            let killed = self.kill();
            self.until_lost();
            let news = killed.elapsed();
            let late = node.step(self.id).expect("new").send(&edge, bulk(node));
            self.expect_death(&late.expect_err("its receiver is dead"));
            return (true, news);
        }
        node.step(self.id).expect("new").send(&edge, bulk(node)).expect("sent");
        let leaves = match self.phase {
            Phase::Bulk => Counter::WritesPosted,
            Phase::Held => Counter::TensorsSent,
            Phase::Borrow => Counter::LoansPosted,
            Phase::Announce | Phase::Stop => unreachable!("seen to above"),
        };
        self.until_one_more(leaves, self.before.get(leaves));
        self.victim.wait_for("there");
        let is_held = !node.pool().is_empty();
        let killed = self.kill();
        self.until_lost();
        (is_held, killed.elapsed())
    }
}

/// A node that stops and waits until its sent values are taken, by a peer that is killed.
fn drain_for_the_dead(id: u64) -> (bool, Duration) {
    let cluster = cluster(2);
    let node = start(&cluster, "copy");
    let environment = [("TEST_PHASE", "Stop"), ("TEST_STEP", "0")];
    let mut victim = Other::start_with("kill_matrix::victim::role_receiver", &cluster, &environment);
    join(&node);
    victim.wait_for("there");
    let edge = node.edge_to("w", 1, "t").expect("edge");
    node.step(id).expect("new").send(&edge, bulk(&node)).expect("sent");
    let begun = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| {
            begun.store(true, Ordering::SeqCst);
            node.stop()
        });
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(3));
        let hit = !stopping.is_finished();
        victim.kill();
        let killed = Instant::now();
        stopping.join().expect("no panic").expect("stopped");
        (hit, killed.elapsed())
    })
}
