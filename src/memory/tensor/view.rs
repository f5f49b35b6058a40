//! Views of a tensor's bytes as elements.

use crate::wire::{DType, Element, Shape, TensorMeta};
use std::ptr::NonNull;
use std::sync::LazyLock;

/// Why a tensor can't be viewed as slice of an element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The tensor has another element type.
    #[error("a tensor of {have} was viewed as {want}")]
    DType {
        /// The tensor's element type.
        have: DType,
        /// The element type of the view.
        want: DType,
    },
    /// A byte of a bool tensor is neither 0 nor 1.
    #[error(
        "byte {index} of a bool tensor is {value}, neither 0 nor 1: a new tensor's contents are unspecified, \
         so fill it with `fill_from` or make it with `Pool::zeroed`"
    )]
    Bool {
        /// Index of the byte.
        index: usize,
        /// Value of the byte.
        value: u8,
    },
    /// The first byte is not aligned for the element type.
    #[error("elements of {dtype} must lie at multiples of {align} bytes; these start {over} bytes after one")]
    Misaligned {
        /// The element type.
        dtype: DType,
        /// Alignment of the element type, in bytes.
        align: usize,
        /// Bytes between the last multiple of the alignment and the first byte.
        over: usize,
    },
    /// [`TensorMut::fill_from`](crate::TensorMut::fill_from) got a slice of another length.
    #[error("a tensor of {have} elements was filled from {given}")]
    Length {
        /// Elements of the tensor.
        have: usize,
        /// Elements of the slice.
        given: usize,
    },
}

/// The meta-data of a header that lies in a cache.
pub(crate) static PLACEHOLDER: LazyLock<TensorMeta> =
    LazyLock::new(|| TensorMeta::new(DType::U8, Shape::SCALAR).expect("one byte is a tensor"));

/// The elements at `data` as `T`s. Checks the element type, the alignment and, for bool, the
/// values.
///
/// # Safety
/// `meta.bytes()` bytes at `data` must be readable, initialised, and not written to for `'a`.
pub(crate) unsafe fn elements<'a, T: Element>(
    meta: &TensorMeta,
    data: NonNull<u8>,
) -> Result<&'a [T], ViewError> {
    let len = check::<T>(meta, data)?;
    // SAFETY: the element type is T's, so there are meta.bytes() = len * size_of::<T>() bytes,
    // which the caller vouches for. They are aligned (checked). Each bit pattern is a T: checked
    // for bool, and promised by the sealed trait for the others.
    Ok(unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<T>(), len) })
}

/// As [`elements`], for writing.
///
/// # Safety
/// `meta.bytes()` bytes at `data` must be readable, writable, initialised, and used by nobody else
/// for `'a`.
pub(crate) unsafe fn elements_mut<'a, T: Element>(
    meta: &TensorMeta,
    data: NonNull<u8>,
) -> Result<&'a mut [T], ViewError> {
    let len = check::<T>(meta, data)?;
    // SAFETY: as in `elements`, and the caller vouches that nobody else uses the bytes.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.as_ptr().cast::<T>(), len) })
}

/// Checks that the bytes can be viewed as `T`s, and returns the number of elements.
fn check<T: Element>(meta: &TensorMeta, data: NonNull<u8>) -> Result<usize, ViewError> {
    check_dtype::<T>(meta)?;
    check_alignment(T::DTYPE, align_of::<T>(), data)?;
    let len = meta.bytes() as usize / size_of::<T>();
    if T::DTYPE == DType::Bool {
        // SAFETY: both callers require that this many bytes are readable, initialised and not
        // written to now.
        let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr(), len) };
        if let Some(index) = bytes.iter().position(|byte| *byte > 1) {
            return Err(ViewError::Bool { index, value: bytes[index] });
        }
    }
    Ok(len)
}

pub(crate) fn check_dtype<T: Element>(meta: &TensorMeta) -> Result<(), ViewError> {
    if meta.dtype() == T::DTYPE {
        return Ok(());
    }
    Err(ViewError::DType { have: meta.dtype(), want: T::DTYPE })
}

pub(crate) fn check_alignment(dtype: DType, align: usize, data: NonNull<u8>) -> Result<(), ViewError> {
    let over = data.as_ptr() as usize % align;
    if over == 0 { Ok(()) } else { Err(ViewError::Misaligned { dtype, align, over }) }
}
