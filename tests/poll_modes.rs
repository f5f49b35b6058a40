//! The polling threads of each poll mode: progress, CPU time, and pinning.

mod common;

use common::{SOON, cluster, counting, member, run, until, values};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tensorwire::internals::engine::PollMode;
use tensorwire::{CancelToken, DType, Error, Node, process_cpus};

/// These tests inspect all threads of the process, so they run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names of the live polling threads, with their CPU masks.
fn polling_threads() -> Vec<(String, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    let mut found: Vec<_> = tasks
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name))?;
                Some(line.split_once(':')?.1.trim().to_owned())
            };
            let name = field("Name")?;
            name.starts_with("tw-poll").then_some((name, field("Cpus_allowed_list")?))
        })
        .collect();
    found.sort();
    found
}

/// CPU time of this process, in steps of 10 ms.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("stat");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let ticks: u64 =
        fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Runs a pair of nodes in `mode`.
fn pair(mode: &str, body: impl Fn(&Node, u32) + Send + Sync + 'static) {
    run(2, &[("poll", mode)], body);
}

#[test]
fn a_sender_that_computes_does_not_stall_its_readers_where_there_is_a_thread() {
    let _alone = alone();
    for mode in ["adaptive", "dedicated"] {
        // 0: not sent; 1: sent, and the sender computes; 2: received.
        let phase = Arc::new(AtomicUsize::new(0));
        pair(mode, move |node, task| {
            let step = node.step(1).expect("new");
            if task == 0 {
                let edge = node.edge_to("w", 1, "x").expect("edge");
                step.send(&edge, counting(node, 1.0, 100_000)).expect("sent");
                phase.store(1, Ordering::SeqCst);
                let start = Instant::now();
                while phase.load(Ordering::SeqCst) < 2 {
                    assert!(start.elapsed() < SOON, "{mode}: nobody served the reader");
                    std::thread::sleep(Duration::from_millis(1));
                }
                return;
            }
            while phase.load(Ordering::SeqCst) < 1 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let got = step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
            assert_eq!(values(&got.tensor)[99_999], 100_000.0);
            phase.store(2, Ordering::SeqCst);
        });
    }
}

#[test]
fn who_waits_in_the_adaptive_mode_sleeps_and_is_woken_at_once() {
    let _alone = alone();
    const BOUND: Duration = Duration::from_millis(2);
    /// A thread may lose its CPU for a while after two of them.
    const SENDS: usize = 11;
    let sent: Arc<Mutex<Option<Instant>>> = Arc::default();
    run(
        2,
        &[("poll", "adaptive"), ("heartbeat_interval", "500ms"), ("silence_bound", "5s")],
        move |node, task| {
            let step = node.step(1).expect("new");
            if task == 0 {
                std::thread::sleep(Duration::from_millis(100));
                let before = cpu_time();
                std::thread::sleep(Duration::from_secs(1));
                let used = cpu_time() - before;
                println!("two nodes, one of which waits, used {used:?} of the CPU in a second");
                assert!(used < Duration::from_millis(100), "they did not sleep: {used:?}");
                let to = node.edge_to("w", 1, "x").expect("edge");
                for _ in 0..SENDS {
                    let tensor = counting(node, 1.0, 10);
                    *sent.lock().expect("unpoisoned") = Some(Instant::now());
                    step.send(&to, tensor).expect("sent");
                    // The receiver falls asleep again.
                    std::thread::sleep(Duration::from_millis(50));
                }
                return;
            }
            let from = node.edge_from("w", 0, "x").expect("edge");
            let wait = |_| {
                step.recv(&from, SOON).expect("received");
                sent.lock().expect("unpoisoned").expect("it was sent").elapsed()
            };
            let mut took: Vec<Duration> = (0..SENDS).map(wait).collect();
            took.sort();
            println!("a sleeping receiver had its tensors so long after the sends: {took:?}");
            assert!(took[SENDS - 3] < 5 * BOUND, "{took:?}");
        },
    );
}

#[test]
fn a_callback_comes_while_no_call_is_under_way_where_there_is_a_thread() {
    let _alone = alone();
    for mode in ["adaptive", "dedicated"] {
        let called = Arc::new(AtomicUsize::new(0));
        pair(mode, move |node, task| {
            let step = node.step(1).expect("new");
            if task == 1 {
                let edge = node.edge_from("w", 0, "x").expect("edge");
                let note = called.clone();
                let done = move |result: Result<tensorwire::Delivery<tensorwire::Tensor>, Error>| {
                    result.expect("received");
                    note.store(1, Ordering::SeqCst);
                };
                step.receive(&edge).within(SOON).then(done).expect("begun");
            } else {
                std::thread::sleep(Duration::from_millis(50));
                step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(node, 1.0, 10_000))
                    .expect("sent");
            }
            let start = Instant::now();
            while called.load(Ordering::SeqCst) == 0 {
                assert!(start.elapsed() < SOON, "{mode}: nobody brought it");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }
}

#[test]
fn a_deadline_passes_while_no_call_is_under_way_where_there_is_a_thread() {
    let _alone = alone();
    for mode in ["adaptive", "dedicated"] {
        pair(mode, move |node, task| {
            if task == 0 {
                return;
            }
            let step = node.step(1).expect("new");
            let ended: Arc<Mutex<Option<Instant>>> = Arc::default();
            let note = ended.clone();
            // Long enough for the background poller to sleep without a deadline before this request
            // arrives.
            std::thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            let edge = node.edge_from("w", 0, "never").expect("edge");
            step.receive(&edge)
                .within(Duration::from_millis(40))
                .then(move |result| {
                    assert!(matches!(result, Err(Error::DeadlineExceeded { .. })));
                    *note.lock().expect("unpoisoned") = Some(Instant::now());
                })
                .expect("begun");
            while ended.lock().expect("unpoisoned").is_none() {
                assert!(start.elapsed() < SOON, "{mode}: the deadline never came");
                std::thread::sleep(Duration::from_millis(1));
            }
            let took = ended.lock().expect("unpoisoned").expect("ended") - start;
            println!("{mode}: a deadline of 40 ms came after {took:?}");
            assert!(took < 5 * Duration::from_millis(40), "{took:?}");
        });
    }
}

#[test]
fn auto_is_adaptive_unless_calls_shall_spin_or_yield() {
    let _alone = alone();
    run(2, &[("poll", "auto")], |node, _| assert_eq!(node.mode(), PollMode::Adaptive));
    for wait in ["spin", "yield"] {
        run(2, &[("poll", "auto"), ("wait", wait)], |node, _| {
            assert_eq!(node.mode(), PollMode::Inline);
            assert_eq!(polling_threads(), []);
        });
    }
    assert_no_polling_thread("auto");
}

/// How long a round of eight takes beside one over channels, about.
const WAITS_OVER_CHANNELS: f64 = 20.0;
/// Threads that wait in one node, and rounds in which each of them gets a value and answers.
const THREADS: usize = 8;
const ROUNDS: u32 = 300;

/// The same round over channels of the standard library: what it costs to wake as many threads.
fn round_of_channels() -> Duration {
    std::thread::scope(|scope| {
        let ends: Vec<_> = (0..THREADS)
            .map(|_| {
                let ((to, values), (answers, back)) = (channel::<u32>(), channel::<u32>());
                scope.spawn(move || values.into_iter().try_for_each(|value| answers.send(value)));
                (to, back)
            })
            .collect();
        let start = Instant::now();
        for round in 0..ROUNDS {
            ends.iter().for_each(|(to, _)| to.send(round).expect("it waits"));
            ends.iter().for_each(|(_, back)| assert_eq!(back.recv(), Ok(round)));
        }
        start.elapsed() / ROUNDS
    })
}

/// The time of one round with `THREADS` threads that wait in one node, in this mode.
fn round_of_many_waits(mode: &str) -> Duration {
    let took: Arc<Mutex<Duration>> = Arc::default();
    let note = took.clone();
    pair(mode, move |node, task| {
        let step = node.step(1).expect("new");
        let names: Vec<_> = (0..THREADS).map(|at| format!("x/{at}")).collect();
        let to = |name: &String| node.edge_to("w", 1 - task, name).expect("edge");
        let from = |name: &String| node.edge_from("w", 1 - task, name).expect("edge");
        if task == 0 {
            let edges: Vec<_> = names.iter().map(|name| (to(name), from(name))).collect();
            let start = Instant::now();
            for round in 0..ROUNDS {
                for (out, _) in &edges {
                    step.send(out, counting(node, round as f32, 1)).expect("sent");
                }
                for (_, back) in &edges {
                    step.recv(back, SOON).expect("received");
                }
            }
            *note.lock().expect("unpoisoned") = start.elapsed() / ROUNDS;
            return;
        }
        std::thread::scope(|scope| {
            for name in &names {
                let (step, edges) = (&step, (from(name), to(name)));
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let got = step.recv(&edges.0, SOON).expect("received");
                        step.send(&edges.1, got.tensor).expect("sent");
                    }
                });
            }
        });
    });
    *took.lock().expect("unpoisoned")
}

#[test]
fn eight_threads_that_wait_in_one_node_perform_in_auto_as_in_the_adaptive_mode() {
    let _alone = alone();
    const TURNS: usize = 5;
    let mut took = [("auto", vec![]), ("adaptive", vec![]), ("channels", vec![])];
    for _ in 0..TURNS {
        for (mode, turns) in &mut took {
            turns.push(if *mode == "channels" { round_of_channels() } else { round_of_many_waits(mode) });
        }
    }
    let [auto, adaptive, channels] = took.map(|(mode, mut turns)| {
        turns.sort_unstable();
        println!("{mode}: a round of eight takes {:?} in the median of {turns:?}", turns[TURNS / 2]);
        turns[TURNS / 2].as_secs_f64()
    });
    println!("auto takes {:.2} times as long as adaptive", auto / adaptive);
    println!("auto takes {:.2} times as long as channels", auto / channels);
    assert!(auto < 5.0 * adaptive);
    assert!(auto < 5.0 * WAITS_OVER_CHANNELS * channels);
}

#[test]
fn peers_are_dealt_out_to_several_pollers_which_are_pinned_as_asked() {
    let _alone = alone();
    let cpus = process_cpus();
    if cpus.len() < 2 {
        println!("skipped: pinning two pollers needs two CPUs");
        return;
    }
    let cores = format!("{},{}", cpus[1], cpus[0]);
    let expected: BTreeSet<_> =
        [("tw-poll-0".to_owned(), cpus[1].to_string()), ("tw-poll-1".to_owned(), cpus[0].to_string())].into();
    for mode in ["adaptive", "dedicated"] {
        let expected = expected.clone();
        run(3, &[("poll", mode), ("cores", &cores)], move |node, task| {
            assert_eq!(polling_threads().into_iter().collect::<BTreeSet<_>>(), expected);
            exchange_with_all(node, task, 3, 20);
        });
        assert_no_polling_thread(mode);
    }
}

/// A thread that was joined may be listed for a moment.
fn assert_no_polling_thread(mode: &str) {
    let ended = Instant::now();
    while !polling_threads().is_empty() && ended.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
    assert_eq!(polling_threads(), [], "{mode}: every thread has ended");
}

/// Each member sends to, and receives from, each other member in each step.
fn exchange_with_all(node: &Node, task: u32, members: u32, steps: u64) {
    let base = node.sequence(1 << 32);
    for n in 0..steps {
        let step = node.step(base.step(n)).expect("new");
        let others = || (0..members).filter(|other| *other != task);
        for other in others() {
            let value = (u64::from(task) * 1000 + n) as f32;
            step.send(&node.edge_to("w", other, "x").expect("edge"), counting(node, value, 300))
                .expect("sent");
        }
        for other in others() {
            let got = step.recv(&node.edge_from("w", other, "x").expect("edge"), SOON).expect("received");
            assert_eq!(values(&got.tensor)[0], (u64::from(other) * 1000 + n) as f32);
        }
    }
}

#[test]
fn many_threads_submit_to_a_dedicated_poller_and_each_keeps_its_order() {
    let _alone = alone();
    const THREADS: u32 = 4;
    const EACH: u64 = 500;
    pair("dedicated", |node, task| {
        let step = node.step(1).expect("new");
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let step = &step;
                scope.spawn(move || {
                    let name = format!("x/{thread}");
                    for number in 0..EACH {
                        if task == 0 {
                            let edge = node.edge_to("w", 1, &name).expect("edge");
                            step.send(&edge, counting(node, number as f32, 1)).expect("sent");
                        } else {
                            let edge = node.edge_from("w", 0, &name).expect("edge");
                            let got = step.recv(&edge, SOON).expect("received");
                            assert_eq!(values(&got.tensor), [number as f32]);
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn a_receive_that_another_thread_cancels_ends_in_every_mode() {
    let _alone = alone();
    const EACH: usize = 1000;
    for mode in ["inline", "adaptive", "dedicated"] {
        pair(mode, |node, task| {
            if task != 0 {
                return;
            }
            let step = node.step(1).expect("new");
            let edge = node.edge_from("w", 1, "never").expect("edge");
            let ended = Arc::new(AtomicUsize::new(0));
            let (tell, told) = channel::<CancelToken>();
            std::thread::scope(|scope| {
                scope.spawn(move || told.into_iter().for_each(|token| token.cancel()));
                for number in 0..EACH {
                    let note = ended.clone();
                    let done = move |result: Result<_, Error>| {
                        assert!(matches!(result, Err(Error::Cancelled { .. })));
                        note.fetch_add(1, Ordering::SeqCst);
                    };
                    tell.send(step.receive(&edge).within(SOON).then(done).expect("begun")).expect("open");
                    // The poller has seen the last command, and this thread gets a queue of its
                    // own.
                    if number % 8 == 0 {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                }
                drop(tell);
            });
            until(node, "the end of every receive", || ended.load(Ordering::SeqCst) == EACH);
        });
    }
}

#[test]
fn a_value_is_kept_though_another_thread_begins_its_step() {
    let _alone = alone();
    const STEPS: u64 = 300;
    for mode in ["inline", "adaptive", "dedicated"] {
        pair(mode, |node, task| {
            if task == 1 {
                for id in 1..=STEPS {
                    let step = node.step(id).expect("new");
                    for thread in 0..2 {
                        let edge = node.edge_from("w", 0, &format!("x{thread}")).expect("edge");
                        assert!(step.recv(&edge, SOON).expect("it was sent").is_dead);
                    }
                }
                return;
            }
            let gate = Barrier::new(2);
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let gate = &gate;
                    scope.spawn(move || {
                        let edge = node.edge_to("w", 1, &format!("x{thread}")).expect("edge");
                        for id in 1..=STEPS {
                            gate.wait();
                            node.step(id).expect("begun by either").send_dead(&edge).expect("sent");
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn who_waits_for_room_gets_the_first_that_there_is_in_every_mode() {
    let _alone = alone();
    // The pool of 8 MiB holds one of these tensors.
    let dims = [6 << 18];
    for mode in ["inline", "adaptive", "dedicated"] {
        pair(mode, move |node, task| {
            let step = node.step(1).expect("new");
            if task == 1 {
                std::thread::sleep(Duration::from_millis(100));
                step.recv(&node.edge_from("w", 0, "x").expect("edge"), SOON).expect("received");
                step.recv(&node.edge_from("w", 0, "y").expect("edge"), SOON).expect("received");
                return;
            }
            let tensor = node.tensor(DType::F32, &dims).expect("room").freeze();
            step.send(&node.edge_to("w", 1, "x").expect("edge"), tensor).expect("sent");
            let start = Instant::now();
            let tensor = node.tensor_within(DType::F32, &dims, SOON).expect("room as soon as it was taken");
            println!("{mode}: there was room after {:?}", start.elapsed());
            assert!(start.elapsed() < SOON / 4);
            step.send(&node.edge_to("w", 1, "y").expect("edge"), tensor.freeze()).expect("sent");
        });
    }
}

#[test]
fn a_loss_that_ends_everything_ends_the_calls_of_every_poller() {
    let _alone = alone();
    for mode in ["adaptive", "dedicated"] {
        // Tasks 1 and 2 are served by different pollers of task 0.
        let members = cluster(3);
        let start = |task| {
            let node =
                member(&members, task).set("poll", mode).set("pollers", "2").set("peer_loss", "fail_all");
            node.start().expect("started")
        };
        let nodes: Vec<_> = (0..3).map(start).collect();
        std::thread::scope(|scope| {
            for node in &nodes {
                scope.spawn(|| node.join().expect("joined"));
            }
        });
        let [first, lost, other] = &nodes[..] else { unreachable!("three were started") };
        let step = first.step(1).expect("new");
        let waiting = step.receive(&first.edge_from("w", 2, "x").expect("edge")).begin().expect("begun");
        let called = Arc::new(AtomicUsize::new(0));
        let note = called.clone();
        step.receive(&first.edge_from("w", 2, "y").expect("edge"))
            .within(SOON)
            .then(move |result| {
                assert!(matches!(result, Err(Error::PeerLost { .. })), "{result:?}");
                note.store(1, Ordering::SeqCst);
            })
            .expect("begun");
        lost.fail("on purpose").expect("failed");
        let error = waiting.wait().expect_err("everything has ended");
        assert!(error.to_string().contains("w/1") && error.to_string().contains("on purpose"), "{error}");
        until(other, "the callback", || called.load(Ordering::SeqCst) == 1);
    }
}
