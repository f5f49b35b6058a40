//! The messages of edge windows (`docs/design/edge-windows.md`).
//!
//! Type byte, message and the fields after the type byte. An edge is number u32 and generation u16:
//!
//! * 32 `ANNOUNCE`: flags u8, edge, limit u64, with the resume flag values u64. Then source
//!   incarnation u64, frame u64, iteration u64, source, destination, name (each u16 length +
//!   UTF-8).
//! * 33 `CREDIT`: edge, limit u64, values that came u64, held values u32
//! * 34 `NEED`, 35 `UNNEED`: edge, step u64
//! * 36 `RETIRE`: edge, values that came u64
//! * 37 `RETIRED`, 43 `FLUSH`: edge
//! * 38 `RESUMED`
//! * 39 `META`: meta, whose version is the id of later records
//! * 40 `RECORD`: flags u8, n u16, edge, meta id u16, step u64, with the checksum flag checksum
//!   u64. The kind in the flags says what follows. It is the bytes of the tensor, or nothing if the
//!   record is the message of a loan. The borrow flag lets the receiver keep the loan. Dead values
//!   and errors have meta id 0. An error has a status behind. An offered tensor has its offer u32.
//! * 41 `REFUSED`: flags u8, edge, status
//! * 42 `STEPS_OVER`: flags u8, first u64, last u64, without the clean-up flag a status
//! * 44 `GRANT`: offer u32, immediate u32, grant
//! * 45 `DECLINE`: offer u32
//!
//! A meta is that of [`Message`](super::Message). A status is code u8, message and details (each
//! u32 length + bytes); the derived flag belongs to it.

use super::decode::MessageReader;
use super::encode::{derived_flag, put_bytes, put_grant, put_meta, put_status};
use super::{FLAG_DERIVED, MessageError, VersionedMeta};
use crate::wire::{EdgeId, Grant, Immediate, ImmediateKind, Status};

const ANNOUNCE: u8 = 32;
const CREDIT: u8 = 33;
const NEED: u8 = 34;
const UNNEED: u8 = 35;
const RETIRE: u8 = 36;
const RETIRED: u8 = 37;
const RESUMED: u8 = 38;
const META: u8 = 39;
pub(super) const RECORD: u8 = 40;
const REFUSED: u8 = 41;
const STEPS_OVER: u8 = 42;
const FLUSH: u8 = 43;
const GRANT: u8 = 44;
const DECLINE: u8 = 45;

// Flags of `ANNOUNCE`.
const FLAG_RESUME: u8 = 1;
const FLAG_BORROW: u8 = 2;
const FLAG_VALIDATE: u8 = 4;
// Flags of `STEPS_OVER`, beside the derived flag.
const FLAG_CLEANED_UP: u8 = 2;
// Flags of `RECORD`. The derived flag is the first, as elsewhere.
pub(super) const FLAG_ANSWERS_NEED: u8 = 2;
pub(super) const FLAG_CHECKSUM: u8 = 4;
pub(super) const FLAG_MAY_BORROW: u8 = 32;
pub(super) const KIND_BYTES: u8 = 0;
pub(super) const KIND_LOAN: u8 = 8;
const KIND_DEAD: u8 = 16;
const KIND_ERROR: u8 = 24;
const KIND_OFFER: u8 = 64;
const KINDS: u8 = KIND_ERROR | KIND_OFFER;

/// The name of an edge without its step, as a receiver announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeAnnouncement<'a> {
    /// The life of the source that the receiver means.
    pub incarnation: u64,
    /// Number of the loop, 0 outside of loops.
    pub frame: u64,
    /// Pass of the loop, from 0.
    pub iteration: u64,
    /// The sending device.
    pub source: &'a str,
    /// The receiving device.
    pub destination: &'a str,
    /// Tells edges of the same two devices apart, such as `grad/7`.
    pub name: &'a str,
    /// Whether the receiver borrows tensors where they lie.
    pub borrow: bool,
    /// Whether each record with bytes must have their checksum.
    pub validate: bool,
}

/// A tensor in the message, a dead value, or an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordValue<'a> {
    /// A tensor, whose bytes are in the record.
    Bytes {
        /// The version of its meta-data.
        meta: u16,
        /// Elements, or the serialised form.
        data: &'a [u8],
    },
    /// The mark of a branch not taken: no bytes follow.
    Dead,
    /// A tensor that its sender keeps until the receiver grants it a destination, or declines it.
    Offer {
        /// The version of its meta-data.
        meta: u16,
        /// Names the tensor at its sender.
        offer: u32,
    },
    /// The sender failed to send the value.
    Error(Status),
}

/// A message of edge windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WindowMessage<'a> {
    /// An edge has a number from now on.
    Announce {
        /// The number.
        edge: EdgeId,
        /// Values that may be sent since the announcement.
        limit: u64,
        /// After a repair: the values that came before.
        resume: Option<u64>,
        /// The name of the edge.
        name: EdgeAnnouncement<'a>,
    },
    /// More values may be sent.
    Credit {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Values that may be sent since the announcement.
        limit: u64,
        /// Values that came since the announcement.
        came: u64,
        /// Values that no receive has taken.
        held: u32,
    },
    /// One value of a step may be sent outside the credit.
    Need {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Step id.
        step: u64,
    },
    /// The needs of a step are taken back.
    Unneed {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Step id.
        step: u64,
    },
    /// The receiver gives the number back.
    Retire {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Values that came since the announcement.
        came: u64,
    },
    /// The number is free.
    Retired {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
    },
    /// After a repair: each edge was announced again.
    Resumed,
    /// Meta-data of later records.
    Meta(VersionedMeta),
    /// A value.
    Record {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// The lowest bits of the count of values.
        n: u16,
        /// Step id.
        step: u64,
        /// Whether the value answers a need.
        answers_need: bool,
        /// The checksum of the tensor's bytes.
        checksum: Option<u64>,
        /// By the kind in the flags.
        value: RecordValue<'a>,
    },
    /// The sender does not serve the edge.
    Refused {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// The reason.
        status: Status,
    },
    /// The sender waits until its values are taken.
    Flush {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
    },
    /// Steps have ended at the sender.
    StepsOver {
        /// Id of the earliest ended step.
        first: u64,
        /// Id of the latest ended step, itself included.
        last: u64,
        /// The error of receives that ask for their values; `None` for steps that were cleaned up.
        status: Option<Status>,
    },
    /// The destination of an offered tensor.
    Grant {
        /// As in its record.
        offer: u32,
        /// The immediate of the write, of the plain kind.
        immediate: Immediate,
        /// As many bytes as the tensor has.
        target: Grant,
    },
    /// No receive takes an offered tensor.
    Decline {
        /// As in its record.
        offer: u32,
    },
}

impl<'a> WindowMessage<'a> {
    /// Appends the message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            WindowMessage::Announce { edge, limit, resume, name } => {
                put_announce(out, *edge, (*limit, *resume), name);
            }
            WindowMessage::Credit { edge, limit, came, held } => {
                put_edge_number(out, CREDIT, *edge, *limit);
                out.extend(came.to_le_bytes());
                out.extend(held.to_le_bytes());
            }
            WindowMessage::Need { edge, step } => put_edge_number(out, NEED, *edge, *step),
            WindowMessage::Unneed { edge, step } => put_edge_number(out, UNNEED, *edge, *step),
            WindowMessage::Retire { edge, came } => put_edge_number(out, RETIRE, *edge, *came),
            WindowMessage::Retired { edge } => {
                out.push(RETIRED);
                put_edge(out, *edge);
            }
            WindowMessage::Flush { edge } => {
                out.push(FLUSH);
                put_edge(out, *edge);
            }
            WindowMessage::Resumed => out.push(RESUMED),
            WindowMessage::Meta(meta) => {
                out.push(META);
                put_meta(out, meta);
            }
            WindowMessage::Record { edge, n, step, answers_need, checksum, value } => {
                put_record(out, *edge, (*n, *step, *answers_need), *checksum, value);
            }
            WindowMessage::Refused { edge, status } => {
                out.extend([REFUSED, derived_flag(status)]);
                put_edge(out, *edge);
                put_status(out, status);
            }
            WindowMessage::StepsOver { first, last, status } => {
                out.extend([STEPS_OVER, status.as_ref().map_or(FLAG_CLEANED_UP, derived_flag)]);
                out.extend(first.to_le_bytes());
                out.extend(last.to_le_bytes());
                status.iter().for_each(|status| put_status(out, status));
            }
            WindowMessage::Grant { offer, immediate, target } => {
                out.push(GRANT);
                out.extend(offer.to_le_bytes());
                out.extend(immediate.to_bits().to_le_bytes());
                put_grant(out, target);
            }
            WindowMessage::Decline { offer } => {
                out.push(DECLINE);
                out.extend(offer.to_le_bytes());
            }
        }
    }

    /// Reads one whole message.
    ///
    /// # Errors
    /// If the bytes are not exactly one message of this version.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        MessageReader::whole(bytes, MessageReader::window_message)
    }
}

impl<'a> MessageReader<'a> {
    fn window_message(&mut self) -> Result<WindowMessage<'a>, MessageError> {
        Ok(match self.kind {
            ANNOUNCE => self.announce()?,
            CREDIT => WindowMessage::Credit {
                edge: self.edge()?,
                limit: self.u64("limit")?,
                came: self.u64("values")?,
                held: self.u32("held values")?,
            },
            NEED => WindowMessage::Need { edge: self.edge()?, step: self.u64("step")? },
            UNNEED => WindowMessage::Unneed { edge: self.edge()?, step: self.u64("step")? },
            RETIRE => WindowMessage::Retire { edge: self.edge()?, came: self.u64("values")? },
            RETIRED => WindowMessage::Retired { edge: self.edge()? },
            FLUSH => WindowMessage::Flush { edge: self.edge()? },
            RESUMED => WindowMessage::Resumed,
            META => WindowMessage::Meta(self.meta()?),
            RECORD => self.record()?,
            REFUSED => {
                let flags = self.flags(FLAG_DERIVED)?;
                WindowMessage::Refused { edge: self.edge()?, status: self.status(flags)? }
            }
            STEPS_OVER => {
                let flags = self.flags(FLAG_DERIVED | FLAG_CLEANED_UP)?;
                let (first, last) = (self.u64("first step")?, self.u64("last step")?);
                let status = match flags & FLAG_CLEANED_UP {
                    0 => Some(self.status(flags)?),
                    _ if flags == FLAG_CLEANED_UP => None,
                    _ => return Err(self.bad("flags", flags.into())),
                };
                WindowMessage::StepsOver { first, last, status }
            }
            GRANT => {
                let (offer, immediate) = (self.u32("offer")?, self.plain_immediate()?);
                WindowMessage::Grant { offer, immediate, target: self.grant()? }
            }
            DECLINE => WindowMessage::Decline { offer: self.u32("offer")? },
            kind => return Err(MessageError::Kind { kind }),
        })
    }

    fn announce(&mut self) -> Result<WindowMessage<'a>, MessageError> {
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
        Ok(WindowMessage::Announce { edge, limit, resume, name })
    }

    fn record(&mut self) -> Result<WindowMessage<'a>, MessageError> {
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
            _ => return Err(self.bad("flags", flags.into())),
        };
        let is_error = matches!(value, RecordValue::Error(_));
        let has_bytes = matches!(value, RecordValue::Bytes { .. } | RecordValue::Offer { .. });
        if (derived != 0 && !is_error) || (checksum.is_some() && !has_bytes) {
            return Err(self.bad("flags", flags.into()));
        }
        if !has_bytes && meta != 0 {
            return Err(self.bad("meta id", meta.into()));
        }
        let answers_need = flags & FLAG_ANSWERS_NEED != 0;
        Ok(WindowMessage::Record { edge, n, step, answers_need, checksum, value })
    }

    fn edge(&mut self) -> Result<EdgeId, MessageError> {
        Ok(EdgeId { number: self.u32("edge")?, generation: self.u16("generation")? })
    }

    fn plain_immediate(&mut self) -> Result<Immediate, MessageError> {
        let bits = self.u32("immediate")?;
        let immediate = Immediate::from_bits(bits).ok();
        immediate
            .filter(|immediate| immediate.kind == ImmediateKind::Plain)
            .ok_or_else(|| self.bad("immediate", bits.into()))
    }
}

fn put_edge(out: &mut Vec<u8>, edge: EdgeId) {
    out.extend(edge.number.to_le_bytes());
    out.extend(edge.generation.to_le_bytes());
}

fn put_edge_number(out: &mut Vec<u8>, kind: u8, edge: EdgeId, number: u64) {
    out.push(kind);
    put_edge(out, edge);
    out.extend(number.to_le_bytes());
}

fn put_announce(
    out: &mut Vec<u8>,
    edge: EdgeId,
    (limit, resume): (u64, Option<u64>),
    name: &EdgeAnnouncement<'_>,
) {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let resumes = flag(resume.is_some(), FLAG_RESUME);
    out.extend([ANNOUNCE, resumes | flag(name.borrow, FLAG_BORROW) | flag(name.validate, FLAG_VALIDATE)]);
    put_edge(out, edge);
    let numbers = [Some(limit), resume, Some(name.incarnation), Some(name.frame), Some(name.iteration)];
    numbers.into_iter().flatten().for_each(|number| out.extend(number.to_le_bytes()));
    for part in [name.source, name.destination, name.name] {
        put_bytes(out, part.as_bytes());
    }
}

fn put_record(
    out: &mut Vec<u8>,
    edge: EdgeId,
    (n, step, answers_need): (u16, u64, bool),
    checksum: Option<u64>,
    value: &RecordValue<'_>,
) {
    let kind = match value {
        RecordValue::Bytes { .. } => KIND_BYTES,
        RecordValue::Dead => KIND_DEAD,
        RecordValue::Offer { .. } => KIND_OFFER,
        RecordValue::Error(status) => KIND_ERROR | derived_flag(status),
    };
    let needed = if answers_need { FLAG_ANSWERS_NEED } else { 0 };
    let checked = if checksum.is_some() { FLAG_CHECKSUM } else { 0 };
    let meta = match value {
        RecordValue::Bytes { meta, .. } | RecordValue::Offer { meta, .. } => *meta,
        RecordValue::Dead | RecordValue::Error(_) => 0,
    };
    out.extend([RECORD, kind | needed | checked]);
    out.extend(n.to_le_bytes());
    put_edge(out, edge);
    out.extend(meta.to_le_bytes());
    out.extend(step.to_le_bytes());
    checksum.into_iter().for_each(|checksum| out.extend(checksum.to_le_bytes()));
    match value {
        RecordValue::Bytes { data, .. } => out.extend_from_slice(data),
        RecordValue::Dead => {}
        RecordValue::Offer { offer, .. } => out.extend(offer.to_le_bytes()),
        RecordValue::Error(status) => put_status(out, status),
    }
}
