use super::{bytes, meta, pool};
use crate::memory::{
    ForeignError, ForeignMemory, ForeignRegistration, HeldOwner, Tensor, TensorMut, ViewError,
};
use crate::wire::DType;
use std::cell::UnsafeCell;
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};

/// A buffer of an allocator. Only the one `TensorMut` of its bytes writes them.
struct Buffer(Box<[UnsafeCell<u8>]>);

// SAFETY: the tests write through one tensor at a time.
unsafe impl Sync for Buffer {}

fn buffer(len: usize) -> Arc<Buffer> {
    Arc::new(Buffer((0..len).map(|at| UnsafeCell::new(at as u8)).collect()))
}

fn writable(buffer: &Arc<Buffer>) -> ForeignMemory {
    let base = UnsafeCell::raw_get(buffer.0.as_ptr());
    // SAFETY: the buffer is the owner and stays where it is; its cells may be written.
    unsafe { ForeignMemory::new_writable(buffer.clone(), base, buffer.0.len()) }
}

fn tensor_mut(memory: &ForeignMemory, pool: &crate::memory::Pool, n: u64, offset: u64) -> TensorMut {
    // SAFETY: each test uses these bytes by this tensor alone.
    unsafe { memory.tensor_mut(pool, bytes(n), offset) }.expect("inside")
}

/// A tensor of `n` bytes that a receive can be given, and the owner of its memory.
pub(crate) fn given(pool: &crate::memory::Pool, n: u64) -> (Arc<impl Sync + use<>>, TensorMut) {
    let owner = buffer(n as usize);
    let tensor = tensor_mut(&writable(&owner), pool, n, 0);
    (owner, tensor)
}

#[test]
fn a_tensor_of_foreign_memory_is_read_where_it_lies_and_keeps_the_owner() {
    let pool = pool(4096);
    let words = Arc::new([[1u8, 2, 3, 4], [5, 6, 7, 8]]);
    let (base, gone) = (words.as_ptr().cast::<u8>(), Arc::downgrade(&words));
    // SAFETY: the array is the owner, and nobody writes to it.
    let memory = unsafe { ForeignMemory::new(words, base, 8) };
    let tensor = memory.tensor(&pool, meta(DType::U8, &[2, 2]), 4).expect("inside");
    assert_eq!(tensor.as_ptr().addr(), base.addr() + 4);
    assert_eq!((tensor.bytes(), tensor.span(), tensor.is_foreign()), (&[5, 6, 7, 8][..], None, true));
    let clone = tensor.clone();
    drop((memory, tensor));
    assert_eq!(clone.bytes(), [5, 6, 7, 8]);
    drop(clone);
    assert!(gone.upgrade().is_none());
    assert!(pool.is_empty());
}

#[test]
fn a_tensor_outside_the_memory_is_refused() {
    let pool = pool(4096);
    let memory = ForeignMemory::from_owner(vec![0; 100]);
    for (n, offset) in [(101, 0), (1, 100), (2, u64::MAX), (u64::MAX >> 1, 1)] {
        let refused = memory.tensor(&pool, bytes(n), offset).expect_err("outside");
        assert_eq!(refused, ForeignError::Outside { meta: bytes(n), needed: n, offset, len: 100 });
    }
    assert!(memory.tensor(&pool, bytes(0), 100).expect("an empty end").bytes().is_empty());
    assert!(ForeignMemory::from_owner(Vec::new()).is_empty());
    assert!(pool.is_empty());
}

#[test]
fn elements_that_lie_at_an_odd_address_are_refused_as_a_slice() {
    let pool = pool(4096);
    let memory = ForeignMemory::from_owner(vec![0; 100]);
    let views = (0..4).map(|offset| memory.tensor(&pool, meta(DType::F32, &[3]), offset).expect("inside"));
    let refused = |tensor: Tensor| matches!(tensor.as_slice::<f32>(), Err(ViewError::Misaligned { .. }));
    assert_eq!(views.filter(|tensor| refused(tensor.clone())).count(), 3);
}

#[test]
fn foreign_memory_is_written_by_one_owner_and_not_after_it_is_frozen() {
    let pool = pool(4096);
    let buffer = buffer(64);
    let memory = writable(&buffer);
    let mut tensor = tensor_mut(&memory, &pool, 8, 16);
    tensor.bytes_mut()[0] = 200;
    tensor.set_meta(meta(DType::U16, &[2])).expect("four bytes");
    assert!(tensor.set_meta(bytes(9)).is_err());
    let frozen = tensor.freeze();
    assert_eq!(frozen.bytes(), [200, 17, 18, 19]);
    let frozen = frozen.try_into_mut().expect_err("who made it vouched for reading alone from then on");
    let copy = frozen.make_mut(&pool).expect("room");
    assert!(copy.span().is_some() && copy.bytes()[0] == 200);

    let memory = ForeignMemory::from_owner(vec![0; 8]);
    // SAFETY: it is refused.
    let refused = unsafe { memory.tensor_mut(&pool, bytes(8), 0) };
    assert_eq!(refused.map(|_| ()), Err(ForeignError::ReadOnly));
}

#[test]
fn the_pools_callback_drops_an_owner_whose_last_user_was_a_tensor() {
    let pool = pool(4096);
    let (sender, ended) = channel::<HeldOwner>();
    pool.drop_owners_with(move |owner| sender.send(owner).expect("open"));
    let memory = ForeignMemory::from_owner(vec![1; 8]);
    let tensor = memory.tensor(&pool, bytes(8), 0).expect("inside");
    drop(tensor.clone());
    drop(memory);
    assert!(ended.try_recv().is_err());
    drop(tensor);
    let owner = ended.try_recv().expect("it was the last");
    assert_eq!(owner.get().downcast_ref::<Vec<u8>>(), Some(&vec![1; 8]));
}

#[test]
fn a_registered_tensor_has_the_bytes_and_drops_its_registration() {
    let pool = pool(4096);
    let buffer = buffer(64);
    let tensor = tensor_mut(&writable(&buffer), &pool, 8, 8).freeze();
    let hold = Arc::new(());
    let gone: Weak<()> = Arc::downgrade(&hold);
    let registered = tensor.with_registration(&pool, ForeignRegistration { fabric: 3, key: 77, hold });
    assert!(tensor.registered().is_none());
    assert_eq!(registered.registered().map(|of| (of.fabric, of.key)), Some((3, 77)));
    assert_eq!((registered.bytes(), registered.meta()), (tensor.bytes(), tensor.meta()));
    assert_eq!(registered.foreign().expect("foreign").addresses().len(), 64);
    // Two tensors share the bytes: neither is unique.
    assert!(!tensor.is_unique());
    let registered = registered.try_into_mut().expect_err("not its own");
    drop(tensor);
    assert_eq!(registered.bytes()[0], 8);
    drop(registered);
    assert!(gone.upgrade().is_none());
    assert_eq!((Arc::strong_count(&buffer), pool.is_empty()), (1, true));
}
