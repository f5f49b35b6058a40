//! What a cluster needs of a device, compared with the limits of the device before anything is made
//! on it.

use crate::common::{SOON, cluster, member, run};
use crate::driver::Fake;
use crate::needs_fake;
use crate::nodes::{ON_FAKE_1, fake};
use std::time::Instant;
use tensorwire::{Builder, Node, NodeError, ResourcePlan};

/// Devices that lack queue pairs, completion queues and regions for two peers. What the error says.
const TOO_SMALL: [(&str, [&str; 3]); 3] = [
    ("max_qp=3", ["queue pairs: 4 (", "limit 3 (max_qp of fake_1)", ": lower rdma_qps_per_peer"]),
    (
        "max_cq=1 max_cqe=3000",
        ["completion queues: 2 (", "limit 1 (max_cq of fake_1)", ": lower rdma_qp_queue_depth"],
    ),
    ("max_mr=4", ["memory regions: ", "limit 4 (max_mr of fake_1)", ": lower rdma_registrations"]),
];

fn with(settings: &[(&str, &str)], cluster: &str) -> Builder {
    settings.iter().fold(member(cluster, 0), |builder, (key, value)| builder.set(*key, *value))
}

#[test]
fn a_device_that_is_too_small_for_the_cluster_is_refused_before_anything_is_made() {
    needs_fake!();
    let (fake, _turn) = fake();
    for (limits, says) in TOO_SMALL {
        fake.run(&format!("limits device=fake_1 {limits}"));
        let config = with(&ON_FAKE_1, &cluster(3)).build().expect("settings");
        let started = Node::start(&config).map(drop);
        let printed = ResourcePlan::with_devices(&config).to_string();
        fake.run("limits device=fake_1");
        let error = started.expect_err("too small");
        assert!(matches!(error, NodeError::Limit { .. }), "{error}");
        for part in says {
            assert!(error.to_string().contains(part) && printed.contains(part), "{part}: {error}\n{printed}");
        }
        assert!(fake.calls("create_qp").is_empty() && fake.calls("reg_mr").is_empty(), "{limits}");
        fake.assert_clean();
    }
    let config = with(&ON_FAKE_1, &cluster(3)).build().expect("settings");
    let says = "no limit known (a device says it once it is open)";
    assert_eq!(ResourcePlan::new(&config).to_string().matches(says).count(), 3);
}

#[test]
fn a_device_that_has_what_two_members_need_is_enough() {
    needs_fake!();
    let (fake, _turn) = fake();
    fake.run("limits device=fake_1 max_qp=4 max_cq=2 max_cqe=3000 max_mr=6");
    run(2, &ON_FAKE_1, |_, _| {});
    fake.run("limits device=fake_1");
    fake.assert_clean();
    // Each of the two has locked what was planned.
    let config = with(&ON_FAKE_1, &cluster(2)).build().expect("settings");
    let plan = ResourcePlan::with_devices(&config);
    let planned = |name| plan.resources().iter().find(|it| it.name == name).expect("planned").need;
    let locked: u64 = fake.calls("reg_mr").iter().map(|call| call.number("len")).sum();
    assert_eq!(locked, 2 * planned("locked memory"));
    let made = [fake.calls("create_qp"), fake.calls("create_cq")].map(|calls| calls.len() as u64);
    assert_eq!(made, [2 * planned("queue pairs"), 2 * planned("completion queues")]);
}

/// Nobody serves the store: a member that waits for the others would hear of that instead.
#[test]
fn a_device_that_is_too_small_is_told_before_the_members_meet() {
    needs_fake!();
    let (fake, _turn) = fake();
    let store = format!("tcp://{}", cluster(1).trim_start_matches("w="));
    for (limits, says) in TOO_SMALL {
        fake.run(&format!("limits device=fake_1 {limits}"));
        let variables = [
            ("RANK", "1"),
            ("WORLD_SIZE", "3"),
            ("TENSORWIRE_STORE", &*store),
            ("TENSORWIRE_POOL_SIZE", "4MiB"),
            ("TENSORWIRE_JOIN_TIMEOUT", "60s"),
            ("TENSORWIRE_FABRIC", "verbs"),
            ("RDMA_DEVICE", "fake_1"),
        ];
        let began = Instant::now();
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let started = Node::builder().environment(variables).start().map(drop);
        fake.run("limits device=fake_1");
        let error = started.expect_err("too small").to_string();
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
        assert!(began.elapsed() < SOON, "it waits for nobody");
        fake.assert_clean();
    }
}

#[test]
fn a_device_that_is_too_small_is_not_used_if_no_fabric_is_named() {
    needs_fake!();
    let (fake, _turn) = fake();
    // The one device with an active port.
    set_others(fake, 1);
    for (limits, is_used) in [("max_qp=3", false), ("max_mr=4", false), ("max_qp=4 max_mr=5", true)] {
        fake.run("clear_log");
        fake.run(&format!("limits device=fake_1 {limits}"));
        let started = start_among_hosts(&[]);
        fake.run("limits device=fake_1");
        started.expect("there are other fabrics");
        assert_eq!(!fake.calls("reg_mr").is_empty(), is_used, "{limits}");
        fake.assert_clean();
    }
    set_others(fake, 4);
}

/// Starts one of three members, each on a host of its own, that leave the choice of fabrics.
fn start_among_hosts(settings: &[(&str, &str)]) -> Result<(), NodeError> {
    let auto = [("fabric", "auto"), ("auth", "plain"), ("allow_non_loopback", "true")];
    let hosts = format!("{},10.0.0.1:4000,10.0.0.2:4000", cluster(1));
    let config = with(&[&auto, settings].concat(), &hosts).build().expect("settings");
    Node::start(&config).map(drop)
}

#[test]
fn a_setting_that_the_device_can_not_do_is_an_error_also_if_no_fabric_is_named() {
    needs_fake!();
    let (fake, _turn) = fake();
    // With three active devices that is no reason: which of them is not said.
    start_among_hosts(&[("rdma_gid_index", "7")]).expect("there are other fabrics");
    start_among_hosts(&[("rdma_device", "auto"), ("rdma_gid_index", "77")]).expect_err("no device has it");
    let pairs = [("rdma_device", "auto"), ("rdma_qps_per_peer", "8")];
    let too_many = start_among_hosts(&pairs).expect_err("three devices have 24 together").to_string();
    assert!(too_many.contains("qps_per_peer is 8"), "{too_many}");
    set_others(fake, 1);
    let refused = start_among_hosts(&[("rdma_gid_index", "7")]);
    fake.run("fault call=alloc_mw errno=95 times=1");
    let without = start_among_hosts(&[("rdma_memory_windows", "on")]);
    let small = {
        fake.run("limits device=fake_1 max_qp=3");
        let started = start_among_hosts(&[("rdma_traffic_class", "106")]);
        fake.run("limits device=fake_1");
        started
    };
    set_others(fake, 4);
    let error = refused.expect_err("the one device has no such entry").to_string();
    assert!(error.contains("rdma_gid_index"), "{error}");
    let error = without.expect_err("the one device makes no windows").to_string();
    assert!(error.contains("set rdma_memory_windows to off"), "{error}");
    small.expect("it is too small, whatever the setting");
    fake.assert_clean();
}

/// The state of the ports of all devices but `fake_1`.
fn set_others(fake: &Fake, state: u32) {
    for device in ["fake_0", "fake_2"] {
        fake.run(&format!("port_state device={device} state={state}"));
    }
}

#[test]
fn a_device_that_is_named_and_can_not_be_used_is_an_error_also_if_no_fabric_is_named() {
    needs_fake!();
    let (fake, _turn) = fake();
    for (device, more, limits, says) in [
        ("mlx5_9", None, "", "there is no such RDMA device"),
        ("fake_1", Some(("rdma_gid_index", "7")), "", "rdma_gid_index"),
        ("fake_1", None, "max_qp=3", "queue pairs"),
    ] {
        fake.run(&format!("limits device=fake_1 {limits}"));
        let settings: Vec<_> = [("rdma_device", device)].into_iter().chain(more).collect();
        let started = start_among_hosts(&settings);
        fake.run("limits device=fake_1");
        let error = started.expect_err("it is asked for").to_string();
        assert!(error.contains(says), "{error}");
        fake.assert_clean();
    }
}
