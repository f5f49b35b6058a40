//! The paths to other processes: one per poller.

use super::waiter::{CallId, CancelReason, Waiter};
use super::{BatchSend, Error, ReceiveAll, RemoteCommand, RemoteHandler};
use crate::engine::{Engine, Unusable};
use crate::fabric::Port;
use crate::link::{Destination, TensorKey, Value};
use crate::sync::Reused;
use crate::wire::{Generation, Incarnation, Status, TaskId, Time};
use std::sync::Arc;

/// The index of a task in the sorted list of [`Members`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerIndex(pub u32);

/// Names one of the links that there ever were with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkTag {
    /// The incarnation of the peer: which of its lives.
    pub incarnation: Incarnation,
    /// The number of the link between the two tasks; grows with each new link, over all lives.
    pub generation: Generation,
}

/// The tasks of the cluster, sorted.
#[derive(Clone, Debug)]
pub struct Members(Arc<[TaskId]>);

impl Members {
    /// Sorts the tasks and removes duplicates.
    pub fn new(mut tasks: Vec<TaskId>) -> Self {
        tasks.sort();
        tasks.dedup();
        Members(tasks.into())
    }

    /// The index of a task, if it is a member.
    pub fn index(&self, task: &TaskId) -> Option<PeerIndex> {
        self.0.binary_search(task).ok().map(|at| PeerIndex(at as u32))
    }

    /// The task with this index.
    ///
    /// # Panics
    /// If the index is not below the number of members.
    pub fn task(&self, index: PeerIndex) -> &TaskId {
        &self.0[index.0 as usize]
    }

    /// All tasks, sorted.
    pub fn all(&self) -> &[TaskId] {
        &self.0
    }
}

/// The paths of all pollers. Each peer belongs to one of them, by its index.
#[derive(Clone)]
pub struct Paths(Arc<[Arc<dyn RemotePath>]>);

impl Paths {
    /// The paths in the order of the pollers.
    ///
    /// # Panics
    /// If `paths` is empty or longer than 65,535.
    pub fn new(paths: Vec<Arc<dyn RemotePath>>) -> Self {
        assert!(!paths.is_empty() && paths.len() <= usize::from(u16::MAX), "{} paths", paths.len());
        Paths(paths.into())
    }

    /// The number of the path of a peer among `count` paths, from 0 on.
    pub fn index_of(peer: PeerIndex, count: usize) -> usize {
        peer.0 as usize % count
    }

    /// The number of the path of a peer, from 0 on.
    #[inline]
    pub fn number_of(&self, peer: PeerIndex) -> u16 {
        // `new` has checked that the count fits.
        Self::index_of(peer, self.0.len()) as u16
    }

    /// The path of a peer.
    #[inline]
    pub fn of(&self, peer: PeerIndex) -> &dyn RemotePath {
        self.nth(self.number_of(peer).into())
    }

    /// The number of paths.
    #[inline]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The path with number `nth`, from 0 on.
    #[inline]
    pub fn nth(&self, nth: usize) -> &dyn RemotePath {
        &*self.0[nth]
    }

    /// The path for calls without a peer.
    #[inline]
    pub fn first(&self) -> &dyn RemotePath {
        &*self.0[0]
    }

    /// All paths, in the order of the pollers.
    pub fn all(&self) -> impl Iterator<Item = &dyn RemotePath> {
        self.0.iter().map(|path| &**path)
    }
}

/// The path to the tensors of other processes, over one poller.
pub trait RemotePath: Send + Sync {
    /// Offers a value for a peer's request.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send(&self, key: TensorKey, value: Value) -> Result<(), Error>;

    /// Requests a tensor from a peer.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn receive(
        &self,
        peer: PeerIndex,
        key: TensorKey,
        destination: Destination,
        waiter: Waiter,
    ) -> Result<(), Error>;

    /// Offers several values for peers' requests.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send_all(&self, values: Reused<BatchSend>) -> Result<(), Error>;

    /// Requests several tensors from peers.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn receive_all(&self, receives: ReceiveAll) -> Result<(), Error>;

    /// Cancels a call, unless it has ended.
    fn cancel(&self, call: Cancel);

    /// Cancels several calls, except those that have ended.
    fn cancel_all(&self, calls: CancelAll);

    /// Passes on the change of a step.
    fn step(&self, change: StepChange);

    /// Passes on the change of a standing request.
    fn standing(&self, change: StandingChange);

    /// Makes progress once. Returns the number of completions.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn progress(&self) -> Result<usize, Error>;

    /// Makes progress until `done` or until `deadline`. Returns the last value of `done`.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error>;

    /// Wakes the waiting threads, which check `done` again. Called after an event outside this
    /// path.
    fn nudge(&self);

    /// Ends every call with this error, if the loss of a peer is fatal.
    fn end(&self, error: Error);

    /// The time of the clock of this path.
    fn now(&self) -> Time;

    /// Closes every link and ends every call. Does nothing the second time.
    fn close(&self);
}

/// The cancellation of one call, and its reason.
#[derive(Clone, Debug)]
pub struct Cancel {
    pub(super) id: CallId,
    pub(super) why: CancelReason,
}

/// The cancellation of `count` calls from id `first` on, and its reason.
#[derive(Clone, Debug)]
pub struct CancelAll {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) why: CancelReason,
}

impl CancelAll {
    /// The cancellation of one of the calls.
    pub(super) fn one(&self, id: u64) -> Cancel {
        Cancel { id: CallId(id), why: self.why.clone() }
    }
}

/// An item of a batch that goes to one of the paths.
pub trait OnPath {
    /// The number of the path, from 0 on.
    fn path(&self) -> u16;
}

/// A change of a step, for the pollers.
#[derive(Clone, Debug)]
pub enum StepChange {
    /// A sequence was declared.
    Sequence {
        /// The id of the first step.
        base: u64,
    },
    /// A step has begun here.
    Begun {
        /// The id of the step.
        step: u64,
        /// The worker that owns the step.
        worker: Arc<str>,
    },
    /// A step was aborted.
    Aborted {
        /// The id of the step.
        step: u64,
        /// The error of the abort.
        status: Status,
    },
    /// A step was cleaned up.
    CleanedUp {
        /// The id of the step.
        step: u64,
    },
}

/// A change of the standing request of an edge, for its poller.
#[derive(Clone, Debug)]
pub enum StandingChange {
    /// The standing request begins.
    Begun {
        /// The id of the standing request.
        id: u64,
        /// The sending peer.
        peer: PeerIndex,
        /// The key of the edge, at the first step of its sequence.
        key: TensorKey,
        /// The number of coming steps that are requested.
        window: u32,
        /// Whether the receiver borrows tensors where the fabric can.
        borrow: bool,
    },
    /// The window changes.
    Window {
        /// The id of the standing request.
        id: u64,
        /// The number of coming steps that are requested from now on.
        window: u32,
    },
    /// The standing request ends.
    Ended {
        /// The id of the standing request.
        id: u64,
    },
}

impl<P: Port> RemotePath for Engine<P, RemoteHandler> {
    fn send(&self, key: TensorKey, value: Value) -> Result<(), Error> {
        self.submit(RemoteCommand::Send { key, value }).map_err(Error::of_engine)
    }

    fn receive(
        &self,
        peer: PeerIndex,
        key: TensorKey,
        destination: Destination,
        waiter: Waiter,
    ) -> Result<(), Error> {
        self.submit(RemoteCommand::Receive { peer, key, destination, waiter }).map_err(Error::of_engine)
    }

    fn send_all(&self, values: Reused<BatchSend>) -> Result<(), Error> {
        self.submit(RemoteCommand::SendAll(values)).map_err(Error::of_engine)
    }

    fn receive_all(&self, receives: ReceiveAll) -> Result<(), Error> {
        self.submit(RemoteCommand::ReceiveAll(receives)).map_err(Error::of_engine)
    }

    fn cancel(&self, call: Cancel) {
        ignore_end(self.submit(RemoteCommand::Cancel(call)));
    }

    fn cancel_all(&self, calls: CancelAll) {
        ignore_end(self.submit(RemoteCommand::CancelAll(calls)));
    }

    fn step(&self, change: StepChange) {
        ignore_end(self.submit(RemoteCommand::Step(change)));
    }

    fn standing(&self, change: StandingChange) {
        ignore_end(self.submit(RemoteCommand::Standing(change)));
    }

    fn progress(&self) -> Result<usize, Error> {
        Engine::progress(self).map_err(Error::of_engine)
    }

    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        Engine::wait(self, deadline, done).map_err(Error::of_engine)
    }

    fn nudge(&self) {
        Engine::nudge(self);
    }

    fn end(&self, error: Error) {
        ignore_end(self.submit(RemoteCommand::End { error }));
    }

    fn now(&self) -> Time {
        Engine::now(self)
    }

    fn close(&self) {
        Engine::close(self);
    }
}

/// Ignores an unusable poller, which has failed every call already.
fn ignore_end(_: Result<(), Unusable>) {}
