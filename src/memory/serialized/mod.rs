//! Tensors whose elements have no fixed size, as the bytes that travel: strings and variants.
//!
//! The bytes are a protobuf message `TensorProto`, whose fields are TensorFlow's (`proto/tensorwire/v1/tensor.proto`). It is
//! written straight into a tensor of the pool, and read from where it has landed: what is read refers to the tensor's
//! bytes and keeps the tensor, so no string is copied.
//!
//! Reading is the caller's, on the caller's thread: no poller looks into these bytes. They are a peer's, so everything is checked before it
//! is used: the element type and the shape against the tensor's meta-data, the number of values against the shape,
//! each length against what is there, the depth of nesting against [`MAX_DEPTH`]. A table of values is made only after
//! they were counted, and an element of it takes 120 bytes at most for at least two that came.
//!
//! | file | |
//! |---|---|
//! | `sink`, `reader` | protobuf's encoding, out and in |
//! | `strings`, `variant`, `flat` | what there is |
#![deny(unsafe_code)]

mod error;
mod flat;
mod reader;
mod sink;
mod strings;
mod variant;

pub use error::{DecodeError, SerializeError};
pub use flat::FlatTensor;
pub use strings::StringTensor;
pub use variant::{NestedTensor, Variant, VariantTensor};

use super::pool::Pool;
use super::tensor::Tensor;
use crate::wire::{DType, Shape, TensorMeta};
use bytes::Bytes;
use reader::Proto;
use sink::{Sink, count};

/// Tensors of variants that may lie inside each other, the outermost included.
pub const MAX_DEPTH: usize = 32;

// Fields of TensorProto.
const DTYPE: u32 = 1;
const TENSOR_SHAPE: u32 = 2;
const TENSOR_CONTENT: u32 = 4;
const STRING_VAL: u32 = 8;
const VARIANT_VAL: u32 = 15;
// Of TensorShapeProto.
const DIM: u32 = 2;
const UNKNOWN_RANK: u32 = 3;
// Of TensorShapeProto.Dim.
const SIZE: u32 = 1;
// Of VariantTensorDataProto.
const TYPE_NAME: u32 = 1;
const METADATA: u32 = 2;
const TENSORS: u32 = 3;

/// A tensor's bytes, for slices of them that keep the tensor.
struct Held(Tensor);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn bytes_of(tensor: &Tensor) -> Bytes {
    Bytes::from_owner(Held(tensor.clone()))
}

/// What every `TensorProto` begins with.
fn put_head(sink: &mut dyn Sink, dtype: DType, shape: &Shape) {
    sink::number(sink, DTYPE, dtype.code().into());
    sink.message(TENSOR_SHAPE, &|sink| {
        for dim in shape.dims() {
            sink.message(DIM, &|sink| sink::number(sink, SIZE, *dim));
        }
    });
}

/// Writes a message into a tensor of the pool that has just its length.
fn to_tensor(
    pool: &Pool,
    dtype: DType,
    shape: &Shape,
    body: &dyn Fn(&mut dyn Sink),
) -> Result<Tensor, SerializeError> {
    let meta = TensorMeta::serialized(dtype, shape.clone(), count(body))?;
    let mut tensor = pool.tensor(meta)?;
    sink::fill(tensor.bytes_mut(), body);
    Ok(tensor.freeze())
}

/// Reads the message that a tensor of this element type must be.
fn read<T>(
    tensor: &Tensor,
    dtype: DType,
    of: impl FnOnce(&Proto<'_>) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    if tensor.dtype() != dtype {
        return Err(DecodeError::DType { have: tensor.dtype(), want: dtype });
    }
    let bytes = bytes_of(tensor);
    let proto = Proto::read(&bytes, &bytes)?;
    if proto.dtype != dtype {
        return Err(DecodeError::DType { have: proto.dtype, want: dtype });
    }
    if proto.shape != *tensor.shape() {
        let (have, meta) = (proto.shape.clone(), tensor.shape().clone());
        return Err(DecodeError::Shape { have, meta });
    }
    of(&proto)
}

/// Whether there are as many values as the shape has elements.
fn check_count(shape: &Shape, given: usize) -> Result<(), (usize, u64)> {
    // A shape without a number of elements has more than any list.
    let expected = shape.elements().unwrap_or(u64::MAX);
    if given as u64 == expected { Ok(()) } else { Err((given, expected)) }
}
