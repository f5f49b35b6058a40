//! The round trip of a small tensor over shared memory, alone and beside links over another fabric:
//! an idle one, and one under load. One poller drives all links of a member.
//!
//! ```text
//! cargo bench --bench several_fabrics             # beside links over TCP
//! cargo bench --bench several_fabrics -- verbs    # beside links over an RDMA device
//! ```
//!
//! The members are threads of this process. Run it with a CPU for each of the two that exchange;
//! the third sleeps between its sends.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tensorwire::{DType, Node, Sequence};

const ROUNDS: u64 = 40_000;
const WARM_UP: u64 = 4_000;
/// The load: a tensor of so many bytes in each pause.
const PAUSE: Duration = Duration::from_micros(200);
const SOON: Duration = Duration::from_secs(20);

fn main() {
    let other = std::env::args().skip(1).find(|word| word != "--bench").unwrap_or_else(|| "tcp".into());
    println!("round trip of 8 bytes over shared memory, {ROUNDS} times");
    let cases: [(String, u32, Option<u64>); 5] = [
        ("shm alone, no other fabric open".into(), 2, None),
        (format!("shm, {other} open without links"), 2, None),
        (format!("beside an idle link over {other}"), 3, None),
        (format!("beside 4 KiB each 200 us over {other}"), 3, Some(4 << 10)),
        (format!("beside 256 KiB each 200 us over {other}"), 3, Some(256 << 10)),
    ];
    for round in 0..2 {
        for (number, (name, members, load)) in cases.iter().enumerate() {
            let figures = measure(&other, number, *members, *load);
            if round > 0 {
                println!("{name:40} {figures}");
            }
        }
    }
}

fn start(cluster: &str, task: u32, fabric: &str) -> Node {
    let node = Node::builder().without_environment().member("w", task).set("cluster", cluster);
    let node = node.set("pool_size", "64MiB").set("pool_lock", "no").set("fabric", fabric);
    // Who loads the others sleeps in between.
    let node = if task == 2 { node } else { node.set("poll", "inline").set("wait", "spin") };
    node.start().expect("it starts")
}

fn measure(other: &str, case: usize, members: u32, load: Option<u64>) -> String {
    let both = format!("shm,{other}");
    let of = |task: u32| match (case, task) {
        (0, _) => "shm",
        (_, 0 | 1) => &both,
        _ => other,
    };
    let sockets: Vec<_> = (0..members).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    let address = |socket: &TcpListener| socket.local_addr().expect("bound").to_string();
    let cluster = format!("w={}", sockets.iter().map(address).collect::<Vec<_>>().join(","));
    drop(sockets);
    let (is_over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for task in 1..members {
            let (cluster, is_over, sent, fabric) = (&cluster, &is_over, &sent, of(task));
            scope.spawn(move || {
                let node = start(cluster, task, fabric);
                node.join().expect("all come");
                let sequence = node.sequence(1 << 40);
                match (task, load) {
                    (1, _) => echo(&node, sequence),
                    (_, Some(bytes)) => send_until(&node, bytes, is_over, sent),
                    (_, None) => {
                        while !is_over.load(Ordering::Relaxed) {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                }
                node.stop().expect("it stops");
            });
        }
        let node = start(&cluster, 0, of(0));
        node.join().expect("all come");
        let began = Instant::now();
        let mut times = exchange(&node, node.sequence(1 << 40), load.is_some());
        let took = began.elapsed();
        is_over.store(true, Ordering::Relaxed);
        node.stop().expect("it stops");
        times.sort_unstable();
        let at = |share: f64| Duration::from_nanos(times[(times.len() as f64 * share) as usize]);
        let per_second = sent.load(Ordering::Relaxed) as f64 / took.as_secs_f64();
        format!("p50 {:>8.2?}  p99 {:>8.2?}  load {per_second:>6.0} tensors/s", at(0.5), at(0.99))
    })
}

/// Round trips; between them the values of the load are taken as they come.
fn exchange(node: &Node, sequence: Sequence, has_load: bool) -> Vec<u64> {
    let (to, from) =
        (node.edge_to("w", 1, "ping").expect("edge"), node.edge_from("w", 1, "pong").expect("edge"));
    let loads = node.sequence(1 << 50);
    let receive = |n: u64| {
        let load = node.edge_from("w", 2, "load").expect("edge");
        node.step(loads.step(n)).and_then(|step| step.receive(&load).begin()).expect("begun")
    };
    let mut pending = has_load.then(|| receive(0));
    let (mut times, mut loaded) = (Vec::with_capacity(ROUNDS as usize), 0);
    for n in 0..WARM_UP + ROUNDS {
        let step = node.step(sequence.step(n)).expect("new");
        let tensor = node.tensor(DType::U8, &[8]).expect("room").freeze();
        let began = Instant::now();
        step.send(&to, tensor).expect("sent");
        step.recv(&from, SOON).expect("received");
        if n >= WARM_UP {
            times.push(began.elapsed().as_nanos() as u64);
        }
        if n > 0 {
            node.cleanup(sequence.step(n - 1));
        }
        if pending.as_ref().is_some_and(|pending| pending.is_done()) {
            node.cleanup(loads.step(loaded));
            loaded += 1;
            pending = Some(receive(loaded));
        }
    }
    times
}

fn echo(node: &Node, sequence: Sequence) {
    let (from, to) =
        (node.edge_from("w", 0, "ping").expect("edge"), node.edge_to("w", 0, "pong").expect("edge"));
    for n in 0..WARM_UP + ROUNDS {
        let step = node.step(sequence.step(n)).expect("new");
        let got = step.recv(&from, SOON).expect("received");
        step.send(&to, got.tensor).expect("sent");
        if n > 0 {
            node.cleanup(sequence.step(n - 1));
        }
    }
}

fn send_until(node: &Node, bytes: u64, is_over: &AtomicBool, sent: &AtomicU64) {
    let edge = node.edge_to("w", 0, "load").expect("edge");
    let loads = node.sequence(1 << 50);
    for n in 0.. {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let tensor = node.tensor(DType::U8, &[bytes]);
        if let (Ok(step), Ok(tensor)) = (node.step(loads.step(n)), tensor)
            && step.send(&edge, tensor.freeze()).is_ok()
        {
            sent.fetch_add(1, Ordering::Relaxed);
        }
        std::thread::sleep(PAUSE);
    }
}
