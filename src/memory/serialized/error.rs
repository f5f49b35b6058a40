//! Why values make no tensor, and why a tensor has no such values.

use super::MAX_DEPTH;
use crate::memory::PoolError;
use crate::wire::{DType, Shape, ShapeError};
use std::fmt;

/// Why values can't be made a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SerializeError {
    /// The shape has another number of elements.
    #[error("{given} values were given for a shape of {expected} elements")]
    Count {
        /// How many were given.
        given: usize,
        /// How many the shape has.
        expected: u64,
    },
    /// Variants lie too deep inside each other.
    #[error("tensors of variants lie more than {max} deep inside each other: flatten them")]
    Depth {
        /// How deep they may lie.
        max: usize,
    },
    /// A nested tensor is serialised already.
    #[error("a tensor of {dtype} is no flat one: read it with `from_tensor`, and nest what comes of that")]
    NotFlat {
        /// Its element type.
        dtype: DType,
    },
    /// The shape or the length is too large.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The pool has no room for it.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Why a tensor has no such values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// It has another element type.
    #[error("a tensor of {have} was read as one of {want}")]
    DType {
        /// Its element type.
        have: DType,
        /// The one that was asked for.
        want: DType,
    },
    /// Its serialised form has another shape than its meta-data says.
    #[error("the serialised form has the shape {have:?}, and the tensor has {meta:?}: its sender broke it")]
    Shape {
        /// The shape in the serialised form.
        have: Shape,
        /// The tensor's.
        meta: Shape,
    },
    /// It has another number of values than elements.
    #[error("the serialised form has {given} values for a shape of {expected} elements: its sender broke it")]
    Count {
        /// Values, or bytes of a flat tensor.
        given: u64,
        /// How many there must be.
        expected: u64,
    },
    /// The bytes are no such message.
    #[error("the serialised form is no tensor: {what}; its sender broke it, or is of another version")]
    Malformed {
        /// What is wrong, and in which field.
        what: String,
    },
    /// Variants lie too deep inside each other.
    #[error("the serialised form has tensors of variants more than {max} deep inside each other")]
    Depth {
        /// How deep they may lie.
        max: usize,
    },
}

impl DecodeError {
    pub(super) fn malformed(what: impl fmt::Display) -> Self {
        DecodeError::Malformed { what: what.to_string() }
    }

    /// What prost could not read.
    ///
    /// It gives up a hundred messages deep, which is deeper than variants may lie, and its errors have no kinds. But they name
    /// each message on the way to the mistake, so that what lies too deep is told from what is broken.
    pub(super) fn of_prost(error: prost::DecodeError) -> Self {
        let what = error.to_string();
        match what.matches("VariantTensorDataProto.tensors:").count() {
            deep if deep > MAX_DEPTH => DecodeError::Depth { max: MAX_DEPTH },
            _ => DecodeError::Malformed { what },
        }
    }
}
