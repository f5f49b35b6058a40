//! Tensors of sizes that were used before are made, shared and dropped without heap memory.
//! Serialised tensors use heap memory in proportion to their values.
#![allow(unsafe_code)] // a global allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use tensorwire::internals::memory::{PoolOptions, Region, RegionOptions};
use tensorwire::{BufferRing, DType, Pool, Shape, StringTensor, Tensor, TensorMeta, VariantTensor};

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static HELD: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn count(taken: usize, given_back: usize) {
    // Per thread, so that tests in other threads are not counted.
    CALLS.with(|calls| calls.set(calls.get() + 1));
    // A reallocated block exists twice for a moment.
    let held = HELD.with(Cell::get) + taken as i64;
    PEAK.with(|peak| peak.set(peak.get().max(held)));
    HELD.with(|cell| cell.set(held - given_back as i64));
}

// SAFETY: each call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn calls(work: impl FnOnce()) -> u64 {
    let before = CALLS.with(Cell::get);
    work();
    CALLS.with(Cell::get) - before
}

/// Bytes that this thread has allocated and that were not freed.
pub fn held() -> i64 {
    HELD.with(Cell::get)
}

/// The most bytes that `work` held at once.
fn peak(work: impl FnOnce()) -> usize {
    let before = HELD.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    work();
    (PEAK.with(Cell::get) - before) as usize
}

fn pool() -> Pool {
    let region = Region::create(0, &RegionOptions::new(32 << 20)).expect("region");
    Pool::new(region, PoolOptions::default()).expect("pool")
}

fn meta(dims: &[u64]) -> TensorMeta {
    TensorMeta::new(DType::F32, Shape::new(dims).expect("shape")).expect("meta")
}

#[test]
fn the_counter_counts() {
    assert_eq!(calls(|| drop(std::hint::black_box(Box::new(1)))), 2);
    assert_eq!(peak(|| drop(std::hint::black_box(vec![0u8; 300]))), 300);
}

#[test]
fn making_sharing_and_dropping_tensors_of_known_sizes_uses_no_heap() {
    let pool = pool();
    let round = || {
        for size in [0, 1, 3, 100, 5000, 100_000] {
            let tensors = [(); 4].map(|()| {
                let mut tensor = pool.tensor(meta(&[1, 1, 1, 1, 1, size])).expect("room");
                tensor.as_mut_slice::<f32>().expect("floats").fill(1.0);
                tensor.freeze()
            });
            let others: [Tensor; 4] = tensors.clone();
            drop(tensors);
            let [tensor, shared, ..] = others;
            drop(tensor.try_into_mut().expect("the last handle").freeze());
            let other = shared.clone();
            drop((shared.make_mut(&pool).expect("room for a copy"), other));
        }
    };
    assert!(calls(round) > 0, "the first round fills the caches");
    // The second round replaces headers of tensors without bytes that have got blocks.
    round();
    assert_eq!(calls(round), 0);
    assert!(pool.is_empty());
}

#[test]
fn a_ring_uses_no_heap_after_it_was_made() {
    let pool = pool();
    let ring = BufferRing::new(&pool, meta(&[1000]), 3).expect("ring");
    let round = || {
        let frozen = ring.acquire().expect("free").freeze();
        let reader = frozen.clone();
        drop((frozen, reader));
    };
    round();
    assert_eq!(calls(|| (0..10).for_each(|_| round())), 0);
}

#[test]
fn strings_are_written_and_read_without_a_copy_of_them() {
    let pool = pool();
    let shape = Shape::new(&[3]).expect("shape");
    let words = StringTensor::new(shape, [vec![1; 1 << 20], vec![], vec![2; 1 << 20]]).expect("three");
    let mut tensor = None;
    let written = peak(|| tensor = Some(words.to_tensor(&pool).expect("room")));
    let tensor = tensor.expect("written");
    let read = peak(|| assert_eq!(StringTensor::from_tensor(&tensor).as_ref(), Ok(&words)));
    assert!(written < 4096 && read < 4096, "{written} bytes to write, {read} to read");
}

/// A tensor with these bytes as its serialised form.
fn serialized(pool: &Pool, dtype: DType, shape: Shape, form: &[u8]) -> Tensor {
    let meta = TensorMeta::serialized(dtype, shape, form.len() as u64).expect("meta");
    let mut tensor = pool.tensor(meta).expect("room");
    tensor.bytes_mut().copy_from_slice(form);
    tensor.freeze()
}

#[test]
fn values_of_another_kind_take_no_heap() {
    const N: usize = 100_000;
    let pool = pool();
    for (dtype, code, other) in [(DType::String, 7, 0x7a), (DType::Variant, 21, 0x42)] {
        // Only broken values, and broken values behind a correct one.
        let own = if dtype == DType::String { 0x42 } else { 0x7a };
        for head in [vec![8, code], vec![8, code, own, 0]] {
            let form = [head, [other, 0].repeat(N)].concat();
            let tensor = serialized(&pool, dtype, Shape::SCALAR, &form);
            let taken = peak(|| {
                let is_refused = match dtype {
                    DType::String => StringTensor::from_tensor(&tensor).is_err(),
                    _ => VariantTensor::from_tensor(&tensor).is_err(),
                };
                assert!(is_refused, "{dtype}");
            });
            assert!(taken < 4096, "{taken} bytes for {N} values of another kind in a tensor of {dtype}");
        }
    }
}

#[test]
fn what_a_peer_claims_takes_no_heap_and_what_comes_takes_what_it_must() {
    // The largest table, while it grows.
    const ELEMENT: usize = 3 * 120;
    let pool = pool();
    for n in [0, 1, 1000, 100_001] {
        let shape = Shape::new(&[n as u64]).expect("shape");
        // Empty strings and variants: with another shape than the tensor, which is refused, and
        // with its shape.
        let mut dim = vec![];
        prost::encoding::encode_varint(n as u64, &mut dim);
        let head =
            |code| [&[8, code, 0x12, dim.len() as u8 + 3, 0x12, dim.len() as u8 + 1, 8][..], &dim].concat();
        for (dtype, code, key) in [(DType::String, 7, 0x42), (DType::Variant, 21, 0x7a)] {
            let values = [key, 0].repeat(n);
            for head in [vec![8, code], head(code)] {
                let whole = head.len() > 2;
                let tensor = serialized(&pool, dtype, shape.clone(), &[head, values.clone()].concat());
                let taken = peak(|| {
                    let read = match dtype {
                        DType::String => StringTensor::from_tensor(&tensor).is_ok(),
                        _ => VariantTensor::from_tensor(&tensor).is_ok(),
                    };
                    assert_eq!(read, whole, "{n} of {dtype}");
                });
                assert!(taken <= ELEMENT * n + 4096, "{taken} bytes for {n} of {dtype}");
            }
        }
        // Dimensions without a shape, and a length without bytes.
        let many = [&[8, 7, 0x12][..], &[0x80, 0x80, 0x08], &[0x12, 0].repeat(1 << 16)].concat();
        let claim = [8, 7, 0x42, 0xff, 0xff, 0xff, 0xff, 0x7f];
        for form in [&many[..], &claim] {
            let tensor = serialized(&pool, DType::String, shape.clone(), form);
            let taken = peak(|| assert!(StringTensor::from_tensor(&tensor).is_err()));
            assert!(taken <= ELEMENT / 2 * form.len() + 4096, "{taken} bytes for {} that came", form.len());
        }
    }
}
