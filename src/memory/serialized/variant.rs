//! Tensors of variants: values of types that a trainer registers.

use super::reader::Fields;
use super::*;

/// A tensor of variants.
///
/// ```
/// use tensorwire::memory::{NestedTensor, Pool, PoolOptions, Region, RegionOptions};
/// use tensorwire::memory::{StringTensor, Variant, VariantTensor};
/// use tensorwire::wire::Shape;
///
/// let pool = Pool::new(Region::create(0, &RegionOptions::new(1 << 20))?, PoolOptions::default())?;
/// let names = StringTensor::new(Shape::new(&[2])?, ["left", "right"])?;
/// let pair = Variant {
///     type_name: "pair".into(),
///     metadata: vec![1].into(),
///     tensors: vec![NestedTensor::Strings(names)],
/// };
/// let tensor = VariantTensor::new(Shape::SCALAR, vec![pair.clone()])?.to_tensor(&pool)?;
/// assert_eq!(VariantTensor::from_tensor(&tensor)?.values(), [pair]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariantTensor {
    shape: Shape,
    values: Vec<Variant>,
}

/// One variant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variant {
    /// The name under which its type is registered.
    pub type_name: String,
    /// Bytes that the type alone knows how to read.
    pub metadata: Bytes,
    /// The tensors that it holds.
    pub tensors: Vec<NestedTensor>,
}

/// A tensor inside a variant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NestedTensor {
    /// Flat memory.
    Flat(FlatTensor),
    /// Strings.
    Strings(StringTensor),
    /// Variants again, [`MAX_DEPTH`] deep at most.
    Variants(VariantTensor),
}

impl VariantTensor {
    /// Variants in the order of the shape's elements.
    ///
    /// # Errors
    /// [`SerializeError`] if the shape has another number of elements, or variants lie too deep inside each other.
    pub fn new(shape: Shape, values: Vec<Variant>) -> Result<Self, SerializeError> {
        check_count(&shape, values.len())
            .map_err(|(given, expected)| SerializeError::Count { given, expected })?;
        let made = VariantTensor { shape, values };
        if made.is_deeper_than(MAX_DEPTH) {
            return Err(SerializeError::Depth { max: MAX_DEPTH });
        }
        Ok(made)
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The variants, in the order of the shape's elements.
    pub fn values(&self) -> &[Variant] {
        &self.values
    }

    /// The variants alone.
    pub fn into_values(self) -> Vec<Variant> {
        self.values
    }

    /// A tensor in `pool` that has them, in their serialised form.
    ///
    /// # Errors
    /// [`SerializeError::Pool`] if the pool has no room.
    pub fn to_tensor(&self, pool: &Pool) -> Result<Tensor, SerializeError> {
        to_tensor(pool, DType::Variant, &self.shape, &|sink| self.put(sink))
    }

    /// Reads a tensor's variants. Their bytes are not copied: they keep the tensor for as long as one of them is there.
    ///
    /// # Errors
    /// [`DecodeError`] if it is no tensor of variants, or its sender broke it.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self, DecodeError> {
        read(tensor, DType::Variant, |proto| VariantTensor::read(proto, 1))
    }

    fn read(proto: &Proto<'_>, depth: usize) -> Result<Self, DecodeError> {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Depth { max: MAX_DEPTH });
        }
        let values = proto.values(VARIANT_VAL, |message| Variant::read(proto, message, depth))?;
        Ok(VariantTensor { shape: proto.shape.clone(), values })
    }

    fn put(&self, sink: &mut dyn Sink) {
        put_head(sink, DType::Variant, &self.shape);
        for value in &self.values {
            sink.message(VARIANT_VAL, &|sink| value.put(sink));
        }
    }

    /// Bounded by `depth` itself, however deep it is: what is made is never deeper than one more than the bound.
    fn is_deeper_than(&self, depth: usize) -> bool {
        let nested = |tensor: &NestedTensor| match tensor {
            NestedTensor::Variants(tensor) => depth == 1 || tensor.is_deeper_than(depth - 1),
            _ => false,
        };
        self.values.iter().any(|value| value.tensors.iter().any(nested))
    }
}

impl Variant {
    fn read(of: &Proto<'_>, message: &[u8], depth: usize) -> Result<Self, DecodeError> {
        let mut count = 0;
        let mut variant = Variant::default();
        for field in Fields::of(of.whole, message) {
            let field = field?;
            match field.number {
                TYPE_NAME => {
                    let name = std::str::from_utf8(field.bytes()?);
                    let name = name.map_err(|_| field.malformed("a variant's type name is not UTF-8"))?;
                    variant.type_name = name.to_owned();
                }
                METADATA => variant.metadata = of.slice(field.bytes()?),
                TENSORS => count += 1,
                _ => {}
            }
        }
        variant.tensors.reserve_exact(count);
        for field in Fields::of(of.whole, message) {
            let field = field?;
            if field.number == TENSORS {
                let proto = Proto::read(of.whole, field.bytes()?)?;
                variant.tensors.push(NestedTensor::read(&proto, depth)?);
            }
        }
        Ok(variant)
    }

    fn put(&self, sink: &mut dyn Sink) {
        sink::optional(sink, TYPE_NAME, self.type_name.as_bytes());
        sink::optional(sink, METADATA, &self.metadata);
        for tensor in &self.tensors {
            sink.message(TENSORS, &|sink| tensor.put(sink));
        }
    }
}

impl NestedTensor {
    fn read(proto: &Proto<'_>, depth: usize) -> Result<Self, DecodeError> {
        Ok(match proto.dtype {
            DType::String => NestedTensor::Strings(StringTensor::read(proto)?),
            DType::Variant => NestedTensor::Variants(VariantTensor::read(proto, depth + 1)?),
            _ => NestedTensor::Flat(FlatTensor::read(proto)?),
        })
    }

    fn put(&self, sink: &mut dyn Sink) {
        match self {
            NestedTensor::Flat(tensor) => tensor.put(sink),
            NestedTensor::Strings(tensor) => tensor.put(sink),
            NestedTensor::Variants(tensor) => tensor.put(sink),
        }
    }
}
