//! Back-pressure: allocations that wait until other tensors are dropped.

use super::process::Node;
use crate::memory::{BufferRing, PoolError, RingError, TensorMut};
use crate::rendezvous::Error;
use crate::wire::{DType, Shape, TensorMeta};
use std::cell::Cell;
use std::time::Duration;

/// How long an allocation looks for memory that peers have returned.
const LOOK_FOR_RETURNS: Duration = Duration::from_millis(1);

impl Node {
    /// A writable tensor with unspecified contents. If the pool is full, waits for free memory, for
    /// `timeout` at most, and makes progress meanwhile. This slows down a producer that is faster
    /// than its peers.
    ///
    /// # Errors
    /// If `dims` is not a valid shape, or the pool could never hold the tensor. If no memory was
    /// free in time, or the node has stopped.
    pub fn tensor_within(
        &self,
        dtype: DType,
        dims: &[u64],
        timeout: Duration,
    ) -> Result<TensorMut, TensorError> {
        let meta = TensorMeta::new(dtype, Shape::new(dims)?)?;
        self.try_until(timeout, || match self.pool.tensor(meta.clone()) {
            Err(error) if error.is_shortage() => {
                Attempt::Again(TensorError::NoRoomInTime { timeout, source: error })
            }
            result => Attempt::Over(result.map_err(TensorError::Pool)),
        })
    }

    /// As [`Node::tensor`], if no block is at hand.
    #[cold]
    pub(super) fn new_tensor(&self, dtype: DType, dims: &[u64]) -> Result<TensorMut, TensorError> {
        let meta = TensorMeta::new(dtype, Shape::new(dims)?)?;
        match self.pool.tensor(meta.clone()) {
            Err(PoolError::Exhausted { .. }) => self.tensor_of_returned_memory(&meta),
            made => Ok(made?),
        }
    }

    /// Makes a tensor once peers have returned memory. A sender that never polls has not seen that
    /// they have.
    fn tensor_of_returned_memory(&self, meta: &TensorMeta) -> Result<TensorMut, TensorError> {
        let made = self.try_until(LOOK_FOR_RETURNS, || match self.pool.tensor(meta.clone()) {
            Err(error @ PoolError::Exhausted { .. }) => Attempt::Again(TensorError::Pool(error)),
            result => Attempt::Over(result.map_err(TensorError::Pool)),
        });
        match made {
            Err(TensorError::Ended(_)) => Ok(self.pool.tensor(meta.clone())?),
            made => made,
        }
    }

    /// Acquires the next buffer of a ring. If all buffers are still read, waits for one, for
    /// `timeout` at most, and makes progress meanwhile.
    ///
    /// # Errors
    /// If no buffer was returned in time, or the node has stopped.
    pub fn acquire_within(&self, ring: &BufferRing, timeout: Duration) -> Result<TensorMut, TensorError> {
        self.try_until(timeout, || match ring.acquire() {
            Err(error @ RingError::Busy { .. }) => {
                Attempt::Again(TensorError::NoBufferInTime { timeout, source: error })
            }
            result => Attempt::Over(result.map_err(TensorError::Ring)),
        })
    }

    /// Repeats `attempt` between polls until it is over or the timeout has passed.
    fn try_until<T>(&self, timeout: Duration, attempt: impl Fn() -> Attempt<T>) -> Result<T, TensorError> {
        let (over, failed) = (Cell::new(None), Cell::new(None));
        let is_over = || {
            // A wait may ask again after the first `true`.
            if let Some(result) = over.take() {
                over.set(Some(result));
                return true;
            }
            match attempt() {
                Attempt::Again(error) => failed.set(Some(error)),
                Attempt::Over(result) => {
                    over.set(Some(result));
                    return true;
                }
            }
            false
        };
        if !is_over() {
            self.context.wait_until(self.context.now() + timeout, &is_over)?;
        }
        match (over.take(), failed.take()) {
            (Some(result), _) => result,
            (None, Some(error)) => Err(error),
            (None, None) => unreachable!("there was at least one attempt"),
        }
    }
}

/// The result of one attempt.
enum Attempt<T> {
    /// Failed; a later attempt may succeed.
    Again(TensorError),
    /// Succeeded, or failed for good.
    Over(Result<T, TensorError>),
}

/// Why a tensor or a ring could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The dimensions are not a valid shape.
    #[error(transparent)]
    Shape(#[from] crate::wire::ShapeError),
    /// The pool can't hold the tensor now.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The ring could not be made, or all its buffers are in use.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The pool had no free memory for the whole timeout.
    #[error("there was no room within {timeout:?}: {source}")]
    NoRoomInTime {
        /// The timeout of the call.
        timeout: Duration,
        /// The error of the last attempt.
        source: PoolError,
    },
    /// All buffers of the ring were in use for the whole timeout.
    #[error("no buffer was free within {timeout:?}: {source}")]
    NoBufferInTime {
        /// The timeout of the call.
        timeout: Duration,
        /// The error of the last attempt.
        source: RingError,
    },
    /// The node has stopped, or the loss of a peer has ended every call.
    #[error(transparent)]
    Ended(#[from] Error),
}
