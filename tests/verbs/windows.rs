//! Memory windows (`rdma_memory_windows`): keys, reuse, and ends of links that have some.
//! `tests/conformance` has the rules of grants.

use crate::driver::Fake;
use crate::harness::{Got, begin_grant, immediate, pool, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkFailure, Port, PostError};
use tensorwire::internals::wire::Grant;

const LOCAL_WRITE: u64 = 1;
const REMOTE_WRITE: u64 = 1 << 1;
const REMOTE_READ: u64 = 1 << 2;
const MW_BIND: u64 = 1 << 4;
/// A write that is posted to nobody who answers ends after this many times 16 us.
const SHORT_TIMEOUT: u8 = 12;

/// [`TWO_NICS`] with memory windows of type 2B, and `more` of their properties.
fn script(more: &str) -> String {
    TWO_NICS.replace("device name=", &format!("device caps=0x1000000 {more} name="))
}

fn with_windows(device: &str) -> VerbsOptions {
    VerbsOptions { memory_windows: true, min_rnr_timer: 28, ..on(device) }
}

/// Two ends with windows.
fn both(fake: &Fake, depth: u32) -> (Verbs, Verbs) {
    ends(fake, [with_windows("fake_0"), with_windows("fake_1")], &link(depth))
}

/// Two ends with windows, of which the first soon gives up a peer that does not answer.
fn impatient(fake: &Fake) -> (Verbs, Verbs) {
    let a = VerbsOptions { timeout: SHORT_TIMEOUT, retry_count: 1, ..with_windows("fake_0") };
    ends(fake, [a, with_windows("fake_1")], &link(16))
}

/// Writes to a grant of `b`, and asserts that both ends go down for it.
fn assert_refused(a: &mut Verbs, b: &mut Verbs, grant: &Grant) {
    let source = tensor(&a.pool, &[0xFF; 64]);
    a.port.write(a.link, &source, grant.len, grant, None).expect("posted");
    let why = expect!(b.next(a), Got::Down(why) => why);
    assert!(matches!(why, LinkFailure::Protocol(_)), "{why:?}");
    expect!(a.next(b), Got::Failed => ());
    expect!(a.next(b), Got::Down(_) => ());
}

#[test]
fn a_device_without_windows_of_type_2_is_refused() {
    needs_fake!();
    let parts = ["rdma_memory_windows is on", "fake_0", "set rdma_memory_windows to off"];
    // None at all, and those of type 1.
    for caps in [0, 1 << 17] {
        let fake = Fake::new(&TWO_NICS.replace("name=fake_0", &format!("name=fake_0 caps={caps}")));
        assert_says(&refusal(&fake, with_windows("fake_0")), &parts);
        fake.assert_clean();
    }
    let fake = Fake::new(&script(""));
    fake.run("fault call=alloc_mw errno=95");
    let parts = ["making a memory window of type 2 on fake_0", "set rdma_memory_windows to off"];
    assert_says(&refusal(&fake, with_windows("fake_0")), &parts);
    fake.assert_clean();
}

#[test]
fn the_pool_s_own_key_gives_no_access_and_is_told_to_nobody() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = both(&fake, 16);
    let mut pools = fake.calls("reg_mr");
    pools.retain(|line| line.number("len") == 8 << 20);
    assert_eq!(pools.len(), 2);
    assert!(pools.iter().all(|pool| pool.number("access") == LOCAL_WRITE | MW_BIND), "{pools:?}");

    let key = pools[1].number("rkey") as u32;
    let endpoint = b.fabric.endpoint(0, &link(16)).expect("an endpoint");
    assert!(endpoint.address().windows(4).all(|bytes| bytes != key.to_le_bytes()));
    drop(endpoint);

    let grant = begin_grant(&mut b, 64);
    assert_ne!(grant.key, key);
    assert_refused(&mut a, &mut b, &Grant { key, ..grant });
    assert_eq!(b.port.revoke(b.link, &grant).expect("granted").bytes(), [0; 64]);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_window_is_used_again_with_another_key_and_the_earlier_ones_end() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = both(&fake, 16);
    let mut target = tensor_mut(&b.pool, 64);
    let before = fake.calls("alloc_mw").len();
    let mut keys = Vec::new();
    for _ in 0..600 {
        let grant = b.port.grant(b.link, target).expect("room");
        keys.push(grant.key);
        target = b.port.revoke(b.link, &grant).expect("granted");
        assert!(b.port.revoke(b.link, &grant).is_none(), "once");
        b.poll();
    }
    assert_eq!(fake.calls("alloc_mw").len(), before + 1);
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(key >> 8, keys[0] >> 8, "one window");
        assert!(!keys[at.saturating_sub(255)..at].contains(key), "eight bits are its owner's");
    }

    let grant = b.port.grant(b.link, target).expect("room");
    let source = tensor(&a.pool, &[7; 64]);
    a.port.write(a.link, &source, 64, &grant, None).expect("room");
    expect!(a.next(&mut b), Got::Done => ());
    let target = b.port.revoke(b.link, &grant).expect("granted");
    assert_eq!(target.bytes(), [7; 64]);
    let again = b.port.grant(b.link, target).expect("room");
    assert_refused(&mut a, &mut b, &grant);
    assert_eq!(b.port.revoke(b.link, &again).expect("granted").bytes(), [7; 64]);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn the_keys_of_windows_begin_anywhere() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (_a, mut b) = both(&fake, 16);
    let starts: Vec<u32> = (0..32).map(|_| begin_grant(&mut b, 8).key & 0xFF).collect();
    // 32 equal ones come once in 2^248 runs.
    assert!(starts.iter().any(|start| *start != starts[0]), "{starts:?}");
}

#[test]
fn a_window_has_one_right_and_the_bytes_of_its_grant() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (_a, mut b) = both(&fake, 16);
    fake.run("trace");
    let written = begin_grant(&mut b, 100);
    let read = b.port.expose(b.link, &tensor(&b.pool, &[1; 3])).expect("room");
    let empty = begin_grant(&mut b, 0);
    assert_eq!(empty.key, 0, "without bytes there is no window");
    let bound: Vec<[u64; 3]> =
        fake.calls("bind_mw").iter().map(|line| ["rkey", "len", "access"].map(|f| line.number(f))).collect();
    let expected = [[written.key.into(), 100, REMOTE_WRITE], [read.key.into(), 3, REMOTE_READ]];
    assert_eq!(bound, expected);
    b.port.withdraw(b.link, &written);
    assert!(b.port.revoke(b.link, &read).is_none(), "it is to read");
    assert!(fake.calls("local_inv").is_empty(), "neither was a grant of that kind");
    b.port.withdraw(b.link, &read);
    assert!(b.port.revoke(b.link, &written).is_some());
    let ended: Vec<u64> = fake.calls("local_inv").iter().map(|line| line.number("rkey")).collect();
    assert_eq!(ended, [u64::from(read.key), written.key.into()]);
}

#[test]
fn a_key_is_of_one_link() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = both(&fake, 16);
    let grant = begin_grant(&mut b, 64);
    let first = (a.link, b.link);
    (a.link, b.link) = another(&mut a, &mut b, &link(16));
    assert_refused(&mut a, &mut b, &grant);
    assert_works(&mut a, &mut b, first);
    assert_eq!(b.port.revoke(first.1, &grant).expect("granted").bytes(), [0; 64]);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_device_without_more_windows_refuses_the_grant_as_a_value() {
    needs_fake!();
    let fake = Fake::new(&script("max_mw=3"));
    let (a, mut b) = both(&fake, 16);
    assert_eq!(b.port.limits(b.link).grants, 3);
    let grants: Vec<Grant> = (0..3).map(|_| begin_grant(&mut b, 8)).collect();
    let target = tensor_mut(&b.pool, 8);
    let (why, target) = b.port.grant(b.link, target).expect_err("no more");
    assert_eq!(why, PostError::Full);
    assert!(b.port.revoke(b.link, &grants[1]).is_some());
    let grant = b.port.grant(b.link, target).expect("one is free");
    assert_eq!(grant.key >> 8, grants[1].key >> 8);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_grant_and_a_revocation_find_room_in_a_full_queue() {
    needs_fake!();
    let fake = Fake::new(&format!("slow\n{}", script("")));
    let (mut a, mut b) = both(&fake, 4);
    let theirs = begin_grant(&mut b, 8);
    // A key is of use behind the message that may tell it.
    a.port.post_receives(a.link, 1);
    b.port.send(b.link, b"granted").expect("room");
    expect!(a.next(&mut b), Got::Message(_) => ());
    let source = tensor(&a.pool, &[5; 8]);
    for _ in 0..50 {
        let mut posted = 0;
        while a.port.write(a.link, &source, 8, &theirs, None).is_ok() {
            posted += 1;
        }
        let mine: Vec<Grant> = (0..3).map(|_| begin_grant(&mut a, 8)).collect();
        for grant in &mine {
            assert!(a.port.revoke(a.link, grant).is_some());
        }
        for _ in 0..posted {
            expect!(a.next(&mut b), Got::Done => ());
        }
        assert!(a.arrivals.is_empty());
    }
    drop((source, a, b));
    fake.assert_clean();
}

#[test]
fn what_comes_while_a_revocation_waits_comes_with_the_next_poll_in_its_order() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = both(&fake, 64);
    b.port.post_receives(b.link, 30);
    let grants: Vec<Grant> = (0..10).map(|_| begin_grant(&mut b, 8)).collect();
    for (at, grant) in grants.iter().enumerate() {
        a.port.send(a.link, &[at as u8; 100]).expect("room");
        a.port.write_inline(a.link, &[at as u8; 8], grant, Some(immediate(at as u32))).expect("room");
    }
    for (at, grant) in grants.iter().enumerate() {
        assert_eq!(b.port.revoke(b.link, grant).expect("granted").bytes(), [at as u8; 8]);
    }
    assert!(b.arrivals.is_empty());
    for at in 0..10u8 {
        assert_eq!(expect!(b.next(&mut a), Got::Message(bytes) => bytes), [at; 100]);
        let got = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
        assert_eq!(got, (immediate(at.into()), 8));
    }
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_bind_goes_before_the_message_that_follows_it_in_a_batch() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = both(&fake, 16);
    a.port.post_receives(a.link, 4);
    fake.run("trace\nclear_log");
    b.port.begin_batch();
    b.port.send(b.link, b"first").expect("room");
    let (kept, ended) = (begin_grant(&mut b, 8), begin_grant(&mut b, 8));
    b.port.send(b.link, b"second").expect("room");
    assert!(b.port.revoke(b.link, &ended).is_some());
    b.port.send(b.link, b"third").expect("room");
    b.port.end_batch();
    // Sends are 2, binds 8, and revocations 7.
    let posted: Vec<u64> = fake.calls("post_send").iter().map(|line| line.number("opcode")).collect();
    assert_eq!(posted, [2, 8, 8, 2, 7, 2]);
    for message in [&b"first"[..], b"second", b"third"] {
        assert_eq!(expect!(a.next(&mut b), Got::Message(bytes) => bytes), message);
    }
    assert!(b.port.revoke(b.link, &kept).is_some());
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_link_with_windows_on_either_side_has_no_stripes() {
    needs_fake!();
    let plain = || VerbsOptions { min_rnr_timer: 28, qps_per_peer: 4, ..on("fake_1") };
    let fake = Fake::new(&script(""));
    let a = VerbsOptions { qps_per_peer: 4, ..with_windows("fake_0") };
    let (mut a, mut b) = ends(&fake, [a, plain()], &link(16));
    assert_eq!(pairs_of(&fake, "fake_0").len(), 2);
    // Each side protects its own pool.
    for _ in 0..2 {
        b.port.post_receives(b.link, 1);
        let grant = begin_grant(&mut b, 1 << 20);
        let source = tensor(&a.pool, &vec![3; 1 << 20]);
        a.port.write(a.link, &source, 1 << 20, &grant, Some(immediate(1))).expect("room");
        expect!(b.next(&mut a), Got::Immediate(_, bytes) => assert_eq!(bytes, 1 << 20));
        expect!(a.next(&mut b), Got::Done => ());
        assert_eq!(b.port.revoke(b.link, &grant).expect("granted").bytes(), source.bytes());
        drop(source);
        std::mem::swap(&mut a, &mut b);
    }
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_link_that_fails_while_a_revocation_waits_gives_the_tensor_back_and_tells_the_cause() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = impatient(&fake);
    let (mine, theirs) = (begin_grant(&mut a, 64), begin_grant(&mut b, 64));
    let exposed = a.port.expose(a.link, &tensor(&a.pool, &[1; 8])).expect("room");
    fake.run("cut\nclear_log");
    let source = tensor(&a.pool, &[1; 64]);
    a.port.write(a.link, &source, 64, &theirs, None).expect("room");
    assert!(a.port.revoke(a.link, &mine).is_some());
    assert_eq!(fake.calls("dealloc_mw").len(), 1, "the queue pair carries out no more requests");
    a.port.withdraw(a.link, &exposed);
    let (failed, done, why) = a.until_down();
    assert_eq!((failed, done), (1, 0));
    assert!(why.to_string().contains("retries exceeded"), "{why}");
    drop(source);
    assert!(a.pool.is_empty());
    assert!(a.port.grant(a.link, tensor_mut(&a.pool, 8)).is_err());
    b.port.fail(b.link, LinkFailure::Closed);
    b.until_down();
    assert!(b.port.revoke(b.link, &theirs).is_some(), "a link that is down keeps nothing");
    drop((a, b));
    fake.assert_clean();
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_revocation_that_nothing_ends_ends_the_link() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let forever = VerbsOptions { timeout: 0, ..with_windows("fake_0") };
    let (mut a, mut b) = ends(&fake, [forever, with_windows("fake_1")], &link(16));
    let (mine, theirs) = (begin_grant(&mut a, 64), begin_grant(&mut b, 64));
    fake.run("cut");
    let source = tensor(&a.pool, &[1; 64]);
    a.port.write(a.link, &source, 64, &theirs, None).expect("room");
    let start = Instant::now();
    assert!(a.port.revoke(a.link, &mine).is_some());
    let took = start.elapsed();
    assert!((Duration::from_secs(4)..Duration::from_secs(25)).contains(&took), "{took:?}");
    let (failed, done, why) = a.until_down();
    assert_eq!((failed, done), (1, 0));
    assert_says(&why.to_string(), &["fake_0", "was not bound or revoked in 5 s"]);
    drop((source, a, b));
    fake.assert_clean();
}

#[test]
fn a_silent_device_does_not_hold_the_end_of_a_link_up() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, b) = both(&fake, 16);
    let mine = begin_grant(&mut a, 64);
    fake.run("remove device=fake_0");
    let start = Instant::now();
    assert!(a.port.revoke(a.link, &mine).is_some());
    assert!(start.elapsed() < Duration::from_secs(4), "the device's event ends the wait");
    a.until_down();
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_bind_that_the_driver_refuses_ends_the_link_and_gives_the_tensor_back() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, mut b) = both(&fake, 16);
    fake.run("fault call=post_send errno=12 times=1");
    let target = tensor_mut(&b.pool, 8);
    let (why, target) = b.port.grant(b.link, target).expect_err("refused");
    assert_eq!(why, PostError::Down);
    drop(target);
    b.until_down();
    assert!(b.pool.is_empty());
    expect!(a.next(&mut b), Got::Down(_) => ());

    (a.link, b.link) = another(&mut a, &mut b, &link(16));
    let granted = begin_grant(&mut b, 8);
    fake.run("fault call=post_send errno=12 times=1");
    assert!(b.port.revoke(b.link, &granted).is_some());
    b.until_down();
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_bind_that_the_device_refuses_ends_the_link_by_name() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (a, mut b) = both(&fake, 16);
    fake.run("fail_request status=6 opcode=8");
    let grant = begin_grant(&mut b, 8);
    let (_, _, why) = b.until_down();
    assert_says(&why.to_string(), &["grant", "memory window bind error", "rdma_memory_windows"]);
    assert!(b.port.revoke(b.link, &grant).is_some());
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_tensor_whose_window_and_queue_pair_can_t_be_ended_is_never_used_again() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (mut a, b) = impatient(&fake);
    let mine = [begin_grant(&mut a, 64), begin_grant(&mut a, 64)];
    fake.run("fail_request status=2 opcode=7\nfault call=dealloc_mw errno=16 times=1");
    assert!(a.port.revoke(a.link, &mine[0]).is_some(), "the queue pair is gone");
    let (_, _, why) = a.until_down();
    assert_says(&why.to_string(), &["a memory window can't be ended"]);

    let fake = Fake::new(&script(""));
    let (mut c, d) = impatient(&fake);
    let mine = begin_grant(&mut c, 64);
    fake.run("fail_request status=2 opcode=7\nfault call=dealloc_mw errno=16");
    fake.run("fault call=destroy_qp errno=16\nfault call=modify_qp:ERR errno=5");
    assert!(c.port.revoke(c.link, &mine).is_none(), "the peer may still write there");
    let pool = c.pool.clone();
    drop((a, b, c, d));
    assert!(!pool.is_empty(), "the tensor is nobody's");
}

/// The driver of ConnectX devices binds no more. A request that is refused ends its link, so a
/// longer grant must not be tried.
#[test]
fn a_grant_by_a_window_has_at_most_two_gib() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let (a, b) = both(&fake, 16);
    assert_eq!(a.port.limits(a.link).max_grant, 1 << 31);
    drop((a, b));
    let (a, b) = two(&fake, 16);
    assert_eq!(a.port.limits(a.link).max_grant, u64::MAX, "without windows");
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_fabric_with_windows_leaves_nothing_behind() {
    needs_fake!();
    let fake = Fake::new(&script(""));
    let fabric = VerbsFabric::with_library(fake.library, &pool(1 << 20), with_windows("fake_0"));
    drop(fabric.expect("the script has the device"));
    let (mut a, mut b) = both(&fake, 16);
    let _held: Vec<Grant> = (0..8).map(|_| begin_grant(&mut a, 8)).chain([begin_grant(&mut b, 8)]).collect();
    a.port.detach(a.link);
    drop((a, b));
    fake.assert_clean();
}
