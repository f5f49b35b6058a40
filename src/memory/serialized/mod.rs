//! Tensors whose elements have no fixed size, as the bytes that travel: strings and variants.
//!
//! The bytes are a protobuf message `TensorProto`, whose fields are TensorFlow's (`proto/tensorwire/v1/tensor.proto`), written
//! and read by prost. It is written straight into a tensor of the pool, and read from where it has landed: what is read
//! refers to the tensor's bytes and keeps the tensor, so no string is copied.
//!
//! Reading is the caller's, on the caller's thread: no poller looks into these bytes. They are a peer's, so everything is checked before it
//! is used. prost checks each length against what is there; then the element type and the shape are checked against the tensor's
//! meta-data, the number of values against the shape, and the depth of nesting against [`MAX_DEPTH`]. prost's tables of
//! values grow as values come, whatever a length or a shape claims: a string takes 32 bytes, and of a tensor of variants an
//! element of any table 120 at most, three times that while its table grows, for at least two bytes that came
//! (tests/memory/alloc_free.rs). Values of another kind than the tensor's are refused before prost makes anything of them.
//!
//! | file | |
//! |---|---|
//! | `generated` | the messages, as prost makes them of the .proto (tests/repo/codegen.rs) |
//! | `strings`, `variant`, `flat` | what there is, to and from a message |
#![deny(unsafe_code)]

mod error;
mod flat;
#[rustfmt::skip]
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
mod generated;
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
use generated::tensor_shape_proto::Dim;
use generated::{TensorProto, TensorShapeProto, VariantTensorDataProto};
use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use std::ops::RangeInclusive;

/// Tensors of variants that may lie inside each other, the outermost included.
pub const MAX_DEPTH: usize = 32;

/// The fields of `TensorProto` with the values of each kind of tensor.
const STRING_VAL: u32 = 8;
const VARIANT_VAL: u32 = 15;

// What an element of a table takes (above).
const _: () = assert!(size_of::<Bytes>() <= 32);
const _: () = assert!(size_of::<TensorProto>() <= 120 && size_of::<NestedTensor>() <= 120);
const _: () = assert!(size_of::<VariantTensorDataProto>() <= 120 && size_of::<Variant>() <= 120);

/// A tensor's bytes, for slices of them that keep the tensor.
struct TensorBytes(Tensor);

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn bytes_of(tensor: &Tensor) -> Bytes {
    Bytes::from_owner(TensorBytes(tensor.clone()))
}

/// A message without values.
fn head(dtype: DType, shape: &Shape) -> TensorProto {
    // A dimension has 63 bits.
    let dim = shape.dims().iter().map(|dim| Dim { size: *dim as i64 }).collect();
    TensorProto {
        dtype: dtype.code().into(),
        tensor_shape: Some(TensorShapeProto { dim, unknown_rank: false }),
        ..TensorProto::default()
    }
}

/// Writes a message into a tensor of the pool that has just its length.
fn to_tensor(
    pool: &Pool,
    dtype: DType,
    shape: &Shape,
    message: &TensorProto,
) -> Result<Tensor, SerializeError> {
    let meta = TensorMeta::serialized(dtype, shape.clone(), message.encoded_len() as u64)?;
    let mut tensor = pool.tensor(meta)?;
    let mut rest = tensor.bytes_mut();
    let written = message.encode(&mut rest);
    assert!(written.is_ok() && rest.is_empty(), "a message is written as it was counted");
    Ok(tensor.freeze())
}

/// Reads the message that a tensor of this element type must be, and its shape.
fn read(tensor: &Tensor, dtype: DType) -> Result<(Shape, TensorProto), DecodeError> {
    if tensor.dtype() != dtype {
        return Err(DecodeError::DType { have: tensor.dtype(), want: dtype });
    }
    check_kind(tensor.bytes(), dtype)?;
    let message = TensorProto::decode(bytes_of(tensor)).map_err(DecodeError::of_prost)?;
    let (have, shape) = read_head(&message)?;
    if have != dtype {
        return Err(DecodeError::DType { have, want: dtype });
    }
    if shape != *tensor.shape() {
        return Err(DecodeError::Shape { have: shape, meta: tensor.shape().clone() });
    }
    Ok((shape, message))
}

/// The fields of TensorFlow's message that have values, each of another kind: ours are among them.
const VALUES: RangeInclusive<u32> = 4..=18;

/// Refuses values of another kind than this element type's: they would take far more memory than came, and be of no use. Looks at
/// the outermost fields' keys and lengths alone, with prost's own eyes. Where those are broken the rest is for prost to refuse.
fn check_kind(mut form: &[u8], dtype: DType) -> Result<(), DecodeError> {
    let own = if dtype == DType::String { STRING_VAL } else { VARIANT_VAL };
    while let Ok((field, wire)) = decode_key(&mut form) {
        if VALUES.contains(&field) && field != own {
            let what = format_args!("a tensor of {dtype} has values of another kind, in field {field}");
            return Err(DecodeError::malformed(what));
        }
        if skip_field(wire, field, &mut form, DecodeContext::default()).is_err() {
            break;
        }
    }
    Ok(())
}

/// The element type and the shape of a message; a scalar's where it has none.
fn read_head(message: &TensorProto) -> Result<(DType, Shape), DecodeError> {
    let code = message.dtype;
    let dtype = u8::try_from(code).ok().and_then(DType::from_code).ok_or_else(|| {
        DecodeError::malformed(format_args!("a tensor has no element type that there is: {code}"))
    })?;
    let Some(shape) = &message.tensor_shape else { return Ok((dtype, Shape::SCALAR)) };
    if shape.unknown_rank {
        return Err(DecodeError::malformed("a tensor's rank is not known"));
    }
    let dims = shape.dim.iter().map(|dim| {
        let negative = || DecodeError::malformed(format_args!("a dimension is negative: {}", dim.size));
        u64::try_from(dim.size).map_err(|_| negative())
    });
    let dims: Vec<u64> = dims.collect::<Result<_, _>>()?;
    Ok((dtype, Shape::new(&dims).map_err(DecodeError::malformed)?))
}

/// Whether there are as many values as the shape has elements.
fn check_count(shape: &Shape, given: usize) -> Result<(), (usize, u64)> {
    // A shape without a number of elements has more than any list.
    let expected = shape.elements().unwrap_or(u64::MAX);
    if given as u64 == expected { Ok(()) } else { Err((given, expected)) }
}

/// As [`check_count`], of values that came.
fn check_read(shape: &Shape, given: usize) -> Result<(), DecodeError> {
    check_count(shape, given)
        .map_err(|(given, expected)| DecodeError::Count { given: given as u64, expected })
}
