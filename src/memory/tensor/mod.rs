//! Tensors: [`Tensor`] can be read by many, [`TensorMut`] is written by its one owner.

pub(crate) mod ring;
pub(crate) mod tensor_mut;
pub(crate) mod view;

use self::tensor_mut::TensorMut;
use self::view::ViewError;
use crate::memory;
use crate::memory::loan::{LentBytes, LentError};
use crate::memory::pool::Pool;
use crate::memory::pool::error::PoolError;
use crate::memory::pool::header::{Storage, TensorHeader};
use crate::wire::{DType, Element, Shape, TensorMeta};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// The part of a region that holds a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Number of the region.
    pub region: u16,
    /// Offset of the first byte from the start of the region, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    #[inline]
    pub(crate) fn of(header: &TensorHeader) -> Option<Span> {
        let len = header.meta.bytes();
        let (Storage::Block(block), Some(pool)) = (&header.storage, header.pool()) else { return None };
        let (region, offset) = pool.place(block);
        (len > 0).then_some(Span { region, offset, len })
    }
}

/// A read-only tensor. A clone is another handle to the same bytes.
///
/// ```
/// use tensorwire::{DType, Node, Tensor};
///
/// fn ones(node: &Node) -> Result<Tensor, Box<dyn std::error::Error>> {
///     let mut tensor = node.tensor(DType::F32, &[2, 3])?;
///     tensor.as_mut_slice::<f32>()?.fill(1.0);
///     let tensor = tensor.freeze();
///     assert_eq!(tensor.as_slice::<f32>()?, [1.0; 6]);
///     Ok(tensor)
/// }
/// ```
///
/// A `Tensor` has no method that writes:
/// ```compile_fail,E0599
/// # use tensorwire::Tensor;
/// fn write(mut tensor: Tensor) {
///     tensor.bytes_mut()[0] = 1; // there is no such method
/// }
/// ```
/// A view does not outlive the handle that it was taken from:
/// ```compile_fail,E0505
/// # use tensorwire::Tensor;
/// fn keep_a_view(tensor: Tensor) -> u8 {
///     let bytes = tensor.bytes();
///     let writable = tensor.try_into_mut();
///     bytes[0]
/// }
/// ```
pub struct Tensor {
    /// A leaked `Box<TensorHeader>`. The drop of the last handle turns it back into a box.
    header: NonNull<TensorHeader>,
}

// SAFETY: a handle gives `&TensorHeader`, which is Sync, to any thread. The last handle gives the
// `Box<TensorHeader>`, which is Send, to the thread that drops it; `RefCount` orders all earlier
// uses before that drop.
unsafe impl Send for Tensor {}
// SAFETY: as above. Through `&Tensor` a thread can also clone, which counts up atomically.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Makes the first handle to a header that nothing else refers to.
    pub(crate) fn new(header: Box<TensorHeader>) -> Tensor {
        debug_assert!(header.refs.is_one());
        Tensor { header: NonNull::from(Box::leak(header)) }
    }

    /// A tensor without elements, as the value of a branch that was not taken. [`Pool::empty`] does
    /// the same with heap memory from the pool's caches.
    ///
    /// [`Pool::empty`]: super::Pool::empty
    pub fn empty() -> Tensor {
        Tensor::without_elements(TensorHeader::empty())
    }

    /// Makes a tensor without elements of a header without bytes.
    pub(crate) fn without_elements(mut header: Box<TensorHeader>) -> Tensor {
        // Never fails: a shape with a 0 in it has a byte count of 0.
        if let Ok(meta) = Shape::new(&[0]).and_then(|shape| TensorMeta::new(DType::U8, shape)) {
            header.meta = meta;
        }
        Tensor::new(header)
    }

    internal! {
        /// A tensor whose bytes lie in a peer's region. `pool` supplies only the header.
        ///
        /// Refuses [`DType::Bool`]: booleans are checked when they are viewed, and the peer could
        /// change them after the check. `LentBytes` says how far a peer is trusted.
        ///
        /// # Errors
        /// `LentError` with the bytes, if their number differs from that of `meta` or the element
        /// type cannot be lent.
        #[inline(always)] // on the short path
        fn from_lent(
            pool: &Pool,
            meta: &TensorMeta,
            bytes: LentBytes,
        ) -> Result<Tensor, (LentError, LentBytes)> {
            if meta.dtype() == DType::Bool {
                let why = "its bytes must be checked, and the peer could change them after that";
                return Err((LentError::DType { dtype: meta.dtype(), why }, bytes));
            }
            let (lent, needed) = (bytes.len() as u64, meta.bytes());
            if lent != needed {
                return Err((LentError::Length { lent, needed }, bytes));
            }
            let mut header = pool.bare();
            header.meta.clone_from(meta);
            header.hold_lent(bytes);
            Ok(Tensor::new(header))
        }
    }

    pub(crate) fn header(&self) -> &TensorHeader {
        // SAFETY: the header lives as long as any handle to it. While a `Tensor` exists, no thread
        // has a mutable reference to the header.
        unsafe { self.header.as_ref() }
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.header().meta
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.meta().dtype()
    }

    /// Dimensions in elements, outermost first. A scalar has none.
    pub fn shape(&self) -> &Shape {
        self.meta().shape()
    }

    /// All bytes: the elements, or the serialised form.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `data` is good for meta.bytes() initialised bytes while this handle exists, and
        // no thread writes to them while a `Tensor` exists. (For lent bytes the peer vouches for
        // that.)
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.meta().bytes() as usize) }
    }

    /// The elements.
    ///
    /// # Errors
    /// [`ViewError`] if the element type is not `T` or the bytes are not aligned for `T`. Also if a
    /// byte of a bool tensor is neither 0 nor 1.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], ViewError> {
        // SAFETY: as in `bytes`.
        unsafe { view::elements(self.meta(), self.header().data) }
    }

    /// Whether the bytes lie in a peer's region.
    pub fn is_lent(&self) -> bool {
        matches!(self.header().storage, Storage::Lent(_))
    }

    /// Whether the bytes lie in memory of another allocator.
    pub fn is_foreign(&self) -> bool {
        matches!(self.header().storage, Storage::Foreign(_) | Storage::Registered(..))
    }

    /// Whether this is the only handle. The answer stays true until this handle is cloned.
    pub fn is_unique(&self) -> bool {
        self.header().refs.is_one()
    }

    internal! {
        /// The part of this process's region that holds the bytes. `None` for a tensor without
        /// bytes, a lent one and a foreign one.
        fn span(&self) -> Option<Span> {
            Span::of(self.header())
        }
    }

    /// Whether [`Tensor::span`] returns a part of the region.
    #[inline]
    pub(crate) fn is_in_pool(&self) -> bool {
        self.header().has_span()
    }

    /// Address of the first byte. Readable as long as this handle exists.
    pub fn as_ptr(&self) -> *const u8 {
        self.header().data.as_ptr()
    }

    /// Makes the tensor writable again.
    ///
    /// # Errors
    /// The unchanged tensor, if other handles exist, or if the bytes belong to a peer or another
    /// allocator. Also if they were leaked to a borrower whose link is gone.
    pub fn try_into_mut(self) -> Result<TensorMut, Tensor> {
        let ours = matches!(self.header().storage, Storage::Block(_) | Storage::Empty);
        // `is_unique` comes before `is_leaked`: its acquire makes the flags of former handles
        // visible.
        if !ours || !self.is_unique() || self.header().is_leaked() {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: the header was a box (`new`), and this is its only handle, which is forgotten.
        // `is_unique` also orders the reads of former handles before our writes.
        Ok(TensorMut::new(unsafe { Box::from_raw(this.header.as_ptr()) }))
    }

    /// Drops this handle and forbids all later writes to the bytes. A peer still reads them, and
    /// this process will not learn when the peer stops. Other handles stay valid and keep the pool.
    /// The pool never reuses the bytes, but the bytes do not keep the pool. When the pool's last
    /// user is gone, the memory is unmapped here and stays mapped in the peer alone.
    pub(crate) fn leak(self) {
        let header = self.header();
        if matches!(header.storage, Storage::Block(_)) {
            // Relaxed: the drop that follows publishes it.
            header.is_leaked.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the tensor writable: in place if [`Tensor::try_into_mut`] can, else as a copy from
    /// `pool`. Other handles keep the old bytes. A loan is given back.
    ///
    /// # Errors
    /// [`MakeMutError`], which holds the tensor, if the pool has no room for the copy.
    pub fn make_mut(self, pool: &Pool) -> Result<TensorMut, MakeMutError> {
        let shared = match self.try_into_mut() {
            Ok(writable) => return Ok(writable),
            Err(shared) => shared,
        };
        match pool.tensor(shared.meta().clone()) {
            Ok(mut copy) => {
                memory::copy(copy.bytes_mut(), shared.bytes());
                Ok(copy)
            }
            Err(source) => Err(MakeMutError { tensor: shared, source }),
        }
    }
}

/// Why [`Tensor::make_mut`] could not copy a tensor. It holds the tensor, which is unchanged.
///
/// ```
/// use tensorwire::{Pool, Tensor, TensorMut};
///
/// /// A writable copy, if the pool has room for one.
/// fn writable(tensor: Tensor, pool: &Pool) -> Result<TensorMut, Tensor> {
///     tensor.make_mut(pool).map_err(|error| {
///         eprintln!("{}", error.pool_error());
///         error.into_tensor() // unchanged
///     })
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("no writable copy of a tensor {}: {source}", .tensor.meta())]
pub struct MakeMutError {
    tensor: Tensor,
    source: PoolError,
}

impl MakeMutError {
    /// The tensor that was to be made writable.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// Why the pool had no copy.
    pub fn pool_error(&self) -> &PoolError {
        &self.source
    }
}

impl Clone for Tensor {
    fn clone(&self) -> Tensor {
        self.header().refs.add();
        Tensor { header: self.header }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if !self.header().refs.remove() {
            return;
        }
        // SAFETY: the header was a box (`new`), and this was its last handle.
        unsafe { Box::from_raw(self.header.as_ptr()) }.release();
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("meta", &format_args!("{}", self.meta()))
            .field("handles", &self.header().refs.snapshot())
            .field("span", &self.span())
            .field("lent", &self.is_lent())
            .field("foreign", &self.is_foreign())
            .finish()
    }
}
