//! A peer's region, mapped when it is first used.
#![allow(clippy::disallowed_types)] // holds the file until the first use; later uses only load a pointer

use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::loans::reclaim::{PeerProcess, ReclaimCandidate, Reclaimer};
use crate::memory::{PeerRegion, PeerRegionError};
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// A region of a peer's pool, mapped when it is first used. All links to one process share it, if
/// the process has an id here.
pub(super) struct LazyRegion {
    len: u64,
    /// The file, until it is mapped.
    file: Mutex<Option<OwnedFd>>,
    mapped: OnceLock<Result<Arc<PeerRegion>, Arc<PeerRegionError>>>,
    /// The loan tables of all links that have led to the region and still exist.
    tables: Mutex<Vec<Weak<LoanTable>>>,
    process: PeerProcess,
    reclaimer: Arc<Reclaimer>,
}

impl LazyRegion {
    /// A region of `process`, whose file has `len` bytes.
    pub(super) fn new(file: OwnedFd, len: u64, process: PeerProcess, reclaimer: Arc<Reclaimer>) -> Self {
        LazyRegion {
            len,
            file: Mutex::new(Some(file)),
            mapped: OnceLock::new(),
            tables: Mutex::default(),
            process,
            reclaimer,
        }
    }

    /// The region. The first call maps it.
    ///
    /// # Errors
    /// Why it can't be mapped.
    pub(super) fn region(&self) -> Result<&Arc<PeerRegion>, Arc<PeerRegionError>> {
        let mapped = self.mapped.get_or_init(|| {
            let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
            let gone = PeerRegionError::Os {
                tried: "finding the file of",
                claimed: self.len,
                source: std::io::ErrorKind::NotFound.into(),
            };
            let mapped = file.ok_or(gone).and_then(|file| PeerRegion::map(file, self.len));
            mapped.map(Arc::new).map_err(Arc::new)
        });
        mapped.as_ref().map_err(Clone::clone)
    }

    /// Records a loan table that may hold loans of the region from now on.
    pub(super) fn add_loan_table(&self, table: &Arc<LoanTable>) {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(table));
    }
}

impl Drop for LazyRegion {
    /// The last link to the region is gone. If something is still borrowed, the reclaimer takes the
    /// region over, so that a loan does not keep all of the memory.
    fn drop(&mut self) {
        let Some(Ok(region)) = self.mapped.take() else { return };
        if Arc::strong_count(&region) > 1 {
            let tables = std::mem::take(self.tables.get_mut().unwrap_or_else(PoisonError::into_inner));
            let region = Arc::downgrade(&region);
            self.reclaimer.add(ReclaimCandidate::new(region, tables, self.process.clone()));
        }
    }
}
