//! Transports that move bytes between two processes, with the semantics of RDMA verbs.
//!
//! A [`Fabric`] is a process's access to one kind of transport. To make a link, each of two
//! processes makes an [`Endpoint`]. The processes exchange the endpoints' addresses through the
//! bootstrap service and connect. Each connected link is attached to a [`Port`], the part of the
//! fabric that one poller owns. From then on only that poller touches the link.
//!
//! The conformance suite (`tests/conformance`) tests these rules on every fabric:
//!
//! | rule | |
//! |---|---|
//! | order | holds within a link |
//! | write | one-sided; lands at a grant; visible to the target only after a later send or immediate |
//! | write with immediate, send | consume a posted receive; none posted is a link error, never queued |
//! | read | one-sided; full round trip |
//! | zero length | allowed everywhere; checks no key |
//! | local completion | means only that the source may be reused |
//! | checks | region, key and bounds are checked on the target's side |
//! | full queue | is a value that the caller handles ([`PostError::Full`]), not an error |
//! | completions | are never lost, duplicated, or made for another generation of the link |
//! | dead peer, broken queue | every outstanding operation ends in an error completion; later ones are refused |
//!
//! This module knows nothing of edges, keys or steps. A change to one fabric touches one folder.

mod completion;
mod error;
#[cfg(test)]
pub(crate) mod forging;
mod grant_keys;
mod loans;
mod log_rate_limit;
pub mod multi;
mod set;
pub mod shm;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod sleeping;
pub mod tcp;
pub mod verbs;
mod words;

pub use crate::sync::Sleep;
pub use completion::{Completion, Completions, Event, LinkFailure, MessageRange};
pub use error::{FabricError, PostError};
pub use loans::{LoanFigures, LoanLimiter, LoanPermit, TICKS_PER_GRACE};
pub use set::FabricSet;
pub use sleeping::{Sleeper, Wakeup};

use crate::memory::{LentBytes, Pool, Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage, Time, UnreadMessage};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// `Debug` for handles whose state is not of use in a log: the type's name only.
macro_rules! opaque_debug {
    ($($handle:ty),+) => {$(
        impl fmt::Debug for $handle {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($handle)).finish_non_exhaustive()
            }
        }
    )+};
}

const _: () = {
    use multi::{MultiEndpoint, MultiFabric, MultiLink, MultiPort};
    use shm::{ShmEndpoint, ShmFabric, ShmLink, ShmPort};
    use tcp::{TcpEndpoint, TcpFabric, TcpLink, TcpPort};
    use verbs::{VerbsEndpoint, VerbsFabric, VerbsLink, VerbsPort};
    opaque_debug!(MultiEndpoint, MultiFabric, MultiLink, MultiPort);
    opaque_debug!(ShmEndpoint, ShmFabric, ShmLink, ShmPort);
    opaque_debug!(TcpEndpoint, TcpFabric, TcpLink, TcpPort);
    opaque_debug!(VerbsEndpoint, VerbsFabric, VerbsLink, VerbsPort);
};

#[cfg(any(test, feature = "sim"))]
const _: () = {
    use sim::{SimEndpoint, SimFabric, SimLink, SimNetwork, SimPort, SimSleeper};
    opaque_debug!(SimEndpoint, SimFabric, SimLink, SimNetwork, SimPort, SimSleeper);
};

/// Bytes of the longest message that a [`Port::send`] carries on every fabric. Some fabrics carry
/// longer ones: see [`LinkLimits::max_message`].
///
/// With 32 bytes of a fabric's own header it makes a control slot of 256 bytes (four cache lines).
/// On shared memory a message of up to 52 bytes takes one cache line.
pub const MAX_MESSAGE: usize = 224;

/// Bytes of the longest message of a loan: see [`Port::lend`].
pub const MAX_LOAN_MESSAGE: usize = 28;

/// Tensors that a link can have lent at a time in each direction, on every fabric that lends.
pub(crate) const MAX_LOANS: usize = 1 << 18;

/// The ways to move bytes between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FabricKind {
    /// Shared memory between processes of one host.
    Shm,
    /// RDMA NICs through libibverbs.
    Verbs,
    /// TCP connections.
    Tcp,
    /// Calls of the bootstrap service (`RecvTensor`), with no fabric. Only by name: the baseline
    /// that the fabrics replace.
    Grpc,
    /// A virtual network inside one process, for tests.
    #[cfg(any(test, feature = "sim"))]
    Sim,
}

impl FabricKind {
    /// The fabrics that a node can use, in the order in which it chooses.
    pub(crate) const FASTEST_FIRST: [FabricKind; 3] = [FabricKind::Shm, FabricKind::Verbs, FabricKind::Tcp];

    /// Everything that a configuration can name.
    pub(crate) const NAMED: [FabricKind; 4] =
        [FabricKind::Shm, FabricKind::Verbs, FabricKind::Tcp, FabricKind::Grpc];
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FabricKind::Shm => "shm",
            FabricKind::Verbs => "verbs",
            FabricKind::Tcp => "tcp",
            FabricKind::Grpc => "grpc",
            #[cfg(any(test, feature = "sim"))]
            FabricKind::Sim => "sim",
        })
    }
}

/// A link of one [`Port`]. Never reused for another link of the same port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

impl LinkId {
    /// Bits in which a fabric numbers the links of a port. Those above tell the fabrics of a
    /// [`MultiPort`](multi::MultiPort) apart.
    pub(crate) const BITS: u32 = 30;
}

/// The options of a new link.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// Operations that can be outstanding; on shared memory and in simulation a power of two.
    pub depth: u32,
    /// Receives that are posted before the peer can reach this side. A fabric that keeps early
    /// messages until the link is attached posts none: see [`LinkLimits::receives`].
    pub receives: u32,
    /// Distinguishes this link from earlier ones between the same two processes.
    pub generation: u8,
}

/// The side's part in making a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Contacts the other side.
    Initiator,
    /// Waits for the other side.
    Acceptor,
}

/// The capabilities of a connected link.
#[derive(Clone, Debug)]
pub struct LinkLimits {
    /// Operations that can be outstanding, and receives that can be posted.
    pub depth: u32,
    /// Receives that were posted when the link was made: [`LinkOptions::receives`], or none.
    pub receives: u32,
    /// Bytes that [`Port::send`] carries at most: [`MAX_MESSAGE`], or more.
    pub max_message: usize,
    /// Bytes that [`Port::write_inline`] carries at most.
    pub max_inline: usize,
    /// Bytes that [`Port::write`] carries at most.
    pub max_write: u64,
    /// Whether [`Port::lend`] works.
    pub lends: bool,
    /// Whether [`Port::write`] takes bytes from memory that a [`Registrar`] has registered.
    pub registers: bool,
    /// Grants that can exist at a time.
    pub grants: u32,
    /// Bytes of the longest grant.
    pub max_grant: u64,
}

impl LinkLimits {
    /// The limits of a link that does not exist.
    pub const NONE: LinkLimits = LinkLimits {
        depth: 0,
        receives: 0,
        max_message: 0,
        max_inline: 0,
        max_write: 0,
        lends: false,
        registers: false,
        grants: 0,
        max_grant: 0,
    };
}

/// A process's access to one kind of transport.
pub trait Fabric: Send + Sync + 'static {
    /// One side of a link that is not connected yet.
    type Endpoint: Endpoint<Link = Self::Link>;
    /// A connected link that is not attached to a port yet.
    type Link: Send + 'static;
    /// The part that one poller owns.
    type Port: Port<Link = Self::Link>;

    /// Registers memory outside the pool, so that ports can write from it. With `None` the source
    /// of every write must lie in the pool.
    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        None
    }

    /// A port for a new poller.
    ///
    /// # Errors
    /// If the resources for it cannot be had.
    fn port(&self) -> Result<Self::Port, FabricError>;

    /// This process's endpoint of a new link, which will be attached to the fabric's port number
    /// `port`. Ports are numbered from 0 in the order in which they are made. Verbs binds a link to
    /// its port here, and any other port refuses it. The other fabrics ignore the number.
    ///
    /// # Errors
    /// If the resources for it cannot be had or the options are out of range.
    fn endpoint(&self, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, FabricError>;

    /// The loans of this process; `None` for a fabric that does not lend.
    fn loan_limiter(&self) -> Option<Arc<LoanLimiter>> {
        None
    }
}

/// Registers memory outside the pool with a device, on the caller's thread, and keeps the
/// registrations for later sends.
///
/// A registration belongs to the memory's owner. Memory of another owner at the same address is
/// other memory.
pub trait Registrar: Send + Sync {
    /// The same tensor, registered. Enters the kernel, and may take long, if the tensor's memory
    /// was not registered before.
    fn register(&self, pool: &Pool, tensor: &Tensor) -> Registration;

    /// Registrations that ended with their owners, or because their pages were replaced, since the
    /// last call of this or of [`Registrar::register`].
    fn take_ended(&self) -> u64;

    /// Bytes of memory outside the pool that are registered now.
    fn registered_bytes(&self) -> u64;
}

/// The result of [`Registrar::register`].
#[derive(Debug)]
pub struct Registration {
    /// The tensor to write instead of the given one; `None` if it can't be registered.
    pub tensor: Option<Tensor>,
    /// Whether its memory was registered before.
    pub is_known: bool,
    /// Registrations that ended: evicted for this one, or because their owners are gone.
    pub ended: u64,
}

/// One side of a link that is not connected yet. Its drop releases everything that it holds.
pub trait Endpoint: Send + 'static {
    /// The result of [`Endpoint::connect`].
    type Link: Send + 'static;

    /// The address by which the other side reaches this one: opaque bytes that the bootstrap
    /// service carries.
    fn address(&self) -> &[u8];

    /// Connects to the endpoint with the address `peer`. Blocks for `timeout` at most.
    ///
    /// # Errors
    /// If the address is invalid, or the other side does not answer in time. If it is another
    /// user's process, or shows memory that breaks the fabric's rules.
    fn connect(self, role: Role, peer: &[u8], timeout: Duration) -> Result<Self::Link, FabricError>;
}

/// The part of a fabric that one poller owns: its links and the queue on which they complete.
///
/// No method blocks or allocates in steady state. One thread at a time calls them. With memory
/// windows on verbs, grants and their ends may wait for the device.
///
/// Operations that copy their bytes when they are posted (`send`, `write_inline`) make no
/// completion. Those that hold a tensor until they are done (`write`, `read`, `lend`) make exactly
/// one each: [`Event::Done`] or [`Event::Failed`]. The port holds the tensor until then, so a
/// source can be neither freed nor written while a peer may read it.
pub trait Port: Send + 'static {
    /// A connected link, as [`Endpoint::connect`] makes it.
    type Link: Send + 'static;
    /// Blocks threads while nothing arrives.
    type Sleeper: Sleeper;

    /// Blocks threads while nothing arrives on this port's links.
    fn sleeper(&self) -> Self::Sleeper;

    /// Arms the port: from now on a completion, credits or room in a queue end the sleep of the
    /// port's [`Sleeper`]. The port stays armed until a [`Port::poll`] brings something, which
    /// costs little meanwhile. Returns `false` if a poll would bring something already: the caller
    /// polls instead of sleeping. A caller with operations to post tries once more after this call,
    /// since credits and room that came before end no sleep. May enter the kernel.
    fn arm(&mut self) -> bool;

    /// Takes over a connected link. [`LinkLimits::receives`] receives are posted on it.
    ///
    /// # Errors
    /// If this port has no room for it.
    fn attach(&mut self, link: Self::Link) -> Result<LinkId, FabricError>;

    /// Removes a link. Outstanding operations and grants are released without a completion. The
    /// peer sees its side fail.
    fn detach(&mut self, link: LinkId);

    /// Ends a link from this side: every outstanding operation completes with [`Event::Failed`],
    /// then [`Event::Down`] comes, and later operations are refused with [`PostError::Down`].
    fn fail(&mut self, link: LinkId, why: LinkFailure);

    /// The capabilities of the link.
    fn limits(&self, link: LinkId) -> &LinkLimits;

    /// Tells the time, for ports that do not look at all their links in each poll.
    #[inline]
    fn set_time(&mut self, now: Time) {
        let _ = now;
    }

    /// Moves arrivals and completions into `completions`, a bounded number per link and call.
    /// Returns how many were added.
    fn poll(&mut self, completions: &mut Completions) -> usize;

    /// Lets the peer consume `count` more receives.
    fn post_receives(&mut self, link: LinkId, count: u32);

    /// Tells the peer how many receives have been consumed and posted again, since the link was
    /// made and modulo 2^32. The number is cumulative: it may be repeated, and only the newest
    /// counts. It consumes no receive.
    fn publish_credits(&mut self, link: LinkId, returned: u32);

    /// Whether everything that was posted on a link is at the peer's host, or never will be. May
    /// enter the kernel, and post what asks for an acknowledgement. Polls bring it. On a fabric
    /// without a network everything is there.
    fn is_flushed(&mut self, link: LinkId) -> bool {
        let _ = link;
        true
    }

    /// The newest number that the peer has published.
    fn peer_credits(&mut self, link: LinkId) -> u32;

    /// Begins a batch of operations. The port accepts and refuses operations as without a batch,
    /// and keeps their order. It may notify the device, or a sleeping peer, as late as in
    /// [`Port::end_batch`]. An operation that fails there fails as if it had been posted. A batch
    /// within a batch is the same batch.
    fn begin_batch(&mut self) {}

    /// Ends the batch. Its operations are on their way when this returns. Does nothing without a
    /// batch.
    fn end_batch(&mut self) {}

    /// Notifications of a device or a sleeping peer by this port, so far. They are calls of the
    /// driver on verbs, and rung doorbells on shared memory. 0 on a fabric that does neither.
    fn doorbells(&self) -> u64 {
        0
    }

    /// Sends a message of at most [`LinkLimits::max_message`] bytes, copied before this returns.
    ///
    /// # Errors
    /// [`PostError`]; nothing was sent then.
    fn send(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), PostError>;

    /// As [`Port::send`], of a message that lies in two places.
    ///
    /// # Errors
    /// [`PostError`]; nothing was sent then.
    fn send_parts(&mut self, link: LinkId, parts: [&[u8]; 2]) -> Result<(), PostError> {
        self.send(link, &parts.concat())
    }

    /// Whether short messages of a link are written and read as the words of a slot, by
    /// [`Port::send_short`].
    fn has_slots(&self, link: LinkId) -> bool {
        let _ = link;
        false
    }

    /// As [`Port::send`], for a short message. For links that [have slots](Port::has_slots).
    ///
    /// # Errors
    /// [`PostError`]; nothing was sent then. [`PostError::Down`] if the link has no slots and the
    /// port can't do without.
    fn send_short(
        &mut self,
        link: LinkId,
        message: &UnreadMessage<impl Fn(usize) -> u64>,
    ) -> Result<(), PostError> {
        self.send(link, &message.read().to_bytes()[..message.len])
    }

    /// Takes the next message of a link without a poll, if it has come and `accept` has a value for
    /// it. The message consumes a receive. A fabric where a look costs as much as a poll
    /// returns [`ShortTake::Other`].
    fn take_short<R>(&mut self, link: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        let _ = (link, accept);
        ShortTake::Other
    }

    /// Writes at most [`LinkLimits::max_inline`] bytes, copied before this returns, to the start of
    /// `target`.
    ///
    /// # Errors
    /// [`PostError`]; nothing was written then.
    fn write_inline(
        &mut self,
        link: LinkId,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError>;

    /// Writes the first `len` bytes of `source` to the start of `target`.
    ///
    /// # Errors
    /// [`PostError`]; nothing was written then.
    fn write(
        &mut self,
        link: LinkId,
        source: &Tensor,
        len: u64,
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError>;

    /// Reads `source` into the start of `target`, which comes back in [`Event::ReadDone`].
    ///
    /// # Errors
    /// [`PostError`] with the target; nothing was read then.
    fn read(&mut self, link: LinkId, target: TensorMut, source: &Grant)
    -> Result<(), (PostError, TensorMut)>;

    /// A permit to lend `bytes` bytes on a link; `None` if the fabric does not lend, or the bound
    /// is reached.
    fn permit_loan(&mut self, link: LinkId, bytes: u64) -> Option<LoanPermit>;

    /// Lends the peer a tensor in place. The operation is done when the peer has given it back. The
    /// peer gets [`Event::Lent`] with `message`, which consumes a receive. The message has at most
    /// [`MAX_LOAN_MESSAGE`] bytes, and is copied before this returns. The port takes the source and
    /// the permit, and holds both as long. A loan that the peer only copies from needs no permit.
    /// 2^18 loans can be out on a link at a time.
    ///
    /// # Errors
    /// [`PostError`]; nothing was lent then, and nothing taken. A loan without a source is refused.
    fn lend(
        &mut self,
        link: LinkId,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> Result<(), PostError>;

    /// Whether a tensor lies where [`Port::grant`] can let the link's peer write to it.
    fn reaches(&self, link: LinkId, target: &TensorMut) -> bool {
        let _ = (link, target);
        true
    }

    /// Lets the peer write to a tensor. The port holds the tensor until [`Port::revoke`], so that
    /// no thread reads, writes or frees it while the peer may write to it. The grant is in force
    /// for a peer that has got a later message of this link.
    ///
    /// # Errors
    /// [`PostError`] with the tensor, if no more can be granted on this link or it is down.
    fn grant(&mut self, link: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)>;

    /// Revokes a grant for writing and returns the tensor; `None` if there is no such grant.
    ///
    /// Software fabrics refuse writes to the tensor from now on. With memory windows this call
    /// waits until the device does. On others the caller must know that no write is under way: it
    /// has landed, was never posted, or the link's queue pairs are gone.
    fn revoke(&mut self, link: LinkId, grant: &Grant) -> Option<TensorMut>;

    /// Lets the peer read a tensor. The port holds the tensor until [`Port::withdraw`].
    ///
    /// # Errors
    /// [`PostError`], if no more can be granted on this link or it is down.
    fn expose(&mut self, link: LinkId, source: &Tensor) -> Result<Grant, PostError>;

    /// Revokes a grant for reading.
    fn withdraw(&mut self, link: LinkId, grant: &Grant);
}

/// The next message of a link, as [`Port::take_short`] finds it.
#[derive(Debug)]
pub enum NextMessage<'a> {
    /// A message alone.
    Short(&'a ShortMessage),
    /// A message alone, in memory that does not change. Longer than a [`ShortMessage`], or of a
    /// fabric without [slots](Port::has_slots).
    Bytes(&'a [u8]),
    /// The message of a loan.
    Lent(&'a ShortMessage, NextLoan<'a>),
}

/// Accepts the next message of a link: see [`Port::take_short`].
pub trait Accept<R>: Sized {
    /// A value for the message. `None` leaves the message to a poll.
    fn accept(self, next: NextMessage<'_>) -> Option<R>;

    /// As [`Accept::accept`], for the usual message. Reads no word twice.
    fn accept_short(self, message: UnreadMessage<impl Fn(usize) -> u64>) -> Option<R> {
        self.accept(NextMessage::Short(&message.read()))
    }

    /// As [`Accept::accept`], for the message of a loan of these bytes. `keep` is
    /// [`NextLoan::keep`].
    fn accept_lent(
        self,
        message: &ShortMessage,
        bytes: &[u8],
        keep: impl Fn() -> Option<LentBytes>,
    ) -> Option<R> {
        self.accept(NextMessage::Lent(message, NextLoan { bytes, keep: &keep }))
    }
}

impl<R, F: FnOnce(NextMessage<'_>) -> Option<R>> Accept<R> for F {
    fn accept(self, next: NextMessage<'_>) -> Option<R> {
        self(next)
    }
}

/// The loan of a [`NextMessage`].
pub struct NextLoan<'a> {
    /// The lent bytes. The peer gets them back when the message has been taken.
    pub bytes: &'a [u8],
    /// Keeps the loan beyond that.
    keep: &'a dyn Fn() -> Option<LentBytes>,
}

impl fmt::Debug for NextLoan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NextLoan({} bytes)", self.bytes.len())
    }
}

impl NextLoan<'_> {
    /// Keeps the loan. The message must be taken then. `None` if the loan is kept already.
    pub fn keep(&self) -> Option<LentBytes> {
        (self.keep)()
    }
}

/// The outcome of [`Port::take_short`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortTake<R> {
    /// The message has come, and was accepted.
    Taken(R),
    /// Nothing has come on the link.
    Nothing,
    /// Something may have come that a poll must handle.
    Other,
}

impl<R> From<Option<R>> for ShortTake<R> {
    #[inline]
    fn from(taken: Option<R>) -> Self {
        taken.map_or(ShortTake::Other, ShortTake::Taken)
    }
}

impl<R> ShortTake<R> {
    /// The same outcome with another value.
    #[inline]
    pub fn map<S>(self, change: impl FnOnce(R) -> S) -> ShortTake<S> {
        match self {
            ShortTake::Taken(taken) => ShortTake::Taken(change(taken)),
            ShortTake::Nothing => ShortTake::Nothing,
            ShortTake::Other => ShortTake::Other,
        }
    }
}

/// Why a loan without a source is refused.
const NO_SOURCE: &str = "the loan has no source";
