//! Tensors of variants: values of types that a trainer registers.

use super::*;

/// A tensor of variants: values of types that a trainer registers.
///
/// ```
/// use tensorwire::{NestedTensor, Node, Shape, StringTensor, Variant, VariantTensor};
///
/// fn pair(node: &Node) -> Result<(), Box<dyn std::error::Error>> {
///     let names = StringTensor::new(Shape::new(&[2])?, ["left", "right"])?;
///     let pair = Variant {
///         type_name: "pair".into(),
///         metadata: vec![1].into(),
///         tensors: vec![NestedTensor::Strings(names)],
///     };
///     let tensor = VariantTensor::new(Shape::SCALAR, vec![pair.clone()])?.to_tensor(node.pool())?;
///     assert_eq!(VariantTensor::from_tensor(&tensor)?.values(), [pair]);
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariantTensor {
    shape: Shape,
    values: Vec<Variant>,
}

/// One value of a registered type.
///
/// ```
/// use tensorwire::{NestedTensor, Shape, StringTensor, Variant};
/// let names = StringTensor::new(Shape::new(&[2])?, ["left", "right"])?;
/// let pair = Variant {
///     type_name: "pair".into(),
///     metadata: vec![1].into(),
///     tensors: vec![NestedTensor::Strings(names)],
/// };
/// assert_eq!(pair.tensors.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Its fields are those of the format, and programs fill them.
pub struct Variant {
    /// Name under which the type is registered.
    pub type_name: String,
    /// Bytes in a format of the type's own.
    pub metadata: Bytes,
    /// Tensors of the value.
    pub tensors: Vec<NestedTensor>,
}

/// A tensor inside a variant.
///
/// ```
/// use tensorwire::NestedTensor;
///
/// /// The strings in a tensor, at any depth.
/// fn strings(tensor: &NestedTensor) -> usize {
///     match tensor {
///         NestedTensor::Flat(_) => 0,
///         NestedTensor::Strings(strings) => strings.values().len(),
///         NestedTensor::Variants(variants) => {
///             variants.values().iter().flat_map(|value| &value.tensors).map(strings).sum()
///         }
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The format has these three and no others.
pub enum NestedTensor {
    /// A tensor of fixed-size elements.
    Flat(FlatTensor),
    /// Byte strings of any length.
    Strings(StringTensor),
    /// A tensor of variants, nested at most [`MAX_DEPTH`] deep.
    Variants(VariantTensor),
}

impl VariantTensor {
    /// Takes variants in the order of the shape's elements.
    ///
    /// # Errors
    /// [`SerializeError`] if the shape has another number of elements, or variants are nested too
    /// deep.
    pub fn new(shape: Shape, values: Vec<Variant>) -> Result<Self, SerializeError> {
        check_count(&shape, values.len())
            .map_err(|(given, expected)| SerializeError::Count { given, expected })?;
        let made = VariantTensor { shape, values };
        if made.is_deeper_than(MAX_DEPTH) {
            return Err(SerializeError::Depth { max: MAX_DEPTH });
        }
        Ok(made)
    }

    /// The product of its dimensions is the number of variants.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The variants, in the order of the shape's elements.
    pub fn values(&self) -> &[Variant] {
        &self.values
    }

    /// The variants, without the shape.
    pub fn into_values(self) -> Vec<Variant> {
        self.values
    }

    /// Serialises the variants into a tensor of `pool`.
    ///
    /// # Errors
    /// [`SerializeError::Pool`] if the pool has no room.
    pub fn to_tensor(&self, pool: &Pool) -> Result<Tensor, SerializeError> {
        to_tensor(pool, DType::Variant, &self.shape, &self.to_message())
    }

    /// Reads a tensor's variants. Their bytes are not copied: each value keeps the tensor alive.
    ///
    /// # Errors
    /// [`DecodeError`] if the tensor does not hold variants, or its bytes are malformed.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self, DecodeError> {
        let (shape, message) = read(tensor, DType::Variant)?;
        VariantTensor::from_message(shape, message, 1)
    }

    fn from_message(shape: Shape, message: TensorProto, depth: usize) -> Result<Self, DecodeError> {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Depth { max: MAX_DEPTH });
        }
        check_read(&shape, message.variant_val.len())?;
        let values = message.variant_val.into_iter().map(|value| Variant::from_message(value, depth));
        Ok(VariantTensor { shape, values: values.collect::<Result<_, _>>()? })
    }

    fn to_message(&self) -> TensorProto {
        let variant_val = self.values.iter().map(Variant::to_message).collect();
        TensorProto { variant_val, ..head(DType::Variant, &self.shape) }
    }

    /// Whether variants are nested deeper than `depth`. The recursion stops at `depth`, however
    /// deep the value is.
    fn is_deeper_than(&self, depth: usize) -> bool {
        let nested = |tensor: &NestedTensor| match tensor {
            NestedTensor::Variants(tensor) => depth == 1 || tensor.is_deeper_than(depth - 1),
            _ => false,
        };
        self.values.iter().any(|value| value.tensors.iter().any(nested))
    }
}

impl Variant {
    fn from_message(message: VariantTensorDataProto, depth: usize) -> Result<Self, DecodeError> {
        let VariantTensorDataProto { type_name, metadata, tensors } = message;
        let tensors = tensors.into_iter().map(|tensor| NestedTensor::from_message(tensor, depth));
        Ok(Variant { type_name, metadata, tensors: tensors.collect::<Result<_, _>>()? })
    }

    fn to_message(&self) -> VariantTensorDataProto {
        VariantTensorDataProto {
            type_name: self.type_name.clone(),
            metadata: self.metadata.clone(),
            tensors: self.tensors.iter().map(NestedTensor::to_message).collect(),
        }
    }
}

impl NestedTensor {
    fn from_message(message: TensorProto, depth: usize) -> Result<Self, DecodeError> {
        let (dtype, shape) = read_head(&message)?;
        Ok(match dtype {
            DType::String => NestedTensor::Strings(StringTensor::from_message(shape, message)?),
            DType::Variant => NestedTensor::Variants(VariantTensor::from_message(shape, message, depth + 1)?),
            _ => NestedTensor::Flat(FlatTensor::from_message(dtype, shape, message)?),
        })
    }

    fn to_message(&self) -> TensorProto {
        match self {
            NestedTensor::Flat(tensor) => tensor.to_message(),
            NestedTensor::Strings(tensor) => tensor.to_message(),
            NestedTensor::Variants(tensor) => tensor.to_message(),
        }
    }
}
