//! The rules about memory: which side holds it, and for how long.

use crate::expect;
use crate::harness::{
    End, Got, Harness, exposed, fail_a_write_and_a_read, granted, immediate, loan_message, pair, pool,
    revoked, tensor, tensor_mut,
};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use tensorwire::internals::fabric::{Fabric, LinkFailure, LoanPermit, Port, PostError};
use tensorwire::{DType, ForeignMemory, Pool, Shape, TensorMeta, TensorMut};

pub fn what_has_failed_holds_no_memory<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let source = fail_a_write_and_a_read(&mut a, &mut b);
    // At once: the peer has not polled since.
    assert!(source.try_into_mut().is_ok(), "a failed write still holds its source");
    assert!(a.pool.is_empty(), "a failed read still holds its target: {:?}", a.pool.stats());
}

pub fn only_the_fabric_s_own_pool_can_be_reached_by_peers<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    b.port.post_receives(b.link, 1);
    let grant = granted(&mut b, 8);
    let refused = |result: Result<(), PostError>| {
        assert!(matches!(result, Err(PostError::Refused(_))), "{result:?}");
    };
    let foreign_pool = pool(1 << 20);
    // Not the first tensor of its pool, so that its offset differs from ours.
    let _first = tensor(&foreign_pool, &[0; 4096]);
    let foreign = tensor(&foreign_pool, &[1; 8]);
    refused(a.port.write(a.link, &foreign, 8, &grant, None));
    refused(a.port.expose(a.link, &foreign).map(|_| ()));
    let own = tensor(&a.pool, &[1; 8]);
    let lent = if a.port.limits(a.link).lends { &foreign } else { &own };
    let (mut source, mut permit) = (Some(lent.clone()), Some(LoanPermit::unbounded()));
    refused(a.port.lend(a.link, &mut source, &mut permit, &loan_message(1)));
    assert!(source.is_some() && permit.is_some(), "what was refused is not taken");
    drop(source);
    assert!(foreign.is_unique(), "what was refused is not held");
    a.port.send(a.link, b"still up").expect("posted");
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"still up");
}

/// Foreign memory that is written through its tensors.
struct Outside([AtomicU8; 64]);

/// A tensor of all bytes.
#[allow(unsafe_code)]
fn outside(pool: &Pool) -> TensorMut {
    let owner = Arc::new(Outside([const { AtomicU8::new(0) }; 64]));
    let base = owner.0.as_ptr().cast::<u8>().cast_mut();
    let meta = TensorMeta::new(DType::U8, Shape::new(&[64]).expect("a shape")).expect("meta");
    // SAFETY: the array is the owner, stays where it is, and is of cells.
    let memory = unsafe { ForeignMemory::new_writable(owner, base, 64) };
    // SAFETY: nobody else uses it.
    unsafe { memory.tensor_mut(pool, meta, 0) }.expect("inside")
}

pub fn memory_outside_the_pool_is_written_as_granted_or_refused<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    b.port.post_receives(b.link, 2);
    let inside = tensor_mut(&b.pool, 64);
    assert!(b.port.reaches(b.link, &inside) && b.port.reaches(b.link, &tensor_mut(&b.pool, 0)));
    let target = outside(&b.pool);
    if !b.port.reaches(b.link, &target) {
        let (error, target) = b.port.grant(b.link, target).expect_err("it is not reached");
        assert!(matches!(error, PostError::Refused(_)), "{error:?}");
        drop(target);
        return assert!(b.port.grant(b.link, inside).is_ok());
    }
    let grant = b.port.grant(b.link, target).expect("room");
    assert_eq!(grant.len, 64);
    let bytes: Vec<u8> = (0..64).collect();
    let (source, second) = (tensor(&a.pool, &bytes), tensor(&a.pool, &bytes[32..]));
    a.port.write(a.link, &source, 32, &grant, Some(immediate(1))).expect("posted");
    let behind = tensorwire::internals::wire::Grant { offset: grant.offset + 32, len: 32, ..grant };
    a.port.write(a.link, &second, 32, &behind, Some(immediate(2))).expect("posted");
    expect!(b.next(&mut a), Got::Immediate(_, 32) => ());
    expect!(b.next(&mut a), Got::Immediate(_, 32) => ());
    assert_eq!(revoked(&mut b, &grant).bytes(), source.bytes());
    let again = b.port.grant(b.link, outside(&b.pool)).expect("room");
    let beyond = tensorwire::internals::wire::Grant { offset: again.offset + 1, ..again };
    a.port.write(a.link, &source, 64, &beyond, None).expect("posted");
    let why = expect!(b.next(&mut a), Got::Down(why) => why);
    assert!(matches!(why, LinkFailure::Protocol(_)), "{why:?}");
}

/// Reads 8 bytes through a grant of `b`.
fn read_back<F: Fabric>(
    a: &mut End<F>,
    b: &mut End<F>,
    grant: &tensorwire::internals::wire::Grant,
) -> Vec<u8> {
    let into = tensor_mut(&a.pool, 8);
    a.port.read(a.link, into, grant).expect("posted");
    expect!(a.next(b), Got::ReadDone(target) => target.bytes().to_vec())
}

pub fn a_grant_of_one_kind_can_t_be_taken_back_as_the_other<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    b.port.post_receives(b.link, 1);
    let readable = exposed(&mut b, &[3; 8]);
    assert!(b.port.revoke(b.link, &readable).is_none());
    assert_eq!(read_back(&mut a, &mut b, &readable), [3; 8]);
    let writable = granted(&mut b, 8);
    b.port.withdraw(b.link, &writable);
    a.port.write_inline(a.link, &[4; 8], &writable, Some(immediate(1))).expect("posted");
    expect!(b.next(&mut a), Got::Immediate(..) => ());
    assert_eq!(revoked(&mut b, &writable).bytes(), [4; 8]);
}

pub fn what_comes_before_the_first_poll_waits_for_it<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let grant = granted(&mut b, 8);
    a.port.write_inline(a.link, &[5; 8], &grant, Some(immediate(1))).expect("posted");
    a.port.send(a.link, b"early").expect("posted");
    for _ in 0..100 {
        a.poll(); // advances virtual time
    }
    // Only now does the peer poll.
    b.port.post_receives(b.link, 2);
    expect!(b.next(&mut a), Got::Immediate(_, 8) => ());
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"early");
    assert_eq!(revoked(&mut b, &grant).bytes(), [5; 8]);
}
