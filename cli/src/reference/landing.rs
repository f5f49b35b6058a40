//! Memory that a device writes to, looked at while it does: how perftest's `ib_write_lat` learns of a write.
#![allow(unsafe_code)] // a byte that is not read through a tensor

use std::sync::atomic::{AtomicU8, Ordering};
use tensorwire::internals::fabric::{LinkId, Port, PostError};
use tensorwire::internals::wire::Grant;
use tensorwire::{Pool, TensorMut};

/// Memory that a peer was granted for as long as the program runs.
pub struct Landing {
    first: *const AtomicU8,
    len: usize,
    /// Keeps the memory mapped.
    _pool: Pool,
}

impl Landing {
    /// Grants the peer memory of this pool, for good.
    ///
    /// # Errors
    /// As [`Port::grant`].
    pub fn grant(
        port: &mut impl Port,
        link: LinkId,
        mut target: TensorMut,
        pool: &Pool,
    ) -> Result<(Grant, Landing), PostError> {
        let (first, len) = (target.as_mut_ptr().cast_const().cast(), target.bytes().len());
        let grant = port.grant(link, target).map_err(|(error, _)| error)?;
        Ok((grant, Landing { first, len, _pool: pool.clone() }))
    }

    /// The last of the first `bytes`, as it is now. What was written before it is seen by whoever sees it.
    ///
    /// # Panics
    /// If there are not so many.
    #[inline(always)]
    pub fn last_of(&self, bytes: usize) -> u8 {
        self.byte(bytes - 1).load(Ordering::Acquire)
    }

    /// Sets that byte to 0. Nobody writes to it at the time, or a write is lost.
    pub fn clear(&self, bytes: usize) {
        self.byte(bytes - 1).store(0, Ordering::Release);
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.len, "byte {at} of {}", self.len);
        // SAFETY: inside the granted tensor (just checked), which lies in the pool's mapping, held here. The port owns
        // the tensor until its grant is revoked, which this program never does: so nothing in this process has a reference
        // to these bytes, and what a device writes besides is seen through an atomic.
        unsafe { &*self.first.add(at) }
    }
}
