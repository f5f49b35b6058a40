//! A fixed set of buffers that are used again and again.

use super::tensor_mut::TensorMut;
use crate::memory::fork::ForkGuard;
use crate::memory::pool::Pool;
use crate::memory::pool::error::PoolError;
use crate::memory::pool::header::{Storage, TensorHeader};
use crate::wire::TensorMeta;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A fixed set of buffers of one element type and shape, for an edge on which a tensor goes every step.
///
/// [`BufferRing::next`] gives the buffer that has been free for longest. It needs no giving back: when the
/// last handle to it is dropped, here or where it was sent, written to or not, it is free again.
///
/// ```
/// # use tensorwire::memory::{BufferRing, Pool, PoolOptions, Region, RegionOptions};
/// # use tensorwire::wire::{DType, Shape, TensorMeta};
/// # let pool = Pool::new(Region::create(0, &RegionOptions::new(1 << 20))?, PoolOptions::default())?;
/// # fn send(_: tensorwire::memory::Tensor) {}
/// let ring = BufferRing::new(&pool, TensorMeta::new(DType::F32, Shape::new(&[256])?)?, 2)?;
/// for step in 0..10 {
///     let mut gradient = ring.next()?;
///     gradient.as_mut_slice::<f32>()?.fill(step as f32);
///     send(gradient.freeze());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct BufferRing {
    home: Arc<RingBuffers>,
    meta: TensorMeta,
    buffers: usize,
}

/// Where the buffers of a ring lie between two uses.
#[derive(Debug)]
pub(crate) struct RingBuffers {
    free: ArrayQueue<Box<TensorHeader>>,
    /// Whether there is still a ring to take buffers out.
    open: AtomicBool,
    fork_guard: ForkGuard,
}

/// Why a ring gave no buffer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// All buffers are in use.
    #[error(
        "all {buffers} buffers {meta} of a ring are in use: wait for a reader to drop one, or make the ring longer"
    )]
    Busy {
        /// How many the ring has.
        buffers: usize,
        /// What they are.
        meta: TensorMeta,
    },
    /// A ring needs buffers.
    #[error("a ring of 0 buffers was asked for: it must have at least 1")]
    Empty,
    /// The pool has no room for them.
    #[error("the pool has no room for a ring: {0}")]
    Pool(#[from] PoolError),
}

impl BufferRing {
    /// A ring of so many buffers, all of which are taken from the pool now.
    ///
    /// # Errors
    /// [`RingError`] if there are to be none or the pool has no room; nothing is taken then.
    pub fn new(pool: &Pool, meta: TensorMeta, buffers: usize) -> Result<BufferRing, RingError> {
        if buffers == 0 {
            return Err(RingError::Empty);
        }
        // All of them before the queue, whose size a wrong number would make huge.
        let mut tensors = Vec::new();
        for _ in 0..buffers {
            tensors.push(pool.tensor(meta.clone())?);
        }
        let home = Arc::new(RingBuffers {
            free: ArrayQueue::new(buffers),
            open: AtomicBool::new(true),
            fork_guard: ForkGuard::new(),
        });
        for mut tensor in tensors {
            tensor.header_mut().ring = Some(Arc::clone(&home));
            drop(tensor);
        }
        Ok(BufferRing { home, meta, buffers })
    }

    /// The buffer that has been free for longest. Its contents are unspecified.
    ///
    /// # Errors
    /// [`RingError::Busy`] if there is none.
    pub fn next(&self) -> Result<TensorMut, RingError> {
        if self.home.fork_guard.in_child() {
            return Err(RingError::Pool(PoolError::Forked));
        }
        let Some(mut header) = self.home.free.pop() else {
            return Err(RingError::Busy { buffers: self.buffers, meta: self.meta.clone() });
        };
        header.ring = Some(Arc::clone(&self.home));
        header.meta = self.meta.clone();
        Ok(TensorMut::new(header))
    }

    /// What the buffers are.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// How many buffers it has, in use or not.
    pub fn buffers(&self) -> usize {
        self.buffers
    }

    /// How many are free now.
    pub fn free(&self) -> usize {
        self.home.free.len()
    }
}

impl Drop for BufferRing {
    fn drop(&mut self) {
        if self.home.fork_guard.in_child() {
            // The buffers are the parent's, and another thread of it may have been at the queue.
            return std::mem::forget(Arc::clone(&self.home));
        }
        // Release and acquire with `put_back`, though nothing depends on it: a buffer that comes back at this
        // moment and is still put into the queue is found when the last buffer in use drops the queue.
        self.home.open.store(false, Ordering::Release);
        self.home.drain();
    }
}

impl RingBuffers {
    /// Takes back a buffer whose last handle is gone.
    pub(crate) fn put_back(self: Arc<Self>, header: Box<TensorHeader>) {
        debug_assert!(matches!(header.storage, Storage::Block(_) | Storage::Empty));
        let refused = if self.open.load(Ordering::Acquire) {
            // Never full: it has room for all buffers of the ring.
            self.free.push(header).err()
        } else {
            Some(header)
        };
        if let Some(header) = refused {
            header.release_to_pool();
        }
    }

    fn drain(&self) {
        while let Some(header) = self.free.pop() {
            header.release_to_pool();
        }
    }
}

impl Drop for RingBuffers {
    fn drop(&mut self) {
        self.drain();
    }
}
