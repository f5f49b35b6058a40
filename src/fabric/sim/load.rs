//! The payload of a packet.

use crate::memory::Tensor;
use crate::wire::{Grant, Immediate};

/// The payload of a packet.
pub(super) enum Load {
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
        immediate: Immediate,
    },
}

/// The source of a write.
pub(super) enum Bytes {
    Copied(Vec<u8>),
    /// The first bytes of a tensor that the sender holds. The network reads them at arrival.
    Source(Tensor),
}

impl Load {
    /// The bytes that arrive.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Load::Message(bytes) | Load::Write { from: Bytes::Copied(bytes), .. } => bytes,
            Load::Write { from: Bytes::Source(tensor), target, .. } => &tensor.bytes()[..target.len as usize],
            Load::Read { .. } | Load::Loan { .. } => &[],
        }
    }

    /// Copies the bytes of a packet in flight, and releases the sender's memory.
    pub fn leave_memory(&mut self) {
        let bytes = self.bytes().to_vec();
        if let Load::Write { from, .. } = self {
            *from = Bytes::Copied(bytes);
        }
    }
}
