//! The pool's memory is near the RDMA device.

use crate::common::{cluster, member};
use crate::needs_fake;
use crate::nodes::{ON_FAKE_1, fake, sysfs_of_fake_1};
use tensorwire::{Node, NodeError, RegionReport};

/// A NUMA node that no machine has.
const NOWHERE: &str = "1022";

/// The report of a node's pool. `device`: the device's file `numa_node`.
fn pool_with(device: Option<&str>, settings: &[(&str, &str)]) -> Result<RegionReport, NodeError> {
    let folder = sysfs_of_fake_1().join("device");
    if let Some(text) = device {
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("numa_node"), format!("{text}\n")).expect("a file");
    }
    let mut builder = member(&cluster(1), 0);
    for (key, value) in [&ON_FAKE_1, settings].concat() {
        builder = builder.set(key, value);
    }
    let node: Result<Node, _> = builder.start();
    if device.is_some() {
        std::fs::remove_dir_all(folder).expect("removed");
    }
    node.map(|node| node.pool_report().clone())
}

#[test]
fn the_pool_is_on_the_devices_numa_node() {
    needs_fake!();
    let (fake, _turn) = fake();
    let report = pool_with(Some("0"), &[]).expect("a node");
    match &report.numa_shortfall {
        None => assert_eq!(report.numa_node, Some(0)),
        Some(why) => {
            println!("skipped: {why}");
            assert!(why.starts_with("NUMA node 0: "), "{why}");
        }
    }
    fake.assert_clean();
}

#[test]
fn a_node_starts_though_the_devices_numa_node_has_no_memory() {
    needs_fake!();
    let (fake, _turn) = fake();
    let report = pool_with(Some(NOWHERE), &[]).expect("a node");
    let why = report.numa_shortfall.as_deref().expect("no such NUMA node");
    assert!(why.starts_with("NUMA node 1022: mbind failed: "), "{why}");
    assert!(report.to_string().contains(&format!("; not on {why}")), "{report}");
    fake.assert_clean();
}

#[test]
fn nothing_is_preferred_if_the_machine_or_the_fabric_gives_no_reason() {
    needs_fake!();
    let (fake, _turn) = fake();
    for (device, settings) in [
        (None, &[][..]),
        (Some("-1"), &[]),
        (Some("far"), &[]),
        (Some(NOWHERE), &[("fabric", "shm")]),
        (Some(NOWHERE), &[("fabric", "auto")]),
    ] {
        let report = pool_with(device, settings).expect("a node");
        assert_eq!(report.numa_shortfall, None, "{device:?} {settings:?}");
    }
    fake.assert_clean();
}

#[test]
fn the_numa_node_that_is_set_wins_over_the_devices() {
    needs_fake!();
    let (fake, _turn) = fake();
    match pool_with(Some(NOWHERE), &[("numa_node", "0")]) {
        Ok(report) => assert_eq!((report.numa_node, report.numa_shortfall), (Some(0), None)),
        Err(error) => println!("skipped: {error}"),
    }
    let refused = pool_with(Some("0"), &[("numa_node", NOWHERE)]).expect_err("bound to it, not preferred");
    assert!(refused.to_string().contains("binding a region to NUMA node 1022 failed"), "{refused}");
    fake.assert_clean();
}
