//! The loss of a link's first rail.

use crate::driver::Fake;
use crate::harness::{Got, TIMEOUT, exposed, immediate, tensor, tensor_mut};
use crate::rails::*;
use crate::setup::*;
use crate::{expect, needs_fake};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::{LinkFailure, Port, PostError};

/// Polls both ends until this side has the event of a repaired link. Returns the earlier events.
fn until_repaired(one: &mut Verbs, other: &mut Verbs) -> Vec<Got> {
    let mut earlier = Vec::new();
    loop {
        match one.next(other) {
            Got::Repaired => return earlier,
            got => earlier.push(got),
        }
    }
}

/// Asserts that a large write and a message behind it arrive.
fn assert_carries(a: &mut Verbs, b: &mut Verbs, slot: u32) {
    b.port.post_receives(b.link, 2);
    let large = bulk(a, b, slot.into());
    write(a, &large, slot);
    a.port.send(a.link, b"behind").expect("room");
    assert_arrives(a, b, large, slot);
    assert_eq!(expect!(b.next(a), Got::Message(m) => m), b"behind");
    expect!(a.next(b), Got::Done => ());
}

#[test]
fn a_first_rail_that_fails_in_the_middle_of_large_writes_costs_nothing_but_time() {
    needs_fake!();
    assert_survives_each_loss_of(0);
}

#[test]
fn a_first_rail_that_fails_while_nothing_goes_on_is_lost_alone() {
    needs_fake!();
    for event in ["event kind=1 qp=#", "remove device=b_0", "port_state device=a_0 state=1"] {
        let (fake, mut a, mut b) = slow_rails();
        let devices = [&a, &b].map(|end| end.fabric.lost_rails());
        fake.run(&event.replace('#', &data_pair(&fake, "a_0").to_string()));
        assert!(until_repaired(&mut a, &mut b).is_empty() && until_repaired(&mut b, &mut a).is_empty());
        assert_eq!(devices.map(|lost| lost.load(std::sync::atomic::Ordering::Relaxed)), [1, 1], "{event}");
        assert_eq!((pairs_of(&fake, "a_0").len(), pairs_of(&fake, "b_0").len()), (0, 0), "{event}");
        fake.run("trace");
        assert_carries(&mut a, &mut b, 3);
        assert_carries(&mut b, &mut a, 4);
        let posted = posted(&fake);
        assert!(posted.iter().all(|(device, _)| device.ends_with("_1")), "{event}: {posted:?}");
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_device_that_is_back_is_used_by_the_next_link() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    fake.run("port_state device=a_0 state=1");
    until_repaired(&mut a, &mut b);
    let links = another(&mut a, &mut b, &link(16));
    assert_works(&mut a, &mut b, links);
    assert_eq!(pairs_of(&fake, "a_0").len(), 0);
    fake.run("port_state device=a_0 state=4");
    let links = another(&mut a, &mut b, &link(16));
    assert_works(&mut a, &mut b, links);
    assert_eq!(pairs_of(&fake, "a_0").len(), 2, "control and data");
    drop((a, b));
    fake.assert_clean();
}

/// What was posted and has not landed is posted again; what has landed is not.
#[test]
fn each_message_arrives_once_whichever_request_the_first_rail_fails_at() {
    needs_fake!();
    let fails = |fake: &Fake, skip: u32| {
        fake.run(&format!("fail_request status=12 qp={} skip={skip}", data_pair(fake, "a_0")));
    };
    assert_each_message_arrives_once(fails);
}

/// The driver may refuse a request of a batch, too.
#[test]
fn each_message_arrives_once_whichever_request_the_driver_refuses() {
    needs_fake!();
    let refuses = |fake: &Fake, skip: u32| {
        fake.run(&format!("fault call=post_send device=a_0 errno=12 skip={skip} times=1"));
    };
    assert_each_message_arrives_once(refuses);
}

/// `fails` has the first rail of `a` fail at a request, after so many others.
fn assert_each_message_arrives_once(fails: impl Fn(&Fake, u32)) {
    const COUNT: u8 = 12;
    let ways = [(true, false), (false, false), (false, true)];
    let skips = 0..=u32::from(COUNT);
    for (skip, (is_slow, in_batch)) in skips.flat_map(|skip| ways.map(|way| (skip, way))) {
        let (fake, mut a, mut b) = slow_rails();
        fake.run(&format!("slow on={}", u8::from(is_slow)));
        b.port.post_receives(b.link, COUNT.into());
        let source = tensor(&a.pool, &[7; 64]);
        let target = tensor_mut(&b.pool, 64);
        let grant = b.port.grant(b.link, target).expect("room");
        fails(&fake, skip);
        if in_batch {
            a.port.begin_batch();
        }
        for number in 0..COUNT {
            let immediate = Some(immediate(number.into()));
            until_posted(&mut a, &mut b, |a| match number % 4 {
                0 => a.port.write(a.link, &source, 64, &grant, immediate),
                1 => a.port.write_inline(a.link, &[number], &grant, immediate),
                2 if !in_batch => {
                    a.port.begin_batch();
                    let sent = a.port.send(a.link, &[number]);
                    a.port.end_batch();
                    sent
                }
                _ => a.port.send(a.link, &[number]),
            });
        }
        a.port.end_batch();
        for number in 0..COUNT {
            let got = loop {
                match b.next(&mut a) {
                    Got::Repaired => {}
                    Got::Message(bytes) => break bytes[0],
                    got => break expect!(got, Got::Immediate(of, _) => of.slot.index() as u8),
                }
            };
            assert_eq!(got, number, "skip {skip}");
        }
        // Each write is reported once.
        let start = Instant::now();
        let mut done = 0;
        while done < usize::from(COUNT / 4) {
            assert!(start.elapsed() < TIMEOUT, "skip {skip}: {done} writes are done");
            a.poll();
            b.poll();
            done += a.arrivals.drain(..).filter(|(_, got)| matches!(got, Got::Done)).count();
        }
        a.assert_quiet(&mut b);
        drop((source, a, b));
        fake.assert_clean();
    }
}

/// Posts are refused for want of room until the peer has taken over, and the receives and credits
/// of both sides are those from before.
#[test]
fn credits_and_receives_outlast_the_first_rail() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 16);
    for _ in 0..5 {
        a.port.send(a.link, b"early").expect("room");
    }
    for _ in 0..5 {
        expect!(b.next(&mut a), Got::Message(_) => ());
    }
    fake.run("cut device=a_0");
    // These credits get lost with the rail.
    b.port.post_receives(b.link, 5);
    b.port.publish_credits(b.link, 5);
    a.port.send(a.link, b"on its way").expect("room");
    let start = Instant::now();
    let mut was_full = false;
    while a.port.peer_credits(a.link) < 5 {
        assert!(start.elapsed() < TIMEOUT);
        was_full |= a.port.send(a.link, b"refused") == Err(PostError::Full);
        a.poll();
        b.poll();
    }
    assert!(was_full, "no message is taken that can't be sent");
    assert_eq!(a.port.peer_credits(a.link), 5);
    // No receive is waited for: as many are posted as have been returned.
    for _ in 0..8 {
        let _ = a.port.send(a.link, b"late");
    }
    b.poll();
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_link_that_has_lost_all_its_rails_ends_with_the_first_cause() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 4);
    fake.run("cut");
    a.port.send(a.link, b"in vain").expect("room");
    let (_, _, why) = a.until_down();
    let said = why.to_string();
    assert_says(&said, &["message", "retries exceeded"]);
    drop((a, b));
    fake.assert_clean();
}

fn three_rails() -> (Fake, Verbs, Verbs) {
    let nics = |host| (0..3).map(move |at| nic(host, at, ""));
    let script: String = ['a', 'b'].into_iter().flat_map(nics).collect();
    let fake = Fake::new(&script);
    let (a, b) = ends(&fake, ["a_0,a_1,a_2", "b_0,b_1,b_2"].map(over), &link(16));
    (fake, a, b)
}

#[test]
fn rails_may_be_lost_one_after_the_other() {
    needs_fake!();
    let (fake, mut a, mut b) = three_rails();
    for (lost, left) in [(0, ["_1", "_2"]), (1, ["_2", "_2"])] {
        fake.run(&format!("cut device=a_{lost}"));
        a.port.post_receives(a.link, 1);
        b.port.post_receives(b.link, 1);
        b.port.send(b.link, b"who is there").expect("room");
        let mut came = until_repaired(&mut a, &mut b);
        if came.is_empty() {
            came.push(a.next(&mut b));
        }
        assert!(matches!(&came[..], [Got::Message(m)] if m == b"who is there"), "{came:?}");
        until_repaired(&mut b, &mut a);
        fake.run("trace");
        let before = posted(&fake).len();
        assert_carries(&mut a, &mut b, 3);
        assert_carries(&mut b, &mut a, 4);
        let posted = posted(&fake).split_off(before);
        assert!(
            posted.iter().all(|(device, _)| left.iter().any(|name| device.ends_with(name))),
            "{posted:?}"
        );
        let parts =
            left.map(|name| lengths(&posted, &format!("a{name}"), WRITE_WITH_IMMEDIATE).iter().sum::<u64>());
        // Each rail that is left gets as much as the other, to a multiple of a packet.
        assert!(parts[0].abs_diff(parts[1]) <= 3 * 4096, "{parts:?}");
    }
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_first_rail_on_a_device_that_says_nothing_any_more_is_lost_alone() {
    needs_fake!();
    for device in ["a_0", "b_0"] {
        let (fake, mut a, mut b) = slow_rails();
        b.port.post_receives(b.link, 4);
        a.port.send(a.link, b"before").expect("room");
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"before");
        fake.run(&format!("remove device={device} silently=1"));
        let large = bulk(&a, &mut b, 9);
        write(&mut a, &large, 3);
        a.port.send(a.link, b"behind").expect("room");
        assert_eq!(until_repaired(&mut b, &mut a).len(), 0, "{device}");
        assert_arrives(&mut a, &mut b, large, 3);
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"behind");
        until_repaired(&mut a, &mut b);
        expect!(a.next(&mut b), Got::Done => ());
        assert_carries(&mut a, &mut b, 4);
        a.port.post_receives(a.link, 2);
        assert_carries(&mut b, &mut a, 5);
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_first_rail_that_can_t_be_given_up_in_order_ends_its_link() {
    needs_fake!();
    // A read that may have happened in part.
    let (fake, mut a, mut b) = slow_rails();
    let grant = exposed(&mut b, &[1; 64]);
    fake.run("cut device=a_0");
    let target = tensor_mut(&a.pool, 64);
    a.port.read(a.link, target, &grant).map_err(|(error, _)| error).expect("room");
    let (failed, _, why) = a.until_down();
    assert_eq!(failed, 1);
    assert_says(&why.to_string(), &["read", "retries exceeded"]);
    drop((a, b));
    fake.assert_clean();
    // A request that the driver refuses when no other rail is left.
    let (fake, mut a, mut b) = slow_rails();
    fake.run("port_state device=a_1 state=1");
    let start = Instant::now();
    while a.fabric.lost_rails().load(std::sync::atomic::Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < TIMEOUT);
        a.poll();
        b.poll();
    }
    fake.run("fault call=post_send device=a_0 errno=12 times=1");
    let source = tensor(&a.pool, &[7; 64]);
    let grant = b.port.grant(b.link, tensor_mut(&b.pool, 64)).expect("room");
    a.port.write(a.link, &source, 64, &grant, Some(immediate(3))).expect("it is kept for another rail");
    let (failed, _, why) = a.until_down();
    assert_eq!(failed, 1);
    assert_says(&why.to_string(), &["a_0", "the driver refused a request"]);
    drop((source, a, b));
    fake.assert_clean();
}

/// An acknowledgement of a device that tells of nothing any more says nothing of memory.
#[test]
fn what_a_silent_device_has_acknowledged_and_not_told_of_ends_the_link() {
    needs_fake!();
    const EXACT: u64 = 0;
    const NOT_EXACT: u64 = 1;
    // A message that the peer has not counted, and a write behind the last one.
    for (is_message, code, is_lost) in
        [(true, EXACT, true), (false, NOT_EXACT, true), (false, EXACT, false), (true, NOT_EXACT, true)]
    {
        let (fake, mut a, mut b) = slow_rails();
        a.port.post_receives(a.link, 1);
        let source = tensor(&b.pool, &[7; 64]);
        let target = tensor_mut(&a.pool, 64);
        let grant = a.port.grant(a.link, target).expect("room");
        b.port.write(b.link, &source, 64, &grant, is_message.then(|| immediate(3))).expect("room");
        expect!(b.next(&mut a), Got::Done => ());
        forge(&fake, pairs_of(&fake, "b_1")[0], [TAKEN_OVER, code, 0, 0, 0]);
        match is_lost {
            true => assert_says(&b.until_down().2.to_string(), &["b_0", "acknowledged what did not arrive"]),
            false => expect!(b.next(&mut a), Got::Repaired => ()),
        }
        drop((source, a, b));
        fake.assert_clean();
    }
    // A part of a large write on the first rail or on the other, which the peer takes for written.
    for (silent, left, count) in [("b_0", "b_1", 3), ("b_1", "b_0", 1)] {
        let fake = Fake::new(&format!("slow\n{}", four_nics(["", ""])));
        let wide = over_both().map(|options| VerbsOptions { qps_per_peer: count, ..options });
        let (a, mut b) = ends(&fake, wide, &link(16));
        fake.run(&format!("remove device={silent} silently=1"));
        let control = pairs_of(&fake, left)[0];
        if silent == "b_0" {
            forge(&fake, control, [TAKEN_OVER, EXACT, 0, 0, 0]);
        }
        forge(&fake, control, [STRIPE_LOST, 1, 0, 0, 1]);
        assert_says(&b.until_down().2.to_string(), &[silent, "acknowledged what did not arrive"]);
        drop((a, b));
        fake.assert_clean();
    }
}

/// The places of receives are used in turn, by both sides.
#[test]
fn a_receive_that_the_driver_refuses_costs_the_rail_and_no_message() {
    needs_fake!();
    const COUNT: u32 = 40;
    for (device, skip) in [("b_0", 0), ("b_0", 3), ("b_0", 9), ("b_1", 0)] {
        let (fake, mut a, mut b) = slow_rails();
        b.port.post_receives(b.link, 8);
        fake.run(&format!("fault call=post_recv device={device} errno=12 skip={skip} times=1"));
        let mut got = 0;
        for number in 0..COUNT {
            until_posted(&mut a, &mut b, |a| a.port.send(a.link, &number.to_le_bytes()));
            b.port.post_receives(b.link, 1);
            while number - got >= 4 {
                if let Got::Message(bytes) = b.next(&mut a) {
                    assert_eq!(bytes, got.to_le_bytes(), "{device} {skip}");
                    got += 1;
                }
            }
        }
        while got < COUNT {
            if let Got::Message(bytes) = b.next(&mut a) {
                assert_eq!(bytes, got.to_le_bytes(), "{device} {skip}");
                got += 1;
            }
        }
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_side_that_leaves_sends_what_the_first_rail_has_left() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 2);
    let large = bulk(&a, &mut b, 9);
    fake.run(&format!("fail_request status=12 qp={}", data_pair(&fake, "a_0")));
    write(&mut a, &large, 3);
    let start = Instant::now();
    while a.fabric.lost_rails().load(std::sync::atomic::Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < TIMEOUT);
        a.poll();
    }
    a.port.detach(a.link);
    assert_eq!(until_repaired(&mut b, &mut a).len(), 0);
    assert_arrives(&mut a, &mut b, large, 3);
    expect!(b.next(&mut a), Got::Down(LinkFailure::Closed) => ());
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn what_a_lost_rail_has_left_is_flushed_once_the_peer_has_it() {
    needs_fake!();
    for device in ["a_0", "a_1"] {
        let (fake, mut a, mut b) = slow_rails();
        b.port.post_receives(b.link, 2);
        let large = bulk(&a, &mut b, 9);
        fake.run(&format!("fail_request status=12 qp={}", data_pair(&fake, device)));
        write(&mut a, &large, 3);
        let start = Instant::now();
        while a.fabric.lost_rails().load(std::sync::atomic::Ordering::Relaxed) == 0 {
            assert!(start.elapsed() < TIMEOUT);
            a.poll();
        }
        for _ in 0..20 {
            assert!(!a.port.is_flushed(a.link), "{device}: the peer has not been polled");
            a.poll();
        }
        while !a.port.is_flushed(a.link) {
            assert!(start.elapsed() < TIMEOUT);
            a.poll();
            b.poll();
        }
        // The write is there without another poll of its sender.
        let mut came = vec![];
        while !matches!(came.last(), Some(Got::Immediate(..))) {
            came.push(b.next_alone());
        }
        assert!(matches!(came[..], [Got::Immediate(..)] | [Got::Repaired, Got::Immediate(..)]), "{came:?}");
        let (source, grant) = large;
        let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
        assert!(written.bytes() == source.bytes(), "the bytes differ");
        drop((source, a, b));
        fake.assert_clean();
    }
}

/// Of a link with three rails. `a` is told of the loss of two at once, and `b` of one.
#[test]
fn a_side_that_loses_two_rails_at_once_goes_on_over_the_third() {
    needs_fake!();
    let (fake, mut a, mut b) = three_rails();
    a.port.post_receives(a.link, 1);
    b.port.post_receives(b.link, 1);
    for device in ["a_0", "a_1"] {
        fake.run(&format!("event kind=1 qp={}", data_pair(&fake, device)));
    }
    a.port.send(a.link, b"early").expect("room");
    let mut came = until_repaired(&mut b, &mut a);
    if came.is_empty() {
        came.push(b.next(&mut a));
    }
    assert!(matches!(&came[..], [Got::Message(m)] if m == b"early"), "{came:?}");
    until_repaired(&mut a, &mut b);
    assert_carries(&mut b, &mut a, 4);
    assert_eq!(a.fabric.lost_rails().load(std::sync::atomic::Ordering::Relaxed), 2);
    assert_eq!((pairs_of(&fake, "a_0").len(), pairs_of(&fake, "a_1").len()), (0, 0));
    drop((a, b));
    fake.assert_clean();
}

/// Nobody polls for longer than a device has to complete its receives.
#[test]
#[ignore = "takes long: tests/nightly"]
fn a_side_that_does_not_poll_for_long_keeps_its_link() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 1);
    fake.run("slow on=0");
    fake.run(&format!("fail_request status=12 qp={}", data_pair(&fake, "a_0")));
    a.port.send(a.link, b"late").expect("room");
    while a.fabric.lost_rails().load(std::sync::atomic::Ordering::Relaxed) == 0 && a.arrivals.is_empty() {
        a.poll();
        std::thread::sleep(Duration::from_millis(2300));
    }
    assert_eq!(until_repaired(&mut a, &mut b).len(), 0);
    until_repaired(&mut b, &mut a);
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"late");
    drop((a, b));
    fake.assert_clean();
}

/// A write of no bytes from no memory has no key on any device.
#[test]
fn writes_of_no_bytes_are_posted_again() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 2);
    let (source, target) = (tensor(&a.pool, &[]), tensor_mut(&b.pool, 0));
    let grant = b.port.grant(b.link, target).expect("room");
    fake.run("cut device=a_0");
    a.port.write(a.link, &source, 0, &grant, Some(immediate(3))).expect("room");
    a.port.write(a.link, &tensor(&a.pool, &[1; 8]), 0, &grant, Some(immediate(4))).expect("room");
    for slot in [3, 4] {
        let got = loop {
            match b.next(&mut a) {
                Got::Repaired => {}
                got => break expect!(got, Got::Immediate(of, bytes) => (of, bytes)),
            }
        };
        assert_eq!(got, (immediate(slot), 0));
    }
    drop((source, a, b));
    fake.assert_clean();
}

const STRIPE_LOST: u64 = 5;
const PARTS_WRITTEN: u64 = 6;
const TAKEN_OVER: u64 = 7;

/// A control message: its kind, a stripe, a count, the messages that it acknowledges, and a second
/// count.
fn forge(fake: &Fake, qp: u64, [kind, stripe, count, acknowledged, second]: [u64; 5]) {
    let (low, high) = (kind | stripe << 8 | count << 32, acknowledged | second << 32);
    fake.run(&format!("forge qp={qp} low={low} high={high}"));
}

#[test]
fn a_peer_that_lies_about_rails_loses_its_link_and_nothing_else() {
    needs_fake!();
    // By the first rail's queue pair for control messages, or by its backup.
    let (first, backup) = ("b_0", "b_1");
    for (device, messages, said) in [
        (first, vec![[TAKEN_OVER, 0, 0, 0, 0]], "though no rail is lost"),
        (backup, vec![[TAKEN_OVER, 0, 3, 0, 0]], "it counted messages that were not sent"),
        (backup, vec![[TAKEN_OVER, 0, 2, 0, 0]; 2], "though no rail is lost"),
        (backup, vec![[TAKEN_OVER, 0, 2, 9, 0]], "it acknowledged control messages that were not sent"),
        (backup, vec![[99, 0, 0, 0, 0]], "a control message of an unknown kind"),
        (first, vec![[STRIPE_LOST, 9, 0, 0, 0]], "a stripe that the link does not have"),
        (first, vec![[STRIPE_LOST, 1, 5, 0, 0]], "it counted parts of writes that were not sent"),
        (first, vec![[STRIPE_LOST, 1, 0, 0, 0]; 2], "it lost a stripe twice"),
        (first, vec![[PARTS_WRITTEN, 1, 1, 0, 0]], "parts of a stripe that is not lost"),
    ] {
        let (fake, mut a, mut b) = slow_rails();
        a.port.post_receives(a.link, 2);
        // Both have arrived.
        (0..2).for_each(|_| b.port.send(b.link, b"x").expect("room"));
        (0..2).for_each(|_| expect!(a.next(&mut b), Got::Message(_) => ()));
        let control = pairs_of(&fake, device)[0];
        messages.into_iter().for_each(|message| forge(&fake, control, message));
        // The peer is silent.
        let why = b.until_down().2;
        assert!(matches!(&why, LinkFailure::Protocol(_)), "{device} {said}: {why}");
        assert_says(&why.to_string(), &[said]);
        drop((a, b));
        fake.assert_clean();
    }
}
