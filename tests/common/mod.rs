//! Clusters in one process: each member is a node with a thread of its own.
#![allow(dead_code)] // each test file uses a part of it

pub mod other;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;
use tensorwire::{Builder, DType, FabricKind, Node, Tensor};

/// Timeout of anything that should come.
pub const SOON: Duration = Duration::from_secs(20);

/// A cluster of `workers` tasks of job `w`, in the form of the `cluster` setting, on free ports.
pub fn cluster(workers: usize) -> String {
    let addresses: Vec<_> = (0..workers).map(|_| format!("127.0.0.1:{}", free_port())).collect();
    format!("w={}", addresses.join(","))
}

/// A free port below the ephemeral range. Each caller in this process gets another one.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id() * 131;
    loop {
        let port = 10_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let port = u16::try_from(port).expect("below 30,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Settings of one member of a small cluster. `TENSORWIRE_TEST_POLL` sets the poll mode, and
/// `TENSORWIRE_TEST_POLLERS` the number of pollers in modes that can have several.
/// `TENSORWIRE_TEST_FABRIC` sets the fabric, and `TENSORWIRE_TEST_WINDOWS` whether it has memory
/// windows. The same tests run in every mode and on every fabric.
/// RDMA devices are taken in turns from `TENSORWIRE_TEST_DEVICES`: `a+b,c+d` are two for each. On a
/// slow machine
/// `TENSORWIRE_TEST_STOP` and `TENSORWIRE_TEST_SILENCE` set a longer `stop_timeout` and
/// `silence_bound`.
pub fn member(cluster: &str, task: u32) -> Builder {
    let of_all_members = [
        ("TENSORWIRE_TEST_POLL", "poll"),
        ("TENSORWIRE_TEST_POLLERS", "pollers"),
        ("TENSORWIRE_TEST_FABRIC", "fabric"),
        ("TENSORWIRE_TEST_WINDOWS", "rdma_memory_windows"),
        ("TENSORWIRE_TEST_SILENCE", "silence_bound"),
    ];
    let builder =
        of_all_members.into_iter().fold(Node::builder().without_environment(), |builder, (name, key)| {
            match std::env::var(name) {
                Ok(value) => builder.set(key, value),
                Err(_) => builder,
            }
        });
    let builder = match std::env::var("TENSORWIRE_TEST_DEVICES") {
        Ok(devices) => {
            let devices: Vec<_> = devices.split(',').collect();
            builder.set("rdma_device", devices[task as usize % devices.len()].replace('+', ","))
        }
        Err(_) => builder,
    };
    builder
        .member("w", task)
        .set("cluster", cluster)
        .set("pool_size", "8MiB")
        .set("pool_pages", "plain")
        .set("pool_lock", "no")
        .set("join_timeout", "20s")
        .set("recv_timeout", "20s")
        .set("stop_timeout", std::env::var("TENSORWIRE_TEST_STOP").unwrap_or_else(|_| "300ms".into()))
}

/// The silence bound: `usual`, or the seconds in `TENSORWIRE_TEST_SILENCE`.
pub fn silence_or(usual: Duration) -> Duration {
    let Ok(text) = std::env::var("TENSORWIRE_TEST_SILENCE") else { return usual };
    let seconds = text.strip_suffix('s').and_then(|number| number.parse().ok());
    Duration::from_secs(seconds.unwrap_or_else(|| panic!("TENSORWIRE_TEST_SILENCE is {text:?}, not as 15s")))
}

/// Whether the members use the verbs fabric.
pub fn over_verbs() -> bool {
    std::env::var("TENSORWIRE_TEST_FABRIC").is_ok_and(|fabric| fabric == "verbs")
}

/// Whether the members use the tcp fabric.
#[allow(dead_code)] // not every test differs there
pub fn over_tcp() -> bool {
    std::env::var("TENSORWIRE_TEST_FABRIC").is_ok_and(|fabric| fabric == "tcp")
}

/// Whether the tensors travel by gRPC calls.
#[allow(dead_code)] // not every test differs there
pub fn over_grpc() -> bool {
    std::env::var("TENSORWIRE_TEST_FABRIC").is_ok_and(|fabric| fabric == "grpc")
}

/// Whether a large tensor is written to a destination that its receiver grants. It is lent
/// otherwise.
#[allow(dead_code)] // not every test sends large tensors
pub fn writes_bulk() -> bool {
    over_verbs() || over_tcp()
}

/// Whether members in other processes can't be reached. Then prints that a test of them is skipped.
pub fn lacks_processes() -> bool {
    false
}

/// Whether each value is asked for by a call, without windows of values that come unasked and
/// without a poller. Then prints that a test of them is skipped.
#[allow(dead_code)] // not every test needs windows
pub fn calls_for_each_value() -> bool {
    let calls = over_grpc();
    if calls {
        println!("skipped: calls have neither windows nor pollers, and bulk is slow by them");
    }
    calls
}

/// Whether the fabric of this run does not lend. Then prints that a test of loans is skipped.
#[allow(dead_code)] // not every test borrows
pub fn lends_nothing() -> bool {
    let nothing = writes_bulk() || over_grpc();
    if nothing {
        println!("skipped: this fabric does not lend");
    }
    nothing
}

/// A member of a test. If the test fails there, all of its members print how far they have come.
struct TestMember {
    node: Node,
    has_failed: Arc<AtomicBool>,
}

impl TestMember {
    fn print_if_failed(&self) {
        if self.has_failed.load(Ordering::SeqCst) {
            let node = &self.node;
            println!("{:?}\n{:?}\n{:?}", node.counters(), node.peers(), node.edges(50));
        }
    }
}

impl Drop for TestMember {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.has_failed.store(true, Ordering::SeqCst);
            self.print_if_failed();
        }
    }
}

/// Runs `body` for each member of a cluster, on a thread of its own, joined to all others. A member
/// whose body has ended serves its peers until all have ended.
pub fn run(members: usize, settings: &[(&str, &str)], body: impl Fn(&Node, u32) + Send + Sync + 'static) {
    run_each(members, |_| settings.to_vec(), body);
}

/// Like [`run`], with settings per member.
pub fn run_each<'a>(
    members: usize,
    settings: impl Fn(u32) -> Vec<(&'a str, &'a str)>,
    body: impl Fn(&Node, u32) + Send + Sync + 'static,
) {
    let cluster = cluster(members);
    let body = Arc::new(body);
    let (joined, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let has_failed = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..members as u32)
        .map(|task| {
            let (cluster, body) = (cluster.clone(), body.clone());
            let (joined, ended, has_failed) = (joined.clone(), ended.clone(), has_failed.clone());
            let settings: Vec<(String, String)> =
                settings(task).into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
            let thread = std::thread::Builder::new().name(format!("w/{task}"));
            let run = move || {
                // Counted even if the body panics, so that the others do not wait for ever.
                struct Ended(Arc<AtomicUsize>);
                impl Drop for Ended {
                    fn drop(&mut self) {
                        self.0.fetch_add(1, Ordering::SeqCst);
                    }
                }
                let mine = Ended(ended.clone());
                let mut builder = member(&cluster, task);
                for (key, value) in &settings {
                    builder = builder.set(key, value.clone());
                }
                let node = builder.start().expect("the node starts");
                node.join().expect("the others come");
                let this = TestMember { node, has_failed };
                let node = &this.node;
                // A body may stop its node. All members must have joined before that.
                joined.fetch_add(1, Ordering::SeqCst);
                until(node, "everybody's join", || joined.load(Ordering::SeqCst) == members);
                body(node, task);
                drop(mine);
                // Calls go on without this thread, which would only take their CPU.
                let by_calls = node.peers().iter().any(|peer| peer.fabric == Some(FabricKind::Grpc));
                while ended.load(Ordering::SeqCst) < members {
                    let _ = node.progress();
                    match by_calls {
                        true => std::thread::sleep(Duration::from_micros(500)),
                        false => std::thread::yield_now(),
                    }
                }
                this.print_if_failed();
                node.stop().expect("the node stops");
            };
            thread.spawn(run).expect("a thread")
        })
        .collect();
    let failed: Vec<_> = threads.into_iter().filter_map(|thread| thread.join().err()).collect();
    if let Some(panic) = failed.into_iter().next() {
        std::panic::resume_unwind(panic);
    }
}

/// Two joined members in inline mode, for one thread that drives both in turns.
pub fn two_members(settings: &[(&str, &str)]) -> [Node; 2] {
    let cluster = cluster(2);
    let start = |task| {
        let mut builder =
            member(&cluster, task).set("poll", "inline").set("pollers", "1").set("wait", "spin");
        for (key, value) in settings {
            builder = builder.set(*key, *value);
        }
        let node = builder.start().expect("the node starts");
        node.join().expect("the other comes");
        node
    };
    std::thread::scope(|scope| {
        let members = [0, 1].map(|task| (task, &start)).map(|(task, start)| scope.spawn(move || start(task)));
        let members = members.map(|member| member.join().expect("no panic"));
        // It waits for the bootstrap threads, which hold the pollers while they report the links.
        members.iter().for_each(|node| drop(node.edges(0).expect("usable")));
        members
    })
}

/// A vector of f32 that counts up from `first`.
pub fn counting(node: &Node, first: f32, len: usize) -> Tensor {
    let mut tensor = node.tensor(DType::F32, &[len as u64]).expect("room");
    for (at, value) in tensor.as_mut_slice::<f32>().expect("f32").iter_mut().enumerate() {
        *value = first + at as f32;
    }
    tensor.freeze()
}

/// The values of a vector of f32.
pub fn values(tensor: &Tensor) -> &[f32] {
    tensor.as_slice::<f32>().expect("f32")
}

/// Polls until `done`. Fails the test if that takes too long.
pub fn until(node: &Node, what: &str, done: impl Fn() -> bool) {
    let end = std::time::Instant::now() + SOON;
    while !done() {
        assert!(
            std::time::Instant::now() < end,
            "{what} did not happen within {SOON:?}: {:?}, {:?}",
            node.counters(),
            node.peers()
        );
        let _ = node.progress();
        std::thread::yield_now();
    }
}
