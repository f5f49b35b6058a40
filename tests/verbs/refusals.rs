//! Errors when a device or the kernel refuses something: the attempt, the reason, the remedy.
//! Nothing is left behind.

use crate::driver::{Fake, ONE_NIC};
use crate::harness::TIMEOUT;
use crate::needs_fake;
use crate::setup::*;
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::{VerbsEndpoint, VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkOptions, Role};

const NO_MEMORY: &str =
    "raise the memlock limit (`ulimit -l unlimited`) or make the pool and queue_depth smaller";
const NO_RIGHT: &str = "give the process access to /dev/infiniband, as with the group rdma";

#[test]
fn a_fabric_that_can_t_be_made_says_why() {
    needs_fake!();
    for (fault, parts) in [
        ("reg_mr errno=12", ["registering 1048576 bytes with fake_0", NO_MEMORY]),
        ("reg_mr errno=1", ["registering 1048576 bytes with fake_0", NO_RIGHT]),
        ("reg_mr errno=13", ["registering 1048576 bytes with fake_0", NO_RIGHT]),
        ("reg_mr errno=14", ["registering 1048576 bytes with fake_0", "dmesg"]),
        ("alloc_pd errno=12", ["making a protection domain of fake_0", NO_MEMORY]),
        (
            "open_device errno=13",
            ["opening the device fake_0 failed: Permission denied", "/dev/infiniband/uverbs*"],
        ),
        ("open_device errno=1", ["opening the device fake_0", "in containers too"]),
        ("query_device errno=5", ["querying the device fake_0", "dmesg"]),
        (
            "query_device errno=5 minus_one=1",
            ["querying the device fake_0 failed: Input/output error", "dmesg"],
        ),
        ("query_port errno=5 minus_one=1", ["querying port 1 of fake_0 failed: Input/output error", "dmesg"]),
        ("query_port errno=5", ["querying port 1 of fake_0", "dmesg"]),
        ("get_device_list errno=38", ["listing RDMA devices failed", "load the kernel's module ib_uverbs"]),
    ] {
        let fake = Fake::new(&format!("{ONE_NIC}\nfault call={fault}"));
        assert_says(&refusal(&fake, VerbsOptions::default()), &parts);
        fake.assert_clean();
    }
}

#[test]
fn options_that_no_device_permits_are_refused_by_name() {
    needs_fake!();
    type Change = fn(&mut VerbsOptions);
    let wrong: [(Change, &str); 7] = [
        (|o| o.service_level = 8, "service_level is 8: 0 to 7"),
        (|o| o.timeout = 32, "timeout is 32: 0 to 31"),
        (|o| o.retry_count = 8, "retry_count is 8: 0 to 7"),
        (|o| o.rnr_retry = 8, "rnr_retry is 8: 0 to 7"),
        (|o| o.min_rnr_timer = 32, "min_rnr_timer is 32: 0 to 31"),
        (|o| o.cq_entries = 0, "cq_entries is 0: at least 1"),
        (|o| o.timeout = 255, "timeout is 255: 0 to 31"),
    ];
    let fake = Fake::new(ONE_NIC);
    for (change, said) in wrong {
        let mut options = VerbsOptions::default();
        change(&mut options);
        assert_says(&refusal(&fake, options), &[said]);
    }
    fake.assert_clean();
}

fn endpoint_refusal(fabric: &VerbsFabric, options: &LinkOptions) -> String {
    match fabric.endpoint(0, options) {
        Ok(_) => panic!("an endpoint was made"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn an_endpoint_that_can_t_be_made_says_why() {
    needs_fake!();
    for (fault, parts) in [
        (
            "create_comp_channel errno=24",
            ["making a completion channel of fake_0", "raise the limit of open files"],
        ),
        (
            "create_cq errno=12",
            ["making a completion queue of 16384 on completion vector 0 of fake_0", NO_MEMORY],
        ),
        ("create_qp errno=12", ["making a queue pair of", NO_MEMORY]),
        (
            "create_qp errno=12 skip=1",
            ["making a queue pair of 20 sends and 16 receives on fake_0", NO_MEMORY],
        ),
        ("create_qp errno=1", ["making a queue pair of", NO_RIGHT]),
        ("create_qp errno=22", ["making a queue pair of", "lower rdma_qp_queue_depth"]),
        ("modify_qp:INIT errno=22", ["moving queue pair", "the device refuses a setting"]),
        // The pool is registered by now. These are the buffers of a link.
        ("reg_mr errno=12", ["registering", NO_MEMORY]),
        ("reg_mr errno=12 skip=1", ["registering", NO_MEMORY]),
    ] {
        let fake = Fake::new(ONE_NIC);
        let made = fabric(&fake, VerbsOptions::default()).expect("a fabric");
        fake.run(&format!("fault call={fault}"));
        assert_says(&endpoint_refusal(&made, &link(16)), &parts);
        drop(made);
        fake.assert_clean();
    }
}

#[test]
fn a_port_that_can_t_be_made_says_why() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let made = fabric(&fake, VerbsOptions::default()).expect("a fabric");
    fake.run("fault call=create_comp_channel errno=24 times=1");
    let error = made.port().expect_err("no channel").to_string();
    assert_says(&error, &["making a completion channel of fake_0", "raise the limit of open files"]);
    drop(made);
    fake.assert_clean();
}

#[test]
fn depths_that_the_device_can_t_do_are_refused() {
    needs_fake!();
    let script = ONE_NIC.replace("name=fake_0", "name=fake_0 max_qp_wr=132 max_cqe=1000");
    let fake = Fake::new(&script);
    let made = fabric(&fake, VerbsOptions::default()).expect("a fabric");
    for depth in [0, 129, 256] {
        let parts =
            [&*format!("depth is {depth}: 1 to 4 less than the device's max_qp_wr"), "ibv_devinfo -v"];
        assert_says(&endpoint_refusal(&made, &link(depth)), &parts);
    }
    let wide = VerbsOptions { qps_per_peer: 4, ..VerbsOptions::default() };
    assert_says(
        &endpoint_refusal(&fabric(&fake, wide).expect("a fabric"), &link(128)),
        &[
            "a link needs 1146 places of a completion queue, and fake_0 has queues of 1000",
            "lower rdma_qp_queue_depth",
        ],
    );
    drop(made.endpoint(0, &link(128)).expect("just as deep as the device permits"));
    drop(made);
    fake.assert_clean();
}

/// Both endpoints of a link, and the first one's error about the address of the second.
fn connect_refusal(a: VerbsEndpoint, b: &VerbsEndpoint) -> String {
    match a.connect(Role::Initiator, b.address(), TIMEOUT) {
        Ok(_) => panic!("they were connected"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_queue_pair_that_can_t_be_connected_says_why() {
    needs_fake!();
    for (fault, parts) in [
        ("modify_qp:RTR errno=110", ["to RTR", "the peer's GID can't be reached from this port"]),
        ("modify_qp:RTR errno=110 minus_one=1", ["to RTR", "the peer's GID can't be reached from this port"]),
        ("modify_qp:RTR errno=101", ["to RTR", "check the addresses and VLANs of both interfaces"]),
        ("modify_qp:RTR errno=113", ["to RTR", "or choose another GID index"]),
        ("modify_qp:RTR errno=22", ["to RTR", "see gid_index, pkey_index, mtu and service_level"]),
        ("modify_qp:RTR errno=22 skip=1", ["to RTR", "the device refuses a setting"]),
        ("modify_qp:RTS errno=22", ["to RTS", "the device refuses a setting"]),
        ("modify_qp:RTS errno=5", ["to RTS", "dmesg"]),
    ] {
        let fake = Fake::new(TWO_NICS);
        let a = fabric(&fake, on("fake_0")).expect("a fabric");
        let b = fabric(&fake, on("fake_1")).expect("a fabric");
        let endpoints =
            [a.endpoint(0, &link(16)).expect("an endpoint"), b.endpoint(0, &link(16)).expect("an endpoint")];
        fake.run(&format!("fault call={fault}"));
        let [to_b, to_a] = endpoints;
        let said = connect_refusal(to_b, &to_a);
        assert_says(&said, &["moving queue pair", "of fake_0", parts[0], parts[1]]);
        drop((to_a, a, b));
        fake.assert_clean();
    }
}

#[test]
fn ends_that_do_not_fit_are_refused_by_name() {
    needs_fake!();
    let script = TWO_NICS.replace(
        "type=2 gid=00000000000000000000ffff0a000002",
        "type=1 gid=00000000000000000000ffff0a000002",
    );
    let fake = Fake::new(&script);
    let a = fabric(&fake, on("fake_0")).expect("a fabric");
    let b = fabric(&fake, on("fake_1")).expect("a fabric");
    let endpoint = |of: &VerbsFabric, options: &LinkOptions| of.endpoint(0, options).expect("an endpoint");
    let said = connect_refusal(endpoint(&a, &link(16)), &endpoint(&b, &link(16)));
    assert_says(&said, &["its GID is of type RoCE v1, this side's of type RoCE v2", "tensorwire devices"]);
    let later = LinkOptions { generation: 2, ..link(16) };
    let said = connect_refusal(endpoint(&a, &link(16)), &endpoint(&a, &later));
    assert_says(&said, &["its endpoint is of generation 2, this side's of 1"]);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_peer_that_is_not_there_is_waited_for_no_longer_than_was_said() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let striped = |device| VerbsOptions { qps_per_peer: 2, ..on(device) };
    let a = fabric(&fake, striped("fake_0")).expect("a fabric");
    let b = fabric(&fake, striped("fake_1")).expect("a fabric");
    let endpoints =
        [a.endpoint(0, &link(16)).expect("an endpoint"), b.endpoint(0, &link(16)).expect("an endpoint")];
    let start = Instant::now();
    let [to_b, to_a] = endpoints;
    let timeout = Duration::from_millis(300);
    let said = match to_b.connect(Role::Initiator, to_a.address(), timeout) {
        Ok(_) => panic!("nobody was there"),
        Err(error) => error.to_string(),
    };
    assert!(start.elapsed() >= timeout && start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    assert_says(&said, &["ping on 2 of 2 queue pairs of fake_0 port 1, RoCE v2 GID index 1", "300ms"]);
    drop((to_a, a, b));
    fake.assert_clean();
}

#[test]
fn a_link_is_attached_to_the_port_that_it_was_made_for() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let made = fabric(&fake, VerbsOptions::default()).expect("a fabric");
    let mut ports = [made.port().expect("a port"), made.port().expect("a port")];
    let links = crate::harness::connect(&made, &made, &link(16));
    let error = tensorwire::internals::fabric::Port::attach(&mut ports[1], links.0)
        .expect_err("of port 0")
        .to_string();
    assert_says(&error, &["port is 1", "the port of the number that its endpoint was made for"]);
    drop((links.1, ports, made));
    fake.assert_clean();
}
