//! One or more tests for each rule of the contract.

pub use crate::batches::*;
use crate::expect;
use crate::harness::{
    End, Got, Harness, TIMEOUT, bytes_of, connect, exposed, granted, immediate, loan_message, options, pair,
    pattern, receives, revoked, tensor, tensor_mut,
};
pub use crate::holding::*;
pub use crate::short::*;
pub use crate::sleeping::*;
use std::collections::HashMap;
use std::time::Instant;
use tensorwire::internals::fabric::{Fabric, LinkFailure, LoanPermit, Port, PostError};
use tensorwire::internals::wire::Grant;

/// Instantiates rules for one fabric: all of them, or those that are named.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $harness:ty) => {
        $crate::conformance! { $name, $harness,
            order_holds_within_a_link
            a_write_lands_at_its_grant_and_is_there_when_a_later_send_is
            an_inline_write_lands_and_makes_no_completion_for_its_sender
            a_large_write_lands_whole
            a_message_consumes_a_receive_and_without_one_the_link_fails
            an_immediate_consumes_a_receive_and_without_one_nothing_is_written
            a_loan_consumes_a_receive_and_without_one_the_link_fails
            a_read_brings_the_bytes_into_the_start_of_its_target
            zero_length_operations_check_no_key
            a_source_is_held_until_local_completion_and_free_after
            a_write_outside_its_grant_fails_the_link_and_writes_nothing
            a_write_to_a_revoked_grant_fails_the_link_and_writes_nothing
            a_key_that_follows_from_earlier_ones_opens_nothing
            a_read_outside_its_grant_fails_the_link
            leave_to_write_is_no_leave_to_read
            a_full_queue_is_a_value_and_loses_nothing
            completions_are_neither_lost_nor_duplicated
            completions_of_an_earlier_link_never_come_on_a_later_one
            a_failed_link_fails_everything_outstanding_and_refuses_everything_later
            the_peer_of_a_failed_link_goes_down_too
            a_detached_link_releases_everything_and_the_peer_goes_down
            what_was_sent_before_a_link_was_closed_still_arrives
            what_was_posted_is_flushed_once_the_peer_s_host_has_it
            lent_bytes_are_read_where_they_lie_and_come_back_from_any_thread
            lent_bytes_outlive_the_link
            credits_are_cumulative_and_consume_nothing
            operands_that_make_no_sense_are_refused_and_cost_nothing
            a_revoked_tensor_comes_back_with_what_was_written
            messages_of_any_length_are_taken_without_a_poll_in_their_order
            a_message_that_is_refused_is_still_there_for_a_poll
            a_message_that_is_taken_consumes_a_receive
            a_loan_that_is_only_read_comes_back_with_its_message
            a_loan_that_is_kept_comes_back_when_it_is_dropped
            what_comes_on_an_armed_port_ends_the_sleep
            a_local_completion_ends_the_sleep
            credits_end_the_sleep_of_one_who_waits_for_them
            credits_that_have_come_keep_nobody_awake
            room_ends_the_sleep_of_one_who_found_the_queue_full
            arming_while_something_comes_loses_nothing
            a_thread_wakes_the_sleepers_of_its_process
            what_has_failed_holds_no_memory
            only_the_fabric_s_own_pool_can_be_reached_by_peers
            memory_outside_the_pool_is_written_as_granted_or_refused
            a_grant_of_one_kind_can_t_be_taken_back_as_the_other
            what_comes_before_the_first_poll_waits_for_it
            order_holds_in_a_batch_and_across_its_ends
            all_of_a_batch_arrives_once_it_has_ended
            a_link_that_fails_in_a_batch_ends_all_of_it
            who_is_in_a_batch_may_poll
            a_loan_in_a_batch_is_lent_as_ever
            a_batch_ends_the_sleep_of_who_waits_for_it
        }
    };
    ($name:ident, $harness:ty, $($test:ident)*) => {
        mod $name {
            use super::*;
            $(
                #[test]
                fn $test() {
                    if let Some(why) = <$harness as $crate::harness::Harness>::skipped() {
                        println!("skipped: {why}");
                        return;
                    }
                    $crate::rules::$test::<$harness>();
                    <$harness as $crate::harness::Harness>::verify();
                }
            )*
        }
    };
}

pub fn order_holds_within_a_link<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 1000);
    let grant = granted(&mut b, 8);
    let source = tensor(&a.pool, &[1; 8]);
    let (mut sent, mut expected) = (0u32, 0u32);
    let start = Instant::now();
    while expected < 900 {
        assert!(start.elapsed() < TIMEOUT);
        if sent < 900 {
            let imm = Some(immediate(sent));
            // Three kinds of operation, one order.
            let posted = match sent % 3 {
                0 => a.port.send(a.link, &sent.to_le_bytes()),
                1 => a.port.write_inline(a.link, &[2; 5], &grant, imm),
                _ => a.port.write(a.link, &source, 8, &grant, imm),
            };
            match posted {
                Ok(()) => sent += 1,
                Err(error) => assert_eq!(error, PostError::Full),
            }
        }
        a.poll();
        b.poll();
        for (_, got) in b.arrivals.drain(..) {
            let number = match got {
                Got::Message(bytes) => u32::from_le_bytes(bytes.try_into().expect("four bytes")),
                Got::Immediate(immediate, _) => immediate.slot.index(),
                other => panic!("{other:?}"),
            };
            assert_eq!(number, expected);
            expected += 1;
        }
    }
}

pub fn a_write_lands_at_its_grant_and_is_there_when_a_later_send_is<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 1);
    let grant = granted(&mut b, 100);
    let bytes = pattern(60, 1);
    let source = tensor(&a.pool, &bytes);
    let part = grant.part(10, 50).expect("inside");
    a.port.write(a.link, &source, 50, &part, None).expect("posted");
    a.port.send(a.link, b"look").expect("posted");
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"look");
    let target = revoked(&mut b, &grant);
    assert_eq!(target.bytes()[..10], [0; 10]);
    assert_eq!(target.bytes()[10..60], bytes[..50]);
    assert_eq!(target.bytes()[60..], [0; 40]);
    expect!(a.next(&mut b), Got::Done => ());
    // A write without an immediate makes no event at the target and consumes no receive.
    b.assert_quiet(&mut a);
}

pub fn an_inline_write_lands_and_makes_no_completion_for_its_sender<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 20);
    let most = a.port.limits(a.link).max_inline;
    assert!(most >= 32, "32 bytes are the least that is of use");
    for len in [1, 7, 8, 9, 31, 32, 33, most] {
        let grant = granted(&mut b, len + 8);
        let bytes = pattern(len, len as u64);
        a.port
            .write_inline(a.link, &bytes, &grant.part(4, len as u64).expect("inside"), Some(immediate(3)))
            .expect("posted");
        let (imm, count) = expect!(b.next(&mut a), Got::Immediate(imm, count) => (imm, count));
        assert_eq!((imm, count), (immediate(3), len as u64));
        let target = revoked(&mut b, &grant);
        assert_eq!(target.bytes()[4..4 + len], bytes);
        assert_eq!((&target.bytes()[..4], &target.bytes()[4 + len..]), (&[0; 4][..], &[0; 4][..]));
    }
    a.assert_quiet(&mut b);
}

pub fn a_large_write_lands_whole<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 1);
    let len = (5 << 20) + 123;
    let grant = granted(&mut b, len);
    let bytes = pattern(len, 2);
    let source = tensor(&a.pool, &bytes);
    a.port.write(a.link, &source, len as u64, &grant, Some(immediate(5))).expect("posted");
    assert_eq!(expect!(b.next(&mut a), Got::Immediate(_, count) => count), len as u64);
    assert!(revoked(&mut b, &grant).bytes() == bytes, "the bytes differ");
    expect!(a.next(&mut b), Got::Done => ());
}

pub fn a_message_consumes_a_receive_and_without_one_the_link_fails<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 2);
    let longest = vec![7; a.port.limits(a.link).max_message];
    a.port.send(a.link, &longest).expect("posted");
    a.port.send(a.link, b"").expect("posted");
    a.port.send(a.link, b"too many").expect("posted");
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), longest);
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"");
    assert_eq!(expect!(b.next(&mut a), Got::Down(why) => why), LinkFailure::NoReceive);
    // A queued message would arrive now.
    receives(&mut b, 1);
    b.assert_quiet(&mut a);
    expect!(a.next(&mut b), Got::Down(_) => ());
}

pub fn an_immediate_consumes_a_receive_and_without_one_nothing_is_written<H: Harness>() {
    for inline in [false, true] {
        let (mut a, mut b) = pair::<H>(16);
        b.port.post_receives(b.link, 1);
        let (first, second) = (granted(&mut b, 8), granted(&mut b, 8));
        let source = tensor(&a.pool, &[9; 8]);
        for grant in [&first, &second] {
            let imm = Some(immediate(1));
            if inline {
                a.port.write_inline(a.link, &[9; 8], grant, imm).expect("posted");
            } else {
                a.port.write(a.link, &source, 8, grant, imm).expect("posted");
            }
        }
        expect!(b.next(&mut a), Got::Immediate(_, 8) => ());
        assert_eq!(expect!(b.next(&mut a), Got::Down(why) => why), LinkFailure::NoReceive);
        assert_eq!(revoked(&mut b, &first).bytes(), [9; 8]);
        assert_eq!(revoked(&mut b, &second).bytes(), [0; 8]);
    }
}

pub fn a_loan_consumes_a_receive_and_without_one_the_link_fails<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    if !a.port.limits(a.link).lends {
        println!("skipped: this fabric does not lend");
        return;
    }
    receives(&mut b, 1);
    let source = tensor(&a.pool, &[1; 8]);
    a.port
        .lend(a.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(1))
        .expect("posted");
    a.port
        .lend(a.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(2))
        .expect("posted");
    let held = expect!(b.next(&mut a), Got::Lent(_, bytes) => bytes);
    assert_eq!(expect!(b.next(&mut a), Got::Down(why) => why), LinkFailure::NoReceive);
    drop(held);
    // The first read has completed or failed, depending on the order; the second has failed.
    let (failed, done, _) = a.until_down();
    assert!(failed >= 1);
    assert_eq!(failed + done, 2);
}

pub fn a_read_brings_the_bytes_into_the_start_of_its_target<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let bytes = pattern(20_000, 4);
    let source = tensor(&b.pool, &bytes);
    let grant = b.port.expose(b.link, &source).expect("room");
    let mut expected = HashMap::new();
    for (k, len) in [1, 100, 8192, 20_000u64, 5].into_iter().enumerate() {
        let part = grant.part(k as u64, len - k as u64 % len).expect("inside");
        // The length tells the targets apart.
        let target = tensor_mut(&a.pool, 20_010 + k);
        a.port.read(a.link, target, &part).expect("posted");
        expected.insert(20_010 + k, bytes[k..k + part.len as usize].to_vec());
    }
    while !expected.is_empty() {
        let target = expect!(a.next(&mut b), Got::ReadDone(target) => target);
        let bytes = expected.remove(&target.bytes().len()).expect("one completion each");
        assert_eq!(target.bytes()[..bytes.len()], bytes);
        assert!(target.bytes()[bytes.len()..].iter().all(|byte| *byte == 0));
    }
    b.assert_quiet(&mut a);
    b.port.withdraw(b.link, &grant);
}

pub fn zero_length_operations_check_no_key<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 10);
    let junk = Grant { region: 999, key: 0xBAD, offset: u64::MAX, len: 0 };
    let (empty, full) = (tensor(&a.pool, &[]), tensor(&a.pool, &[1; 8]));
    a.port.write(a.link, &empty, 0, &junk, None).expect("posted");
    a.port.write(a.link, &full, 0, &junk, Some(immediate(2))).expect("posted");
    a.port.write_inline(a.link, &[], &junk, Some(immediate(3))).expect("posted");
    a.port.send(a.link, &[]).expect("posted");
    a.port.read(a.link, tensor_mut(&a.pool, 0), &junk).expect("posted");
    for slot in [2, 3] {
        let (imm, bytes) = expect!(b.next(&mut a), Got::Immediate(imm, bytes) => (imm, bytes));
        assert_eq!((imm, bytes), (immediate(slot), 0));
    }
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"");
    if a.port.limits(a.link).lends {
        a.port
            .lend(a.link, &mut Some(empty.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(6))
            .expect("posted");
        assert!(expect!(b.next(&mut a), Got::Lent(_, bytes) => bytes).is_empty());
    } else {
        println!("skipped: this fabric does not lend");
    }
    let grant = granted(&mut b, 0);
    assert_eq!(grant.len, 0);
    assert!(b.port.revoke(b.link, &grant).is_some());
    let grant = b.port.expose(b.link, &tensor(&b.pool, &[])).expect("room");
    assert_eq!(grant.len, 0);
    let mut reads = 0;
    for _ in 0..3 + usize::from(a.port.limits(a.link).lends) {
        match a.next(&mut b) {
            Got::Done => {}
            Got::ReadDone(_) => reads += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(reads, 1);
    a.assert_quiet(&mut b);
}

pub fn a_source_is_held_until_local_completion_and_free_after<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let grant = granted(&mut b, 1000);
    let source = tensor(&a.pool, &pattern(1000, 1));
    a.port.write(a.link, &source, 1000, &grant, None).expect("posted");
    let source = source.try_into_mut().expect_err("the port holds it");
    // The peer does not answer, but the completion must come.
    expect!(a.next(&mut b), Got::Done => ());
    assert!(source.try_into_mut().is_ok(), "it may be written again");
}

/// The link failures of a peer that breaks a rule by a write or a read, and of its victim.
fn assert_refused<F: Fabric>(a: &mut End<F>, b: &mut End<F>) {
    assert_victim_down(a, b);
    expect!(a.next(b), Got::Failed => ());
    expect!(a.next(b), Got::Down(_) => ());
}

fn assert_victim_down<F: Fabric>(a: &mut End<F>, b: &mut End<F>) {
    let why = expect!(b.next(a), Got::Down(why) => why);
    assert!(matches!(why, LinkFailure::Protocol(_)), "{why:?}");
}

pub fn a_write_outside_its_grant_fails_the_link_and_writes_nothing<H: Harness>() {
    type Forge = fn(Grant) -> Grant;
    let forgeries: [Forge; 6] = [
        |grant| Grant { len: 65, ..grant },
        |grant| Grant { offset: grant.offset + 1, ..grant },
        |grant| Grant { offset: grant.offset.wrapping_sub(1), ..grant },
        |grant| Grant { offset: u64::MAX - 3, ..grant },
        |grant| Grant { region: grant.region + 1, ..grant },
        |grant| Grant { key: grant.key ^ 0x1000_0000, ..grant },
    ];
    // Violations 0 to 2 stay inside the region and have its key. Only a check of the grant detects
    // them.
    let told = if H::CHECKS_GRANTS { 0 } else { 3 };
    for (k, forge) in forgeries.into_iter().enumerate().skip(told) {
        let (mut a, mut b) = pair::<H>(16);
        receives(&mut b, 4);
        let grant = granted(&mut b, 64);
        let forged = forge(grant);
        let source = tensor(&a.pool, &[0xFF; 80]);
        a.port.write(a.link, &source, forged.len, &forged, None).expect("posted");
        a.port.send(a.link, b"never seen").expect("posted");
        assert_refused(&mut a, &mut b);
        assert_eq!(revoked(&mut b, &grant).bytes(), [0; 64], "forgery {k}");

        let (mut a, mut b) = pair::<H>(16);
        let grant = granted(&mut b, 64);
        let forged = forge(grant);
        let bytes = vec![0xFF; forged.len as usize];
        a.port.write_inline(a.link, &bytes, &forged, None).expect("posted");
        let why = expect!(b.next(&mut a), Got::Down(why) => why);
        assert!(matches!(why, LinkFailure::Protocol(_)), "{why:?}");
        assert_eq!(revoked(&mut b, &grant).bytes(), [0; 64], "inline forgery {k}");
    }
}

pub fn a_write_to_a_revoked_grant_fails_the_link_and_writes_nothing<H: Harness>() {
    if !H::HAS_OWN_KEYS {
        println!(
            "skipped: this fabric can't take the leave back; its callers know that no write is under way"
        );
        return;
    }
    let (mut a, mut b) = pair::<H>(16);
    let old = granted(&mut b, 64);
    let tensor_again = revoked(&mut b, &old);
    // The same bytes with a new grant.
    let new = b.port.grant(b.link, tensor_again).expect("room");
    let source = tensor(&a.pool, &[0xFF; 64]);
    a.port.write(a.link, &source, 64, &old, None).expect("posted");
    assert_refused(&mut a, &mut b);
    assert_eq!(revoked(&mut b, &new).bytes(), [0; 64]);
}

pub fn a_key_that_follows_from_earlier_ones_opens_nothing<H: Harness>() {
    if !H::DRAWS_KEYS {
        println!("skipped: the device draws the keys of this fabric");
        return;
    }
    // What tells the next key if keys count, or name places of a table.
    let guesses: [fn(u32, u32) -> u32; 6] = [
        |last, before| last.wrapping_add(last.wrapping_sub(before)),
        |last, _| last,
        |last, _| last.wrapping_add(1),
        |last, _| last.wrapping_add(1 << 14),
        |_, before| before.wrapping_add(1 << 14),
        |_, before| before,
    ];
    for (k, guess) in guesses.into_iter().enumerate() {
        let (mut a, mut b) = pair::<H>(16);
        let mut last = || {
            let grant = granted(&mut b, 64);
            (grant, revoked(&mut b, &grant))
        };
        let ((before, _), (last, tensor_again)) = (last(), last());
        let next = b.port.grant(b.link, tensor_again).expect("room");
        let forged = Grant { key: guess(last.key, before.key), ..next };
        let source = tensor(&a.pool, &[0xFF; 64]);
        a.port.write(a.link, &source, 64, &forged, None).expect("posted");
        assert_refused(&mut a, &mut b);
        assert_eq!(revoked(&mut b, &next).bytes(), [0; 64], "guess {k}");
    }
}

pub fn a_read_outside_its_grant_fails_the_link<H: Harness>() {
    let forgeries: [fn(Grant) -> Grant; 4] = [
        |grant: Grant| Grant { len: 65, ..grant },
        |grant: Grant| Grant { key: grant.key ^ 0x1000_0000, ..grant },
        |grant: Grant| Grant { region: grant.region + 1, ..grant },
        |grant: Grant| Grant { offset: u64::MAX, ..grant },
    ];
    for forge in forgeries.into_iter().skip(usize::from(!H::CHECKS_GRANTS)) {
        let (mut a, mut b) = pair::<H>(16);
        let source = tensor(&b.pool, &[1; 64]);
        let grant = forge(b.port.expose(b.link, &source).expect("room"));
        let target = tensor_mut(&a.pool, 80);
        a.port.read(a.link, target, &grant).expect("posted");
        assert_refused(&mut a, &mut b);
    }
}

pub fn leave_to_write_is_no_leave_to_read<H: Harness>() {
    if !H::HAS_OWN_KEYS {
        println!("skipped: on this fabric a region has one key, for writing and reading");
        return;
    }
    let (mut a, mut b) = pair::<H>(16);
    let grant = granted(&mut b, 64);
    let target = tensor_mut(&a.pool, 64);
    a.port.read(a.link, target, &grant).expect("posted");
    assert_refused(&mut a, &mut b);
}

pub fn a_full_queue_is_a_value_and_loses_nothing<H: Harness>() {
    const DEPTH: u32 = 8;
    let (mut a, mut b) = pair::<H>(DEPTH);
    receives(&mut b, 100);
    let mut sent = 0u8;
    while a.port.send(a.link, &[sent]).is_ok() {
        sent += 1;
        assert!(u32::from(sent) <= DEPTH, "a queue of {DEPTH} took {sent}");
    }
    assert_eq!(a.port.send(a.link, b"x"), Err(PostError::Full));
    let source = tensor(&a.pool, &[]);
    let junk = Grant { region: 0, key: 0, offset: 0, len: 0 };
    let full = a.port.write(a.link, &source, 0, &junk, None);
    assert_eq!(full, Err(PostError::Full));
    let target = tensor_mut(&a.pool, 8);
    let (error, target) = a.port.read(a.link, target, &junk).expect_err("full");
    assert_eq!((error, target.bytes().len()), (PostError::Full, 8));
    for expected in 0..sent {
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), [expected]);
    }
    let start = Instant::now();
    while a.port.send(a.link, b"again") == Err(PostError::Full) {
        assert!(start.elapsed() < TIMEOUT);
        a.poll();
        b.poll();
    }
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"again");
}

pub fn completions_are_neither_lost_nor_duplicated<H: Harness>() {
    const COUNT: u64 = 2000;
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut a, u32::MAX);
    receives(&mut b, u32::MAX);
    let ends = &mut [&mut a, &mut b];
    let grants = [granted(ends[0], 64), granted(ends[1], 64)];
    let exposed: Vec<Grant> = ends
        .iter_mut()
        .map(|end| {
            let source = tensor(&end.pool, &[5; 32]);
            end.port.expose(end.link, &source).expect("room")
        })
        .collect();
    let sources: Vec<_> = ends.iter().map(|end| tensor(&end.pool, &pattern(64, 0))).collect();
    // Outstanding writes and reads.
    let mut open = [[0u32; 2]; 2];
    let (mut posted, mut immediates) = ([0; 2], [0; 2]);
    let start = Instant::now();
    while posted != [COUNT; 2] || open != [[0; 2]; 2] || immediates != [COUNT / 2; 2] {
        assert!(start.elapsed() < TIMEOUT, "{posted:?} {open:?} {immediates:?}");
        for me in 0..2 {
            let (end, peer) = (&mut *ends[me], 1 - me);
            for _ in 0..5 {
                let id = posted[me];
                let imm = Some(immediate(id as u32));
                let result = match id % 4 {
                    _ if id == COUNT => break,
                    0 => end.port.write(end.link, &sources[me], 64, &grants[peer], imm),
                    1 => end.port.write(end.link, &sources[me], 9, &grants[peer], None),
                    2 => end.port.write_inline(end.link, &[1; 8], &grants[peer], imm),
                    _ => {
                        let target = tensor_mut(&end.pool, 32);
                        end.port.read(end.link, target, &exposed[peer]).map_err(|(e, _)| e)
                    }
                };
                match result {
                    Ok(()) => {
                        posted[me] += 1;
                        match id % 4 {
                            0 | 1 => open[me][0] += 1,
                            3 => open[me][1] += 1,
                            _ => {}
                        }
                    }
                    Err(error) => {
                        assert_eq!(error, PostError::Full);
                        break;
                    }
                }
            }
            end.poll();
            for (_, got) in end.arrivals.drain(..) {
                let ended = |open: &mut u32| *open = open.checked_sub(1).expect("each ends once");
                match got {
                    Got::Done => ended(&mut open[me][0]),
                    Got::ReadDone(_) => ended(&mut open[me][1]),
                    Got::Immediate(..) => immediates[me] += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

pub fn completions_of_an_earlier_link_never_come_on_a_later_one<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 10);
    let grant = granted(&mut b, 8);
    let source = tensor(&a.pool, &[1; 8]);
    a.port.write(a.link, &source, 8, &grant, Some(immediate(1))).expect("posted");
    a.port.send(a.link, b"old").expect("posted");
    let old = (a.link, b.link);
    a.port.detach(a.link);
    b.port.detach(b.link);
    let mut again = options(16);
    again.generation += 1;
    let links = connect(&a.fabric, &b.fabric, &again);
    a.link = a.port.attach(links.0).expect("room");
    b.link = b.port.attach(links.1).expect("room");
    assert!(a.link != old.0 && b.link != old.1, "an id is never used again");
    receives(&mut b, 10);
    a.port.send(a.link, b"new").expect("posted");
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"new");
    b.assert_quiet(&mut a);
    a.assert_quiet(&mut b);
    // The old link and its grants are gone.
    assert_eq!(a.port.send(old.0, b"x"), Err(PostError::Down));
    assert!(b.port.revoke(old.1, &grant).is_none());
}

/// Posts a write, a read and, if the fabric lends, a loan, which cannot complete before the peer
/// polls. Returns their number.
fn post_one_of_each<F: Fabric>(a: &mut End<F>, b: &mut End<F>) -> usize {
    receives(b, 10);
    let (grant, readable) = (granted(b, 8), exposed(b, &[1; 8]));
    let source = tensor(&a.pool, &[1; 8]);
    a.port.write(a.link, &source, 8, &grant, None).expect("posted");
    let target = tensor_mut(&a.pool, 8);
    a.port.read(a.link, target, &readable).expect("posted");
    if !a.port.limits(a.link).lends {
        return 2;
    }
    a.port
        .lend(a.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(3))
        .expect("posted");
    3
}

pub fn a_failed_link_fails_everything_outstanding_and_refuses_everything_later<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let posted = post_one_of_each(&mut a, &mut b);
    let mine = granted(&mut a, 16);
    a.port.fail(a.link, LinkFailure::Local("enough".into()));
    let junk = Grant { region: 0, key: 0, offset: 0, len: 0 };
    let source = tensor(&a.pool, &[]);
    for _ in 0..2 {
        // Before the poll that reports the failure, and after it.
        assert_eq!(a.port.send(a.link, b"x"), Err(PostError::Down));
        assert_eq!(a.port.write_inline(a.link, &[], &junk, None), Err(PostError::Down));
        let write = a.port.write(a.link, &source, 0, &junk, None);
        assert_eq!(write, Err(PostError::Down));
        let target = tensor_mut(&a.pool, 8);
        assert_eq!(a.port.read(a.link, target, &junk).expect_err("down").0, PostError::Down);
        assert_eq!(a.port.expose(a.link, &source), Err(PostError::Down));
        let target = tensor_mut(&a.pool, 8);
        assert_eq!(a.port.grant(a.link, target).expect_err("down").0, PostError::Down);
        a.poll();
    }
    let (failed, done, why) = a.until_down();
    assert_eq!((failed, done), (posted, 0));
    assert_eq!(why, LinkFailure::Local("enough".into()));
    a.assert_quiet(&mut b);
    assert_eq!(revoked(&mut a, &mine).bytes().len(), 16, "what was granted can still be had back");
}

pub fn the_peer_of_a_failed_link_goes_down_too<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let posted = post_one_of_each(&mut a, &mut b);
    b.port.fail(b.link, LinkFailure::Local("enough".into()));
    let (failed, done, why) = a.until_down();
    assert!(done == 0 || H::COMPLETES_ALONE, "done without the peer: {done:?}");
    assert_eq!(failed + done, posted, "each ends once");
    assert_eq!(why, LinkFailure::Closed);
    assert_eq!(a.port.send(a.link, b"x"), Err(PostError::Down));
    a.assert_quiet(&mut b);
}

pub fn a_detached_link_releases_everything_and_the_peer_goes_down<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    post_one_of_each(&mut a, &mut b);
    let _ = (granted(&mut a, 64), granted(&mut b, 64));
    a.port.detach(a.link);
    expect!(b.next(&mut a), Got::Down(LinkFailure::Closed) => ());
    assert!(a.arrivals.is_empty());
    b.port.detach(b.link);
    let start = Instant::now();
    while !(a.pool.is_empty() && b.pool.is_empty()) {
        assert!(start.elapsed() < TIMEOUT, "memory is still held: {:?} {:?}", a.pool.stats(), b.pool.stats());
        a.poll();
        b.poll();
    }
}

pub fn what_was_sent_before_a_link_was_closed_still_arrives<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 10);
    let grant = granted(&mut b, 8);
    a.port.write_inline(a.link, &[7; 8], &grant, Some(immediate(1))).expect("posted");
    a.port.send(a.link, b"last").expect("posted");
    a.port.detach(a.link);
    expect!(b.next_alone(), Got::Immediate(_, 8) => ());
    assert_eq!(expect!(b.next_alone(), Got::Message(m) => m), b"last");
    expect!(b.next_alone(), Got::Down(LinkFailure::Closed) => ());
    assert_eq!(revoked(&mut b, &grant).bytes(), [7; 8]);
}

pub fn what_was_posted_is_flushed_once_the_peer_s_host_has_it<H: Harness>() {
    const MESSAGES: u8 = 8;
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, u32::from(MESSAGES));
    for n in 0..MESSAGES {
        a.port.send(a.link, &[n]).expect("room");
    }
    let start = Instant::now();
    while !a.port.is_flushed(a.link) {
        assert!(start.elapsed() < TIMEOUT);
        a.poll();
        b.poll();
    }
    // The end of a link overtakes nothing then.
    a.port.detach(a.link);
    assert!(a.port.is_flushed(a.link), "there is no such link any more");
    for n in 0..MESSAGES {
        expect!(b.next(&mut a), Got::Message(bytes) => assert_eq!(bytes, [n]));
    }
}

pub fn lent_bytes_are_read_where_they_lie_and_come_back_from_any_thread<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    if !a.port.limits(a.link).lends {
        println!("skipped: this fabric does not lend");
        return;
    }
    receives(&mut b, 100);
    for round in 0..50 {
        let bytes = pattern(5000, round);
        let source = tensor(&a.pool, &bytes);
        a.port
            .lend(a.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(7))
            .expect("posted");
        let (told, lent) = expect!(b.next(&mut a), Got::Lent(told, lent) => (told, lent));
        assert_eq!(told, 7_u32.to_le_bytes());
        let lent = bytes_of(&b, lent);
        assert_eq!(lent.bytes(), bytes);
        if round == 0 {
            a.assert_quiet(&mut b);
            assert!(!source.is_unique(), "held while it is lent");
        }
        std::thread::spawn(move || drop(lent)).join().expect("no panic");
        expect!(a.next(&mut b), Got::Done => ());
        assert!(source.is_unique(), "free after it came back");
    }
}

pub fn lent_bytes_outlive_the_link<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    if !a.port.limits(a.link).lends {
        println!("skipped: this fabric does not lend");
        return;
    }
    receives(&mut b, 2);
    let bytes = pattern(5000, 3);
    let source = tensor(&a.pool, &bytes);
    a.port
        .lend(a.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(1))
        .expect("posted");
    let lent = expect!(b.next(&mut a), Got::Lent(_, lent) => bytes_of(&b, lent));
    a.port.fail(a.link, LinkFailure::Local("enough".into()));
    expect!(a.next(&mut b), Got::Failed => ());
    expect!(a.next(&mut b), Got::Down(_) => ());
    a.port.detach(a.link);
    b.port.detach(b.link);
    a.assert_quiet(&mut b);
    // The loan has failed for the lender's caller; the borrower still reads it.
    assert!(!source.is_unique());
    assert_eq!(lent.bytes(), bytes);
    drop(lent);
    let start = Instant::now();
    while !source.is_unique() {
        assert!(start.elapsed() < TIMEOUT, "the loan never came back");
        a.poll();
    }
}

pub fn credits_are_cumulative_and_consume_nothing<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    assert_eq!(a.port.peer_credits(a.link), 0);
    let start = Instant::now();
    for returned in [1, 5, 5, u32::MAX, 2] {
        b.port.publish_credits(b.link, returned);
        while a.port.peer_credits(a.link) != returned {
            assert!(start.elapsed() < TIMEOUT);
            a.poll();
            b.poll();
        }
    }
    a.assert_quiet(&mut b);
    b.assert_quiet(&mut a);
}

pub fn operands_that_make_no_sense_are_refused_and_cost_nothing<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 1);
    let grant = granted(&mut b, 16);
    let source = tensor(&a.pool, &[1; 16]);
    let refused = |result: Result<(), PostError>| {
        assert!(matches!(result, Err(PostError::Refused(_))), "{result:?}");
    };
    let longest = a.port.limits(a.link).max_message;
    refused(a.port.send(a.link, &vec![0; longest + 1]));
    refused(a.port.write(a.link, &source, 17, &Grant { len: 32, ..grant }, None));
    refused(a.port.write(a.link, &source, u64::MAX, &Grant { len: u64::MAX, ..grant }, None));
    let part = grant.part(0, 8).expect("inside");
    refused(a.port.write(a.link, &source, 9, &part, None));
    refused(a.port.write_inline(a.link, &[0; 9], &part, None));
    let most = a.port.limits(a.link).max_inline;
    let wide = Grant { len: 1 << 20, ..grant };
    refused(a.port.write_inline(a.link, &vec![0; most + 1], &wide, None));
    let (error, target) = a.port.read(a.link, tensor_mut(&a.pool, 15), &grant).expect_err("too short");
    assert!(matches!(error, PostError::Refused(_)));
    assert_eq!(target.bytes().len(), 15);
    a.port.send(a.link, b"still up").expect("posted");
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"still up");
    a.assert_quiet(&mut b);
}

pub fn a_revoked_tensor_comes_back_with_what_was_written<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 100);
    let first = granted(&mut b, 8);
    let second = granted(&mut b, 8);
    assert!(first.key != second.key || first.offset != second.offset);
    a.port.write_inline(a.link, &[1; 8], &first, Some(immediate(1))).expect("posted");
    a.port.write_inline(a.link, &[2; 8], &second, Some(immediate(2))).expect("posted");
    expect!(b.next(&mut a), Got::Immediate(..) => ());
    expect!(b.next(&mut a), Got::Immediate(..) => ());
    assert_eq!(revoked(&mut b, &second).bytes(), [2; 8]);
    assert_eq!(revoked(&mut b, &first).bytes(), [1; 8]);
    assert!(b.port.revoke(b.link, &first).is_none());
    let source = tensor(&b.pool, &[3; 8]);
    let exposed = b.port.expose(b.link, &source).expect("room");
    b.port.withdraw(b.link, &exposed);
    assert!(source.is_unique(), "withdrawn, and let go");
}
