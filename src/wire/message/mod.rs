//! Messages between the two ends of a link.
//!
//! Little-endian, versioned by [`VERSION`], every length checked before it is used, no padding and
//! no uninitialised byte. The first byte is the type. A message longer than one control slot
//! travels as [fragments](fragment). `docs/design/edge-windows.md` says what each one means.
//!
//! Type byte, message and the fields after the type byte. An edge is number u32 and generation u16:
//!
//! * 1 `PING`: version u16, nonce u64
//! * 2 `PONG`: nonce u64
//! * 12: a [fragment](fragment) of a longer message
//! * 17 `PACKED`: other messages, each after its length as u8 ([`pack`])
//! * 32 `ANNOUNCE`: flags u8, edge, limit u64, with the resume flag values u64. Then source
//!   incarnation u64, frame u64, iteration u64, source, destination, name (each u16 length +
//!   UTF-8).
//! * 33 `CREDIT`: edge, limit u64, values that came u64, held values u32, edges u8. It is for so
//!   many edges with consecutive numbers, from this one on, and of its generation.
//! * 34 `NEED`, 35 `UNNEED`: edge, step u64
//! * 36 `RETIRE`: edge, values that came u64
//! * 37 `RETIRED`, 43 `FLUSH`: edge
//! * 38 `RESUMED`
//! * 39 `META`: meta, whose version is the id of later records
//! * 40 `RECORD`: flags u8, n u16, edge, meta id u16, step u64, with the checksum flag checksum
//!   u64. The kind in the flags says what follows. It is the bytes of the tensor, or nothing if the
//!   record is the message of a loan. The borrow flag lets the receiver keep the loan. Dead values
//!   and errors have meta id 0. An error has a status behind. An offered tensor has its offer u32.
//!   A written tensor has nothing.
//! * 41 `REFUSED`: flags u8, edge, status
//! * 42 `STEPS_OVER`: flags u8, first u64, last u64, without the clean-up flag a status
//! * 44 `GRANT`: offer u32, immediate u32, grant
//! * 45 `DECLINE`: offer u32
//! * 46 `READY`: edge, immediate u32, grant
//! * 47 `WITHDRAW`, 48 `RELEASE`: edge
//! * 49 `EAGER_CREDIT`: bytes u64
//!
//! A grant is region u16, key u32, offset u64, length u64. A meta is version u32, placement u8,
//! dtype u8, rank u8, then rank dimensions of u64. Element types without a fixed size add the
//! length u64 of the serialised form. A status is code u8, message and details (each u32 length +
//! bytes); the derived flag belongs to it.

mod credits;
mod decode;
mod encode;
pub mod fragment;
pub mod pack;
mod record;

pub use credits::EdgeCredits;
pub use decode::MessageError;
pub use record::{LentRecord, PlainRecord, SHORT_TENSOR};

use super::{EdgeId, Grant, Immediate, Status, TensorMeta};

/// The version of this protocol. Two ends with different versions don't make a link.
pub const VERSION: u16 = 7;

/// Bytes of an error's message, and of its details, that travel at most. A longer message is cut by
/// its sender, longer details are left out, and the message says so.
pub const MAX_STATUS_TEXT: usize = 256 * 1024;

/// Bytes of the longest message before it is cut into fragments: an error with as much text as
/// travels, and its header.
pub const MAX_LONG_MESSAGE: usize = 2 * MAX_STATUS_TEXT + 64;

/// The placement of a tensor, as one side states it (specification 2.3). The device itself is that
/// of the edge: its source at the sender, its destination at the receiver.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use std::time::Duration;
/// use tensorwire::{Allocator, DType, Placement};
/// let step = node.step(1)?;
/// step.send(&node.edge_to("worker", 0, "x")?, node.tensor(DType::F32, &[4])?.freeze())?;
/// let delivery = step.recv(&node.edge_from("worker", 0, "x")?, Duration::from_secs(1))?;
/// assert_eq!(delivery.receiver, Placement::POOL);
/// assert!(delivery.sender.on_host && delivery.sender.allocator == Allocator::Pool);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Placement {
    /// Whether the bytes are in host memory.
    pub on_host: bool,
    /// The allocator of the bytes.
    pub allocator: Allocator,
}

impl Placement {
    /// Host memory of the pool.
    pub const POOL: Placement = Placement { on_host: true, allocator: Allocator::Pool };
    /// Host memory of a peer's pool, borrowed.
    pub const BORROWED: Placement = Placement { on_host: true, allocator: Allocator::Peer };
    /// Ordinary host memory.
    pub const HEAP: Placement = Placement { on_host: true, allocator: Allocator::Heap };
}

/// The allocator of a tensor's bytes.
///
/// ```
/// use tensorwire::{Allocator, Placement};
/// assert_eq!(Placement::BORROWED.allocator, Allocator::Peer);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Allocator {
    /// The registered pool.
    Pool = 0,
    /// The language's heap.
    Heap = 1,
    /// A peer's pool, borrowed.
    Peer = 2,
}

/// A tensor's meta-data as its sender numbers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionedMeta {
    /// The id of later records.
    pub version: u32,
    /// Where the sender's tensor lies.
    pub placement: Placement,
    /// Element type and shape.
    pub meta: TensorMeta,
}

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
    /// A tensor that was written to the destination of [`Message::Ready`].
    Written {
        /// The version of its meta-data.
        meta: u16,
    },
    /// The sender failed to send the value.
    Error(Status),
}

/// A message between the two ends of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Is the other end there, and of the same version?
    Ping {
        /// The sender's protocol version.
        version: u16,
        /// Comes back in the answer.
        nonce: u64,
    },
    /// The answer to a ping.
    Pong {
        /// The ping's.
        nonce: u64,
    },
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
    Credit(EdgeCredits),
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
        /// The immediate of the write.
        immediate: Immediate,
        /// As many bytes as the tensor has.
        target: Grant,
    },
    /// No receive takes an offered tensor.
    Decline {
        /// As in its record.
        offer: u32,
    },
    /// The destination of the next tensor of an edge that has as many bytes.
    Ready {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// The immediate of the write.
        immediate: Immediate,
        /// As many bytes as the tensor must have.
        target: Grant,
    },
    /// The receiver wants the destination of [`Message::Ready`] back, unless it is used.
    Withdraw {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
    },
    /// The sender does not use the destination of [`Message::Ready`].
    Release {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
    },
    /// More tensors may be sent eagerly.
    EagerCredit {
        /// Bytes of eager tensors that receives have taken since the link came up.
        returned: u64,
    },
}

const PING: u8 = 1;
const PONG: u8 = 2;
const FRAGMENT: u8 = 12;
const PACKED: u8 = 17;
const ANNOUNCE: u8 = 32;
const CREDIT: u8 = 33;
const NEED: u8 = 34;
const UNNEED: u8 = 35;
const RETIRE: u8 = 36;
const RETIRED: u8 = 37;
const RESUMED: u8 = 38;
const META: u8 = 39;
const RECORD: u8 = 40;
const REFUSED: u8 = 41;
const STEPS_OVER: u8 = 42;
const FLUSH: u8 = 43;
const GRANT: u8 = 44;
const DECLINE: u8 = 45;
const READY: u8 = 46;
const WITHDRAW: u8 = 47;
const RELEASE: u8 = 48;
const EAGER_CREDIT: u8 = 49;

// Flags of `ANNOUNCE`.
const FLAG_RESUME: u8 = 1;
const FLAG_BORROW: u8 = 2;
const FLAG_VALIDATE: u8 = 4;
// Flags of `STEPS_OVER`, beside the derived flag.
const FLAG_CLEANED_UP: u8 = 2;
// The flag of a status.
const FLAG_DERIVED: u8 = 1;
// Flags of `RECORD`, beside the derived flag.
const FLAG_ANSWERS_NEED: u8 = 2;
const FLAG_CHECKSUM: u8 = 4;
const FLAG_MAY_BORROW: u8 = 32;
const KIND_BYTES: u8 = 0;
const KIND_LOAN: u8 = 8;
const KIND_DEAD: u8 = 16;
const KIND_ERROR: u8 = 24;
const KIND_OFFER: u8 = 64;
const KIND_WRITTEN: u8 = 72;
const KINDS: u8 = KIND_ERROR | KIND_OFFER;

#[cfg(test)]
mod tests;
