//! Errors of making and reading serialised tensors.

use super::MAX_DEPTH;
use crate::memory::PoolError;
use crate::wire::{DType, Shape, ShapeError};
use std::fmt;

/// Why values can't become a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SerializeError {
    /// The number of values differs from the number of elements of the shape.
    #[error("{given} values were given for a shape of {expected} elements")]
    Count {
        /// Number of values.
        given: usize,
        /// Elements of the shape.
        expected: u64,
    },
    /// Tensors of variants are nested too deep.
    #[error("tensors of variants are nested more than {max} deep: flatten them")]
    Depth {
        /// Allowed depth.
        max: usize,
    },
    /// A nested tensor is serialised already.
    #[error("a tensor of {dtype} is not flat: read it with `from_tensor`, and nest the result")]
    NotFlat {
        /// Element type of the nested tensor.
        dtype: DType,
    },
    /// The shape or the length is too large.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The pool has no room for the tensor.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Why a tensor can't be read as values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The tensor has another element type.
    #[error("a tensor of {have} was read as one of {want}")]
    DType {
        /// Element type of the tensor.
        have: DType,
        /// Element type that was asked for.
        want: DType,
    },
    /// The serialised form has another shape than the meta-data.
    #[error("the serialised form has the shape {have:?}, the tensor {meta:?}: its sender wrote a wrong form")]
    Shape {
        /// The shape in the serialised form.
        have: Shape,
        /// Shape in the tensor's meta-data.
        meta: Shape,
    },
    /// The number of values differs from the number of elements.
    #[error("the serialised form has {given} values for {expected} elements: its sender wrote a wrong form")]
    Count {
        /// Number of values, or of bytes of a flat tensor.
        given: u64,
        /// Number that the shape requires.
        expected: u64,
    },
    /// The bytes are no such message.
    #[error(
        "the serialised form is no tensor: {what}; its sender wrote a wrong form, or uses another version"
    )]
    Malformed {
        /// The mistake, and its field.
        what: String,
    },
    /// Tensors of variants are nested too deep.
    #[error("the serialised form nests tensors of variants more than {max} deep")]
    Depth {
        /// Allowed depth.
        max: usize,
    },
}

impl DecodeError {
    pub(super) fn malformed(what: impl fmt::Display) -> Self {
        DecodeError::Malformed { what: what.to_string() }
    }

    /// Converts an error of prost.
    ///
    /// prost stops at a nesting of a hundred messages, which is deeper than variants may be, and
    /// its errors have no kinds. Their texts name each message on the way to the mistake, so the
    /// depth can be counted.
    pub(super) fn of_prost(error: prost::DecodeError) -> Self {
        let what = error.to_string();
        match what.matches("VariantTensorDataProto.tensors:").count() {
            deep if deep > MAX_DEPTH => DecodeError::Depth { max: MAX_DEPTH },
            _ => DecodeError::Malformed { what },
        }
    }
}
