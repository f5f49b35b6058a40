//! The hot path between two processes on shared memory.
//!
//! Each test starts two real processes on shared memory, each pinned to a CPU of its own if there
//! are two. They train: every step has a new id, is begun, moves values both ways and is cleaned
//! up. After a warm-up both count heap calls (a counting allocator) and system calls (a seccomp
//! filter that traps every call of threads that move data). Threads that move no data (bootstrap,
//! callbacks, liveness watch) may make both.
//!
//! The proof holds for `wait = spin`: a waiter that yields or sleeps enters the kernel by design.
//! In `auto` a waiter sleeps after `spin_budget`. There the proof holds for an answer that comes
//! before, in the quietest of several parts of the counted rounds. In the others the system may
//! have kept a process from its CPU for longer than the background poller leaves it alone.

use crate::common::{cluster, member};
use crate::exchange::{Ids, Side, What};
use crate::threads::{self, Activity, Start};
use crate::{alone_on_the_cpus, trap};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;
use tensorwire::{Node, pin_current_thread, process_cpus};

/// A poll mode, and the names of its threads that move data.
struct Mode {
    poll: &'static str,
    moving: &'static [&'static str],
}

/// The calling thread.
const CALLER: &str = "caller";
/// The dedicated poller.
const POLLER: &str = "tw-poll-0";

/// The modes in which no thread that moves data sleeps.
const MODES: &[Mode] =
    &[Mode { poll: "inline", moving: &[CALLER] }, Mode { poll: "dedicated", moving: &[CALLER, POLLER] }];
/// The mode of a node that is not told any.
const AUTO: Mode = Mode { poll: "auto", moving: &[CALLER] };

impl Mode {
    fn named(poll: &str) -> &'static Mode {
        MODES.iter().chain([&AUTO]).find(|mode| mode.poll == poll).expect("a mode")
    }

    /// Parts of the counted rounds, of which the quietest counts.
    fn parts(&self) -> u32 {
        if self.poll == AUTO.poll { 10 } else { 1 }
    }

    /// Whether each thread of both processes that moves data has a CPU of its own.
    fn has_room(&self) -> bool {
        2 * self.moving.len() <= process_cpus().len()
    }

    /// Fewer rounds if spinning threads share a CPU: each turn takes a time slice.
    /// `TENSORWIRE_TEST_SHARED_CPU_ROUNDS` limits them further, and not below `kept`.
    fn rounds(&self, wanted: u32, least: u32, kept: u32) -> u32 {
        if self.has_room() {
            return wanted;
        }
        let most = std::env::var("TENSORWIRE_TEST_SHARED_CPU_ROUNDS");
        let most = most.map_or(u32::MAX, |most| most.parse().expect("a number"));
        (wanted / 200).max(least).min(most.max(kept))
    }

    /// Windows and buffers have grown to their sizes after 100 rounds.
    fn warm_up(&self, scenario: &Scenario) -> u32 {
        self.rounds(scenario.warm_up, scenario.least, 100)
    }

    fn counted(&self, scenario: &Scenario) -> u32 {
        self.rounds(scenario.counted, scenario.least, 0)
    }
}

/// What is exchanged, the rounds of warm-up, and the counted rounds.
struct Scenario {
    name: &'static str,
    what: What,
    ids: Ids,
    warm_up: u32,
    counted: u32,
    /// The least rounds of either kind if spinning threads share a CPU.
    least: u32,
    validate: bool,
}

const fn scenario(name: &'static str, what: What, ids: Ids, counted: u32) -> Scenario {
    Scenario { name, what, ids, warm_up: 1_000, counted, least: 300, validate: false }
}

/// The path of standing requests.
const fn standing(name: &'static str, what: What, counted: u32) -> Scenario {
    Scenario { least: 100, ..scenario(name, what, Ids::Standing, counted) }
}

/// The same with data validation.
const fn validated(scenario: Scenario) -> Scenario {
    Scenario { validate: true, least: 100, ..scenario }
}

/// Each round moves a hundred values each way.
const fn batches(name: &'static str, what: What, counted: u32) -> Scenario {
    Scenario { name, what, ids: Ids::Random, warm_up: 100, counted, least: 100, validate: false }
}

const SCENARIOS: &[Scenario] = &[
    scenario("small", What::Tensor(2), Ids::Random, 100_000),
    scenario("small_in_sequence", What::Tensor(2), Ids::Counted, 10_000),
    scenario("written", What::Tensor(4 << 10), Ids::Random, 5_000),
    scenario("large", What::Tensor(256 << 10), Ids::Random, 500),
    scenario("into", What::Into(4 << 10), Ids::Random, 5_000),
    scenario("borrowed", What::Borrowed(4 << 10), Ids::Random, 5_000),
    scenario("dead", What::Dead, Ids::Random, 5_000),
    scenario("several", What::Several(256), Ids::Random, 2_000),
    batches("batch", What::Batch(2), 500),
    batches("written_batch", What::Batch(256), 300),
    batches("crowded_batch", What::Crowded(2), 200),
    standing("small_standing", What::Tensor(2), 20_000),
    standing("written_standing", What::Tensor(4 << 10), 5_000),
    standing("borrowed_standing", What::Borrowed(4 << 10), 5_000),
    standing("several_standing", What::Several(256), 2_000),
    validated(scenario("small_validated", What::Tensor(2), Ids::Random, 10_000)),
    validated(scenario("written_validated", What::Into(4 << 10), Ids::Random, 3_000)),
    validated(standing("several_standing_validated", What::Several(256), 1_000)),
    validated(scenario("borrowed_validated", What::Borrowed(4 << 10), Ids::Standing, 3_000)),
];

/// Counts the heap and system calls of the calling thread during `work`.
fn alone(work: impl FnOnce()) -> Activity {
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let start = Start::now();
    work();
    let end = Start::now();
    start.until(&end).into_iter().find(|activity| activity.name == name).expect("this thread is known")
}

/// One process of a test. It prints its counts, and ends on a line of input.
#[test]
#[ignore = "a role, not a test"]
fn role_trainer() {
    let thread = std::thread::Builder::new().name(CALLER.into());
    thread.spawn(train).expect("a thread");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the test");
    // Exits directly: the end of a thread blocks the filter's signal.
    std::process::exit(0);
}

fn given(variable: &str) -> String {
    std::env::var(variable).expect("started by a test")
}

fn train() {
    // With one thread for tests, the name of this test begins the line.
    println!();
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == given("HOT_SCENARIO")).expect("known");
    let task = given("HOT_TASK").parse().expect("a number");
    let node = start(task, scenario);
    let mut side = Side::new(&node, task, scenario.what, scenario.ids);
    let mode = Mode::named(&given("HOT_POLL"));
    side.warm_up(mode.warm_up(scenario));
    let trapped = trap::install().and_then(|()| trap::tighten(&threads::ids_of(mode.moving)));
    match &trapped {
        Ok(()) => prove_the_trap(),
        Err(why) => println!("no trap {why}"),
    }
    // The first calls of the trap itself.
    (0..10).for_each(|_| side.step());
    let counted = mode.counted(scenario);
    let parts = (0..mode.parts()).map(|_| {
        let from = Start::now();
        (0..counted / mode.parts()).for_each(|_| side.step());
        from.until(&Start::now())
    });
    let busy = |part: &Vec<Activity>| {
        let moving = part.iter().filter(|thread| mode.moving.contains(&&*thread.name));
        moving.map(|thread| thread.calls).sum::<u64>()
    };
    let quietest = parts.min_by_key(busy).expect("a part");
    for Activity { name, allocations, frees, calls, last_call } in quietest {
        println!("thread {name}: {allocations} {frees} {calls} {last_call}");
    }
    println!("counted {counted}");
    std::io::stdout().flush().expect("the test listens");
    loop {
        let _ = node.progress();
        std::thread::yield_now();
    }
}

fn start(task: u32, scenario: &Scenario) -> Node {
    let cpus = process_cpus();
    let bulk = if matches!(scenario.what, What::Borrowed(_)) { "borrow" } else { "copy" };
    let poll = given("HOT_POLL");
    let is_auto = poll == AUTO.poll;
    let mut builder = member(&given("HOT_CLUSTER"), task)
        .set("poll", poll)
        .set("bulk_receive", bulk)
        .set("validate", scenario.validate.to_string())
        .set("pool_size", "64MiB");
    if let What::Crowded(_) = scenario.what {
        // Small, so that most of a batch is queued.
        builder = builder.set("max_requests", "40");
    }
    // In auto the setting `cores` means that calls yield.
    builder = match is_auto {
        true => builder.set("spin_budget", "1s"),
        false => builder.set("wait", "spin"),
    };
    if cpus.len() > 1 && !is_auto {
        builder = builder.set("cores", cpus[task as usize].to_string());
    }
    let node = builder.start().expect("the node starts");
    if cpus.len() > 1 && is_auto {
        pin_current_thread(cpus[task as usize]).expect("a CPU of this process");
    }
    node.join().expect("the peer comes");
    node
}

/// The control: the counters count deliberate calls.
fn prove_the_trap() {
    let quiet = alone(|| {
        std::hint::black_box([0u64; 64].iter().sum::<u64>());
    });
    // SAFETY: it asks for a number.
    let deliberate = alone(|| _ = unsafe { libc::syscall(libc::SYS_getppid) });
    // SAFETY: advice on no memory. One of the calls that other threads may make.
    let advice = alone(|| _ = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_NORMAL) });
    let heap = alone(|| drop(std::hint::black_box(Box::new(1))));
    let clock = alone(|| (0..100).for_each(|_| _ = std::hint::black_box(Instant::now())));
    println!("proof {} {} {}", quiet.calls, deliberate.calls + advice.calls, deliberate.last_call);
    println!("heap {} {}", heap.allocations, heap.frees);
    println!("clock {}", clock.calls);
}

/// A process in the role. Its drop kills it.
struct Trainer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Trainer {
    fn start(scenario: &Scenario, mode: &Mode, cluster: &str, task: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("own path"))
            .args(["shm::role_trainer", "--exact", "--ignored", "--nocapture"])
            .env("HOT_SCENARIO", scenario.name)
            .env("HOT_POLL", mode.poll)
            .env("HOT_CLUSTER", cluster)
            .env("HOT_TASK", task.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a trainer");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Trainer { child, lines }
    }

    /// The counts that it prints.
    fn report(&mut self) -> Report {
        let mut report = Report::default();
        for line in self.lines.by_ref().map_while(Result::ok) {
            if line.starts_with("counted ") {
                return report;
            }
            report.read(&line);
        }
        let status = self.child.wait();
        panic!("the trainer ended early ({status:?}), after {report:?}");
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug, Default)]
struct Report {
    /// The reason if calls were not trapped.
    no_trap: Option<String>,
    /// Calls counted while none was made, and while two were made; the number of the first.
    proof: Option<(u64, u64, i64)>,
    /// Allocations and frees of one box.
    heap: Option<(u64, u64)>,
    /// Calls during a hundred reads of the clock.
    clock: u64,
    threads: Vec<Activity>,
}

impl Report {
    fn read(&mut self, line: &str) {
        let numbers: Vec<i64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let count = |at: usize| numbers[at] as u64;
        match line.split_once(' ') {
            Some(("no", why)) => self.no_trap = Some(why.trim_start_matches("trap ").to_owned()),
            Some(("proof", _)) => self.proof = Some((count(0), count(1), numbers[2])),
            Some(("heap", _)) => self.heap = Some((count(0), count(1))),
            Some(("clock", _)) => self.clock = count(0),
            Some(("thread", rest)) => {
                let (name, counts) = rest.rsplit_once(": ").expect("a name and its counts");
                let counts: Vec<i64> = counts.split(' ').map(|word| word.parse().expect("a count")).collect();
                self.threads.push(Activity {
                    name: name.to_owned(),
                    allocations: counts[0] as u64,
                    frees: counts[1] as u64,
                    calls: counts[2] as u64,
                    last_call: counts[3],
                });
            }
            _ => {}
        }
    }

    /// The threads of these names.
    fn named(&self, who: &str, names: &[&str]) -> Vec<&Activity> {
        let known: Vec<_> = self.threads.iter().map(|thread| &*thread.name).collect();
        for name in names {
            assert!(known.contains(name), "{who}: no {name} among {known:?}");
        }
        self.threads.iter().filter(|thread| names.contains(&&*thread.name)).collect()
    }

    fn check(&self, who: &str, mode: &Mode) {
        for thread in self.named(who, mode.moving) {
            assert_eq!((thread.allocations, thread.frees), (0, 0), "{who}: the heap was used: {thread:?}");
        }
        let Some(proof) = self.proof else {
            let why = self.no_trap.as_deref().expect("the trap, or why there is none");
            println!("skipped: system calls can't be counted here: {why}");
            return;
        };
        assert_eq!(
            proof,
            (0, 2, libc::SYS_getppid),
            "{who}: the trap counts what is called, and nothing else"
        );
        assert_eq!(self.heap, Some((1, 1)), "{who}: the allocator counts");
        if self.clock > 0 {
            println!("skipped: the clock of this machine is not read through the vDSO, but by system calls");
            return;
        }
        for thread in self.named(who, mode.moving) {
            assert_eq!(thread.calls, 0, "{who}: the kernel was entered: {thread:?}");
        }
    }
}

/// Runs a scenario in every mode in which no thread sleeps.
fn prove(name: &str) {
    prove_in(MODES, name);
}

fn prove_in(modes: &[Mode], name: &str) {
    let _alone = alone_on_the_cpus();
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).expect("a scenario");
    for mode in modes {
        let cluster = cluster(2);
        println!("{name}, poll = {}: {} rounds are counted", mode.poll, mode.counted(scenario));
        let mut trainers = [0, 1].map(|task| Trainer::start(scenario, mode, &cluster, task));
        for (task, trainer) in trainers.iter_mut().enumerate() {
            trainer.report().check(&format!("{name}, poll = {}, task {task}", mode.poll), mode);
        }
    }
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn tensors_of_a_node_that_is_not_told_a_mode() {
    ["small", "small_in_sequence", "written", "borrowed"]
        .into_iter()
        .for_each(|name| prove_in(&[AUTO], name));
}

#[test]
fn small_tensors() {
    prove("small");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn small_tensors_of_a_sequence_of_steps() {
    prove("small_in_sequence");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn tensors_that_are_written_to_a_grant() {
    prove("written");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn large_tensors() {
    prove("large");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn tensors_received_into_given_ones() {
    prove("into");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn borrowed_tensors() {
    prove("borrowed");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn dead_values() {
    prove("dead");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn several_edges_at_a_time() {
    prove("several");
}

#[test]
fn batches_of_small_tensors() {
    prove("batch");
}

#[test]
fn batches_of_tensors_that_are_written() {
    prove("written_batch");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn batches_of_more_than_may_be_outstanding() {
    prove("crowded_batch");
}

#[test]
fn small_tensors_with_a_standing_request() {
    prove("small_standing");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn written_tensors_with_a_standing_request() {
    prove("written_standing");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn borrowed_tensors_with_a_standing_request() {
    prove("borrowed_standing");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn several_edges_with_a_standing_request() {
    prove("several_standing");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn tensors_that_are_compared_with_their_checksums() {
    ["small_validated", "written_validated", "borrowed_validated"].into_iter().for_each(prove);
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn tensors_with_a_standing_request_that_are_compared_with_their_checksums() {
    prove("several_standing_validated");
}
