//! Why a pool could not be made, or had no room.

use crate::memory::byte_count::ByteCount;
use crate::wire::TensorMeta;

/// Why a pool or a tensor could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// An option is out of range.
    #[error("pool option {option} is {value}: {allowed}")]
    Option {
        /// Which option.
        option: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The tensor is larger than the whole pool.
    #[error(
        "a tensor {meta} of {asked} bytes can't be had from a pool of {}: make the pool larger", ByteCount(*.capacity)
    )]
    TooLarge {
        /// The tensor.
        meta: TensorMeta,
        /// Its bytes.
        asked: u64,
        /// Bytes of the pool.
        capacity: u64,
    },
    /// There is no room now.
    #[error(
        "the pool is exhausted: {asked} bytes asked, {free} of {capacity} free, at least {largest_free} of them in \
         one piece; drop tensors, or make the pool larger"
    )]
    Exhausted {
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes that are free in all.
        free: u64,
        /// Bytes that can surely be had in one piece; up to an eighth more may be.
        largest_free: u64,
        /// Bytes of the pool.
        capacity: u64,
    },
    /// There is room, but the table of blocks is full.
    #[error(
        "the pool's table of {max_blocks} blocks is full ({free} bytes are free): drop tensors, or raise \
         `PoolOptions::max_blocks`"
    )]
    TableFull {
        /// How many blocks the pool can be in.
        max_blocks: u32,
        /// Bytes that are free.
        free: u64,
    },
    /// This process is a forked child of the one that made the pool.
    #[error(
        "the pool belongs to the process that this one was forked from: exec in the child, or fork before the pool is made"
    )]
    Forked,
}
