//! Leaked bytes: a peer whose link is gone still reads them, so the pool never reuses them.

use super::{bytes, region};
use crate::memory::{BufferRing, PeerRegion, Pool, PoolError, PoolOptions, RingError, Tensor};

const LEN: u64 = 1 << 16;

/// A pool that poisons freed blocks, so that reuse shows.
fn pool() -> Pool {
    Pool::new(region(LEN), PoolOptions { poison: true, ..PoolOptions::default() }).expect("pool")
}

fn filled(pool: &Pool, len: u64) -> Tensor {
    let mut tensor = pool.tensor(bytes(len)).expect("room");
    tensor.bytes_mut().fill(7);
    tensor.freeze()
}

/// The pool's region as a peer maps it.
fn mapped(pool: &Pool) -> PeerRegion {
    PeerRegion::map(rustix::io::dup(pool.region().fd()).expect("dup"), LEN).expect("maps")
}

/// Whether the peer reads the bytes that `filled` wrote.
fn is_as_it_was(peer: &PeerRegion, offset: u64, len: u64) -> bool {
    let start = peer.bytes_at(offset, len).expect("inside");
    // SAFETY: inside the mapping, which lives as long as the slice; the test proves that nobody
    // writes there.
    unsafe { std::slice::from_raw_parts(start, len as usize) }.iter().all(|byte| *byte == 7)
}

/// Writes to every byte that the pool can allocate.
fn overwrite(pool: &Pool) {
    let mut all = Vec::new();
    while let Ok(mut tensor) = pool.tensor(bytes(64)) {
        tensor.bytes_mut().fill(99);
        all.push(tensor);
    }
    assert!(!all.is_empty());
}

#[test]
fn leaked_bytes_are_not_reused_while_the_pool_goes_on() {
    let pool = pool();
    let peer = mapped(&pool);
    let (alone, shared) = (filled(&pool, 1000), filled(&pool, 5000));
    let spans = [&alone, &shared].map(|tensor| tensor.span().expect("in the pool"));
    let mine = shared.clone();
    alone.leak();
    shared.leak();
    assert!(mine.is_unique() && mine.bytes().iter().all(|byte| *byte == 7));
    let mine = mine.try_into_mut().expect_err("it is read elsewhere");
    let mut copy = mine.clone().make_mut(&pool).expect("room");
    copy.bytes_mut().fill(1);
    drop((mine, copy));
    assert!(pool.is_empty());
    overwrite(&pool);
    assert!(spans.iter().all(|span| is_as_it_was(&peer, span.offset, span.len)));
    let whole = pool.tensor(bytes(LEN));
    assert!(matches!(whole, Err(PoolError::Exhausted { .. })), "{whole:?}");
}

#[test]
fn a_leaked_buffer_does_not_return_to_its_ring() {
    let pool = pool();
    let peer = mapped(&pool);
    let ring = BufferRing::new(&pool, bytes(64), 2).expect("ring");
    let mut buffer = ring.acquire().expect("free");
    buffer.bytes_mut().fill(7);
    let buffer = buffer.freeze();
    let offset = buffer.span().expect("in the pool").offset;
    buffer.leak();
    let other = ring.acquire().expect("free");
    assert!(matches!(ring.acquire(), Err(RingError::Busy { .. })));
    drop((other, ring));
    overwrite(&pool);
    assert!(is_as_it_was(&peer, offset, 64));
}

#[test]
fn leaked_bytes_do_not_keep_the_pool_and_stay_readable_for_the_peer() {
    let pool = pool();
    let peer = mapped(&pool);
    let tensor = filled(&pool, 5000);
    let span = tensor.span().expect("in the pool");
    let base = pool.region().base().as_ptr().addr();
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
        let start = format!("{base:x}-");
        maps.lines().any(|line| line.starts_with(&start) && line.contains("memfd:tensorwire"))
    };
    let mine = tensor.clone();
    tensor.leak();
    drop(pool);
    assert!(is_mapped(), "a tensor is held");
    drop(mine);
    assert!(!is_mapped());
    assert!(is_as_it_was(&peer, span.offset, span.len));
    assert!(Tensor::empty().is_unique(), "nothing to leak is nothing to keep");
    Tensor::empty().leak();
}
