//! Orders: the operations of the fabric as a slot carries them, and the check of slots that a peer
//! wrote.

use super::ring::{HEADER_WORDS, PAYLOAD_BYTES};
use crate::fabric::shm::violation::ShmViolation;
use crate::wire::{Grant, Immediate};

const SEND: u8 = 1;
const WRITE_INLINE: u8 = 2;
const WRITE: u8 = 3;
const LEND: u8 = 4;
const READ: u8 = 5;
const ANSWER: u8 = 6;

const HAS_IMMEDIATE: u8 = 1;

/// Words of the payload that describe the source of an order.
pub(crate) const BODY_WORDS: usize = 4;

/// The fields of a slot's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotHeader {
    op: u8,
    flags: u8,
    /// Bytes of payload.
    len: u16,
    immediate: u32,
    key: u32,
    target_region: u16,
    source_region: u16,
    target_offset: u64,
}

/// The place of bytes in the pool of the process that names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrderSource {
    pub region: u16,
    pub offset: u64,
    pub len: u64,
}

/// The content of a slot. Payload lengths are in range and immediates have known kinds. Regions,
/// keys and bounds are not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Delivers the payload as a message.
    Send { len: usize },
    /// Writes the payload to a grant.
    WriteInline { len: usize, target: OrderTarget, immediate: Option<Immediate> },
    /// Copies bytes of the sender's pool to a grant.
    Write { source: OrderSource, target: OrderTarget, immediate: Option<Immediate> },
    /// Lends bytes of the sender's pool.
    Lend { source: OrderSource, index: u64, number: u64, immediate: Immediate },
    /// Asks for the place of a grant's bytes.
    Read { exposed: OrderTarget, len: u64, ticket: ReadTicket },
    /// Answers a read with the place of the bytes.
    Answer { source: OrderSource, ticket: ReadTicket },
}

/// A part of a grant. The operation has the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrderTarget {
    pub region: u16,
    pub key: u32,
    pub offset: u64,
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

/// The words of an order's header and body. A send and an inline write have no body: the caller has
/// their payload.
pub(crate) type OrderWords = ([u64; HEADER_WORDS], [u64; BODY_WORDS]);

impl SlotHeader {
    #[inline]
    fn to_words(self) -> [u64; HEADER_WORDS] {
        [
            u64::from(self.op)
                | u64::from(self.flags) << 8
                | u64::from(self.len) << 16
                | u64::from(self.immediate) << 32,
            u64::from(self.key) | u64::from(self.target_region) << 32 | u64::from(self.source_region) << 48,
            self.target_offset,
        ]
    }

    #[inline]
    fn from_words(words: [u64; HEADER_WORDS]) -> Self {
        SlotHeader {
            op: words[0] as u8,
            flags: (words[0] >> 8) as u8,
            len: (words[0] >> 16) as u16,
            immediate: (words[0] >> 32) as u32,
            key: words[1] as u32,
            target_region: (words[1] >> 32) as u16,
            source_region: (words[1] >> 48) as u16,
            target_offset: words[2],
        }
    }

    #[inline]
    fn new(op: u8, target: Option<OrderTarget>, source_region: u16, immediate: Option<Immediate>) -> Self {
        let target = target.unwrap_or(OrderTarget { region: 0, key: 0, offset: 0 });
        SlotHeader {
            op,
            flags: if immediate.is_some() { HAS_IMMEDIATE } else { 0 },
            len: 0,
            immediate: immediate.map_or(0, Immediate::to_bits),
            key: target.key,
            target_region: target.region,
            source_region,
            target_offset: target.offset,
        }
    }

    #[inline]
    fn target(&self) -> OrderTarget {
        OrderTarget { region: self.target_region, key: self.key, offset: self.target_offset }
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

impl Order {
    /// Encodes the order.
    #[inline]
    pub(crate) fn to_words(self) -> OrderWords {
        let none = [0; BODY_WORDS];
        match self {
            Order::Send { len } => {
                (SlotHeader { len: len as u16, ..SlotHeader::new(SEND, None, 0, None) }.to_words(), none)
            }
            Order::WriteInline { len, target, immediate } => {
                let header = SlotHeader::new(WRITE_INLINE, Some(target), 0, immediate);
                (SlotHeader { len: len as u16, ..header }.to_words(), none)
            }
            Order::Write { source, target, immediate } => {
                let header = SlotHeader::new(WRITE, Some(target), source.region, immediate);
                (header.to_words(), [source.offset, source.len, 0, 0])
            }
            Order::Lend { source, index, number, immediate } => {
                let header = SlotHeader::new(LEND, None, source.region, Some(immediate));
                (header.to_words(), [source.offset, source.len, index, number])
            }
            Order::Read { exposed, len, ticket } => {
                let header = SlotHeader::new(READ, Some(exposed), 0, None);
                (header.to_words(), [0, len, u64::from(ticket.index), u64::from(ticket.number)])
            }
            Order::Answer { source, ticket } => {
                let header = SlotHeader::new(ANSWER, None, source.region, None);
                (
                    header.to_words(),
                    [source.offset, source.len, u64::from(ticket.index), u64::from(ticket.number)],
                )
            }
        }
    }

    /// Decodes and checks a slot of a peer. `body` is called only if the header says that there is
    /// one.
    ///
    /// # Errors
    /// The violation.
    #[inline]
    pub(crate) fn from_words(
        header: [u64; HEADER_WORDS],
        body: impl FnOnce() -> [u64; BODY_WORDS],
    ) -> Result<Order, ShmViolation> {
        let header = SlotHeader::from_words(header);
        let target = header.target();
        let source = |body: &[u64; BODY_WORDS]| OrderSource {
            region: header.source_region,
            offset: body[0],
            len: body[1],
        };
        let ticket = |body: &[u64; BODY_WORDS]| ReadTicket { index: body[2] as u32, number: body[3] as u32 };
        match header.op {
            SEND => Ok(Order::Send { len: header.payload()? }),
            WRITE_INLINE => {
                let len = header.payload()?;
                Ok(Order::WriteInline { len, target, immediate: header.immediate()? })
            }
            WRITE => Ok(Order::Write { source: source(&body()), target, immediate: header.immediate()? }),
            LEND => {
                let immediate = header.immediate()?.ok_or(ShmViolation::LoanWithoutImmediate)?;
                let body = body();
                Ok(Order::Lend { source: source(&body), index: body[2], number: body[3], immediate })
            }
            READ => {
                let body = body();
                Ok(Order::Read { exposed: target, len: body[1], ticket: ticket(&body) })
            }
            ANSWER => {
                let body = body();
                Ok(Order::Answer { source: source(&body), ticket: ticket(&body) })
            }
            op => Err(ShmViolation::Operation(op)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{ImmediateKind, Slot};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_words_are_refused_or_come_back(mut header: [u64; HEADER_WORDS], body: [u64; 4], op in 0u8..9) {
            // Most random operations, flags and lengths are refused, so bring them near the allowed
            // ones.
            header[0] = header[0] & !0xFE_FEFF | u64::from(op);
            if let Ok(order) = Order::from_words(header, || body) {
                let (again, words) = order.to_words();
                prop_assert_eq!(Order::from_words(again, || words), Ok(order));
            }
        }
    }

    #[test]
    fn every_order_comes_back() {
        let target = OrderTarget { region: 3, key: 0xDEAD_BEEF, offset: u64::MAX - 5 };
        let source = OrderSource { region: 9, offset: 1 << 40, len: u64::MAX };
        let ticket = ReadTicket { index: 17, number: u32::MAX };
        let immediate =
            Immediate { kind: ImmediateKind::Lend, generation: 200, slot: Slot::new(77).expect("fits") };
        for order in [
            Order::Send { len: PAYLOAD_BYTES },
            Order::WriteInline { len: 8, target, immediate: Some(immediate) },
            Order::Write { source, target, immediate: None },
            Order::Lend { source, index: u64::MAX, number: 1 << 50, immediate },
            Order::Read { exposed: target, len: 12, ticket },
            Order::Answer { source, ticket },
        ] {
            let (header, body) = order.to_words();
            assert_eq!(Order::from_words(header, || body), Ok(order));
        }
    }

    #[test]
    fn malformed_words_are_refused_by_name() {
        let refused = |header: SlotHeader| {
            Order::from_words(header.to_words(), || [0; BODY_WORDS]).expect_err("nonsense").to_string()
        };
        assert!(refused(SlotHeader { op: 99, ..SlotHeader::default() }).contains("operation 99"));
        assert!(refused(SlotHeader { op: SEND, len: 225, ..SlotHeader::default() }).contains("225 bytes"));
        assert!(refused(SlotHeader { op: WRITE, flags: 0x80, ..SlotHeader::default() }).contains("0x80"));
        assert!(refused(SlotHeader { op: LEND, ..SlotHeader::default() }).contains("no immediate"));
        let kind =
            SlotHeader { op: WRITE, flags: HAS_IMMEDIATE, immediate: 0xF000_0000, ..SlotHeader::default() };
        assert!(refused(kind).contains("kind 15"));
    }
}
