//! Records of tensors as words: with the bytes of the tensor, or as the message of its loan.
//! `window` has their layout.

use super::{FLAG_ANSWERS_NEED, FLAG_CHECKSUM, FLAG_MAY_BORROW, KIND_BYTES, KIND_LOAN, RECORD};
use crate::wire::{EdgeId, SHORT_MESSAGE, ShortMessage, UnreadMessage};

/// A record of a tensor whose bytes are in it, without a checksum: the usual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainRecord<'a> {
    /// Number and generation, as the receiver has announced them.
    pub edge: EdgeId,
    /// The lowest bits of the count of values.
    pub n: u16,
    /// Step id.
    pub step: u64,
    /// The version of the meta-data of the tensor.
    pub meta: u16,
    /// Elements, or the serialised form.
    pub data: &'a [u8],
}

/// Bytes of a record before those of its tensor, without a checksum.
const HEAD: usize = 20;
/// Bytes of the largest tensor whose plain record is a [`ShortMessage`].
pub const SHORT_TENSOR: usize = SHORT_MESSAGE - HEAD;

impl<'a> PlainRecord<'a> {
    /// Appends the record to `out`: the same bytes as [`Message::encode`] makes.
    #[inline(always)] // else each record of a batch is written to memory and read back
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(HEAD + self.data.len());
        out.extend_from_slice(&self.head());
        out.extend_from_slice(self.data);
    }

    /// The record up to the bytes of the tensor.
    #[inline]
    pub fn head(&self) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&first_bytes(KIND_BYTES, self.n).to_le_bytes());
        head[4..12].copy_from_slice(&edge_word(self.edge, self.meta).to_le_bytes());
        head[12..].copy_from_slice(&self.step.to_le_bytes());
        head
    }

    /// Bytes of the record.
    #[inline]
    pub fn encoded_len(&self) -> usize {
        HEAD + self.data.len()
    }

    /// The record as a short message; `None` if its tensor has more than [`SHORT_TENSOR`] bytes.
    #[inline]
    pub fn to_short(self) -> Option<UnreadMessage<impl Fn(usize) -> u64>> {
        let PlainRecord { edge, n, step, meta, data } = self;
        let word = move |k: usize| match k.checked_sub(2) {
            None if k == 0 => edge_word(edge, meta),
            None => step,
            Some(k) => word_of(data, k),
        };
        let message = UnreadMessage { len: HEAD + data.len(), first: first_bytes(KIND_BYTES, n), word };
        (data.len() <= SHORT_TENSOR).then_some(message)
    }

    /// The version of the meta-data of a short message, if the message is the plain record of this
    /// value. Reads words 0 and 1.
    #[inline(always)] // on the short path
    pub fn meta_of_short<W: Fn(usize) -> u64>(
        message: &UnreadMessage<W>,
        edge: EdgeId,
        n: u16,
        step: u64,
    ) -> Option<u16> {
        if message.len < HEAD || message.first != first_bytes(KIND_BYTES, n) {
            return None;
        }
        let named = (message.word)(0);
        let is_it = named << 16 == edge_word(edge, 0) << 16 && (message.word)(1) == step;
        is_it.then_some((named >> 48) as u16)
    }

    /// Bytes of the tensor of a plain record of `len` bytes.
    #[inline]
    pub fn data_len(len: usize) -> usize {
        len.saturating_sub(HEAD)
    }

    /// Copies the bytes of the tensor of a short message, which is a plain record, to `out`. The
    /// caller has compared their number, which is [`SHORT_TENSOR`] at most. Reads the words of the
    /// bytes.
    #[inline(always)] // on the short path
    pub fn copy_of_short<W: Fn(usize) -> u64>(message: &UnreadMessage<W>, out: &mut [u8]) {
        debug_assert!(message.len == HEAD + out.len() && out.len() <= SHORT_TENSOR);
        let (chunks, rest) = out.as_chunks_mut::<8>();
        // Of known length: a loop over the chunks becomes a call.
        for k in 0..SHORT_TENSOR / 8 {
            match chunks.get_mut(k) {
                Some(chunk) => *chunk = (message.word)(2 + k).to_le_bytes(),
                None if rest.is_empty() => break,
                None => {
                    let bytes = (message.word)(2 + k).to_le_bytes();
                    rest.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte);
                    break;
                }
            }
        }
    }

    /// Reads a plain record; `None` if the bytes are another message, or none.
    #[inline]
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (head, data) = bytes.split_first_chunk::<HEAD>()?;
        let [RECORD, KIND_BYTES, n, m, a, b, c, d, e, f, meta, version, step @ ..] = *head else {
            return None;
        };
        let edge =
            EdgeId { number: u32::from_le_bytes([a, b, c, d]), generation: u16::from_le_bytes([e, f]) };
        let (n, step) = (u16::from_le_bytes([n, m]), u64::from_le_bytes(step));
        Some(PlainRecord { edge, n, step, meta: u16::from_le_bytes([meta, version]), data })
    }
}

/// The record of a tensor that the fabric lends: the message of the loan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentRecord {
    /// Number and generation, as the receiver has announced them.
    pub edge: EdgeId,
    /// The lowest bits of the count of values.
    pub n: u16,
    /// Step id.
    pub step: u64,
    /// The version of the meta-data of the tensor.
    pub meta: u16,
    /// Whether the receiver may keep the loan. Otherwise it copies the bytes.
    pub may_borrow: bool,
    /// Whether the value answers a need.
    pub answers_need: bool,
    /// The checksum of the tensor's bytes.
    pub checksum: Option<u64>,
}

impl LentRecord {
    /// Bytes of the longest message.
    pub const MAX_LEN: usize = HEAD + 8;

    /// The message of the loan.
    #[inline]
    pub fn to_message(self) -> ShortMessage {
        let LentRecord { edge, n, step, meta, may_borrow, answers_need, checksum } = self;
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let borrow = flag(may_borrow, FLAG_MAY_BORROW);
        let flags = KIND_LOAN | borrow | flag(answers_need, FLAG_ANSWERS_NEED);
        let flags = flags | flag(checksum.is_some(), FLAG_CHECKSUM);
        let len = if checksum.is_some() { Self::MAX_LEN } else { HEAD };
        let words = [edge_word(edge, meta), step, checksum.unwrap_or_default(), 0, 0, 0];
        ShortMessage { len, first: first_bytes(flags, n), words }
    }

    /// Reads the message of a loan; `None` if it is none.
    #[inline]
    pub fn from_message(message: &ShortMessage) -> Option<Self> {
        let [kind, flags, n @ ..] = message.first.to_le_bytes();
        let [named, step, checksum, ..] = message.words;
        let has_checksum = flags & FLAG_CHECKSUM != 0;
        let others = flags & !(FLAG_MAY_BORROW | FLAG_ANSWERS_NEED | FLAG_CHECKSUM);
        let len = if has_checksum { Self::MAX_LEN } else { HEAD };
        if kind != RECORD || others != KIND_LOAN || message.len != len {
            return None;
        }
        Some(LentRecord {
            edge: EdgeId { number: named as u32, generation: (named >> 32) as u16 },
            n: u16::from_le_bytes(n),
            step,
            meta: (named >> 48) as u16,
            may_borrow: flags & FLAG_MAY_BORROW != 0,
            answers_need: flags & FLAG_ANSWERS_NEED != 0,
            checksum: has_checksum.then_some(checksum),
        })
    }
}

/// The first four bytes of a record.
#[inline]
fn first_bytes(flags: u8, n: u16) -> u32 {
    u32::from_le_bytes([RECORD, flags, 0, 0]) | u32::from(n) << 16
}

/// The edge and the meta id of a record.
#[inline]
fn edge_word(edge: EdgeId, meta: u16) -> u64 {
    u64::from(edge.number) | u64::from(edge.generation) << 32 | u64::from(meta) << 48
}

/// Word `k` of the bytes of a tensor. The last one is filled up with zeros.
#[inline]
fn word_of(data: &[u8], k: usize) -> u64 {
    let (chunks, rest) = data.as_chunks::<8>();
    match chunks.get(k) {
        Some(chunk) => u64::from_le_bytes(*chunk),
        None if k == chunks.len() => rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
        None => 0,
    }
}
