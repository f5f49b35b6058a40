//! Messages between the two ends of a link.
//!
//! Little-endian, versioned by [`VERSION`], every length checked before it is used, no padding and
//! no uninitialised byte. The first byte is the type. A message longer than one control slot
//! travels as [fragments](fragment).
//!
//! Type byte, message and the fields after the type byte:
//!
//! * 1 `PING`: version u16, nonce u64
//! * 2 `PONG`: nonce u64
//! * 3 `ROUTE`: number u32, source incarnation u64, source, destination, edge (each u16 length
//!   + UTF-8)
//! * 4 `ROUTE_DROP`: number u32
//! * 5 `TENSOR_REQUEST`: flags u8, request u32, route u32, step u64, frame u64, iteration u64, meta
//!   version u32, timeout in ms u32. With the grant flag a grant follows.
//! * 6 `META_DATA_RESPONSE`: flags u8, request u32, meta
//! * 7 `TENSOR_RE_REQUEST`: request u32, grant
//! * 8 `TENSOR_RESPONSE`: flags u8, request u32, (version u32 or meta), data (the rest)
//! * 9 `CANCEL`: request u32
//! * 10 `CANCEL_ACK`: request u32
//! * 11 `ERROR_STATUS`: flags u8, request u32, code u8, message (u32 length + UTF-8), details
//!   (u32 length + bytes)
//! * 13 `RETURN`: request u32, route u32, step u64, frame u64, iteration u64, stash id u32
//! * 14 `STASHED_RESPONSE`: request u32, stash id u32
//! * 15 `STANDING_REQUEST`: flags u8, route u32, first step u64, frame u64, iteration u64, meta
//!   version u32. With the grant flag region u16 and length u64 follow. Then for each of at most
//!   256 consecutive steps request u32, and with a region key u32 and offset u64.
//! * 16 `CHECKSUM`: request u32, checksum u64
//! * 17 `PACKED`: other messages, each after its length as u8 ([`pack`])
//!
//! A request is slot (20 bits) and generation (8 bits) as in the
//! [immediate](crate::wire::Immediate). A grant is region u16, key u32, offset u64, length u64. A
//! meta is version u32, placement u8, dtype u8, rank u8, then rank dimensions of u64. Element types
//! without a fixed size add the length u64 of the serialised form.

mod decode;
mod encode;
pub mod fragment;
pub mod pack;
mod record;
mod standing;
mod window;

pub use decode::MessageError;
pub use record::{LentRecord, PlainRecord, SHORT_TENSOR};
pub use standing::{MAX_STANDING_STEPS, StandingRequest, StandingStep, StandingSteps};
pub use window::{EdgeAnnouncement, RecordValue, WindowMessage};

/// Whether a message probes a link, by its type byte: `PING` or `PONG`.
pub fn is_probe(bytes: &[u8]) -> bool {
    matches!(bytes.first(), Some(&(PING | PONG)))
}

use super::{Grant, Slot, Status, TensorMeta};

/// The version of this protocol. Two ends with different versions don't make a link.
pub const VERSION: u16 = 3;

/// Bytes of an error's message, and of its details, that travel at most. A longer message is cut by
/// its sender, longer details are left out, and the message says so.
pub const MAX_STATUS_TEXT: usize = 256 * 1024;

/// Bytes of the longest message before it is cut into fragments: an error with as much text as
/// travels, and its header.
pub const MAX_LONG_MESSAGE: usize = 2 * MAX_STATUS_TEXT + 64;

/// One use of a slot of the requester's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// Which slot.
    pub slot: Slot,
    /// Which use of it.
    pub generation: u8,
}

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
    /// Grows each time the meta-data of a route changes; never 0.
    pub version: u32,
    /// Where the sender's tensor lies.
    pub placement: Placement,
    /// Element type and shape.
    pub meta: TensorMeta,
}

/// A request of a receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRequest {
    /// Slot and generation at the receiver.
    pub request: RequestId,
    /// The route, announced by an earlier `ROUTE`.
    pub route: u32,
    /// Step id.
    pub step: u64,
    /// Frame of the edge.
    pub frame: u64,
    /// Iteration of the edge.
    pub iteration: u64,
    /// Version of the meta-data that the receiver has cached for the route; 0 for none.
    pub meta_version: u32,
    /// How long the receiver will wait, in ms; `u32::MAX` for ever. With 0 the sender answers at
    /// once: with the value, or with DEADLINE_EXCEEDED.
    pub timeout_ms: u32,
    /// Whether the receiver would borrow the tensor where it lies.
    pub borrow: bool,
    /// Whether the sender is to send the checksum behind the bytes of the answer.
    pub validate: bool,
    /// Where the tensor may be written, if its meta-data is the cached one.
    pub grant: Option<Grant>,
}

/// The message that follows meta-data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// Nothing, until the receiver has asked again.
    ReRequest,
    /// A loan of the tensor.
    Loan,
    /// The write: the tensor fits the destination of a standing request.
    Write,
}

/// The meta-data of a tensor whose bytes are in the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetaRef {
    /// The cached meta-data of the receiver.
    Cached(u32),
    /// Sent the first time, or after a change. The receiver caches it.
    New(VersionedMeta),
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
    /// Gives an edge a number for later requests.
    Route {
        /// The requester's number for it.
        number: u32,
        /// The life of the source that the requester means.
        incarnation: u64,
        /// The sending device.
        source: &'a str,
        /// The receiving device.
        destination: &'a str,
        /// The edge's name.
        edge: &'a str,
    },
    /// Takes a number back.
    RouteDrop {
        /// As given by `ROUTE`.
        number: u32,
    },
    /// Asks for a tensor (specification 3.1).
    Request(TensorRequest),
    /// Announces the meta-data of a tensor (specification 3.2).
    Meta {
        /// The request that it answers.
        request: RequestId,
        /// Nothing, a loan or a write.
        follows: Follows,
        /// Its meta-data.
        meta: VersionedMeta,
    },
    /// Asks again, with a destination that fits (specification 3.3).
    ReRequest {
        /// Slot and generation at the receiver.
        request: RequestId,
        /// Where the tensor may be written.
        grant: Grant,
    },
    /// A small tensor in its response.
    Response {
        /// The request that it answers.
        request: RequestId,
        /// Its meta-data.
        meta: MetaRef,
        /// Its bytes.
        data: &'a [u8],
    },
    /// The receiver gives up (specification 3.4a).
    Cancel {
        /// Slot and generation at the receiver.
        request: RequestId,
    },
    /// Nothing more will come for a request.
    CancelAck {
        /// Slot and generation at the receiver.
        request: RequestId,
    },
    /// The sender's side failed (specification 3.5).
    Error {
        /// Slot and generation at the receiver.
        request: RequestId,
        /// The error that the sender met.
        status: Status,
    },
    /// No receive took the value of an answer. The receiver stashes it, and the sender puts its
    /// place back in line.
    Return {
        /// The request that the value was the answer to.
        request: RequestId,
        /// The request's route.
        route: u32,
        /// Its step id.
        step: u64,
        /// The frame of its edge.
        frame: u64,
        /// The iteration of its edge.
        iteration: u64,
        /// The receiver's name for the value.
        stash_id: u32,
    },
    /// The next value in line is one that the receiver has stashed.
    Stashed {
        /// The request that it answers.
        request: RequestId,
        /// The receiver's name for the value.
        stash_id: u32,
    },
    /// Standing requests for the tensors of several steps that have not begun.
    StandingRequest(StandingRequest<'a>),
    /// The checksum of the bytes that the sender has just sent, if the request asked for a checksum
    /// (specification 3.8).
    Checksum {
        /// Slot and generation at the receiver.
        request: RequestId,
        /// The checksum of the sender's bytes, by [`checksum_of`](crate::wire::checksum_of).
        checksum: u64,
    },
}

const PING: u8 = 1;
const PONG: u8 = 2;
const ROUTE: u8 = 3;
const ROUTE_DROP: u8 = 4;
const TENSOR_REQUEST: u8 = 5;
const META_DATA_RESPONSE: u8 = 6;
const TENSOR_RE_REQUEST: u8 = 7;
const TENSOR_RESPONSE: u8 = 8;
const CANCEL: u8 = 9;
const CANCEL_ACK: u8 = 10;
const ERROR_STATUS: u8 = 11;
const FRAGMENT: u8 = 12;
const RETURN: u8 = 13;
const STASHED_RESPONSE: u8 = 14;
const STANDING_REQUEST: u8 = 15;
const CHECKSUM: u8 = 16;
const PACKED: u8 = 17;

const FLAG_GRANT: u8 = 1;
const FLAG_BORROW: u8 = 2;
const FLAG_VALIDATE: u8 = 4;
const FLAG_LOAN_FOLLOWS: u8 = 1;
const FLAG_WRITE_FOLLOWS: u8 = 2;
const FLAG_CACHED: u8 = 1;
const FLAG_DERIVED: u8 = 1;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod window_tests;
