//! Which thread gets which block, and what becomes of a pool whose threads and handles end.

use super::{bytes, pool, region};
use crate::memory::{Pool, PoolOptions, Tensor, TensorMut};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;

const MIB: u64 = 1 << 20;

fn make(pool: &Pool, size: u64) -> TensorMut {
    pool.tensor(bytes(size)).expect("room")
}

fn places<'a>(tensors: impl IntoIterator<Item = &'a TensorMut>) -> Vec<u64> {
    tensors.into_iter().map(|tensor| tensor.span().expect("bytes").offset).collect()
}

fn on_another_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(body).join().expect("no panic"))
}

#[test]
fn a_thread_gets_the_block_that_it_dropped_last() {
    let pool = pool(MIB);
    let tensors = [(); 3].map(|()| make(&pool, 5000));
    let places_before = places(&tensors);
    tensors.into_iter().for_each(|tensor| drop(tensor.freeze()));
    let tensors = [(); 3].map(|()| make(&pool, 5000));
    assert_eq!(places(tensors.iter().rev()), places_before);
}

#[test]
fn blocks_that_other_threads_drop_return_to_the_thread_that_made_them() {
    let pool = pool(MIB);
    let tensors = [(); 3].map(|()| make(&pool, 5000));
    let places_before = places(&tensors);
    on_another_thread(|| {
        tensors.into_iter().for_each(|tensor| drop(tensor.freeze()));
        assert!(!places_before.contains(&places([&make(&pool, 5000)])[0]), "they are not this thread's");
    });
    let tensors = [(); 3].map(|()| make(&pool, 5000));
    assert_eq!(places(tensors.iter().rev()), places_before);
}

#[test]
fn landings_and_tensors_to_send_never_share_a_block() {
    let pool = pool(MIB);
    let landing = || pool.landing(&bytes(5000)).expect("room");
    let (source, received) = (make(&pool, 5000), landing());
    let (at_source, at_received) = (places([&source]), places([&received]));
    drop((received, source));
    let both = [make(&pool, 5000), make(&pool, 5000)];
    assert_eq!(places(&both[..1]), at_source);
    assert_ne!(places(&both[1..]), at_received);
    let received = landing();
    assert_eq!(places([&received]), at_received);
    // It stays a landing after it was sent on.
    let received = received.freeze().try_into_mut().expect("the only handle");
    on_another_thread(|| drop(received.freeze()));
    assert_eq!(places([&landing()]), at_received);
}

#[test]
fn an_exhausted_pool_takes_blocks_from_threads_that_wait() {
    let pool = Pool::new(region(MIB), PoolOptions { cache: Some(MIB), ..PoolOptions::default() });
    let pool = pool.expect("pool");
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                drop([make(&pool, 60_000), make(&pool, 60_000)]);
                barrier.wait();
                barrier.wait();
                drop(make(&pool, 60_000));
            });
        }
        barrier.wait();
        assert!(pool.stats().cached >= 6 * 60_000);
        drop(make(&pool, MIB));
        assert!(pool.is_empty());
        barrier.wait();
    });
    assert!(pool.is_empty());
}

#[test]
fn blocks_of_a_thread_that_has_ended_come_back() {
    let pool = pool(MIB);
    let (held, cached) = on_another_thread(|| (make(&pool, 5000), drop(make(&pool, 60_000))));
    let () = cached;
    assert_eq!(pool.stats().live_tensors, 1);
    drop(held);
    let stats = pool.stats();
    assert!(pool.is_empty() && stats.cached >= 65_000, "{stats:?}");
    drop(make(&pool, MIB));
}

#[test]
fn what_consumers_drop_stays_within_the_bound() {
    let pool = pool(8 * MIB);
    thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<Tensor>(16);
        scope.spawn(move || receive.into_iter().for_each(drop));
        for _ in 0..2000 {
            send.send(make(&pool, 10_000).freeze()).expect("the consumer");
            assert!(pool.stats().cached <= MIB, "{:?}", pool.stats());
        }
        let taken = pool.stats().capacity - pool.stats().free;
        assert!(taken <= 2 * MIB, "{taken} bytes for 18 tensors at a time");
    });
    assert!(pool.is_empty());
}

#[test]
fn an_ending_thread_makes_and_drops_tensors() {
    struct AtEnd(Pool, Option<Tensor>);
    impl Drop for AtEnd {
        fn drop(&mut self) {
            drop(self.1.take());
            let tensors = [make(&self.0, 5000), make(&self.0, MIB / 2)];
            drop((tensors, self.0.empty(), make(&self.0, 0)));
        }
    }
    thread_local! {
        static AT_END: Cell<Option<AtEnd>> = const { Cell::new(None) };
    }
    let pool = pool(MIB);
    let there = pool.clone();
    let thread = thread::spawn(move || {
        // Its destructor is registered before that of the thread's index, so it runs after it.
        AT_END.set(None);
        let tensor = make(&there, 5000).freeze();
        AT_END.set(Some(AtEnd(there, Some(tensor))));
    });
    thread.join().expect("no panic");
    let stats = pool.stats();
    assert_eq!((stats.live_tensors, stats.allocated, stats.free + stats.cached), (0, 0, MIB));
}

/// Whether the pool's state was dropped.
fn watch(pool: &Pool) -> Arc<AtomicBool> {
    struct Ended(Arc<AtomicBool>);
    impl Drop for Ended {
        fn drop(&mut self) {
            assert!(!self.0.swap(true, Ordering::Relaxed), "twice");
        }
    }
    let ended = Arc::new(AtomicBool::new(false));
    let with_pool = Ended(Arc::clone(&ended));
    pool.drop_owners_with(move |_| {
        let _ = &with_pool;
    });
    ended
}

#[test]
fn the_last_of_many_threads_ends_the_pool() {
    for round in 0..300 {
        let pool = match round % 2 {
            0 => pool(MIB / 4),
            _ => Pool::without_membarrier(region(MIB / 4)),
        };
        let ended = watch(&pool);
        let barrier = &Barrier::new(4);
        let tensors = [(); 3].map(|()| make(&pool, 5000).freeze());
        thread::scope(|scope| {
            for tensor in tensors {
                let (pool, ended) = (pool.clone(), &ended);
                scope.spawn(move || {
                    let mine = [make(&pool, 100), make(&pool, 5000)];
                    barrier.wait();
                    drop((pool, mine));
                    assert!(!ended.load(Ordering::Relaxed), "a tensor is held");
                    drop(tensor);
                });
            }
            barrier.wait();
            drop(pool);
        });
        assert!(ended.load(Ordering::Relaxed), "round {round}");
    }
}

/// Threads make, pass on and drop, so that each block goes through lists of several threads, while
/// the caches are emptied over and over.
#[test]
fn threads_that_pass_tensors_on_lose_none_while_the_caches_are_emptied() {
    for pool in [pool(2 * MIB), Pool::without_membarrier(region(2 * MIB))] {
        let ended = watch(&pool);
        thread::scope(|scope| {
            let (send, receive) = mpsc::sync_channel::<(u8, Tensor)>(8);
            for mark in 0..3u8 {
                let (pool, send) = (&pool, send.clone());
                scope.spawn(move || {
                    for step in 0..1500u64 {
                        let mut tensor = make(pool, 1 + step * 7919 % 30_000);
                        tensor.bytes_mut().fill(mark);
                        let tensor = tensor.freeze();
                        send.send((mark, tensor.clone())).expect("the reader");
                        assert!(tensor.bytes().iter().all(|byte| *byte == mark));
                    }
                });
            }
            drop(send);
            let emptied = &pool;
            scope.spawn(move || {
                for (step, (mark, tensor)) in receive.into_iter().enumerate() {
                    assert!(tensor.bytes().iter().all(|byte| *byte == mark));
                    if step % 64 == 0 {
                        assert!(emptied.tensor(bytes(2 * MIB)).is_err(), "a tensor is held");
                    }
                }
            });
        });
        let stats = pool.stats();
        assert!(pool.is_empty());
        assert_eq!((stats.allocated, stats.free + stats.cached), (0, stats.capacity));
        drop(make(&pool, 2 * MIB));
        drop(pool);
        assert!(ended.load(Ordering::Relaxed));
    }
}
