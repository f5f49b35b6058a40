//! Fragments of long messages, in any order and with any header, against a reference; and messages
//! cut and put together.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::wire::message::MAX_LONG_MESSAGE;
use tensorwire::internals::wire::message::fragment::{Assembler, cut, is_fragment};

/// Bytes of a fragment's header: type, flags, total length.
const HEADER: usize = 6;
const TYPE: u8 = 12;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode % 2 {
        0 => any_order(rest),
        _ => there_and_back(usize::from(*mode).max(HEADER + 1), rest),
    }
});

/// The next fragment of the input: its length, then its bytes. A length of 255 stands for a long
/// one.
fn next<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, tail) = rest.split_first()?;
    let len = if *len == u8::MAX { 4096 } else { usize::from(*len) };
    let (fragment, tail) = tail.split_at(len.min(tail.len()));
    *rest = tail;
    Some(fragment)
}

/// The received part of a message, and its full length.
type Begun = Option<(Vec<u8>, usize)>;

/// The expected result of the assembler; `None` for an error.
fn reference(begun: &mut Begun, fragment: &[u8]) -> Option<Option<Vec<u8>>> {
    if fragment.len() <= HEADER {
        return None;
    }
    let total = u32::from_le_bytes(fragment[2..HEADER].try_into().expect("four bytes")) as usize;
    let part = &fragment[HEADER..];
    if total > MAX_LONG_MESSAGE {
        return None;
    }
    let (mut bytes, whole) = match (fragment[1], begun.take()) {
        (1, None) => (Vec::new(), total),
        (0, Some((bytes, whole))) if whole == total => (bytes, whole),
        _ => return None,
    };
    bytes.extend_from_slice(part);
    if bytes.len() > whole {
        return None;
    }
    if bytes.len() == whole {
        return Some(Some(bytes));
    }
    *begun = Some((bytes, whole));
    Some(None)
}

/// A link ends at the first error, and so does this.
fn any_order(mut rest: &[u8]) {
    let (mut assembler, mut begun) = (Assembler::default(), None);
    while let Some(fragment) = next(&mut rest) {
        let expected = reference(&mut begun, fragment);
        match (assembler.push(fragment), expected) {
            (Ok(message), Some(expected)) => {
                assert_eq!(message, expected.as_deref());
                assert!(message.is_none_or(|message| message.len() <= MAX_LONG_MESSAGE));
            }
            (Err(error), None) => return assert!(error.to_string().len() < 200),
            (said, expected) => panic!("{said:?} where {expected:?} was right"),
        }
        assert_eq!(assembler.is_idle(), begun.is_none());
    }
}

fn there_and_back(slot: usize, message: &[u8]) {
    let (mut assembler, mut came, mut refused) = (Assembler::default(), None, false);
    cut(message, slot, |fragment| {
        assert!(is_fragment(fragment) && fragment[0] == TYPE && fragment.len() <= slot);
        match assembler.push(fragment) {
            Ok(whole) => {
                assert!(came.is_none(), "nothing comes after the last fragment");
                came = whole.map(<[u8]>::to_vec);
            }
            Err(_) => refused = true,
        }
    });
    assert_eq!(refused, message.len() > MAX_LONG_MESSAGE);
    if !refused && !message.is_empty() {
        assert_eq!(came.as_deref(), Some(message));
    }
}
