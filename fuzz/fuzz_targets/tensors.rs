//! The serialised form of strings and variants: values that are read can be written, and are then
//! read as the same values.
//!
//! The first byte says which of the two and the rank, up to seven; then a byte for each dimension;
//! the rest is the form.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::memory::{LockPolicy, PagePolicy, PoolOptions, Region, RegionOptions};
use tensorwire::{DType, Pool, Shape, StringTensor, Tensor, TensorMeta, VariantTensor};

/// Bytes of an error's text at most: a shape of the highest rank is in it.
const MAX_ERROR: usize = 16 * 1024;

thread_local! {
    static POOL: Pool = {
        let plain = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
        let options = RegionOptions { lock: LockPolicy::No, ..plain };
        let region = Region::create(0, &options).expect("a region");
        Pool::new(region, PoolOptions::default()).expect("a pool")
    };
}

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let Some((dims, form)) = rest.split_at_checked(usize::from(kind >> 1 & 7)) else { return };
    let dims: Vec<u64> = dims.iter().map(|dim| u64::from(*dim)).collect();
    let dtype = if kind & 1 == 0 { DType::String } else { DType::Variant };
    POOL.with(|pool| match dtype {
        DType::String => strings(pool, &tensor(pool, dtype, &dims, form)),
        _ => variants(pool, &tensor(pool, dtype, &dims, form)),
    });
});

fn tensor(pool: &Pool, dtype: DType, dims: &[u64], form: &[u8]) -> Tensor {
    let shape = Shape::new(dims).expect("a few small dimensions");
    let meta = TensorMeta::serialized(dtype, shape, form.len() as u64).expect("a short form");
    let mut tensor = pool.tensor(meta).expect("room");
    tensor.bytes_mut().copy_from_slice(form);
    tensor.freeze()
}

fn strings(pool: &Pool, tensor: &Tensor) {
    match StringTensor::from_tensor(tensor) {
        Ok(read) => {
            let total: usize = read.values().iter().map(|value| value.len()).sum();
            assert!(total < tensor.bytes().len());
            let again = read.to_tensor(pool).expect("room");
            // Ignored fields are not written again, and long encodings get shorter.
            assert!(again.bytes().len() <= tensor.bytes().len() + 2);
            assert_eq!(StringTensor::from_tensor(&again).as_ref(), Ok(&read));
        }
        Err(error) => assert!(error.to_string().len() < MAX_ERROR),
    }
}

fn variants(pool: &Pool, tensor: &Tensor) {
    match VariantTensor::from_tensor(tensor) {
        Ok(read) => {
            let again = read.to_tensor(pool).expect("room");
            assert_eq!(VariantTensor::from_tensor(&again).as_ref(), Ok(&read));
        }
        Err(error) => assert!(error.to_string().len() < MAX_ERROR),
    }
}
