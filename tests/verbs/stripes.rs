//! Large writes over several queue pairs.

use crate::driver::Fake;
use crate::harness::{Got, immediate, pattern, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::{LinkFailure, Port, PostError};

/// Bytes of a write that is striped over four queue pairs; not a multiple of a stripe.
const LARGE: usize = 1_000_003;
const WRITE_WITH_IMMEDIATE: u64 = 1;

fn striped(device: &str, qps_per_peer: u8) -> VerbsOptions {
    VerbsOptions { qps_per_peer, min_rnr_timer: 28, ..on(device) }
}

/// Two ends whose requests the test carries out, one queue pair at a time.
fn slow(qps: [u8; 2], depth: u32) -> (Fake, Verbs, Verbs) {
    let fake = Fake::new(&format!("slow\n{TWO_NICS}"));
    let (a, b) = ends(&fake, [striped("fake_0", qps[0]), striped("fake_1", qps[1])], &link(depth));
    (fake, a, b)
}

#[test]
fn the_parts_go_over_all_queue_pairs_with_an_immediate_on_each() {
    needs_fake!();
    for (qps, used) in [([4, 4], 4), ([4, 2], 2), ([3, 16], 3), ([1, 4], 1)] {
        let (fake, mut a, mut b) = slow(qps, 16);
        b.port.post_receives(b.link, 1);
        let target = tensor_mut(&b.pool, LARGE);
        let grant = b.port.grant(b.link, target).expect("room");
        let source = tensor(&a.pool, &pattern(LARGE, 9));
        fake.run("trace");
        a.port.write(a.link, &source, LARGE as u64, &grant, Some(immediate(3))).expect("room");
        let got = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
        assert_eq!(got, (immediate(3), LARGE as u64), "the whole, once");
        expect!(a.next(&mut b), Got::Done => ());
        let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
        assert!(written.bytes() == source.bytes(), "the bytes differ");

        let parts: Vec<_> = fake.calls("post_send");
        let parts: Vec<_> =
            parts.iter().filter(|line| line.number("opcode") == WRITE_WITH_IMMEDIATE).collect();
        let mut pairs: Vec<_> = parts.iter().map(|line| line.number("qp")).collect();
        pairs.dedup();
        assert_eq!((parts.len(), pairs.len()), (used, used), "{qps:?}");
        let lengths: Vec<_> = parts.iter().map(|line| line.number("len")).collect();
        assert_eq!(lengths.iter().sum::<u64>(), LARGE as u64);
        assert!(lengths.iter().all(|len| len.abs_diff(lengths[0]) < 4096 * used as u64), "{lengths:?}");
        drop((written, source));
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_striped_write_that_the_driver_refuses_in_the_middle_ends_the_link_before_another_can_be_mistaken_for_it()
{
    needs_fake!();
    // The orders of four queue pairs: the second stripe, the length on the first queue pair, its
    // stripe.
    for skip in [1, 3, 4] {
        let (fake, mut a, mut b) = slow([4, 4], 16);
        b.port.post_receives(b.link, 4);
        let target = tensor_mut(&b.pool, LARGE);
        let grant = b.port.grant(b.link, target).expect("room");
        let source = tensor(&a.pool, &pattern(LARGE, 9));
        let mut write = || a.port.write(a.link, &source, LARGE as u64, &grant, Some(immediate(3)));
        fake.run(&format!("fault call=post_send errno=12 skip={skip} times=1"));
        assert_eq!(write(), Err(PostError::Down));
        assert_eq!(write(), Err(PostError::Down), "nothing goes out behind it");
        let (failed, done, _) = a.until_down();
        assert_eq!((failed, done), (0, 0), "neither was posted");
        expect!(b.next(&mut a), Got::Down(_) => ());
        assert!(source.try_into_mut().is_ok(), "nobody reads it any more");
        b.port.revoke(b.link, &grant);
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn small_writes_and_writes_without_an_immediate_take_one_queue_pair() {
    needs_fake!();
    let (fake, mut a, mut b) = slow([4, 4], 16);
    b.port.post_receives(b.link, 2);
    let target = tensor_mut(&b.pool, LARGE);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &pattern(LARGE, 9));
    let before = (4 * 65_536) - 1;
    fake.run("trace");
    a.port.write(a.link, &source, before, &grant, Some(immediate(1))).expect("room");
    a.port.write(a.link, &source, LARGE as u64, &grant, None).expect("room");
    a.port.send(a.link, b"behind").expect("room");
    let got = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
    assert_eq!(got, (immediate(1), before));
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"behind");
    let mut pairs: Vec<_> = fake.calls("post_send").iter().map(|line| line.number("qp")).collect();
    pairs.dedup();
    assert_eq!(pairs.len(), 1, "{pairs:?}");
    drop(source);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn thousands_of_writes_of_all_lengths_and_messages_arrive_whole_and_in_order() {
    needs_fake!();
    const ROUNDS: u32 = 2000;
    let (fake, mut a, mut b) = slow([3, 3], 8);
    b.port.post_receives(b.link, 8);
    // One target for each outstanding write. The bytes tell the round.
    let grants: Vec<_> = (0..8)
        .map(|_| {
            let target = tensor_mut(&b.pool, 300_000);
            b.port.grant(b.link, target).expect("room")
        })
        .collect();
    let length = |round: u32| [7, 300_000, 200_000, 64, 196_608][round as usize % 5];
    let sources: Vec<_> =
        (0..ROUNDS.min(64)).map(|round| tensor(&a.pool, &pattern(64, round.into()))).collect();
    let large = tensor(&a.pool, &pattern(300_000, 77));
    let (mut sent, mut came) = (0, 0);
    while came < ROUNDS {
        // At most as many as there are receives and targets.
        while sent < ROUNDS && sent - came < 8 {
            let grant = &grants[sent as usize % 8];
            let posted = match sent % 3 {
                2 => a.port.send(a.link, sources[sent as usize % sources.len()].bytes()),
                _ => {
                    let immediate = Some(immediate(sent));
                    a.port.write(a.link, &large, length(sent), grant, immediate)
                }
            };
            match posted {
                Ok(()) => sent += 1,
                Err(PostError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
        a.poll();
        b.poll();
        a.arrivals.clear();
        while let Some((_, got)) = b.arrivals.pop_front() {
            match (came % 3, got) {
                (2, Got::Message(message)) => {
                    assert_eq!(message, sources[came as usize % sources.len()].bytes());
                }
                (0 | 1, Got::Immediate(imm, bytes)) => {
                    assert_eq!((imm, bytes), (immediate(came), length(came)))
                }
                (_, got) => panic!("{got:?} in round {came}"),
            }
            came += 1;
            b.port.post_receives(b.link, 1);
        }
    }
    for grant in &grants {
        let written = b.port.revoke(b.link, grant).expect("granted");
        assert!(written.bytes()[..200_000] == large.bytes()[..200_000], "the bytes differ");
    }
    drop((large, sources));
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_write_finds_room_on_all_queue_pairs_or_is_not_posted_at_all() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = ends(&fake, [striped("fake_0", 4), striped("fake_1", 4)], &link(8));
    b.port.post_receives(b.link, 8);
    let target = tensor_mut(&b.pool, LARGE);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &pattern(LARGE, 9));
    fake.run("cut");
    let mut posted = 0;
    while a.port.write(a.link, &source, LARGE as u64, &grant, Some(immediate(3))) == Ok(()) {
        posted += 1;
    }
    // The first queue pair takes two requests for each write: the whole length, and its stripe.
    assert_eq!(posted, 4);
    fake.run("cut on=0");
    for _ in 0..posted {
        expect!(b.next(&mut a), Got::Immediate(_, bytes) => assert_eq!(bytes, LARGE as u64));
        expect!(a.next(&mut b), Got::Done => ());
    }
    drop(source);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_queue_pair_for_parts_that_fails_ends_the_link() {
    needs_fake!();
    let (fake, mut a, mut b) = slow([3, 3], 16);
    let part = pairs_of(&fake, "fake_0")[3];
    fake.run(&format!("event kind=1 qp={part}"));
    let why = expect!(a.next(&mut b), Got::Down(why) => why);
    assert!(matches!(why, LinkFailure::Device { event: "a queue pair failed", .. }), "{why:?}");
    drop((a, b));
    fake.assert_clean();
}
