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

pub(super) struct MessageReader<'a> {
    pub(super) kind: u8,
    len: usize,
    pub(super) rest: &'a [u8],
}

impl<'a> MessageReader<'a> {
    /// Reads the type byte, and the rest of the message by `read`, which must use all bytes.
    pub(super) fn whole<T>(
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

    fn message(&mut self) -> Result<Message<'a>, MessageError> {
        Ok(match self.kind {
            PING => Message::Ping { version: self.u16("version")?, nonce: self.u64("nonce")? },
            PONG => Message::Pong { nonce: self.u64("nonce")? },
            ROUTE => Message::Route {
                number: self.u32("number")?,
                incarnation: self.u64("incarnation")?,
                source: self.text("source")?,
                destination: self.text("destination")?,
                edge: self.text("edge")?,
            },
            ROUTE_DROP => Message::RouteDrop { number: self.u32("number")? },
            TENSOR_REQUEST => Message::Request(self.tensor_request()?),
            META_DATA_RESPONSE => {
                let follows = match self.u8("flags")? {
                    0 => Follows::ReRequest,
                    FLAG_LOAN_FOLLOWS => Follows::Loan,
                    FLAG_WRITE_FOLLOWS => Follows::Write,
                    flags => return Err(self.bad("flags", flags.into())),
                };
                Message::Meta { request: self.request()?, follows, meta: self.meta()? }
            }
            TENSOR_RE_REQUEST => Message::ReRequest { request: self.request()?, grant: self.grant()? },
            TENSOR_RESPONSE => {
                let flags = self.flags(FLAG_CACHED)?;
                let request = self.request()?;
                let meta = match flags {
                    0 => MetaRef::New(self.meta()?),
                    _ => MetaRef::Cached(self.u32("meta version")?),
                };
                Message::Response { request, meta, data: std::mem::take(&mut self.rest) }
            }
            CANCEL => Message::Cancel { request: self.request()? },
            CANCEL_ACK => Message::CancelAck { request: self.request()? },
            ERROR_STATUS => {
                let flags = self.flags(FLAG_DERIVED)?;
                let request = self.request()?;
                Message::Error { request, status: self.status(flags)? }
            }
            RETURN => Message::Return {
                request: self.request()?,
                route: self.u32("route")?,
                step: self.u64("step")?,
                frame: self.u64("frame")?,
                iteration: self.u64("iteration")?,
                stash_id: self.u32("stash id")?,
            },
            STASHED_RESPONSE => {
                Message::Stashed { request: self.request()?, stash_id: self.u32("stash id")? }
            }
            STANDING_REQUEST => Message::StandingRequest(self.standing_request()?),
            CHECKSUM => Message::Checksum { request: self.request()?, checksum: self.u64("checksum")? },
            kind => return Err(MessageError::Kind { kind }),
        })
    }

    fn tensor_request(&mut self) -> Result<TensorRequest, MessageError> {
        let flags = self.flags(FLAG_GRANT | FLAG_BORROW | FLAG_VALIDATE)?;
        Ok(TensorRequest {
            request: self.request()?,
            route: self.u32("route")?,
            step: self.u64("step")?,
            frame: self.u64("frame")?,
            iteration: self.u64("iteration")?,
            meta_version: self.u32("meta version")?,
            timeout_ms: self.u32("timeout")?,
            borrow: flags & FLAG_BORROW != 0,
            validate: flags & FLAG_VALIDATE != 0,
            grant: if flags & FLAG_GRANT != 0 { Some(self.grant()?) } else { None },
        })
    }

    pub(super) fn meta(&mut self) -> Result<VersionedMeta, MessageError> {
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

    pub(super) fn placement(&mut self) -> Result<Placement, MessageError> {
        let bits = self.u8("placement")?;
        let allocator = match bits >> 1 {
            0 => Allocator::Pool,
            1 => Allocator::Heap,
            2 => Allocator::Peer,
            _ => return Err(self.bad("placement", bits.into())),
        };
        Ok(Placement { on_host: bits & 1 != 0, allocator })
    }

    pub(super) fn status(&mut self, flags: u8) -> Result<Status, MessageError> {
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

    pub(super) fn request(&mut self) -> Result<RequestId, MessageError> {
        let bits = self.u32("request")?;
        if bits >> 28 != 0 {
            return Err(self.bad("request", bits.into()));
        }
        let slot = Slot::new(bits & (Slot::COUNT - 1)).ok_or_else(|| self.bad("request", bits.into()))?;
        Ok(RequestId { slot, generation: (bits >> 20) as u8 })
    }

    pub(super) fn grant(&mut self) -> Result<Grant, MessageError> {
        Ok(Grant {
            region: self.u16("region")?,
            key: self.u32("key")?,
            offset: self.u64("offset")?,
            len: self.u64("length")?,
        })
    }

    pub(super) fn flags(&mut self, known: u8) -> Result<u8, MessageError> {
        let flags = self.u8("flags")?;
        if flags & !known == 0 { Ok(flags) } else { Err(self.bad("flags", flags.into())) }
    }

    pub(super) fn text(&mut self, field: &'static str) -> Result<&'a str, MessageError> {
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

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, MessageError> {
        Ok(self.array::<1>(field)?[0])
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, MessageError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, MessageError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, MessageError> {
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

    pub(super) fn short(&self, field: &'static str) -> MessageError {
        MessageError::Short { kind: self.kind, len: self.len, field }
    }

    pub(super) fn bad(&self, field: &'static str, value: u64) -> MessageError {
        MessageError::Value { kind: self.kind, field, value }
    }
}
