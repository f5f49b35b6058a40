//! Several short messages in one control slot.
//!
//! A pack is type u8, then for each of its messages, two at least, length u8 and the message. It
//! holds neither another pack nor a fragment. Its messages are handled in their order, as if each
//! had come in a slot of its own.

use super::{EdgeCredits, FRAGMENT, PACKED};

/// Bytes before the first message, and before each.
const HEADER: usize = 1;
const LENGTH: usize = 1;

/// Whether a received message is a pack.
pub fn is_packed(bytes: &[u8]) -> bool {
    bytes.first() == Some(&PACKED)
}

/// A pack that is being made. The default one has no room.
#[derive(Debug, Default)]
pub struct Pack {
    /// Empty, or the pack.
    bytes: Vec<u8>,
    count: usize,
    slot: usize,
    /// The last message that is credit, and how many messages there were with it.
    credits: Option<(usize, EdgeCredits)>,
}

impl Pack {
    /// An empty one, of at most `slot` bytes, and no more than a length can say.
    pub fn new(slot: usize) -> Self {
        let slot = slot.min(u8::MAX.into());
        Pack { bytes: Vec::with_capacity(slot), count: 0, slot, credits: None }
    }

    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether a message of `len` bytes fits into an empty pack beside another one.
    pub fn could_hold(&self, len: usize) -> bool {
        HEADER + 2 * LENGTH + len < self.slot
    }

    /// Whether a message of `len` bytes fits behind the others.
    #[inline]
    pub fn has_room(&self, len: usize) -> bool {
        match self.bytes.is_empty() {
            true => self.could_hold(len),
            false => self.bytes.len() + LENGTH + len <= self.slot,
        }
    }

    /// Adds a message that [has room](Pack::has_room).
    pub fn push(&mut self, message: &[u8]) {
        debug_assert!(!message.is_empty());
        self.push_encoded(message.len(), |bytes| bytes.extend_from_slice(message));
    }

    /// As [`Pack::push`], for the message of `len` bytes that `encode` appends.
    #[inline]
    pub fn push_encoded(&mut self, len: usize, encode: impl FnOnce(&mut Vec<u8>)) {
        debug_assert!(self.has_room(len));
        if self.bytes.is_empty() {
            self.bytes.push(PACKED);
        }
        self.bytes.push(len as u8);
        encode(&mut self.bytes);
        self.count += 1;
    }

    /// Notes that the last message is this one.
    pub fn note_credits(&mut self, credits: EdgeCredits) {
        self.credits = Some((self.count, credits));
    }

    /// Adds the credit of an edge to the last message, if that is the credit of the edges before.
    /// Returns whether it did.
    #[inline]
    pub fn join_credits(&mut self, next: &EdgeCredits) -> bool {
        let last = self.credits.as_mut().filter(|(count, _)| *count == self.count);
        let (Some((_, credits)), Some(edges)) = (last, self.bytes.last_mut()) else { return false };
        let joins = credits.join(next);
        *edges = credits.edges;
        joins
    }

    /// The bytes that travel. A single message travels without a pack.
    pub fn bytes(&self) -> &[u8] {
        match self.count {
            1 => &self.bytes[HEADER + LENGTH..],
            _ => &self.bytes,
        }
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.bytes.clear();
        (self.count, self.credits) = (0, None);
    }
}

/// Why bytes are no pack.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// A message ends behind the pack.
    #[error("message {at} of a pack has {announced} bytes, and {left} are left")]
    Short {
        /// The message's place in the pack, from 0.
        at: usize,
        /// Bytes that it says it has.
        announced: usize,
        /// Bytes that there are.
        left: usize,
    },
    /// A message that may not be in a pack.
    #[error("message {at} of a pack is of type {kind}, which is never packed")]
    Kind {
        /// The message's place in the pack, from 0.
        at: usize,
        /// Its type; 0 if it is empty.
        kind: u8,
    },
    /// A pack has at least two messages.
    #[error("a pack of {count} messages came: two are the least")]
    Few {
        /// Messages in the pack: 0 or 1.
        count: usize,
    },
}

/// The messages of a pack, first to last.
#[derive(Clone, Debug)]
pub struct Unpacked<'a> {
    rest: &'a [u8],
}

/// Takes a pack apart, once every length in it was checked.
///
/// # Errors
/// If it is not exactly two messages or more, none of which is a pack or a fragment.
pub fn unpack(bytes: &[u8]) -> Result<Unpacked<'_>, PackError> {
    let mut rest = bytes.get(HEADER..).unwrap_or_default();
    let mut count = 0;
    while let Some((len, behind)) = rest.split_first() {
        let (announced, left) = (usize::from(*len), behind.len());
        let Some((message, next)) = behind.split_at_checked(announced) else {
            return Err(PackError::Short { at: count, announced, left });
        };
        let kind = message.first().copied().unwrap_or(0);
        if [0, PACKED, FRAGMENT].contains(&kind) {
            return Err(PackError::Kind { at: count, kind });
        }
        rest = next;
        count += 1;
    }
    if count < 2 {
        return Err(PackError::Few { count });
    }
    Ok(Unpacked { rest: &bytes[HEADER..] })
}

impl<'a> Unpacked<'a> {
    /// The messages of the end of a pack that [`unpack`] has checked.
    pub fn of_rest(rest: &'a [u8]) -> Self {
        Unpacked { rest }
    }

    /// The bytes of the messages that are left, with their lengths.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Unpacked<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (len, behind) = self.rest.split_first()?;
        let (message, rest) = behind.split_at_checked(usize::from(*len))?;
        self.rest = rest;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DECLINE, Message, PING, PONG};
    use super::*;
    use crate::wire::EdgeId;

    const SLOT: usize = 224;

    fn message(kind: u8, len: usize) -> Vec<u8> {
        let mut message = vec![0xA5; len];
        message[0] = kind;
        message
    }

    #[test]
    fn messages_come_out_as_they_went_in() {
        let messages = [message(PING, 11), message(DECLINE, 5), message(PONG, 190)];
        let mut pack = Pack::new(SLOT);
        for message in &messages {
            assert!(pack.has_room(message.len()));
            pack.push(message);
        }
        assert!(is_packed(pack.bytes()) && pack.len() == 3);
        assert!(unpack(pack.bytes()).expect("a pack").eq(messages.iter().map(|message| &message[..])));
        pack.clear();
        assert!(pack.is_empty());
    }

    #[test]
    fn credit_joins_the_last_message_if_that_is_credit_of_the_edge_before() {
        let credit = |number| EdgeCredits {
            first: EdgeId { number, generation: 1 },
            limit: 4,
            came: 2,
            held: 0,
            edges: 1,
        };
        let mut pack = Pack::new(SLOT);
        let push = |pack: &mut Pack, number| {
            let mut bytes = Vec::new();
            Message::Credit(credit(number)).encode(&mut bytes);
            pack.push(&bytes);
            pack.note_credits(credit(number));
        };
        assert!(!pack.join_credits(&credit(0)), "there is no message yet");
        push(&mut pack, 0);
        assert!(pack.join_credits(&credit(1)) && pack.join_credits(&credit(2)));
        assert!(!pack.join_credits(&credit(2)), "the edge has its credit");
        pack.push(&message(PING, 11));
        assert!(!pack.join_credits(&credit(3)), "it would overtake the message before");
        push(&mut pack, 3);
        let unpacked: Vec<&[u8]> = unpack(pack.bytes()).expect("a pack").collect();
        let edges = EdgeCredits { edges: 3, ..credit(0) };
        assert_eq!(Message::decode(unpacked[0]), Ok(Message::Credit(edges)));
        assert_eq!(Message::decode(unpacked[2]), Ok(Message::Credit(credit(3))));
        pack.clear();
        pack.push(&message(PING, 11));
        pack.push(&message(PING, 11));
        pack.push(&message(PING, 11));
        assert!(!pack.join_credits(&credit(4)), "the credit has left");
    }

    #[test]
    fn a_message_alone_travels_as_it_is() {
        let mut pack = Pack::new(SLOT);
        let alone = message(DECLINE, 5);
        pack.push(&alone);
        assert_eq!(pack.bytes(), alone);
    }

    #[test]
    fn a_pack_is_never_longer_than_a_slot_and_is_filled_to_its_last_byte() {
        let mut pack = Pack::new(SLOT);
        pack.push(&message(PING, 11));
        let rest = SLOT - pack.bytes.len() - 1;
        assert!(pack.has_room(rest) && !pack.has_room(rest + 1));
        pack.push(&message(PONG, rest));
        assert_eq!(pack.bytes().len(), SLOT);
        assert!(!pack.has_room(1));
        let longest = SLOT - 4;
        assert!(
            pack.could_hold(longest) && !pack.could_hold(longest + 1),
            "one byte more has room behind it"
        );
    }

    #[test]
    fn what_is_no_pack_is_refused_with_the_reason() {
        let packed = |messages: &[&[u8]]| {
            let mut bytes = vec![PACKED];
            for message in messages {
                bytes.push(message.len() as u8);
                bytes.extend_from_slice(message);
            }
            bytes
        };
        let two = packed(&[&[PING], &[PONG, 1]]);
        assert!(unpack(&two).is_ok());
        let refused = |bytes: &[u8]| unpack(bytes).expect_err("refused");
        assert_eq!(refused(&two[..two.len() - 1]), PackError::Short { at: 1, announced: 2, left: 1 });
        assert_eq!(refused(&packed(&[&[PING], &[]])), PackError::Kind { at: 1, kind: 0 });
        assert_eq!(refused(&packed(&[&two, &[PING]])), PackError::Kind { at: 0, kind: PACKED }, "nested");
        assert_eq!(refused(&packed(&[&[PING], &[FRAGMENT, 1]])), PackError::Kind { at: 1, kind: FRAGMENT });
        assert_eq!(refused(&packed(&[&[PING]])), PackError::Few { count: 1 });
        assert_eq!(refused(&[PACKED]), PackError::Few { count: 0 });
        assert_eq!(refused(&[]), PackError::Few { count: 0 });
    }
}
