//! Errors of pools.

use crate::memory::byte_count::ByteCount;
use crate::wire::TensorMeta;

/// Why a pool or a tensor could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// An option is out of range.
    #[error("pool option {option} is {value}: {allowed}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Value that was given.
        value: u64,
        /// Allowed values.
        allowed: &'static str,
    },
    /// The tensor is larger than the whole pool.
    #[error(
        "a tensor {meta} of {asked} bytes does not fit in a pool of {}: raise pool_size",
        ByteCount(*.capacity)
    )]
    TooLarge {
        /// Element type and shape of the tensor.
        meta: TensorMeta,
        /// Bytes of the tensor.
        asked: u64,
        /// Bytes of the pool.
        capacity: u64,
    },
    /// No free range is large enough now.
    #[error(
        "the pool is exhausted: {asked} bytes asked, {free} of {capacity} free, at least {largest_free} of \
         them in one piece; drop tensors, or raise pool_size"
    )]
    Exhausted {
        /// Bytes that were asked for.
        asked: u64,
        /// Free bytes of the pool, in all.
        free: u64,
        /// Bytes that surely fit in one piece; up to an eighth more may fit.
        largest_free: u64,
        /// Bytes of the pool.
        capacity: u64,
    },
    /// The pool has free bytes, but its table of blocks is full.
    #[error(
        "the pool's table of {max_blocks} blocks is full ({free} bytes are free): drop tensors, or make \
         fewer and larger ones"
    )]
    TableFull {
        /// Blocks that the pool may consist of, free ones included.
        max_blocks: u32,
        /// Free bytes of the pool.
        free: u64,
    },
    /// This process was forked from the one that made the pool.
    #[error(
        "the pool belongs to the process that this one was forked from: exec in the child, or fork before \
         the pool is made"
    )]
    Forked,
}

impl PoolError {
    /// Whether the allocation may succeed once other tensors are dropped.
    pub fn is_shortage(&self) -> bool {
        matches!(self, PoolError::Exhausted { .. } | PoolError::TableFull { .. })
    }
}
