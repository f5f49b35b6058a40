use super::{bytes, meta, pool};
use crate::memory::{Pool, PoolError, SetMetaError, Tensor, TensorMut, ViewError};
use crate::wire::DType;

#[test]
fn written_elements_are_read_after_freezing() {
    let pool = pool(1 << 16);
    let mut tensor = pool.tensor(meta(DType::F32, &[2, 3])).expect("room");
    tensor.fill_from(&[1f32, 2., 3., 4., 5., 6.]).expect("six floats");
    tensor.as_mut_slice::<f32>().expect("floats")[5] = 7.;
    let (span, tensor) = (tensor.span(), tensor.freeze());
    assert_eq!(tensor.as_slice::<f32>().expect("floats"), [1., 2., 3., 4., 5., 7.]);
    assert_eq!((tensor.span(), span.map(|span| span.len)), (span, Some(24)));
    assert_eq!((tensor.dtype(), tensor.shape().dims()), (DType::F32, &[2, 3][..]));
}

#[test]
fn a_view_of_another_type_is_refused() {
    let mut tensor = pool(4096).zeroed(meta(DType::F32, &[2])).expect("room");
    let refused = ViewError::DType { have: DType::F32, want: DType::I32 };
    assert_eq!(tensor.as_mut_slice::<i32>(), Err(refused.clone()));
    assert_eq!(tensor.fill_from(&[1i32, 2]), Err(refused.clone()));
    assert_eq!(tensor.freeze().as_slice::<i32>(), Err(refused));
}

#[test]
fn a_bool_view_is_refused_while_a_byte_is_no_bool() {
    let mut tensor = pool(4096).zeroed(meta(DType::Bool, &[3])).expect("room");
    tensor.bytes_mut()[1] = 2;
    let refused = ViewError::Bool { index: 1, value: 2 };
    assert_eq!(tensor.as_slice::<bool>(), Err(refused.clone()));
    assert_eq!(tensor.as_mut_slice::<bool>(), Err(refused));
    tensor.fill_from(&[true, false, true]).expect("bools");
    assert_eq!(tensor.freeze().as_slice::<bool>(), Ok(&[true, false, true][..]));
}

#[test]
fn a_slice_of_another_length_does_not_fill_a_tensor() {
    let mut tensor = pool(4096).zeroed(meta(DType::U16, &[3])).expect("room");
    assert_eq!(tensor.fill_from(&[1u16, 2]), Err(ViewError::Length { have: 3, given: 2 }));
    assert_eq!(tensor.bytes(), [0; 6]);
}

#[test]
fn a_scalar_has_one_element() {
    let mut tensor = pool(4096).tensor(meta(DType::Complex128, &[])).expect("room");
    let one = num_complex::Complex::new(1.0, -1.0);
    tensor.fill_from(&[one]).expect("one element");
    assert_eq!(tensor.freeze().as_slice(), Ok(&[one][..]));
}

#[test]
fn only_the_last_handle_becomes_writable_again() {
    let pool = pool(4096);
    let tensor = pool.zeroed(bytes(8)).expect("room").freeze();
    let other = tensor.clone();
    assert!(!tensor.is_unique());
    let tensor = tensor.try_into_mut().expect_err("there is another handle");
    drop(other);
    assert!(tensor.is_unique());
    let mut tensor = tensor.try_into_mut().expect("the last handle");
    tensor.bytes_mut()[0] = 1;
    assert_eq!(tensor.freeze().bytes(), [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn make_mut_copies_only_if_there_are_other_handles() {
    let pool = pool(1 << 16);
    let tensor = pool.zeroed(bytes(8)).expect("room").freeze();
    let place = tensor.as_ptr();
    let tensor = tensor.make_mut(&pool).expect("in place");
    assert_eq!(tensor.as_ptr(), place);
    let tensor = tensor.freeze();
    let other = tensor.clone();
    let mut copy = tensor.make_mut(&pool).expect("a copy");
    assert_ne!(copy.as_ptr(), place);
    copy.bytes_mut().fill(1);
    assert_eq!((other.bytes(), copy.bytes()), (&[0; 8][..], &[1; 8][..]));
    assert!(other.is_unique());
}

#[test]
fn make_mut_without_room_gives_the_tensor_back() {
    let pool = pool(4096);
    let tensor = pool.zeroed(bytes(4096)).expect("room").freeze();
    let other = tensor.clone();
    let error = tensor.make_mut(&pool).expect_err("no room for a copy");
    assert!(matches!(error.pool_error(), PoolError::Exhausted { .. }));
    let text = error.to_string();
    assert!(text.starts_with("no writable copy of a tensor u8[4096]: the pool is exhausted"), "{text}");
    let tensor = error.into_tensor();
    assert_eq!(tensor.as_ptr(), other.as_ptr());
}

#[test]
fn a_question_mark_passes_an_error_of_make_mut_on() {
    fn copy(tensor: Tensor, pool: &Pool) -> Result<TensorMut, Box<dyn std::error::Error + Send + Sync>> {
        Ok(tensor.make_mut(pool)?)
    }
    let pool = pool(4096);
    let tensor = pool.zeroed(bytes(4096)).expect("room").freeze();
    let error = copy(tensor.clone(), &pool).expect_err("no room for a copy");
    assert!(error.source().is_some_and(|source| source.is::<PoolError>()));
    assert!(!tensor.is_unique(), "the error holds a handle");
    drop(error);
    assert!(tensor.is_unique());
}

#[test]
fn a_tensor_takes_any_shape_that_fits_its_block() {
    let pool = pool(1 << 16);
    let mut tensor = pool.zeroed(meta(DType::F32, &[16])).expect("room");
    tensor.set_meta(meta(DType::U8, &[8, 8])).expect("64 bytes");
    assert_eq!(tensor.bytes().len(), 64);
    tensor.set_meta(meta(DType::F32, &[0])).expect("no bytes");
    assert_eq!(tensor.span(), None);
    tensor.set_meta(meta(DType::F64, &[8])).expect("64 bytes again");
    let before = tensor.meta().clone();
    let capacity = tensor.capacity();
    let large = meta(DType::U8, &[capacity + 1]);
    let refused = SetMetaError::TooSmall { meta: large.clone(), needed: capacity + 1, capacity };
    assert_eq!(tensor.set_meta(large), Err(refused));
    assert_eq!(tensor.meta(), &before);
}

#[test]
fn a_shape_of_high_rank_works_and_is_forgotten_with_the_tensor() {
    let pool = pool(4096);
    drop(pool.tensor(meta(DType::U8, &[1; 200])).expect("room"));
    assert_eq!(pool.tensor(bytes(1)).expect("room").shape().rank(), 1);
}

#[test]
fn handles_are_shown_without_contents() {
    let pool = pool(4096);
    let tensor = pool.zeroed(meta(DType::F32, &[2])).expect("room");
    let span = "Some(Span { region: 7, offset: 0, len: 8 })";
    assert_eq!(format!("{tensor:?}"), format!("TensorMut {{ meta: f32[2], span: {span} }}"));
    let shown = format!("Tensor {{ meta: f32[2], handles: 1, span: {span}, lent: false, foreign: false }}");
    assert_eq!(format!("{:?}", tensor.freeze()), shown);
}

#[test]
fn handles_go_to_other_threads() {
    fn check<T: Send + Sync>() {}
    check::<Pool>();
    check::<Tensor>();
    check::<TensorMut>();
    check::<crate::memory::LentBytes>();
    check::<crate::memory::BufferRing>();
    check::<crate::memory::PeerRegion>();
}
