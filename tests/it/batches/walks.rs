//! Batches that the calling thread sends and receives on the poller itself: one thread drives both
//! members in turns.

use super::given::{contents, given};
use super::*;
use crate::common::two_members;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;
use tensorwire::{Batch, Code, Status};

const COUNT: usize = 40;

/// Two members, and a batch of edges that the sender knows.
struct Pair {
    sender: Node,
    receiver: Node,
    out: Batch,
    back: Batch,
}

impl Pair {
    fn new() -> Pair {
        let [sender, receiver] = two_members(&[]);
        let out = sender.batch(edges_to(&sender, 1, COUNT)).expect("usable");
        let back = receiver.batch(edges_from(&receiver, 0, COUNT)).expect("usable");
        let pair = Pair { sender, receiver, out, back };
        let (from, to) = pair.step(1);
        pair.back.edges().iter().for_each(|edge| assert!(to.try_recv(edge).expect("a link").is_none()));
        pair.progress();
        pair.send(&from, 1);
        // Another thread may have held the sender's poller while it was to make progress.
        check(&pair.recv(&pair.back, &to), 1);
        pair
    }

    fn step(&self, n: u64) -> (Step, Step) {
        (begin(&self.sender, n), begin(&self.receiver, n))
    }

    fn send(&self, step: &Step, n: u64) {
        self.out.send(step, tensors(&self.sender, n, COUNT)).expect("sent");
    }

    fn progress(&self) {
        for _ in 0..20 {
            self.sender.progress().expect("a link");
            self.receiver.progress().expect("a link");
        }
    }

    /// Receives a batch while another thread lets the sender go on.
    fn recv(&self, back: &Batch, step: &Step) -> Vec<Delivery<Tensor>> {
        self.while_the_sender_polls(|| back.recv(step, SOON).expect("received"))
    }

    fn while_the_sender_polls<R>(&self, body: impl FnOnce() -> R) -> R {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    self.sender.progress().expect("a link");
                    thread::yield_now();
                }
            });
            let result = body();
            is_over.store(true, Ordering::Relaxed);
            result
        })
    }

    /// The first number that a receive of edge `at` gets.
    fn next(&self, step: &Step, at: usize) -> f32 {
        values(&step.recv(&self.back.edges()[at], SOON).expect("received").tensor)[0]
    }

    fn none_is_left(&self, step: &Step) {
        self.progress();
        for edge in self.back.edges() {
            assert!(step.try_recv(edge).expect("a link").is_none(), "{edge} has another value");
        }
    }
}

/// Values of every kind that one edge after the other gets, and their sums.
fn of_every_kind(node: &Node, n: u64) -> (Vec<Value>, Vec<Option<f32>>) {
    let one = |at: usize| match at % 4 {
        0 => (Value::Dead, None),
        // More than a record holds.
        1 => (counting(node, first_of(n, at), 1000).into(), Some(first_of(n, at))),
        _ => (counting(node, first_of(n, at), 2).into(), Some(first_of(n, at))),
    };
    (0..COUNT).map(one).unzip()
}

#[test]
fn every_kind_of_value_comes_once_and_in_order_whoever_is_first() {
    let pair = Pair::new();
    let mut received = Vec::new();
    for n in 2..30 {
        let (from, to) = pair.step(n);
        let (sent, first) = of_every_kind(&pair.sender, n);
        thread::scope(|scope| {
            let send = || {
                thread::sleep(Duration::from_micros(100 * (n % 3)));
                pair.out.send(&from, sent).expect("sent");
                pair.sender.progress().expect("a link");
            };
            let sending = scope.spawn(send);
            if n % 2 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            pair.while_the_sender_polls(|| pair.back.recv_many(&to, SOON, &mut received)).expect("received");
            sending.join().expect("no panic");
        });
        let came = received.iter().map(|value| (!value.is_dead).then(|| values(&value.tensor)[0]));
        assert_eq!(came.collect::<Vec<_>>(), first, "step {n}");
        received.clear();
        pair.none_is_left(&to);
        pair.sender.cleanup(n);
        pair.receiver.cleanup(n);
    }
}

#[test]
fn an_edge_that_is_in_a_batch_twice_stands_for_two_values_in_order() {
    let pair = Pair::new();
    let (from, to) = pair.step(2);
    let twice = |batch: &Batch| [0, 1, 0, 0].map(|at| batch.edges()[at].clone());
    let out = pair.sender.batch(twice(&pair.out)).expect("usable");
    let back = pair.receiver.batch(twice(&pair.back)).expect("usable");
    for n in 2..20 {
        out.send(&from, tensors(&pair.sender, n, 4)).expect("sent");
        check(&pair.recv(&back, &to), n);
    }
    pair.none_is_left(&to);
}

#[test]
fn values_that_came_before_a_timeout_are_dropped_and_later_ones_are_for_the_next() {
    let pair = Pair::new();
    let (from, to) = pair.step(2);
    let edges = pair.out.edges();
    from.send_all((0..10).map(|at| (&edges[at], counting(&pair.sender, 1.0, 2)))).expect("sent");
    let patience = Duration::from_millis(200);
    let start = Instant::now();
    let error = pair.back.recv(&to, patience).expect_err("ten of forty were sent");
    assert!(start.elapsed() >= patience);
    assert!(
        matches!(&error, Error::DeadlineExceeded { key, after } if key.contains("g/10") && *after == patience)
    );
    pair.none_is_left(&to);
    pair.send(&from, 3);
    check(&pair.recv(&pair.back, &to), 3);
}

/// The first edge has no value.
#[test]
fn an_error_of_a_later_edge_ends_the_wait_at_once() {
    let pair = Pair::new();
    for (n, misfit) in [(2, 5), (3, 30)] {
        let (from, to) = pair.step(n);
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                thread::sleep(Duration::from_millis(5));
                let edges = pair.out.edges();
                let sent = [(&edges[misfit], counting(&pair.sender, 7.0, 3))];
                from.send_all(sent).expect("sent");
                from.send(&edges[1], counting(&pair.sender, 8.0, 2)).expect("sent");
            });
            let start = Instant::now();
            let into = pair.back.receive(&to).within(SOON).into(given(&pair.receiver, COUNT));
            let error = into.wait().expect_err("a misfit").to_string();
            assert!(start.elapsed() < SOON / 2, "it waited for the others");
            assert!(error.contains(&format!("g/{misfit}'")), "{error}");
            sending.join().expect("no panic");
        });
        // Other edges may take what comes later, and the misfit stays.
        assert_eq!(pair.next(&to, misfit), 7.0);
    }
}

#[test]
fn a_misfit_in_the_middle_stays_and_the_values_of_the_others_are_dropped() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let pair = Pair::new();
    let (from, to) = pair.step(2);
    let sent = (0..COUNT).map(|at| counting(&pair.sender, first_of(2, at), if at == 20 { 3 } else { 2 }));
    pair.out.send(&from, sent).expect("sent");
    let into = pair.back.receive(&to).within(SOON).into(given(&pair.receiver, COUNT));
    let error = into.wait().expect_err("a misfit");
    assert!(matches!(&error, Error::ShapeMismatch { key, .. } if key.contains("g/20'")), "{error}");
    assert_eq!(pair.next(&to, 20), first_of(2, 20));
    pair.none_is_left(&to);
    pair.send(&from, 3);
    let into = pair.back.receive(&to).within(SOON).into(given(&pair.receiver, COUNT));
    let filled = pair.while_the_sender_polls(|| into.wait().expect("received"));
    let came: Vec<_> = filled.iter().map(|filled| contents(&filled.tensor)[0]).collect();
    assert_eq!(came, (0..COUNT).map(|at| first_of(3, at)).collect::<Vec<_>>());
}

/// The values come in three parts. Between the parts another thread uses the poller.
#[test]
fn a_batch_goes_on_in_the_general_way_with_what_it_has() {
    let pair = Pair::new();
    let own = pair.receiver.edge_to("w", 1, "own").expect("an edge");
    for into in [false, true] {
        let n = 2 + u64::from(into);
        let (from, to) = pair.step(n);
        let all = tensors(&pair.sender, n, COUNT);
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                for part in [0..15, 15..16, 16..COUNT] {
                    let edges = pair.out.edges().iter().zip(all.iter().cloned());
                    from.send_all(edges.skip(part.start).take(part.len())).expect("sent");
                    thread::sleep(Duration::from_millis(3));
                    // A command for the receiver's poller.
                    drop(to.receive(&pair.back.edges()[COUNT - 1]).begin());
                    to.send_dead(&own).expect("sent");
                }
            });
            match into {
                false => check(&pair.recv(&pair.back, &to), n),
                true => {
                    let given = given(&pair.receiver, COUNT);
                    let receive = pair.back.receive(&to).within(SOON).into(given);
                    let filled = pair.while_the_sender_polls(|| receive.wait().expect("received"));
                    let came: Vec<_> = filled.iter().map(|filled| contents(&filled.tensor)[0]).collect();
                    assert_eq!(came, (0..COUNT).map(|at| first_of(n, at)).collect::<Vec<_>>());
                }
            }
            sending.join().expect("no panic");
        });
    }
}

#[test]
fn an_abort_here_or_there_ends_a_walk_that_waits() {
    let pair = Pair::new();
    for (n, here) in [(2, true), (3, false)] {
        let (from, to) = pair.step(n);
        from.send_all([(&pair.out.edges()[0], counting(&pair.sender, 1.0, 2))]).expect("sent");
        thread::scope(|scope| {
            let ending = scope.spawn(|| {
                thread::sleep(Duration::from_millis(5));
                let step = if here { &to } else { &from };
                step.abort(Status::new(Code::Internal, "enough")).expect("an error");
            });
            let start = Instant::now();
            let error = pair.back.recv(&to, SOON).expect_err("aborted");
            assert!(start.elapsed() < SOON / 2, "it waited");
            let is_right = if here {
                matches!(error, Error::Aborted { .. })
            } else {
                matches!(error, Error::Remote { .. })
            };
            assert!(is_right, "{error}");
            ending.join().expect("no panic");
        });
    }
    let (from, to) = pair.step(4);
    pair.send(&from, 4);
    check(&pair.recv(&pair.back, &to), 4);
}

#[test]
fn the_loss_of_the_peer_ends_a_walk_that_waits() {
    let pair = Pair::new();
    let (from, to) = pair.step(2);
    from.send_all([(&pair.out.edges()[0], counting(&pair.sender, 1.0, 2))]).expect("sent");
    let Pair { sender, receiver: _receiver, back, .. } = pair;
    thread::scope(|scope| {
        let leaving = scope.spawn(move || {
            thread::sleep(Duration::from_millis(5));
            sender.stop().expect("it stops");
        });
        let start = Instant::now();
        let error = back.recv(&to, SOON).expect_err("the peer is gone");
        assert!(start.elapsed() < SOON / 2, "it waited");
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        leaving.join().expect("no panic");
    });
}

#[test]
fn a_batch_with_one_value_that_cannot_be_sent_sends_none() {
    let pair = Pair::new();
    let (from, to) = pair.step(2);
    let mut edges = pair.out.edges().to_vec();
    edges[COUNT - 1] = pair.sender.edge_from("w", 1, "theirs").expect("an edge");
    let wrong = pair.sender.batch(edges).expect("usable");
    let error = wrong.send(&from, tensors(&pair.sender, 2, COUNT)).expect_err("refused");
    assert!(matches!(&error, Error::WrongEnd { edge, .. } if edge.contains("theirs")), "{error}");
    let error = pair.out.send(&from, tensors(&pair.sender, 2, COUNT - 1)).expect_err("one too few");
    assert!(matches!(error, Error::WrongCount { .. }), "{error}");
    pair.none_is_left(&to);
    pair.send(&from, 3);
    check(&pair.recv(&pair.back, &to), 3);
}
