//! Edge windows on a link: turns the messages of the [window machines](crate::protocol)
//! into control messages and loans, and back.
//!
//! | file | |
//! |---|---|
//! | `outgoing` | messages to the peer |
//! | `incoming` | messages of the peer |
//! | `figures` | what a link keeps, for the reports of edges |
//! | `meta` | the numbered meta-data of a connection |
//! | `offers` | tensors that wait for a destination |
//! | `eager` | tensors in records that are longer than a control slot |
//! | `ready` | destinations that are granted before their tensors are sent |
//! | `landings` | destinations that the peer may write to |
//! | `short` | small tensors whose record needs nothing else |
//! | `packed` | small tensors whose records share slots |

mod eager;
mod figures;
mod incoming;
mod landings;
mod meta;
mod offers;
mod outgoing;
mod packed;
mod ready;
mod short;
#[cfg(test)]
mod tests;

use super::{Corruption, Destination, EdgeKey, ReceiveError, Received, TensorKeyRef};
use crate::fabric::LinkLimits;
use crate::memory::{self, LentBytes, Pool, Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Slab, ToReceiver, ToSender};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::{EdgeCredits, Placement};
use crate::wire::{Code, DType, Immediate, Status, checksum_of};
use eager::{EagerReceiver, EagerSender};
pub use figures::{LinkFigures, QueuedValues};
use landings::Landings;
pub use meta::ToldMeta;
use meta::{KnownMetas, ToldMetas};
pub(in crate::link) use packed::PolledPlace;
pub(in crate::link) use ready::ReadyBytes;
pub use ready::ReadyShare;
use ready::{ExpectedOfEdge, ReadyReceiver};
use std::sync::Arc;

/// Edges of a direction of a link that have a number at a time.
pub const MAX_EDGES: u32 = 1 << 15;

/// Why a receive gets no value from its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WindowRefusal {
    /// The sender has cleaned the step up.
    CleanedUp,
    /// The step was aborted at the sender, or the sender does not serve the edge.
    Because(Arc<Status>),
}

impl From<Status> for WindowRefusal {
    fn from(status: Status) -> Self {
        WindowRefusal::Because(Arc::new(status))
    }
}

impl WindowRefusal {
    /// The error of a receive, with at most so many bytes of the sender's text and of its details.
    #[cold]
    pub fn status(&self, of: TensorKeyRef<'_>, most: usize) -> Status {
        match self {
            WindowRefusal::Because(status) => status.cut(most),
            WindowRefusal::CleanedUp => {
                let message = format!("step {} was cleaned up at {}", of.step, of.edge.name.source_task());
                Status::new(Code::NotFound, message)
            }
        }
    }

    /// Counts as an error of the exchange: a cleanup is none.
    fn is_error(&self) -> bool {
        matches!(self, WindowRefusal::Because(_))
    }
}

/// A message of edge windows that has come on a link.
#[derive(Debug)]
pub enum WindowEvent {
    /// Of the receiver of an edge, but for credit. An announcement of an edge that is not served
    /// comes with the error.
    ToSender(ToSender<EdgeKey>, Option<Status>),
    /// Of the receiver of one edge or of several: credit for each of them.
    Credits(EdgeCredits),
    /// Of the sender of an edge.
    ToReceiver(ToReceiver<WindowArrival, WindowRefusal>),
    /// An offered tensor of the peer lies in its destination.
    Landed(Immediate, TensorMut),
    /// A tensor that was offered to the peer is written, or not wanted.
    Sent,
}

/// Why a destination was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LandingRefused {
    /// The port can't let the peer write there.
    Unreachable,
    /// The link has as many grants as it can have.
    Full {
        /// Grants of the link at a time.
        limit: u32,
    },
    /// The tensor is longer than the longest grant.
    TooLong {
        /// Bytes of the longest grant.
        limit: u64,
    },
    /// The link has ended, or is about to.
    Down,
}

/// A value that has come from a peer.
#[derive(Debug)]
pub enum WindowArrival {
    /// A receive can have it at once.
    Ready(ReadyValue),
    /// A tensor that stays at the sender until it has a destination.
    Offered(OfferedTensor),
    /// A tensor that the sender writes to a destination. No receive waits for it.
    Landing(Immediate),
}

/// A value without a transfer of its own.
#[derive(Debug)]
pub enum ReadyValue {
    /// Whole, in this process or borrowed.
    Tensor(ArrivedTensor),
    /// The value of a branch that was not taken.
    Dead,
    /// The sender failed to send the value.
    Failed(Status),
}

/// A tensor that a peer offers.
#[derive(Debug)]
pub struct OfferedTensor {
    /// As the sender told it.
    pub told: Arc<ToldMeta>,
    /// The sender's checksum of the bytes.
    pub checksum: Option<u64>,
    /// Names the tensor at its sender, until it is granted a destination or declined.
    pub offer: u32,
}

/// A tensor that has come from a peer.
#[derive(Debug)]
pub struct ArrivedTensor {
    /// As the sender told it.
    pub told: Arc<ToldMeta>,
    /// The sender's checksum of the bytes.
    pub checksum: Option<u64>,
    /// As many bytes as the meta-data say.
    pub bytes: ArrivedBytes,
}

/// Where the bytes of a tensor that has come lie.
#[derive(Debug)]
pub enum ArrivedBytes {
    /// In a tensor of the pool.
    Landed(Tensor),
    /// In a tensor of the pool that was granted ahead.
    Written {
        /// As many bytes as were granted.
        tensor: Tensor,
        /// Its part of what is granted ahead.
        share: ReadyShare,
    },
    /// In a tensor of the pool, after it was sent eagerly.
    Eager {
        /// Its bytes came with the record.
        tensor: Tensor,
        /// Its part of what the peer has sent eagerly and no receive has taken.
        share: ReadyShare,
    },
    /// In this process, as the pool had no room.
    Kept {
        /// All of them.
        bytes: Box<[u8]>,
        /// Its part of what is sent eagerly.
        share: Option<ReadyShare>,
    },
    /// At the sender.
    Lent {
        /// Readable until they are dropped, which gives them back.
        bytes: LentBytes,
        /// Whether the receiver may keep the loan. Otherwise it copies the bytes.
        may_borrow: bool,
    },
}

/// A tensor that a receive could not take, and the reason. Without the tensor the error has
/// consumed it.
#[derive(Debug)]
pub struct RejectedTensor {
    /// For the next receive.
    pub tensor: Option<ArrivedTensor>,
    /// Of the receive.
    pub error: ReceiveError,
}

/// What a link remembers of the messages before: meta-data, and what each edge has asked for.
#[derive(Debug)]
pub(in crate::link) struct WindowLink {
    /// Bytes of long errors of the peer that this side still keeps whole.
    error_room: usize,
    told: ToldMetas,
    known: KnownMetas,
    /// What the receiver of each edge has asked for, by the number of the edge.
    asked: Vec<AskedOfEdge>,
    /// Tensors that the peer has not granted a destination yet.
    offers: Slab<Tensor>,
    /// Tensors that are being written to the peer.
    writes: usize,
    landings: Landings,
    /// What the receiver of each edge expects, by the number of the edge.
    expected: Vec<ExpectedOfEdge>,
    /// The destination for the next tensor of each edge to the peer, by the number of the edge.
    ready: Vec<Option<ReadyReceiver>>,
    eager_out: EagerSender,
    eager_in: EagerReceiver,
}

impl WindowLink {
    /// Nothing yet, on a link with these limits.
    pub fn new(limits: &LinkLimits) -> Self {
        WindowLink {
            error_room: incoming::ERROR_ROOM,
            told: ToldMetas::default(),
            known: KnownMetas::default(),
            asked: Vec::new(),
            offers: Slab::default(),
            writes: 0,
            landings: Landings::default(),
            expected: Vec::new(),
            ready: Vec::new(),
            eager_out: EagerSender::new(limits),
            eager_in: EagerReceiver::new(limits),
        }
    }

    /// Whether the peer may have to be told that its eager tensors were taken.
    #[inline]
    pub fn returns_eager(&self) -> bool {
        self.eager_in.is_due()
    }

    /// Tensors that are offered to the peer, and destinations of tensors that the peer offers.
    #[cfg(any(test, feature = "sim"))]
    pub fn transfers(&self) -> (usize, usize) {
        (self.offers.iter().count(), self.landings.of_receives())
    }
}

/// What the receiver of an edge has asked for.
#[derive(Clone, Copy, Debug, Default)]
struct AskedOfEdge {
    /// The receiver borrows.
    borrow: bool,
    /// Each record with bytes has their checksum.
    validate: bool,
}

impl WindowArrival {
    /// Whether a receive can have the value at once.
    pub fn is_ready(&self) -> bool {
        matches!(self, WindowArrival::Ready(_))
    }

    fn of_tensor(tensor: ArrivedTensor) -> Self {
        WindowArrival::Ready(ReadyValue::Tensor(tensor))
    }
}

impl ArrivedTensor {
    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            ArrivedBytes::Landed(tensor)
            | ArrivedBytes::Written { tensor, .. }
            | ArrivedBytes::Eager { tensor, .. } => tensor.bytes(),
            ArrivedBytes::Kept { bytes, .. } => bytes,
            ArrivedBytes::Lent { bytes, .. } => bytes.bytes(),
        }
    }

    /// Puts the tensor where the receive wants it. Returns it with the sender's placement.
    ///
    /// # Errors
    /// If the bytes are not those that the sender sent. If the tensor does not fit, or the pool has
    /// no room: the tensor comes back then.
    pub fn place(
        self,
        pool: &Pool,
        counters: &CountersWriter,
        destination: Destination,
    ) -> Result<(Received, Placement), Box<RejectedTensor>> {
        let sender = self.told.sender;
        let placed = match destination {
            Destination::Into(given) => self.place_into(counters, given).map(Received::Into),
            Destination::Alloc => self.into_pool(pool, counters).map(Received::Tensor),
            Destination::Borrow => self.borrowed(pool, counters).map(Received::Tensor),
        };
        placed.map(|received| (received, sender))
    }

    fn place_into(
        self,
        counters: &CountersWriter,
        mut given: TensorMut,
    ) -> Result<TensorMut, Box<RejectedTensor>> {
        if *given.meta() != self.told.meta {
            let (sent, given) = (Box::new(self.told.meta.clone()), Box::new(given.meta().clone()));
            return Err(self.rejected(ReceiveError::ShapeMismatch { sent, given }));
        }
        checked(counters, self.checksum, self.bytes())?;
        memory::copy(given.bytes_mut(), self.bytes());
        let is_elsewhere = matches!(self.bytes, ArrivedBytes::Kept { .. } | ArrivedBytes::Lent { .. });
        if given.is_foreign() && !is_elsewhere {
            counters.increment(Counter::TensorsStaged);
            counters.add(Counter::BytesStaged, given.meta().bytes());
        }
        Ok(given)
    }

    fn into_pool(self, pool: &Pool, counters: &CountersWriter) -> Result<Tensor, Box<RejectedTensor>> {
        match self.bytes {
            ArrivedBytes::Landed(tensor)
            | ArrivedBytes::Written { tensor, .. }
            | ArrivedBytes::Eager { tensor, .. } => {
                checked(counters, self.checksum, tensor.bytes())?;
                Ok(tensor)
            }
            ArrivedBytes::Kept { .. } | ArrivedBytes::Lent { .. } => match pool.landing(&self.told.meta) {
                Ok(mut copy) => {
                    checked(counters, self.checksum, self.bytes())?;
                    memory::copy(copy.bytes_mut(), self.bytes());
                    Ok(copy.freeze())
                }
                Err(error) => Err(self.rejected(ReceiveError::NoRoom(error))),
            },
        }
    }

    fn borrowed(self, pool: &Pool, counters: &CountersWriter) -> Result<Tensor, Box<RejectedTensor>> {
        let ArrivedTensor { told, checksum, bytes } = self;
        let bytes = match bytes {
            ArrivedBytes::Lent { bytes, may_borrow: true } if is_borrowable(told.meta.dtype()) => {
                checked(counters, checksum, bytes.bytes())?;
                match Tensor::from_lent(pool, &told.meta, bytes) {
                    Ok(tensor) => return Ok(tensor),
                    // Such a tensor is copied.
                    Err((_, bytes)) => ArrivedBytes::Lent { bytes, may_borrow: false },
                }
            }
            bytes => bytes,
        };
        ArrivedTensor { told, checksum, bytes }.into_pool(pool, counters)
    }

    fn rejected(self, error: ReceiveError) -> Box<RejectedTensor> {
        Box::new(RejectedTensor { tensor: Some(self), error })
    }
}

/// As [`check_bytes`], for a tensor that has a place. One without is not checked: that takes time,
/// and its length is the peer's choice.
fn checked(counters: &CountersWriter, sent: Option<u64>, bytes: &[u8]) -> Result<(), Box<RejectedTensor>> {
    check_bytes(counters, sent, bytes).map_err(|corruption| {
        Box::new(RejectedTensor { tensor: None, error: ReceiveError::Corrupted(corruption) })
    })
}

/// Compares the bytes of a tensor with the sender's checksum, if there is one.
pub fn check_bytes(counters: &CountersWriter, sent: Option<u64>, bytes: &[u8]) -> Result<(), Corruption> {
    let Some(sent) = sent else { return Ok(()) };
    counters.increment(Counter::ChecksumsVerified);
    let actual = checksum_of(bytes);
    if actual == sent || is_on(Mutant::ChecksumNotCompared) {
        return Ok(());
    }
    counters.increment(Counter::ChecksumMismatches);
    Err(Corruption { bytes: bytes.len() as u64, sent, actual })
}

/// Whether a tensor may be lent to a receiver that keeps it. The bytes of a bool tensor are checked
/// when they are copied.
fn is_borrowable(dtype: DType) -> bool {
    dtype != DType::Bool
}
