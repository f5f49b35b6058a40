//! The frames of the main connection: a header, and for some kinds a payload behind it.
//!
//! Little-endian. Frames of 8 bytes: kind, flags, 2 bytes of the kind's own, 4 of its own. Frames
//! of 32 bytes add offset, length, immediate or ticket, and an acknowledgement.
//!
//! | kind | bytes | 2 to 3 | 4 to 7 | 24 to 27 | 28 to 31 | payload |
//! |---|---|---|---|---|---|---|
//! | 1 send | 8 | length | acknowledgement | | | the message |
//! | 2 credits | 8 | 0 | returned receives | | | |
//! | 3 goodbye | 8 | reason | acknowledgement | | | |
//! | 4 write | 32 | region | key | immediate or 0 | acknowledgement | the bytes, here or on the bulk connections |
//! | 5 read | 32 | region | key | ticket | acknowledgement | |
//! | 6 answer | 32 | 0 | 0 | ticket | acknowledgement | the bytes, here or on the bulk connections |
//! | 7 acknowledge | 8 | 0 | acknowledgement | | | |
//! | 8 resume | 8 | 0 | acknowledgement | | | |
//!
//! An acknowledgement is how many frames of the peer have come whole with their payloads, modulo
//! 2^32. Goodbyes, acknowledges and resumes are not counted: see `send_buffer`.

use crate::wire::{Grant, Immediate};
use std::fmt;

/// Bytes of each header but those of writes, reads and answers.
pub(super) const SHORT_HEADER: usize = 8;
/// Bytes of the headers of writes, reads and answers.
pub(super) const LONG_HEADER: usize = 32;
/// Bytes of the longest message. A copy of a tensor of 32 KiB costs less than the two messages
/// that find it a destination.
pub(super) const MAX_SEND: usize = (32 << 10) + 64;

const SEND: u8 = 1;
const CREDITS: u8 = 2;
const GOODBYE: u8 = 3;
const WRITE: u8 = 4;
const READ: u8 = 5;
const ANSWER: u8 = 6;
const ACKNOWLEDGE: u8 = 7;
const RESUME: u8 = 8;

/// Where the acknowledgement is in a short header and in a long one.
const SHORT_ACKNOWLEDGEMENT: usize = 4;
const LONG_ACKNOWLEDGEMENT: usize = 28;

/// Flag: bytes 24 to 27 are an immediate.
const HAS_IMMEDIATE: u8 = 1;
/// Flag: the payload comes on the bulk connections.
const BY_BULK: u8 = 2;

/// The connection that carries a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PayloadCarrier {
    /// The main one, right behind the header.
    Main,
    /// The bulk connections, in stripes.
    Bulk,
}

/// The memory that a frame names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameTarget {
    pub region: u16,
    pub key: u32,
    pub offset: u64,
}

impl fmt::Debug for FrameTarget {
    /// Without the key, which is for the peer alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FrameTarget { region, key: _, offset } = self;
        f.debug_struct("FrameTarget").field("region", region).field("offset", offset).finish_non_exhaustive()
    }
}

impl From<&Grant> for FrameTarget {
    fn from(grant: &Grant) -> Self {
        FrameTarget { region: grant.region, key: grant.key, offset: grant.offset }
    }
}

/// Why a side ends a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GoodbyeReason {
    Closed,
    /// Its process lacks memory, descriptors or another resource.
    Resources,
    /// The other side broke the protocol.
    Protocol,
    /// The other side overran its credits.
    NoReceive,
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Send {
        len: usize,
    },
    Credits {
        returned: u32,
    },
    Goodbye {
        reason: GoodbyeReason,
    },
    Write {
        target: FrameTarget,
        len: u64,
        immediate: Option<Immediate>,
        by: PayloadCarrier,
    },
    Read {
        source: FrameTarget,
        len: u64,
        ticket: u32,
    },
    Answer {
        ticket: u32,
        len: u64,
        by: PayloadCarrier,
    },
    /// Only an acknowledgement.
    Acknowledge,
    /// The first frame of a connection that replaces one which broke: what must be sent again
    /// follows the acknowledgement of the other side's.
    Resume,
}

/// A header that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecodedFrame {
    pub frame: Frame,
    /// Bytes of the header.
    pub header: usize,
    /// What it acknowledges; `None` for credits.
    pub acknowledged: Option<u32>,
}

/// What is wrong with a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    #[error("a frame of kind {kind} with the flags {flags:#04x}")]
    Flags { kind: u8, flags: u8 },
    #[error("a frame of kind {0} with bytes that must be 0 and are not")]
    NotZero(u8),
    #[error("a message of {0} bytes, {MAX_SEND} at most")]
    Message(usize),
    #[error("a goodbye with the unknown reason {0}")]
    Reason(u16),
    #[error("{0}")]
    Immediate(#[from] crate::wire::ImmediateError),
    #[error("a frame of kind {0} that announces bulk of 0 bytes")]
    EmptyBulk(u8),
}

impl From<FrameError> for crate::fabric::LinkFailure {
    fn from(error: FrameError) -> Self {
        crate::fabric::LinkFailure::Protocol(format!("it sent {error}"))
    }
}

/// An encoded header.
pub(super) struct Header {
    bytes: [u8; LONG_HEADER],
    len: usize,
}

impl std::ops::Deref for Header {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[inline]
fn short(kind: u8, half: u16, word: u32) -> Header {
    let mut bytes = [0; LONG_HEADER];
    bytes[0] = kind;
    bytes[2..4].copy_from_slice(&half.to_le_bytes());
    bytes[4..8].copy_from_slice(&word.to_le_bytes());
    Header { bytes, len: SHORT_HEADER }
}

#[inline]
fn long(kind: u8, flags: u8, at: FrameTarget, len: u64, last: u32, acknowledged: u32) -> Header {
    let mut header = short(kind, at.region, at.key);
    header.bytes[1] = flags;
    header.bytes[8..16].copy_from_slice(&at.offset.to_le_bytes());
    header.bytes[16..24].copy_from_slice(&len.to_le_bytes());
    header.bytes[24..28].copy_from_slice(&last.to_le_bytes());
    header.bytes[28..32].copy_from_slice(&acknowledged.to_le_bytes());
    header.len = LONG_HEADER;
    header
}

#[inline]
fn bulk_flag(by: PayloadCarrier) -> u8 {
    if by == PayloadCarrier::Bulk { BY_BULK } else { 0 }
}

impl Frame {
    /// Encodes the header, with an acknowledgement where the kind has one.
    #[inline]
    pub(super) fn header(&self, acknowledged: u32) -> Header {
        match *self {
            Frame::Send { len } => short(SEND, len as u16, acknowledged),
            Frame::Credits { returned } => short(CREDITS, 0, returned),
            Frame::Goodbye { reason } => short(GOODBYE, reason as u16, acknowledged),
            Frame::Write { target, len, immediate, by } => {
                let has = if immediate.is_some() { HAS_IMMEDIATE } else { 0 };
                let last = immediate.map_or(0, Immediate::to_bits);
                long(WRITE, has | bulk_flag(by), target, len, last, acknowledged)
            }
            Frame::Read { source, len, ticket } => long(READ, 0, source, len, ticket, acknowledged),
            Frame::Answer { ticket, len, by } => {
                let nowhere = FrameTarget { region: 0, key: 0, offset: 0 };
                long(ANSWER, bulk_flag(by), nowhere, len, ticket, acknowledged)
            }
            Frame::Acknowledge => short(ACKNOWLEDGE, 0, acknowledged),
            Frame::Resume => short(RESUME, 0, acknowledged),
        }
    }

    /// Where the header has its acknowledgement.
    pub(super) fn acknowledgement_at(&self) -> Option<usize> {
        match self {
            Frame::Credits { .. } => None,
            Frame::Write { .. } | Frame::Read { .. } | Frame::Answer { .. } => Some(LONG_ACKNOWLEDGEMENT),
            Frame::Send { .. } | Frame::Goodbye { .. } | Frame::Acknowledge | Frame::Resume => {
                Some(SHORT_ACKNOWLEDGEMENT)
            }
        }
    }

    /// Decodes the header at the start of `bytes`. `None` if it is not complete.
    ///
    /// # Errors
    /// If no peer that keeps the rules sends it.
    #[inline]
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<DecodedFrame>, FrameError> {
        let Some(start) = bytes.first_chunk::<SHORT_HEADER>() else { return Ok(None) };
        let [kind, flags, ..] = *start;
        let half = u16::from_le_bytes([start[2], start[3]]);
        let word = u32::from_le_bytes([start[4], start[5], start[6], start[7]]);
        let allowed = match kind {
            SEND | CREDITS | GOODBYE | READ | ACKNOWLEDGE | RESUME => 0,
            WRITE => HAS_IMMEDIATE | BY_BULK,
            ANSWER => BY_BULK,
            kind => return Err(FrameError::Kind(kind)),
        };
        if flags & !allowed != 0 {
            return Err(FrameError::Flags { kind, flags });
        }
        let empty = |frame| if half == 0 { Ok(frame) } else { Err(FrameError::NotZero(kind)) };
        let frame = match kind {
            SEND if usize::from(half) > MAX_SEND => return Err(FrameError::Message(usize::from(half))),
            SEND => Frame::Send { len: usize::from(half) },
            CREDITS => empty(Frame::Credits { returned: word })?,
            ACKNOWLEDGE => empty(Frame::Acknowledge)?,
            RESUME => empty(Frame::Resume)?,
            GOODBYE => Frame::Goodbye {
                reason: match half {
                    0 => GoodbyeReason::Closed,
                    1 => GoodbyeReason::Resources,
                    2 => GoodbyeReason::Protocol,
                    3 => GoodbyeReason::NoReceive,
                    reason => return Err(FrameError::Reason(reason)),
                },
            },
            kind => {
                let Some(header) = bytes.first_chunk::<LONG_HEADER>() else { return Ok(None) };
                let at = FrameTarget { region: half, key: word, offset: u64_at(header, 8) };
                let (len, last) = (u64_at(header, 16), u64_at(header, 24));
                let frame = Frame::decode_long(kind, flags, at, len, last as u32)?;
                let acknowledged = Some((last >> 32) as u32);
                return Ok(Some(DecodedFrame { frame, header: LONG_HEADER, acknowledged }));
            }
        };
        let acknowledged = (kind != CREDITS).then_some(word);
        Ok(Some(DecodedFrame { frame, header: SHORT_HEADER, acknowledged }))
    }

    #[inline]
    fn decode_long(kind: u8, flags: u8, at: FrameTarget, len: u64, last: u32) -> Result<Frame, FrameError> {
        let by = if flags & BY_BULK != 0 { PayloadCarrier::Bulk } else { PayloadCarrier::Main };
        if by == PayloadCarrier::Bulk && len == 0 {
            return Err(FrameError::EmptyBulk(kind));
        }
        Ok(match kind {
            WRITE if flags & HAS_IMMEDIATE != 0 => {
                Frame::Write { target: at, len, immediate: Some(Immediate::from_bits(last)?), by }
            }
            WRITE if last != 0 => return Err(FrameError::NotZero(kind)),
            WRITE => Frame::Write { target: at, len, immediate: None, by },
            READ => Frame::Read { source: at, len, ticket: last },
            _ if (at.region, at.key, at.offset) != (0, 0, 0) => return Err(FrameError::NotZero(kind)),
            _ => Frame::Answer { ticket: last, len, by },
        })
    }
}

#[inline]
fn u64_at(header: &[u8; LONG_HEADER], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&header[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Slot;
    use proptest::prelude::*;

    fn frames() -> Vec<Frame> {
        let target = FrameTarget { region: 3, key: 0xDEAD_BEEF, offset: u64::MAX - 1 };
        let immediate = Some(Immediate { generation: 7, slot: Slot::new(99).expect("20 bits") });
        let mut frames = vec![
            Frame::Send { len: 0 },
            Frame::Send { len: MAX_SEND },
            Frame::Credits { returned: u32::MAX },
            Frame::Goodbye { reason: GoodbyeReason::Closed },
            Frame::Goodbye { reason: GoodbyeReason::Resources },
            Frame::Goodbye { reason: GoodbyeReason::Protocol },
            Frame::Goodbye { reason: GoodbyeReason::NoReceive },
            Frame::Read { source: target, len: u64::MAX, ticket: u32::MAX },
            Frame::Acknowledge,
            Frame::Resume,
        ];
        for by in [PayloadCarrier::Main, PayloadCarrier::Bulk] {
            frames.push(Frame::Write { target, len: 5, immediate: None, by });
            frames.push(Frame::Write { target, len: 1 << 40, immediate, by });
            frames.push(Frame::Answer { ticket: 8, len: 9, by });
        }
        frames
    }

    #[test]
    fn every_frame_comes_back_and_not_before_it_is_complete() {
        for (frame, number) in frames().into_iter().zip((0..).step_by(0x0101_0101)) {
            let header = frame.header(number);
            for end in 0..header.len() {
                assert_eq!(Frame::decode(&header[..end]), Ok(None), "{frame:?} cut at {end}");
            }
            let acknowledged = frame.acknowledgement_at().map(|_| number);
            let decoded = DecodedFrame { frame, header: header.len(), acknowledged };
            assert_eq!(Frame::decode(&header), Ok(Some(decoded)));
            let behind = [&header[..], &[0xFF; 40]].concat();
            assert_eq!(Frame::decode(&behind), Ok(Some(decoded)));
            if let Some(at) = frame.acknowledgement_at() {
                assert_eq!(header[at..at + 4], number.to_le_bytes());
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(
            kind in 0u8..10,
            flags in 0u8..8,
            rest in proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..40),
        ) {
            let bytes = [&[kind, flags][..], &rest].concat();
            if let Ok(Some(DecodedFrame { frame, header, acknowledged })) = Frame::decode(&bytes) {
                prop_assert_eq!(&frame.header(acknowledged.unwrap_or(0))[..], &bytes[..header]);
            }
        }
    }

    #[test]
    fn what_no_frame_has_is_refused_by_name() {
        let refused = |frame: Frame, at: usize, byte: u8| {
            let mut bytes = frame.header(0).to_vec();
            bytes[at] = byte;
            Frame::decode(&bytes).expect_err("refused")
        };
        let send = Frame::Send { len: 4 };
        assert_eq!(refused(send, 0, 0), FrameError::Kind(0));
        assert_eq!(refused(send, 0, 9), FrameError::Kind(9));
        assert_eq!(refused(send, 1, 1), FrameError::Flags { kind: SEND, flags: 1 });
        assert_eq!(refused(send, 3, 0x81), FrameError::Message(0x8104));
        assert_eq!(refused(Frame::Credits { returned: 1 }, 2, 1), FrameError::NotZero(CREDITS));
        let goodbye = Frame::Goodbye { reason: GoodbyeReason::Closed };
        assert_eq!(refused(goodbye, 2, 9), FrameError::Reason(9));
        assert_eq!(refused(Frame::Acknowledge, 3, 1), FrameError::NotZero(ACKNOWLEDGE));
        assert_eq!(refused(Frame::Resume, 2, 1), FrameError::NotZero(RESUME));
        let target = FrameTarget { region: 0, key: 1, offset: 2 };
        let write = Frame::Write { target, len: 0, immediate: None, by: PayloadCarrier::Main };
        assert_eq!(refused(write, 1, BY_BULK), FrameError::EmptyBulk(WRITE));
        assert_eq!(refused(write, 24, 1), FrameError::NotZero(WRITE));
        let with = Frame::Write {
            target,
            len: 1,
            immediate: Some(Immediate { generation: 1, slot: Slot::ZERO }),
            by: PayloadCarrier::Main,
        };
        assert!(matches!(refused(with, 27, 0xFF), FrameError::Immediate(_)));
        let answer = Frame::Answer { ticket: 1, len: 1, by: PayloadCarrier::Main };
        assert_eq!(refused(answer, 1, HAS_IMMEDIATE), FrameError::Flags { kind: ANSWER, flags: 1 });
        assert_eq!(refused(answer, 4, 1), FrameError::NotZero(ANSWER));
    }
}
