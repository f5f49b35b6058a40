//! A tensor with one owner, who may write it.

use super::view::{self, ViewError};
use super::{Span, Tensor};
use crate::memory::copy_from;
use crate::memory::pool::header::{Storage, TensorHeader};
use crate::wire::{DType, Element, Shape, TensorMeta};
use std::fmt;
use std::mem::ManuallyDrop;

/// A tensor with one owner, who may write it. [`TensorMut::freeze`] makes it a [`Tensor`], which
/// can be sent, shared and cloned.
///
/// ```
/// use tensorwire::{DType, Edge, Node};
///
/// fn send(node: &Node, edge: &Edge) -> Result<(), Box<dyn std::error::Error>> {
///     let mut tensor = node.tensor(DType::F32, &[2])?;
///     tensor.fill_from(&[1.0f32, 2.0])?;
///     node.step(1)?.send(edge, tensor.freeze())?;
///     Ok(())
/// }
/// ```
///
/// A frozen tensor can't be written:
/// ```compile_fail,E0382
/// # use tensorwire::TensorMut;
/// fn write_after_freeze(mut tensor: TensorMut) {
///     let frozen = tensor.freeze();
///     tensor.bytes_mut()[0] = 1; // it was moved
/// }
/// ```
/// A view ends where the tensor is frozen:
/// ```compile_fail,E0505
/// # use tensorwire::TensorMut;
/// fn keep_a_view(mut tensor: TensorMut) {
///     let view = tensor.bytes_mut();
///     let frozen = tensor.freeze();
///     view[0] = 1;
/// }
/// ```
/// A second writer is not possible:
/// ```compile_fail,E0599
/// # use tensorwire::TensorMut;
/// fn two_writers(tensor: TensorMut) -> (TensorMut, TensorMut) {
///     (tensor.clone(), tensor)
/// }
/// ```
pub struct TensorMut {
    header: ManuallyDrop<Box<TensorHeader>>,
}

/// Why a tensor can't take another element type and shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetMetaError {
    /// The tensor's block is too small.
    #[error(
        "{meta} has {needed} bytes, but the tensor's block has {capacity}: take a new tensor from the pool"
    )]
    TooSmall {
        /// The element type and shape that were asked for.
        meta: TensorMeta,
        /// Bytes that these take.
        needed: u64,
        /// Bytes of the tensor's block.
        capacity: u64,
    },
}

impl TensorMut {
    /// Makes a handle of a header that nothing else refers to. The bytes must be writable by this
    /// process.
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

    /// Dimensions in elements, outermost first. A scalar has none.
    pub fn shape(&self) -> &Shape {
        self.meta().shape()
    }

    /// Bytes of the tensor's block: the size of the tensor, rounded up.
    pub fn capacity(&self) -> u64 {
        self.header.capacity as u64
    }

    /// Sets another element type and shape. The bytes stay as they are.
    ///
    /// # Errors
    /// [`SetMetaError`] if they do not fit; the tensor is unchanged then.
    pub fn set_meta(&mut self, meta: TensorMeta) -> Result<(), SetMetaError> {
        let (needed, capacity) = (meta.bytes(), self.capacity());
        if needed > capacity {
            return Err(SetMetaError::TooSmall { meta, needed, capacity });
        }
        self.header.meta = meta;
        Ok(())
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `data` is good for `capacity` initialised bytes, at least meta.bytes() of them.
        // They are written only through this handle, which is borrowed for as long as the slice
        // lives.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// All bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`. This is the only handle and it is borrowed mutably. The storage is
        // a block of this process's region, which no peer can write to, or foreign memory. For
        // foreign memory the caller of `tensor_mut` vouched that nobody else uses the bytes.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }

    /// The elements.
    ///
    /// # Errors
    /// [`ViewError`] if the element type is not `T` or the bytes are not aligned for `T`. Also if a
    /// byte of a bool tensor is neither 0 nor 1.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], ViewError> {
        // SAFETY: as in `bytes`.
        unsafe { view::elements(self.meta(), self.header.data) }
    }

    /// The elements, for writing.
    ///
    /// # Errors
    /// As [`TensorMut::as_slice`]. The bytes of a new bool tensor are unspecified: call
    /// [`TensorMut::fill_from`] or [`Pool::zeroed`](super::Pool::zeroed) first.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], ViewError> {
        // SAFETY: as in `bytes_mut`.
        unsafe { view::elements_mut(&self.header.meta, self.header.data) }
    }

    /// Copies elements in, as many as the tensor has.
    ///
    /// # Errors
    /// [`ViewError`] if the element type or the number of elements differs; nothing is copied then.
    pub fn fill_from<T: Element>(&mut self, values: &[T]) -> Result<(), ViewError> {
        view::check_dtype::<T>(self.meta())?;
        let have = self.len() / size_of::<T>();
        if values.len() != have {
            return Err(ViewError::Length { have, given: values.len() });
        }
        // SAFETY: the element type is T's, so there are size_of_val(values) bytes on both sides.
        // They don't overlap: this is the only handle to its bytes and is borrowed mutably.
        // Elements have no padding, so all copied bytes are initialised.
        unsafe { copy_from(self.bytes_mut(), values.as_ptr().cast()) };
        Ok(())
    }

    /// Whether the bytes lie in memory of another allocator.
    pub fn is_foreign(&self) -> bool {
        matches!(self.header.storage, Storage::Foreign(_))
    }

    internal! {
        /// The part of this process's region that holds the bytes. `None` for a tensor without
        /// bytes or a foreign one.
        fn span(&self) -> Option<Span> {
            Span::of(&self.header)
        }
    }

    /// Whether [`TensorMut::span`] returns a part of the region.
    #[inline]
    pub(crate) fn is_in_pool(&self) -> bool {
        self.header.has_span()
    }

    /// Address of the first byte. Readable as long as this handle exists.
    pub fn as_ptr(&self) -> *const u8 {
        self.header.data.as_ptr()
    }

    /// Address of the first byte. Writable for [`TensorMut::capacity`] bytes as long as this handle
    /// exists.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.header.data.as_ptr()
    }

    /// Makes the tensor read-only and shareable.
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
