//! A part of a peer's region that this process may read until it gives it back.

use crate::memory::region::peer::PeerRegion;
use crate::wire::DType;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where a loan is given back.
pub trait GiveBack: Send + Sync {
    /// The loan with this index is over. Called once for each lease, from whichever thread drops it, so it
    /// must not block, allocate, fail or panic.
    fn give_back(&self, index: u32);
}

/// A loan that is given back when this is dropped.
pub struct LoanGuard {
    sink: Arc<dyn GiveBack>,
    index: u32,
}

impl LoanGuard {
    /// A loan that ends with `sink.give_back(index)`.
    pub fn new(sink: Arc<dyn GiveBack>, index: u32) -> LoanGuard {
        LoanGuard { sink, index }
    }
}

impl Drop for LoanGuard {
    fn drop(&mut self) {
        self.sink.give_back(self.index);
    }
}

impl fmt::Debug for LoanGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoanGuard({})", self.index)
    }
}

/// Bytes of a peer's tensor where they lie, read here until this is dropped.
///
/// **Trust.** The mapping is read-only here and its size is sealed, so reading can't fault. The peer could
/// still change the bytes while they are read: it runs this library, which keeps a lent tensor frozen until
/// it is given back, and it is a process of the same user, which could as well stop or change this process
/// with a debugger. Between users that don't trust each other there must be no lending.
#[derive(Debug)]
pub struct LentBytes {
    data: NonNull<u8>,
    len: usize,
    // Before the region: the loan ends while its memory is still mapped.
    _lease: LoanGuard,
    _region: Arc<PeerRegion>,
}

// SAFETY: `data` points into the mapping that `region` keeps alive; it belongs to no thread and is only read.
unsafe impl Send for LentBytes {}
// SAFETY: as above.
unsafe impl Sync for LentBytes {}

impl LentBytes {
    /// `len` bytes at `offset` of a peer's region; `None` if they are not all inside, and then the lease is
    /// given back at once.
    pub fn new(region: Arc<PeerRegion>, offset: u64, len: u64, lease: LoanGuard) -> Option<LentBytes> {
        let data = NonNull::new(region.bytes_at(offset, len)?.cast_mut())?;
        Some(LentBytes { data, len: usize::try_from(len).ok()?, _lease: lease, _region: region })
    }

    /// The first byte, good for reading [`LentBytes::len`] bytes as long as this value lives.
    pub fn as_ptr(&self) -> *const u8 {
        self.data.as_ptr()
    }

    pub(super) fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Why lent bytes are no such tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LentError {
    /// The lengths differ.
    #[error("the peer lends {lent} bytes for a tensor of {needed}")]
    Length {
        /// Bytes that are lent.
        lent: u64,
        /// Bytes that the tensor has.
        needed: u64,
    },
    /// Booleans can't be lent.
    #[error("a tensor of {dtype} can't be lent: {why}; the peer must send it")]
    DType {
        /// The element type.
        dtype: DType,
        /// Why not.
        why: &'static str,
    },
}
