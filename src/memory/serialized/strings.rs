//! Tensors of byte strings.

use super::*;

/// A tensor of byte strings, each of any length; they need not be UTF-8.
///
/// [`StringTensor::to_tensor`] makes of it what can be sent, [`StringTensor::from_tensor`] reads what was received.
///
/// ```
/// use tensorwire::internals::memory::{PoolOptions, Region, RegionOptions};
/// use tensorwire::{Pool, Shape, StringTensor};
///
/// let pool = Pool::new(Region::create(0, &RegionOptions::new(1 << 20))?, PoolOptions::default())?;
/// let words = StringTensor::new(Shape::new(&[3])?, ["one", "", "three"])?;
/// let tensor = words.to_tensor(&pool)?; // `step.send(&edge, tensor)`
/// let received = StringTensor::from_tensor(&tensor)?;
/// assert_eq!(received.values()[2], "three");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StringTensor {
    shape: Shape,
    values: Vec<Bytes>,
}

impl StringTensor {
    /// Strings in the order of the shape's elements. What is a `Vec<u8>`, a `String` or static is not copied.
    ///
    /// # Errors
    /// [`SerializeError::Count`] if the shape has another number of elements.
    pub fn new<V: Into<Bytes>>(
        shape: Shape,
        values: impl IntoIterator<Item = V>,
    ) -> Result<Self, SerializeError> {
        let values: Vec<Bytes> = values.into_iter().map(Into::into).collect();
        check_count(&shape, values.len())
            .map_err(|(given, expected)| SerializeError::Count { given, expected })?;
        Ok(StringTensor { shape, values })
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The strings, in the order of the shape's elements.
    pub fn values(&self) -> &[Bytes] {
        &self.values
    }

    /// The strings alone.
    pub fn into_values(self) -> Vec<Bytes> {
        self.values
    }

    /// A tensor in `pool` that has them, in their serialised form.
    ///
    /// # Errors
    /// [`SerializeError::Pool`] if the pool has no room.
    pub fn to_tensor(&self, pool: &Pool) -> Result<Tensor, SerializeError> {
        to_tensor(pool, DType::String, &self.shape, &self.to_message())
    }

    /// Reads a tensor's strings. They are not copied: they keep the tensor for as long as one of them is there.
    ///
    /// # Errors
    /// [`DecodeError`] if it is no tensor of strings, or its sender broke it.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self, DecodeError> {
        let (shape, message) = read(tensor, DType::String)?;
        StringTensor::from_message(shape, message)
    }

    pub(super) fn from_message(shape: Shape, message: TensorProto) -> Result<Self, DecodeError> {
        let values = message.string_val;
        check_read(&shape, values.len())?;
        Ok(StringTensor { shape, values })
    }

    /// The strings in it are references to these.
    pub(super) fn to_message(&self) -> TensorProto {
        TensorProto { string_val: self.values.clone(), ..head(DType::String, &self.shape) }
    }
}
