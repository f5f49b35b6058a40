//! Asynchronous events: the effect of each on its links. Other links go on.

use crate::driver::Fake;
use crate::harness::{Got, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::{Fabric, LinkFailure, Port, Sleep, Sleeper};

const CQ_ERR: u32 = 0;
const QP_FATAL: u32 = 1;
const QP_REQ_ERR: u32 = 2;
const QP_ACCESS_ERR: u32 = 3;

/// Two links with so many retries that nothing fails by itself. The first one has an outstanding
/// write and read.
fn under_way(
    fake: &Fake,
) -> (Verbs, Verbs, (tensorwire::internals::fabric::LinkId, tensorwire::internals::fabric::LinkId)) {
    let patient = |device| VerbsOptions { timeout: 20, ..on(device) };
    let (mut a, mut b) = ends(fake, [patient("fake_0"), patient("fake_1")], &link(16));
    let bystander = another(&mut a, &mut b, &link(16));
    let target = tensor_mut(&b.pool, 64);
    let grant = b.port.grant(b.link, target).expect("room");
    let exposed = b.port.expose(b.link, &tensor(&b.pool, &[1; 64])).expect("room");
    let source = tensor(&a.pool, &[1; 64]);
    fake.run("cut");
    a.port.write(a.link, &source, 64, &grant, None).expect("room");
    a.port.read(a.link, tensor_mut(&a.pool, 64), &exposed).expect("room");
    (a, b, bystander)
}

#[test]
fn an_event_of_a_queue_pair_ends_its_link_and_no_other() {
    needs_fake!();
    for (kind, said) in [
        (QP_FATAL, "a queue pair failed on fake_0: the driver or the device"),
        (QP_REQ_ERR, "the peer sent an invalid request"),
        (QP_ACCESS_ERR, "the peer used a key or bounds that were not granted"),
    ] {
        // Events of the data queue pair, and of the control queue pair.
        for at in [1, 0] {
            let fake = Fake::new(TWO_NICS);
            let (mut a, mut b, bystander) = under_way(&fake);
            let pair = pairs_of(&fake, "fake_0")[at];
            fake.run(&format!("event kind={kind} qp={pair}"));
            let (failed, done, why) = a.until_down();
            assert_eq!((failed, done), (2, 0));
            assert!(why.to_string().contains(said), "event {kind} on queue pair {at}: {why}");
            let is_device = matches!(&why, LinkFailure::Device { device, .. } if device == "fake_0");
            assert_eq!(is_device, kind == QP_FATAL, "{why:?}");
            fake.run("cut on=0");
            assert_works(&mut a, &mut b, bystander);
            drop((a, b));
            fake.assert_clean();
        }
    }
}

#[test]
fn a_completion_queue_that_failed_ends_every_link_on_it() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b, bystander) = under_way(&fake);
    fake.run(&format!("event kind={CQ_ERR} qp={}", pairs_of(&fake, "fake_0")[1]));
    let mut down = Vec::new();
    while down.len() < 2 {
        while a.arrivals.is_empty() {
            a.poll();
        }
        for (link, got) in a.arrivals.drain(..) {
            match got {
                Got::Down(why) => down.push((link, why.to_string())),
                Got::Failed => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // No order of the ends is promised.
    let mut links: Vec<_> = down.iter().map(|(link, _)| *link).collect();
    links.sort_unstable();
    assert_eq!(links, [a.link, bystander.0]);
    assert!(down.iter().all(|(_, why)| why.contains("a completion queue overran on fake_0")), "{down:?}");
    fake.run("cut on=0");
    // The other end has no event of its own. It learns of the failure from the disconnects.
    expect!(b.next(&mut a), Got::Down(_) => ());
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_device_that_is_removed_ends_its_links_and_makes_no_new_ones() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, b, bystander) = under_way(&fake);
    fake.run("remove device=fake_0");
    let mut down = Vec::new();
    let start = Instant::now();
    while down.len() < 2 {
        assert!(start.elapsed() < Duration::from_secs(10), "{down:?}");
        a.poll();
        for (link, got) in a.arrivals.drain(..) {
            if let Got::Down(why) = got {
                let text = why.to_string();
                assert!(text.contains("the device failed or was removed on fake_0"), "{text}");
                down.push(link);
            }
        }
    }
    assert_eq!(down, [a.link, bystander.0]);
    let why = a.fabric.endpoint(0, &link(16)).expect_err("no device").to_string();
    assert!(why.contains("querying port 1 of fake_0") && why.contains("dmesg"), "{why}");
    let why = refusal(&fake, on("fake_0"));
    assert!(why.contains("no such RDMA device") && why.contains("fake_1"), "{why}");
    drop((a, b));
    fake.run("cut on=0");
    fake.assert_clean();
}

#[test]
fn a_port_that_stays_down_ends_its_links_by_name() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, b, _) = under_way(&fake);
    let start = Instant::now();
    fake.run("port_state device=fake_0 state=1");
    let (failed, done, why) = a.until_down();
    assert!(start.elapsed() > Duration::from_secs(1), "a cable may be plugged back: {:?}", start.elapsed());
    assert_eq!((failed, done), (2, 0));
    assert!(
        matches!(&why, LinkFailure::Device { device, event: "the port is down", .. } if device == "fake_0")
    );
    assert!(why.to_string().contains("check the cable, the switch and `ip link`"), "{why}");
    drop((a, b));
    fake.run("cut on=0");
    fake.assert_clean();
}

#[test]
fn a_port_that_comes_back_in_time_loses_nothing() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b, bystander) = under_way(&fake);
    fake.run("cut on=0\nport_state device=fake_1 state=1");
    std::thread::sleep(Duration::from_millis(300));
    a.poll();
    b.poll();
    fake.run("port_state device=fake_1 state=4");
    expect!(a.next(&mut b), Got::Done => ());
    expect!(a.next(&mut b), Got::ReadDone(_) => ());
    // Longer than the time that a port may be down.
    std::thread::sleep(Duration::from_millis(2500));
    assert_works(&mut a, &mut b, bystander);
    assert_works(&mut b, &mut a, (bystander.1, bystander.0));
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn events_that_are_no_failure_change_nothing() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b, bystander) = under_way(&fake);
    fake.run("cut on=0");
    let pair = pairs_of(&fake, "fake_0")[1];
    // Events of a queue pair: communication established, drained, migrated, last request reached.
    for kind in [4, 5, 6, 16] {
        fake.run(&format!("event kind={kind} qp={pair}"));
    }
    // Events of the port: LID, P_Keys, subnet manager, re-registration, GIDs. Then an error of the
    // other port, and an unknown event.
    for kind in [11, 12, 13, 17, 18, 99] {
        fake.run(&format!("event kind={kind} port=1"));
    }
    fake.run("event kind=10 port=2");
    expect!(a.next(&mut b), Got::Done => ());
    expect!(a.next(&mut b), Got::ReadDone(_) => ());
    std::thread::sleep(Duration::from_millis(2500));
    assert_works(&mut a, &mut b, bystander);
    a.assert_quiet(&mut b);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn an_event_ends_the_sleep_of_an_armed_port() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, b, _) = under_way(&fake);
    let sleeper = a.port.sleeper();
    let start = Instant::now();
    while !a.port.arm() {
        a.poll();
        assert!(start.elapsed() < Duration::from_secs(10), "it can't be armed");
    }
    let seen = sleeper.seen();
    // The device does not even flush, so there is no completion.
    fake.run(&format!("event kind={CQ_ERR} qp={}", pairs_of(&fake, "fake_0")[1]));
    let start = Instant::now();
    while sleeper.seen() == seen {
        sleeper.sleep(Sleep::Waiter, seen, Duration::from_millis(20));
        assert!(start.elapsed() < Duration::from_secs(10), "nothing ended the sleep");
    }
    let (_, _, why) = a.until_down();
    assert!(matches!(why, LinkFailure::Device { .. }), "{why:?}");
    drop((sleeper, a, b));
    fake.run("cut on=0");
    fake.assert_clean();
}
