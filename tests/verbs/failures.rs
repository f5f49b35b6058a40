//! Failed completions: the link reports the cause and ends its outstanding operations. Other links
//! go on.

use crate::driver::Fake;
use crate::harness::{Got, immediate, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::{LinkFailure, Port, PostError};

/// Every status of a reliable connection, without the flush that follows another: number, name,
/// part of the cause.
const STATUSES: [(u32, &str, &str); 14] = [
    (1, "local length error", "longer than the receive"),
    (2, "local queue pair operation error", "can't do"),
    (4, "local protection error", "not registered"),
    (7, "bad response", "broke the protocol"),
    (8, "local access error", "may not be written"),
    (9, "remote invalid request", "forbids it"),
    (10, "remote access error", "key or bounds"),
    (11, "remote operation error", "peer's device"),
    (12, "retries exceeded", "same GID type and VLAN"),
    (13, "receiver not ready", "no receive posted"),
    (16, "remote abort", "gave up"),
    (19, "fatal error", "device failed"),
    (20, "response timeout", "gone or overloaded"),
    (21, "general error", "vendor's code"),
];

#[test]
fn each_failed_completion_says_what_it_was_and_what_usually_causes_it() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let bystander = (a.link, b.link);
    let target = tensor_mut(&b.pool, 64);
    for (code, name, cause) in STATUSES {
        (a.link, b.link) = another(&mut a, &mut b, &link(16));
        let source = tensor(&a.pool, &[1; 64]);
        let grant = tensorwire::internals::wire::Grant { region: 3, key: 0, offset: 0, len: 64 };
        fake.run(&format!(
            "fail_request skip=2 status={code} vendor=0x77 opcode=0 qp={}",
            queue_pair_of(&fake)
        ));
        // The third request fails; the fourth is never carried out.
        let harmless = tensorwire::internals::wire::Grant { len: 0, ..grant };
        for id in 1..=4 {
            let posted = a.port.write(a.link, &source, 0, &harmless, None);
            assert!(posted == Ok(()) || posted == Err(PostError::Down) && id == 4, "{posted:?}");
        }
        let (failed, done, why) = a.until_down();
        assert!(
            failed >= 1 && done <= 2 && (3..=4).contains(&(failed + done)),
            "{done} done, {failed} failed"
        );
        let LinkFailure::Completion { operation, queue_pair, status, code: told, vendor, cause: usually } =
            &why
        else {
            panic!("{why:?}");
        };
        assert_eq!((*operation, *queue_pair, *status, *told, *vendor), ("write", 0, name, code, 0x77));
        assert!(usually.contains(cause), "{usually}");
        let text = why.to_string();
        assert!(
            text.contains(name) && text.contains(&format!("error {code}")) && text.contains("0x77"),
            "{text}"
        );
        assert_eq!(a.port.send(a.link, b"x"), Err(PostError::Down));

        // The message names the peer, and its likely mistake.
        let why = expect!(b.next(&mut a), Got::Down(why) => why);
        match code {
            9 | 10 => assert!(matches!(why, LinkFailure::Protocol(_)), "{why:?}"),
            13 => assert_eq!(why, LinkFailure::NoReceive),
            _ => assert_eq!(why, LinkFailure::Closed),
        }
        assert_works(&mut a, &mut b, bystander);
        assert_works(&mut b, &mut a, (bystander.1, bystander.0));
        a.port.detach(a.link);
        b.port.detach(b.link);
    }
    drop((target, a, b));
    fake.assert_clean();
}

/// Bytes that are written over three queue pairs.
const STRIPED: usize = 3 * 64 * 1024;

/// The newest queue pair of the first device.
fn queue_pair_of(fake: &Fake) -> u64 {
    *pairs_of(fake, "fake_0").last().expect("a link")
}

#[test]
fn a_failed_read_and_a_failed_message_are_named_as_such() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let source = tensor(&b.pool, &[1; 64]);
    let exposed = b.port.expose(b.link, &source).expect("room");
    fake.run("fail_request status=12 opcode=4");
    a.port.read(a.link, tensor_mut(&a.pool, 64), &exposed).expect("room");
    let (failed, done, why) = a.until_down();
    assert_eq!((failed, done), (1, 0));
    assert!(matches!(why, LinkFailure::Completion { operation: "read", code: 12, .. }), "{why:?}");
    assert!(a.pool.is_empty(), "the target of the failed read is free");

    (a.link, b.link) = another(&mut a, &mut b, &link(16));
    fake.run("fail_request status=12 opcode=2");
    // A failed control message ends the link too.
    b.port.publish_credits(b.link, 1);
    let why = loop {
        let got = b.next(&mut a);
        if let Got::Down(why @ LinkFailure::Completion { .. }) = got {
            break why;
        }
    };
    assert!(matches!(why, LinkFailure::Completion { operation: "control message", code: 12, .. }), "{why:?}");
    drop((source, a, b));
    fake.assert_clean();
}

#[test]
fn what_succeeded_without_a_word_before_it_does_not_give_a_failure_its_name() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    b.port.post_receives(b.link, 2);
    let source = tensor(&b.pool, &[1; 64]);
    let exposed = b.port.expose(b.link, &source).expect("room");
    a.port.send(a.link, b"unsignaled").expect("room");
    expect!(b.next(&mut a), Got::Message(_) => ());
    fake.run("fail_request status=12 opcode=4");
    a.port.read(a.link, tensor_mut(&a.pool, 64), &exposed).expect("room");
    let (_, _, why) = a.until_down();
    assert!(matches!(why, LinkFailure::Completion { operation: "read", .. }), "{why:?}");
    drop((source, a, b));
    fake.assert_clean();
}

#[test]
fn the_queue_pairs_of_a_failed_link_are_gone_before_it_says_so() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let striped = |device| VerbsOptions { qps_per_peer: 3, ..on(device) };
    let (mut a, mut b) = ends(&fake, [striped("fake_0"), striped("fake_1")], &link(16));
    let queues = pairs_of(&fake, "fake_0").split_off(1);
    b.port.post_receives(b.link, 1);
    let target = tensor_mut(&b.pool, STRIPED);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &[1; STRIPED]);
    fake.run(&format!("fail_request status=12 qp={}", queues[1]));
    a.port.write(a.link, &source, STRIPED as u64, &grant, Some(immediate(1))).expect("room");
    // One failed queue pair ends the others of its link.
    let (_, _, why) = a.until_down();
    assert!(matches!(why, LinkFailure::Completion { queue_pair: 1, .. }), "{why:?}");
    let left = pairs_of(&fake, "fake_0");
    assert!(queues.iter().all(|queue| !left.contains(queue)), "nothing of the link can move a byte any more");
    assert!(source.try_into_mut().is_ok(), "no failed write holds its source");
    b.port.revoke(b.link, &grant);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_peer_that_does_not_answer_ends_the_link_after_the_retries() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let target = tensor_mut(&b.pool, 64);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &[1; 64]);
    fake.run("cut");
    a.port.write(a.link, &source, 64, &grant, None).expect("room");
    let (failed, done, why) = a.until_down();
    assert_eq!((failed, done), (1, 0));
    assert!(matches!(why, LinkFailure::Completion { code: 12, .. }), "{why:?}");
    b.port.revoke(b.link, &grant);
    drop((a, b));
    fake.run("cut on=0");
    fake.assert_clean();
}

#[test]
fn a_link_comes_back_with_new_queue_pairs() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let before = pairs_of(&fake, "fake_0");
    fake.run(&format!("fail_request status=12 qp={}", before[1]));
    a.port.send(a.link, b"lost").expect("room");
    a.until_down();
    a.port.detach(a.link);
    expect!(b.next(&mut a), Got::Down(_) => ());
    b.port.detach(b.link);
    let mut again = link(16);
    again.generation += 1;
    (a.link, b.link) = another(&mut a, &mut b, &again);
    let after = pairs_of(&fake, "fake_0");
    assert!(after.iter().all(|pair| !before.contains(pair)), "{before:?} {after:?}");
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}
