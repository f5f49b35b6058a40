//! The attributes that `ibv_modify_qp` is given, for each setting.

use crate::driver::{Fake, Line};
use crate::needs_fake;
use crate::setup::*;
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::verbs::device::Mtu;

/// The calls that moved a device's queue pairs to one state.
fn steps(fake: &Fake, device: &str, to: &str) -> Vec<Line> {
    let of = pairs_of(fake, device);
    let mut steps = fake.calls("modify_qp");
    steps.retain(|step| step.text("to") == to && of.contains(&step.number("qp")));
    assert_eq!(steps.len(), of.len(), "each queue pair goes to {to} once");
    steps
}

/// Two ports on each of two devices, with holes in the tables.
const TABLES: &str = "
device name=fake_0 max_qp_rd_atom=8 max_qp_init_rd_atom=5
port state=1
port mtu=5 pkeys=9 gid_len=200
gid index=150 type=2 gid=20010db8000000000000000000000001
device name=fake_1 max_qp_rd_atom=3 max_qp_init_rd_atom=7
port mtu=4 gid_len=4
gid index=3 type=2 gid=20010db8000000000000000000000002";

#[test]
fn every_setting_reaches_the_queue_pairs() {
    needs_fake!();
    let fake = Fake::new(TABLES);
    let mut device_settings = on("fake_0").device_settings;
    device_settings.port = Some(setting("rdma_device_port", 2));
    device_settings.gid_index = Some(setting("rdma_gid_index", 150));
    device_settings.pkey_index = setting("rdma_qp_pkey_index", 8);
    device_settings.mtu = Some(setting("rdma_qp_mtu", Mtu::B1024));
    let options = VerbsOptions {
        device_settings,
        service_level: 3,
        traffic_class: 96,
        timeout: 18,
        retry_count: 5,
        rnr_retry: 4,
        min_rnr_timer: 10,
        ..VerbsOptions::default()
    };
    let (mut a, mut b) = ends(&fake, [options, on("fake_1")], &link(16));
    for (at, step) in steps(&fake, "fake_0", "INIT").iter().enumerate() {
        assert_eq!([step.number("port"), step.number("pkey_index")], [2, 8]);
        // Local write, remote write, remote read. The control queue pair gives access to no memory.
        assert_eq!(step.number("access"), if at == 0 { 1 } else { 1 | 2 | 4 });
    }
    let theirs = pairs_of(&fake, "fake_1");
    for (step, peer) in steps(&fake, "fake_0", "RTR").iter().zip(theirs) {
        assert_eq!(step.number("dest"), peer);
        assert_eq!(step.number("path_mtu"), 3, "1024, which is less than the other's 2048");
        assert_eq!([step.number("port"), step.number("sgid_index"), step.number("is_global")], [2, 150, 1]);
        assert_eq!([step.number("sl"), step.number("traffic_class")], [3, 96]);
        assert_eq!([step.number("hop_limit"), step.number("flow_label")], [64, 0]);
        assert_eq!(step.number("rnr_timer"), 10);
        assert_eq!(step.number("dest_reads"), 8, "as many as the device answers");
        assert_eq!(step.text("dgid"), "20010db8000000000000000000000002");
    }
    for step in steps(&fake, "fake_0", "RTS") {
        assert_eq!([step.number("timeout"), step.number("retry_count")], [18, 5]);
        assert_eq!(step.number("rnr_retry"), 4);
        assert_eq!(step.number("reads"), 3, "5 is what this device asks at a time, 3 what the other answers");
    }
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn without_settings_the_defaults_are_those_of_the_table() {
    needs_fake!();
    let fake = Fake::new(TABLES);
    let ends = ends(&fake, [on("fake_0"), on("fake_1")], &link(16));
    for step in steps(&fake, "fake_1", "INIT") {
        assert_eq!([step.number("port"), step.number("pkey_index")], [1, 0]);
    }
    for step in steps(&fake, "fake_0", "INIT") {
        assert_eq!(step.number("port"), 2, "the first that is active");
    }
    for step in steps(&fake, "fake_1", "RTR") {
        assert_eq!(step.number("path_mtu"), 4, "the active MTU of this end, which is the smaller one");
        assert_eq!([step.number("sl"), step.number("traffic_class"), step.number("rnr_timer")], [0, 0, 22]);
        assert_eq!(step.number("sgid_index"), 3, "the only one");
    }
    for step in steps(&fake, "fake_0", "RTR") {
        assert_eq!(step.number("path_mtu"), 4, "the active MTU of the other end, which is the smaller one");
    }
    for step in steps(&fake, "fake_1", "RTS") {
        let told = ["timeout", "retry_count", "rnr_retry"].map(|name| step.number(name));
        assert_eq!(told, [14, 7, 6]);
    }
    drop(ends);
    fake.assert_clean();
}

#[test]
fn packet_numbers_are_drawn_anew_and_fit_on_both_ends() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let wide = |device| VerbsOptions { qps_per_peer: 8, ..on(device) };
    let ends = ends(&fake, [wide("fake_0"), wide("fake_1")], &link(16));
    let numbers =
        |device, to| -> Vec<u64> { steps(&fake, device, to).iter().map(|step| step.number("psn")).collect() };
    let sent = numbers("fake_0", "RTS");
    assert_eq!(sent, numbers("fake_1", "RTR"), "what one side starts with is what the other waits for");
    assert_eq!(numbers("fake_1", "RTS"), numbers("fake_0", "RTR"));
    let different: std::collections::HashSet<_> = sent.iter().collect();
    assert!(different.len() > 7, "of nine random numbers of 24 bits two are hardly ever the same: {sent:?}");
    drop(ends);
    fake.assert_clean();
}

/// Two hosts on one InfiniBand subnet, with the `flags` of their ports.
fn infiniband(flags: [u8; 2]) -> String {
    let [one, other] = flags;
    format!(
        "
device name=fake_0
port layer=1 lid=17 flags={one}
gid index=0 type=0 gid=fe80000000000000b8599f0300a1b2c4
device name=fake_1
port layer=1 lid=23 flags={other}
gid index=0 type=0 gid=fe80000000000000b8599f0300a1b2c5"
    )
}

#[test]
fn on_infiniband_the_lid_is_the_address_and_no_global_header_is_sent() {
    needs_fake!();
    let fake = Fake::new(&infiniband([0, 0]));
    let (mut a, mut b) = two(&fake, 16);
    for (device, peer) in [("fake_0", 23), ("fake_1", 17)] {
        for step in steps(&fake, device, "RTR") {
            assert_eq!([step.number("is_global"), step.number("dlid"), step.number("sl")], [0, peer, 0]);
        }
    }
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn an_infiniband_port_that_needs_global_headers_gets_them_on_both_ends() {
    needs_fake!();
    let fake = Fake::new(&infiniband([1, 0]));
    let (mut a, mut b) = two(&fake, 16);
    for (device, peer) in [("fake_0", 23), ("fake_1", 17)] {
        for step in steps(&fake, device, "RTR") {
            assert_eq!(
                [step.number("is_global"), step.number("dlid"), step.number("sgid_index")],
                [1, peer, 0]
            );
        }
    }
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

/// A GID is 10 bits, 22 zeros, the LID for routers in 16 bits, the subnet in 16 bits, and the port.
#[test]
fn packets_to_another_infiniband_subnet_go_to_the_lid_that_routers_forward() {
    needs_fake!();
    for (forwarded, expected) in [("0000", 23), ("00c7", 0xC7)] {
        let other = format!("gid=fec00000{forwarded}0002b8599f0300a1b2c5");
        let script = infiniband([0, 0]).replace("gid=fe80000000000000b8599f0300a1b2c5", &other);
        let fake = Fake::new(&script);
        let (a, b) = two(&fake, 16);
        for step in steps(&fake, "fake_0", "RTR") {
            assert_eq!([step.number("is_global"), step.number("dlid")], [1, expected]);
        }
        drop((a, b));
        fake.assert_clean();
    }
}
