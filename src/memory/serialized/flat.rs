//! Flat tensors inside variants.

use super::*;
use crate::memory::PoolError;

/// A flat tensor inside a variant. Its bytes may lie at any address.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::{DType, FlatTensor, NestedTensor};
/// let mut weights = node.tensor(DType::F32, &[2])?;
/// weights.as_mut_slice::<f32>()?.fill(0.5);
/// let inside = FlatTensor::new(&weights.freeze())?;
/// assert_eq!(inside.to_tensor(node.pool())?.as_slice::<f32>()?, [0.5; 2]);
/// let nested = NestedTensor::Flat(inside);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatTensor {
    meta: TensorMeta,
    bytes: Bytes,
}

impl FlatTensor {
    /// Wraps a tensor and holds it.
    ///
    /// # Errors
    /// [`SerializeError::NotFlat`] for a tensor of strings or variants.
    pub fn new(tensor: &Tensor) -> Result<Self, SerializeError> {
        if tensor.meta().is_serialized() {
            return Err(SerializeError::NotFlat { dtype: tensor.dtype() });
        }
        Ok(FlatTensor { meta: tensor.meta().clone(), bytes: bytes_of(tensor) })
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// The elements in memory order, little-endian.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Copies the tensor into `pool`, where its elements can be viewed.
    ///
    /// # Errors
    /// [`PoolError`] if there is no room.
    pub fn to_tensor(&self, pool: &Pool) -> Result<Tensor, PoolError> {
        let mut tensor = pool.tensor(self.meta.clone())?;
        tensor.bytes_mut().copy_from_slice(&self.bytes);
        Ok(tensor.freeze())
    }

    pub(super) fn from_message(
        dtype: DType,
        shape: Shape,
        message: TensorProto,
    ) -> Result<Self, DecodeError> {
        let bytes = message.tensor_content;
        let given = bytes.len() as u64;
        let expected = shape.elements().unwrap_or(u64::MAX);
        let meta = TensorMeta::new(dtype, shape).map_err(|_| DecodeError::Count { given, expected })?;
        if meta.bytes() != given {
            return Err(DecodeError::Count { given, expected: meta.bytes() });
        }
        Ok(FlatTensor { meta, bytes })
    }

    pub(super) fn to_message(&self) -> TensorProto {
        TensorProto { tensor_content: self.bytes.clone(), ..head(self.meta.dtype(), self.meta.shape()) }
    }
}
