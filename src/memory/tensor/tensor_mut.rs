//! A tensor with one owner, who may write to it.

use super::view::{self, ViewError};
use super::{Span, Tensor};
use crate::memory::pool::header::{Storage, TensorHeader};
use crate::wire::{DType, Element, Shape, TensorMeta};
use std::fmt;
use std::mem::ManuallyDrop;

/// A tensor with one owner, who may write to it.
///
/// To let others see it, [freeze](TensorMut::freeze) it; who sends a tensor can't write to it any more:
///
/// ```compile_fail,E0382
/// # use tensorwire::memory::{Pool, TensorMut};
/// fn write_after_freeze(mut tensor: TensorMut) {
///     let frozen = tensor.freeze();
///     tensor.bytes_mut()[0] = 1; // it was moved
/// }
/// ```
/// A view ends where the tensor is frozen:
/// ```compile_fail,E0505
/// # use tensorwire::memory::TensorMut;
/// fn keep_a_view(mut tensor: TensorMut) {
///     let view = tensor.bytes_mut();
///     let frozen = tensor.freeze();
///     view[0] = 1;
/// }
/// ```
/// And there is no second writer:
/// ```compile_fail,E0599
/// # use tensorwire::memory::TensorMut;
/// fn two_writers(tensor: TensorMut) -> (TensorMut, TensorMut) {
///     (tensor.clone(), tensor)
/// }
/// ```
pub struct TensorMut {
    header: ManuallyDrop<Box<TensorHeader>>,
}

/// Why a tensor can't have another element type and shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetMetaError {
    /// Its block is too small.
    #[error(
        "{meta} has {needed} bytes, but the tensor's block has {capacity}: take a new tensor from the pool"
    )]
    TooSmall {
        /// What it should have become.
        meta: TensorMeta,
        /// The bytes of that.
        needed: u64,
        /// The bytes that there are.
        capacity: u64,
    },
}

impl TensorMut {
    /// A handle to a header that nobody else refers to, and whose bytes are this process's to write.
    pub(crate) fn new(header: Box<TensorHeader>) -> TensorMut {
        debug_assert!(header.refs.is_one());
        debug_assert!(matches!(header.storage, Storage::Block(_) | Storage::Empty | Storage::Foreign(_)));
        TensorMut { header: ManuallyDrop::new(header) }
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.header.meta
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.meta().dtype()
    }

    /// Shape.
    pub fn shape(&self) -> &Shape {
        self.meta().shape()
    }

    /// Bytes that it can hold, at least as many as it has: what was asked for was rounded up.
    pub fn capacity(&self) -> u64 {
        self.header.capacity as u64
    }

    /// Gives it another element type and shape; the bytes stay as they are.
    ///
    /// # Errors
    /// [`SetMetaError`] if they don't fit; the tensor is as before then.
    pub fn set_meta(&mut self, meta: TensorMeta) -> Result<(), SetMetaError> {
        let (needed, capacity) = (meta.bytes(), self.capacity());
        if needed > capacity {
            return Err(SetMetaError::TooSmall { meta, needed, capacity });
        }
        self.header.meta = meta;
        Ok(())
    }

    /// All its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `data` is good for `capacity` initialised bytes, at least meta.bytes() of them, and written
        // to only through this handle, which is borrowed for as long as the slice lives.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// All its bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; this is the only handle and it is borrowed mutably. The storage is a block of
        // our own region, which no peer can write to, or foreign memory, of whose bytes who made the tensor vouched that nobody
        // else uses them.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }

    /// Its elements.
    ///
    /// # Errors
    /// [`ViewError`] if they are no `T`s.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], ViewError> {
        // SAFETY: as in `bytes`.
        unsafe { view::elements(self.meta(), self.header.data) }
    }

    /// Its elements, for writing.
    ///
    /// # Errors
    /// [`ViewError`] if they are no `T`s. A new bool tensor may have bytes that are none: use
    /// [`TensorMut::fill_from`] or [`Pool::zeroed`](super::Pool::zeroed) first.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], ViewError> {
        // SAFETY: as in `bytes_mut`.
        unsafe { view::elements_mut(&self.header.meta, self.header.data) }
    }

    /// Copies elements in, as many as it has.
    ///
    /// # Errors
    /// [`ViewError`] if the element type or the number differs; nothing was copied then.
    pub fn fill_from<T: Element>(&mut self, values: &[T]) -> Result<(), ViewError> {
        view::check_dtype::<T>(self.meta())?;
        let have = self.len() / size_of::<T>();
        if values.len() != have {
            return Err(ViewError::Length { have, given: values.len() });
        }
        // SAFETY: the element type is T's, so there are size_of_val(values) bytes on both sides. They don't
        // overlap: this is the only handle to its bytes and is borrowed mutably. Elements have no padding, so
        // all bytes that are copied are initialised.
        unsafe {
            let from = values.as_ptr().cast::<u8>();
            std::ptr::copy_nonoverlapping(from, self.as_mut_ptr(), size_of_val(values));
        }
        Ok(())
    }

    /// Whether its bytes lie in memory of another allocator.
    pub fn is_foreign(&self) -> bool {
        matches!(self.header.storage, Storage::Foreign(_))
    }

    /// Where its bytes lie in a region; `None` if it has none there.
    pub fn span(&self) -> Option<Span> {
        Span::of(&self.header)
    }

    /// Its first byte, good for reading as long as this handle is there.
    pub fn as_ptr(&self) -> *const u8 {
        self.header.data.as_ptr()
    }

    /// Its first byte, good for writing [`TensorMut::capacity`] bytes as long as this handle is there.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.header.data.as_ptr()
    }

    /// Makes it a tensor that anyone may read and nobody may write.
    pub fn freeze(self) -> Tensor {
        Tensor::new(self.into_header())
    }

    fn len(&self) -> usize {
        self.meta().bytes() as usize
    }

    pub(crate) fn header_mut(&mut self) -> &mut TensorHeader {
        &mut self.header
    }

    pub(crate) fn into_header(self) -> Box<TensorHeader> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once: `this` is not dropped and not used again.
        unsafe { ManuallyDrop::take(&mut this.header) }
    }
}

impl Drop for TensorMut {
    fn drop(&mut self) {
        // SAFETY: taken once: `self` is not used after its drop, and `into_header` forgets it.
        unsafe { ManuallyDrop::take(&mut self.header) }.release();
    }
}

impl fmt::Debug for TensorMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorMut")
            .field("meta", &format_args!("{}", self.meta()))
            .field("span", &self.span())
            .finish()
    }
}
