use super::{bytes, meta, pool, region};
use crate::memory::{Pool, PoolError, PoolOptions, Tensor, TensorMut};
use crate::wire::DType;
use proptest::prelude::*;
use std::sync::mpsc;
use std::thread;

const MIB: u64 = 1 << 20;

#[test]
fn tensors_start_at_cache_lines_and_do_not_overlap() {
    let pool = pool(MIB);
    let tensors: Vec<_> = (1..200).map(|n| pool.tensor(bytes(n)).expect("room")).collect();
    let mut spans: Vec<_> = tensors.iter().map(|tensor| tensor.span().expect("bytes")).collect();
    spans.sort_by_key(|span| span.offset);
    assert!(spans.iter().all(|span| span.offset % 64 == 0 && span.region == 7));
    assert!(spans.windows(2).all(|pair| pair[0].offset + pair[0].len <= pair[1].offset));
    assert!(tensors.iter().all(|tensor| (tensor.as_ptr() as usize).is_multiple_of(64)));
}

#[test]
fn a_dropped_tensors_block_serves_the_next_one_of_its_size() {
    let pool = pool(MIB);
    let first = pool.tensor(bytes(5000)).expect("room").span();
    assert_eq!(pool.stats().live_tensors, 0);
    assert!(pool.stats().cached >= 5000);
    assert_eq!(pool.tensor(bytes(5001)).expect("room").span().map(|s| s.offset), first.map(|s| s.offset));
}

#[test]
fn an_exhausted_pool_says_how_much_was_asked_and_how_much_is_free() {
    let pool = pool(MIB);
    let held = pool.tensor(bytes(MIB / 2)).expect("room");
    let error = pool.tensor(bytes(MIB * 3 / 4)).expect_err("no room");
    let expected =
        PoolError::Exhausted { asked: MIB * 3 / 4, free: MIB / 2, largest_free: MIB / 2, capacity: MIB };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "the pool is exhausted: 786432 bytes asked, 524288 of 1048576 free, at least 524288 of them in one \
         piece; drop tensors, or raise pool_size"
    );
    drop(held);
    pool.tensor(bytes(MIB * 3 / 4)).expect("room again");
}

#[test]
fn a_tensor_larger_than_the_pool_has_its_own_error() {
    let error = pool(MIB).tensor(bytes(2 * MIB)).expect_err("too large");
    assert_eq!(
        error.to_string(),
        "a tensor u8[2097152] of 2097152 bytes does not fit in a pool of 1 MiB: raise pool_size"
    );
    assert!(matches!(pool(MIB).tensor(bytes(1 << 62)), Err(PoolError::TooLarge { .. })));
}

#[test]
fn a_pool_holds_one_tensor_of_its_own_size_whatever_that_is() {
    let pool = pool(100 << 12);
    for size in [100 << 12, 97 << 12] {
        pool.tensor(bytes(size)).expect("an empty pool").bytes_mut().fill(1);
    }
    assert!(pool.is_empty());
}

#[test]
fn cached_blocks_come_back_before_a_tensor_is_refused() {
    let pool = pool(MIB);
    let small: Vec<_> = (0..MIB / 4096).map(|_| pool.tensor(bytes(4096)).expect("room")).collect();
    assert_eq!(pool.stats().free, 0);
    drop(small);
    assert!(pool.stats().cached > 0);
    assert!(pool.stats().cached <= MIB / 8, "the caches are bounded");
    pool.tensor(bytes(MIB)).expect("the caches were emptied");
    assert_eq!(pool.stats().cached, 0);
}

#[test]
fn unused_sizes_do_not_fill_the_magazines_for_ever() {
    let pool = pool(MIB);
    for size in 0..64 {
        drop(pool.tensor(bytes(2000 + size * 1500)).expect("room"));
        assert!(pool.stats().cached <= MIB / 8, "{:?}", pool.stats());
    }
    let pair = || [pool.tensor(bytes(50_000)).expect("room"), pool.tensor(bytes(50_000)).expect("room")];
    drop(pair());
    let free = pool.stats().free;
    drop(pair());
    assert_eq!(pool.stats().free, free, "both came from the cache");
}

#[test]
fn a_pool_without_caches_works() {
    let options = PoolOptions { cache: Some(0), ..PoolOptions::default() };
    let pool = Pool::new(region(MIB), options).expect("pool");
    drop((pool.tensor(bytes(1)).expect("room"), pool.tensor(bytes(5000)).expect("room")));
    let stats = pool.stats();
    assert_eq!((stats.cached, stats.free), (0, MIB));
}

#[test]
fn caches_of_other_threads_come_back_too() {
    let options = PoolOptions { cache: Some(MIB), ..PoolOptions::default() };
    let pool = Pool::new(region(MIB), options).expect("pool");
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| drop(pool.tensor(bytes(60_000)).expect("room")));
        }
    });
    assert!(pool.stats().cached > 0);
    pool.tensor(bytes(MIB)).expect("all of it");
}

#[test]
fn a_full_table_of_blocks_has_its_own_error() {
    let options = PoolOptions { max_blocks: 16, ..PoolOptions::default() };
    let pool = Pool::new(region(MIB), options).expect("pool");
    let tensors: Vec<_> = std::iter::from_fn(|| pool.tensor(bytes(1)).ok()).collect();
    let error = pool.tensor(bytes(1)).expect_err("full");
    assert!(matches!(error, PoolError::TableFull { max_blocks: 16, .. }), "{error}");
    drop(tensors);
    pool.tensor(bytes(1)).expect("room again");
}

#[test]
fn the_table_has_room_for_all_blocks_of_the_smallest_size() {
    let pool = pool(1 << 16);
    let tensors: Vec<_> = std::iter::from_fn(|| pool.tensor(bytes(1)).ok()).collect();
    assert_eq!((tensors.len(), pool.stats().free), ((1 << 16) / 64, 0));
    let error = pool.tensor(bytes(1)).expect_err("full");
    assert!(!matches!(error, PoolError::TableFull { .. }), "{error}");
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let refused = |options| Pool::new(region(4096), options).expect_err("refused").to_string();
    let few = PoolOptions { max_blocks: 1, ..PoolOptions::default() };
    assert!(refused(few).starts_with("pool option max_blocks is 1"));
}

#[test]
fn a_freed_block_is_poisoned() {
    let pool = Pool::new(region(MIB), PoolOptions { poison: true, ..PoolOptions::default() });
    let pool = pool.expect("pool");
    let mut tensor = pool.tensor(bytes(100)).expect("room");
    assert_eq!(tensor.bytes(), [0; 100], "a new region is zero-filled");
    tensor.bytes_mut().fill(9);
    drop(tensor);
    assert_eq!(pool.tensor(bytes(100)).expect("room").bytes(), [0xA5; 100]);
    assert_eq!(pool.zeroed(bytes(100)).expect("room").bytes(), [0; 100]);
}

#[test]
fn a_tensor_without_bytes_takes_no_room() {
    let pool = pool(4096);
    let tensors: Vec<_> =
        (0..100).map(|_| pool.tensor(meta(DType::F64, &[3, 0])).expect("no room needed")).collect();
    assert_eq!(pool.stats().allocated, 0);
    assert_eq!(pool.stats().live_tensors, 100);
    assert_eq!((tensors[0].span(), tensors[0].as_slice::<f64>()), (None, Ok(&[][..])));
}

#[test]
fn the_memory_outlives_the_pool_and_goes_with_the_last_tensor() {
    let pool = pool(MIB);
    let fd = rustix::io::dup(pool.region().fd()).expect("dup");
    let mapped = || {
        let inode = rustix::fs::fstat(&fd).expect("stat").st_ino.to_string();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode))
    };
    let mut tensor = pool.tensor(bytes(1000)).expect("room");
    let frozen = pool.tensor(bytes(1000)).expect("room").freeze();
    drop(pool.tensor(bytes(64)).expect("one that is cached"));
    drop(pool);
    tensor.bytes_mut().fill(3);
    assert_eq!(frozen.clone().bytes().len(), 1000);
    drop(frozen);
    assert!(mapped());
    drop(tensor);
    assert!(!mapped());
}

#[test]
fn many_threads_make_pass_on_and_drop_tensors_and_none_is_lost() {
    let options = PoolOptions::default();
    let pool = Pool::new(region(4 * MIB), options).expect("pool");
    thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<(u64, Tensor)>(64);
        for thread in 0..4u64 {
            let (pool, send) = (&pool, send.clone());
            scope.spawn(move || {
                for step in 0..500 {
                    let mark = thread * 1000 + step;
                    let mut tensor = pool.tensor(meta(DType::U64, &[1 + step % 300])).expect("room");
                    tensor.as_mut_slice::<u64>().expect("u64").fill(mark);
                    let tensor = tensor.freeze();
                    send.send((mark, tensor.clone())).expect("reader");
                    assert!(tensor.as_slice::<u64>().expect("u64").iter().all(|value| *value == mark));
                }
            });
        }
        drop(send);
        scope.spawn(move || {
            for (mark, tensor) in receive {
                assert!(tensor.as_slice::<u64>().expect("u64").iter().all(|value| *value == mark));
            }
        });
    });
    let stats = pool.stats();
    assert!(pool.is_empty());
    assert_eq!((stats.allocated, stats.free + stats.cached), (0, stats.capacity));
    assert!(stats.peak > 0 && stats.peak <= stats.capacity);
}

#[test]
fn threads_that_exhaust_a_pool_get_errors_and_no_tensor_twice() {
    let pool = Pool::new(region(256 << 10), PoolOptions::default()).expect("pool");
    thread::scope(|scope| {
        for thread in 0..4u8 {
            let pool = &pool;
            scope.spawn(move || {
                let mut held: Vec<TensorMut> = Vec::new();
                for step in 0..2000u64 {
                    match pool.tensor(bytes(1 + step * 97 % 9000)) {
                        Ok(mut tensor) => {
                            tensor.bytes_mut().fill(thread);
                            held.push(tensor);
                        }
                        Err(PoolError::Exhausted { .. }) => held.clear(),
                        Err(other) => panic!("{other}"),
                    }
                    assert!(held.iter().all(|tensor| tensor.bytes()[0] == thread));
                }
            });
        }
    });
    assert!(pool.is_empty());
    drop(pool.tensor(bytes(256 << 10)).expect("all came back in one piece"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_sequence_of_making_and_dropping_keeps_contents_apart(
        steps in prop::collection::vec((any::<bool>(), 0u64..60_000, any::<prop::sample::Index>()), 1..150),
    ) {
        let pool = pool(MIB / 2);
        let mut live: Vec<(u8, TensorMut)> = Vec::new();
        for (mark, (give_back, size, which)) in steps.into_iter().enumerate() {
            let mark = mark as u8;
            if give_back && !live.is_empty() {
                live.swap_remove(which.index(live.len()));
            } else if let Ok(mut tensor) = pool.tensor(bytes(size)) {
                prop_assert_eq!(tensor.as_ptr() as usize % 64, 0);
                prop_assert!(tensor.capacity() >= size);
                tensor.bytes_mut().fill(mark);
                live.push((mark, tensor));
            }
        }
        for (mark, tensor) in &live {
            prop_assert!(tensor.bytes().iter().all(|byte| byte == mark));
        }
        drop(live);
        prop_assert!(pool.is_empty());
        prop_assert!(pool.tensor(bytes(MIB / 2)).is_ok(), "all given back");
    }
}
