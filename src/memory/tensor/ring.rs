//! A fixed set of buffers that are used in turns.

use super::tensor_mut::TensorMut;
use crate::memory::fork::ForkGuard;
use crate::memory::pool::Pool;
use crate::memory::pool::error::PoolError;
use crate::memory::pool::header::{Storage, TensorHeader};
use crate::wire::TensorMeta;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A fixed set of buffers of one element type and shape, for an edge that carries a tensor in each
/// step.
///
/// [`BufferRing::acquire`] returns the buffer that has been free for longest. A buffer is free
/// again when its last handle is dropped, in this process or after it was sent.
///
/// ```
/// use tensorwire::{DType, Edge, Node};
///
/// fn send_gradients(node: &Node, edge: &Edge) -> Result<(), Box<dyn std::error::Error>> {
///     let ring = node.ring(DType::F32, &[256], 2)?;
///     for id in 0..10 {
///         let mut gradient = ring.acquire()?;
///         gradient.as_mut_slice::<f32>()?.fill(0.5);
///         node.step(id)?.send(edge, gradient.freeze())?;
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct BufferRing {
    home: Arc<RingBuffers>,
    meta: TensorMeta,
    buffers: usize,
}

/// The free buffers of a ring.
#[derive(Debug)]
pub(crate) struct RingBuffers {
    free: ArrayQueue<Box<TensorHeader>>,
    /// Whether the `BufferRing` still exists.
    open: AtomicBool,
    fork_guard: ForkGuard,
}

/// Why a ring gave no buffer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// All buffers are in use.
    #[error(
        "all {buffers} buffers {meta} of a ring are in use: wait for a reader to drop one, or make the ring \
         longer"
    )]
    Busy {
        /// Number of buffers of the ring.
        buffers: usize,
        /// Element type and shape of the buffers.
        meta: TensorMeta,
    },
    /// A ring of 0 buffers was asked for.
    #[error("a ring of 0 buffers was asked for: it must have at least 1")]
    Empty,
    /// The pool has no room for the buffers.
    #[error("the pool has no room for a ring: {0}")]
    Pool(#[from] PoolError),
}

impl BufferRing {
    /// Makes a ring and takes all its buffers from the pool.
    ///
    /// # Errors
    /// [`RingError`] if `buffers` is 0 or the pool has no room; nothing is taken then.
    pub fn new(pool: &Pool, meta: TensorMeta, buffers: usize) -> Result<BufferRing, RingError> {
        if buffers == 0 {
            return Err(RingError::Empty);
        }
        // The tensors come before the queue: a wrong number fails here, before it makes the queue
        // huge.
        let mut tensors = Vec::new();
        for _ in 0..buffers {
            tensors.push(pool.tensor(meta.clone())?);
        }
        let home = Arc::new(RingBuffers {
            free: ArrayQueue::new(buffers),
            open: AtomicBool::new(true),
            fork_guard: ForkGuard::of_this_process(),
        });
        for mut tensor in tensors {
            tensor.header_mut().ring = Some(Arc::clone(&home));
            drop(tensor);
        }
        Ok(BufferRing { home, meta, buffers })
    }

    /// Returns the buffer that has been free for longest. Its contents are unspecified.
    ///
    /// # Errors
    /// [`RingError::Busy`] if all buffers are in use.
    pub fn acquire(&self) -> Result<TensorMut, RingError> {
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

    /// Element type and shape of the buffers.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Number of buffers, in use or not.
    pub fn buffers(&self) -> usize {
        self.buffers
    }

    /// Number of buffers that are free now.
    pub fn free(&self) -> usize {
        self.home.free.len()
    }
}

impl Drop for BufferRing {
    fn drop(&mut self) {
        if self.home.fork_guard.in_child() {
            // A forked child: the buffers belong to the parent, and another thread of the parent
            // may have been at the queue.
            return std::mem::forget(Arc::clone(&self.home));
        }
        // Release and acquire with `put_back`, though nothing depends on it. A buffer that
        // `put_back` still pushes is found when the last buffer in use drops the queue.
        self.home.open.store(false, Ordering::Release);
        self.home.drain();
    }
}

impl RingBuffers {
    /// Takes back a buffer whose last handle is gone.
    pub(crate) fn put_back(self: Arc<Self>, header: Box<TensorHeader>) {
        debug_assert!(matches!(header.storage, Storage::Block(_) | Storage::Empty));
        let refused = if self.open.load(Ordering::Acquire) {
            // Never full: the queue has room for all buffers of the ring.
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
