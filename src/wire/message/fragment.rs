//! Messages longer than a control slot, cut and put together again.
//!
//! A fragment is type u8, flags u8 (bit 0: the first), total length u32, then bytes. Fragments of
//! one message follow each other on the control lane without another message between them.

use super::{FRAGMENT, MAX_LONG_MESSAGE};

const HEADER: usize = 6;
const FLAG_FIRST: u8 = 1;
/// Bytes of room that an assembler keeps between messages: names and windows fit, long errors are
/// rare.
const KEPT: usize = 16 * 1024;

/// Whether a received message is a fragment of a longer one.
pub fn is_fragment(bytes: &[u8]) -> bool {
    bytes.first() == Some(&FRAGMENT)
}

/// Replaces the contents of `out` by fragment `index` of a message, which is given in two parts.
/// Returns whether the fragment exists.
///
/// # Panics
/// If `slot` has no room for data, which no fabric's slot is.
pub fn part(message: [&[u8]; 2], slot: usize, index: usize, out: &mut Vec<u8>) -> bool {
    assert!(slot > HEADER, "a slot of {slot} bytes has no room for a fragment");
    let room = slot - HEADER;
    let [head, tail] = message;
    let total = head.len() + tail.len();
    let Some(start) = index.checked_mul(room).filter(|start| *start < total) else { return false };
    out.clear();
    out.extend_from_slice(&[FRAGMENT, if index == 0 { FLAG_FIRST } else { 0 }]);
    out.extend_from_slice(&(total as u32).to_le_bytes());
    let mut at = start;
    for (bytes, before) in [(head, 0), (tail, head.len())] {
        let rest = at.checked_sub(before).and_then(|from| bytes.get(from..)).unwrap_or_default();
        let taken = &rest[..rest.len().min(start + room - at)];
        out.extend_from_slice(taken);
        at += taken.len();
    }
    true
}

/// Cuts `message` into fragments of at most `slot` bytes and hands each to `send`.
///
/// # Panics
/// As [`part`].
pub fn cut(message: &[u8], slot: usize, mut send: impl FnMut(&[u8])) {
    let mut buffer = Vec::with_capacity(slot);
    for index in 0.. {
        if !part([message, &[]], slot, index, &mut buffer) {
            return;
        }
        send(&buffer);
    }
}

/// Why a fragment does not belong to a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FragmentError {
    /// It is too short to be a fragment with data.
    #[error("a fragment of {len} bytes has no data")]
    Short {
        /// Its length.
        len: usize,
    },
    /// It announces a message that is too long.
    #[error("a fragmented message of {total} bytes was announced: at most {MAX_LONG_MESSAGE} are allowed")]
    TooLong {
        /// The announced length.
        total: u32,
    },
    /// A first fragment where a later one had to come, or the other way round, or one of another
    /// message.
    #[error("a fragment came out of order")]
    Order,
}

/// Puts fragments together. Its memory grows as bytes come, not as they are announced.
#[derive(Debug, Default)]
pub struct Assembler {
    bytes: Vec<u8>,
    total: usize,
}

impl Assembler {
    /// Takes the next fragment. Returns the message if it is whole now.
    ///
    /// # Errors
    /// If the fragment does not continue what came before.
    pub fn push(&mut self, fragment: &[u8]) -> Result<Option<&[u8]>, FragmentError> {
        let short = FragmentError::Short { len: fragment.len() };
        let Some((header, part)) = fragment.split_first_chunk::<HEADER>() else {
            return Err(short);
        };
        if part.is_empty() {
            return Err(short);
        }
        let [_, flags, total @ ..] = *header;
        let total = u32::from_le_bytes(total);
        if total as usize > MAX_LONG_MESSAGE {
            return Err(FragmentError::TooLong { total });
        }
        match (flags, self.is_idle()) {
            (FLAG_FIRST, true) => {
                self.bytes.clear();
                self.total = total as usize;
            }
            (0, false) if self.total == total as usize => {}
            _ => return Err(FragmentError::Order),
        }
        if self.bytes.len() + part.len() > self.total {
            return Err(FragmentError::Order);
        }
        self.bytes.extend_from_slice(part);
        if self.bytes.len() < self.total {
            return Ok(None);
        }
        self.total = 0;
        Ok(Some(&self.bytes))
    }

    /// Frees the memory of a long message after it has been handled.
    pub fn release(&mut self) {
        if self.is_idle() && self.bytes.capacity() > KEPT {
            self.bytes = Vec::new();
        }
    }

    /// Whether no message is half there.
    pub fn is_idle(&self) -> bool {
        self.total == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assembler_grows_as_bytes_come_and_gives_back_what_a_long_message_took() {
        let mut assembler = Assembler::default();
        let announced =
            [&[FRAGMENT, FLAG_FIRST], &(MAX_LONG_MESSAGE as u32).to_le_bytes()[..], &[5]].concat();
        assert_eq!(assembler.push(&announced), Ok(None));
        assert!(assembler.bytes.capacity() < 64, "an announcement takes no room");
        let mut assembler = Assembler::default();
        for (len, kept) in [(KEPT / 4, true), (MAX_LONG_MESSAGE, false)] {
            let message = vec![5; len];
            let mut whole = false;
            cut(&message, 224, |fragment| {
                whole = assembler.push(fragment).expect("in order").is_some_and(|bytes| bytes == message);
                assembler.release();
            });
            assert!(whole && assembler.is_idle());
            assert_eq!(assembler.bytes.capacity() > 0, kept, "after {len} bytes");
        }
    }
}
