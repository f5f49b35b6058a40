//! The verbs fabric on the RDMA device of this machine, such as soft-RoCE in a virtual machine.
//! `TENSORWIRE_TEST_DEVICES` names two devices to run between, such as `rxe0,rxe1`.

use crate::expect;
use crate::harness::{
    End, Got, Harness, connect, immediate, join, options, pattern, pool, tensor, tensor_mut,
};
use std::sync::OnceLock;
use tensorwire::Pool;
use tensorwire::internals::fabric::verbs::device::{DeviceSetting, DeviceSettings, Mtu};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{Fabric, Port};

/// The reason if there is no verbs fabric here. It is found out once for all tests.
pub fn skipped() -> Option<String> {
    static WHY: OnceLock<Option<String>> = OnceLock::new();
    let options = || VerbsOptions { device_settings: device_settings(0), ..VerbsOptions::default() };
    let why = || VerbsFabric::new(&pool(1 << 20), options()).err().map(|error| error.to_string());
    WHY.get_or_init(why).clone()
}

/// The options of one end: its named device, if there is one.
fn device_settings(end: usize) -> DeviceSettings {
    const NAMES: &str = "TENSORWIRE_TEST_DEVICES";
    let named = std::env::var(NAMES).ok().and_then(|names| names.split(',').nth(end).map(str::to_string));
    let device =
        named.map(|name| DeviceSetting::asked("rdma_device", name, format!("environment variable {NAMES}")));
    DeviceSettings { device, ..DeviceSettings::default() }
}

fn fabric(pool: &Pool, options: VerbsOptions) -> VerbsFabric {
    VerbsFabric::new(pool, options).expect("there is a device, as `skipped` has seen")
}

/// One of two ends with equal options apart from their devices.
pub fn end(end: usize, pool: &Pool) -> VerbsFabric {
    fabric(pool, VerbsOptions { device_settings: device_settings(end), ..VerbsOptions::default() })
}

/// An end with small packets, small completion queues, and large writes over three queue pairs.
fn small_end(end: usize, pool: &Pool) -> VerbsFabric {
    let mtu = Some(DeviceSetting::asked("rdma_qp_mtu", Mtu::B512, "a test"));
    let device_settings = DeviceSettings { mtu, ..device_settings(end) };
    fabric(pool, VerbsOptions { device_settings, cq_entries: 16, qps_per_peer: 3, ..VerbsOptions::default() })
}

pub struct VerbsDevice;

impl Harness for VerbsDevice {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        end(0, pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [VerbsFabric; 2] {
        [end(0, pools[0]), end(1, pools[1])]
    }
}

/// With small packets and small completion queues, and large writes over three queue pairs.
pub struct VerbsSmall;

impl Harness for VerbsSmall {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;

    fn skipped() -> Option<String> {
        skipped()
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        small_end(0, pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [VerbsFabric; 2] {
        [small_end(0, pools[0]), small_end(1, pools[1])]
    }
}

/// With memory windows. Soft-RoCE checks their keys, but not their bounds.
pub struct VerbsWindows;

impl VerbsWindows {
    fn options(end: usize) -> VerbsOptions {
        let device_settings = device_settings(end);
        VerbsOptions { device_settings, memory_windows: true, ..VerbsOptions::default() }
    }
}

impl Harness for VerbsWindows {
    type Fabric = VerbsFabric;
    const CHECKS_GRANTS: bool = false;
    const HAS_OWN_KEYS: bool = true;

    fn skipped() -> Option<String> {
        let made = |end| VerbsFabric::new(&pool(1 << 20), Self::options(end)).err();
        (0..2).find_map(made).map(|error| error.to_string())
    }

    fn fabric(pool: &Pool) -> VerbsFabric {
        fabric(pool, Self::options(0))
    }

    fn fabrics(pools: [&Pool; 2]) -> [VerbsFabric; 2] {
        [fabric(pools[0], Self::options(0)), fabric(pools[1], Self::options(1))]
    }
}

/// Two ends with different options, as between devices of different kinds.
#[test]
fn a_link_is_as_deep_as_the_smaller_of_its_ends() {
    if let Some(why) = skipped() {
        println!("skipped: {why}");
        return;
    }
    let pools = [pool(1 << 20), pool(1 << 20)];
    let [a, b] = VerbsDevice::fabrics([&pools[0], &pools[1]]);
    let endpoints = [a.endpoint(0, &options(64)), b.endpoint(0, &options(8))];
    let links = join(endpoints.map(|endpoint| endpoint.expect("an endpoint")));
    let [to_a, to_b] = pools;
    let (mut a, mut b) = (End::new(to_a, a, links.0), End::new(to_b, b, links.1));
    assert_eq!((a.port.limits(a.link).depth, b.port.limits(b.link).depth), (8, 8));
    for round in 0..100u8 {
        b.port.post_receives(b.link, 1);
        a.port.send(a.link, &[round; 200]).expect("room");
        assert_eq!(expect!(b.next(&mut a), Got::Message(bytes) => bytes), [round; 200]);
    }
}

/// Longer than a work request of soft-RoCE (8 MiB). That of a NIC carries up to 1 GiB.
#[test]
fn a_write_and_a_read_of_more_than_one_work_request_are_one_operation() {
    if let Some(why) = skipped() {
        println!("skipped: {why}");
        return;
    }
    const LEN: usize = (20 << 20) + 123;
    let pools = [pool(48 << 20), pool(48 << 20)];
    let [a, b] = VerbsDevice::fabrics([&pools[0], &pools[1]]);
    let links = connect(&a, &b, &options(16));
    let [to_a, to_b] = pools;
    let (mut a, mut b) = (End::new(to_a, a, links.0), End::new(to_b, b, links.1));
    b.port.post_receives(b.link, 3);
    let target = tensor_mut(&b.pool, LEN);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &pattern(LEN, 3));
    for (slot, len) in [(1, LEN as u64), (2, 5), (3, LEN as u64 - 1)] {
        a.port.write(a.link, &source, len, &grant, Some(immediate(slot))).expect("room");
    }
    for (slot, len) in [(1, LEN as u64), (2, 5), (3, LEN as u64 - 1)] {
        let got = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
        assert_eq!(got, (immediate(slot), len));
        expect!(a.next(&mut b), Got::Done => ());
    }
    let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
    assert!(written.bytes() == source.bytes(), "the bytes differ");
    let exposed = b.port.expose(b.link, &written).expect("room");
    let into = tensor_mut(&a.pool, LEN);
    a.port.read(a.link, into, &exposed).expect("room");
    let read = expect!(a.next(&mut b), Got::ReadDone(target) => target);
    assert!(read.bytes() == source.bytes(), "the bytes differ");
}
