//! Two ends on scripted devices, and links between them.

use crate::driver::Fake;
use crate::harness::{End, TIMEOUT, connect, pool};
use tensorwire::FabricError;
use tensorwire::internals::fabric::verbs::device::{DeviceSetting, DeviceSettings};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{LinkId, LinkOptions, Port, PostError};

pub type Verbs = End<VerbsFabric>;

/// Two NICs on one network, as on two hosts.
pub const TWO_NICS: &str = "
device name=fake_0
port
gid index=1 type=2 gid=00000000000000000000ffff0a000001
device name=fake_1
port
gid index=1 type=2 gid=00000000000000000000ffff0a000002";

/// Skips the test, with the reason, if the fake cannot be compiled.
#[macro_export]
macro_rules! needs_fake {
    () => {
        if let Some(why) = $crate::driver::skipped() {
            println!("skipped: {why}");
            return;
        }
    };
}

pub fn setting<T>(key: &'static str, value: T) -> DeviceSetting<T> {
    DeviceSetting::asked(key, value, "a test")
}

/// Options that choose the device with this name.
pub fn on(device: &str) -> VerbsOptions {
    let device = Some(setting("rdma_device", device.to_owned()));
    VerbsOptions {
        device_settings: DeviceSettings { device, ..DeviceSettings::default() },
        ..VerbsOptions::default()
    }
}

pub fn fabric(fake: &Fake, options: VerbsOptions) -> Result<VerbsFabric, FabricError> {
    VerbsFabric::with_library(fake.library, &pool(1 << 20), options)
}

/// The error with which a fabric is refused.
pub fn refusal(fake: &Fake, options: VerbsOptions) -> String {
    match fabric(fake, options) {
        Ok(_) => panic!("a fabric was made"),
        Err(error) => error.to_string(),
    }
}

/// Asserts that a message has all of these parts.
pub fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

pub fn link(depth: u32) -> LinkOptions {
    LinkOptions { depth, receives: 0, generation: 1 }
}

/// Two ends with a link.
pub fn ends(fake: &Fake, options: [VerbsOptions; 2], link: &LinkOptions) -> (Verbs, Verbs) {
    let pools = [pool(8 << 20), pool(8 << 20)];
    let [a, b] = options;
    let a = VerbsFabric::with_library(fake.library, &pools[0], a).expect("the script has the device");
    let b = VerbsFabric::with_library(fake.library, &pools[1], b).expect("the script has the device");
    let links = connect(&a, &b, link);
    let [to_a, to_b] = pools;
    (End::new(to_a, a, links.0), End::new(to_b, b, links.1))
}

/// Two ends, one on each of [`TWO_NICS`]. They wait a second for a receive, because a busy machine
/// may hold a test up.
pub fn two(fake: &Fake, depth: u32) -> (Verbs, Verbs) {
    let patient = |device| VerbsOptions { min_rnr_timer: 28, ..on(device) };
    ends(fake, [patient("fake_0"), patient("fake_1")], &link(depth))
}

/// Makes one more link between the two ends.
pub fn another(a: &mut Verbs, b: &mut Verbs, options: &LinkOptions) -> (LinkId, LinkId) {
    let links = connect(&a.fabric, &b.fabric, options);
    (a.port.attach(links.0).expect("room"), b.port.attach(links.1).expect("room"))
}

/// Asserts that messages still arrive from `a` at `b` on this link.
pub fn assert_works(a: &mut Verbs, b: &mut Verbs, links: (LinkId, LinkId)) {
    b.port.post_receives(links.1, 1);
    let start = std::time::Instant::now();
    while let Err(error) = a.port.send(links.0, b"alive") {
        assert_eq!(error, PostError::Full);
        a.poll();
    }
    loop {
        // Events of other links are ignored.
        if let Some((_, got)) = b.arrivals.pop_front().filter(|(link, ..)| *link == links.1) {
            let message = crate::expect!(got, crate::harness::Got::Message(m) => m);
            return assert_eq!(message, b"alive");
        }
        assert!(start.elapsed() < TIMEOUT, "nothing came within {TIMEOUT:?}");
        a.poll();
        b.poll();
    }
}

/// The numbers of a device's queue pairs, oldest first. The control queue pair of a link comes
/// before its data.
pub fn pairs_of(fake: &Fake, device: &str) -> Vec<u64> {
    let pairs = fake.pairs();
    pairs.iter().filter(|pair| pair.text("device") == device).map(|pair| pair.number("qp")).collect()
}
