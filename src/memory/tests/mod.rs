//! Tests that need several parts of this module.

pub(crate) mod foreign;
mod leaked;
mod loan;
mod magazines;
mod pool;
mod region;
mod relocated;
mod ring;
mod tensor;

use super::{LockPolicy, PagePolicy, Pool, PoolOptions, Region, RegionOptions};
use crate::wire::{DType, Shape, TensorMeta};

/// A small region on plain pages.
fn region(bytes: u64) -> Region {
    let options =
        RegionOptions { pages: PagePolicy::Plain, lock: LockPolicy::No, ..RegionOptions::new(bytes) };
    Region::create(7, &options).expect("region")
}

/// A small pool.
fn pool(bytes: u64) -> Pool {
    Pool::new(region(bytes), PoolOptions::default()).expect("pool")
}

fn meta(dtype: DType, dims: &[u64]) -> TensorMeta {
    TensorMeta::new(dtype, Shape::new(dims).expect("shape")).expect("meta")
}

fn bytes(n: u64) -> TensorMeta {
    meta(DType::U8, &[n])
}
