use super::{bytes, meta, pool};
use crate::memory::{BufferRing, RingError};
use crate::wire::DType;
use std::thread;

#[test]
fn a_buffer_is_free_again_when_its_last_handle_is_dropped() {
    let pool = pool(1 << 16);
    let ring = BufferRing::new(&pool, bytes(100), 2).expect("ring");
    let first = ring.acquire().expect("free").freeze();
    let reader = first.clone();
    let second = ring.acquire().expect("free");
    assert_ne!(first.as_ptr(), second.as_ptr());
    let busy = RingError::Busy { buffers: 2, meta: bytes(100) };
    assert_eq!(ring.acquire().expect_err("none left"), busy);
    let place = first.as_ptr();
    drop(first);
    assert_eq!(ring.free(), 0, "a reader still has it");
    drop(reader);
    assert_eq!(ring.acquire().expect("free again").as_ptr(), place);
}

#[test]
fn the_buffer_that_was_free_for_longest_comes_next() {
    let ring = BufferRing::new(&pool(1 << 16), bytes(8), 3).expect("ring");
    let round = || (0..3).map(|_| ring.acquire().expect("free").as_ptr()).collect::<Vec<_>>();
    assert_eq!(round(), round());
    let all: std::collections::HashSet<_> = round().into_iter().collect();
    assert_eq!(all.len(), 3);
}

#[test]
fn a_buffer_comes_back_with_the_rings_meta() {
    let ring = BufferRing::new(&pool(1 << 16), bytes(64), 1).expect("ring");
    ring.acquire().expect("free").set_meta(meta(DType::F32, &[2])).expect("fits");
    assert_eq!(ring.acquire().expect("free").meta(), &bytes(64));
}

#[test]
fn buffers_return_to_the_pool_after_the_ring_whatever_goes_first() {
    let pool = pool(1 << 16);
    let ring = BufferRing::new(&pool, bytes(64), 3).expect("ring");
    let held = ring.acquire().expect("free");
    let frozen = ring.acquire().expect("free").freeze();
    assert_eq!(pool.stats().live_tensors, 3);
    drop(ring);
    assert_eq!(pool.stats().live_tensors, 2);
    drop(held);
    drop(frozen);
    assert!(pool.is_empty());
    let ring = BufferRing::new(&pool, bytes(64), 3).expect("ring");
    let held = ring.acquire().expect("free");
    drop((pool, ring));
    assert_eq!(held.bytes().len(), 64);
}

#[test]
fn a_ring_that_does_not_fit_takes_nothing() {
    let pool = pool(4096);
    assert!(matches!(BufferRing::new(&pool, bytes(3000), 2), Err(RingError::Pool(_))));
    assert!(pool.is_empty());
    assert_eq!(BufferRing::new(&pool, bytes(1), 0).expect_err("none"), RingError::Empty);
}

#[test]
fn readers_on_other_threads_give_buffers_back_while_the_ring_goes() {
    let pool = pool(1 << 16);
    for _ in 0..200 {
        let ring = BufferRing::new(&pool, bytes(64), 2).expect("ring");
        let buffer = ring.acquire().expect("free").freeze();
        thread::scope(|scope| {
            scope.spawn(move || drop(buffer));
            drop(ring);
        });
    }
    assert!(pool.is_empty());
}
