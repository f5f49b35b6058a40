//! Members that reach some peers over shared memory and others over verbs: the choice of the fabric
//! for each peer, and links on both that one poller drives.

use crate::common::{SOON, cluster, counting, member, run_each, until, values};
use crate::needs_fake;
use crate::nodes::fake;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, FabricKind, ForeignMemory, Node, Shape, TensorMeta};

/// Member 0 and 1 share memory; member 2 is reached over verbs alone.
fn mixed(task: u32) -> Vec<(&'static str, &'static str)> {
    let fabric = if task == 2 { "verbs" } else { "shm,verbs" };
    vec![("fabric", fabric), ("rdma_device", "fake_1")]
}

fn between(a: u32, b: u32) -> FabricKind {
    if a == 2 || b == 2 { FabricKind::Verbs } else { FabricKind::Shm }
}

fn assert_paths(node: &Node, task: u32) {
    for peer in node.peers() {
        let fabric = between(task, peer.task.task());
        assert_eq!(peer.fabric, Some(fabric), "{peer:?}");
        let why = match (task, fabric) {
            (_, FabricKind::Shm) => "fabric = shm,verbs".to_owned(),
            (2, _) => "fabric = verbs".to_owned(),
            _ => "fabric = shm,verbs; not shm: w/2: fabric is verbs".to_owned(),
        };
        assert_eq!(&*peer.why, why, "{peer:?}");
    }
}

/// A tensor of each size to every peer, and from every peer.
fn exchange(node: &Node, task: u32, id: u64, sizes: &[usize]) {
    let step = node.step(id).expect("new");
    let peers = || (0..3).filter(|peer| *peer != task);
    for (peer, floats) in peers().flat_map(|peer| sizes.iter().map(move |floats| (peer, *floats))) {
        let edge = node.edge_to("w", peer, &format!("of {floats}")).expect("an edge");
        step.send(&edge, counting(node, (id + u64::from(task)) as f32, floats)).expect("sent");
    }
    for (peer, floats) in peers().flat_map(|peer| sizes.iter().map(move |floats| (peer, *floats))) {
        let edge = node.edge_from("w", peer, &format!("of {floats}")).expect("an edge");
        let got = step.recv(&edge, SOON).expect("received");
        assert_eq!(values(&got.tensor), values(&counting(node, (id + u64::from(peer)) as f32, floats)));
    }
    // Every peer has begun this step, so it has all tensors of the one before.
    (id > 0).then(|| node.cleanup(id - 1));
}

#[test]
fn one_poller_drives_links_on_two_fabrics() {
    needs_fake!();
    let (fake, _turn) = fake();
    for poll in ["inline", "adaptive", "dedicated"] {
        let settings = |task| [mixed(task), vec![("poll", poll)]].concat();
        run_each(3, settings, |node, task| {
            assert_paths(node, task);
            for id in 0..30 {
                exchange(node, task, id, &[1, 5000, 100_000]);
            }
        });
        fake.assert_clean();
    }
}

/// A wake-up that is lost costs 100 ms, the longest sleep.
#[test]
fn a_member_that_sleeps_is_woken_on_either_fabric() {
    const ROUNDS: u64 = 60;
    const LONGEST_SLEEP: u64 = 100_000_000;
    needs_fake!();
    let (fake, _turn) = fake();
    let late = Arc::new([const { AtomicU64::new(0) }; 3]);
    let lost = late.clone();
    run_each(
        3,
        |task| [mixed(task), vec![("poll", "adaptive")]].concat(),
        move |node, task| {
            for id in 0..ROUNDS {
                let step = node.step(id).expect("new");
                let speaker = 1 + (id % 2) as u32;
                if task == 0 {
                    let edge = node.edge_from("w", speaker, "x").expect("an edge");
                    let got = step.recv(&edge, SOON).expect("received");
                    let sent = got.tensor.as_slice::<u64>().expect("u64")[0];
                    let is_lost = now() - sent >= LONGEST_SLEEP * 9 / 10;
                    lost[speaker as usize].fetch_add(u64::from(is_lost), Ordering::SeqCst);
                    for peer in [1, 2] {
                        let edge = node.edge_to("w", peer, "next").expect("an edge");
                        step.send(&edge, counting(node, 0.0, 1)).expect("sent");
                    }
                    continue;
                }
                if task == speaker {
                    // The receiver falls asleep.
                    std::thread::sleep(Duration::from_millis(3));
                    let mut tensor = node.tensor(DType::U64, &[1]).expect("room");
                    tensor.as_mut_slice::<u64>().expect("u64")[0] = now();
                    let edge = node.edge_to("w", 0, "x").expect("an edge");
                    step.send(&edge, tensor.freeze()).expect("sent");
                }
                let edge = node.edge_from("w", 0, "next").expect("an edge");
                step.recv(&edge, SOON).expect("received");
            }
        },
    );
    for peer in [1, 2] {
        let late = late[peer].load(Ordering::SeqCst);
        println!("from w/{peer} over {}: {late} of {} came late", between(0, peer as u32), ROUNDS / 2);
        // The machine may be busy.
        assert!(late < ROUNDS / 10, "{late}");
    }
    fake.assert_clean();
}

fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[test]
fn a_link_that_fails_on_one_fabric_leaves_those_on_the_other_alone() {
    needs_fake!();
    let (fake, _turn) = fake();
    let [begun, done] = [0, 0].map(AtomicU64::new).map(Arc::new);
    run_each(3, mixed, move |node, task| {
        exchange(node, task, 0, &[5000]);
        begun.fetch_add(1, Ordering::SeqCst);
        until(node, "everybody's first tensors", || begun.load(Ordering::SeqCst) == 3);
        let generations = || node.peers().iter().map(|peer| peer.generation.get()).collect::<Vec<_>>();
        let before = generations();
        if task == 2 {
            fake.run("fail_request status=12 vendor=0x42");
        }
        let began = Instant::now();
        for id in 1000.. {
            if generations() != before || done.load(Ordering::SeqCst) > 0 {
                break;
            }
            assert!(began.elapsed() < SOON, "no link has failed");
            // Fails while there is no link.
            let Ok(step) = node.step(id) else { continue };
            for peer in [0, 1].into_iter().filter(|_| task == 2) {
                let edge = node.edge_to("w", peer, "x").expect("an edge");
                let _ = step.send(&edge, counting(node, 0.0, 5000));
            }
            if task != 2 {
                let edge = node.edge_from("w", 2, "x").expect("an edge");
                let _ = step.recv(&edge, Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(1));
            node.cleanup(id);
        }
        done.fetch_add(1, Ordering::SeqCst);
        until(node, "everybody's return", || node.join().is_ok() && done.load(Ordering::SeqCst) >= 3);
        let shm = node.peers().into_iter().filter(|peer| peer.fabric == Some(FabricKind::Shm));
        shm.for_each(|peer| assert_eq!(peer.generation.get(), 1, "{peer:?}"));
        assert_paths(node, task);
        done.fetch_add(1, Ordering::SeqCst);
        until(node, "everybody's look", || done.load(Ordering::SeqCst) == 6);
        exchange(node, task, 5000, &[1, 5000]);
    });
    fake.assert_clean();
}

#[test]
fn a_member_that_comes_back_is_reached_as_before() {
    needs_fake!();
    let (fake, _turn) = fake();
    let cluster = cluster(3);
    let start = |task| {
        let builder =
            mixed(task).into_iter().fold(member(&cluster, task), |b, (key, value)| b.set(key, value));
        builder.start().expect("it starts")
    };
    let join_all = |nodes: &[Node]| {
        std::thread::scope(|scope| {
            let joins: Vec<_> =
                nodes.iter().map(|node| scope.spawn(|| node.join().expect("joined"))).collect();
            joins.into_iter().for_each(|join| join.join().expect("no panic"));
        });
    };
    let mut nodes: Vec<Node> = (0..3).map(start).collect();
    join_all(&nodes);
    for lost in [1, 2] {
        let life = nodes[lost].incarnation();
        nodes.remove(lost).stop().expect("in time");
        nodes.insert(lost, start(lost as u32));
        assert_ne!(nodes[lost].incarnation(), life);
        let began = Instant::now();
        while nodes.iter().any(|node| {
            node.join().is_err()
                || node
                    .peers()
                    .iter()
                    .any(|peer| peer.incarnation != Some(nodes[peer.task.task() as usize].incarnation()))
        }) {
            assert!(began.elapsed() < SOON, "{:?}", nodes[0].peers());
        }
        nodes.iter().zip(0..).for_each(|(node, task)| assert_paths(node, task));
        std::thread::scope(|scope| {
            for (node, task) in nodes.iter().zip(0..) {
                scope.spawn(move || {
                    let base = 100 * lost as u64;
                    (base..base + 5).for_each(|id| exchange(node, task, id, &[1, 50_000]));
                    // The others may still take what was sent.
                    until(node, "the last values", || node.pool().is_empty());
                });
            }
        });
    }
    nodes.into_iter().for_each(|node| drop(node.stop().expect("in time")));
    fake.assert_clean();
}

#[test]
fn two_members_that_name_different_fabrics_hear_why_at_once() {
    needs_fake!();
    let (fake, _turn) = fake();
    let (cluster, started) = (cluster(2), Barrier::new(2));
    let join = |task: u32, fabric: &'static str| {
        let builder = member(&cluster, task).set("fabric", fabric).set("rdma_device", "fake_1");
        let node = builder.start().expect("it starts");
        started.wait();
        let began = Instant::now();
        let error = node.join().expect_err("they have nothing in common").to_string();
        (node, error, began.elapsed())
    };
    let ended = std::thread::scope(|scope| {
        let joins = [(0, "shm"), (1, "verbs")].map(|(task, fabric)| scope.spawn(move || join(task, fabric)));
        joins.map(|join| join.join().expect("no panic"))
    });
    for (_node, error, took) in &ended {
        println!("{error}");
        for part in ["no fabric in common", "shm: w/1: fabric is verbs", "verbs: w/0: fabric is shm"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(*took < SOON / 10, "{took:?}");
    }
    drop(ended);
    fake.assert_clean();
}

#[test]
fn memory_outside_the_pool_is_registered_for_verbs_and_copied_for_shared_memory() {
    needs_fake!();
    let (fake, _turn) = fake();
    run_each(3, mixed, |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            let memory = ForeignMemory::from_owner(vec![7; 40_000]);
            let meta = TensorMeta::new(DType::U8, Shape::new(&[40_000]).expect("shape")).expect("meta");
            let tensor = memory.tensor(node.pool(), meta, 0).expect("inside");
            for peer in [1, 2] {
                let edge = node.edge_to("w", peer, "x").expect("an edge");
                step.send(&edge, tensor.clone()).expect("sent");
            }
            let counters = node.counters();
            assert_eq!(counters.get(Counter::TensorsStaged), 1, "for w/1");
            assert_eq!(counters.get(Counter::RegistrationsMade), 1, "for w/2");
        } else {
            let edge = node.edge_from("w", 0, "x").expect("an edge");
            let got = step.recv(&edge, SOON).expect("received");
            assert_eq!(got.tensor.bytes(), [7; 40_000]);
        }
    });
    fake.assert_clean();
}
