//! Refusals: each message is complete, has one line, and lists the choices.

use super::testing::{device, down, entry, ethernet, infiniband, limits, roce};
use super::*;

const HERE: &str = "environment variable RDMA_X";

fn refused(devices: &[Device], device_settings: &DeviceSettings) -> String {
    let refusal = choose(devices, device_settings).expect_err("refused").to_string();
    assert!(!refusal.contains('\n'), "one line: {refusal}");
    refusal
}

fn free(devices: &[Device]) -> String {
    refused(devices, &DeviceSettings::default())
}

fn setting<T>(key: &'static str, value: T) -> Option<DeviceSetting<T>> {
    Some(DeviceSetting::asked(key, value, HERE))
}

fn named(name: &str) -> DeviceSettings {
    DeviceSettings { device: setting("rdma_device", name.into()), ..DeviceSettings::default() }
}

/// One active device, one that is down, and one that is not a channel adapter.
fn some() -> Vec<Device> {
    let mut iwarp = device("iw0", vec![roce(1)]);
    iwarp.node_type = NodeType::Rnic;
    vec![
        device("mlx5_0", vec![infiniband(1, 3), down(infiniband(2, 0))]),
        device("mlx5_1", vec![down(roce(1))]),
        iwarp,
    ]
}

const SOME: &str = "mlx5_0 (port 1 ACTIVE InfiniBand, port 2 DOWN InfiniBand), mlx5_1 (port 1 DOWN \
 Ethernet), iw0 (an \
                    iWARP NIC, whose connections need a connection manager)";

#[test]
fn no_device_at_all() {
    assert!(free(&[]).starts_with("there is no RDMA device: load the driver of the NIC"));
    assert_eq!(
        refused(&[], &named("mlx5_0")),
        "rdma_device is \"mlx5_0\" (environment variable RDMA_X): there is no such RDMA device; there is none"
    );
}

#[test]
fn no_device_with_an_active_port() {
    let [_, down, iwarp] = <[Device; 3]>::try_from(some()).expect("three");
    assert_eq!(
        free(&[down, iwarp, device("empty", Vec::new())]),
        "no RDMA device has an active port: bring one up, or name another fabric; there is mlx5_1 (port \
         1 DOWN \
         Ethernet), iw0 (an iWARP NIC, whose connections need a connection manager), empty (no port)"
    );
}

#[test]
fn several_devices_with_active_ports() {
    let mut devices = some();
    devices.push(device("rxe0", vec![roce(1)]));
    assert_eq!(
        free(&devices),
        format!(
            "2 RDMA devices have an active port: name one of them with rdma_device (RDMA_DEVICE), or set it \
             to auto for all; there \
             is {SOME}, rxe0 \
             (port 1 ACTIVE Ethernet)"
        )
    );
}

#[test]
fn a_device_that_is_not_there_is_down_or_has_no_reliable_connections() {
    let why = |name: &str| refused(&some(), &named(name));
    let asked = |name: &str| format!("rdma_device is \"{name}\" (environment variable RDMA_X): ");
    assert_eq!(why("mlx5_7"), asked("mlx5_7") + &format!("there is no such RDMA device; there is {SOME}"));
    assert_eq!(
        why("iw0"),
        asked("iw0")
            + &format!("it is an iWARP NIC, whose connections need a connection manager; there is {SOME}")
    );
    assert_eq!(
        why("mlx5_1"),
        asked("mlx5_1")
            + "none of its ports is active: bring one up (cable, switch, `ip link set ... up`; on \
             InfiniBand a subnet \
               manager), or name another device; there is "
            + SOME
    );
}

#[test]
fn a_port_that_is_not_there_or_down() {
    let why = |port| {
        refused(&some(), &DeviceSettings { port: setting("rdma_device_port", port), ..named("mlx5_0") })
    };
    assert_eq!(
        why(3),
        "rdma_device_port is \"3\" (environment variable RDMA_X): mlx5_0 has no such port; it has port 1 \
         ACTIVE \
         InfiniBand, port 2 DOWN InfiniBand"
    );
    assert_eq!(
        why(2),
        "rdma_device_port is \"2\" (environment variable RDMA_X): port 2 of mlx5_0 is DOWN: bring it up \
         (cable, switch, \
         `ip link set ... up`; on InfiniBand a subnet manager), or name another; mlx5_0 has port 1 \
         ACTIVE InfiniBand, \
         port 2 DOWN InfiniBand"
    );
    for state in [PortState::Init, PortState::Armed, PortState::ActiveDefer, PortState::Unknown] {
        let devices = [device("a", vec![DevicePort { state, ..roce(1) }])];
        let why = refused(&devices, &DeviceSettings { port: setting("rdma_device_port", 1), ..named("a") });
        assert!(why.contains(&format!("port 1 of a is {state}: bring it up")), "{why}");
    }
}

#[test]
fn an_infiniband_port_without_lid() {
    assert_eq!(
        free(&[device("a", vec![infiniband(1, 0)])]),
        "port 1 of a is an InfiniBand port without a lid: is a subnet manager running? a has port 1 \
         ACTIVE InfiniBand"
    );
}

#[test]
fn an_infiniband_port_that_needs_a_gid_and_has_none() {
    let other = entry(2, "fec0::1", GidKind::InfiniBand);
    let port = DevicePort { grh_required: Some(true), gids: vec![other], ..infiniband(1, 4) };
    assert_eq!(
        free(&[device("a", vec![port])]),
        "port 1 of a asks for a global header, and entry 0 of its GID table is empty: name one with \
         rdma_gid_index \
         (RDMA_GID_INDEX); there is 2 (fec0::1, InfiniBand, eth0)"
    );
}

#[test]
fn a_roce_port_without_a_gid_to_choose() {
    let why = free(&[device("a", vec![ethernet(1, Vec::new())])]);
    assert!(
        why.starts_with(
            "port 1 of a has no GID of RoCE v1 or v2 at 0 to 255 to choose: give its network interface"
        ),
        "{why}"
    );
    assert!(why.ends_with("there is none"), "{why}");
    let odd = vec![entry(3, "fe80::1", GidKind::Unknown), entry(4, "fe80::1", GidKind::InfiniBand)];
    let why = free(&[device("a", vec![ethernet(1, odd)])]);
    assert!(
        why.ends_with("there is 3 (fe80::1, unknown type, eth0), 4 (fe80::1, InfiniBand, eth0)"),
        "{why}"
    );
}

#[test]
fn a_gid_index_at_a_hole_or_past_the_end_of_a_sparse_table() {
    let sparse = || {
        let gids = vec![entry(2, "fe80::1", GidKind::RoceV1), entry(7, "::ffff:10.0.0.1", GidKind::RoceV2)];
        [device("a", vec![ethernet(1, gids)])]
    };
    let there = "the GID table of port 1 of a has 2 (fe80::1, RoCE v1, eth0), 7 (10.0.0.1, RoCE v2, eth0)";
    for index in [0, 1, 3, 6, 8, 15, 16, 255] {
        let what = if index < 16 { "that entry is empty" } else { "that is past the table's end" };
        assert_eq!(
            refused(
                &sparse(),
                &DeviceSettings { gid_index: setting("rdma_gid_index", index), ..DeviceSettings::default() }
            ),
            format!(
                "rdma_gid_index is \"{index}\" (environment variable RDMA_X): it must be 0 to 15, an \
                 entry that is not \
                 empty; {what}; {there}"
            )
        );
    }
}

#[test]
fn a_table_longer_than_a_queue_pair_can_name() {
    let gids = vec![entry(256, "::ffff:10.0.0.1", GidKind::RoceV2)];
    let devices = [device("a", vec![DevicePort { gid_table: 1024, ..ethernet(1, gids) }])];
    let why = free(&devices);
    assert!(why.ends_with("; there is 256 (10.0.0.1, RoCE v2, eth0)"), "{why}");
    let why = refused(
        &devices,
        &DeviceSettings { gid_index: setting("rdma_gid_index", 7), ..DeviceSettings::default() },
    );
    assert!(
        why.contains(": it must be 0 to 255, an entry that is not empty; that entry is empty; "),
        "{why}"
    );
}

#[test]
fn a_long_table_is_cut_with_its_number() {
    let gids = (0..200).map(|at| entry(at, "fe80::1", GidKind::Unknown)).collect();
    let why = free(&[device("a", vec![DevicePort { gid_table: 256, ..ethernet(1, gids) }])]);
    assert!(
        why.ends_with(", 23 (fe80::1, unknown type, eth0) and 176 more (`tensorwire devices` lists them)"),
        "{why}"
    );
}

#[test]
fn a_partition_key_index_at_a_hole_or_past_the_end() {
    let pkeys = vec![Pkey { index: 0, key: 0xffff }, Pkey { index: 2, key: 0x8001 }];
    let devices = [device("a", vec![DevicePort { pkey_table: 128, pkeys, ..infiniband(1, 3) }])];
    for index in [1, 127, 128, 65535] {
        let device_settings = DeviceSettings {
            pkey_index: DeviceSetting::asked("rdma_qp_pkey_index", index, HERE),
            ..DeviceSettings::default()
        };
        assert_eq!(
            refused(&devices, &device_settings),
            format!(
                "rdma_qp_pkey_index is \"{index}\" (environment variable RDMA_X): it must be 0 to 127, \
                 an entry that is \
                 not empty; the P_Key table of port 1 of a has 0 (0xffff), 2 (0x8001)"
            )
        );
    }
    let none = [device("a", vec![DevicePort { pkeys: Vec::new(), ..infiniband(1, 3) }])];
    assert_eq!(
        free(&none),
        "rdma_qp_pkey_index is \"0\" (the default): it must be 0 to 0, an entry that is not empty; the \
         P_Key table of \
         port 1 of a has none"
    );
}

#[test]
fn a_depth_past_the_devices() {
    let device = Device { limits: Some(limits(32768)), ..device("a", vec![roce(1)]) };
    let device_settings = DeviceSettings {
        queue_depth: DeviceSetting::asked("rdma_qp_queue_depth", 32769, HERE),
        ..DeviceSettings::default()
    };
    assert_eq!(
        refused(&[device], &device_settings),
        "rdma_qp_queue_depth is \"32769\" (environment variable RDMA_X): it must be 1 to 32768; a holds \
         at most 32768 \
         work requests in a queue (max_qp_wr)"
    );
}

#[test]
fn an_mtu_above_the_active_one() {
    for active in Mtu::ALL {
        let devices = [device("a", vec![DevicePort { active_mtu: Some(active), ..roce(1) }])];
        for asked in Mtu::ALL.into_iter().filter(|asked| *asked > active) {
            let why = refused(
                &devices,
                &DeviceSettings { mtu: setting("rdma_qp_mtu", asked), ..DeviceSettings::default() },
            );
            let start = format!("rdma_qp_mtu is \"{asked}\" (environment variable RDMA_X): it must be 256");
            assert!(why.starts_with(&start), "{why}");
            assert!(why.ends_with(&format!("; the active MTU of port 1 of a is {active}")), "{why}");
        }
    }
    let devices = [device("a", vec![DevicePort { active_mtu: Some(Mtu::B1024), ..roce(1) }])];
    let why = refused(
        &devices,
        &DeviceSettings { mtu: setting("rdma_qp_mtu", Mtu::B4096), ..DeviceSettings::default() },
    );
    assert!(why.contains("it must be 256, 512, 1024; the active"), "{why}");
}
