//! A tensor that anyone may read and nobody may write.

pub(crate) mod ring;
pub(crate) mod tensor_mut;
pub(crate) mod view;

use self::tensor_mut::TensorMut;
use self::view::ViewError;
use crate::memory::loan::{LentBytes, LentError};
use crate::memory::pool::Pool;
use crate::memory::pool::error::PoolError;
use crate::memory::pool::header::{Storage, TensorHeader};
use crate::wire::{DType, Element, Shape, TensorMeta};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// Where in a region a tensor's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// The region's number.
    pub region: u16,
    /// The first byte, from the start of the region.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

impl Span {
    pub(crate) fn of(header: &TensorHeader) -> Option<Span> {
        let len = header.meta.bytes();
        let (Storage::Block(block), Some(anchor)) = (&header.storage, &header.anchor) else { return None };
        let (region, offset) = anchor.place(block);
        (len > 0).then_some(Span { region, offset, len })
    }
}

/// A tensor that anyone may read and nobody may write. Cloning it makes another handle to the same bytes.
///
/// ```compile_fail,E0599
/// # use tensorwire::memory::Tensor;
/// fn write(mut tensor: Tensor) {
///     tensor.bytes_mut()[0] = 1; // there is no such method
/// }
/// ```
/// A view does not outlive the handle that it was taken from:
/// ```compile_fail,E0505
/// # use tensorwire::memory::Tensor;
/// fn keep_a_view(tensor: Tensor) -> u8 {
///     let bytes = tensor.bytes();
///     let writable = tensor.try_into_mut();
///     bytes[0]
/// }
/// ```
pub struct Tensor {
    /// A `Box<TensorHeader>` that was taken apart; whoever drops the last handle puts it together again.
    header: NonNull<TensorHeader>,
}

// SAFETY: a handle gives `&TensorHeader`, which is Sync, to any thread, and the last one a `Box<TensorHeader>`, which is
// Send, to the thread that drops it; `RefCount` orders all earlier uses before that.
unsafe impl Send for Tensor {}
// SAFETY: as above; through `&Tensor` a thread can also clone, which counts up atomically.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// The first handle to a header that nobody else refers to.
    pub(crate) fn new(header: Box<TensorHeader>) -> Tensor {
        debug_assert!(header.refs.is_one());
        Tensor { header: NonNull::from(Box::leak(header)) }
    }

    /// A tensor without elements: what stands for the value of a branch not taken. [`Pool::empty`] takes its
    /// heap memory from a pool's caches.
    ///
    /// [`Pool::empty`]: super::Pool::empty
    pub fn empty() -> Tensor {
        Tensor::without_elements(TensorHeader::empty())
    }

    /// Makes a header without bytes one of a tensor without elements.
    pub(crate) fn without_elements(mut header: Box<TensorHeader>) -> Tensor {
        // A shape with a 0 in it has a byte count.
        if let Ok(meta) = Shape::new(&[0]).and_then(|shape| TensorMeta::new(DType::U8, shape)) {
            header.meta = meta;
        }
        Tensor::new(header)
    }

    /// A tensor whose bytes lie in a peer's region. `pool` keeps the books of it, and none of the bytes.
    ///
    /// Bool is refused: its bytes are checked when they are viewed, and a peer could change them after
    /// that. (See `LentBytes` for whom that trusts.)
    ///
    /// # Errors
    /// `LentError` with the bytes, if they are not as many as the tensor has or it can't be lent.
    pub fn from_lent(
        pool: &Pool,
        meta: TensorMeta,
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
        header.meta = meta;
        if !bytes.is_empty() {
            header.data = bytes.data();
            header.capacity = bytes.len();
        }
        header.storage = Storage::Lent(bytes);
        Ok(Tensor::new(header))
    }

    pub(crate) fn header(&self) -> &TensorHeader {
        // SAFETY: the header lives as long as any handle to it, and while there is a `Tensor` nobody has it
        // mutably.
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

    /// Shape.
    pub fn shape(&self) -> &Shape {
        self.meta().shape()
    }

    /// All its bytes: its elements, or its serialised form.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `data` is good for meta.bytes() initialised bytes while this handle is there, and nobody
        // writes to them while there is a `Tensor`. (For lent bytes the peer vouches for that.)
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.meta().bytes() as usize) }
    }

    /// Its elements.
    ///
    /// # Errors
    /// [`ViewError`] if they are no `T`s.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], ViewError> {
        // SAFETY: as in `bytes`.
        unsafe { view::elements(self.meta(), self.header().data) }
    }

    /// Whether its bytes lie in a peer's region.
    pub fn is_lent(&self) -> bool {
        matches!(self.header().storage, Storage::Lent(_))
    }

    /// Whether its bytes lie in memory of another allocator.
    pub fn is_foreign(&self) -> bool {
        matches!(self.header().storage, Storage::Foreign(_) | Storage::Registered(..))
    }

    /// Whether this is its only handle. It stays so until this handle is cloned.
    pub fn is_unique(&self) -> bool {
        self.header().refs.is_one()
    }

    /// Where its bytes lie in a region of this process; `None` if it has none there (no bytes at all,
    /// lent, or foreign).
    pub fn span(&self) -> Option<Span> {
        Span::of(self.header())
    }

    /// Its first byte, good for reading as long as this handle is there.
    pub fn as_ptr(&self) -> *const u8 {
        self.header().data.as_ptr()
    }

    /// Makes it writable again.
    ///
    /// # Errors
    /// The tensor as it was, if there are other handles to it, its bytes are a peer's or another allocator's, or a peer reads
    /// them of whom nothing is heard any more.
    pub fn try_into_mut(self) -> Result<TensorMut, Tensor> {
        let ours = matches!(self.header().storage, Storage::Block(_) | Storage::Empty);
        // In this order: who is alone sees what the others did.
        if !ours || !self.is_unique() || self.header().is_leaked() {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: the header was a box (`new`), this is its only handle (`is_unique`, which also orders the
        // reads of former handles before our writes), and it is forgotten.
        Ok(TensorMut::new(unsafe { Box::from_raw(this.header.as_ptr()) }))
    }

    /// Lets go of this handle, and has nobody write to the bytes ever again: a peer reads them, and nobody will learn for how
    /// long. Other handles stay as they are, and keep the pool. The pool is short of the bytes from now on, and does not
    /// stay for them: when nobody else has it any more its memory is unmapped here, and is the peer's alone.
    pub(crate) fn leak(self) {
        let header = self.header();
        if matches!(header.storage, Storage::Block(_)) {
            // Relaxed: the drop that follows publishes it.
            header.is_leaked.store(true, Ordering::Relaxed);
        }
    }

    /// Makes it writable: in place if it can be, else as a copy from `pool`. The other handles keep the
    /// bytes as they are; a loan is given back.
    ///
    /// # Errors
    /// [`PoolError`] with the tensor, if the copy can't be had.
    pub fn make_mut(self, pool: &Pool) -> Result<TensorMut, (PoolError, Tensor)> {
        let shared = match self.try_into_mut() {
            Ok(writable) => return Ok(writable),
            Err(shared) => shared,
        };
        match pool.tensor(shared.meta().clone()) {
            Ok(mut copy) => {
                copy.bytes_mut().copy_from_slice(shared.bytes());
                Ok(copy)
            }
            Err(error) => Err((error, shared)),
        }
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
        let mut header = unsafe { Box::from_raw(self.header.as_ptr()) };
        // One again, for its next use.
        header.refs = crate::memory::pool::refcount::RefCount::one();
        header.release();
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
