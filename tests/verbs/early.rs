//! Arrivals before the link is attached to its port.

use crate::driver::Fake;
use crate::harness::{Got, TIMEOUT, connect, immediate, pool, tensor};
use crate::setup::*;
use crate::{expect, needs_fake};
use std::time::Duration;
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkOptions, Port, Role};

/// Links are made in the same way as by nodes.
fn full(depth: u32) -> LinkOptions {
    LinkOptions { receives: depth, ..link(depth) }
}

#[test]
fn each_queue_pair_has_its_receives_before_the_peer_can_reach_it() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let striped = |device| VerbsOptions { qps_per_peer: 3, ..on(device) };
    let pair = ends(&fake, [striped("fake_0"), striped("fake_1")], &full(16));
    let mut steps = fake.calls("modify_qp");
    steps.retain(|step| step.text("to") == "RTR");
    assert_eq!(steps.len(), 8, "a control queue pair, a main queue pair and two stripes at each end");
    for step in steps {
        assert!(step.number("receives") >= 16, "{step:?}");
    }
    drop(pair);
    fake.assert_clean();
}

#[test]
fn a_side_that_is_late_to_take_its_link_loses_nothing_of_what_came() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    // A message that finds no receive fails at once.
    let hasty = |device| VerbsOptions { rnr_retry: 0, ..on(device) };
    let (mut a, mut b) = ends(&fake, [hasty("fake_0"), hasty("fake_1")], &full(16));
    for round in 0..3 {
        let (to_b, to_a) = connect(&a.fabric, &b.fabric, &full(16));
        let from = a.port.attach(to_b).expect("room");
        assert_eq!(a.port.limits(from).receives, 16);
        let exposed = b.port.expose(b.link, &tensor(&b.pool, &[7; 64])).expect("room");
        for k in 0..8u8 {
            a.port.send(from, &[k; 200]).expect("room");
            a.port
                .write_inline(from, &[], &exposed.part(0, 0).expect("empty"), Some(immediate(k.into())))
                .expect("room");
        }
        a.port.publish_credits(from, 77);
        // The port polls its other links meanwhile.
        let links = (b.link, a.link);
        assert_works(&mut b, &mut a, links);
        b.assert_quiet(&mut a);
        let late = b.port.attach(to_a).expect("room");
        if round == 2 {
            b.port.detach(late);
            continue;
        }
        for k in 0..8u8 {
            assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), [k; 200]);
            assert_eq!(expect!(b.next(&mut a), Got::Immediate(of, 0) => of), immediate(k.into()));
        }
        assert_eq!(b.port.peer_credits(late), 77);
        let written = tensor(&b.pool, &[1; 8]);
        b.port.write(late, &written, 0, &exposed.part(0, 0).expect("empty"), None).expect("room");
        expect!(b.next(&mut a), Got::Done => ());
    }
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn what_an_arming_found_comes_behind_what_polls_had_kept() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = ends(&fake, [on("fake_0"), on("fake_1")], &full(16));
    let (to_b, to_a) = connect(&a.fabric, &b.fabric, &full(16));
    let from = a.port.attach(to_b).expect("room");
    for (k, size) in [(1u8, 10), (2, 20)] {
        a.port.send(from, &vec![k; size]).expect("room");
    }
    b.assert_quiet(&mut a);
    for (k, size) in [(3u8, 30), (4, 40)] {
        a.port.send(from, &vec![k; size]).expect("room");
    }
    let start = std::time::Instant::now();
    while b.port.arm() {
        assert!(start.elapsed() < TIMEOUT, "nothing came");
    }
    b.port.attach(to_a).expect("room");
    for (k, size) in [(1u8, 10), (2, 20), (3, 30), (4, 40)] {
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), vec![k; size]);
    }
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn an_acceptor_may_be_long_before_its_initiator_though_nothing_is_sent_again() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let hasty = |device| VerbsOptions { retry_count: 0, timeout: 1, ..on(device) };
    let [a, b] = ["fake_0", "fake_1"].map(|device| {
        let pool = pool(1 << 20);
        let fabric = VerbsFabric::with_library(fake.library, &pool, hasty(device)).expect("a fabric");
        let endpoint = fabric.endpoint(0, &full(16)).expect("an endpoint");
        (pool, fabric, endpoint)
    });
    let (to_a, to_b) = (a.2.address().to_vec(), b.2.address().to_vec());
    let links = std::thread::scope(|scope| {
        let acceptor = scope.spawn(|| b.2.connect(Role::Acceptor, &to_a, TIMEOUT));
        std::thread::sleep(Duration::from_millis(300));
        let initiator = a.2.connect(Role::Initiator, &to_b, TIMEOUT);
        (initiator.expect("connected"), acceptor.join().expect("no panic").expect("connected"))
    });
    let (mut a, mut b) = (Verbs::new(a.0, a.1, links.0), Verbs::new(b.0, b.1, links.1));
    let links = (a.link, b.link);
    b.port.post_receives(links.1, 1);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_ping_that_fails_ends_the_making_of_the_link_at_once_and_says_why() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = ends(&fake, [on("fake_0"), on("fake_1")], &full(16));
    let (first, second) = (
        a.fabric.endpoint(0, &full(16)).expect("an endpoint"),
        b.fabric.endpoint(0, &full(16)).expect("an endpoint"),
    );
    let to_second = second.address().to_vec();
    fake.run("fail_request status=12 vendor=0x81 opcode=0");
    let said = std::thread::scope(|scope| {
        let initiator = scope.spawn(|| first.connect(Role::Initiator, &to_second, TIMEOUT).err());
        while !initiator.is_finished() {
            a.poll();
        }
        initiator.join().expect("no panic").expect("refused").to_string()
    });
    assert_says(
        &said,
        &["a ping to it failed: retries exceeded (error 12, vendor's 0x81)", "same GID type and VLAN"],
    );
    drop(second);
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn what_came_for_a_link_that_nobody_takes_is_forgotten() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = ends(&fake, [on("fake_0"), on("fake_1")], &full(16));
    let (to_b, to_a) = connect(&a.fabric, &b.fabric, &full(16));
    let from = a.port.attach(to_b).expect("room");
    a.port.send(from, b"to nobody").expect("room");
    b.assert_quiet(&mut a);
    drop(to_a);
    b.assert_quiet(&mut a);
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}
