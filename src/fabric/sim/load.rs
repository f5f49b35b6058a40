//! What a packet carries.

use crate::memory::Tensor;
use crate::wire::{Grant, Immediate};

/// What a packet carries.
pub(super) enum Load {
    Message(Vec<u8>),
    /// To the start of `target`, as many bytes as that has.
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

/// The bytes of a write.
pub(super) enum Bytes {
    Copied(Vec<u8>),
    /// The first bytes of a tensor that the sender holds. The network reads them when the packet arrives.
    Source(Tensor),
}

impl Load {
    /// The bytes that it brings.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Load::Message(bytes) | Load::Write { from: Bytes::Copied(bytes), .. } => bytes,
            Load::Write { from: Bytes::Source(tensor), target, .. } => &tensor.bytes()[..target.len as usize],
            Load::Read { .. } | Load::Loan { .. } => &[],
        }
    }

    /// Lets go of the sender's memory: what has left has left.
    pub fn leave_memory(&mut self) {
        let bytes = self.bytes().to_vec();
        if let Load::Write { from, .. } = self {
            *from = Bytes::Copied(bytes);
        }
    }
}
