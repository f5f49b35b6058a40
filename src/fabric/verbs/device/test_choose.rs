//! Choices, and their reasons.

use super::testing::{device, down, entry, ethernet, infiniband, limits, roce};
use super::*;

fn chosen(devices: &[Device], device_settings: &DeviceSettings) -> Choice {
    let mut choices = choose(devices, device_settings).unwrap_or_else(|refusal| panic!("refused: {refusal}"));
    assert_eq!((choices.rails.len(), &choices.passed_over[..]), (1, &[][..]));
    choices.rails.remove(0)
}

fn free(devices: &[Device]) -> Choice {
    chosen(devices, &DeviceSettings::default())
}

fn index(choice: &Choice) -> Option<u32> {
    choice.gid.as_ref().map(|entry| entry.index)
}

fn setting<T>(key: &'static str, value: T) -> Option<DeviceSetting<T>> {
    Some(DeviceSetting::asked(key, value, "a test"))
}

#[test]
fn the_only_device_its_only_port_and_its_best_gid_need_no_setting() {
    let choice = free(&[device("mlx5_0", vec![roce(1)])]);
    assert_eq!((choice.device.as_str(), choice.port, index(&choice)), ("mlx5_0", 1, Some(3)));
    assert_eq!(choice.device_reason, DeviceReason::OnlyActive);
    assert_eq!((&choice.port_reason, &choice.gid_reason), (&PortReason::OnlyActive, &GidReason::RoceV2Ipv4));
    assert!(choice.global);
    assert_eq!(
        (choice.pkey_index, choice.pkey, choice.queue_depth, choice.mtu),
        (0, Some(0xffff), 1024, None)
    );
    assert_eq!(
        choice.to_string(),
        "device mlx5_0 (the only one with an active port), port 1 (the only active one), GID 3 \
         (10.0.0.1, RoCE v2, \
         eth0): the first of RoCE v2 with an IPv4 address"
    );
}

#[test]
fn a_device_without_an_active_port_does_not_count() {
    let mut iwarp = device("iw0", vec![roce(1)]);
    iwarp.node_type = NodeType::Rnic;
    let mut odd = device("efa_0", vec![roce(1)]);
    odd.node_type = NodeType::Other(7);
    let devices = [
        device("a", vec![down(roce(1)), down(roce(2))]),
        device("b", Vec::new()),
        iwarp,
        odd,
        device("c", vec![down(roce(1)), roce(2), roce(3)]),
    ];
    let choice = free(&devices);
    assert_eq!((choice.device.as_str(), choice.port), ("c", 2));
    assert_eq!(
        (choice.device_reason, choice.port_reason),
        (DeviceReason::OnlyActive, PortReason::FirstActive)
    );
}

#[test]
fn only_active_is_active() {
    for state in
        [PortState::Down, PortState::Init, PortState::Armed, PortState::ActiveDefer, PortState::Unknown]
    {
        let first = DevicePort { state, ..roce(1) };
        let choice = free(&[device("a", vec![first, roce(2)])]);
        assert_eq!((choice.port, &choice.port_reason), (2, &PortReason::OnlyActive), "{state}");
    }
}

#[test]
fn the_first_active_port_is_the_one_of_the_lowest_number() {
    let choice = free(&[device("a", vec![roce(7), roce(3), down(roce(1)), roce(255)])]);
    assert_eq!((choice.port, choice.port_reason), (3, PortReason::FirstActive));
}

#[test]
fn a_device_and_a_port_that_are_named_are_taken() {
    let devices = [device("a", vec![roce(1)]), device("b", vec![roce(1), infiniband(2, 9), down(roce(3))])];
    let named = DeviceSettings { device: setting("rdma_device", "b".into()), ..DeviceSettings::default() };
    let choice = chosen(&devices, &named);
    assert_eq!((choice.device.as_str(), choice.port), ("b", 1));
    assert_eq!(choice.device_reason, DeviceReason::Asked("a test".into()));
    assert_eq!(choice.port_reason, PortReason::FirstActive);
    let choice = chosen(&devices, &DeviceSettings { port: setting("rdma_device_port", 2), ..named });
    assert_eq!((choice.port, choice.link, choice.lid), (2, LinkLayer::InfiniBand, 9));
    assert_eq!(choice.port_reason, PortReason::Asked("a test".into()));
    assert!(
        choice.to_string().contains("device b (asked for by a test), port 2 (asked for by a test), lid 0x9")
    );
}

/// Addresses of each kind, worst first, with the reason for which each is chosen.
fn kinds() -> Vec<(&'static str, GidKind, GidReason)> {
    vec![
        ("::ffff:10.0.0.9", GidKind::RoceV1, GidReason::RoceV1),
        ("fe80::9", GidKind::RoceV2, GidReason::RoceV2LinkLocal),
        ("fd00::9", GidKind::RoceV2, GidReason::RoceV2Global),
        ("::ffff:10.0.0.9", GidKind::RoceV2, GidReason::RoceV2Ipv4),
    ]
}

#[test]
fn the_best_kind_of_gid_wins_in_whatever_order_and_wherever_in_a_sparse_table() {
    let kinds = kinds();
    // Every set of kinds, at every rotation of places that have holes between them.
    let places = [0, 3, 7, 200];
    for set in 1_usize..16 {
        for turn in 0..4 {
            let present: Vec<_> = (0..4).filter(|kind| set & (1 << kind) != 0).collect();
            let mut gids: Vec<_> = present
                .iter()
                .map(|&kind| entry(places[(kind + turn) % 4], kinds[kind].0, kinds[kind].1))
                .collect();
            for _ in 0..2 {
                gids.reverse(); // the order in which they are listed says nothing
                let port = DevicePort { gid_table: 256, ..ethernet(1, gids.clone()) };
                let choice = free(&[device("a", vec![port])]);
                let best = *present.last().expect("not empty");
                assert_eq!(choice.gid_reason, kinds[best].2, "set {set:04b} turn {turn}");
                assert_eq!(index(&choice), Some(places[(best + turn) % 4]), "set {set:04b} turn {turn}");
            }
        }
    }
}

#[test]
fn of_equals_the_one_at_the_lowest_index_wins() {
    for (address, kind, reason) in kinds() {
        let gids = vec![entry(12, address, kind), entry(4, address, kind), entry(9, address, kind)];
        let choice = free(&[device("a", vec![ethernet(1, gids)])]);
        assert_eq!((index(&choice), choice.gid_reason), (Some(4), reason));
    }
}

#[test]
fn an_index_that_is_named_is_taken_whatever_its_kind() {
    for at in 0..4 {
        let device_settings =
            DeviceSettings { gid_index: setting("rdma_gid_index", at), ..DeviceSettings::default() };
        let choice = chosen(&[device("a", vec![roce(1)])], &device_settings);
        assert_eq!((index(&choice), choice.gid_reason), (Some(at.into()), GidReason::Asked("a test".into())));
    }
    let unknown = ethernet(1, vec![entry(15, "fe80::1", GidKind::Unknown)]);
    let device_settings =
        DeviceSettings { gid_index: setting("rdma_gid_index", 15), ..DeviceSettings::default() };
    assert_eq!(index(&chosen(&[device("a", vec![unknown])], &device_settings)), Some(15));
}

#[test]
fn an_entry_past_what_a_queue_pair_can_name_is_not_chosen() {
    let gids = vec![
        entry(256, "::ffff:10.0.0.1", GidKind::RoceV2),
        entry(255, "fe80::1", GidKind::RoceV1),
        entry(1023, "fd00::1", GidKind::RoceV2),
    ];
    let port = DevicePort { gid_table: 1024, ..ethernet(1, gids) };
    let choice = free(&[device("a", vec![port])]);
    assert_eq!((index(&choice), choice.gid_reason), (Some(255), GidReason::RoceV1));
}

#[test]
fn infiniband_uses_the_lid_and_no_global_header_unless_it_must() {
    let choice = free(&[device("mlx5_0", vec![infiniband(1, 0x1f)])]);
    assert_eq!((choice.lid, choice.global, index(&choice)), (0x1f, false, Some(0)));
    assert_eq!((&choice.gid_reason, choice.link), (&GidReason::InfiniBand, LinkLayer::InfiniBand));

    // No GID at the first place: none is needed.
    let bare = DevicePort { gids: Vec::new(), ..infiniband(1, 7) };
    let choice = free(&[device("mlx5_0", vec![bare])]);
    assert_eq!((choice.lid, choice.global, choice.gid.as_ref()), (7, false, None));
    assert!(choice.to_string().ends_with("lid 0x7, no GID, and none is needed"), "{choice}");

    // The port asks for a global header; then it may even lack a lid.
    for lid in [0, 7] {
        let port = DevicePort { grh_required: Some(true), ..infiniband(1, lid) };
        let choice = free(&[device("mlx5_0", vec![port])]);
        assert_eq!((choice.lid, choice.global, index(&choice)), (lid, true, Some(0)));
    }
    let port = DevicePort { grh_required: Some(false), ..infiniband(1, 7) };
    assert!(!free(&[device("mlx5_0", vec![port])]).global);

    // A named GID behaves in the same way.
    let mut port = infiniband(1, 7);
    port.gids.push(entry(5, "fec0::1", GidKind::InfiniBand));
    let device_settings =
        DeviceSettings { gid_index: setting("rdma_gid_index", 5), ..DeviceSettings::default() };
    let choice = chosen(&[device("mlx5_0", vec![port])], &device_settings);
    assert_eq!((choice.lid, choice.global, index(&choice)), (7, true, Some(5)));
}

#[test]
fn a_port_of_unknown_kind_is_of_infiniband_if_it_has_a_lid() {
    let unknown = |port: DevicePort| DevicePort { link: LinkLayer::Unknown, ..port };
    let choice = free(&[device("a", vec![unknown(infiniband(1, 3))])]);
    assert_eq!((choice.gid_reason, choice.global), (GidReason::InfiniBand, false));
    let choice = free(&[device("a", vec![unknown(roce(1))])]);
    assert_eq!((choice.gid_reason, choice.global), (GidReason::RoceV2Ipv4, true));
}

#[test]
fn the_partition_key_is_the_one_at_the_index() {
    let pkeys = vec![Pkey { index: 0, key: 0xffff }, Pkey { index: 5, key: 0x8001 }];
    let port = DevicePort { pkey_table: 128, pkeys, ..infiniband(1, 3) };
    let device_settings = DeviceSettings {
        pkey_index: DeviceSetting::asked("rdma_qp_pkey_index", 5, "a test"),
        ..DeviceSettings::default()
    };
    let choice = chosen(&[device("a", vec![port])], &device_settings);
    assert_eq!((choice.pkey_index, choice.pkey), (5, Some(0x8001)));
    // An unknown table is not checked.
    let port = DevicePort { pkey_table: 0, pkeys: Vec::new(), ..infiniband(1, 3) };
    let choice = chosen(&[device("a", vec![port])], &device_settings);
    assert_eq!((choice.pkey_index, choice.pkey), (5, None));
}

#[test]
fn the_depth_that_nobody_asked_for_gives_way_to_the_device() {
    let with = |max, depth: DeviceSetting<u32>| {
        let device = Device { limits: Some(limits(max)), ..device("a", vec![roce(1)]) };
        chosen(&[device], &DeviceSettings { queue_depth: depth, ..DeviceSettings::default() }).queue_depth
    };
    let default = || DeviceSetting::default_of("rdma_qp_queue_depth", 1024);
    assert_eq!((with(32768, default()), with(1024, default()), with(1023, default())), (1024, 1024, 1023));
    assert_eq!(with(512, DeviceSetting::asked("rdma_qp_queue_depth", 512, "a test")), 512);
}

#[test]
fn the_mtu_is_the_active_one_or_a_smaller_one_that_is_asked_for() {
    for active in Mtu::ALL {
        let port = DevicePort { active_mtu: Some(active), ..roce(1) };
        let devices = [device("a", vec![port])];
        assert_eq!(free(&devices).mtu, Some(active));
        for asked in Mtu::ALL.into_iter().filter(|asked| *asked <= active) {
            let device_settings =
                DeviceSettings { mtu: setting("rdma_qp_mtu", asked), ..DeviceSettings::default() };
            assert_eq!(chosen(&devices, &device_settings).mtu, Some(asked));
        }
    }
    // Not judged as long as the active one is not known.
    let device_settings =
        DeviceSettings { mtu: setting("rdma_qp_mtu", Mtu::B4096), ..DeviceSettings::default() };
    assert_eq!(chosen(&[device("a", vec![roce(1)])], &device_settings).mtu, Some(Mtu::B4096));
}

/// The devices of rails and their numbers, and the refusals of those that are passed over.
fn rails(devices: &[Device], names: &str) -> (Vec<(String, u8)>, usize) {
    let settings = DeviceSettings { device: setting("rdma_device", names.into()), ..Default::default() };
    let choices = choose(devices, &settings).unwrap_or_else(|refusal| panic!("refused: {refusal}"));
    let rails = choices.rails.into_iter().map(|choice| (choice.device, choice.rail));
    (rails.collect(), choices.passed_over.len())
}

fn named<const N: usize>(rails: [(&str, u8); N]) -> Vec<(String, u8)> {
    rails.map(|(name, rail)| (name.to_owned(), rail)).into()
}

#[test]
fn a_list_of_devices_numbers_its_rails_and_passes_over_one_that_is_down() {
    let devices =
        [device("a", vec![roce(1)]), device("b", vec![down(roce(1))]), device("c", vec![roce(1), roce(2)])];
    assert_eq!(rails(&devices, "a,c"), (named([("a", 0), ("c", 1)]), 0));
    assert_eq!(rails(&devices, "c, a"), (named([("c", 0), ("a", 1)]), 0));
    assert_eq!(rails(&devices, "c,b,a"), (named([("c", 0), ("a", 2)]), 1));
    let settings = DeviceSettings { device: setting("rdma_device", "b,b".into()), ..Default::default() };
    let refusal = choose(&devices, &settings).expect_err("both are down").to_string();
    assert!(refusal.contains("rdma_device is \"b\" (a test): none of its ports is active"), "{refusal}");
    let settings = DeviceSettings { device: setting("rdma_device", "a,d".into()), ..Default::default() };
    let refusal = choose(&devices, &settings).expect_err("one is not there").to_string();
    assert!(refusal.contains("rdma_device is \"d\" (a test): there is no such"), "{refusal}");
}

#[test]
fn auto_takes_the_active_devices_and_numbers_them_as_if_all_were() {
    let mut iwarp = device("mlx5_0", vec![roce(1)]);
    iwarp.node_type = NodeType::Rnic;
    let unaddressed = ethernet(1, Vec::new());
    let devices = [
        device("mlx5_10", vec![roce(1)]),
        iwarp,
        device("mlx5_1", vec![down(roce(1))]),
        device("mlx5_9", vec![roce(1)]),
        device("mlx5_3", vec![unaddressed]),
    ];
    assert_eq!(rails(&devices, "auto"), (named([("mlx5_9", 2), ("mlx5_10", 3)]), 1));
    let many: Vec<_> = (0..6).map(|k| device(&format!("mlx5_{k}"), vec![roce(1)])).collect();
    assert_eq!(rails(&many, "auto").0, named([("mlx5_0", 0), ("mlx5_1", 1), ("mlx5_2", 2), ("mlx5_3", 3)]));
    let settings = DeviceSettings { device: setting("rdma_device", "auto".into()), ..Default::default() };
    let refusal = choose(&devices[2..3], &settings).expect_err("none is active").to_string();
    assert!(refusal.contains("no RDMA device has an active port"), "{refusal}");
    assert!(matches!(choose(&[], &settings), Err(Refusal::NoDevice)));
}

#[test]
fn the_nearest_device_is_the_first_on_the_preferred_numa_node() {
    let on = |name: &str, node| Device { numa_node: node, ..device(name, vec![roce(1)]) };
    let devices = [on("a", Some(0)), on("b", Some(1)), on("c", Some(1))];
    for (near, nearest) in [(None, "a"), (Some(0), "a"), (Some(1), "b"), (Some(7), "a")] {
        let device = setting("rdma_device", "auto".into());
        let choices = choose(&devices, &DeviceSettings { device, near, ..Default::default() });
        let choices = choices.unwrap_or_else(|refusal| panic!("refused: {refusal}"));
        let found = Choice::nearest(choices.rails.iter()).expect("three devices");
        assert_eq!(found.device, nearest, "{near:?}");
    }
}
