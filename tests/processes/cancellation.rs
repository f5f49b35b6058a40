//! Receives that are given up while their values are on the way, between two real processes. Each
//! value is received once and whole, a receive that is alone gets the value that was sent first,
//! and no memory is leaked.

use crate::common::other::Other;
use crate::common::{SOON, cluster, counting, member, over_grpc, run, until, values};
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};
use tensorwire::{Code, Counter, DType, Delivery, Edge, Error, Node, Status, Step, Tensor, TensorMut};

/// Number of values of each kind in each direction.
const VALUES: u32 = 400;

/// Number of steps that end early.
const ENDED_STEPS: u64 = 150;

/// Name, elements, and whether receives give a tensor.
const KINDS: [(&str, usize, bool); 4] =
    [("small", 10, false), ("large", 1000, false), ("into", 2000, true), ("small into", 12, true)];

fn joined(cluster: &str, task: u32, receive: &str) -> Node {
    // Longer than any stop of a peer in these tests.
    let node = member(cluster, task).set("bulk_receive", receive).set("silence_bound", "60s");
    // No other thread polls between a check of a receive and its end.
    let node = node.set("poll", "inline");
    let node = node.start().expect("the node starts");
    node.join().expect("joined");
    node
}

fn other_node() -> Node {
    let of = |name| std::env::var(name).expect("started by a test");
    joined(&of("TEST_CLUSTER"), 1, &of("TEST_RECEIVE"))
}

/// A generator with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    /// A random pause of about the duration of an exchange.
    fn moment(&mut self) -> Duration {
        Duration::from_micros(self.below(300))
    }
}

/// One kind of value in one direction, as this process sees it.
struct Stream {
    to: Edge,
    from: Edge,
    len: usize,
    into: bool,
    sent: u32,
    /// Which values were received.
    came: Vec<bool>,
}

impl Stream {
    fn got(&self) -> u32 {
        self.came.iter().filter(|came| **came).count() as u32
    }

    fn is_complete(&self) -> bool {
        self.came.iter().all(|came| *came)
    }
}

/// One of the two processes.
struct Side<'a> {
    node: &'a Node,
    step: Step,
    random: Random,
    streams: Vec<Stream>,
    /// Number of receives that ended with a value, and without one.
    counts: [u64; 2],
}

impl<'a> Side<'a> {
    fn new(node: &'a Node, seed: u64) -> Self {
        let peer = 1 - node.task().task();
        let streams = KINDS.map(|(name, len, into)| Stream {
            to: node.edge_to("w", peer, name).expect("edge"),
            from: node.edge_from("w", peer, name).expect("edge"),
            len,
            into,
            sent: 0,
            came: vec![false; VALUES as usize],
        });
        let step = node.step(1).expect("new");
        Side { node, step, random: Random(seed), streams: streams.into(), counts: [0; 2] }
    }

    /// Sends and receives all values.
    fn run(&mut self) {
        let end = Instant::now() + 5 * SOON;
        while self.streams.iter().any(|stream| stream.sent < VALUES || !stream.is_complete()) {
            assert!(
                Instant::now() < end,
                "{:?}",
                self.streams.iter().map(|s| (s.sent, s.got())).collect::<Vec<_>>()
            );
            for _ in 0..self.random.below(4) {
                self.send();
            }
            let at = self.random.below(KINDS.len() as u64) as usize;
            match self.streams[at].is_complete() {
                false => self.receive(at),
                true => self.some_progress(),
            }
        }
    }

    fn send(&mut self) {
        let at = self.random.below(KINDS.len() as u64) as usize;
        let stream = &mut self.streams[at];
        if stream.sent == VALUES || self.node.pool().stats().free < 4 << 20 {
            return;
        }
        let tensor = counting(self.node, stream.sent as f32, stream.len);
        self.step.send(&stream.to, tensor).expect("sent");
        stream.sent += 1;
    }

    fn receive(&mut self, at: usize) {
        match self.random.below(6) {
            0 => {
                let timeout = self.random.moment();
                let got = self.step.recv(&self.streams[at].from, timeout);
                self.ended_with(at, got.map(|got| got.tensor));
            }
            1 => self.drop_one(at),
            2 => self.wait_a_moment(at, 1),
            3 => self.cancel_one(at),
            4 => self.wait_a_moment(at, 3),
            _ => self.shape_mismatch_one(at),
        }
    }

    fn given(&self, at: usize) -> TensorMut {
        self.node.tensor(DType::F32, &[self.streams[at].len as u64]).expect("room")
    }

    fn some_progress(&mut self) {
        for _ in 0..self.random.below(30) {
            self.node.progress().expect("both are there");
        }
    }

    /// Ends a receive without waiting. If it is done, its value is checked.
    fn drop_one(&mut self, at: usize) {
        if over_grpc() {
            // Calls bring values on another thread. One that comes before the drop is lost by it.
            return self.cancel_one(at);
        }
        let from = self.streams[at].from.clone();
        if self.streams[at].into {
            let pending = self.step.receive(&from).into(self.given(at)).begin().expect("begun");
            self.some_progress();
            if pending.is_done() {
                self.ended_with(at, pending.wait().map(|got| got.tensor.freeze()));
            }
        } else {
            let pending = self.step.receive(&from).begin().expect("begun");
            self.some_progress();
            if pending.is_done() {
                self.ended_with(at, pending.wait().map(|got| got.tensor));
            }
        }
    }

    /// Several receives at a time. Each waits for a moment and gives up.
    fn wait_a_moment(&mut self, at: usize, count: usize) {
        let from = self.streams[at].from.clone();
        if self.streams[at].into {
            let begun: Vec<_> = (0..count)
                .map(|_| self.step.receive(&from).into(self.given(at)).begin().expect("begun"))
                .collect();
            for pending in begun {
                let got = pending.wait_timeout(self.random.moment());
                self.ended(at, got.map(|got| got.tensor.freeze()), count == 1);
            }
            return;
        }
        let begun: Vec<_> = (0..count).map(|_| self.step.receive(&from).begin().expect("begun")).collect();
        for pending in begun {
            let got = pending.wait_timeout(self.random.moment());
            self.ended(at, got.map(|got| got.tensor), count == 1);
        }
    }

    fn cancel_one(&mut self, at: usize) {
        let (tell, told) = mpsc::channel::<Result<Delivery<Tensor>, Error>>();
        let done = move |result| tell.send(result).expect("somebody waits");
        let token = self.step.receive(&self.streams[at].from).within(SOON).then(done).expect("begun");
        self.some_progress();
        token.cancel();
        let result = loop {
            match told.try_recv() {
                Ok(result) => break result,
                Err(TryRecvError::Empty) => self.node.progress().expect("both are there"),
                Err(TryRecvError::Disconnected) => panic!("the callback was never called"),
            };
        };
        assert!(told.recv().is_err(), "it is called once");
        self.ended_with(at, result.map(|got| got.tensor));
    }

    /// A tensor of another shape than the value.
    fn shape_mismatch_one(&mut self, at: usize) {
        let given = self.node.tensor(DType::F32, &[3]).expect("room");
        let pending = self.step.receive(&self.streams[at].from).into(given).begin().expect("begun");
        match pending.wait_timeout(self.random.moment()) {
            Err(Error::ShapeMismatch { .. }) => self.counts[1] += 1,
            other => self.ended_with(at, other.map(|got| got.tensor.freeze())),
        }
    }

    /// Notes the end of a receive that was alone on its edge.
    fn ended_with(&mut self, at: usize, result: Result<Tensor, Error>) {
        self.ended(at, result, true);
    }

    /// Notes the end of a receive. Among several, the value of a receive that gives up goes to the
    /// next receive, so it may come late. A receive that is alone gets the value that was sent
    /// first.
    fn ended(&mut self, at: usize, result: Result<Tensor, Error>, alone: bool) {
        match result {
            Ok(tensor) => {
                let stream = &mut self.streams[at];
                let number = number_of(&tensor, stream.len) as usize;
                assert!(!std::mem::replace(&mut stream.came[number], true), "value {number} came twice");
                let earlier = stream.came[..number].iter().position(|came| !came);
                assert!(!alone || earlier.is_none(), "{number} came before {earlier:?}");
                self.counts[0] += 1;
            }
            Err(Error::Cancelled { .. } | Error::DeadlineExceeded { .. }) => self.counts[1] += 1,
            Err(error) => panic!("{error}"),
        }
    }

    /// Aborts or cleans up steps while their values are on the way.
    fn end_steps(&mut self) {
        for id in 100..100 + ENDED_STEPS {
            let step = self.node.step(id).expect("new");
            let at = self.random.below(KINDS.len() as u64) as usize;
            let len = self.streams[at].len;
            for number in 0..3 {
                step.send(&self.streams[at].to, counting(self.node, number as f32, len)).expect("sent");
            }
            let begun: Vec<_> =
                (0..2).map(|_| step.receive(&self.streams[at].from).begin().expect("begun")).collect();
            self.some_progress();
            match self.random.below(3) {
                0 => step.abort(Status::new(Code::Internal, "on purpose")).expect("an error"),
                1 => self.node.cleanup(id),
                _ => {}
            }
            let mut last = None;
            for pending in begun {
                match pending.wait_timeout(Duration::from_millis(2)) {
                    Ok(delivery) => {
                        let number = number_of(&delivery.tensor, len);
                        assert!(last < Some(number) && number < 3, "{number} came after {last:?}");
                        last = Some(number);
                    }
                    Err(
                        Error::Aborted { .. }
                        | Error::StepGone { .. }
                        | Error::Remote { .. }
                        | Error::DeadlineExceeded { .. },
                    ) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            self.node.cleanup(id);
        }
    }

    /// Waits until both sides have all values, then counts leftovers.
    fn finish(&mut self) {
        let peer = 1 - self.node.task().task();
        let bye = self.node.edge_to("w", peer, "bye").expect("edge");
        self.step.send(&bye, counting(self.node, 0.0, 1)).expect("sent");
        let bye = self.node.edge_from("w", peer, "bye").expect("edge");
        self.step.recv(&bye, 5 * SOON).expect("the peer has everything too");
        for stream in &self.streams {
            let more = self.step.recv(&stream.from, Duration::from_millis(5));
            // The error is this side's or, if this side was late, the sender's.
            let nothing = more.as_ref().is_err_and(|error| error.code() == Code::DeadlineExceeded);
            assert!(nothing, "a value came twice, or: {more:?}");
        }
        until(self.node, "the end of every tensor", || self.node.pool().is_empty());
        let [with, without] = self.counts;
        println!("{with} receives ended with a value and {without} without");
        assert!(without > 100, "few were given up");
    }
}

/// The number of a value, whose bytes must be whole.
fn number_of(tensor: &Tensor, len: usize) -> u32 {
    let got = values(tensor);
    assert_eq!(got.len(), len);
    let number = got[0] as u32;
    assert!(
        got.iter().enumerate().all(|(at, value)| *value == (number as usize + at) as f32),
        "{number}: {:?}",
        &got[..3]
    );
    number
}

fn everything(node: &Node, seed: u64) {
    let mut side = Side::new(node, seed);
    side.run();
    side.end_steps();
    side.finish();
}

#[test]
#[ignore = "a role, not a test"]
fn role_traffic() {
    let node = other_node();
    everything(&node, 0x2545_f491_4f6c_dd1d);
    println!("tidy");
    loop {
        let _ = node.progress();
    }
}

/// Runs in both processes at the same time.
fn races(receive: &str) {
    let cluster = cluster(2);
    let mut other = Other::start_with("cancellation::role_traffic", &cluster, &[("TEST_RECEIVE", receive)]);
    let node = joined(&cluster, 0, receive);
    everything(&node, 0x9e37_79b9_7f4a_7c15);
    let (tell, told) = mpsc::channel();
    let waiting = std::thread::spawn(move || {
        other.wait_for("tidy");
        tell.send(()).expect("somebody waits");
        other
    });
    // Serves the peer, which may still need this side.
    while matches!(told.try_recv(), Err(TryRecvError::Empty)) {
        let _ = node.progress();
    }
    waiting.join().expect("the peer is tidy too");
}

#[test]
fn each_value_arrives_once_and_in_order_whatever_is_given_up() {
    races("copy");
}

#[test]
fn each_value_is_borrowed_once_and_in_order_whatever_is_given_up() {
    races("borrow");
}

#[test]
#[ignore = "a role, not a test"]
fn role_sends_once() {
    let node = other_node();
    let step = node.step(0).expect("new");
    step.send(&node.edge_to("w", 0, "x").expect("edge"), counting(&node, 0.0, 1000)).expect("sent");
    loop {
        let _ = node.progress();
    }
}

/// Timeout of a receive from a stopped peer.
const STOPPED_TIMEOUT: Duration = Duration::from_millis(50);

#[test]
fn a_receive_from_a_stopped_peer_gives_up_at_its_deadline() {
    let cluster = cluster(2);
    let other = Other::start_with("cancellation::role_sends_once", &cluster, &[("TEST_RECEIVE", "copy")]);
    let node = joined(&cluster, 0, "copy");
    let step = node.step(0).expect("new");
    let edge = node.edge_from("w", 1, "x").expect("edge");
    step.recv(&edge, SOON).expect("the peer is there");
    until(&node, "the end of the tensor", || node.pool().is_empty());
    other.suspend();
    let given = node.tensor(DType::F32, &[1000]).expect("room");
    let begun = Instant::now();
    let pending = step.receive(&edge).into(given).begin().expect("begun");
    let error = pending.wait_timeout(STOPPED_TIMEOUT).map(|_| ()).expect_err("the peer is stopped");
    let took = begun.elapsed();
    println!("the receive ended after {took:?}");
    assert!(matches!(error, Error::DeadlineExceeded { after, .. } if after == STOPPED_TIMEOUT), "{error}");
    assert!(took >= STOPPED_TIMEOUT && took < SOON, "{took:?}");
    // Nothing was offered, so the peer can't write there.
    assert!(node.pool().is_empty(), "the destination is free at once");
    other.signal("CONT");
    let late = step.recv(&edge, STOPPED_TIMEOUT);
    assert!(matches!(late, Err(Error::DeadlineExceeded { .. })), "nothing was sent: {late:?}");
}

#[test]
fn a_value_that_does_not_fit_goes_to_the_receive_that_waits_already() {
    run(2, &[], |node, task| {
        for (id, len) in [10, 1000].into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                let edge = node.edge_to("w", 1, "x").expect("edge");
                // Both receives have begun.
                step.recv(&node.edge_from("w", 1, "go").expect("edge"), SOON).expect("both wait");
                step.send(&edge, counting(node, 7.0, len)).expect("sent");
                continue;
            }
            let edge = node.edge_from("w", 0, "x").expect("edge");
            let (small, right) = (node.tensor(DType::F32, &[3]), node.tensor(DType::F32, &[len as u64]));
            let first = step.receive(&edge).into(small.expect("room")).begin().expect("begun");
            let second = step.receive(&edge).into(right.expect("room")).begin().expect("begun");
            step.send_dead(&node.edge_to("w", 0, "go").expect("edge")).expect("sent");
            assert!(matches!(first.wait(), Err(Error::ShapeMismatch { .. })));
            let got = second.wait_timeout(SOON / 2).expect("the value that did not fit the first").tensor;
            assert_eq!(got.as_slice::<f32>().expect("f32")[0], 7.0);
        }
    });
}

#[test]
fn a_receive_that_has_waited_while_thousands_came_and_went_can_be_cancelled() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let edge = node.edge_to("w", 1, "x").expect("edge");
            for number in 0..5000 {
                step.send(&edge, counting(node, number as f32, 1)).expect("sent");
                if number % 100 == 0 {
                    until(node, "the receiver", || node.counters().get(Counter::TensorsSent) + 100 > number);
                }
            }
            return;
        }
        let (tell, told) = mpsc::channel();
        let never = node.edge_from("w", 0, "never").expect("edge");
        let token = step.receive(&never).within(SOON).then(move |result| tell.send(result).expect("open"));
        let edge = node.edge_from("w", 0, "x").expect("edge");
        for _ in 0..50 {
            let begun: Vec<_> = (0..100).map(|_| step.receive(&edge).begin().expect("begun")).collect();
            begun.into_iter().for_each(|pending| drop(pending.wait().expect("received")));
        }
        token.expect("begun").cancel();
        let result = std::cell::OnceCell::new();
        until(node, "the end of the receive", || {
            told.try_recv().is_ok_and(|ended| result.set(ended).is_ok())
        });
        assert!(matches!(result.get(), Some(Err(Error::Cancelled { .. }))), "{result:?}");
    });
}
