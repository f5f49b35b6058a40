//! Ports whose address changes while a fabric uses them, for example after a restart of the subnet
//! manager.

use crate::driver::Fake;
use crate::needs_fake;
use crate::setup::*;
use tensorwire::internals::fabric::{Fabric, Port};

/// The newest transition to RTR of a device's queue pairs.
fn newest(fake: &Fake, device: &str) -> crate::driver::Line {
    let of = pairs_of(fake, device);
    let mut steps = fake.calls("modify_qp");
    steps.retain(|step| step.text("to") == "RTR" && of.contains(&step.number("qp")));
    steps.pop().expect("a link was made")
}

#[test]
fn a_new_link_is_made_with_the_port_s_present_gid_index_and_mtu() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let before = newest(&fake, "fake_0");
    assert_eq!(before.number("sgid_index"), 1);
    fake.run("move device=fake_0 gid_from=1 gid_to=5 mtu=2\nmove device=fake_1 gid_from=1 gid_to=0");
    for link in [(a.link, b.link), another(&mut a, &mut b, &link(16))] {
        assert_works(&mut a, &mut b, link);
    }
    let after = newest(&fake, "fake_0");
    assert_eq!([after.number("sgid_index"), after.number("path_mtu")], [5, 2]);
    assert_eq!(
        [newest(&fake, "fake_1").number("sgid_index"), newest(&fake, "fake_1").number("path_mtu")],
        [0, 2]
    );
    // The fabric uses at most the port's current MTU, which may rise again.
    fake.run("move device=fake_0 mtu=5");
    let link = another(&mut a, &mut b, &link(16));
    assert_works(&mut a, &mut b, link);
    assert_eq!(newest(&fake, "fake_0").number("path_mtu"), before.number("path_mtu"));
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_new_link_is_made_with_the_present_lid() {
    needs_fake!();
    let fake = Fake::new(
        "
device name=fake_0
port layer=1 lid=17
gid index=0 type=0 gid=fe80000000000000b8599f0300a1b2c4",
    );
    let (mut a, mut b) = ends(&fake, [on("fake_0"), on("fake_0")], &link(16));
    assert_eq!(newest(&fake, "fake_0").number("dlid"), 17);
    a.port.detach(a.link);
    b.port.detach(b.link);
    fake.run("move device=fake_0 lid=23");
    let links = another(&mut a, &mut b, &link(16));
    assert_works(&mut a, &mut b, links);
    assert_eq!(newest(&fake, "fake_0").number("dlid"), 23);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_gid_that_is_gone_is_named_with_what_to_do() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let fabric = fabric(&fake, on("fake_0")).expect("a fabric");
    fake.run("move device=fake_0 gid_from=1");
    let Err(error) = fabric.endpoint(0, &link(16)) else { panic!("an endpoint without an address") };
    assert_says(
        &error.to_string(),
        &[
            "the GID 10.0.0.1 (RoCE v2) is gone from port 1 of fake_0",
            "at index 1",
            "give its interface the address back",
        ],
    );
    drop(fabric);
    fake.assert_clean();
}
