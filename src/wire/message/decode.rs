//! Decoding a peer's messages.

use super::*;
use crate::wire::{Code, DType, Shape, ShapeError};

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// It ends too early.
    #[error("a message of type {kind} ends after {len} bytes, in its {field}")]
    Short {
        /// The type byte; 0 if there is none.
        kind: u8,
        /// Bytes that there are.
        len: usize,
        /// The field that is cut.
        field: &'static str,
    },
    /// It has bytes left over.
    #[error("a message of type {kind} has {extra} bytes too many")]
    Long {
        /// The type byte.
        kind: u8,
        /// Bytes left over.
        extra: usize,
    },
    /// The type is not one of this version.
    #[error("messages of type {kind} are not known in version {VERSION}")]
    Kind {
        /// The type byte.
        kind: u8,
    },
    /// A field has a value that it may not have.
    #[error("a message of type {kind} has {value} as its {field}")]
    Value {
        /// The type byte.
        kind: u8,
        /// Which field.
        field: &'static str,
        /// As it came, widened to 64 bits.
        value: u64,
    },
    /// A name is not UTF-8.
    #[error("a message of type {kind} has a {field} that is not UTF-8")]
    Text {
        /// The type byte.
        kind: u8,
        /// Which field.
        field: &'static str,
    },
    /// A shape is none.
    #[error("a message of type {kind} has a bad shape: {source}")]
    Shape {
        /// The type byte.
        kind: u8,
        /// The violated rule.
        source: ShapeError,
    },
}

impl<'a> Message<'a> {
    /// Reads one whole message.
    ///
    /// # Errors
    /// If the bytes are not exactly one message of this version.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        MessageReader::whole(bytes, MessageReader::message)
    }
}

struct MessageReader<'a> {
    kind: u8,
    len: usize,
    rest: &'a [u8],
}

impl<'a> MessageReader<'a> {
    /// Reads the type byte, and the rest of the message by `read`, which must use all bytes.
    fn whole<T>(
        bytes: &'a [u8],
        read: impl FnOnce(&mut Self) -> Result<T, MessageError>,
    ) -> Result<T, MessageError> {
        let mut reader = MessageReader { kind: 0, len: bytes.len(), rest: bytes };
        reader.kind = reader.u8("type")?;
        let message = read(&mut reader)?;
        match reader.rest.len() {
            0 => Ok(message),
            extra => Err(MessageError::Long { kind: reader.kind, extra }),
        }
    }

    fn credits(&mut self) -> Result<EdgeCredits, MessageError> {
        let (first, limit, came) = (self.edge()?, self.u64("limit")?, self.u64("values")?);
        let (held, edges) = (self.u32("held values")?, self.u8("edges")?);
        if !(1..=EdgeCredits::MOST).contains(&edges) {
            return Err(self.bad("edges", edges.into()));
        }
        let credits = EdgeCredits { first, limit, came, held, edges };
        if credits.has_numbers() { Ok(credits) } else { Err(self.bad("first edge", first.number.into())) }
    }

    fn message(&mut self) -> Result<Message<'a>, MessageError> {
        Ok(match self.kind {
            PING => Message::Ping { version: self.u16("version")?, nonce: self.u64("nonce")? },
            PONG => Message::Pong { nonce: self.u64("nonce")? },
            ANNOUNCE => self.announce()?,
            CREDIT => Message::Credit(self.credits()?),
            NEED => Message::Need { edge: self.edge()?, step: self.u64("step")? },
            UNNEED => Message::Unneed { edge: self.edge()?, step: self.u64("step")? },
            RETIRE => Message::Retire { edge: self.edge()?, came: self.u64("values")? },
            RETIRED => Message::Retired { edge: self.edge()? },
            FLUSH => Message::Flush { edge: self.edge()? },
            RESUMED => Message::Resumed,
            META => Message::Meta(self.meta()?),
            RECORD => self.record()?,
            REFUSED => {
                let flags = self.flags(FLAG_DERIVED)?;
                Message::Refused { edge: self.edge()?, status: self.status(flags)? }
            }
            STEPS_OVER => {
                let flags = self.flags(FLAG_DERIVED | FLAG_CLEANED_UP)?;
                let (first, last) = (self.u64("first step")?, self.u64("last step")?);
                if first > last {
                    return Err(self.bad("last step", last));
                }
                let status = match flags & FLAG_CLEANED_UP {
                    0 => Some(self.status(flags)?),
                    _ if flags == FLAG_CLEANED_UP => None,
                    _ => return Err(self.bad("flags", flags.into())),
                };
                Message::StepsOver { first, last, status }
            }
            GRANT => {
                let (offer, immediate) = (self.u32("offer")?, self.immediate()?);
                Message::Grant { offer, immediate, target: self.grant()? }
            }
            DECLINE => Message::Decline { offer: self.u32("offer")? },
            READY => {
                let (edge, immediate) = (self.edge()?, self.immediate()?);
                Message::Ready { edge, immediate, target: self.grant()? }
            }
            WITHDRAW => Message::Withdraw { edge: self.edge()? },
            RELEASE => Message::Release { edge: self.edge()? },
            EAGER_CREDIT => Message::EagerCredit { returned: self.u64("eager bytes")? },
            kind => return Err(MessageError::Kind { kind }),
        })
    }

    fn announce(&mut self) -> Result<Message<'a>, MessageError> {
        let flags = self.flags(FLAG_RESUME | FLAG_BORROW | FLAG_VALIDATE)?;
        let (edge, limit) = (self.edge()?, self.u64("limit")?);
        let resume = if flags & FLAG_RESUME != 0 { Some(self.u64("values")?) } else { None };
        let name = EdgeAnnouncement {
            incarnation: self.u64("incarnation")?,
            frame: self.u64("frame")?,
            iteration: self.u64("iteration")?,
            source: self.text("source")?,
            destination: self.text("destination")?,
            name: self.text("name")?,
            borrow: flags & FLAG_BORROW != 0,
            validate: flags & FLAG_VALIDATE != 0,
        };
        Ok(Message::Announce { edge, limit, resume, name })
    }

    fn record(&mut self) -> Result<Message<'a>, MessageError> {
        let flags = self.flags(FLAG_DERIVED | FLAG_ANSWERS_NEED | FLAG_CHECKSUM | KINDS)?;
        let (n, edge) = (self.u16("count")?, self.edge()?);
        let (meta, step) = (self.u16("meta id")?, self.u64("step")?);
        let checksum = if flags & FLAG_CHECKSUM != 0 { Some(self.u64("checksum")?) } else { None };
        let derived = flags & FLAG_DERIVED;
        let value = match flags & KINDS {
            KIND_BYTES => RecordValue::Bytes { meta, data: std::mem::take(&mut self.rest) },
            KIND_DEAD => RecordValue::Dead,
            KIND_ERROR => RecordValue::Error(self.status(derived)?),
            KIND_OFFER => RecordValue::Offer { meta, offer: self.u32("offer")? },
            KIND_WRITTEN => RecordValue::Written { meta },
            _ => return Err(self.bad("flags", flags.into())),
        };
        let is_error = matches!(value, RecordValue::Error(_));
        let has_bytes = !is_error && !matches!(value, RecordValue::Dead);
        if (derived != 0 && !is_error) || (checksum.is_some() && !has_bytes) {
            return Err(self.bad("flags", flags.into()));
        }
        if !has_bytes && meta != 0 {
            return Err(self.bad("meta id", meta.into()));
        }
        let answers_need = flags & FLAG_ANSWERS_NEED != 0;
        Ok(Message::Record { edge, n, step, answers_need, checksum, value })
    }

    fn edge(&mut self) -> Result<EdgeId, MessageError> {
        Ok(EdgeId { number: self.u32("edge")?, generation: self.u16("generation")? })
    }

    fn immediate(&mut self) -> Result<Immediate, MessageError> {
        let bits = self.u32("immediate")?;
        Immediate::from_bits(bits).map_err(|_| self.bad("immediate", bits.into()))
    }

    fn meta(&mut self) -> Result<VersionedMeta, MessageError> {
        let version = self.u32("meta version")?;
        if version == 0 {
            return Err(self.bad("meta version", 0));
        }
        let placement = self.placement()?;
        let code = self.u8("dtype")?;
        let dtype = DType::from_code(code).ok_or_else(|| self.bad("dtype", code.into()))?;
        let rank = usize::from(self.u8("rank")?);
        let mut dims = [0; 255];
        for dim in &mut dims[..rank] {
            *dim = self.u64("dimension")?;
        }
        let kind = self.kind;
        let len = if dtype.size().is_none() { Some(self.u64("serialised length")?) } else { None };
        let meta = Shape::new(&dims[..rank]).and_then(|shape| match len {
            Some(len) => TensorMeta::serialized(dtype, shape, len),
            None => TensorMeta::new(dtype, shape),
        });
        let meta = meta.map_err(|source| MessageError::Shape { kind, source })?;
        Ok(VersionedMeta { version, placement, meta })
    }

    fn placement(&mut self) -> Result<Placement, MessageError> {
        let bits = self.u8("placement")?;
        let allocator = match bits >> 1 {
            0 => Allocator::Pool,
            1 => Allocator::Heap,
            2 => Allocator::Peer,
            _ => return Err(self.bad("placement", bits.into())),
        };
        Ok(Placement { on_host: bits & 1 != 0, allocator })
    }

    fn status(&mut self, flags: u8) -> Result<Status, MessageError> {
        let number = self.u8("status code")?;
        let code = Code::from_number(number).filter(|code| *code != Code::Ok);
        let code = code.ok_or_else(|| self.bad("status code", number.into()))?;
        let kind = self.kind;
        let message = std::str::from_utf8(self.long("message")?)
            .map_err(|_| MessageError::Text { kind, field: "message" })?
            .to_owned();
        let details = self.long("details")?.to_vec();
        Ok(Status { code, message, details, derived: flags != 0 })
    }

    fn grant(&mut self) -> Result<Grant, MessageError> {
        Ok(Grant {
            region: self.u16("region")?,
            key: self.u32("key")?,
            offset: self.u64("offset")?,
            len: self.u64("length")?,
        })
    }

    fn flags(&mut self, known: u8) -> Result<u8, MessageError> {
        let flags = self.u8("flags")?;
        if flags & !known == 0 { Ok(flags) } else { Err(self.bad("flags", flags.into())) }
    }

    fn text(&mut self, field: &'static str) -> Result<&'a str, MessageError> {
        let kind = self.kind;
        std::str::from_utf8(self.counted(field)?).map_err(|_| MessageError::Text { kind, field })
    }

    fn counted(&mut self, field: &'static str) -> Result<&'a [u8], MessageError> {
        let len = usize::from(self.u16(field)?);
        self.bytes(len, field)
    }

    /// As [`MessageReader::counted`], with a length of 32 bits. Nothing is allocated for it before
    /// the bytes are there.
    fn long(&mut self, field: &'static str) -> Result<&'a [u8], MessageError> {
        let len = self.u32(field)?;
        let len = usize::try_from(len).map_err(|_| self.bad(field, len.into()))?;
        self.bytes(len, field)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, MessageError> {
        Ok(self.array::<1>(field)?[0])
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, MessageError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, MessageError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, MessageError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], MessageError> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.short(field));
        };
        self.rest = rest;
        Ok(*head)
    }

    fn bytes(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], MessageError> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(self.short(field));
        };
        self.rest = rest;
        Ok(head)
    }

    fn short(&self, field: &'static str) -> MessageError {
        MessageError::Short { kind: self.kind, len: self.len, field }
    }

    fn bad(&self, field: &'static str, value: u64) -> MessageError {
        MessageError::Value { kind: self.kind, field, value }
    }
}
