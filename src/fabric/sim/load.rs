//! The payload of a packet.

use crate::memory::Tensor;
use crate::wire::{Grant, Immediate, ShortMessage};

/// The payload of a packet.
pub(super) enum SimPayload {
    Message(Vec<u8>),
    /// A write to the start of `target`, of as many bytes as it has.
    Write {
        from: Bytes,
        target: Grant,
        immediate: Option<Immediate>,
    },
    Read {
        source: Grant,
    },
    Loan {
        loan: u32,
        message: ShortMessage,
    },
}

/// The source of a write.
pub(super) enum Bytes {
    Copied(Vec<u8>),
    /// The first bytes of a tensor that the sender holds. The network reads them at arrival.
    Source(Tensor),
}

impl SimPayload {
    /// The bytes that arrive.
    pub fn bytes(&self) -> &[u8] {
        match self {
            SimPayload::Message(bytes) | SimPayload::Write { from: Bytes::Copied(bytes), .. } => bytes,
            SimPayload::Write { from: Bytes::Source(tensor), target, .. } => {
                &tensor.bytes()[..target.len as usize]
            }
            SimPayload::Read { .. } | SimPayload::Loan { .. } => &[],
        }
    }

    /// Copies the bytes of a packet in flight, and releases the sender's memory.
    pub fn leave_memory(&mut self) {
        let bytes = self.bytes().to_vec();
        if let SimPayload::Write { from, .. } = self {
            *from = Bytes::Copied(bytes);
        }
    }
}
