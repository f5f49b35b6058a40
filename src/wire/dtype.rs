//! Element types of tensors.

use half::{bf16, f16};
use num_complex::Complex;
use std::fmt;

/// The element type of a tensor. The codes are TensorFlow's
/// (`tensorflow/core/framework/types.proto`).
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::{DType, Element};
/// let mut tensor = node.tensor(DType::I64, &[2])?;
/// tensor.as_mut_slice::<i64>()?.copy_from_slice(&[1, 2]);
/// assert!(tensor.as_mut_slice::<u64>().is_err());
/// assert_eq!((i64::DTYPE, DType::I64.code()), (DType::I64, 9));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the documentation
pub enum DType {
    F32 = 1,
    F64 = 2,
    I32 = 3,
    U8 = 4,
    I16 = 5,
    I8 = 6,
    /// Byte strings of any length.
    String = 7,
    Complex64 = 8,
    I64 = 9,
    Bool = 10,
    Bf16 = 14,
    U16 = 17,
    Complex128 = 18,
    F16 = 19,
    /// Values of types that a trainer registers, which may hold tensors.
    Variant = 21,
    U32 = 22,
    U64 = 23,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 17] = [
        DType::Bool,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F16,
        DType::Bf16,
        DType::F32,
        DType::F64,
        DType::Complex64,
        DType::Complex128,
        DType::String,
        DType::Variant,
    ];

    /// The code that stands for this type on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The type that `code` stands for, if there is one.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Bytes of one element; `None` for strings and variants, which have no fixed size.
    pub const fn size(self) -> Option<usize> {
        match self {
            DType::Bool | DType::U8 | DType::I8 => Some(1),
            DType::U16 | DType::I16 | DType::F16 | DType::Bf16 => Some(2),
            DType::U32 | DType::I32 | DType::F32 => Some(4),
            DType::U64 | DType::I64 | DType::F64 | DType::Complex64 => Some(8),
            DType::Complex128 => Some(16),
            DType::String | DType::Variant => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::I16 => "i16",
            DType::I8 => "i8",
            DType::String => "string",
            DType::Complex64 => "complex64",
            DType::I64 => "i64",
            DType::Bool => "bool",
            DType::Bf16 => "bf16",
            DType::U16 => "u16",
            DType::Complex128 => "complex128",
            DType::F16 => "f16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::Variant => "variant",
        })
    }
}

mod sealed {
    #[allow(unnameable_types)] // sealed
    pub trait SealedElement {}
}

/// A Rust type that is the element of a tensor of type [`Element::DTYPE`].
///
/// Sealed: `bool` is checked byte by byte when it is viewed. For every other implementor each bit
/// pattern is a valid value, so a typed view of received bytes is sound.
pub trait Element: Copy + Send + Sync + 'static + sealed::SealedElement {
    /// The element type that this Rust type stands for.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::SealedElement for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    bool => Bool, u8 => U8, u16 => U16, u32 => U32, u64 => U64, i8 => I8, i16 => I16, i32 => I32,
    i64 => I64, f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64, Complex<f32> => Complex64,
    Complex<f64> => Complex128,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_come_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        let known = (0..=255).filter(|code| DType::from_code(*code).is_some());
        assert_eq!(known.count(), DType::ALL.len());
    }

    #[test]
    fn sizes_are_those_of_the_rust_types() {
        fn check<T: Element>() {
            assert_eq!(T::DTYPE.size(), Some(size_of::<T>()), "{}", T::DTYPE);
        }
        check::<bool>();
        check::<u16>();
        check::<f16>();
        check::<bf16>();
        check::<f64>();
        check::<Complex<f32>>();
        check::<Complex<f64>>();
    }

    #[test]
    fn only_strings_and_variants_have_no_fixed_size() {
        let sizeless: Vec<DType> = DType::ALL.into_iter().filter(|dtype| dtype.size().is_none()).collect();
        assert_eq!(sizeless, [DType::String, DType::Variant]);
    }
}
