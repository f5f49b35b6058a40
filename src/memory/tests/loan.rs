use super::{bytes, meta, pool, region};
use crate::memory::{
    GiveBack, Lender, LentBytes, LentError, PeerRegion, Pool, PoolOptions, Tensor, ViewError,
};
use crate::wire::{DType, Shape, TensorMeta};
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct Returned(Mutex<Vec<u32>>);

impl GiveBack for Returned {
    fn give_back(&self, index: u32) {
        self.0.lock().expect("lock").push(index);
    }
}

/// A peer that holds a tensor with the bytes 0, 1, 2, ... 255 at the start of its region.
fn peer() -> (Tensor, Arc<PeerRegion>) {
    // Not poisoned: a process that is killed leaves its memory as it is.
    let pool =
        Pool::new(region(4096), PoolOptions { poison: false, ..PoolOptions::default() }).expect("pool");
    let mut tensor = pool.tensor(bytes(256)).expect("room");
    tensor.bytes_mut().iter_mut().zip(0..=255).for_each(|(byte, value)| *byte = value);
    assert_eq!(tensor.span().map(|span| span.offset), Some(0));
    let fd = rustix::io::dup(pool.region().fd()).expect("dup");
    let mapped = PeerRegion::map(fd, pool.region().len()).expect("maps");
    (tensor.freeze(), Arc::new(mapped))
}

fn lend(peer: &Arc<PeerRegion>, sink: &Arc<Returned>, offset: u64, len: u64) -> Option<LentBytes> {
    let sink: Arc<dyn GiveBack> = Arc::clone(sink) as _;
    Lender::new(Arc::clone(peer), sink).part(offset, len).map(|part| part.take(5))
}

fn returned(sink: &Returned) -> Vec<u32> {
    sink.0.lock().expect("lock").clone()
}

#[test]
fn a_lent_tensor_is_read_in_place_and_given_back_once() {
    let (_held, peer) = peer();
    let (sink, pool) = (Arc::new(Returned::default()), pool(4096));
    let lent = lend(&peer, &sink, 64, 8).expect("inside");
    let tensor = Tensor::from_lent(&pool, &meta(DType::U16, &[4]), lent).expect("8 bytes");
    let other = tensor.clone();
    assert!(tensor.is_lent());
    assert_eq!(tensor.span(), None);
    assert_eq!(tensor.bytes(), [64, 65, 66, 67, 68, 69, 70, 71]);
    assert_eq!(tensor.as_slice::<u16>().expect("aligned")[0], u16::from_ne_bytes([64, 65]));
    drop(tensor);
    assert!(returned(&sink).is_empty());
    drop(other);
    assert_eq!(returned(&sink), [5]);
    assert!(pool.is_empty());
}

#[test]
fn bytes_outside_the_peers_region_are_not_lent() {
    let (_held, peer) = peer();
    let sink = Arc::new(Returned::default());
    for (offset, len) in [(4096, 1), (4090, 7), (u64::MAX, 2), (2, u64::MAX), (0, 4097)] {
        assert!(lend(&peer, &sink, offset, len).is_none(), "{offset} + {len}");
    }
    assert!(returned(&sink).is_empty(), "no loan began");
    assert!(lend(&peer, &sink, 4096, 0).expect("an empty end").is_empty());
}

#[test]
fn a_loan_of_the_wrong_kind_comes_back_with_the_reason() {
    let (_held, peer) = peer();
    let (sink, pool) = (Arc::new(Returned::default()), pool(4096));
    let refused = |meta: TensorMeta| {
        let lent = lend(&peer, &sink, 0, 8).expect("inside");
        Tensor::from_lent(&pool, &meta, lent).expect_err("refused").0
    };
    assert_eq!(refused(bytes(9)), LentError::Length { lent: 8, needed: 9 });
    assert!(matches!(refused(meta(DType::Bool, &[8])), LentError::DType { .. }));
    let long = TensorMeta::serialized(DType::String, Shape::SCALAR, 9).expect("meta");
    assert_eq!(refused(long), LentError::Length { lent: 8, needed: 9 });
}

#[test]
fn lent_elements_at_an_odd_address_are_refused_as_a_slice() {
    let (_held, peer) = peer();
    let (sink, pool) = (Arc::new(Returned::default()), pool(4096));
    let lent = lend(&peer, &sink, 1, 8).expect("inside");
    let tensor = Tensor::from_lent(&pool, &meta(DType::F32, &[2]), lent).expect("8 bytes");
    let refused = ViewError::Misaligned { dtype: DType::F32, align: 4, over: 1 };
    assert_eq!(tensor.as_slice::<f32>(), Err(refused));
    assert_eq!(tensor.bytes()[0], 1);
}

#[test]
fn a_lent_tensor_becomes_writable_only_as_a_copy() {
    let (_held, peer) = peer();
    let (sink, pool) = (Arc::new(Returned::default()), pool(4096));
    let tensor =
        Tensor::from_lent(&pool, &bytes(4), lend(&peer, &sink, 8, 4).expect("inside")).expect("4 bytes");
    let tensor = tensor.try_into_mut().expect_err("the peer's");
    let mut copy = tensor.make_mut(&pool).expect("room");
    assert_eq!(returned(&sink), [5]);
    copy.bytes_mut()[0] = 100;
    assert_eq!(copy.freeze().bytes(), [100, 9, 10, 11]);
}

#[test]
fn a_peers_memory_stays_readable_after_the_peer_is_gone() {
    let (held, peer) = peer();
    let sink = Arc::new(Returned::default());
    let pool = pool(4096);
    let tensor =
        Tensor::from_lent(&pool, &bytes(4), lend(&peer, &sink, 4, 4).expect("inside")).expect("4 bytes");
    drop((held, peer));
    assert_eq!(tensor.bytes(), [4, 5, 6, 7]);
    drop(pool);
    assert_eq!(tensor.bytes(), [4, 5, 6, 7]);
}
