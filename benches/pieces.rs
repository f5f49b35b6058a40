//! The cost of the pieces of a transfer: `cargo bench --bench pieces`.
//!
//! Each figure is the median of 25 batches, in nanoseconds per operation. Beside it stands a
//! minimal operation of the same kind from elsewhere, because absolute figures of a busy machine
//! vary.

use std::hint::black_box;
use std::net::TcpListener;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use tensorwire::internals::memory::{PoolOptions, Region, RegionOptions};
use tensorwire::internals::wire::message::{Message, RecordValue};
use tensorwire::internals::wire::{EdgeId, Grant, Immediate, RendezvousKey, Slot};
use tensorwire::{DType, Node, Pool, Shape, TensorMeta};

const BATCHES: usize = 25;
const PER_BATCH: u32 = 20_000;

/// Median nanoseconds of one call of `work`.
fn median_ns(mut work: impl FnMut()) -> f64 {
    let mut batches: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..PER_BATCH {
                work();
            }
            start.elapsed().as_nanos() as f64 / f64::from(PER_BATCH)
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    batches[BATCHES / 2]
}

fn row(name: &str, ours: f64, other: &str, theirs: f64) {
    println!("{name:<44} {ours:>8.1} ns   {other:<32} {theirs:>8.1} ns   ratio {:.2}", ours / theirs);
}

fn main() {
    tensors();
    copies();
    keys();
    messages();
    let nodes = nodes();
    steps(&nodes);
    values(&nodes);
}

fn tensors() {
    let region = Region::create(0, &RegionOptions::new(64 << 20)).expect("64 MiB");
    let pool = Pool::new(region, PoolOptions::default()).expect("a pool");
    for bytes in [64u64, 4096, 1 << 20] {
        let meta = TensorMeta::new(DType::U8, Shape::new(&[bytes]).expect("shape")).expect("meta");
        let ours = median_ns(|| drop(black_box(pool.tensor(meta.clone()).expect("memory").freeze())));
        let theirs = median_ns(|| drop(black_box(Vec::<u8>::with_capacity(bytes as usize))));
        row(&format!("tensor of {bytes} B: make, freeze, drop"), ours, "Vec: make, drop", theirs);
    }
    let meta = TensorMeta::new(DType::U8, Shape::new(&[64]).expect("shape")).expect("meta");
    let tensor = pool.tensor(meta).expect("memory").freeze();
    let shared = Arc::new([0u8; 64]);
    let ours = median_ns(|| drop(black_box(tensor.clone())));
    let theirs = median_ns(|| drop(black_box(shared.clone())));
    row("tensor: clone, drop", ours, "Arc: clone, drop", theirs);
    for bytes in [64u64, 4096] {
        let meta = TensorMeta::new(DType::U8, Shape::new(&[bytes]).expect("shape")).expect("meta");
        let ours = handed_over_ns(|| pool.tensor(meta.clone()).expect("memory").freeze());
        let theirs = handed_over_ns(|| Vec::<u8>::with_capacity(bytes as usize));
        row(&format!("tensor of {bytes} B: make, drop elsewhere"), ours, "Vec: make, drop elsewhere", theirs);
    }
}

/// Copies to 16 bytes behind the source, modulo a page, which are slow on some CPUs.
fn copies() {
    const LEN: usize = 64 << 10;
    let region = Region::create(0, &RegionOptions::new(1 << 20)).expect("1 MiB");
    let pool = Pool::new(region, PoolOptions::default()).expect("a pool");
    let meta = TensorMeta::new(DType::U8, Shape::new(&[LEN as u64]).expect("shape")).expect("meta");
    let mut tensor = pool.tensor(meta).expect("memory");
    let memory = vec![1u8; LEN + 4096];
    for distance in [0, 16] {
        let start = tensor.as_ptr().addr().wrapping_sub(memory.as_ptr().addr() + distance) % 4096;
        let source = &memory[start..][..LEN];
        let ours = median_ns(|| black_box(&mut tensor).fill_from(black_box(source)).expect("as long"));
        let theirs = median_ns(|| black_box(tensor.bytes_mut()).copy_from_slice(black_box(source)));
        let name = format!("copy of {LEN} B to {distance} B behind the source");
        row(&name, ours, "memcpy", theirs);
    }
}

/// Median nanoseconds to make a value on this thread and to drop it on another one. The other
/// thread drops while this one waits, so that the figure does not depend on free CPUs.
fn handed_over_ns<T: Send>(make: impl Fn() -> T) -> f64 {
    const HANDED: usize = 200;
    let (send, receive) = mpsc::sync_channel::<Vec<T>>(1);
    let (send_back, receive_back) = mpsc::sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(move || {
            for mut values in receive {
                let start = Instant::now();
                values.clear();
                send_back.send((start.elapsed(), values)).expect("the other thread waits");
            }
        });
        let mut values = Vec::with_capacity(HANDED);
        let mut batches: Vec<f64> = (0..BATCHES)
            .map(|_| {
                let mut spent = Duration::ZERO;
                for _ in 0..PER_BATCH as usize / HANDED {
                    let start = Instant::now();
                    values.extend((0..HANDED).map(|_| make()));
                    spent += start.elapsed();
                    send.send(std::mem::take(&mut values)).expect("the other thread waits");
                    let (dropped, back) = receive_back.recv().expect("the other thread waits");
                    values = back;
                    spent += dropped;
                }
                spent.as_nanos() as f64 / f64::from(PER_BATCH)
            })
            .collect();
        drop(send);
        batches.sort_by(f64::total_cmp);
        batches[BATCHES / 2]
    })
}

fn keys() {
    let key = "/job:worker/replica:0/task:1/device:CPU:0;0000000000000b5c;\
               /job:ps/replica:0/task:0/device:CPU:0;grad/w1;0:0";
    let ours = median_ns(|| {
        black_box(RendezvousKey::parse(black_box(key)).expect("a key"));
    });
    let theirs = median_ns(|| {
        black_box(std::str::from_utf8(black_box(key.as_bytes())).expect("text"));
    });
    row("rendezvous key: parse", ours, "check that it is UTF-8", theirs);
}

fn messages() {
    let edge = EdgeId { number: 7, generation: 3 };
    let immediate = Immediate { generation: 3, slot: Slot::new(7).expect("20 bits") };
    let grant = Message::Grant {
        offer: 1,
        immediate,
        target: Grant { region: 0, key: 9, offset: 4096, len: 1 << 20 },
    };
    let value = RecordValue::Bytes { meta: 1, data: &[7; 32] };
    let record = Message::Record { edge, n: 1, step: 1000, answers_need: false, checksum: None, value };
    for (name, message) in [("grant", &grant), ("record of 32 B", &record)] {
        let mut bytes = Vec::with_capacity(256);
        let ours = median_ns(|| {
            bytes.clear();
            black_box(message).encode(&mut bytes);
            black_box(Message::decode(&bytes).expect("own message"));
        });
        let (from, mut to) = (vec![1u8; bytes.len()], vec![0u8; bytes.len()]);
        let theirs = median_ns(|| {
            to.copy_from_slice(black_box(&from));
            black_box(&mut to);
        });
        row(&format!("{name}: write, read"), ours, "copy of its bytes", theirs);
    }
}

/// Two nodes that this thread drives.
fn nodes() -> [Node; 2] {
    let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let [a, b] = ports.map(|port| port.local_addr().expect("an address"));
    let cluster = format!("w={a},{b}");
    let start = |task: u32| {
        let cluster = cluster.clone();
        thread::spawn(move || {
            let builder = Node::builder().without_environment().member("w", task).set("cluster", cluster);
            let builder = builder.set("pool_size", "64MiB").set("pool_pages", "plain").set("poll", "inline");
            let node = builder.start().expect("a node");
            node.join().expect("the other node");
            node
        })
    };
    [0, 1].map(start).map(|node| node.join().expect("no panic"))
}

/// A step without values.
fn steps([node, _]: &[Node; 2]) {
    let mut id = 0;
    let ours = median_ns(|| {
        id += 1;
        black_box(node.step(id).expect("a step")).cleanup();
    });
    let shared = Arc::new(0);
    let theirs = median_ns(|| drop(black_box(shared.clone())));
    row("step: begin, clean up, drop", ours, "Arc: clone, drop", theirs);
}

/// Tensors from one node to the other. No cache line moves, as one thread does all the work.
fn values([from, to]: &[Node; 2]) {
    const SOON: Duration = Duration::from_secs(20);
    let (sends, receives) = (from.step(0).expect("a step"), to.step(0).expect("a step"));
    let out = from.edge_to("w", 1, "x").expect("an edge");
    let incoming = to.edge_from("w", 0, "x").expect("an edge");
    let tensor = || from.tensor(DType::U8, &[8]).expect("memory").freeze();
    thread::scope(|scope| {
        let first = scope.spawn(|| receives.recv(&incoming, SOON).map(drop));
        sends.send(&out, tensor()).expect("sent");
        while !first.is_finished() {
            from.progress().expect("a link");
        }
        first.join().expect("no panic").expect("received");
    });
    let (send, receive) = mpsc::channel();
    let theirs = median_ns(|| {
        send.send(Box::new(0u64)).expect("the receiver is there");
        drop(black_box(receive.recv().expect("it was sent")));
    });
    let ours = median_ns(|| {
        sends.send(&out, tensor()).expect("sent");
        drop(black_box(receives.recv(&incoming, SOON).expect("received")));
    });
    row("tensor of 8 B: make, send, receive, drop", ours, "mpsc: box, send, receive, drop", theirs);
    let ours = median_ns(|| {
        let pending = receives.receive(&incoming).begin().expect("begun");
        sends.send(&out, tensor()).expect("sent");
        drop(black_box(pending.wait().expect("received")));
    });
    row("the same, with the receive begun first", ours, "mpsc: box, send, receive, drop", theirs);
}
