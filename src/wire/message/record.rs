//! Records of tensors as words: with the bytes of the tensor, or as the message of its loan.
//! `window` has their layout.

use super::window::{FLAG_ANSWERS_NEED, FLAG_CHECKSUM, FLAG_MAY_BORROW, KIND_BYTES, KIND_LOAN, RECORD};
use crate::wire::{EdgeId, SHORT_MESSAGE, ShortMessage};

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
    /// Appends the record to `out`: the same bytes as [`WindowMessage::encode`] makes.
    #[inline]
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&first_bytes(KIND_BYTES, self.n).to_le_bytes());
        head[4..12].copy_from_slice(&edge_word(self.edge, self.meta).to_le_bytes());
        head[12..].copy_from_slice(&self.step.to_le_bytes());
        out.reserve(HEAD + self.data.len());
        out.extend_from_slice(&head);
        out.extend_from_slice(self.data);
    }

    /// Bytes of the record.
    #[inline]
    pub fn encoded_len(&self) -> usize {
        HEAD + self.data.len()
    }

    /// The record as a short message; `None` if its tensor has more than [`SHORT_TENSOR`] bytes.
    #[inline]
    pub fn to_short(self) -> Option<ShortMessage> {
        let [a, b, c, d] = words_of(self.data)?;
        let words = [edge_word(self.edge, self.meta), self.step, a, b, c, d];
        Some(ShortMessage { len: HEAD + self.data.len(), first: first_bytes(KIND_BYTES, self.n), words })
    }

    /// The version of the meta-data of a short message, if the message is the plain record of this
    /// value.
    #[inline]
    pub fn meta_of_short(message: &ShortMessage, edge: EdgeId, n: u16, step: u64) -> Option<u16> {
        let is_plain = message.len >= HEAD && message.first == first_bytes(KIND_BYTES, n);
        (is_plain && is_of(message, edge, step)).then_some(meta_of(message))
    }

    /// Bytes of the tensor of a plain record of `len` bytes.
    #[inline]
    pub fn data_len(len: usize) -> usize {
        len.saturating_sub(HEAD)
    }

    /// Copies the bytes of the tensor of a short message, which is a plain record, to `out`.
    /// Returns whether there are as many.
    #[inline]
    pub fn copy_of_short(message: &ShortMessage, out: &mut [u8]) -> bool {
        let [_, _, data @ ..] = &message.words;
        if message.len != HEAD + out.len() || out.len() > SHORT_TENSOR {
            return false;
        }
        let (chunks, rest) = out.as_chunks_mut::<8>();
        chunks.iter_mut().zip(data).for_each(|(chunk, word)| *chunk = word.to_le_bytes());
        if !rest.is_empty()
            && let Some(word) = data.get(chunks.len())
        {
            rest.iter_mut().zip(word.to_le_bytes()).for_each(|(out, byte)| *out = byte);
        }
        true
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
            meta: meta_of(message),
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

/// Whether the record of a message belongs to this edge and step.
#[inline]
fn is_of(message: &ShortMessage, edge: EdgeId, step: u64) -> bool {
    message.words[0] << 16 == edge_word(edge, 0) << 16 && message.words[1] == step
}

/// The version of the meta-data of a record.
#[inline]
fn meta_of(message: &ShortMessage) -> u16 {
    (message.words[0] >> 48) as u16
}

/// The edge and the meta id of a record.
#[inline]
fn edge_word(edge: EdgeId, meta: u16) -> u64 {
    u64::from(edge.number) | u64::from(edge.generation) << 32 | u64::from(meta) << 48
}

/// The words of a short tensor, the last one filled up with zeros.
#[inline]
fn words_of(data: &[u8]) -> Option<[u64; SHORT_TENSOR / 8]> {
    let mut words = [0; SHORT_TENSOR / 8];
    if data.len() > SHORT_TENSOR {
        return None;
    }
    let (chunks, rest) = data.as_chunks::<8>();
    words.iter_mut().zip(chunks).for_each(|(word, chunk)| *word = u64::from_le_bytes(*chunk));
    if !rest.is_empty()
        && let Some(last) = words.get_mut(chunks.len())
    {
        *last = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    Some(words)
}
