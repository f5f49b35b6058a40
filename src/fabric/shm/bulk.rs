//! Bulk: naming a tensor of this pool for the peer, and copying bytes out of the peer's pool.
#![allow(unsafe_code)]

use crate::fabric::PostError;
use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::memory::order::OrderSource;
use crate::fabric::shm::regions::LazyRegion;
use crate::fabric::shm::violation::ShmViolation;
use crate::memory::{Lender, LenderPart, PeerRegionError, Pool, Span, Tensor, copy_from};
use rustix::io::Errno;
use std::cell::OnceCell;
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
        let region = region.map_err(|error| not_mapped(self.id, &error))?;
        Ok(self.lender.get_or_init(|| Lender::new(Arc::clone(region), Arc::clone(loans) as _)))
    }
}

/// Why a region of the peer can't be mapped. A lack of memory or descriptors is no fault of the
/// peer's. Any other error of the system is about the file that the peer has sent.
fn not_mapped(region: u16, error: &PeerRegionError) -> ShmViolation {
    let code = match error {
        PeerRegionError::Os { source, .. } => source.raw_os_error().map(Errno::from_raw_os_error),
        _ => None,
    };
    match code {
        // EAGAIN is mmap's word for RLIMIT_MEMLOCK, after mlockall(MCL_FUTURE).
        Some(Errno::NOMEM | Errno::AGAIN | Errno::MFILE | Errno::NFILE) => {
            ShmViolation::RegionNotMapped(error.to_string())
        }
        _ => ShmViolation::RegionRefused { region, why: error.to_string() },
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
        unsafe { copy_from(out, start.add(skip as usize)) };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::LinkFailure;

    /// The failure of a link whose region was not mapped, as the system says this.
    fn failure(source: std::io::Error) -> LinkFailure {
        not_mapped(3, &PeerRegionError::Os { tried: "mapping", claimed: 4096, source }).into()
    }

    #[test]
    fn a_lack_of_memory_or_descriptors_is_this_process_s_own() {
        for code in [Errno::NOMEM, Errno::AGAIN, Errno::MFILE, Errno::NFILE] {
            let LinkFailure::Resources(why) = failure(code.into()) else { panic!("{code}") };
            assert!(why.contains("mapping the peer's region"), "{why}");
        }
    }

    #[test]
    fn any_other_error_of_the_system_is_about_the_file_of_the_peer() {
        for code in [Errno::INVAL, Errno::ACCESS, Errno::PERM, Errno::NODEV, Errno::BADF, Errno::OVERFLOW] {
            let LinkFailure::Protocol(why) = failure(code.into()) else { panic!("{code}") };
            assert!(why.contains("its region 3: mapping"), "{why}");
        }
        let without_code = failure(std::io::ErrorKind::InvalidInput.into());
        assert!(matches!(without_code, LinkFailure::Protocol(_)), "{without_code:?}");
    }

    #[test]
    fn a_region_that_is_not_sealed_too_short_or_too_large_is_the_peers() {
        let short = PeerRegionError::TooShort { size: 1, claimed: 2 };
        let large = PeerRegionError::TooLarge { size: 2, memory: 1 };
        for error in [PeerRegionError::Seals { have: 0 }, short, large] {
            let LinkFailure::Protocol(why) = not_mapped(3, &error).into() else { panic!("{error}") };
            assert!(why.contains("its region 3"), "{why}");
        }
    }
}
