//! Several messages in one slot: any bytes, against a reference; and messages packed and taken
//! apart.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::fabric::MAX_MESSAGE;
use tensorwire::internals::wire::message::pack::{Pack, is_packed, unpack};

const PACKED: u8 = 17;
const FRAGMENT: u8 = 12;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode % 2 {
        0 => any_bytes(&[&[PACKED], rest].concat()),
        _ => there_and_back(rest),
    }
});

/// The messages of a pack; `None` if it is none.
fn reference(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let (mut messages, mut at) = (Vec::new(), 1);
    while at < bytes.len() {
        let len = usize::from(bytes[at]);
        let message = bytes.get(at + 1..at + 1 + len)?;
        // A packed message is neither empty nor a pack.
        if [None, Some(&0), Some(&PACKED), Some(&FRAGMENT)].contains(&message.first()) {
            return None;
        }
        messages.push(message);
        at += 1 + len;
    }
    (messages.len() > 1).then_some(messages)
}

fn any_bytes(bytes: &[u8]) {
    assert!(is_packed(bytes));
    match (unpack(bytes), reference(bytes)) {
        (Ok(messages), Some(expected)) => assert!(messages.eq(expected)),
        (Err(error), None) => assert!(error.to_string().len() < 200),
        (said, expected) => panic!("{said:?} where {expected:?} was right"),
    }
}

/// The input as lengths, each with a message of that many bytes at most.
fn there_and_back(mut rest: &[u8]) {
    let (mut pack, mut messages) = (Pack::new(MAX_MESSAGE), Vec::new());
    while let Some((len, tail)) = rest.split_first() {
        let (message, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        if message.first().is_none_or(|kind| [0, PACKED, FRAGMENT].contains(kind)) {
            continue;
        }
        if !pack.has_room(message.len()) {
            break;
        }
        pack.push(message);
        messages.push(message);
    }
    assert!(pack.len() == messages.len() && pack.bytes().len() <= MAX_MESSAGE);
    match &messages[..] {
        [] => {}
        [alone] => assert_eq!(pack.bytes(), *alone),
        all => assert!(unpack(pack.bytes()).expect("whole").eq(all.iter().copied())),
    }
}
