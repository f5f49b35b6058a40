//! Bytes that a peer has lent to this process.

use crate::memory::region::peer::PeerRegion;
use crate::wire::DType;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Ends loans.
pub trait GiveBack: Send + Sync {
    /// Gives back the loan with this index. Called once per loan, on the thread that drops its
    /// [`LoanGuard`]. It must not block, allocate, fail or panic.
    fn give_back(&self, index: u32);
}

/// One loan. Its drop gives the loan back.
pub struct LoanGuard {
    loans: Arc<dyn GiveBack>,
    index: u32,
}

impl LoanGuard {
    /// The loan that `loans.give_back(index)` ends.
    pub fn new(loans: Arc<dyn GiveBack>, index: u32) -> LoanGuard {
        LoanGuard { loans, index }
    }
}

impl Drop for LoanGuard {
    fn drop(&mut self) {
        self.loans.give_back(self.index);
    }
}

impl fmt::Debug for LoanGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoanGuard({})", self.index)
    }
}

/// Bytes of a peer's tensor, read in place. The drop gives them back.
///
/// **Trust.** The mapping is read-only here and its size is sealed, so reading can't fault. The
/// peer could still change the bytes while they are read. The peer runs this library, which keeps a
/// lent tensor frozen until it is given back. The peer is also a process of the same user, which
/// could stop or change this process with a debugger anyway. Users that don't trust each other must
/// not lend to each other.
#[derive(Debug)]
pub struct LentBytes {
    data: NonNull<u8>,
    len: usize,
    // Before the region: the loan ends while its memory is still mapped.
    _guard: LoanGuard,
    _region: Arc<PeerRegion>,
}

// SAFETY: `data` points into the mapping that `_region` keeps alive; it belongs to no thread and is
// only read.
unsafe impl Send for LentBytes {}
// SAFETY: as above.
unsafe impl Sync for LentBytes {}

impl LentBytes {
    /// The `len` bytes at `offset` of a peer's region. `None` if some are outside; the loan is
    /// given back then.
    pub fn new(region: Arc<PeerRegion>, offset: u64, len: u64, guard: LoanGuard) -> Option<LentBytes> {
        let data = NonNull::new(region.bytes_at(offset, len)?.cast_mut())?;
        Some(LentBytes { data, len: usize::try_from(len).ok()?, _guard: guard, _region: region })
    }

    pub(super) fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// As they lie at the lender.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `new` has checked that the bytes lie in the mapping, which `_region` keeps alive.
        // A peer that lends them does not write to them: see "Trust" above.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Why lent bytes cannot become a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LentError {
    /// The tensor has another number of bytes.
    #[error("the peer lends {lent} bytes for a tensor of {needed}")]
    Length {
        /// Bytes that are lent.
        lent: u64,
        /// Bytes that the tensor has.
        needed: u64,
    },
    /// The element type can't be lent.
    #[error("a tensor of {dtype} can't be lent: {why}; the peer must send it")]
    DType {
        /// The element type.
        dtype: DType,
        /// Reason.
        why: &'static str,
    },
}
