//! The rules of batches: operations between `begin_batch` and `end_batch`.

use crate::expect;
use crate::harness::{
    End, Got, Harness, TIMEOUT, bytes_of, exposed, fail_a_write_and_a_read, granted, immediate, loan_message,
    pair, pattern, receives, revoked, tensor, tensor_mut,
};
use std::time::Instant;
use tensorwire::internals::fabric::{Fabric, LinkFailure, LoanPermit, Port, PostError};

/// The numbers of the next `count` messages and immediates here.
fn numbers<F: Fabric>(end: &mut End<F>, other: &mut End<F>, count: usize) -> Vec<u32> {
    let number = |got| match got {
        Got::Message(bytes) => u32::from_le_bytes(bytes.try_into().expect("four bytes")),
        Got::Immediate(immediate, _) => immediate.slot.index(),
        other => panic!("{other:?}"),
    };
    (0..count).map(|_| number(end.next(other))).collect()
}

pub fn order_holds_in_a_batch_and_across_its_ends<H: Harness>() {
    /// Operations of each round. The queue has room for two rounds, because an inline write
    /// completes with the request behind it.
    const EACH: u32 = 15;
    let (mut a, mut b) = pair::<H>(32);
    let grant = granted(&mut b, 8);
    let source = tensor(&a.pool, &[1; 8]);
    for round in 0..5u32 {
        receives(&mut b, EACH);
        for at in 0..EACH {
            match at {
                5 => a.port.begin_batch(),
                10 => a.port.end_batch(),
                _ => {}
            }
            let number: u32 = round * EACH + at;
            match at % 3 {
                0 => a.port.send(a.link, &number.to_le_bytes()),
                1 => a.port.write_inline(a.link, &[2; 5], &grant, Some(immediate(number))),
                _ => a.port.write(a.link, &source, 8, &grant, Some(immediate(number))),
            }
            .expect("posted");
        }
        let came = numbers(&mut b, &mut a, EACH as usize);
        assert_eq!(came, (round * EACH..(round + 1) * EACH).collect::<Vec<_>>());
        // The local completions free room in the queue.
        for _ in 0..EACH / 3 {
            expect!(a.next(&mut b), Got::Done => ());
        }
    }
}

pub fn all_of_a_batch_arrives_once_it_has_ended<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 2);
    let (grant, readable) = (granted(&mut b, 64), exposed(&mut b, &[4; 64]));
    let source = tensor(&a.pool, &[3; 64]);
    let into = tensor_mut(&a.pool, 64);
    a.port.begin_batch();
    // A nested batch changes nothing.
    a.port.begin_batch();
    a.port.write(a.link, &source, 64, &grant, Some(immediate(5))).expect("posted");
    a.port.read(a.link, into, &readable).expect("posted");
    a.port.send(a.link, b"end").expect("posted");
    a.port.publish_credits(a.link, 77);
    a.port.end_batch();
    // Without a batch the call does nothing.
    a.port.end_batch();
    expect!(b.next(&mut a), Got::Immediate(_, 64) => ());
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"end");
    let done: [_; 2] = std::array::from_fn(|_| a.next(&mut b));
    assert!(done.iter().any(|got| matches!(got, Got::Done)), "{done:?}");
    let read = done.iter().any(|got| matches!(got, Got::ReadDone(into) if into.bytes() == [4; 64]));
    assert!(read, "{done:?}");
    let start = Instant::now();
    while b.port.peer_credits(b.link) != 77 {
        assert!(start.elapsed() < TIMEOUT, "the credits of a batch did not come");
        a.poll();
        b.poll();
    }
    assert_eq!(revoked(&mut b, &grant).bytes(), [3; 64]);
}

pub fn a_link_that_fails_in_a_batch_ends_all_of_it<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    a.port.begin_batch();
    let source = fail_a_write_and_a_read(&mut a, &mut b);
    assert_eq!(a.port.send(a.link, b"late"), Err(PostError::Down));
    a.port.end_batch();
    assert!(source.try_into_mut().is_ok(), "a failed write still holds its source");
    assert!(a.pool.is_empty(), "a failed read still holds its target: {:?}", a.pool.stats());
    while !matches!(b.next(&mut a), Got::Down(_)) {}
    a.assert_quiet(&mut b);
}

pub fn who_is_in_a_batch_may_poll<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut a, 3);
    receives(&mut b, 3);
    let grant = granted(&mut b, 8);
    let source = tensor(&a.pool, &[1; 8]);
    a.port.write(a.link, &source, 8, &grant, None).expect("posted");
    a.port.begin_batch();
    let mut is_done = false;
    for number in 0..3u32 {
        b.port.send(b.link, &number.to_le_bytes()).expect("posted");
        let asked = loop {
            match a.next(&mut b) {
                Got::Done => assert!(!std::mem::replace(&mut is_done, true), "done twice"),
                got => break expect!(got, Got::Message(m) => m),
            }
        };
        a.port.send(a.link, &asked).expect("posted");
    }
    if !is_done {
        // An operation that was posted before the batch completes during it.
        expect!(a.next(&mut b), Got::Done => ());
    }
    a.port.end_batch();
    assert_eq!(numbers(&mut b, &mut a, 3), [0, 1, 2]);
}

pub fn a_loan_in_a_batch_is_lent_as_ever<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    if !a.port.limits(a.link).lends {
        println!("skipped: this fabric does not lend");
        return;
    }
    receives(&mut b, 4);
    let bytes = pattern(5000, 8);
    let source = tensor(&a.pool, &bytes);
    let lend = |a: &mut End<H::Fabric>| {
        let lent = a.port.lend(
            a.link,
            &mut Some(source.clone()),
            &mut Some(LoanPermit::unbounded()),
            &loan_message(7),
        );
        lent.expect("posted");
    };
    a.port.begin_batch();
    a.port.send(a.link, b"before").expect("posted");
    lend(&mut a);
    a.port.send(a.link, b"behind").expect("posted");
    a.port.end_batch();
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"before");
    let (told, lent) = expect!(b.next(&mut a), Got::Lent(told, lent) => (told, lent));
    assert_eq!(told, 7_u32.to_le_bytes());
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"behind");
    assert!(!source.is_unique(), "held while it is lent");
    let lent = bytes_of(&b, lent);
    assert_eq!(lent.bytes(), bytes);
    drop(lent);
    expect!(a.next(&mut b), Got::Done => ());
    // A loan whose batch never ends does not stay lent.
    a.port.begin_batch();
    lend(&mut a);
    a.port.fail(a.link, LinkFailure::Local("enough".into()));
    assert_eq!(a.until_down().0, 1);
    let start = Instant::now();
    while !source.is_unique() {
        assert!(start.elapsed() < TIMEOUT, "the loan never came back");
        a.poll();
        b.poll();
        b.arrivals.clear();
    }
}
