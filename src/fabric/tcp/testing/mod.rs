//! Helpers of this module's tests, and a hostile peer for tests and fuzz targets.

#[cfg(feature = "fuzzing")]
pub mod fuzz;
#[cfg(test)]
mod giving_up_tests;
pub(crate) mod hostile_peer;
pub(crate) mod hostile_program;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod repair_tests;
#[cfg(test)]
mod send_buffer_tests;
#[cfg(test)]
mod socket_tests;
#[cfg(test)]
mod stranger_tests;

use crate::memory::{LockPolicy, Pool, PoolOptions, Region, RegionOptions, Tensor, TensorMut};
use crate::wire::{DType, Shape, TensorMeta};

/// A small pool.
pub(crate) fn pool() -> Pool {
    pool_of(1 << 20)
}

/// A pool of so many bytes.
pub(crate) fn pool_of(bytes: u64) -> Pool {
    let options = RegionOptions { lock: LockPolicy::No, ..RegionOptions::new(bytes) };
    Pool::new(Region::create(0, &options).expect("a region"), PoolOptions::default()).expect("a pool")
}

/// A tensor of `len` zero bytes.
pub(crate) fn tensor_mut(pool: &Pool, len: usize) -> TensorMut {
    let shape = Shape::new(&[len as u64]).expect("a shape");
    pool.zeroed(TensorMeta::new(DType::U8, shape).expect("meta")).expect("room")
}

/// A tensor of these bytes.
pub(crate) fn tensor(pool: &Pool, bytes: &[u8]) -> Tensor {
    let mut tensor = tensor_mut(pool, bytes.len());
    tensor.bytes_mut().copy_from_slice(bytes);
    tensor.freeze()
}
