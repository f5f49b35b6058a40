//! Devices read from a tree that is laid out as `/sys`.

use super::testing::gid;
use super::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use tempfile::TempDir;

/// A tree with these files, each with its text.
fn tree(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().expect("folder");
    for (path, text) in files {
        write(root.path(), path, text);
    }
    root
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
    fs::write(path, text).expect("file");
}

/// A NIC of two ports: InfiniBand that is up, and Ethernet that is down, both with sparse tables.
fn nic() -> TempDir {
    let root = tree(&[]);
    let put = |path: &str, text: &str| write(root.path(), &format!("class/infiniband/mlx4_0/{path}"), text);
    put("node_type", "1: CA\n");
    put("fw_ver", "2.42.5000\n");
    for (port, state, physical, link, rate, lid) in [
        (1, "4: ACTIVE\n", "5: LinkUp\n", "InfiniBand\n", "56 Gb/sec (4X FDR)\n", "0x1a\n"),
        (2, "1: DOWN\n", "3: Disabled\n", "Ethernet\n", "40 Gb/sec (4X QDR)\n", "0x0\n"),
    ] {
        for (file, text) in
            [("state", state), ("phys_state", physical), ("link_layer", link), ("rate", rate), ("lid", lid)]
        {
            put(&format!("ports/{port}/{file}"), text);
        }
        for index in 0..128 {
            put(&format!("ports/{port}/gids/{index}"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        }
        put(&format!("ports/{port}/pkeys/0"), "0xffff\n");
    }
    for index in 1..128 {
        put(&format!("ports/1/pkeys/{index}"), if index == 9 { "0x8002\n" } else { "0x0000\n" });
    }
    put("ports/1/gids/0", "fe80:0000:0000:0000:0002:c903:0000:0001\n");
    put("ports/1/gids/1", "fe80:0000:0000:0000:0000:0000:0000:0000\n");
    put("ports/1/gid_attrs/types/0", "IB/RoCE v1\n");
    for (index, address, kind) in [
        (3, "fe80:0000:0000:0000:0202:c9ff:fe00:0002", "IB/RoCE v1\n"),
        (10, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2\n"),
        (100, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v3\n"),
    ] {
        put(&format!("ports/2/gids/{index}"), &format!("{address}\n"));
        put(&format!("ports/2/gid_attrs/types/{index}"), kind);
    }
    put("ports/2/gid_attrs/ndevs/3", "ens1\n");
    put("ports/2/gid_attrs/ndevs/10", "ens1.5\n");
    write(root.path(), "class/net/ens1/mtu", "9000\n");
    write(root.path(), "class/infiniband_verbs/uverbs3/ibdev", "mlx4_0\n");
    write(root.path(), "class/infiniband_verbs/abi_version", "6\n");
    write(root.path(), "devices/pci0000:00/0000:3b:00.0/numa_node", "1\n");
    let target = root.path().join("devices/pci0000:00/0000:3b:00.0");
    symlink(target, root.path().join("class/infiniband/mlx4_0/device")).expect("link");
    root
}

#[test]
fn everything_that_the_kernel_shows_is_read() {
    let root = nic();
    let found = read(root.path()).expect("read");
    assert!(found.subsystem);
    let [device] = &found.devices[..] else { panic!("one device: {found:?}") };
    assert_eq!(
        (device.name.as_str(), device.node_type, device.firmware.as_str()),
        ("mlx4_0", NodeType::ChannelAdapter, "2.42.5000")
    );
    assert_eq!(
        (device.uverbs, device.bus.as_deref(), device.numa_node),
        (Some(3), Some("0000:3b:00.0"), Some(1))
    );
    assert_eq!(device.limits, None);

    let [infiniband, ethernet] = &device.ports[..] else { panic!("two ports: {device:?}") };
    assert_eq!(
        (infiniband.number, infiniband.state, infiniband.physical),
        (1, PortState::Active, PhysicalState::LinkUp)
    );
    assert_eq!((infiniband.link, infiniband.lid), (LinkLayer::InfiniBand, 0x1a));
    let speed = Speed { megabits: 56_000, width: 4, generation: "FDR".into() };
    assert_eq!((infiniband.speed.as_ref(), infiniband.active_mtu), (Some(&speed), None));
    let own = GidEntry { index: 0, gid: gid("fe80::2:c903:0:1"), kind: GidKind::InfiniBand, interface: None };
    assert_eq!((infiniband.gid_table, &infiniband.gids[..]), (128, &[own][..]));
    let keys = [Pkey { index: 0, key: 0xffff }, Pkey { index: 9, key: 0x8002 }];
    assert_eq!((infiniband.pkey_table, &infiniband.pkeys[..]), (128, &keys[..]));

    assert_eq!(
        (ethernet.number, ethernet.state, ethernet.physical),
        (2, PortState::Down, PhysicalState::Disabled)
    );
    assert_eq!((ethernet.link, ethernet.lid, ethernet.pkey_table), (LinkLayer::Ethernet, 0, 1));
    let gids: Vec<_> = ethernet.gids.iter().map(GidEntry::to_string).collect();
    assert_eq!(
        gids,
        [
            "3 (fe80::202:c9ff:fe00:2, RoCE v1, ens1)",
            "10 (10.0.0.1, RoCE v2, ens1.5)",
            "100 (2001:db8::1, unknown type)"
        ]
    );
    let interface = |name: &str, mtu| Interface { name: name.into(), mtu };
    assert_eq!(ethernet.interfaces, [interface("ens1", Some(9000)), interface("ens1.5", None)]);

    let choice = choose(&found.devices, &DeviceSettings::default()).expect("choice");
    let choice = &choice.rails[0];
    assert_eq!((choice.port, choice.lid, choice.global), (1, 0x1a, false));
}

#[test]
fn a_machine_without_the_subsystem_and_one_without_a_device_are_told_apart() {
    let none = tree(&[("class/net/lo/mtu", "65536\n")]);
    assert_eq!(read(none.path()).expect("read"), Found { subsystem: false, devices: Vec::new() });
    fs::create_dir_all(none.path().join("class/infiniband")).expect("folder");
    assert_eq!(read(none.path()).expect("read"), Found { subsystem: true, devices: Vec::new() });
}

#[test]
fn a_folder_of_devices_that_cannot_be_read_is_an_error() {
    let root = tree(&[("class/infiniband", "a file\n")]);
    assert!(read(root.path()).is_err());
}

#[test]
fn what_cannot_be_understood_is_not_known_and_what_is_endpoint_gone_is_left_out() {
    let root = tree(&[
        ("class/infiniband/gone/fw_ver", "1\n"), // no node_type any more
        ("class/infiniband/usnic_0/node_type", "5: usNIC\n"),
        ("class/infiniband/iw_0/node_type", "4: RNIC\n"),
        ("class/infiniband/odd_0/node_type", "1: CA\n"),
        ("class/infiniband/odd_0/device/numa_node", "-1\n"),
        ("class/infiniband/odd_0/ports/1/state", "9: ASLEEP\n"),
        ("class/infiniband/odd_0/ports/1/phys_state", "\n"),
        ("class/infiniband/odd_0/ports/1/link_layer", "Token Ring\n"),
        ("class/infiniband/odd_0/ports/1/rate", "fast\n"),
        ("class/infiniband/odd_0/ports/1/lid", "many\n"),
        ("class/infiniband/odd_0/ports/1/gids/0", "no address\n"),
        ("class/infiniband/odd_0/ports/1/gids/4294967295", "fe80::1\n"),
        ("class/infiniband/odd_0/ports/1/gids/x", "fe80::1\n"),
        ("class/infiniband/odd_0/ports/1/pkeys/65536", "0xffff\n"),
        ("class/infiniband/odd_0/ports/2/lid", "0x1\n"), // no state any more
        ("class/infiniband/odd_0/ports/256/state", "4: ACTIVE\n"),
        ("class/infiniband_verbs/uverbs0/dev", "231:192\n"),
        ("class/infiniband_verbs/uverbsx/ibdev", "odd_0\n"),
    ]);
    let found = read(root.path()).expect("read");
    let names: Vec<_> = found.devices.iter().map(|device| (device.name.as_str(), device.node_type)).collect();
    assert_eq!(
        names,
        [("iw_0", NodeType::Rnic), ("odd_0", NodeType::ChannelAdapter), ("usnic_0", NodeType::Other(5))]
    );
    let odd = &found.devices[1];
    assert_eq!((odd.uverbs, odd.numa_node, odd.firmware.as_str(), odd.ports.len()), (None, None, "", 1));
    let port = &odd.ports[0];
    assert_eq!(
        (port.state, port.physical, port.link),
        (PortState::Unknown, PhysicalState::Unknown, LinkLayer::Unknown)
    );
    assert_eq!((port.lid, port.speed.as_ref(), port.pkey_table), (0, None, 0));
    assert_eq!(port.gids.iter().map(|gid| gid.index).collect::<Vec<_>>(), [u32::MAX]);
}

#[test]
fn whether_a_program_may_use_a_device_is_seen_at_its_file() {
    let dev = tree(&[("infiniband/uverbs2", "")]);
    let with = |uverbs| {
        let device = Device { uverbs, ..super::testing::device("a", Vec::new()) };
        user_access(dev.path(), &device)
    };
    assert!(matches!(with(Some(2)), UserAccess::Allowed));
    assert!(matches!(with(None), UserAccess::NoDriver));
    let UserAccess::Refused { file, why } = with(Some(3)) else { panic!("there is no such file") };
    assert!(file.ends_with("infiniband/uverbs3"), "{file}");
    assert_eq!(why.kind(), std::io::ErrorKind::NotFound);
}
