//! Bulk: where a tensor of ours lies for the peer, and how the peer's bytes are pulled in.
#![allow(unsafe_code)]

use crate::fabric::PostError;
use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::memory::order::OrderSource;
use crate::fabric::shm::regions::LazyRegion;
use crate::fabric::shm::violation::ShmViolation;
use crate::memory::{PeerRegion, Pool, Tensor};
use std::ptr;
use std::sync::Arc;

/// The peer's pool, as far as this process may see it.
pub(super) struct PeerPool {
    regions: Vec<(u16, Arc<LazyRegion>)>,
}

impl PeerPool {
    /// The regions that the peer's hello named, by number.
    pub(super) fn new(regions: Vec<(u16, Arc<LazyRegion>)>) -> Self {
        PeerPool { regions }
    }

    /// What is borrowed of it from now on may have its places in this table.
    pub(super) fn add_loan_table(&self, table: &Arc<LoanTable>) {
        self.regions.iter().for_each(|(_, region)| region.add_loan_table(table));
    }

    /// A region by number. `any` takes the first one, for what has no bytes and so lies nowhere.
    pub(super) fn region(&self, id: u16, any: bool) -> Result<&Arc<PeerRegion>, ShmViolation> {
        let Some((_, region)) = self.regions.iter().find(|(other, _)| any || *other == id) else {
            return Err(ShmViolation::RegionNotShared { region: id });
        };
        region.region().map_err(|why| ShmViolation::RegionNotMapped { region: id, why })
    }

    /// Copies `out.len()` bytes of a source, from byte `skip` of it on.
    ///
    /// # Errors
    /// If the source is not inside what the peer has shared; nothing is copied then.
    pub(super) fn pull(&self, source: OrderSource, skip: u64, out: &mut [u8]) -> Result<(), ShmViolation> {
        let region = self.region(source.region, false)?;
        let Some(start) = region.bytes_at(source.offset, source.len) else {
            return Err(ShmViolation::OutsideRegion { named: source, region_len: region.len() });
        };
        let inside = skip.checked_add(out.len() as u64).is_some_and(|end| end <= source.len);
        assert!(inside, "a part of a source lies inside it");
        // SAFETY: `source.len` bytes from `start` on are mapped for as long as `region` lives, so
        // those behind `skip` are; they can't fault, since the file can't shrink. `out` is memory
        // that only this thread has. The peer may change its bytes meanwhile: any bytes are valid,
        // nothing is decided by them, and the caller asks afterwards whether the peer has kept its
        // word.
        unsafe { ptr::copy_nonoverlapping(start.add(skip as usize), out.as_mut_ptr(), out.len()) };
        Ok(())
    }
}

/// Where the first `len` bytes of a tensor lie for the peer.
///
/// # Errors
/// [`PostError::Refused`] if they are not inside the tensor, or it is not in this fabric's pool.
pub(super) fn source(pool: &Pool, tensor: &Tensor, len: u64) -> Result<OrderSource, PostError> {
    if len > tensor.bytes().len() as u64 {
        return Err(PostError::Refused("the source has not as many bytes"));
    }
    if len == 0 {
        return Ok(OrderSource { region: 0, offset: 0, len: 0 });
    }
    let Some(span) = tensor.span() else {
        return Err(PostError::Refused("the source has no memory of its own here: copy a lent tensor first"));
    };
    // By address, since two pools can have regions of the same number.
    let offset = (tensor.bytes().as_ptr() as usize).wrapping_sub(pool.region().base().as_ptr() as usize);
    if offset as u64 != span.offset || span.region != pool.region().id() {
        return Err(PostError::Refused("the source is not in the pool that this fabric shares"));
    }
    Ok(OrderSource { region: span.region, offset: span.offset, len })
}
