//! Shapes of tensors.

use super::DType;
use std::fmt;

/// The highest rank a tensor may have.
pub const MAX_RANK: usize = 254;
/// The largest dimension a tensor may have.
pub const MAX_DIM: u64 = i64::MAX as u64;

/// Dimensions of a shape that needs no memory of its own.
pub(crate) const MAX_INLINE_RANK: usize = 6;

/// The dimensions of a tensor, outermost first. Rank 0 is a scalar.
///
/// Up to six dimensions are kept in place, so cloning a common shape does not allocate.
///
/// ```
/// use tensorwire::Shape;
/// let shape = Shape::new(&[2, 3])?;
/// assert_eq!((shape.rank(), shape.elements()), (2, Some(6)));
/// assert_eq!(Shape::SCALAR.elements(), Some(1));
/// # Ok::<(), tensorwire::ShapeError>(())
/// ```
pub struct Shape(Dims);

#[derive(Clone)]
enum Dims {
    Inline { rank: u8, dims: [u64; MAX_INLINE_RANK] },
    Heap(Box<[u64]>),
}

/// Why a list of dimensions is no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// Too many dimensions.
    #[error("a shape of rank {rank} was given: at most {MAX_RANK} dimensions are supported")]
    Rank {
        /// The rank that was asked for.
        rank: usize,
    },
    /// One dimension is too large.
    #[error("dimension {axis} is {dim}: at most {MAX_DIM} (2^63-1) is allowed")]
    Dim {
        /// Which dimension, counted from 0.
        axis: usize,
        /// Its size.
        dim: u64,
    },
    /// The number of bytes does not fit in 63 bits.
    #[error("a tensor of {dtype} with shape {shape:?} has more than 2^63-1 bytes")]
    Bytes {
        /// Dimensions whose product is too large.
        shape: Shape,
        /// The element type.
        dtype: DType,
    },
    /// Elements of no fixed size have no flat memory.
    #[error(
        "elements of {dtype} have no fixed size: such a tensor is made in its serialised form, whose length \
         is given with it"
    )]
    NotFlat {
        /// The element type.
        dtype: DType,
    },
    /// Elements of a fixed size are not serialised.
    #[error("elements of {dtype} have a fixed size: such a tensor is flat memory and has no serialised form")]
    Flat {
        /// The element type.
        dtype: DType,
    },
}

impl Shape {
    /// No dimensions, one element.
    pub const SCALAR: Shape = Shape(Dims::Inline { rank: 0, dims: [0; MAX_INLINE_RANK] });

    /// A shape with these dimensions.
    ///
    /// # Errors
    /// If there are more than [`MAX_RANK`] dimensions or one is larger than [`MAX_DIM`].
    pub fn new(dims: &[u64]) -> Result<Self, ShapeError> {
        if dims.len() > MAX_RANK {
            return Err(ShapeError::Rank { rank: dims.len() });
        }
        if let Some(axis) = dims.iter().position(|dim| *dim > MAX_DIM) {
            return Err(ShapeError::Dim { axis, dim: dims[axis] });
        }
        Ok(Shape::inline(dims).unwrap_or_else(|| Shape(Dims::Heap(dims.into()))))
    }

    /// These dimensions in place, if there is room for them.
    #[inline]
    fn inline(dims: &[u64]) -> Option<Self> {
        let mut inline = [0; MAX_INLINE_RANK];
        if dims.len() > MAX_INLINE_RANK {
            return None;
        }
        for (place, dim) in inline.iter_mut().zip(dims) {
            *place = *dim;
        }
        Some(Shape(Dims::Inline { rank: dims.len() as u8, dims: inline }))
    }

    /// The dimensions, outermost first.
    #[inline]
    pub fn dims(&self) -> &[u64] {
        match &self.0 {
            Dims::Inline { rank, dims } => &dims[..usize::from(*rank)],
            Dims::Heap(dims) => dims,
        }
    }

    /// Whether the shape has no memory of its own.
    pub(crate) fn is_inline(&self) -> bool {
        matches!(self.0, Dims::Inline { .. })
    }

    /// The number of dimensions.
    #[inline]
    pub fn rank(&self) -> usize {
        self.dims().len()
    }

    /// The number of elements, or `None` if it does not fit in 63 bits. A dimension of 0 makes it
    /// 0.
    pub fn elements(&self) -> Option<u64> {
        product(self.dims()).or_else(|| self.dims().contains(&0).then_some(0))
    }
}

/// The product, unless an intermediate result does not fit in 63 bits.
#[inline]
fn product(dims: &[u64]) -> Option<u64> {
    let product = dims.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim))?;
    (product <= MAX_DIM).then_some(product)
}

impl Clone for Shape {
    #[inline]
    fn clone(&self) -> Shape {
        Shape(self.0.clone())
    }

    #[inline]
    fn clone_from(&mut self, other: &Shape) {
        match (&mut self.0, &other.0) {
            // Without a temporary copy.
            (Dims::Inline { rank, dims }, Dims::Inline { rank: other, dims: others }) => {
                (*rank, *dims) = (*other, *others);
            }
            (dims, others) => dims.clone_boxed_from(others),
        }
    }
}

impl Dims {
    /// As `clone_from`, where one of the two is on the heap.
    #[cold]
    fn clone_boxed_from(&mut self, other: &Dims) {
        *self = other.clone();
    }
}

impl PartialEq for Shape {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            // The dimensions beyond the rank are 0. A comparison of arrays would cost a call.
            (Dims::Inline { rank, dims }, Dims::Inline { rank: other, dims: others }) => {
                let differences = dims.iter().zip(others).fold(0, |all, (dim, other)| all | (dim ^ other));
                rank == other && differences == 0
            }
            (Dims::Heap(dims), Dims::Heap(others)) => dims == others,
            _ => false,
        }
    }
}

impl Eq for Shape {}

impl std::hash::Hash for Shape {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.dims().hash(state);
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.dims()).finish()
    }
}

/// Element type, shape and byte count, from which a receiver allocates a tensor.
///
/// The bytes of a tensor are its elements in order, if these have a fixed size. Strings and
/// variants have none: their bytes are a serialised form, whose length is part of the meta-data and
/// changes with the contents.
///
/// ```
/// use tensorwire::{DType, Shape, TensorMeta};
/// let meta = TensorMeta::new(DType::F32, Shape::new(&[2, 3])?)?;
/// assert_eq!(meta.bytes(), 24);
/// # Ok::<(), tensorwire::ShapeError>(())
/// ```
pub struct TensorMeta {
    dtype: DType,
    shape: Shape,
    bytes: u64,
    /// All of this in one word, by [`packed`]; or 0.
    packed: u64,
}

/// Bits of a packed word for the dimensions.
const DIM_BITS: usize = 48;

/// Bits of a packed word for each of `rank` dimensions. `None` if they are too many.
#[inline]
fn bits_per_dim(rank: usize) -> Option<usize> {
    match rank {
        0 | 1 => Some(DIM_BITS),
        2 => Some(DIM_BITS / 2),
        3..=MAX_INLINE_RANK => Some(DIM_BITS / MAX_INLINE_RANK),
        _ => None,
    }
}

/// The meta-data of a flat tensor in one word, so that two of them are compared at once. `dims` are
/// the dimensions in the bits that each has. 0 if one could be too large.
#[inline]
fn packed(dtype: DType, rank: usize, elements: u64, dims: u64) -> u64 {
    // No dimension is larger than a product above 0.
    match bits_per_dim(rank) {
        Some(bits) if elements > 0 && elements >> bits == 0 => {
            dims | (rank as u64 + 1) << DIM_BITS | (dtype as u64) << (DIM_BITS + 8)
        }
        _ => 0,
    }
}

impl TensorMeta {
    /// A flat tensor.
    ///
    /// # Errors
    /// If the elements have no fixed size, or the byte count does not fit in 63 bits.
    pub fn new(dtype: DType, shape: Shape) -> Result<Self, ShapeError> {
        let Some(size) = dtype.size() else { return Err(ShapeError::NotFlat { dtype }) };
        let elements = shape.elements();
        let bytes = elements.and_then(|n| n.checked_mul(size as u64)).filter(|bytes| *bytes <= MAX_DIM);
        let (Some(elements), Some(bytes)) = (elements, bytes) else {
            return Err(ShapeError::Bytes { shape, dtype });
        };
        let bits = bits_per_dim(shape.rank()).unwrap_or(0);
        let dims = shape.dims().iter().fold(0, |dims, dim| dims << bits | dim);
        Ok(TensorMeta { dtype, packed: packed(dtype, shape.rank(), elements, dims), shape, bytes })
    }

    /// As [`TensorMeta::new`] of [`Shape::new`], for a tensor with bytes whose shape is kept in
    /// place.
    #[inline]
    pub(crate) fn inline(dtype: DType, dims: &[u64]) -> Option<Self> {
        let rank = dims.len();
        let bits = bits_per_dim(rank)?;
        let (mut kept, mut elements, mut word) = ([0; MAX_INLINE_RANK], 1u64, 0);
        for (place, dim) in kept.iter_mut().zip(dims) {
            *place = *dim;
            elements = elements.checked_mul(*dim)?;
            word = word << bits | dim;
        }
        let bytes = elements.checked_mul(dtype.size()? as u64)?;
        // No dimension is larger than a product above 0.
        if bytes == 0 || bytes > MAX_DIM {
            return None;
        }
        let shape = Shape(Dims::Inline { rank: rank as u8, dims: kept });
        Some(TensorMeta { dtype, shape, bytes, packed: packed(dtype, rank, elements, word) })
    }

    /// A tensor of elements without a fixed size, whose serialised form has `len` bytes.
    ///
    /// # Errors
    /// If the elements have a fixed size, or their number or `len` does not fit in 63 bits.
    pub fn serialized(dtype: DType, shape: Shape, len: u64) -> Result<Self, ShapeError> {
        if dtype.size().is_some() {
            return Err(ShapeError::Flat { dtype });
        }
        if len > MAX_DIM || shape.elements().is_none() {
            return Err(ShapeError::Bytes { shape, dtype });
        }
        Ok(TensorMeta { dtype, shape, bytes: len, packed: 0 })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dimensions in elements, outermost first. A scalar has none.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes that such a tensor has: those of its elements, or of its serialised form.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    #[inline(never)] // keeps the usual way of `clone_from` short
    fn replace_by(&mut self, other: &TensorMeta) {
        (self.dtype, self.bytes, self.packed) = (other.dtype, other.bytes, other.packed);
        self.shape.clone_from(&other.shape);
    }

    #[cold]
    fn is_same_unpacked(&self, other: &Self) -> bool {
        (self.dtype, self.bytes) == (other.dtype, other.bytes) && self.shape == other.shape
    }

    /// Whether the bytes are a serialised form, not the elements themselves.
    pub fn is_serialized(&self) -> bool {
        self.dtype.size().is_none()
    }
}

impl Clone for TensorMeta {
    #[inline]
    fn clone(&self) -> TensorMeta {
        let TensorMeta { dtype, shape, bytes, packed } = self;
        TensorMeta { dtype: *dtype, shape: shape.clone(), bytes: *bytes, packed: *packed }
    }

    #[inline(always)] // on the short path
    fn clone_from(&mut self, other: &TensorMeta) {
        if self.packed == 0 || self.packed != other.packed {
            self.replace_by(other);
        }
    }
}

impl PartialEq for TensorMeta {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        // Other meta-data have another word, unless it is 0.
        self.packed == other.packed && (self.packed != 0 || self.is_same_unpacked(other))
    }
}

impl Eq for TensorMeta {}

impl std::hash::Hash for TensorMeta {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        let TensorMeta { dtype, shape, bytes, packed: _ } = self;
        (dtype, shape, bytes).hash(state);
    }
}

impl fmt::Debug for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TensorMeta { dtype, shape, bytes, packed: _ } = self;
        f.debug_struct("TensorMeta")
            .field("dtype", dtype)
            .field("shape", shape)
            .field("bytes", bytes)
            .finish()
    }
}

impl fmt::Display for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)?;
        if self.is_serialized() {
            write!(f, " ({} bytes serialised)", self.bytes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_goes_to_254_and_no_further() {
        assert_eq!(Shape::new(&[1; 254]).expect("254").rank(), 254);
        assert_eq!(Shape::new(&[1; 255]), Err(ShapeError::Rank { rank: 255 }));
    }

    #[test]
    fn dimensions_go_to_two_to_the_63_minus_1() {
        assert!(Shape::new(&[MAX_DIM]).is_ok());
        let error = Shape::new(&[2, MAX_DIM + 1]).expect_err("too large");
        assert_eq!(error, ShapeError::Dim { axis: 1, dim: MAX_DIM + 1 });
    }

    #[test]
    fn a_zero_dimension_empties_the_tensor_whatever_the_others_are() {
        let shape = Shape::new(&[MAX_DIM, MAX_DIM, 0]).expect("shape");
        assert_eq!(shape.elements(), Some(0));
        assert_eq!(TensorMeta::new(DType::F64, shape).expect("meta").bytes(), 0);
    }

    #[test]
    fn a_byte_count_that_overflows_is_refused() {
        let shape = Shape::new(&[1 << 32, 1 << 32]).expect("shape");
        assert_eq!(shape.elements(), None);
        assert!(TensorMeta::new(DType::U8, shape).is_err());
        let shape = Shape::new(&[1 << 62]).expect("shape");
        assert!(TensorMeta::new(DType::U8, shape.clone()).is_ok());
        assert!(TensorMeta::new(DType::F32, shape).is_err());
    }

    #[test]
    fn a_scalar_has_one_element() {
        let meta = TensorMeta::new(DType::F32, Shape::SCALAR).expect("meta");
        assert_eq!((meta.bytes(), meta.shape().rank()), (4, 0));
        assert_eq!(meta.to_string(), "f32[]");
    }

    #[test]
    fn a_serialised_tensor_has_as_many_bytes_as_is_said_whatever_its_shape() {
        let shape = Shape::new(&[2, 3]).expect("shape");
        let meta = TensorMeta::serialized(DType::String, shape.clone(), 57).expect("meta");
        assert_eq!((meta.bytes(), meta.is_serialized()), (57, true));
        assert_eq!(meta.to_string(), "string[2, 3] (57 bytes serialised)");
        assert_ne!(meta, TensorMeta::serialized(DType::String, shape.clone(), 58).expect("meta"));
        assert!(TensorMeta::serialized(DType::Variant, shape.clone(), MAX_DIM).is_ok());
        assert!(TensorMeta::serialized(DType::Variant, shape, MAX_DIM + 1).is_err());
        let endless = Shape::new(&[MAX_DIM, 2]).expect("shape");
        assert!(TensorMeta::serialized(DType::String, endless, 57).is_err());
    }

    #[test]
    fn flat_and_serialised_are_not_mixed_up() {
        let scalar = || Shape::SCALAR;
        assert_eq!(
            TensorMeta::new(DType::String, scalar()),
            Err(ShapeError::NotFlat { dtype: DType::String })
        );
        let flat = TensorMeta::serialized(DType::F32, scalar(), 4);
        assert_eq!(flat, Err(ShapeError::Flat { dtype: DType::F32 }));
    }

    #[test]
    fn a_shape_in_place_is_refused_or_the_same_as_any_other() {
        let shapes: [&[u64]; 10] = [
            &[],
            &[3],
            &[0],
            &[2, 3, 4, 5, 6, 7],
            &[1; MAX_INLINE_RANK + 1],
            &[MAX_DIM],
            &[MAX_DIM + 1],
            &[MAX_DIM + 1, 0],
            &[1 << 32, 1 << 32],
            &[1 << 62],
        ];
        for dims in shapes {
            for dtype in [DType::U8, DType::F32, DType::String] {
                let any = Shape::new(dims).and_then(|shape| TensorMeta::new(dtype, shape)).ok();
                let kept = any.filter(|meta| meta.bytes() > 0 && dims.len() <= MAX_INLINE_RANK);
                assert_eq!(TensorMeta::inline(dtype, dims), kept, "{dtype} {dims:?}");
            }
        }
    }

    #[test]
    fn meta_data_are_the_same_only_if_type_shape_and_length_are() {
        let dims: [&[u64]; 13] = [
            &[],
            &[0],
            &[1],
            &[1, 1],
            &[1 << 24],
            &[1, 0],
            &[256],
            &[1 << 48],
            &[1, 1 << 24],
            &[2, 3, 4, 5, 6, 7],
            &[2, 3, 4, 5, 6, 256],
            &[1; MAX_INLINE_RANK],
            &[1; MAX_INLINE_RANK + 1],
        ];
        let shapes = dims.map(|dims| Shape::new(dims).expect("a shape"));
        let all = shapes.iter().flat_map(|shape| {
            let flat = [DType::U8, DType::F32, DType::U16].map(|dtype| TensorMeta::new(dtype, shape.clone()));
            let serialized = [5, 6].map(|len| TensorMeta::serialized(DType::String, shape.clone(), len));
            flat.into_iter().chain(serialized).map(|meta| meta.expect("meta-data"))
        });
        let all: Vec<TensorMeta> = all.collect();
        for (a, one) in all.iter().enumerate() {
            for (b, other) in all.iter().enumerate() {
                assert_eq!(one == other, a == b, "{one} {other}");
                let mut place = other.clone();
                place.clone_from(one);
                let parts = |meta: &TensorMeta| (meta.dtype, meta.shape.clone(), meta.bytes, meta.packed);
                assert_eq!(parts(&place), parts(one));
            }
        }
    }

    #[test]
    fn a_shape_takes_the_place_of_any_other() {
        let shapes = [&[2, 3][..], &[4], &[5; 9], &[6; 8]].map(|dims| Shape::new(dims).expect("shape"));
        for (old, new) in shapes.iter().flat_map(|old| shapes.iter().map(move |new| (old, new))) {
            let mut place = old.clone();
            place.clone_from(new);
            assert_eq!(&place, new);
        }
    }
}
