//! A digest of a history.

use super::load::SimPayload;
use crate::wire::Grant;

/// FNV-1a over words.
pub(super) struct Digest(u64);

impl Digest {
    pub fn new() -> Self {
        Digest(0xCBF2_9CE4_8422_2325)
    }

    pub fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x100_0000_01B3);
    }

    /// Mixes in bytes and their number.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.word(u64::from_le_bytes(*word)));
        rest.iter().for_each(|byte| self.word(u64::from(*byte)));
    }

    fn grant(&mut self, grant: &Grant) {
        let Grant { region, key, offset, len } = *grant;
        [region.into(), key.into(), offset, len].into_iter().for_each(|word| self.word(word));
    }

    /// Mixes in the payload of a packet.
    pub fn load(&mut self, load: &SimPayload) {
        match load {
            SimPayload::Message(bytes) => self.bytes(bytes),
            SimPayload::Write { target, immediate, .. } => {
                self.grant(target);
                self.word(immediate.map_or(u64::MAX, |immediate| immediate.to_bits().into()));
                self.bytes(load.bytes());
            }
            SimPayload::Read { source } => self.grant(source),
            SimPayload::Loan { message, .. } => self.bytes(&message.to_bytes()[..message.len]),
        }
    }

    pub fn value(&self) -> u64 {
        self.0
    }
}
