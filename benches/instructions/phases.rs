//! What is counted: sends and receives between two nodes of this process, of 8 bytes unless the
//! name says otherwise.

use crate::trace::{Executed, install, traced};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tensorwire::{Batch, DType, Edge, Node, Step, Tensor};

const SOON: Duration = Duration::from_secs(30);
/// Tensors before the first that is counted.
const WARM_UP: usize = 200;
/// Tensors that are counted.
const COUNTED: usize = 11;
/// Bytes of a tensor that is lent.
const BORROWED: u64 = 64 << 10;
/// Tensors of a batch.
const BATCH: usize = 8;
/// More values than the window of an edge holds.
const BEYOND_WINDOW: usize = 100;

const BOUNDS: &str = include_str!("bounds.txt");

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: as the system's allocator, which does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A figure: the instructions of one call per tensor, in the median, and the most of the rest that
/// a call executes.
struct Figure {
    name: &'static str,
    executed: Executed,
    allocations: u64,
}

/// The samples of one figure.
struct Samples {
    name: &'static str,
    tensors: u64,
    executed: Vec<Executed>,
    allocations: u64,
}

impl Samples {
    fn new(name: &'static str, tensors: usize) -> Self {
        Samples { name, tensors: tensors as u64, executed: Vec::with_capacity(COUNTED), allocations: 0 }
    }

    fn count<R>(&mut self, body: impl FnOnce() -> R) -> R {
        let before = ALLOCATIONS.get();
        let (result, executed) = traced(body);
        self.allocations = self.allocations.max(ALLOCATIONS.get() - before);
        self.executed.push(executed);
        result
    }

    /// Only the sample with the fewest locked operations, and of those with the fewest
    /// instructions.
    fn best(mut self) -> Self {
        self.executed.sort_unstable_by_key(|executed| (executed.locked, executed.instructions));
        self.executed.truncate(1);
        self
    }

    fn figure(mut self, overhead: u64) -> Figure {
        let Samples { name, tensors, ref mut executed, allocations } = self;
        executed.sort_unstable_by_key(|executed| executed.instructions);
        let most = |count: fn(&Executed) -> u64| executed.iter().map(count).max().unwrap_or(0);
        let figure = Executed {
            instructions: executed[executed.len() / 2].instructions.saturating_sub(overhead) / tensors,
            locked: most(|executed| executed.locked),
            clock: most(|executed| executed.clock),
            hash: most(|executed| executed.hash),
            system_calls: most(|executed| executed.system_calls),
        };
        Figure { name, executed: figure, allocations }
    }
}

/// Two linked nodes, and an edge between them.
struct Pair {
    sender: Node,
    receiver: Node,
}

impl Pair {
    /// Nodes that poll inline, and spin.
    fn inline() -> Pair {
        Pair::with(&[("poll", "inline"), ("wait", "spin")])
    }

    fn with(poll: &'static [(&'static str, &'static str)]) -> Pair {
        let port = || TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let ports = [(); 2].map(|()| port().expect("a free port").port());
        let cluster = format!("w=127.0.0.1:{},127.0.0.1:{}", ports[0], ports[1]);
        let start = |task: u32| {
            let cluster = cluster.clone();
            thread::spawn(move || {
                let settings = [
                    ("cluster", &*cluster),
                    ("pool_size", "64MiB"),
                    ("pool_pages", "plain"),
                    ("pool_lock", "no"),
                    ("join_timeout", "60s"),
                    ("stop_timeout", "300ms"),
                ];
                let mut builder = Node::builder().member("w", task);
                for (key, value) in settings.iter().chain(poll) {
                    builder = builder.set(*key, *value);
                }
                let node = builder.start().expect("a node");
                node.join().expect("the other node");
                node
            })
        };
        let [sender, receiver] = [0, 1].map(start).map(|node| node.join().expect("no panic"));
        Pair { sender, receiver }
    }

    /// Both ends of an edge that the sender knows, and a step.
    fn edge(&self, name: &str, step: u64) -> (Edge, Edge, Step, Step) {
        let out = self.sender.edge_to("w", 1, name).expect("an edge");
        let incoming = self.receiver.edge_from("w", 0, name).expect("an edge");
        let from = self.sender.step(step).expect("a step");
        let to = self.receiver.step(step).expect("a step");
        assert!(to.try_recv(&incoming).expect("a link").is_none());
        self.progress();
        (out, incoming, from, to)
    }

    fn tensor(&self) -> Tensor {
        self.tensor_of(8)
    }

    fn tensor_of(&self, bytes: u64) -> Tensor {
        let mut tensor = self.sender.tensor(DType::U8, &[bytes]).expect("room");
        tensor.bytes_mut().fill(1);
        tensor.freeze()
    }

    fn progress(&self) {
        for _ in 0..20 {
            self.sender.progress().expect("a link");
            self.receiver.progress().expect("a link");
        }
    }
}

/// Runs `round`, and counts its last runs.
fn rounds(mut round: impl FnMut(bool)) {
    (0..WARM_UP + COUNTED).for_each(|at| round(at >= WARM_UP));
}

fn count<R>(counts: bool, samples: &mut Samples, body: impl FnOnce() -> R) -> R {
    if counts { samples.count(body) } else { body() }
}

/// A send, and a receive that finds the value.
fn value_first(pair: &Pair) -> [Samples; 2] {
    let [mut sends, mut receives] =
        [Samples::new("value first, send", 1), Samples::new("value first, receive", 1)];
    let (out, incoming, from, to) = pair.edge("first", 1);
    rounds(|counts| {
        let tensor = pair.tensor();
        count(counts, &mut sends, || from.send(&out, tensor)).expect("sent");
        drop(count(counts, &mut receives, || to.recv(&incoming, SOON)).expect("received"));
        pair.sender.progress().expect("a link");
    });
    [sends, receives]
}

/// A receive into a given tensor, that finds the value.
fn into_given(pair: &Pair) -> Samples {
    let mut receives = Samples::new("value first, into", 1);
    let (out, incoming, from, to) = pair.edge("into", 6);
    let mut given = pair.receiver.tensor(DType::U8, &[8]).ok();
    rounds(|counts| {
        from.send(&out, pair.tensor()).expect("sent");
        let into = given.take().expect("the last receive was right");
        let receive = || to.receive(&incoming).into(into).within(SOON).wait();
        given = Some(count(counts, &mut receives, receive).expect("received").tensor);
        pair.sender.progress().expect("a link");
    });
    receives
}

/// As [`value_first`], of 64 KiB that are lent, and the drop that gives them back.
fn borrowed() -> [Samples; 3] {
    let names = ["borrowed 64 KiB, send", "borrowed 64 KiB, receive", "borrowed 64 KiB, drop"];
    let [mut sends, mut receives, mut drops] = names.map(|name| Samples::new(name, 1));
    let pair = Pair::with(&[("poll", "inline"), ("wait", "spin"), ("bulk_receive", "borrow")]);
    let (out, incoming, from, to) = pair.edge("borrowed", 1);
    rounds(|counts| {
        let tensor = pair.tensor_of(BORROWED);
        count(counts, &mut sends, || from.send(&out, tensor)).expect("sent");
        let received = count(counts, &mut receives, || to.recv(&incoming, SOON)).expect("received");
        assert_eq!(pair.receiver.pool().stats().allocated, 0, "the tensor lies at its sender");
        count(counts, &mut drops, || drop(received));
    });
    [sends, receives, drops]
}

/// As [`value_first`], between nodes that are not told a poll mode, in their steady state. A call
/// that is counted takes as long as a background poller needs to find that calls do not go on. So a
/// thread polls the receiver of a send meanwhile. Each sample has nodes of its own, and the best
/// one counts.
fn auto() -> [Samples; 2] {
    let [mut sends, mut receives] = [Samples::new("auto, send", 1), Samples::new("auto, receive", 1)];
    for at in 0..4 * COUNTED {
        let pair = Pair::with(&[]);
        let (out, incoming, from, to) = pair.edge("auto", 1);
        for _ in 0..10 * WARM_UP {
            from.send(&out, pair.tensor()).expect("sent");
            drop(to.recv(&incoming, SOON).expect("received"));
            pair.sender.progress().expect("a link");
        }
        let tensor = pair.tensor();
        if at % 2 == 0 {
            let is_sent = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !is_sent.load(Ordering::Relaxed) {
                        pair.receiver.progress().expect("a link");
                    }
                });
                sends.count(|| from.send(&out, tensor)).expect("sent");
                is_sent.store(true, Ordering::Relaxed);
            });
        } else {
            from.send(&out, tensor).expect("sent");
            drop(receives.count(|| to.recv(&incoming, SOON)).expect("received"));
        }
    }
    [sends, receives].map(Samples::best)
}

/// Sends over TCP. The record and the bytes of a tensor leave together, also if it is not small.
fn over_tcp() -> [Samples; 2] {
    let pair = Pair::with(&[("fabric", "tcp"), ("poll", "inline"), ("wait", "spin")]);
    let sends = |(name, bytes): (&'static str, u64)| {
        let mut sends = Samples::new(name, 1);
        let (out, incoming, from, to) = pair.edge(name, bytes);
        rounds(|counts| {
            let tensor = pair.tensor_of(bytes);
            count(counts, &mut sends, || from.send(&out, tensor)).expect("sent");
            let pending = to.receive(&incoming).within(SOON).begin().expect("begun");
            // The kernel may bring credit late, and the sender polls for it here alone.
            while !pending.is_done() {
                pair.progress();
            }
            drop(pending.wait().expect("received"));
            pair.progress();
        });
        sends
    };
    OVER_TCP.map(sends)
}

/// Names and bytes of the sends over TCP.
const OVER_TCP: [(&str, u64); 2] = [("tcp, send 8 B", 8), ("tcp, send 32 KiB", 32 << 10)];

/// A receive that begins, and waits after the value was sent.
fn receive_first(pair: &Pair) -> [Samples; 3] {
    let mut begins = Samples::new("receive first, begin", 1);
    let mut sends = Samples::new("receive first, send", 1);
    let mut waits = Samples::new("receive first, wait", 1);
    let (out, incoming, from, to) = pair.edge("asked", 2);
    rounds(|counts| {
        let tensor = pair.tensor();
        let pending = count(counts, &mut begins, || to.receive(&incoming).begin()).expect("begun");
        count(counts, &mut sends, || from.send(&out, tensor)).expect("sent");
        drop(count(counts, &mut waits, || pending.wait()).expect("received"));
        pair.sender.progress().expect("a link");
    });
    [begins, sends, waits]
}

/// As [`value_first`], in turns with a second thread that uses the same two nodes.
fn second_thread(pair: &Pair) -> [Samples; 2] {
    let [mut sends, mut receives] =
        [Samples::new("second thread, send", 1), Samples::new("second thread, receive", 1)];
    let (out, incoming, from, to) = pair.edge("second", 3);
    rounds(|counts| {
        let other = || {
            pair.sender.progress().expect("a link");
            pair.receiver.progress().expect("a link");
        };
        thread::scope(|scope| scope.spawn(other).join()).expect("no panic");
        let tensor = pair.tensor();
        count(counts, &mut sends, || from.send(&out, tensor)).expect("sent");
        drop(count(counts, &mut receives, || to.recv(&incoming, SOON)).expect("received"));
    });
    [sends, receives]
}

/// A send without credit, whose value leaves when credit comes. Counting takes milliseconds, so
/// what follows the clock, such as the look at long waits, falls into some samples: the best one
/// counts.
fn without_credit(pair: &Pair) -> [Samples; 2] {
    let [mut sends, mut receives] =
        [Samples::new("no credit, send", 1), Samples::new("no credit, receive", 1)];
    let (out, incoming, from, to) = pair.edge("narrow", 4);
    rounds(|counts| {
        for _ in 0..BEYOND_WINDOW {
            from.send(&out, pair.tensor()).expect("sent");
        }
        let tensor = pair.tensor();
        count(counts, &mut sends, || from.send(&out, tensor)).expect("sent");
        for _ in 0..BEYOND_WINDOW {
            pair.progress();
            drop(to.recv(&incoming, SOON).expect("received"));
        }
        pair.progress();
        drop(count(counts, &mut receives, || to.recv(&incoming, SOON)).expect("received"));
        pair.progress();
    });
    [sends.best(), receives]
}

/// A batch of many edges, per tensor.
fn batch(pair: &Pair) -> [Samples; 2] {
    let [mut sends, mut receives] =
        [Samples::new("batch, send", BATCH), Samples::new("batch, receive", BATCH)];
    let edges: Vec<_> = (0..BATCH as u64).map(|at| pair.edge(&format!("batch/{at}"), 5)).collect();
    let ends = |end: fn(&(Edge, Edge, Step, Step)) -> Edge| edges.iter().map(end).collect::<Vec<_>>();
    let out = pair.sender.batch(ends(|edge| edge.0.clone())).expect("a batch");
    let incoming: Batch = pair.receiver.batch(ends(|edge| edge.1.clone())).expect("a batch");
    let (from, to) = (edges[0].2.clone(), edges[0].3.clone());
    rounds(|counts| {
        let tensors: Vec<_> = (0..BATCH).map(|_| pair.tensor()).collect();
        count(counts, &mut sends, || out.send(&from, tensors)).expect("sent");
        drop(count(counts, &mut receives, || incoming.receive(&to).within(SOON).wait()).expect("received"));
        pair.progress();
    });
    [sends, receives]
}

/// The begin and the cleanup of a step without values.
fn steps(pair: &Pair) -> [Samples; 2] {
    let [mut begins, mut ends] = [Samples::new("step, begin", 1), Samples::new("step, cleanup", 1)];
    let mut id = 1000;
    rounds(|counts| {
        id += 1;
        let step = count(counts, &mut begins, || pair.sender.step(id)).expect("a step");
        count(counts, &mut ends, || step.cleanup());
    });
    [begins, ends]
}

/// The bound of a figure: its last word in the line that begins with the name.
fn bound(name: &str) -> Option<u64> {
    let line = BOUNDS.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().parse().ok()
}

/// Counts and prints all figures. With `check`, ends the process with status 1 if one is above its
/// bound, or if the short path does what it must not.
pub fn run(check: bool) {
    install().expect("a handler of SIGTRAP");
    let pair = Pair::inline();
    let mut overhead = Samples::new("nothing", 1);
    (0..COUNTED).for_each(|_| overhead.count(|| ()));
    let overhead = overhead.figure(0).executed.instructions;
    let mut all = Vec::new();
    all.extend(value_first(&pair));
    all.push(into_given(&pair));
    all.extend(receive_first(&pair));
    all.extend(second_thread(&pair));
    all.extend(without_credit(&pair));
    all.extend(batch(&pair));
    all.extend(steps(&pair));
    all.extend(auto());
    all.extend(borrowed());
    all.extend(over_tcp());
    println!(
        "{:24} {:>12} {:>6} {:>6} {:>5} {:>5} {:>6}",
        "per tensor", "instructions", "locked", "clock", "hash", "calls", "heap"
    );
    let mut failures = Vec::new();
    for Figure { name, executed, allocations } in all.into_iter().map(|samples| samples.figure(overhead)) {
        let Executed { instructions, locked, clock, hash, system_calls } = executed;
        println!(
            "{name:24} {instructions:12} {locked:6} {clock:6} {hash:5} {system_calls:5} {allocations:6}"
        );
        match bound(name) {
            Some(bound) if instructions <= bound => {}
            Some(bound) => failures.push(format!("{name}: {instructions} instructions, at most {bound}")),
            // It is copied, and a CPU that copies by one instruction traps with each byte.
            None if name == OVER_TCP[1].0 => {}
            None => failures.push(format!("{name} has no bound in bounds.txt")),
        }
        let is_short = ["value first", "auto", "borrowed"].iter().any(|short| name.starts_with(short));
        // Any thread may drop a borrowed tensor, so the count of its lender's users is atomic.
        let may_lock = u64::from(name == "borrowed 64 KiB, drop");
        if is_short && (locked > may_lock || [clock, hash, system_calls, allocations] != [0; 4]) {
            failures.push(format!(
                "{name}: clock, hash, system calls and allocations must be 0, and locked at most {may_lock}"
            ));
        }
        if name.starts_with("tcp") && system_calls != 1 {
            failures.push(format!("{name}: {system_calls} system calls, and one must do"));
        }
    }
    if check && !failures.is_empty() {
        failures.iter().for_each(|failure| eprintln!("{failure}"));
        std::process::exit(1);
    }
}
