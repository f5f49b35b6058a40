//! The device, port and GID that the fabric opens, and the errors when there is none.

use crate::driver::{Fake, Line};
use crate::needs_fake;
use crate::setup::*;
use tensorwire::internals::fabric::Fabric;
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::verbs::device::Mtu;

/// Two active devices, one that is down, and one with iWARP.
const SEVERAL: &str = "
device name=mlx5_0
port layer=1 lid=7
gid index=0 type=0 gid=fe80000000000000b8599f0300a1b2c4
port layer=2
gid index=2 type=2 gid=00000000000000000000ffff0a000001
device name=mlx5_1
port state=1
device name=mlx5_2
port state=1
port state=2 layer=1
port
gid index=0 type=1 gid=fe80000000000000b8599ffffea1b2c6
gid index=1 type=2 gid=fe80000000000000b8599ffffea1b2c6
gid index=4 type=1 gid=00000000000000000000ffff0a000203
gid index=5 type=2 gid=20010db8000000000000000000000203
gid index=9 type=2 gid=00000000000000000000ffff0a000203
gid index=12 type=2 gid=00000000000000000000ffff0a000204
device name=iw_0 node_type=4 transport=1
port";

/// The transitions to INIT and RTR of a queue pair that is linked to another one of the same
/// device.
fn place(fake: &Fake, options: VerbsOptions) -> [Line; 2] {
    fake.run("clear_log");
    let ends = ends(fake, [options.clone(), options], &link(16));
    let mut steps = fake.calls("modify_qp");
    drop(ends);
    fake.assert_clean();
    let mut first = |to: &str| {
        let at = steps.iter().position(|step| step.text("to") == to).expect("each goes there");
        steps.remove(at)
    };
    [first("INIT"), first("RTR")]
}

fn with(device: &str, change: impl FnOnce(&mut VerbsOptions)) -> VerbsOptions {
    let mut options = on(device);
    change(&mut options);
    options
}

#[test]
fn the_first_active_port_and_the_best_gid_are_taken() {
    needs_fake!();
    let fake = Fake::new(SEVERAL);
    let [init, rtr] = place(&fake, on("mlx5_2"));
    assert_eq!(init.number("port"), 3);
    assert_eq!(rtr.number("sgid_index"), 9, "RoCE v2 over IPv4, the first of them");
    assert_eq!(rtr.text("dgid"), "00000000000000000000ffff0a000203");
    let [init, rtr] = place(&fake, on("mlx5_0"));
    assert_eq!([init.number("port"), rtr.number("is_global")], [1, 0], "InfiniBand, by lid");
}

#[test]
fn a_port_or_gid_that_is_asked_for_is_taken() {
    needs_fake!();
    let fake = Fake::new(SEVERAL);
    let port = with("mlx5_0", |o| o.device_settings.port = Some(setting("rdma_device_port", 2)));
    let [init, rtr] = place(&fake, port);
    assert_eq!([init.number("port"), rtr.number("sgid_index"), rtr.number("is_global")], [2, 2, 1]);
    for index in [0, 1, 4, 5, 12] {
        let gid = with("mlx5_2", |o| o.device_settings.gid_index = Some(setting("rdma_gid_index", index)));
        let [_, rtr] = place(&fake, gid);
        assert_eq!(rtr.number("sgid_index"), u64::from(index));
    }
    // A GID on InfiniBand adds a global header to each packet.
    let gid = with("mlx5_0", |o| o.device_settings.gid_index = Some(setting("rdma_gid_index", 0)));
    let [_, rtr] = place(&fake, gid);
    assert_eq!([rtr.number("is_global"), rtr.number("sgid_index"), rtr.number("dlid")], [1, 0, 7]);
}

#[test]
fn gids_are_ranked_ipv4_then_global_then_link_local_then_v1() {
    needs_fake!();
    let table = |gids: &[(u32, u32, &str)]| {
        let lines = gids.iter().map(|(index, kind, gid)| format!("gid index={index} type={kind} gid={gid}"));
        format!("device name=x\nport\n{}", lines.collect::<Vec<_>>().join("\n"))
    };
    let all = [
        (3, 1, "00000000000000000000ffff0a000001"),
        (5, 2, "fe800000000000000000000000000001"),
        (7, 2, "20010db8000000000000000000000001"),
        (11, 2, "00000000000000000000ffff0a000001"),
    ];
    for count in 1..=4 {
        let fake = Fake::new(&table(&all[..count]));
        let [_, rtr] = place(&fake, VerbsOptions::default());
        assert_eq!(rtr.number("sgid_index"), u64::from(all[count - 1].0));
    }
}

#[test]
fn the_only_device_with_an_active_port_needs_no_name() {
    needs_fake!();
    let fake = Fake::new(
        "device name=down_0\nport state=1\ndevice name=up_0\nport\ngid index=3 \
            gid=00000000000000000000ffff0a000001",
    );
    place(&fake, VerbsOptions::default());
    let opened = fake.calls("open_device");
    assert!(opened.iter().any(|line| line.text("name") == "up_0"), "{opened:?}");
}

/// Asserts that options are refused on [`SEVERAL`], and that nothing stays open.
fn refused(options: VerbsOptions) -> String {
    let fake = Fake::new(SEVERAL);
    let said = refusal(&fake, options);
    fake.assert_clean();
    assert!(!said.contains('\n'), "{said}");
    said
}

#[test]
fn every_refusal_lists_what_there_is() {
    needs_fake!();
    let all = ["mlx5_0 (port 1 ACTIVE InfiniBand, port 2 ACTIVE Ethernet)", "mlx5_1 (port 1 DOWN Ethernet)"];
    let said = refused(VerbsOptions::default());
    assert_says(&said, &all);
    assert_says(
        &said,
        &["RDMA devices have an active port: name one of them with rdma_device (RDMA_DEVICE)", "mlx5_2"],
    );
    let said = refused(on("mlx5_7"));
    assert_says(&said, &all);
    assert_says(&said, &["rdma_device is \"mlx5_7\" (a test): there is no such RDMA device"]);
    let said = refused(on("mlx5_1"));
    assert_says(&said, &all);
    assert_says(&said, &["none of its ports is active", "cable, switch, `ip link set ... up`"]);
    assert_says(&refused(on("iw_0")), &["iw_0", "iWARP"]);
    let port =
        |device, number| with(device, |o| o.device_settings.port = Some(setting("rdma_device_port", number)));
    assert_says(
        &refused(port("mlx5_0", 3)),
        &[
            "rdma_device_port is \"3\"",
            "mlx5_0 has no such port; it has port 1 ACTIVE InfiniBand, port 2 ACTIVE Ethernet",
        ],
    );
    assert_says(&refused(port("mlx5_2", 1)), &["port 1 of mlx5_2 is DOWN", "port 3 ACTIVE Ethernet"]);
    assert_says(&refused(port("mlx5_2", 2)), &["port 2 of mlx5_2 is INIT", "subnet manager"]);
    let gid = |device, index| {
        with(device, |o| o.device_settings.gid_index = Some(setting("rdma_gid_index", index)))
    };
    assert_says(
        &refused(gid("mlx5_2", 2)),
        &["rdma_gid_index is \"2\"", "that entry is empty", "9 (10.0.2.3, RoCE v2", "4 (10.0.2.3, RoCE v1"],
    );
    assert_says(&refused(gid("mlx5_2", 200)), &["0 to 15", "past the table's end"]);
    let pkey = with("mlx5_2", |o| o.device_settings.pkey_index = setting("rdma_qp_pkey_index", 1));
    assert_says(&refused(pkey), &["rdma_qp_pkey_index is \"1\"", "0 to 0", "mlx5_2"]);
    let depth = with("mlx5_2", |o| o.device_settings.queue_depth = setting("rdma_qp_queue_depth", 9000));
    assert_says(&refused(depth), &["rdma_qp_queue_depth is \"9000\"", "1 to 8192", "max_qp_wr"]);
}

#[test]
fn an_mtu_above_the_active_one_is_refused_with_those_that_fit() {
    needs_fake!();
    let fake = Fake::new("device name=x\nport mtu=3\ngid index=1 gid=00000000000000000000ffff0a000001");
    let mtu = |mtu| with("x", |o| o.device_settings.mtu = Some(setting("rdma_qp_mtu", mtu)));
    let said = refusal(&fake, mtu(Mtu::B2048));
    assert_says(
        &said,
        &["rdma_qp_mtu is \"2048\"", "256, 512, 1024", "the active MTU of port 1 of x is 1024"],
    );
    for (chosen, code) in [(Mtu::B256, 1), (Mtu::B512, 2), (Mtu::B1024, 3)] {
        assert_eq!(place(&fake, mtu(chosen))[1].number("path_mtu"), code);
    }
}

#[test]
fn no_device_and_no_gid_are_refused_with_what_to_do() {
    needs_fake!();
    let said = |script: &str| refusal(&Fake::new(script), VerbsOptions::default());
    assert_says(&said(""), &["there is no RDMA device: load the driver"]);
    assert_says(
        &said("device name=x\nport state=1"),
        &["no RDMA device has an active port", "x (port 1 DOWN Ethernet)"],
    );
    assert_says(
        &said("device name=x\nport"),
        &["port 1 of x has no GID", "give its network interface an address", "there is none"],
    );
    assert_says(
        &said("device name=x\nport layer=1"),
        &["InfiniBand port without a lid: is a subnet manager running?"],
    );
    assert_says(
        &said("device name=x\nport layer=1 lid=3 flags=1"),
        &["asks for a global header, and entry 0 of its GID table is empty"],
    );
}

#[test]
fn devices_that_can_t_be_opened_are_named_with_what_to_do() {
    needs_fake!();
    let fake = Fake::new(&format!("{TWO_NICS}\nfault call=open_device errno=13 device=fake_0"));
    assert_says(
        &refusal(&fake, on("fake_0")),
        &[
            "opening the device fake_0 failed: Permission denied",
            "give the process access to /dev/infiniband",
        ],
    );
    // That device was not asked for, and the other one is usable.
    place(&fake, VerbsOptions::default());
    place(&fake, on("fake_1"));
    fake.run("fault call=open_device errno=13");
    let said = refusal(&fake, VerbsOptions::default());
    assert_says(&said, &["opening the device fake_", "Permission denied", "/dev/infiniband"]);
    fake.assert_clean();

    // The message also says why the other devices were not chosen.
    let fake = Fake::new(&format!("{TWO_NICS}\nfault call=open_device errno=13 device=fake_0"));
    fake.run("port_state device=fake_1 state=1");
    let said = refusal(&fake, VerbsOptions::default());
    assert_says(
        &said,
        &["no RDMA device has an active port", "fake_1 (port 1 DOWN", "opening the device fake_0"],
    );
    fake.assert_clean();
}

#[test]
fn a_port_that_goes_down_and_up_can_be_chosen_again() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    fake.run("port_state device=fake_0 state=1");
    assert_says(&refusal(&fake, on("fake_0")), &["none of its ports is active"]);
    fake.run("port_state device=fake_0 state=4");
    let fabric = fabric(&fake, on("fake_0")).expect("it is up");
    drop(fabric.port().expect("a port"));
    drop(fabric);
    fake.assert_clean();
}
