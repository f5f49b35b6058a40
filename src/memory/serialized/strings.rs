//! Tensors of byte strings.

use super::*;

/// A tensor of byte strings of any length, not necessarily UTF-8.
///
/// [`StringTensor::to_tensor`] makes a tensor that can be sent. [`StringTensor::from_tensor`] reads
/// one that was received.
///
/// ```
/// use tensorwire::{Node, Shape, StringTensor};
///
/// fn words(node: &Node) -> Result<(), Box<dyn std::error::Error>> {
///     let words = StringTensor::new(Shape::new(&[3])?, ["one", "", "three"])?;
///     let tensor = words.to_tensor(node.pool())?; // to be sent as any other
///     let received = StringTensor::from_tensor(&tensor)?;
///     assert_eq!(received.values()[2], "three");
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StringTensor {
    shape: Shape,
    values: Vec<Bytes>,
}

impl StringTensor {
    /// Takes strings in the order of the shape's elements. A `Vec<u8>`, a `String` and a static
    /// string are not copied.
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

    /// The product of its dimensions is the number of strings.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The strings, in the order of the shape's elements.
    pub fn values(&self) -> &[Bytes] {
        &self.values
    }

    /// The strings, without the shape.
    pub fn into_values(self) -> Vec<Bytes> {
        self.values
    }

    /// Serialises the strings into a tensor of `pool`.
    ///
    /// # Errors
    /// [`SerializeError::Pool`] if the pool has no room.
    pub fn to_tensor(&self, pool: &Pool) -> Result<Tensor, SerializeError> {
        to_tensor(pool, DType::String, &self.shape, &self.to_message())
    }

    /// Reads a tensor's strings without copying them. Each string keeps the tensor alive.
    ///
    /// # Errors
    /// [`DecodeError`] if the tensor does not hold strings, or its bytes are malformed.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self, DecodeError> {
        let (shape, message) = read(tensor, DType::String)?;
        StringTensor::from_message(shape, message)
    }

    pub(super) fn from_message(shape: Shape, message: TensorProto) -> Result<Self, DecodeError> {
        let values = message.string_val;
        check_read(&shape, values.len())?;
        Ok(StringTensor { shape, values })
    }

    /// The message refers to these strings and copies none.
    pub(super) fn to_message(&self) -> TensorProto {
        TensorProto { string_val: self.values.clone(), ..head(DType::String, &self.shape) }
    }
}
