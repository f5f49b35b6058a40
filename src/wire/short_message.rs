//! Messages that fit one cache line of a ring.

/// Bytes of the longest [`ShortMessage`].
pub const SHORT_MESSAGE: usize = 4 + 8 * SHORT_WORDS;
/// Words of a short message behind its first four bytes.
pub const SHORT_WORDS: usize = 6;

/// A message of at most [`SHORT_MESSAGE`] bytes, as little-endian words. The bytes behind its end
/// are 0 at the sender; a receiver ignores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortMessage {
    /// Bytes of the message.
    pub len: usize,
    /// Bytes 0 to 3.
    pub first: u32,
    /// The bytes behind.
    pub words: [u64; SHORT_WORDS],
}

/// A [`ShortMessage`] whose words are read one by one: those of a tensor that is sent, or of memory
/// that the peer may change. No word of such memory is read twice.
#[derive(Clone, Copy, Debug)]
pub struct UnreadMessage<W> {
    /// Bytes of the message.
    pub len: usize,
    /// Bytes 0 to 3.
    pub first: u32,
    /// Returns a word behind. It panics beyond [`SHORT_WORDS`].
    pub word: W,
}

impl<W: Fn(usize) -> u64> UnreadMessage<W> {
    /// Reads the words.
    #[inline]
    pub fn read(&self) -> ShortMessage {
        let UnreadMessage { len, first, word } = self;
        ShortMessage { len: *len, first: *first, words: std::array::from_fn(word) }
    }
}

impl ShortMessage {
    /// The message as one that is read word by word.
    #[inline]
    pub fn unread(&self) -> UnreadMessage<impl Fn(usize) -> u64> {
        UnreadMessage { len: self.len, first: self.first, word: |k| self.words[k] }
    }

    /// The message of these bytes, if it is not longer.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut filled = [0; SHORT_MESSAGE];
        filled.get_mut(..bytes.len())?.copy_from_slice(bytes);
        let (first, rest) = filled.split_first_chunk()?;
        let mut words = [0; SHORT_WORDS];
        for (word, chunk) in words.iter_mut().zip(rest.as_chunks().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        Some(ShortMessage { len: bytes.len(), first: u32::from_le_bytes(*first), words })
    }

    /// The message of the four bytes of a number.
    pub fn from_u32(number: u32) -> Self {
        ShortMessage { len: 4, first: number, words: [0; SHORT_WORDS] }
    }

    /// The bytes of the message, filled up.
    pub fn to_bytes(self) -> [u8; SHORT_MESSAGE] {
        let mut bytes = [0; SHORT_MESSAGE];
        let (first, rest) = bytes.split_at_mut(4);
        first.copy_from_slice(&self.first.to_le_bytes());
        for (out, word) in rest.chunks_exact_mut(8).zip(self.words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}
