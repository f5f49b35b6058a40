//! A peer's region, mapped when it is first used.
#![allow(clippy::disallowed_types)] // the file until the first use; later uses only load a pointer

use crate::memory::PeerRegion;
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A region of a peer's pool, mapped when it is first used. The links to one process have it in common.
pub(super) struct LazyRegion {
    len: u64,
    /// Until it is mapped.
    file: Mutex<Option<OwnedFd>>,
    mapped: OnceLock<Result<Arc<PeerRegion>, String>>,
}

impl LazyRegion {
    /// A region whose file has so many bytes.
    pub(super) fn new(file: OwnedFd, len: u64) -> Self {
        LazyRegion { len, file: Mutex::new(Some(file)), mapped: OnceLock::new() }
    }

    /// The region, which the first call maps.
    ///
    /// # Errors
    /// Why it can't be mapped.
    pub(super) fn region(&self) -> Result<&Arc<PeerRegion>, String> {
        let mapped = self.mapped.get_or_init(|| {
            let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
            let file = file.ok_or("its file is gone")?;
            PeerRegion::map(file, self.len).map(Arc::new).map_err(|error| error.to_string())
        });
        mapped.as_ref().map_err(Clone::clone)
    }
}
