//! Orders: the operations of the fabric as the words of a ring, and the check of words that a
//! peer wrote.
//!
//! | word | content |
//! |---|---|
//! | 0 | operation, flags, length of the payload, immediate; of a send the first 4 bytes |
//! | 1, 2 | key, regions and offset of the target |
//! | 3..7 | source; place and number of a loan or read |
//!
//! The payload of a send goes on at word 1, that of an inline write begins at word 3. The message
//! of a loan goes on at words 1, 2 and 7, and word 5 has the region too. Without a long payload an
//! order fits in its slot.

use super::slot::{IN_SLOT, MAX_WORDS};
use crate::fabric::MAX_LOAN_MESSAGE;
use crate::fabric::shm::violation::ShmViolation;
use crate::wire::{Grant, Immediate, SHORT_MESSAGE, ShortMessage, UnreadMessage};
use std::fmt;

const SEND: u8 = 1;
const WRITE_INLINE: u8 = 2;
const WRITE: u8 = 3;
const LEND: u8 = 4;
const READ: u8 = 5;
const ANSWER: u8 = 6;

const HAS_IMMEDIATE: u8 = 1;

/// Words of the longest order, without payload.
pub(crate) const ORDER_WORDS: usize = 8;
/// Words of an inline write, without payload.
const WRITE_INLINE_WORDS: usize = 3;
/// Bytes of the longest payload.
pub(crate) const PAYLOAD_BYTES: usize = (MAX_WORDS - WRITE_INLINE_WORDS) * 8;

/// The fields of word 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OrderHead {
    op: u8,
    flags: u8,
    /// Bytes of payload.
    len: u16,
    immediate: u32,
}

/// The place of bytes in the pool of the process that names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrderSource {
    pub region: u16,
    pub offset: u64,
    pub len: u64,
}

/// An order of a ring. Payload lengths are in range and immediates have known kinds. Regions,
/// keys and bounds are not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Delivers a message: its first four bytes, and the payload behind.
    Send { len: usize, first: u32 },
    /// Writes the payload to a grant.
    WriteInline { len: usize, target: OrderTarget, immediate: Option<Immediate> },
    /// Copies bytes of the sender's pool to a grant.
    Write { source: OrderSource, target: OrderTarget, immediate: Option<Immediate> },
    /// Lends bytes of the sender's pool, with a message.
    Lend { loan: OrderLoan, message: ShortMessage },
    /// Asks for the place of a grant's bytes.
    Read { exposed: OrderTarget, len: u64, ticket: ReadTicket },
    /// Answers a read with the place of the bytes.
    Answer { source: OrderSource, ticket: ReadTicket },
}

/// A loan: the bytes, its place in the borrower's table, below 2^48, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrderLoan {
    pub source: OrderSource,
    pub index: u64,
    pub number: u64,
}

/// A part of a grant. The operation has the length.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrderTarget {
    pub region: u16,
    pub key: u32,
    pub offset: u64,
}

impl fmt::Debug for OrderTarget {
    /// Without the key, as that of a [`Grant`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OrderTarget { region, key: _, offset } = self;
        let mut text = f.debug_struct("OrderTarget");
        text.field("region", region).field("offset", offset).finish_non_exhaustive()
    }
}

impl From<&Grant> for OrderTarget {
    fn from(grant: &Grant) -> Self {
        OrderTarget { region: grant.region, key: grant.key, offset: grant.offset }
    }
}

/// Identifies a read, for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadTicket {
    pub index: u32,
    pub number: u32,
}

impl OrderHead {
    #[inline]
    fn new(op: u8, len: usize, immediate: Option<Immediate>) -> Self {
        OrderHead {
            op,
            flags: if immediate.is_some() { HAS_IMMEDIATE } else { 0 },
            len: len as u16,
            immediate: immediate.map_or(0, Immediate::to_bits),
        }
    }

    #[inline]
    fn to_word(self) -> u64 {
        u64::from(self.op)
            | u64::from(self.flags) << 8
            | u64::from(self.len) << 16
            | u64::from(self.immediate) << 32
    }

    #[inline]
    fn from_word(word: u64) -> Self {
        OrderHead {
            op: word as u8,
            flags: (word >> 8) as u8,
            len: (word >> 16) as u16,
            immediate: (word >> 32) as u32,
        }
    }

    #[inline]
    fn payload(&self) -> Result<usize, ShmViolation> {
        let len = usize::from(self.len);
        if len > PAYLOAD_BYTES {
            return Err(ShmViolation::Payload(len));
        }
        Ok(len)
    }

    #[inline]
    fn immediate(&self) -> Result<Option<Immediate>, ShmViolation> {
        match self.flags {
            0 => Ok(None),
            HAS_IMMEDIATE => Ok(Some(Immediate::from_bits(self.immediate)?)),
            flags => Err(ShmViolation::Flags(flags)),
        }
    }
}

/// Bytes of a message in word 0 of its order.
pub(crate) const FIRST_BYTES: usize = 4;

/// Word 0 of a send.
#[inline]
pub(crate) fn send_word(len: usize, first: u32) -> u64 {
    OrderHead { op: SEND, flags: 0, len: len as u16, immediate: first }.to_word()
}

/// Whether the last word of a loan's message lies behind the slot.
#[inline]
pub(crate) fn is_long(len: usize) -> bool {
    len > FIRST_BYTES + 16
}

/// The loan of an order.
#[inline]
fn loan_of_words(word: impl Fn(usize) -> u64) -> OrderLoan {
    let place = word(5);
    let source = OrderSource { region: (place >> 48) as u16, offset: word(3), len: word(4) };
    OrderLoan { source, index: place << 16 >> 16, number: word(6) }
}

/// The words of a loan. The last is behind the slot.
#[inline]
pub(crate) fn lend_words(loan: OrderLoan, message: &ShortMessage) -> [u64; ORDER_WORDS] {
    let OrderLoan { source, index, number } = loan;
    let ShortMessage { len, first, words: [a, b, c, ..] } = *message;
    let head = OrderHead { op: LEND, flags: 0, len: len as u16, immediate: first };
    [head.to_word(), a, b, source.offset, source.len, source.keys() | index, number, c]
}

/// The message of a send with this word 0, if it is no longer than a [`ShortMessage`]. `word`
/// returns the words of the order.
#[inline]
pub(crate) fn short_message<W: Fn(usize) -> u64>(
    word_0: u64,
    word: W,
) -> Option<UnreadMessage<impl Fn(usize) -> u64>> {
    let head = OrderHead::from_word(word_0);
    let (len, first) = (usize::from(head.len), head.immediate);
    let message = UnreadMessage { len, first, word: move |k| word(1 + k) };
    (head.op == SEND && len <= SHORT_MESSAGE).then_some(message)
}

/// An order with a message that is no short one alone. It lies in its slot, but for the end of a
/// long message.
pub(crate) enum ShortOrder {
    /// The first bytes of a message alone, which is longer than a [`ShortMessage`].
    Send(ShortMessage),
    /// The message of a loan.
    Lend(OrderLoan, ShortMessage),
}

impl ShortOrder {
    /// The order of these words. `None` if it is another one, or its lengths are not allowed.
    #[inline]
    pub(crate) fn from_words(words: [u64; IN_SLOT]) -> Option<Self> {
        let head = OrderHead::from_word(words[0]);
        let (len, first) = (usize::from(head.len), head.immediate);
        let [_, a, b, c, d, e, f] = words;
        match head.op {
            SEND if (SHORT_MESSAGE + 1..=PAYLOAD_BYTES).contains(&len) => {
                Some(ShortOrder::Send(ShortMessage { len, first, words: [a, b, c, d, e, f] }))
            }
            LEND if !is_long(len) => {
                let message = ShortMessage { len, first, words: [a, b, 0, 0, 0, 0] };
                Some(ShortOrder::Lend(loan_of_words(|k| words[k]), message))
            }
            _ => None,
        }
    }
}

impl OrderTarget {
    /// Word 1 of an order that has a target. The upper 16 bits are for the source's region.
    #[inline]
    fn keys(self) -> u64 {
        u64::from(self.key) | u64::from(self.region) << 32
    }
}

impl OrderSource {
    /// The part of a word that names the region.
    #[inline]
    fn keys(self) -> u64 {
        u64::from(self.region) << 48
    }
}

impl Order {
    /// Words that [`Order::to_words`] uses. The payload of the order, if it has one, comes behind.
    #[inline]
    pub(crate) fn word_count(&self) -> usize {
        match self {
            Order::Send { .. } => 1,
            Order::WriteInline { .. } => WRITE_INLINE_WORDS,
            Order::Write { .. } => 5,
            Order::Lend { message, .. } => IN_SLOT + usize::from(is_long(message.len)),
            Order::Read { .. } | Order::Answer { .. } => IN_SLOT,
        }
    }

    /// Encodes the order, without its payload.
    #[inline]
    pub(crate) fn to_words(self) -> [u64; ORDER_WORDS] {
        let head = |op, len, immediate| OrderHead::new(op, len, immediate).to_word();
        match self {
            Order::Send { len, first } => [send_word(len, first), 0, 0, 0, 0, 0, 0, 0],
            Order::WriteInline { len, target, immediate } => {
                [head(WRITE_INLINE, len, immediate), target.keys(), target.offset, 0, 0, 0, 0, 0]
            }
            Order::Write { source, target, immediate } => {
                let keys = target.keys() | source.keys();
                [head(WRITE, 0, immediate), keys, target.offset, source.offset, source.len, 0, 0, 0]
            }
            Order::Lend { loan, message } => lend_words(loan, &message),
            Order::Read { exposed, len, ticket: ReadTicket { index, number } } => {
                let (keys, offset) = (exposed.keys(), exposed.offset);
                [head(READ, 0, None), keys, offset, 0, len, u64::from(index), u64::from(number), 0]
            }
            Order::Answer { source, ticket: ReadTicket { index, number } } => {
                let (keys, offset) = (source.keys(), source.offset);
                [head(ANSWER, 0, None), keys, 0, offset, source.len, u64::from(index), u64::from(number), 0]
            }
        }
    }

    /// Decodes and checks an order of a peer. `word` returns a word of the order, which can
    /// change at any time: no word is asked for twice.
    ///
    /// # Errors
    /// The violation.
    #[inline]
    pub(crate) fn from_words(word: impl Fn(usize) -> u64) -> Result<Order, ShmViolation> {
        let head = OrderHead::from_word(word(0));
        let target =
            |keys: u64| OrderTarget { region: (keys >> 32) as u16, key: keys as u32, offset: word(2) };
        let source = |keys: u64| OrderSource { region: (keys >> 48) as u16, offset: word(3), len: word(4) };
        let ticket = || ReadTicket { index: word(5) as u32, number: word(6) as u32 };
        match head.op {
            SEND => Ok(Order::Send { len: head.payload()?, first: head.immediate }),
            WRITE_INLINE => {
                let len = head.payload()?;
                Ok(Order::WriteInline { len, target: target(word(1)), immediate: head.immediate()? })
            }
            WRITE => {
                let keys = word(1);
                Ok(Order::Write { source: source(keys), target: target(keys), immediate: head.immediate()? })
            }
            LEND => {
                let (len, first) = (usize::from(head.len), head.immediate);
                if len > MAX_LOAN_MESSAGE {
                    return Err(ShmViolation::LoanMessage(len));
                }
                let last = if is_long(len) { word(IN_SLOT) } else { 0 };
                let message = ShortMessage { len, first, words: [word(1), word(2), last, 0, 0, 0] };
                Ok(Order::Lend { loan: loan_of_words(&word), message })
            }
            READ => Ok(Order::Read { exposed: target(word(1)), len: word(4), ticket: ticket() }),
            ANSWER => Ok(Order::Answer { source: source(word(1)), ticket: ticket() }),
            op => Err(ShmViolation::Operation(op)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Slot;
    use proptest::prelude::*;
    use std::cell::Cell;

    /// Decodes words, each of which may be read once.
    fn read_once(words: [u64; ORDER_WORDS]) -> Result<Order, ShmViolation> {
        let words = words.map(|word| Cell::new(Some(word)));
        Order::from_words(|k| words[k].take().expect("no word is read twice"))
    }

    proptest! {
        #[test]
        fn any_words_are_refused_or_come_back(mut words: [u64; ORDER_WORDS], op in 0u8..9) {
            // Most random operations, flags and lengths are refused, so bring them near the allowed
            // ones.
            words[0] = words[0] & !0xFE_FEFF | u64::from(op);
            if let Ok(order) = read_once(words) {
                let again = order.to_words();
                prop_assert_eq!(read_once(again), Ok(order));
                prop_assert!(again[order.word_count()..].iter().all(|&word| word == 0));
            }
        }
    }

    #[test]
    fn every_order_comes_back() {
        let target = OrderTarget { region: 3, key: 0xDEAD_BEEF, offset: u64::MAX - 5 };
        let source = OrderSource { region: 9, offset: 1 << 40, len: u64::MAX };
        let ticket = ReadTicket { index: 17, number: u32::MAX };
        let immediate = Immediate { generation: 200, slot: Slot::new(77).expect("fits") };
        let loan = OrderLoan { source, index: (1 << 48) - 1, number: 1 << 50 };
        let lend = |len| Order::Lend {
            loan,
            message: ShortMessage::from_bytes(&[0xA5; MAX_LOAN_MESSAGE][..len]).expect("it fits"),
        };
        for order in [
            Order::Send { len: PAYLOAD_BYTES, first: 7 },
            Order::WriteInline { len: 8, target, immediate: Some(immediate) },
            Order::Write { source, target, immediate: None },
            lend(0),
            lend(3),
            lend(20),
            lend(21),
            lend(MAX_LOAN_MESSAGE),
            Order::Read { exposed: target, len: 12, ticket },
            Order::Answer { source, ticket },
        ] {
            assert_eq!(read_once(order.to_words()), Ok(order));
        }
    }

    #[test]
    fn malformed_words_are_refused_by_name() {
        let refused = |head: OrderHead| {
            let words = [head.to_word(), 0, 0, 0, 0, 0, 0, 0];
            read_once(words).expect_err("nonsense").to_string()
        };
        let none = OrderHead::default();
        assert!(refused(OrderHead { op: 99, ..none }).contains("operation 99"));
        assert!(refused(OrderHead { op: SEND, len: 225, ..none }).contains("225 bytes"));
        assert!(refused(OrderHead { op: WRITE, flags: 0x80, ..none }).contains("0x80"));
        assert!(refused(OrderHead { op: LEND, len: 29, ..none }).contains("29 bytes of message"));
        let kind = OrderHead { op: WRITE, flags: HAS_IMMEDIATE, immediate: 0xF000_0000, ..none };
        assert!(refused(kind).contains("highest bits that are not 0"));
    }
}
