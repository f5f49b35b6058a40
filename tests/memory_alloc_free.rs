//! Tensors of sizes that were seen before are made, shared and dropped without heap memory.
#![allow(unsafe_code)] // a global allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use tensorwire::memory::{BufferRing, Pool, PoolOptions, Region, RegionOptions, Tensor};
use tensorwire::wire::{DType, Shape, TensorMeta};

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // Per thread, so that tests in other threads don't count.
    CALLS.with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: each call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count();
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
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
    // In the second one headers that served tensors without bytes, and then got blocks, are made anew.
    round();
    assert_eq!(calls(round), 0);
    assert!(pool.is_empty());
}

#[test]
fn a_ring_uses_no_heap_after_it_was_made() {
    let pool = pool();
    let ring = BufferRing::new(&pool, meta(&[1000]), 3).expect("ring");
    let round = || {
        let frozen = ring.next().expect("free").freeze();
        let reader = frozen.clone();
        drop((frozen, reader));
    };
    round();
    assert_eq!(calls(|| (0..10).for_each(|_| round())), 0);
}
