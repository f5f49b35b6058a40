//! What moves bytes between two processes, with the semantics of RDMA verbs.
//!
//! A [`Fabric`] is a process's access to one kind of transport. Two processes that want a link each make a
//! [`Endpoint`], swap the endpoints' addresses by some other way, and connect; the connected links are attached to
//! a [`Port`], the part of the fabric that one poller owns, and from then on only that poller touches them.
//!
//! The rules, each held on every fabric by the conformance suite (`tests/conformance`):
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
//! | dead peer, broken queue | every outstanding and later operation of the link ends in an error completion |
//!
//! Nothing in this room knows of requests, keys or steps. A change to one fabric touches one folder.

mod completion;
mod event_count;
mod loans;
pub mod shm;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod verbs;
mod words;

pub use completion::{Completion, Completions, Event, LinkFailure, MessageRange};
pub use loans::{LoanFigures, LoanLimiter, LoanPermit, TICKS_PER_GRACE};

use crate::memory::{Pool, Tensor, TensorMut};
use crate::wire::{Grant, Immediate};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the longest message that a [`Port::send`] carries.
///
/// With 32 bytes of a fabric's own header it makes a control slot of 256 bytes (four cache lines).
pub const MAX_MESSAGE: usize = 224;

/// The kinds of fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FabricKind {
    /// Shared memory between processes of one host.
    Shm,
    /// RDMA NICs through libibverbs.
    Verbs,
    /// A virtual network inside one process, for tests.
    Sim,
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FabricKind::Shm => "shm",
            FabricKind::Verbs => "verbs",
            FabricKind::Sim => "sim",
        })
    }
}

/// A link of one [`Port`]. Never reused for another link of the same port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// What a link is made with.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// Operations that can be outstanding; a power of two.
    pub depth: u32,
    /// Receives that are posted before the peer can reach this side. A fabric that keeps early messages until the
    /// link is attached posts none of them: [`LinkLimits::receives`] says how many were posted.
    pub receives: u32,
    /// Tells this life of the link from earlier ones between the same two processes.
    pub generation: u8,
}

/// Which side of a pair speaks first while the link is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Reaches out to the other.
    Initiator,
    /// Waits to be reached.
    Acceptor,
}

/// What a connected link can do.
#[derive(Clone, Debug)]
pub struct LinkLimits {
    /// Operations that can be outstanding, and receives that can be posted.
    pub depth: u32,
    /// Receives that were posted when the link was made: [`LinkOptions::receives`], or none.
    pub receives: u32,
    /// Bytes that [`Port::write_inline`] carries at most.
    pub max_inline: usize,
    /// Bytes that [`Port::write`] carries at most.
    pub max_write: u64,
    /// Whether [`Port::lend`] works.
    pub lends: bool,
    /// Grants that there can be at a time.
    pub grants: u32,
}

/// A process's access to one kind of transport.
pub trait Fabric: Send + Sync + 'static {
    /// One side of a link that is not connected yet.
    type Endpoint: Endpoint<Link = Self::Link>;
    /// A connected link that no port has yet.
    type Link: Send + 'static;
    /// The part that one poller owns.
    type Port: Port<Link = Self::Link>;
    /// Which kind this is.
    const KIND: FabricKind;

    /// What registers memory outside the pool, so that ports can write from where it lies; `None` if nothing does, and all
    /// that is written must be in the pool.
    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        None
    }

    /// A port for a new poller.
    ///
    /// # Errors
    /// If the resources for it cannot be had.
    fn port(&self) -> Result<Self::Port, FabricError>;

    /// This process's endpoint of a new link, which will be attached to the fabric's port number `port`. Ports are
    /// numbered from 0 in the order in which they are made. Verbs binds a link to its port here, and any other port
    /// refuses it; the other fabrics ignore the number.
    ///
    /// # Errors
    /// If the resources for it cannot be had or the options are out of range.
    fn endpoint(&self, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, FabricError>;

    /// What this process has lent over it, and what was kept of dead peers; `None` for a fabric that does not lend.
    fn loan_limiter(&self) -> Option<Arc<LoanLimiter>> {
        None
    }
}

/// Registers memory outside the pool with a device, on the caller's thread, and keeps what is registered for the next time.
///
/// A registration is the memory's owner's: what lies at the same address and has another owner is other memory.
pub trait Registrar: Send + Sync {
    /// The same tensor, registered. May enter the kernel and take long, where its memory was not registered.
    fn register(&self, pool: &Pool, tensor: &Tensor) -> Registration;

    /// How many registrations have ended that were not counted in a [`Registration::ended`], nor here: with their owners, or as
    /// their pages were replaced.
    fn take_ended(&self) -> u64;

    /// Bytes of memory outside the pool that are registered now.
    fn registered_bytes(&self) -> u64;
}

/// How it went to register a tensor.
#[derive(Debug)]
pub struct Registration {
    /// The tensor, to be written in the place of the one that was given; `None` if it can't be registered.
    pub tensor: Option<Tensor>,
    /// Whether its memory was registered before.
    pub is_known: bool,
    /// Registrations that were ended for it, or because their owners are gone.
    pub ended: u64,
}

/// One side of a link that is not connected yet. Dropping it gives up everything that it holds.
pub trait Endpoint: Send + 'static {
    /// What [`Endpoint::connect`] makes.
    type Link: Send + 'static;

    /// What the other side needs to reach this one: opaque bytes for the bootstrap service to carry.
    fn address(&self) -> &[u8];

    /// Connects to the endpoint whose address this is. Blocks, for `timeout` at most.
    ///
    /// # Errors
    /// If the address makes no sense, the other side is not there in time, is somebody else's process, or
    /// shows memory that breaks the fabric's rules.
    fn connect(self, role: Role, peer: &[u8], timeout: Duration) -> Result<Self::Link, FabricError>;
}

/// The part of a fabric that one poller owns: its links and the queue on which they complete.
///
/// Nothing here blocks, allocates in steady state, or may be called from two threads at once.
///
/// Operations that copy their bytes when they are posted (`send`, `write_inline`) make no completion.
/// Those that hold a tensor until they are done (`write`, `read`, `lend`) make exactly one each:
/// [`Event::Done`] or [`Event::Failed`]. The port holds the tensor until then, so a source can be neither
/// freed nor written while a peer may read it.
pub trait Port: Send + 'static {
    /// A connected link, as [`Endpoint::connect`] makes it.
    type Link: Send + 'static;
    /// What threads block on while nothing comes.
    type Sleeper: Sleeper;

    /// What threads block on while nothing comes on this port's links.
    fn sleeper(&self) -> Self::Sleeper;

    /// Arranges that whatever comes on any link from now on ends the sleep of the port's [`Sleeper`]: what a poll
    /// would bring, and credits and room for what waits to be posted. It holds until the next [`Port::poll`] that
    /// brings something, and costs little while it does. Returns `false` if a poll would bring something already: poll,
    /// and don't sleep. Whoever has something to post tries it once more after this: of credits and room that
    /// came before, nobody tells. May enter the kernel.
    fn arm(&mut self) -> bool;

    /// Takes a connected link in. As many receives are posted on it as [`LinkLimits::receives`] says.
    ///
    /// # Errors
    /// If this port has no room for it.
    fn attach(&mut self, link: Self::Link) -> Result<LinkId, FabricError>;

    /// Forgets a link. Whatever was still outstanding or granted is released without a completion; the peer
    /// sees its side fail.
    fn detach(&mut self, link: LinkId);

    /// Ends a link from this side: every outstanding operation completes with [`Event::Failed`], then
    /// [`Event::Down`] comes, and later operations are refused with [`PostError::Down`].
    fn fail(&mut self, link: LinkId, why: LinkFailure);

    /// What the link can do.
    fn limits(&self, link: LinkId) -> &LinkLimits;

    /// Moves what has arrived or completed into `completions`, a bounded amount per link and call. Returns
    /// how many completions were added.
    fn poll(&mut self, completions: &mut Completions) -> usize;

    /// Lets the peer consume `count` more receives.
    fn post_receives(&mut self, link: LinkId, count: u32);

    /// Tells the peer how many receives have been consumed and posted again, counted since the link was made and
    /// modulo 2^32. Cumulative: it consumes no receive, may be repeated, and only the newest counts.
    fn publish_credits(&mut self, link: LinkId, returned: u32);

    /// The newest number that the peer has published.
    fn peer_credits(&mut self, link: LinkId) -> u32;

    /// Several operations are about to be posted. They are accepted and refused as ever, and keep their order; but a device,
    /// or a peer that sleeps, may be told of them as late as in [`Port::end_batch`], and what fails then fails as if
    /// it had been posted. A batch in a batch is the same one.
    fn begin_batch(&mut self) {}

    /// All of a batch is posted: it is on its way when this returns. Does nothing without one.
    fn end_batch(&mut self) {}

    /// How often this port has told a device of what was posted, or a peer that sleeps, so far: on verbs a call of the driver
    /// each, on shared memory a doorbell that was rung. A fabric that does neither says 0.
    fn doorbells(&self) -> u64 {
        0
    }

    /// Sends a message of at most [`MAX_MESSAGE`] bytes, copied before this returns.
    ///
    /// # Errors
    /// [`PostError`]; nothing was sent then.
    fn send(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), PostError>;

    /// Writes at most [`LinkLimits::max_inline`] bytes, copied before this returns, to the start of `target`.
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

    /// A permit to lend `bytes` bytes on a link; `None` if the fabric does not lend, or the bound is reached.
    fn permit_loan(&mut self, link: LinkId, bytes: u64) -> Option<LoanPermit>;

    /// Lends the peer a tensor where it lies; done when the peer has given it back. The peer gets
    /// [`Event::Lent`], which consumes a receive. The permit is kept as long as the tensor.
    ///
    /// # Errors
    /// [`PostError`] with the permit; nothing was lent then.
    fn lend(
        &mut self,
        link: LinkId,
        source: &Tensor,
        permit: LoanPermit,
        immediate: Immediate,
    ) -> Result<(), (PostError, LoanPermit)>;

    /// Whether a tensor lies where [`Port::grant`] can let a peer write to it.
    fn reaches(&self, target: &TensorMut) -> bool {
        let _ = target;
        true
    }

    /// Lets the peer write to a tensor, which the port keeps until [`Port::revoke`]: nobody can read, write
    /// or free it while the peer may write to it.
    ///
    /// # Errors
    /// [`PostError`] with the tensor, if no more can be granted on this link or it is down.
    fn grant(&mut self, link: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)>;

    /// Takes a grant for writing back and returns the tensor; `None` if there is no such grant.
    ///
    /// A fabric that checks grants in software refuses writes to it from now on. On a fabric that can't,
    /// the caller must know that no write to it is under way: it has landed, or was never posted, or the
    /// link's queue pairs are gone.
    fn revoke(&mut self, link: LinkId, grant: &Grant) -> Option<TensorMut>;

    /// Lets the peer read a tensor, which the port keeps until [`Port::withdraw`].
    ///
    /// # Errors
    /// [`PostError`], if no more can be granted on this link or it is down.
    fn expose(&mut self, link: LinkId, source: &Tensor) -> Result<Grant, PostError>;

    /// Takes a grant for reading back.
    fn withdraw(&mut self, link: LinkId, grant: &Grant);
}

/// Who sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// A thread that waits for something in particular.
    Waiter,
    /// The background poller. Arrivals wake it only while no thread is an [active waiter](Sleeper::enter_wait).
    Background,
}

/// What threads block on while nothing comes on a port's links. Clones are the same.
///
/// The order that loses no wake-up: draw [`seen`](Sleeper::seen), [`arm`](Port::arm) the port, look again, then
/// sleep. A thread that leaves a wait must arm the port *after* [`exit_wait`](Sleeper::exit_wait), and handle what came
/// meanwhile: the background poller was not woken for it.
pub trait Sleeper: Clone + Send + Sync + 'static {
    /// A number that changes with every wake-up.
    fn seen(&self) -> u32;

    /// Blocks until there was a wake-up since `seen` was drawn, or for `timeout`. May return early.
    fn sleep(&self, who: Sleep, seen: u32, timeout: Duration);

    /// Ends the sleep of every thread of that kind.
    fn wake(&self, who: Sleep);

    /// The calling thread polls or sleeps as a waiter from now on.
    fn enter_wait(&self);

    /// Ends one [`enter_wait`](Sleeper::enter_wait).
    fn exit_wait(&self);
}

/// Why an operation was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The link's queue, or a table behind it, is full: poll, and try again.
    #[error("the queue is full")]
    Full,
    /// The link is down.
    #[error("the link is down")]
    Down,
    /// The operation can't be done with these operands, now or later.
    #[error("the operation can't be posted: {0}")]
    Refused(&'static str),
}

/// Why a fabric, a port or a link could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A call to the operating system failed.
    #[error("{fabric}: {tried} failed: {source}; {remedy}")]
    Os {
        /// On which fabric.
        fabric: FabricKind,
        /// What was tried, with which value.
        tried: String,
        /// What to change.
        remedy: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// What the fabric needs is not there, or can't do what is asked.
    #[error("{fabric}: {why}")]
    Unavailable {
        /// On which fabric.
        fabric: FabricKind,
        /// What is missing, what there is instead, and what to change.
        why: String,
    },
    /// An option is out of range.
    #[error("{fabric}: {option} is {value}: {allowed}")]
    Option {
        /// On which fabric.
        fabric: FabricKind,
        /// Which option.
        option: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The peer was not there in time.
    #[error("{fabric}: {tried} took longer than {after:?}; is the peer running and reachable?")]
    Timeout {
        /// On which fabric.
        fabric: FabricKind,
        /// What was tried.
        tried: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// The peer broke the fabric's rules.
    #[error("{fabric}: the peer was refused: {why}")]
    Peer {
        /// On which fabric.
        fabric: FabricKind,
        /// What it did.
        why: String,
    },
}
