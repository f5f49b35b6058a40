//! How queues are sized and filled.

use crate::driver::{Fake, Line, ONE_NIC};
use crate::harness::{Got, TIMEOUT, immediate, pattern, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use std::time::Instant;
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::{Completions, Fabric, Port, PostError};

const WRITE: u64 = 0;
const WRITE_WITH_IMMEDIATE: u64 = 1;
const SEND: u64 = 2;
const READ: u64 = 4;

/// The requests that `a` has posted on its data queue pairs since the trace began.
fn traced(fake: &Fake, opcodes: &[u64]) -> Vec<Line> {
    let queues = &pairs_of(fake, "fake_0")[1..];
    let mut posted = fake.calls("post_send");
    posted.retain(|line| queues.contains(&line.number("qp")) && opcodes.contains(&line.number("opcode")));
    posted
}

fn numbers(lines: &[Line], name: &str) -> Vec<u64> {
    lines.iter().map(|line| line.number(name)).collect()
}

#[test]
fn completion_queues_hold_all_that_their_queue_pairs_can_complete() {
    needs_fake!();
    // The fake compares each completion queue with its queue pairs, at creation and at each
    // completion.
    for cq_entries in [1, 300, 1000, 16_384] {
        let fake = Fake::new(ONE_NIC);
        let options = VerbsOptions { cq_entries, ..VerbsOptions::default() };
        let (mut a, mut b) = ends(&fake, [options.clone(), options], &link(16));
        let mut links = vec![(a.link, b.link)];
        for _ in 0..9 {
            links.push(another(&mut a, &mut b, &link(16)));
        }
        for link in links {
            assert_works(&mut a, &mut b, link);
        }
        let queues = fake.calls("create_cq");
        let sizes = numbers(&queues, "cqe");
        match cq_entries {
            16_384 => assert_eq!(sizes, [16_384; 2], "one for each port is enough"),
            1 => assert_eq!(sizes.len(), 20, "one for each link: {sizes:?}"),
            _ => assert!(
                sizes.len() > 2 && sizes.iter().all(|size| *size == u64::from(cq_entries)),
                "{sizes:?}"
            ),
        }
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn the_places_of_links_that_are_gone_are_used_again() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let options = VerbsOptions { cq_entries: 400, ..VerbsOptions::default() };
    let (mut a, mut b) = ends(&fake, [options.clone(), options], &link(64));
    for generation in 2..12 {
        a.port.detach(a.link);
        b.port.detach(b.link);
        for _ in 0..200 {
            a.poll();
            b.poll();
        }
        let mut again = link(64);
        again.generation = generation;
        (a.link, b.link) = another(&mut a, &mut b, &again);
        let links = (a.link, b.link);
        assert_works(&mut a, &mut b, links);
    }
    let made = fake.calls("create_cq").len();
    assert!(made <= 4, "ten links one after the other, and {made} completion queues");
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn the_places_of_halves_that_came_to_nothing_are_used_again() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let fabric = fabric(&fake, VerbsOptions::default()).expect("a fabric");
    let mut port = fabric.port().expect("a port");
    let mut nothing = Completions::default();
    for _ in 0..100 {
        drop(fabric.endpoint(0, &link(1024)).expect("an endpoint"));
        port.poll(&mut nothing);
    }
    assert_eq!(fake.calls("create_cq").len(), 1, "one queue has places for seven such endpoints at a time");
    drop((port, fabric));
    fake.assert_clean();
}

#[test]
fn endpoints_that_come_to_nothing_while_nobody_polls_pile_up_no_queues() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let fabric = fabric(&fake, VerbsOptions::default()).expect("a fabric");
    let mut port = fabric.port().expect("a port");
    for _ in 0..100 {
        drop(fabric.endpoint(0, &link(1024)).expect("an endpoint"));
    }
    let (made, left) = (fake.calls("create_cq").len(), fake.run("left"));
    assert!(made > 10 && left.contains("queues=1"), "{made} made, {left}");
    // A completion that the port has polled stays.
    port.poll(&mut Completions::default());
    for _ in 0..100 {
        drop(fabric.endpoint(0, &link(1024)).expect("an endpoint"));
    }
    let left = fake.run("left");
    assert!(left.contains("queues=2"), "{left}");
    drop((port, fabric));
    fake.assert_clean();
}

#[test]
fn only_some_requests_make_a_completion() {
    needs_fake!();
    const DEPTH: u32 = 64;
    const COUNT: u64 = 1000;
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, DEPTH);
    b.port.post_receives(b.link, u32::MAX);
    for _ in 0..COUNT {
        while let Err(error) = a.port.send(a.link, b"x") {
            assert_eq!(error, PostError::Full);
            a.poll();
            b.poll();
            b.arrivals.clear();
        }
    }
    let pairs = fake.pairs();
    let pair = pairs.iter().find(|pair| pair.number("sends") >= COUNT).expect("the data queue pair");
    let (sends, signaled) = (pair.number("sends"), pair.number("signaled"));
    assert_eq!(pair.number("inline") + 1, sends, "all but the ping are inline");
    // A quarter of the queue is unsignalled, and the next request is signalled.
    assert!((COUNT / 16..=COUNT / 16 + 2).contains(&signaled), "{signaled} of {sends}");
    assert!(pair.number("most_used") <= u64::from(DEPTH) + 4);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_request_that_holds_a_tensor_completes_with_the_first_or_behind_the_last() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 64);
    let target = tensor_mut(&b.pool, 64);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &[1; 64]);
    fake.run("trace");
    for _ in 0..10 {
        a.port.write(a.link, &source, 64, &grant, None).expect("room");
    }
    for _ in 0..10 {
        expect!(a.next(&mut b), Got::Done => ());
    }
    let posted = traced(&fake, &[WRITE]);
    // The first write is signalled. A zero-byte request behind the nine others reports them.
    assert_eq!(numbers(&posted, "signaled"), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(posted[10].number("len"), 0);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn bytes_are_inline_up_to_what_the_device_grants() {
    needs_fake!();
    for (grants, takes) in [(0, 0), (60, 0), (64, 64), (200, 128), (256, 256), (1000, 256)] {
        let script = TWO_NICS.replace("name=fake_0", &format!("name=fake_0 max_inline={grants}"));
        let fake = Fake::new(&script);
        let (mut a, mut b) = two(&fake, 16);
        assert_eq!(fake.calls("create_qp")[0].number("inline"), takes);
        b.port.post_receives(b.link, 4);
        fake.run("trace");
        for len in [16, 64, 65, 200] {
            let bytes = pattern(len, grants);
            a.port.send(a.link, &bytes).expect("room");
            assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), bytes);
        }
        let expected = [16, 64, 65, 200].map(|len| u64::from(len <= takes));
        assert_eq!(numbers(&traced(&fake, &[SEND]), "inline"), expected, "of {grants}");
        drop((a, b));
        fake.assert_clean();
    }
}

/// As with `bnxt_re`, whose refusal has no errno.
#[test]
fn a_driver_that_does_not_say_why_it_refuses_a_queue_pair_is_asked_for_fewer_inline_bytes() {
    needs_fake!();
    let script = TWO_NICS.replace("name=fake_0", "name=fake_0 max_inline=96 refuses_silently=1");
    let fake = Fake::new(&script);
    let (a, b) = two(&fake, 16);
    assert_eq!(fake.calls("create_qp")[0].number("inline"), 64);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn what_is_longer_than_a_request_may_be_is_split_and_stays_one_operation() {
    needs_fake!();
    const LEN: usize = 20_000;
    let script = TWO_NICS.replace("port\n", "port max_msg_sz=4096\n");
    let fake = Fake::new(&script);
    let (mut a, mut b) = two(&fake, 32);
    b.port.post_receives(b.link, 2);
    let target = tensor_mut(&b.pool, LEN);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &pattern(LEN, 5));
    fake.run("trace");
    a.port.write(a.link, &source, LEN as u64, &grant, Some(immediate(4))).expect("room");
    let got = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
    assert_eq!(got, (immediate(4), LEN as u64), "the length of all, not of the last request");
    expect!(a.next(&mut b), Got::Done => ());
    // The length is sent first. The last request has the immediate.
    assert_eq!(numbers(&traced(&fake, &[WRITE]), "len"), [8, 4096, 4096, 4096, 4096]);
    assert_eq!(numbers(&traced(&fake, &[WRITE_WITH_IMMEDIATE]), "len"), [LEN as u64 - 4 * 4096]);
    let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
    assert!(written.bytes() == source.bytes(), "the bytes differ");

    let exposed = b.port.expose(b.link, &written).expect("room");
    let into = tensor_mut(&a.pool, LEN);
    a.port.read(a.link, into, &exposed).expect("room");
    let read = expect!(a.next(&mut b), Got::ReadDone(target) => target);
    assert!(read.bytes() == source.bytes(), "the bytes differ");
    assert_eq!(numbers(&traced(&fake, &[READ]), "len"), [4096, 4096, 4096, 4096, LEN as u64 - 4 * 4096]);

    // A write that needs more requests than the queue holds is refused.
    let wide = tensor(&a.pool, &vec![1; 40 * 4096]);
    let target = tensor_mut(&b.pool, 40 * 4096);
    let grant = b.port.grant(b.link, target).expect("room");
    let refused = a.port.write(a.link, &wide, 40 * 4096, &grant, None);
    assert!(
        matches!(refused, Err(PostError::Refused(why)) if why.contains("deepen its queue")),
        "{refused:?}"
    );
    b.port.revoke(b.link, &grant);
    drop((read, wide, source, written));
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn receives_are_posted_in_batches() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 64);
    b.port.post_receives(b.link, 64 + 1000);
    for round in 0..1000u32 {
        a.port.send(a.link, &round.to_le_bytes()).expect("each is taken before the next");
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), round.to_le_bytes());
    }
    let pairs = fake.pairs();
    let pair = pairs.iter().find(|pair| pair.number("recvs") > 900).expect("the data queue pair");
    let (calls, posted) = (pair.number("recv_calls"), pair.number("recvs"));
    assert!(calls * 8 < posted, "{calls} calls for {posted} receives");
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn as_many_operations_as_the_link_is_deep_can_be_outstanding() {
    needs_fake!();
    const DEPTH: u64 = 1024;
    let script = TWO_NICS.replace("name=fake_0", "name=fake_0 max_qp_wr=1028");
    let fake = Fake::new(&script);
    let (mut a, mut b) = two(&fake, DEPTH as u32);
    let target = tensor_mut(&b.pool, 8);
    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &[1; 8]);
    fake.run("cut");
    let mut posted = 0;
    while a.port.write(a.link, &source, 8, &grant, None) == Ok(()) {
        posted += 1;
    }
    assert_eq!(posted, DEPTH);
    fake.run("cut on=0");
    for _ in 0..posted {
        expect!(a.next(&mut b), Got::Done => ());
    }
    drop((a, b));
    fake.assert_clean();
}

/// Repeats a post until there is room.
fn posted(a: &mut Verbs, b: &mut Verbs, mut post: impl FnMut(&mut Verbs) -> Result<(), PostError>) {
    let start = std::time::Instant::now();
    while let Err(error) = post(a) {
        assert_eq!(error, PostError::Full);
        assert!(start.elapsed() < TIMEOUT, "no room within {TIMEOUT:?}");
        a.poll();
        b.poll();
    }
}

#[test]
fn places_of_queues_of_any_depth_are_used_in_turn() {
    needs_fake!();
    for depth in [1, 2, 3, 5, 24, 100] {
        // Messages are copied to places of the queue. The length of a split write goes to the place
        // of its receive.
        let script = TWO_NICS.replace("name=fake_0", "name=fake_0 max_inline=0");
        let fake = Fake::new(&script.replace("port\n", "port max_msg_sz=4096\n"));
        let (mut a, mut b) = two(&fake, depth);
        let limits = a.port.limits(a.link).clone();
        let parts = depth.saturating_sub(1).clamp(1, 3) as usize;
        assert_eq!((limits.depth, limits.max_write >= 4096 * parts as u64), (depth, true));
        b.port.post_receives(b.link, u32::MAX);
        let len = 4096 * parts;
        let source = tensor(&a.pool, &pattern(len, 3));
        for round in 0..2 * depth + 3 {
            let bytes = pattern(60, round.into());
            posted(&mut a, &mut b, |a| a.port.send(a.link, &bytes));
            let target = tensor_mut(&b.pool, len);
            let grant = b.port.grant(b.link, target).expect("room");
            posted(&mut a, &mut b, |a| {
                a.port.write(a.link, &source, len as u64, &grant, Some(immediate(round)))
            });
            assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), bytes, "depth {depth}");
            let got = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
            assert_eq!(got, (immediate(round), len as u64), "depth {depth}");
            expect!(a.next(&mut b), Got::Done => ());
            let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
            assert!(written.bytes() == source.bytes(), "the bytes differ");
        }
        fake.run("cut");
        let mut count = 0;
        while a.port.send(a.link, b"x") == Ok(()) {
            count += 1;
        }
        assert_eq!(count, depth, "operations are outstanding");
        fake.run("cut on=0");
        for _ in 0..count {
            assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"x");
        }
        drop(source);
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_control_message_always_finds_a_receive() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    // A message that finds no receive fails its link at once.
    let hasty = |device| VerbsOptions { rnr_retry: 0, ..on(device) };
    let (mut a, mut b) = ends(&fake, [hasty("fake_0"), hasty("fake_1")], &link(16));
    let mut returned = 0;
    for round in 0..200 {
        // One side or both return more receives than the window holds, and poll seldom.
        for _ in 0..50 {
            returned += 1;
            a.port.publish_credits(a.link, returned);
            if round % 2 == 0 {
                b.port.publish_credits(b.link, returned);
            }
        }
        match round % 5 {
            0 => a.poll(),
            1 => b.poll(),
            _ => {}
        }
    }
    let start = std::time::Instant::now();
    while b.port.peer_credits(b.link) != returned {
        assert!(start.elapsed() < TIMEOUT, "the newest number did not come");
        a.poll();
        b.poll();
    }
    assert!(a.arrivals.is_empty() && b.arrivals.is_empty(), "{:?} {:?}", a.arrivals, b.arrivals);
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn ports_take_the_completion_vectors_in_turn() {
    needs_fake!();
    for (vectors, first, expected) in [(1, 0, [0; 4]), (3, 0, [0, 1, 2, 0]), (3, 5, [2, 0, 1, 2])] {
        let fake = Fake::new(&ONE_NIC.replace("name=fake_0", &format!("name=fake_0 vectors={vectors}")));
        let options = VerbsOptions { comp_vector: first, cq_entries: 1, ..VerbsOptions::default() };
        let fabric = fabric(&fake, options).expect("a fabric");
        let endpoints = [0, 1, 2, 3].map(|port| fabric.endpoint(port, &link(16)).expect("an endpoint"));
        assert_eq!(numbers(&fake.calls("create_cq"), "vector"), expected);
        // Every queue of a port has the port's vector.
        let again = fabric.endpoint(1, &link(16)).expect("an endpoint");
        assert_eq!(numbers(&fake.calls("create_cq"), "vector")[4], expected[1]);
        drop((endpoints, again, fabric));
        fake.assert_clean();
    }
}

#[test]
fn each_port_has_queues_of_its_own() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let fabric = fabric(&fake, VerbsOptions::default()).expect("a fabric");
    let ports = [fabric.port().expect("a port"), fabric.port().expect("a port")];
    let endpoints = [0, 1].map(|port| fabric.endpoint(port, &link(16)).expect("an endpoint"));
    assert_eq!(fake.calls("create_cq").len(), 2);
    drop((ports, endpoints, fabric));
    fake.assert_clean();
}

#[test]
fn a_post_is_flushed_once_the_peers_device_has_acknowledged_it() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    b.port.post_receives(b.link, 4);
    b.poll();
    assert!(a.port.is_flushed(a.link), "nothing was posted");
    fake.run("cut");
    a.port.send(a.link, b"late").expect("room");
    for _ in 0..20 {
        a.poll();
        assert!(!a.port.is_flushed(a.link), "the network has it");
    }
    fake.run("cut on=0");
    let start = Instant::now();
    while !a.port.is_flushed(a.link) {
        assert!(start.elapsed() < TIMEOUT);
        a.poll();
    }
    expect!(b.next(&mut a), Got::Message(bytes) => assert_eq!(bytes, b"late"));
    drop((a, b));
    fake.assert_clean();
}
