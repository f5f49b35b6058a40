//! Waiting for room: tensors and buffers that are had as soon as others have let go of theirs.

use super::process::Node;
use crate::memory::{BufferRing, PoolError, RingError, TensorMut};
use crate::rendezvous::Error;
use crate::wire::{DType, Shape, TensorMeta};
use std::cell::Cell;
use std::time::Duration;

impl Node {
    /// A writable tensor with unspecified contents; if the pool has no room, waits for it, for
    /// `timeout` at most, and makes progress meanwhile. This is the back-pressure for who makes
    /// tensors faster than peers take them.
    ///
    /// # Errors
    /// If the shape is none, the pool could never hold it, there was no room in time, or the node
    /// has stopped.
    pub fn tensor_within(
        &self,
        dtype: DType,
        dims: &[u64],
        timeout: Duration,
    ) -> Result<TensorMut, TensorError> {
        let meta = TensorMeta::new(dtype, Shape::new(dims)?)?;
        self.try_until(timeout, || match self.pool.tensor(meta.clone()) {
            Err(error @ (PoolError::Exhausted { .. } | PoolError::TableFull { .. })) => {
                Attempt::Again(TensorError::NoRoomInTime { timeout, source: error })
            }
            result => Attempt::Over(result.map_err(TensorError::Pool)),
        })
    }

    /// The next buffer of a ring; if all are still being read, waits for one, for `timeout` at
    /// most, and makes progress meanwhile.
    ///
    /// # Errors
    /// If none was given back in time, or the node has stopped.
    pub fn next_buffer(&self, ring: &BufferRing, timeout: Duration) -> Result<TensorMut, TensorError> {
        self.try_until(timeout, || match ring.acquire() {
            Err(error @ RingError::Busy { .. }) => Attempt::Again(TensorError::Ring(error)),
            result => Attempt::Over(result.map_err(TensorError::Ring)),
        })
    }

    /// Tries again and again while progress is made.
    fn try_until<T>(&self, timeout: Duration, attempt: impl Fn() -> Attempt<T>) -> Result<T, TensorError> {
        let (over, failed) = (Cell::new(None), Cell::new(None));
        let is_over = || {
            // Whoever waits may ask again after it was over.
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
            (None, None) => unreachable!("it was tried at least once"),
        }
    }
}

/// How one of several tries went.
enum Attempt<T> {
    /// It may work later.
    Again(TensorError),
    /// It worked, or never will.
    Over(Result<T, TensorError>),
}

/// Why a tensor or a ring could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The shape is none.
    #[error(transparent)]
    Shape(#[from] crate::wire::ShapeError),
    /// The pool has no room.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The pool had no room all the time.
    #[error("there was no room within {timeout:?}: {source}")]
    NoRoomInTime {
        /// How long it was waited for.
        timeout: Duration,
        /// What was in the way at last.
        source: PoolError,
    },
    /// The node came to its end.
    #[error(transparent)]
    Ended(#[from] Error),
}
