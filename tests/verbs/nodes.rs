//! Whole nodes on the verbs fabric, over the scripted libibverbs of `tests/fake_verbs`. The tests
//! check settings and the queue pairs that they make, refused starts, and links that fail and come
//! back.

use crate::common::{SOON, cluster, counting, run, run_each, values};
use crate::driver::Fake;
use crate::{driver, foreign, needs_fake};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tensorwire::{Config, Counter, DType, Error, ForeignMemory, Node, Shape, Step, TensorMeta};

/// Three usable devices; one GID table is sparse.
const DEVICES: &str = "
device name=fake_0 max_qp_wr=4096
port pkeys=9 mtu=4
gid index=3 type=2 gid=00000000000000000000ffff0a000001
port state=1
device name=fake_1 vectors=4 sysfs=SYSFS caps=0x1000000
port
gid index=1 type=2 gid=00000000000000000000ffff0a000002
device name=fake_2
port max_msg_sz=4096
gid index=1 type=2 gid=00000000000000000000ffff0a000003";

/// The scripted library of this process. One test at a time holds it.
pub fn fake() -> (&'static Fake, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    static FAKE: OnceLock<Fake> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = || DEVICES.replace("SYSFS", sysfs_of_fake_1().to_str().expect("text"));
    let fake = FAKE.get_or_init(|| Fake::system(&devices()));
    fake.run("clear_log");
    (fake, turn)
}

/// The folder of `fake_1` in sysfs. It is empty, or as the test that holds the library fills it.
pub fn sysfs_of_fake_1() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")).path()
}

pub const ON_FAKE_1: [(&str, &str); 2] = [("fabric", "verbs"), ("rdma_device", "fake_1")];

#[test]
fn tensors_of_every_size_travel_and_nothing_is_left_behind() {
    needs_fake!();
    let (fake, _turn) = fake();
    run(3, &ON_FAKE_1, |node, task| {
        for (id, size) in [1, 1000, 100_000, 200_000].into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            let (next, before) = ((task + 1) % 3, (task + 2) % 3);
            let edge = node.edge_to("w", next, "x").expect("an edge");
            step.send(&edge, counting(node, task as f32, size)).expect("sent");
            let edge = node.edge_from("w", before, "x").expect("an edge");
            let got = step.recv(&edge, SOON).expect("received");
            assert_eq!(values(&got.tensor), values(&counting(node, before as f32, size)));
        }
    });
    fake.assert_clean();
}

/// Step `id` of one of two members: each sends tensors of three sizes to the other one.
fn exchange(node: &Node, task: u32, id: u64) -> Result<(), Error> {
    let step = node.step(id)?;
    for floats in [1, 5000, 100_000] {
        let to = node.edge_to("w", 1 - task, &format!("of {floats}"))?;
        step.send(&to, counting(node, id as f32, floats))?;
    }
    for floats in [1, 5000, 100_000] {
        let from = node.edge_from("w", 1 - task, &format!("of {floats}"))?;
        let got = step.recv(&from, SOON)?;
        assert_eq!(values(&got.tensor), values(&counting(node, id as f32, floats)));
    }
    // The peer has begun this step, so it has all tensors of the one before.
    (id > 0).then(|| node.cleanup(id - 1));
    Ok(())
}

#[test]
fn tensors_travel_between_members_with_and_without_memory_windows() {
    needs_fake!();
    let (fake, _turn) = fake();
    for (windows, depth) in [(["on", "on"], "1024"), (["on", "off"], "8"), (["on", "on"], "1")] {
        fake.run("clear_log");
        let settings = move |task: u32| {
            let windows = ("rdma_memory_windows", windows[task as usize]);
            [&ON_FAKE_1[..], &[windows, ("rdma_qp_queue_depth", depth)]].concat()
        };
        run_each(2, settings, |node, task| {
            for id in 0..20 {
                exchange(node, task, id).unwrap_or_else(|error| panic!("step {id}: {error}"));
            }
        });
        let made = fake.calls("alloc_mw").len();
        assert!((1..40).contains(&made), "{made} windows: each serves many grants");
        assert_eq!(fake.calls("dealloc_mw").len(), made);
        fake.assert_clean();
    }
}

#[test]
fn a_link_that_fails_is_made_again_with_new_queue_pairs() {
    needs_fake!();
    let (fake, _turn) = fake();
    // The current step; 0 after the last one.
    let current = Arc::new(AtomicU64::new(1));
    let sender_s_error = Arc::new(OnceLock::new());
    run(2, &ON_FAKE_1, move |node, task| {
        if task == 0 {
            let mut sent = 0;
            let start = Instant::now();
            while current.load(Ordering::SeqCst) > 0 && start.elapsed() < 2 * SOON {
                let id = current.load(Ordering::SeqCst);
                if id != sent && id > 0 {
                    let edge = node.edge_to("w", 1, "x").expect("an edge");
                    // Sends fail while there is no link.
                    let _ = node.step(id).and_then(|step| step.send(&edge, counting(node, id as f32, 5000)));
                    sent = id;
                }
                let _ = node.progress();
                let peers = node.peers();
                if let Some(error) = peers.iter().find_map(|peer| peer.state.error()) {
                    let _ = sender_s_error.set(error.to_string());
                }
            }
            return;
        }
        let exchange = |id: u64| {
            current.store(id, Ordering::SeqCst);
            let edge = node.edge_from("w", 0, "x").expect("an edge");
            // Its destination is granted late, so the next request is the sender's.
            let given = node.tensor(DType::F32, &[5000]).expect("room");
            let receive = |step: Step| step.receive(&edge).into(given).within(Duration::from_secs(2)).wait();
            let got = node.step(id).and_then(receive)?;
            assert_eq!(got.tensor.as_slice::<f32>().expect("f32")[4999], id as f32 + 4999.0);
            Ok::<(), Error>(())
        };
        exchange(1).expect("the link is there");
        let generation = || node.peers().iter().map(|peer| peer.generation).max().expect("a peer");
        let (first, before) = (generation(), numbers(fake));
        fake.run("fail_request status=12 vendor=0x42");
        let start = Instant::now();
        let (mut id, mut errors) = (2, Vec::new());
        while let Err(error) = exchange(id) {
            assert!(start.elapsed() < SOON, "the link did not come back: {errors:?}");
            errors.push(error.to_string());
            id += 1;
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(generation() > first);
        // The write was the sender's: it knows the cause.
        let ended = errors.first().expect("what was under way has failed");
        assert_says(ended, &["the peer closed the link"]);
        let said = sender_s_error.get().expect("the sender has seen the loss");
        assert_says(said, &["retries exceeded (error 12, vendor's 0x42)", "same GID type and VLAN"]);
        let after = numbers(fake);
        assert!(after.iter().all(|number| !before.contains(number)), "{before:?} {after:?}");
        current.store(0, Ordering::SeqCst);
    });
    fake.assert_clean();
}

/// Steps go on in both directions while the first rail, or the second one, is cut.
#[test]
fn the_loss_of_either_rail_fails_no_call() {
    needs_fake!();
    let (fake, _turn) = fake();
    for lost in ["fake_1", "fake_0"] {
        let settings = [("fabric", "verbs"), ("rdma_device", "fake_1,fake_0"), ("rdma_qp_retry_count", "1")];
        run(2, &settings, move |node, task| {
            for id in 0..60 {
                if (id, task) == (20, 0) {
                    fake.run(&format!("cut device={lost}"));
                }
                exchange(node, task, id).unwrap_or_else(|error| panic!("{lost}, step {id}: {error}"));
            }
            let counters = node.counters();
            let counted = [Counter::RailsLost, Counter::PeersLost].map(|counter| counters.get(counter));
            assert_eq!(counted, [1, 0], "{lost}");
            let is_first = u64::from(lost == "fake_1");
            assert_eq!(counters.get(Counter::LinksRepaired), is_first, "{lost}");
            assert_eq!(node.peers()[0].devices.len(), 1, "{lost}");
        });
        fake.run(&format!("cut device={lost} on=0"));
        fake.assert_clean();
    }
}

#[test]
fn a_tensor_of_more_requests_than_the_queue_has_is_refused_to_its_receiver_and_others_go_on() {
    needs_fake!();
    let (fake, _turn) = fake();
    let short = [("fabric", "verbs"), ("rdma_device", "fake_2"), ("rdma_qp_queue_depth", "16")];
    run(2, &short, |node, task| {
        let (to, from) = (
            node.edge_to("w", 1 - task, "x").expect("an edge"),
            node.edge_from("w", 1 - task, "x").expect("an edge"),
        );
        // 16 requests of 4 KiB; one of them has the length.
        for (id, floats) in [15 * 1024, 15 * 1024 + 1, 100].into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            step.send(&to, counting(node, 1.0, floats)).expect("sent");
            match step.recv(&from, SOON) {
                Ok(got) => assert_eq!(values(&got.tensor).len(), floats),
                Err(error) => {
                    assert_eq!(id, 1, "{error}");
                    let parts =
                        ["the tensor has 61444 bytes", "carries 61440 in one write", "rdma_qp_queue_depth"];
                    assert_says(&error.to_string(), &parts);
                }
            }
        }
    });
    fake.assert_clean();
}

#[test]
fn a_queue_may_have_any_depth_from_1_to_what_the_device_permits() {
    needs_fake!();
    let (fake, _turn) = fake();
    // 8,192 is the limit of the device. Four requests of each send queue are the fabric's own.
    for (depths, made) in [
        (["1", "1"], [[5, 1]; 2]),
        (["1000", "1000"], [[1004, 1000]; 2]),
        (["8192", "8188"], [[8192, 8188]; 2]),
        (["1", "24"], [[5, 1], [28, 24]]),
        (["777", "3"], [[7, 3], [781, 777]]),
    ] {
        fake.run("clear_log");
        let settings = move |task: u32| {
            let depth = ("rdma_qp_queue_depth", depths[task as usize]);
            [&ON_FAKE_1[..], &[depth, ("rdma_qps_per_peer", "2")]].concat()
        };
        run_each(2, settings, |node, task| {
            for id in 0..20 {
                let step = node.step(id).expect("new");
                for floats in [1, 5000, 100_000] {
                    let to = node.edge_to("w", 1 - task, &format!("of {floats}")).expect("an edge");
                    step.send(&to, counting(node, id as f32, floats)).expect("sent");
                }
                for floats in [1, 5000, 100_000] {
                    let from = node.edge_from("w", 1 - task, &format!("of {floats}")).expect("an edge");
                    let got = step.recv(&from, SOON).expect("received");
                    assert_eq!(values(&got.tensor), values(&counting(node, id as f32, floats)));
                }
                // The peer has begun this step, so it has all tensors of the one before.
                (id > 0).then(|| node.cleanup(id - 1));
            }
        });
        let of_control = [57, 49];
        let rooms =
            fake.calls("create_qp").into_iter().map(|pair| ["sends", "receives"].map(|of| pair.number(of)));
        let mut rooms: Vec<_> = rooms.filter(|room| *room != of_control).collect();
        rooms.sort_unstable();
        rooms.dedup();
        let mut expected = made.to_vec();
        expected.dedup();
        assert_eq!(rooms, expected, "{depths:?}");
        fake.assert_clean();
    }
}

#[test]
fn the_pollers_of_a_hosts_members_take_the_completion_vectors_in_turn() {
    needs_fake!();
    let (fake, _turn) = fake();
    // Each member has two pollers, and on each of them a link. The device has four vectors.
    let settings = [&ON_FAKE_1[..], &[("poll", "adaptive"), ("pollers", "2")]].concat();
    run(4, &settings, |_, _| {});
    let mut vectors: Vec<_> = fake.calls("create_cq").iter().map(|queue| queue.number("vector")).collect();
    vectors.sort_unstable();
    assert_eq!(vectors, [0, 0, 1, 1, 2, 2, 3, 3]);
    fake.assert_clean();
}

/// The queue pairs that exist.
fn numbers(fake: &Fake) -> Vec<u64> {
    fake.pairs().iter().map(|pair| pair.number("qp")).collect()
}

fn refused(variables: &'static [(&'static str, &'static str)]) -> String {
    let environment = || variables.iter().map(|(name, value)| (name.into(), value.into()));
    let builder = Config::builder().member("w", 0).set("cluster", cluster(1)).set("fabric", "verbs");
    let builder = builder.set("pool_size", "1MiB").set("pool_pages", "plain").set("pool_lock", "no");
    let error = match builder.environment(environment()).build() {
        Err(error) => error.to_string(),
        Ok(config) => Node::start(&config).expect_err("refused").to_string(),
    };
    assert!(!error.contains('\n'), "{error}");
    error
}

fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

#[test]
fn a_value_that_the_device_can_t_do_stops_the_start_with_variable_value_and_what_it_offers() {
    needs_fake!();
    let (fake, _turn) = fake();
    assert_says(
        &refused(&[]),
        &["3 RDMA devices have an active port", "RDMA_DEVICE", "fake_0 (", "fake_1 ("],
    );
    assert_says(
        &refused(&[("RDMA_DEVICE", "mlx5_0")]),
        &["\"mlx5_0\" (environment variable RDMA_DEVICE)", "fake_0 (", "fake_1 ("],
    );
    assert_says(
        &refused(&[("RDMA_DEVICE", "fake_0"), ("RDMA_DEVICE_PORT", "2")]),
        &[
            "\"2\" (environment variable RDMA_DEVICE_PORT)",
            "port 2 of fake_0 is DOWN",
            "port 1 ACTIVE Ethernet",
        ],
    );
    assert_says(
        &refused(&[("RDMA_DEVICE", "fake_0"), ("RDMA_DEVICE_PORT", "3")]),
        &["\"3\" (environment variable RDMA_DEVICE_PORT)", "fake_0 has no such port", "port 2 DOWN Ethernet"],
    );
    assert_says(
        &refused(&[("RDMA_DEVICE", "fake_0"), ("RDMA_GID_INDEX", "1")]),
        &["\"1\" (environment variable RDMA_GID_INDEX)", "0 to 15", "entry is empty", "3 (10.0.0.1, RoCE v2"],
    );
    for variable in ["RDMA_QP_PKEY_INDEX", "RDMA_PKEY"] {
        let variables = Vec::leak(vec![("RDMA_DEVICE", "fake_0"), (variable, "9")]);
        assert_says(&refused(variables), &[&format!("\"9\" (environment variable {variable})"), "0 to 8"]);
    }
    for variable in ["RDMA_QP_QUEUE_DEPTH", "RDMA_QUEUE_DEPTH"] {
        let variables = Vec::leak(vec![("RDMA_DEVICE", "fake_0"), (variable, "4097")]);
        let parts =
            [&*format!("\"4097\" (environment variable {variable})"), "1 to 4096", "fake_0", "max_qp_wr"];
        assert_says(&refused(variables), &parts);
    }
    for variable in ["RDMA_QP_MTU", "RDMA_MTU"] {
        let variables = Vec::leak(vec![("RDMA_DEVICE", "fake_0"), (variable, "4096")]);
        let parts =
            [&*format!("\"4096\" (environment variable {variable})"), "256, 512, 1024, 2048", "is 2048"];
        assert_says(&refused(variables), &parts);
    }
    for (variable, value, allowed) in [
        ("RDMA_QP_TIMEOUT", "32", "0 to 31"),
        ("RDMA_TIMEOUT", "soon", "0 to 31"),
        ("RDMA_QP_RETRY_COUNT", "8", "0 to 7"),
        ("RDMA_RETRY_CNT", "-1", "0 to 7"),
        ("RDMA_QP_SL", "8", "0 to 7"),
        ("RDMA_SL", "high", "0 to 7"),
        ("RDMA_TRAFFIC_CLASS", "256", "0 to 255"),
        ("RDMA_MTU", "1500", "256, 512, 1024, 2048 or 4096"),
        ("RDMA_DEVICE_PORT", "0", "1 to 255"),
        ("RDMA_GID_INDEX", "256", "0 to 255"),
    ] {
        let variables = Vec::leak(vec![("RDMA_DEVICE", "fake_0"), (variable, value)]);
        assert_says(&refused(variables), &[&format!("{value:?} (environment variable {variable})"), allowed]);
    }
    fake.assert_clean();
}

/// Starts a node with these variables, and joins it with a node that has none.
fn joined(fake: &Fake, variables: &'static [(&'static str, &'static str)]) -> Vec<driver::Line> {
    fake.run("clear_log");
    let cluster = cluster(2);
    let environment = || variables.iter().map(|(name, value)| (name.into(), value.into()));
    let node = |task: u32, device: Option<&str>| {
        let builder = Config::builder().member("w", task).set("cluster", &*cluster).set("fabric", "verbs");
        let builder = builder.set("pool_size", "1MiB").set("pool_pages", "plain").set("pool_lock", "no");
        match device {
            Some(device) => builder.set("rdma_device", device),
            None => builder.environment(environment()),
        }
    };
    let [a, b] = [node(0, None), node(1, Some("fake_1"))]
        .map(|builder| Node::start(&builder.build().expect("a configuration")).expect("a node"));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| b.join().expect("joined"));
        a.join().expect("joined");
        other.join().expect("no panic");
    });
    let of: Vec<u64> = fake
        .pairs()
        .iter()
        .filter(|pair| pair.text("device") == "fake_0")
        .map(|pair| pair.number("qp"))
        .collect();
    let mut steps = fake.calls("modify_qp");
    steps.retain(|step| of.contains(&step.number("qp")));
    assert!(steps.len() >= 6, "a control queue pair and a data queue pair, three steps each: {steps:?}");
    drop((a, b));
    fake.assert_clean();
    steps
}

#[test]
fn the_variables_reach_the_queue_pairs_under_both_names() {
    needs_fake!();
    let (fake, _turn) = fake();
    let spellings: [&[(&str, &str)]; 2] = [
        &[
            ("RDMA_DEVICE", "fake_0"),
            ("RDMA_DEVICE_PORT", "1"),
            ("RDMA_GID_INDEX", "3"),
            ("RDMA_QP_PKEY_INDEX", "8"),
            ("RDMA_QP_QUEUE_DEPTH", "128"),
            ("RDMA_QP_TIMEOUT", "17"),
            ("RDMA_QP_RETRY_COUNT", "5"),
            ("RDMA_QP_RNR_RETRY", "3"),
            ("RDMA_QP_MIN_RNR_TIMER", "12"),
            ("RDMA_QPS_PER_PEER", "3"),
            ("RDMA_RELAXED_ORDERING", "true"),
            ("RDMA_QP_SL", "3"),
            ("RDMA_QP_MTU", "512"),
            ("RDMA_TRAFFIC_CLASS", "104"),
        ],
        &[
            ("RDMA_DEVICE", "fake_0"),
            ("RDMA_PKEY", "8"),
            ("RDMA_QUEUE_DEPTH", "128"),
            ("RDMA_TIMEOUT", "17"),
            ("RDMA_RETRY_CNT", "5"),
            ("RDMA_QP_RNR_RETRY", "3"),
            ("RDMA_QP_MIN_RNR_TIMER", "12"),
            ("RDMA_QPS_PER_PEER", "1"),
            ("RDMA_SL", "3"),
            ("RDMA_MTU", "512"),
            ("RDMA_TRAFFIC_CLASS", "104"),
        ],
    ];
    for variables in spellings {
        for step in joined(fake, variables) {
            let told = |names: &[&str]| names.iter().map(|name| step.number(name)).collect::<Vec<_>>();
            match step.text("to") {
                "INIT" => assert_eq!(told(&["port", "pkey_index"]), [1, 8]),
                "RTR" => assert_eq!(
                    told(&["sgid_index", "sl", "path_mtu", "traffic_class", "rnr_timer"]),
                    [3, 3, 2, 104, 12]
                ),
                _ => {
                    assert_eq!(told(&["timeout", "retry_count", "rnr_retry"]), [17, 5, 3]);
                }
            }
        }
        let asked =
            |name: &str| variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| *value);
        // Each side makes one for control and one for data. This side also makes those for stripes.
        let stripes = if asked("RDMA_QPS_PER_PEER") == Some("3") { 2 } else { 0 };
        assert_eq!(fake.calls("create_qp").len(), 4 + stripes);
        let relaxed = fake.calls("reg_mr_iova2").len();
        assert_eq!(
            relaxed,
            usize::from(asked("RDMA_RELAXED_ORDERING").is_some()),
            "of the pool of this side alone"
        );
    }
}

#[test]
fn memory_outside_the_pool_is_registered_and_sent_from_where_it_lies() {
    needs_fake!();
    let (fake, _turn) = fake();
    for case in [
        foreign::travel,
        foreign::mapped_anew,
        foreign::arena,
        foreign::received,
        foreign::given_up,
        foreign::standing,
        foreign::to_itself,
        foreign::no_room,
        foreign::waits_for_room,
        foreign::refused,
        foreign::ends_beside_callbacks,
    ] {
        case(&ON_FAKE_1);
    }
    fake.assert_clean();
}

#[test]
fn memory_for_whose_registration_there_is_no_room_goes_through_the_pool() {
    needs_fake!();
    let (fake, _turn) = fake();
    run(
        2,
        &[("fabric", "verbs"), ("rdma_device", "fake_1"), ("rdma_registered_bytes", "10000")],
        |node, task| {
            let memory = ForeignMemory::from_owner(vec![7; 40_000]);
            for (id, bytes) in [5000, 20_000].into_iter().enumerate() {
                let step = node.step(id as u64).expect("new");
                if task == 0 {
                    let meta =
                        TensorMeta::new(DType::U8, Shape::new(&[bytes]).expect("shape")).expect("meta");
                    let tensor = memory.tensor(node.pool(), meta, 0).expect("inside");
                    step.send(&node.edge_to("w", 1, "x").expect("edge"), tensor).expect("sent");
                } else {
                    let edge = node.edge_from("w", 0, "x").expect("edge");
                    let got = step.recv(&edge, SOON).expect("received").tensor;
                    assert!(got.bytes().len() as u64 == bytes && got.bytes().iter().all(|byte| *byte == 7));
                }
            }
            if task == 0 {
                let counters = node.counters();
                let which =
                    [Counter::RegistrationsMade, Counter::RegistrationsRefused, Counter::TensorsStaged];
                assert_eq!(which.map(|counter| counters.get(counter)), [1, 1, 1]);
            }
        },
    );
    fake.assert_clean();
}
