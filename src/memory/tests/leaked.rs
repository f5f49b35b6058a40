//! Bytes that are never used again, as a peer reads them of whom nothing is heard any more.

use super::{bytes, region};
use crate::memory::{BufferRing, PeerRegion, Pool, PoolError, PoolOptions, RingError, Tensor};

const LEN: u64 = 1 << 16;

/// A pool that fills what is freed, so that it shows.
fn pool() -> Pool {
    Pool::new(region(LEN), PoolOptions { poison: true, ..PoolOptions::default() }).expect("pool")
}

fn filled(pool: &Pool, len: u64) -> Tensor {
    let mut tensor = pool.tensor(bytes(len)).expect("room");
    tensor.bytes_mut().fill(7);
    tensor.freeze()
}

/// What a peer has mapped of it.
fn mapped(pool: &Pool) -> PeerRegion {
    PeerRegion::map(rustix::io::dup(pool.region_fd()).expect("dup"), LEN).expect("maps")
}

/// Whether the peer sees what was written there at first.
fn is_as_it_was(peer: &PeerRegion, offset: u64, len: u64) -> bool {
    let start = peer.bytes_at(offset, len).expect("inside");
    // SAFETY: inside the mapping, which lives as long as the slice; that nobody writes there is what is tested.
    unsafe { std::slice::from_raw_parts(start, len as usize) }.iter().all(|byte| *byte == 7)
}

/// Writes to every byte that the pool has to give.
fn overwrite(pool: &Pool) {
    let mut all = Vec::new();
    while let Ok(mut tensor) = pool.tensor(bytes(64)) {
        tensor.bytes_mut().fill(99);
        all.push(tensor);
    }
    assert!(!all.is_empty());
}

#[test]
fn surrendered_bytes_are_written_by_nobody_while_the_pool_goes_on() {
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
fn a_surrendered_buffer_does_not_return_to_its_ring() {
    let pool = pool();
    let peer = mapped(&pool);
    let ring = BufferRing::new(&pool, bytes(64), 2).expect("ring");
    let mut buffer = ring.next().expect("free");
    buffer.bytes_mut().fill(7);
    let buffer = buffer.freeze();
    let offset = buffer.span().expect("in the pool").offset;
    buffer.leak();
    let other = ring.next().expect("free");
    assert!(matches!(ring.next(), Err(RingError::Busy { .. })));
    drop((other, ring));
    overwrite(&pool);
    assert!(is_as_it_was(&peer, offset, 64));
}

#[test]
fn what_was_surrendered_does_not_keep_the_pool_and_stays_what_the_peer_reads() {
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
