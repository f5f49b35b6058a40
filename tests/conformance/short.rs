//! The rules about messages that are taken without a poll.

use crate::expect;
use crate::harness::{End, Got, Harness, TIMEOUT, bytes_of, loan_message, pair, pattern, receives, tensor};
use std::time::Instant;
use tensorwire::internals::fabric::{Fabric, LoanPermit, MAX_MESSAGE, NextMessage, Port, ShortTake};
use tensorwire::internals::memory::LentBytes;

/// The next message as a test sees it.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Message(Vec<u8>),
    /// Message and bytes of a loan.
    Lent(Vec<u8>, Vec<u8>),
}

fn seen(next: NextMessage<'_>) -> Seen {
    match next {
        NextMessage::Short(message) => Seen::Message(message.to_bytes()[..message.len].to_vec()),
        NextMessage::Bytes(bytes) => Seen::Message(bytes.to_vec()),
        NextMessage::Lent(message, loan) => {
            Seen::Lent(message.to_bytes()[..message.len].to_vec(), loan.bytes.to_vec())
        }
    }
}

/// Takes the next message once it has come. `None` if the fabric takes none without a poll, or
/// `accept` refuses it.
fn take<F: Fabric, R>(end: &mut End<F>, mut accept: impl FnMut(NextMessage<'_>) -> Option<R>) -> Option<R> {
    let start = Instant::now();
    loop {
        match end.port.take_short(end.link, &mut accept) {
            ShortTake::Taken(taken) => return Some(taken),
            ShortTake::Other => return None,
            ShortTake::Nothing => assert!(start.elapsed() < TIMEOUT, "nothing came"),
        }
    }
}

/// Whether the fabric takes messages without a poll.
fn takes<F: Fabric>(a: &mut End<F>, b: &mut End<F>) -> bool {
    a.port.send(a.link, b"first").expect("posted");
    let is_taken = take(b, |next| Some(seen(next))).is_some();
    if !is_taken {
        println!("skipped: this fabric takes no message without a poll");
    }
    is_taken
}

pub fn messages_of_any_length_are_taken_without_a_poll_in_their_order<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 200);
    if !takes(&mut a, &mut b) {
        return;
    }
    let longest = a.port.limits(a.link).max_message;
    for len in [0, 1, 4, 5, 12, 51, 52, 53, 60, 61, 100, MAX_MESSAGE - 1, MAX_MESSAGE, longest] {
        let (bytes, behind) = (pattern(len, 1), pattern(len, 2));
        a.port.send(a.link, &bytes).expect("posted");
        a.port.send(a.link, &behind).expect("posted");
        assert_eq!(take(&mut b, |next| Some(seen(next))), Some(Seen::Message(bytes)), "{len}");
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), behind, "{len}, by a poll");
    }
    a.assert_quiet(&mut b);
}

pub fn a_message_that_is_refused_is_still_there_for_a_poll<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 10);
    if !takes(&mut a, &mut b) {
        return;
    }
    for len in [8, 100] {
        let bytes = pattern(len, 3);
        a.port.send(a.link, &bytes).expect("posted");
        for _ in 0..3 {
            let mut looks = 0;
            let refused = take(&mut b, |next| {
                looks += 1;
                assert_eq!(seen(next), Seen::Message(bytes.clone()));
                None::<()>
            });
            assert!(refused.is_none() && looks == 1);
        }
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), bytes);
    }
    a.assert_quiet(&mut b);
}

pub fn a_message_that_is_taken_consumes_a_receive<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 2);
    if !takes(&mut a, &mut b) {
        return;
    }
    a.port.send(a.link, b"second").expect("posted");
    assert!(take(&mut b, |next| Some(seen(next))).is_some());
    a.port.send(a.link, b"third").expect("posted");
    let start = Instant::now();
    loop {
        match b.port.take_short(b.link, |next: NextMessage<'_>| Some(seen(next))) {
            ShortTake::Taken(seen) => panic!("taken without a receive: {seen:?}"),
            ShortTake::Nothing => {
                assert!(start.elapsed() < TIMEOUT);
                // A device tells the sender alone that there is no receive.
                a.poll();
            }
            ShortTake::Other => break,
        }
    }
    expect!(b.next(&mut a), Got::Down(_) => ());
}

fn lend<F: Fabric>(a: &mut End<F>, bytes: &[u8], number: u32) -> tensorwire::Tensor {
    let source = tensor(&a.pool, bytes);
    a.port
        .lend(a.link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &loan_message(number))
        .expect("posted");
    source
}

pub fn a_loan_that_is_only_read_comes_back_with_its_message<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 100);
    if !a.port.limits(a.link).lends || !takes(&mut a, &mut b) {
        return;
    }
    for round in 0..20 {
        let bytes = pattern(5000, round);
        let source = lend(&mut a, &bytes, 7);
        let told = Seen::Lent(7_u32.to_le_bytes().to_vec(), bytes.clone());
        let refused = take(&mut b, |next| {
            assert_eq!(seen(next), told);
            None::<()>
        });
        assert!(refused.is_none() && !source.is_unique(), "a loan that is refused stays lent");
        match round % 2 {
            0 => assert_eq!(take(&mut b, |next| Some(seen(next))), Some(told)),
            _ => {
                let lent = expect!(b.next(&mut a), Got::Lent(_, lent) => bytes_of(&b, lent));
                assert_eq!(lent.bytes(), bytes);
            }
        }
        expect!(a.next(&mut b), Got::Done => ());
        assert!(source.is_unique(), "free after it came back");
    }
    a.assert_quiet(&mut b);
}

pub fn a_loan_that_is_kept_comes_back_when_it_is_dropped<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    receives(&mut b, 100);
    if !a.port.limits(a.link).lends || !takes(&mut a, &mut b) {
        return;
    }
    let keep = |next: NextMessage<'_>| match next {
        NextMessage::Lent(_, loan) => loan.keep(),
        _ => None,
    };
    let sources = [4, 5].map(|seed| lend(&mut a, &pattern(5000, seed), 7));
    let kept: [LentBytes; 2] = [(); 2].map(|()| take(&mut b, keep).expect("a loan"));
    a.assert_quiet(&mut b);
    for ((source, lent), seed) in sources.into_iter().zip(kept).zip([4, 5]) {
        assert!(!source.is_unique(), "held while it is lent");
        assert_eq!(lent.bytes(), pattern(5000, seed));
        std::thread::spawn(move || drop(lent)).join().expect("no panic");
        expect!(a.next(&mut b), Got::Done => ());
        assert!(source.is_unique(), "free after it came back");
    }
}
