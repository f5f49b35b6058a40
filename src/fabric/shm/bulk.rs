//! Bulk: naming a tensor of this pool for the peer, and copying bytes out of the peer's pool.
#![allow(unsafe_code)]

use crate::fabric::PostError;
use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::memory::order::OrderSource;
use crate::fabric::shm::regions::LazyRegion;
use crate::fabric::shm::violation::ShmViolation;
use crate::memory::{Lender, LenderPart, PeerRegionError, Pool, Span, Tensor};
use std::cell::OnceCell;
use std::ptr;
use std::sync::Arc;

/// The regions of the peer's pool that it has shared.
pub(super) struct PeerPool {
    regions: Vec<SharedRegion>,
    loans: Arc<LoanTable>,
}

/// A region that the peer has shared.
struct SharedRegion {
    id: u16,
    /// Made when the region is first used. Before `region`, whose drop asks whether loans are out.
    lender: OnceCell<Lender>,
    region: Arc<LazyRegion>,
}

impl SharedRegion {
    #[inline]
    fn lender(&self, loans: &Arc<LoanTable>) -> Result<&Lender, ShmViolation> {
        match self.lender.get() {
            Some(lender) => Ok(lender),
            None => self.map(loans),
        }
    }

    #[cold]
    fn map(&self, loans: &Arc<LoanTable>) -> Result<&Lender, ShmViolation> {
        let region = self.region.region();
        let region = region.map_err(|error| match *error {
            PeerRegionError::Os { .. } => ShmViolation::RegionNotMapped(error.to_string()),
            _ => ShmViolation::RegionRefused { region: self.id, why: error.to_string() },
        })?;
        Ok(self.lender.get_or_init(|| Lender::new(Arc::clone(region), Arc::clone(loans) as _)))
    }
}

impl PeerPool {
    /// The regions that the peer's hello named, by number, and the table of their loans.
    pub(super) fn new(regions: Vec<(u16, Arc<LazyRegion>)>, loans: Arc<LoanTable>) -> Self {
        regions.iter().for_each(|(_, region)| region.add_loan_table(&loans));
        let shared = |(id, region)| SharedRegion { id, lender: OnceCell::new(), region };
        PeerPool { regions: regions.into_iter().map(shared).collect(), loans }
    }

    /// The lender of a region by number. `any` takes the first one, for a source without bytes.
    #[inline]
    pub(super) fn lender(&self, id: u16, any: bool) -> Result<&Lender, ShmViolation> {
        match self.regions.iter().find(|shared| any || shared.id == id) {
            Some(shared) => shared.lender(&self.loans),
            None => Err(ShmViolation::RegionNotShared { region: id }),
        }
    }

    /// The bytes of a source that the peer lends; `None` if there are none, or they are not inside
    /// the shared regions.
    #[inline]
    pub(super) fn lent(&self, source: OrderSource) -> Option<LenderPart<'_>> {
        let OrderSource { region, offset, len } = source;
        self.lender(region, false).ok()?.part(offset, len).filter(|_| len > 0)
    }

    /// Copies `out.len()` bytes of a source, from byte `skip` on.
    ///
    /// # Errors
    /// The violation, if the source is not inside the shared regions; nothing is copied then.
    pub(super) fn pull(&self, source: OrderSource, skip: u64, out: &mut [u8]) -> Result<(), ShmViolation> {
        let region = self.lender(source.region, false)?.region();
        let Some(start) = region.bytes_at(source.offset, source.len) else {
            return Err(ShmViolation::OutsideRegion { named: source, region_len: region.len() });
        };
        let inside = skip.checked_add(out.len() as u64).is_some_and(|end| end <= source.len);
        assert!(inside, "a part of a source lies inside it");
        // SAFETY: `source.len` bytes from `start` on are mapped for as long as `region` lives, so
        // those behind `skip` are. They can't fault, since the file can't shrink. `out` is memory
        // that only this thread has. The peer may change its bytes meanwhile. Any bytes are valid,
        // and nothing is decided by them. The caller checks afterwards that the peer still took
        // part in the link.
        unsafe { ptr::copy_nonoverlapping(start.add(skip as usize), out.as_mut_ptr(), out.len()) };
        Ok(())
    }
}

/// Names the first `len` bytes of a tensor for the peer.
///
/// # Errors
/// [`PostError::Refused`] if they are not inside the tensor, or it is not in this fabric's pool.
#[inline]
pub(super) fn source(pool: &Pool, tensor: &Tensor, len: u64) -> Result<OrderSource, PostError> {
    if len > tensor.bytes().len() as u64 {
        return Err(PostError::Refused("the source has not as many bytes"));
    }
    if len == 0 {
        return Ok(OrderSource { region: 0, offset: 0, len: 0 });
    }
    match pool.span_of(tensor) {
        Some(Span { region, offset, .. }) => Ok(OrderSource { region, offset, len }),
        None => Err(not_shared(tensor)),
    }
}

#[cold]
fn not_shared(tensor: &Tensor) -> PostError {
    PostError::Refused(match tensor.span() {
        Some(_) => "the source is not in the pool that this fabric shares",
        None => "the source has no memory of its own here: copy a lent tensor first",
    })
}
