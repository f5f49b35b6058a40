//! Reading protobuf's encoding, which a peer has written.

use super::sink::{COUNTED, VARINT};
use super::*;
use crate::wire::{MAX_DIM, MAX_RANK};

/// Wire types of fields that are skipped.
const EIGHT_BYTES: u32 = 1;
const FOUR_BYTES: u32 = 5;

/// One field of a message.
pub(super) struct Field<'a> {
    pub number: u32,
    value: FieldValue<'a>,
    at: usize,
}

enum FieldValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Skipped,
}

impl<'a> Field<'a> {
    pub fn bytes(&self) -> Result<&'a [u8], DecodeError> {
        match self.value {
            FieldValue::Bytes(bytes) => Ok(bytes),
            _ => Err(self.malformed("a field has a number instead of bytes")),
        }
    }

    pub fn number(&self) -> Result<u64, DecodeError> {
        match self.value {
            FieldValue::Number(number) => Ok(number),
            _ => Err(self.malformed("a field has bytes instead of a number")),
        }
    }

    pub fn malformed(&self, what: &'static str) -> DecodeError {
        DecodeError::Malformed { at: self.at, what }
    }
}

/// The fields of a message, in order.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
    /// Where the whole serialised form begins, for errors.
    start: usize,
}

impl<'a> Fields<'a> {
    /// The fields of `message`, which lies inside `whole`.
    pub fn of(whole: &[u8], message: &'a [u8]) -> Self {
        Fields { rest: message, start: whole.as_ptr().addr() }
    }

    fn at(&self) -> usize {
        self.rest.as_ptr().addr() - self.start
    }

    fn field(&mut self) -> Result<Field<'a>, DecodeError> {
        let at = self.at();
        let malformed = |what| DecodeError::Malformed { at, what };
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).ok().filter(|number| (1..1 << 29).contains(number));
        let number = number.ok_or_else(|| malformed("a field has no number that there is"))?;
        let value = match key as u32 & 7 {
            VARINT => FieldValue::Number(self.varint()?),
            COUNTED => {
                let len = usize::try_from(self.varint()?).unwrap_or(usize::MAX);
                FieldValue::Bytes(self.take(len, at)?)
            }
            EIGHT_BYTES => self.take(8, at).map(|_| FieldValue::Skipped)?,
            FOUR_BYTES => self.take(4, at).map(|_| FieldValue::Skipped)?,
            _ => return Err(malformed("a field has a wire type that there is not")),
        };
        Ok(Field { number, value, at })
    }

    fn take(&mut self, len: usize, at: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            return Err(DecodeError::Malformed { at, what: "a field is longer than what is there" });
        };
        self.rest = rest;
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u64, DecodeError> {
        let at = self.at();
        let mut value = 0;
        for (index, byte) in self.rest.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * index);
            if *byte < 0x80 {
                // The tenth byte has the highest bit alone.
                if index == 9 && *byte > 1 {
                    break;
                }
                self.rest = &self.rest[index + 1..];
                return Ok(value);
            }
        }
        let what =
            if self.rest.len() < 10 { "a number is cut off" } else { "a number has more than 64 bits" };
        Err(DecodeError::Malformed { at, what })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// A `TensorProto`, with its values not read yet.
pub(super) struct Proto<'a> {
    pub dtype: DType,
    pub shape: Shape,
    /// The serialised form that it is a part of.
    pub whole: &'a Bytes,
    message: &'a [u8],
}

impl<'a> Proto<'a> {
    /// Reads `message`, which lies inside `whole`.
    pub fn read(whole: &'a Bytes, message: &'a [u8]) -> Result<Self, DecodeError> {
        let mut code = 0;
        let mut dims = Dims { dims: [0; MAX_RANK], rank: 0 };
        for field in Fields::of(whole, message) {
            let field = field?;
            match field.number {
                DTYPE => code = field.number()?,
                TENSOR_SHAPE => dims.read(whole, field.bytes()?)?,
                _ => {}
            }
        }
        let malformed = |what| Fields::of(whole, message).malformed(what);
        let dtype = u8::try_from(code).ok().and_then(DType::from_code);
        let dtype = dtype.ok_or_else(|| malformed("a tensor has no element type that there is"))?;
        let shape = Shape::new(&dims.dims[..dims.rank]);
        let shape = shape.map_err(|_| malformed("a tensor has no shape that there is"))?;
        Ok(Proto { dtype, shape, whole, message })
    }

    /// The occurrences of a field with bytes, which every occurrence must have.
    pub fn all(&self, number: u32) -> impl Iterator<Item = Result<&'a [u8], DecodeError>> + use<'a> {
        Fields::of(self.whole, self.message).filter_map(move |field| match field {
            Ok(field) => (field.number == number).then(|| field.bytes()),
            Err(error) => Some(Err(error)),
        })
    }

    /// As [`Proto::all`], of which there must be as many as the tensor has elements.
    pub fn values<T>(
        &self,
        number: u32,
        mut read: impl FnMut(&'a [u8]) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = self.all(number).try_fold(0, |count, value| value.map(|_| count + 1))?;
        check_count(&self.shape, count)
            .map_err(|(given, expected)| DecodeError::Count { given: given as u64, expected })?;
        let mut values = Vec::with_capacity(count);
        for value in self.all(number) {
            values.push(read(value?)?);
        }
        Ok(values)
    }

    /// Bytes of it, as a slice that keeps the tensor.
    pub fn slice(&self, bytes: &[u8]) -> Bytes {
        self.whole.slice_ref(bytes)
    }
}

impl Fields<'_> {
    pub fn malformed(&self, what: &'static str) -> DecodeError {
        DecodeError::Malformed { at: self.at(), what }
    }
}

/// The dimensions of a `TensorShapeProto`.
struct Dims {
    dims: [u64; MAX_RANK],
    rank: usize,
}

impl Dims {
    /// Adds the dimensions of a message: a shape that comes in two parts is one, as in all of protobuf.
    fn read(&mut self, whole: &Bytes, message: &[u8]) -> Result<(), DecodeError> {
        for field in Fields::of(whole, message) {
            let field = field?;
            match field.number {
                DIM => {
                    let place = self.dims.get_mut(self.rank);
                    let place =
                        place.ok_or_else(|| field.malformed("a shape has more than 254 dimensions"))?;
                    *place = size(whole, field.bytes()?)?;
                    self.rank += 1;
                }
                UNKNOWN_RANK if field.number()? != 0 => {
                    return Err(field.malformed("a tensor's rank is not known"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn size(whole: &Bytes, message: &[u8]) -> Result<u64, DecodeError> {
    let mut size = 0;
    for field in Fields::of(whole, message) {
        let field = field?;
        if field.number == SIZE {
            size = field.number()?;
            if size > MAX_DIM {
                return Err(field.malformed("a dimension is negative"));
            }
        }
    }
    Ok(size)
}
