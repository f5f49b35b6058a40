//! The round trip of a small tensor over a fast fabric, alone and beside links over another fabric:
//! an idle one, and one under load. One poller drives all links of a member.
//!
//! ```text
//! cargo bench --bench several_fabrics                 # shared memory beside TCP
//! cargo bench --bench several_fabrics -- verbs        # shared memory beside an RDMA device
//! cargo bench --bench several_fabrics -- tcp verbs    # an RDMA device beside TCP
//! ```
//!
//! The members are threads of this process. Run it with a CPU for each of the two that exchange.
//! The third sleeps between its sends, and takes a CPU too in the last case, which has no pauses.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tensorwire::{DType, Node, Sequence};

/// Turns of all cases. One more, before them, is not counted.
const TURNS: usize = 5;
const ROUNDS: u64 = 1_000_000;
const WARM_UP: u64 = 4_000;
/// Between two tensors of the load.
const PAUSE: Duration = Duration::from_micros(200);
/// A load without an end: the fabric always has something to carry.
const LARGE: u64 = 8 << 20;
const SOON: Duration = Duration::from_secs(20);

/// Of one run of a case.
struct Figures {
    p50: Duration,
    p99: Duration,
    /// Tensors of the load that have arrived in a second.
    loads: f64,
}

fn main() {
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    let other = words.next().unwrap_or_else(|| "tcp".into());
    let fast = words.next().unwrap_or_else(|| "shm".into());
    println!("round trip of 8 bytes over {fast}, {ROUNDS} times");
    let cases: [(String, u32, Option<u64>); 6] = [
        (format!("{fast} alone, no other fabric open"), 2, None),
        (format!("{fast}, {other} open without links"), 2, None),
        (format!("beside an idle link over {other}"), 3, None),
        (format!("beside 4 KiB each 200 us over {other}"), 3, Some(4 << 10)),
        (format!("beside 256 KiB each 200 us over {other}"), 3, Some(256 << 10)),
        (format!("beside 8 MiB without a pause over {other}"), 3, Some(LARGE)),
    ];
    let mut found: [Vec<Figures>; 6] = Default::default();
    for turn in 0..=TURNS {
        for (number, (_, members, load)) in cases.iter().enumerate() {
            let figures = measure([&fast, &other], number, *members, *load);
            if turn > 0 {
                found[number].push(figures);
            }
        }
    }
    println!("medians of {TURNS} turns, with the least and the most");
    for ((name, ..), figures) in cases.iter().zip(&mut found) {
        let p50 = spread(figures, |it| it.p50, |time| format!("{time:.2?}"));
        let p99 = spread(figures, |it| it.p99, |time| format!("{time:.2?}"));
        let loads = spread(figures, |it| it.loads as u64, |loads| loads.to_string());
        println!("{name:42} p50 {p50:30} p99 {p99:30} load {loads} tensors/s");
    }
}

/// The median of a figure, with the least and the most.
fn spread<T: Ord + Copy>(
    figures: &mut [Figures],
    of: impl Fn(&Figures) -> T,
    text: impl Fn(T) -> String,
) -> String {
    figures.sort_by_key(|figures| of(figures));
    let at = |place: usize| text(of(&figures[place]));
    format!("{} ({} to {})", at(figures.len() / 2), at(0), at(figures.len() - 1))
}

fn start(cluster: &str, task: u32, fabric: &str) -> Node {
    let node = Node::builder().without_environment().member("w", task).set("cluster", cluster);
    let node = node.set("pool_size", "64MiB").set("pool_lock", "no").set("fabric", fabric);
    // Who loads the others sleeps in between.
    let node = if task == 2 { node } else { node.set("poll", "inline").set("wait", "spin") };
    node.start().expect("it starts")
}

fn measure([fast, other]: [&str; 2], case: usize, members: u32, load: Option<u64>) -> Figures {
    let both = format!("{fast},{other}");
    let of = |task: u32| match (case, task) {
        (0, _) => fast,
        (_, 0 | 1) => &both,
        _ => other,
    };
    let sockets: Vec<_> = (0..members).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    let address = |socket: &TcpListener| socket.local_addr().expect("bound").to_string();
    let cluster = format!("w={}", sockets.iter().map(address).collect::<Vec<_>>().join(","));
    drop(sockets);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for task in 1..members {
            let (cluster, is_over, fabric) = (&cluster, &is_over, of(task));
            scope.spawn(move || {
                let node = start(cluster, task, fabric);
                node.join().expect("all come");
                let sequence = node.sequence(1 << 40);
                match (task, load) {
                    (1, _) => echo(&node, sequence),
                    (_, Some(bytes)) => send_until(&node, bytes, is_over),
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
        let (mut times, loads) = exchange(&node, node.sequence(1 << 40), load.is_some());
        let took = began.elapsed();
        is_over.store(true, Ordering::Relaxed);
        node.stop().expect("it stops");
        times.sort_unstable();
        let at = |share: f64| Duration::from_nanos(times[(times.len() as f64 * share) as usize]);
        Figures { p50: at(0.5), p99: at(0.99), loads: loads as f64 / took.as_secs_f64() }
    })
}

/// The nanoseconds of the round trips, and the number of tensors of the load. They are taken
/// between round trips, as they come.
fn exchange(node: &Node, sequence: Sequence, has_load: bool) -> (Vec<u64>, u64) {
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
    (times, loaded)
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

fn send_until(node: &Node, bytes: u64, is_over: &AtomicBool) {
    let edge = node.edge_to("w", 0, "load").expect("edge");
    let loads = node.sequence(1 << 50);
    for n in 0.. {
        // The pool is full while the receiver is slower.
        let mut room = None;
        while room.is_none() {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            room = node.tensor_within(DType::U8, &[bytes], Duration::from_millis(1)).ok();
        }
        let tensor = room.expect("found").freeze();
        let sent = node.step(loads.step(n)).map(|step| step.send(&edge, tensor));
        if !matches!(sent, Ok(Ok(()))) {
            return assert!(is_over.load(Ordering::Relaxed), "the load ends before the round trips");
        }
        if bytes < LARGE {
            std::thread::sleep(PAUSE);
        }
    }
}
