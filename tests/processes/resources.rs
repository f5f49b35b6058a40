//! Processes that lack memory or file descriptors: the error blames this process, not its peer.

use crate::common::other::{Other, other_user, wait_to_be_told};
use crate::common::{SOON, cluster, counting, member, writes_bulk};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};
use tensorwire::{Builder, Error, LossCause, Node, ResourcePlan, StoreOptions, StoreServer, TaskId};

/// Lowers a limit of this process.
fn limit(resource: Resource, to: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(to), maximum }).expect("a lower limit is allowed");
}

/// Bytes of the address space of this process.
fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = text.split(' ').next().and_then(|pages| pages.parse().ok()).expect("a number");
    pages * rustix::param::page_size() as u64
}

/// The descriptors that this process has open for good. Those of an attempt to connect come and go.
fn open_files() -> BTreeSet<u64> {
    let path = Path::new("/proc/self/fd");
    let look = || {
        std::thread::sleep(Duration::from_millis(2));
        let names = std::fs::read_dir(path).expect("procfs").map(|file| file.expect("procfs").file_name());
        // The look has one of its own.
        let open = names.collect::<Vec<_>>().into_iter().filter(|name| path.join(name).is_symlink());
        open.map(|name| name.to_string_lossy().parse().expect("a number")).collect()
    };
    let common = |found: BTreeSet<u64>, other: BTreeSet<u64>| &found & &other;
    (0..25).map(|_| look()).reduce(common).expect("several looks")
}

/// Leaves this process so many descriptors. Returns the limit, which is one of their numbers.
fn limit_files(spare: usize) -> u64 {
    let open = open_files();
    let free = (0..).filter(|number| !open.contains(number)).nth(spare).expect("there are more");
    limit(Resource::Nofile, free);
    free
}

/// Starts task 0 and joins the other process.
fn joined(cluster: &str) -> Node {
    let node = member(cluster, 0).set("pool_size", "256MiB").start().expect("the node starts");
    node.join().expect("the other comes");
    node
}

#[test]
#[ignore = "a role, not a test"]
fn role_little_address_space() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 1).start().expect("the node starts");
    node.join().expect("the other comes");
    // Enough for threads and small allocations, and not for the pool of the peer.
    limit(Resource::As, address_space() + (128 << 20));
    println!("ready");
    let step = node.step(1).expect("new");
    let error = step.recv(&node.edge_from("w", 0, "x").expect("an edge"), SOON).expect_err("no room");
    println!("error: {error}");
    let Error::PeerLost { cause, .. } = &error else { panic!("{error}") };
    assert!(matches!(cause, LossCause::Local(_)), "{error}");
    assert!(error.to_string().contains("ulimit -v") && !error.to_string().contains("protocol"), "{error}");
    wait_to_be_told();
}

#[test]
fn a_process_that_can_t_map_the_pool_of_its_peer_blames_itself() {
    if writes_bulk() {
        return println!("skipped: of shared memory");
    }
    let cluster = cluster(2);
    let mut other = Other::start("resources::role_little_address_space", &cluster);
    let node = joined(&cluster);
    other.wait_for("ready");
    let step = node.step(1).expect("new");
    let back = step.receive(&node.edge_from("w", 1, "never").expect("an edge")).begin().expect("begun");
    step.send(&node.edge_to("w", 1, "x").expect("an edge"), counting(&node, 0.0, 10_000)).expect("sent");
    println!("{}", other.wait_for("error: "));
    let error = back.wait().expect_err("the link is gone");
    println!("its peer: {error}");
    let Error::PeerLost { peer, cause: LossCause::Closed(why), .. } = &error else { panic!("{error}") };
    // By the link, or by the bootstrap service: whichever is first.
    let is_told = why.contains("lacks memory") || why.contains("w/1 says: this process, not the peer,");
    assert!(peer.task() == 1 && is_told, "{error}");
    other.say("end");
    assert!(other.ends_well());
}

/// A member that links by one fabric alone.
fn on(fabric: &str, cluster: &str, task: u32, join_timeout: &str) -> Builder {
    member(cluster, task).set("fabric", fabric).set("join_timeout", join_timeout)
}

#[test]
#[ignore = "a role, not a test"]
fn role_few_files() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let task = std::env::var("TEST_ME").expect("a number").parse().expect("a number");
    let spare = std::env::var("TEST_SPARE").expect("a number").parse().expect("a number");
    let fabric = std::env::var("TEST_FABRIC").expect("a fabric");
    let timeout = std::env::var("TEST_TIMEOUT").expect("a duration");
    let node = on(&fabric, &cluster, task, &timeout).start().expect("the node starts");
    println!("started");
    wait_to_be_told();
    limit_files(spare);
    println!("limited");
    println!("error: {}", node.join().expect_err("there are too few descriptors"));
    wait_to_be_told();
}

/// A member with few descriptors joins another one, as task `me`. Returns its error and its peer's.
fn errors_of_few_files(fabric: &str, me: u32, spare: u32, timeout: &str) -> [String; 2] {
    let cluster = cluster(2);
    let (me_text, spare) = (me.to_string(), spare.to_string());
    let environment = [
        ("TEST_ME", me_text.as_str()),
        ("TEST_SPARE", &spare),
        ("TEST_FABRIC", fabric),
        ("TEST_TIMEOUT", timeout),
    ];
    let mut other = Other::start_with("resources::role_few_files", &cluster, &environment);
    other.wait_for("started");
    other.say("go");
    other.wait_for("limited");
    let node = on(fabric, &cluster, 1 - me, timeout).start().expect("the node starts");
    let began = Instant::now();
    let error = node.join().expect_err("the other can't link").to_string();
    println!("{fabric}: task {me} has {spare} descriptors. The peer, after {:?}: {error}", began.elapsed());
    let own = other.wait_for("error: ");
    println!("task {me} {own}");
    other.say("end");
    assert!(other.ends_well());
    [own, error]
}

fn join_with_few_files(fabric: &str, me: u32, spare: u32) {
    let blames = |[own, theirs]: &[String; 2]| {
        let lacks = "Too many open files";
        let owns = own.contains(lacks) && own.contains("ulimit -n");
        // Whose lack it is, and not only that an attempt failed or is being given up.
        owns && theirs.contains(&format!("w/{me}")) && theirs.contains(lacks)
    };
    // On full CPUs a member may not have heard its peer's words within the first second.
    if !blames(&errors_of_few_files(fabric, me, spare, "1s")) {
        let errors = errors_of_few_files(fabric, me, spare, "10s");
        assert!(blames(&errors), "{errors:#?}");
    }
}

#[test]
fn a_process_with_few_descriptors_blames_itself_and_so_does_its_peer() {
    // Three are enough for task 0 over TCP, if the peer's call comes after the two connections of
    // the link. A fourth one is for the listener of task 1.
    let cases: [(&str, u32, &[u32]); 4] =
        [("shm", 0, &[1, 2, 3, 5]), ("shm", 1, &[1, 2, 3, 5]), ("tcp", 0, &[1, 2]), ("tcp", 1, &[1, 2, 3])];
    std::thread::scope(|scope| {
        for (fabric, me, spares) in cases {
            scope.spawn(move || spares.iter().for_each(|spare| join_with_few_files(fabric, me, *spare)));
        }
    });
}

#[test]
#[ignore = "a role, not a test"]
fn role_start_without() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let (resource, cause) = match std::env::var("TEST_RESOURCE").expect("a resource").as_str() {
        "memory" => {
            limit(Resource::As, address_space() + (16 << 20));
            (Resource::As, "ulimit -v".to_owned())
        }
        _ => {
            let open = limit_files(0);
            (Resource::Nofile, format!("open files: {} ({open} are open", open + 16))
        }
    };
    let began = Instant::now();
    let error = member(&cluster, 0).set("pool_size", "64MiB").start().expect_err("too little").to_string();
    println!("without {resource:?}, after {:?}: {error}", began.elapsed());
    assert!(error.contains(&cause), "{error}");
    assert!(began.elapsed() < SOON / 10, "a start waits for nobody");
}

#[test]
fn a_start_without_memory_or_descriptors_says_what_is_lacking() {
    let cluster = cluster(1);
    for resource in ["memory", "files"] {
        Other::run_alone("resources::role_start_without", &cluster, &[("TEST_RESOURCE", resource)]);
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_serve_without_thread() {
    let address = std::env::var("TEST_CLUSTER").expect("started by a test");
    let me = TaskId::new("w", 0).expect("a name");
    let options = StoreOptions::new(me.clone(), me, address.trim_start_matches("w=").parse().expect("one"));
    // Smaller than the stack of a thread.
    limit(Resource::As, address_space() + (1 << 20));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("it needs no thread");
    let error = runtime.block_on(async { StoreServer::start(&options, []) }).expect_err("no thread");
    assert!(error.to_string().contains("starting a thread"), "{error}");
}

/// A program of tokio gets an error and no panic.
#[test]
fn a_start_without_a_thread_within_a_runtime_is_an_error() {
    Other::run_alone("resources::role_serve_without_thread", &cluster(1), &[]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_join_with_small_files() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = on("shm", &cluster, 1, "2s").start().expect("the node starts");
    limit(Resource::Fsize, 4096);
    let failed = || node.join().expect_err("the memory of a link is larger").to_string();
    // The other side may be late.
    assert!((0..10).map(|_| failed()).any(|error| error.contains("ulimit -f")), "{}", failed());
    drop(node);
    let error = on("shm", &cluster, 1, "2s").start().expect_err("the pool is larger").to_string();
    assert!(error.contains("file size: ") && error.contains("ulimit -f"), "{error}");
}

/// The kernel ends a process with a larger file by SIGXFSZ.
#[test]
fn a_limit_of_file_size_ends_a_join_or_a_start_and_not_the_process() {
    let cluster = cluster(2);
    let _node = on("shm", &cluster, 0, "2s").start().expect("the node starts");
    Other::run_alone("resources::role_join_with_small_files", &cluster, &[]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_join_in_little_memory() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let task = std::env::var("TEST_ME").expect("a number").parse().expect("a number");
    let timeout = std::env::var("TEST_TIMEOUT").expect("a duration");
    let node = member(&cluster, task).set("join_timeout", timeout).start().expect("the node starts");
    // What the start has begun is done then.
    std::thread::sleep(Duration::from_millis(200));
    // Enough for small allocations, and neither for a link nor for a thread: its stack has 2 MiB.
    limit(Resource::As, address_space() + (2 << 20) - (64 << 10));
    println!("limited");
    println!("error: {}", node.join().expect_err("there is no address space"));
    wait_to_be_told();
}

/// A member without address space joins another one, as task `me`. Returns its error and its
/// peer's.
fn errors_of_little_memory(me: u32, timeout: &str) -> [String; 2] {
    let cluster = cluster(2);
    let environment = [("TEST_ME", &*me.to_string()), ("TEST_TIMEOUT", timeout)];
    let mut other = Other::start_with("resources::role_join_in_little_memory", &cluster, &environment);
    other.wait_for("limited");
    let node = member(&cluster, 1 - me).set("join_timeout", timeout).start().expect("the node starts");
    let error = node.join().expect_err("the other can't link").to_string();
    println!("the peer of w/{me}: {error}");
    let own = other.wait_for("error: ");
    println!("w/{me} {own}");
    other.say("end");
    assert!(other.ends_well());
    [own, error]
}

#[test]
fn a_join_without_address_space_is_blamed_on_the_process_that_lacks_it() {
    if writes_bulk() {
        return println!("skipped: the mappings are those of shared memory");
    }
    let blames = |me: u32, [own, theirs]: &[String; 2]| {
        let lacks = "ulimit -v";
        own.contains(lacks) && theirs.contains(&format!("w/{me}")) && theirs.contains(lacks)
    };
    for me in [0, 1] {
        // As above, on full CPUs a second may be too short.
        if !blames(me, &errors_of_little_memory(me, "1s")) {
            let errors = errors_of_little_memory(me, "10s");
            assert!(blames(me, &errors), "{errors:#?}");
        }
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_meet_with_few_files() {
    let variable = |name| std::env::var(name).expect("started by a test");
    let spare = variable("TEST_SPARE").parse().expect("a number");
    limit_files(spare);
    let (store, size) = (variable("TEST_CLUSTER"), variable("TEST_SIZE"));
    let variables = [
        ("RANK", "1"),
        ("WORLD_SIZE", &*size),
        ("TENSORWIRE_STORE", &*store),
        ("TENSORWIRE_POOL_SIZE", "4MiB"),
        ("TENSORWIRE_JOIN_TIMEOUT", "60s"),
    ];
    let variables = variables.map(|(name, value)| (name.into(), value.into()));
    let began = Instant::now();
    let error = Node::builder().environment(variables).start().expect_err("too few").to_string();
    println!("{spare} descriptors, after {:?}: {error}", began.elapsed());
    assert!(error.contains("open files: ") && error.contains("ulimit -n"), "{error}");
    for wrong in ["set secret_file", "mount /proc", "was refused", "is the process running"] {
        assert!(!error.contains(wrong), "{error}");
    }
    assert!(began.elapsed() < SOON, "it waits for nobody");
}

/// Nobody serves the store. A member that waits for the others would hear of that instead.
#[test]
fn a_member_that_lacks_descriptors_is_told_before_it_meets_the_others() {
    let store = format!("tcp://{}", cluster(1).trim_start_matches("w="));
    for (size, spare) in [("2", "0"), ("2", "4"), ("256", "100")] {
        let environment = [("TEST_SIZE", size), ("TEST_SPARE", spare)];
        Other::run_alone("resources::role_meet_with_few_files", &store, &environment);
    }
}

/// Started with exactly the descriptors that the plan asks for.
#[test]
#[ignore = "a role, not a test"]
fn role_planned_files() {
    let variable = |name| std::env::var(name).expect("started by a test");
    let task = variable("TEST_ME").parse().expect("a number");
    let settings = variable("TEST_SETTINGS");
    let pairs = settings.split(' ').filter_map(|pair| pair.split_once('='));
    let builder = member(&variable("TEST_CLUSTER"), task);
    let config = pairs.fold(builder, |builder, (key, value)| builder.set(key, value)).build();
    let config = config.expect("settings");
    let plan = ResourcePlan::new(&config);
    let files = plan.resources().iter().find(|resource| resource.name == "open files");
    let need = files.expect("planned").need;
    limit(Resource::Nofile, need);
    let node = Node::start(&config).expect("the plan has room");
    node.join().unwrap_or_else(|error| panic!("with {need} descriptors: {error}"));
    println!("joined with {need} descriptors");
    wait_to_be_told();
}

#[test]
fn as_many_descriptors_as_planned_are_enough_to_join() {
    for settings in [
        "fabric=shm",
        "fabric=tcp",
        "fabric=tcp tcp_streams=3",
        "fabric=tcp poll=dedicated pollers=4",
        "fabric=grpc",
        "fabric=auto",
    ] {
        let cluster = cluster(4);
        let start = |me| {
            let environment = [("TEST_ME", me), ("TEST_SETTINGS", settings)];
            Other::start_with("resources::role_planned_files", &cluster, &environment)
        };
        let mut members = ["0", "1", "2", "3"].map(start);
        let joined = members.each_mut().map(|member| member.wait_for("joined with"));
        println!("{settings}: {joined:?}");
        for member in &mut members {
            member.say("stop");
        }
        assert_eq!(members.each_mut().map(|member| member.ends_well()), [true; 4], "{settings}");
    }
}

fn threads() -> u64 {
    std::fs::read_dir("/proc/self/task").expect("procfs").count() as u64
}

#[test]
#[ignore = "a role, not a test"]
fn role_planned_threads() {
    let variable = |name| std::env::var(name).expect("started by a test");
    let settings = variable("TEST_SETTINGS");
    let pairs = settings.split(' ').filter_map(|pair| pair.split_once('='));
    let builder = member(&variable("TEST_CLUSTER"), 0);
    let config = pairs.fold(builder, |builder, (key, value)| builder.set(key, value)).build();
    let config = config.expect("settings");
    // Threads of the program count too.
    (0..8).for_each(|_| drop(std::thread::spawn(std::thread::park)));
    let plan = ResourcePlan::new(&config);
    let need = plan.resources().iter().find(|it| it.name == "threads").expect("planned").need;
    let _node = Node::start(&config).expect("no limit is in the way");
    let running = threads();
    println!("{settings}: {running} threads, {need} planned");
    // Those of owners, of a store's server and of up to two fabrics are not there yet.
    assert!((need - 4..=need).contains(&running), "{settings}: {running} threads, {need} planned");
}

#[test]
fn as_many_threads_as_planned_are_started() {
    for settings in
        ["fabric=shm", "fabric=tcp poll=dedicated pollers=4", "fabric=shm,tcp poll=inline", "fabric=grpc"]
    {
        let environment = [("TEST_SETTINGS", settings)];
        Other::run_alone_by(&[], "resources::role_planned_threads", &cluster(1), &environment);
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_few_threads() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    limit(Resource::Nproc, threads() + 1);
    println!("error: {}", member(&cluster, 0).start().expect_err("too few threads"));
    wait_to_be_told();
}

#[test]
fn a_start_without_threads_names_the_limit_of_the_user() {
    // The limit does not bind root.
    let Some(user) = other_user() else { return println!("skipped: there is no other user") };
    let mut other = Other::start_as(user, "resources::role_few_threads", &cluster(1), &[]);
    let error = other.wait_for("error: ");
    assert!(error.contains("threads: ") && error.contains("(RLIMIT_NPROC): raise `ulimit -u`"), "{error}");
    other.say("end");
    assert!(other.ends_well());
}
