//! Memory that is read while a device writes to it: perftest's `ib_write_lat` detects writes so.
#![allow(unsafe_code)] // a byte that is not read through a tensor

use std::sync::atomic::{AtomicU8, Ordering};
use tensorwire::internals::fabric::{LinkId, Port, PostError};
use tensorwire::internals::wire::Grant;
use tensorwire::{Pool, TensorMut};

/// Memory that a peer may write until the program ends.
pub struct Landing {
    first: *const AtomicU8,
    len: usize,
    /// Keeps the memory mapped.
    _pool: Pool,
}

impl Landing {
    /// Grants the memory to the peer until the program ends.
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

    /// The current value of byte `bytes - 1`. Writes before it are visible to the reader (acquire).
    ///
    /// # Panics
    /// If the memory is smaller.
    #[inline(always)]
    pub fn last_of(&self, bytes: usize) -> u8 {
        self.byte(bytes - 1).load(Ordering::Acquire)
    }

    /// Sets byte `bytes - 1` to 0. A concurrent write of the peer would be lost.
    pub fn clear(&self, bytes: usize) {
        self.byte(bytes - 1).store(0, Ordering::Release);
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.len, "byte {at} of {}", self.len);
        // SAFETY: inside the granted tensor (just checked), which lies in the pool's mapping, held
        // here. The port owns the tensor until its grant is revoked, which this program never does.
        // So nothing in this process has a reference to these bytes. Bytes that a device writes are
        // seen through an atomic.
        unsafe { &*self.first.add(at) }
    }
}
