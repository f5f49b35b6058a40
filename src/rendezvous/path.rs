//! How tensors of other processes are reached.

use super::waiter::{CallId, CancelReason, Waiter};
use super::{BatchSend, Error, ReceiveAll, RemoteCommand, RemoteHandler, Reused};
use crate::engine::{Engine, Unusable};
use crate::fabric::Port;
use crate::link::{Destination, TensorKey, Value};
use crate::wire::{Status, TaskId, Time};
use std::sync::Arc;

/// A task of the cluster: its index in the sorted list of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerIndex(pub u32);

/// Which of the links that there ever were with a peer: news of one says nothing of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkTag {
    /// Which life of the peer.
    pub incarnation: u64,
    /// Which link of the pair of tasks; grows with each new one, over all lives.
    pub generation: u64,
}

/// The tasks of the cluster, sorted.
#[derive(Clone, Debug)]
pub struct Members(Arc<[TaskId]>);

impl Members {
    /// These tasks.
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
    /// If the index is of another list.
    pub fn task(&self, index: PeerIndex) -> &TaskId {
        &self.0[index.0 as usize]
    }

    /// All of them.
    pub fn all(&self) -> &[TaskId] {
        &self.0
    }
}

/// The ways to all peers: one for each poller, which serves the peers that are dealt out to it.
#[derive(Clone)]
pub struct Paths(Arc<[Arc<dyn RemotePath>]>);

impl Paths {
    /// These, in this order.
    ///
    /// # Panics
    /// If there are none, or more than have a number.
    pub fn new(paths: Vec<Arc<dyn RemotePath>>) -> Self {
        assert!(!paths.is_empty() && paths.len() <= usize::from(u16::MAX), "{} paths", paths.len());
        Paths(paths.into())
    }

    /// Which of `count` paths serves a peer, from 0 on.
    pub fn index_of(peer: PeerIndex, count: usize) -> usize {
        peer.0 as usize % count
    }

    /// Which of these serves a peer, from 0 on.
    #[inline]
    pub fn number_of(&self, peer: PeerIndex) -> u16 {
        // No more have a number.
        Self::index_of(peer, self.0.len()) as u16
    }

    /// The path that serves a peer.
    #[inline]
    pub fn of(&self, peer: PeerIndex) -> &dyn RemotePath {
        self.nth(self.number_of(peer).into())
    }

    /// How many there are.
    #[inline]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// One of them, from 0 on.
    #[inline]
    pub fn nth(&self, nth: usize) -> &dyn RemotePath {
        &*self.0[nth]
    }

    /// The path for what concerns no peer.
    #[inline]
    pub fn first(&self) -> &dyn RemotePath {
        &*self.0[0]
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &dyn RemotePath> {
        self.0.iter().map(|path| &**path)
    }
}

/// A way to the tensors of other processes. One exists per poller.
pub trait RemotePath: Send + Sync {
    /// Offers a value for a peer's request.
    ///
    /// # Errors
    /// If the path is not usable any more.
    fn send(&self, key: TensorKey, value: Value) -> Result<(), Error>;

    /// Asks a peer for a tensor.
    ///
    /// # Errors
    /// If the path is not usable any more.
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
    /// If the path is not usable any more.
    fn send_all(&self, values: Reused<BatchSend>) -> Result<(), Error>;

    /// Asks peers for several tensors.
    ///
    /// # Errors
    /// If the path is not usable any more.
    fn receive_all(&self, receives: ReceiveAll) -> Result<(), Error>;

    /// Ends a call, unless it has ended.
    fn cancel(&self, call: Cancel);

    /// Ends those of several calls that have not ended.
    fn cancel_all(&self, calls: CancelAll);

    /// A step changed its state.
    fn step(&self, change: StepChange);

    /// Steps of an edge are to be asked for in advance, or not any more.
    fn standing(&self, change: StandingChange);

    /// Makes progress once. Returns how much there was.
    ///
    /// # Errors
    /// If the path is not usable any more.
    fn progress(&self) -> Result<usize, Error>;

    /// Makes progress until `done`, or until `deadline`. Returns whether it is done.
    ///
    /// # Errors
    /// If the path is not usable any more.
    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error>;

    /// Lets those who wait look whether they are done, after something outside this path has
    /// happened.
    fn nudge(&self);

    /// Ends every call with this error, if the loss of any peer is to end everything.
    fn end(&self, error: Error);

    /// The time now, on this path's clock.
    fn now(&self) -> Time;

    /// Closes every link and ends every call. Does nothing the second time.
    fn close(&self);
}

/// Which call to end, and why.
#[derive(Clone, Debug)]
pub struct Cancel {
    pub(super) id: CallId,
    pub(super) why: CancelReason,
}

/// Which calls to end, and why.
#[derive(Clone, Debug)]
pub struct CancelAll {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) why: CancelReason,
}

impl CancelAll {
    /// The same of one of them.
    pub(super) fn one(&self, id: u64) -> Cancel {
        Cancel { id: CallId(id), why: self.why.clone() }
    }
}

/// Something that goes to one of the paths.
pub trait OnPath {
    /// Which, from 0 on.
    fn path(&self) -> u16;
}

/// What happened to a step.
#[derive(Clone, Debug)]
pub enum StepChange {
    /// A run of steps was declared.
    Sequence {
        /// Its first step.
        base: u64,
    },
    /// It has begun here.
    Begun {
        /// Which.
        step: u64,
        /// Whose.
        worker: Arc<str>,
    },
    /// It was aborted.
    Aborted {
        /// Which.
        step: u64,
        /// With what.
        status: Status,
    },
    /// It was cleaned up.
    CleanedUp {
        /// Which.
        step: u64,
    },
}

/// What is wished of the steps of an edge that are asked for in advance.
#[derive(Clone, Debug)]
pub enum StandingChange {
    /// They are to be asked for.
    Begun {
        /// The name of this wish.
        id: u64,
        /// The peer that sends.
        peer: PeerIndex,
        /// The edge, with the first step of its sequence.
        key: TensorKey,
        /// How many steps in advance.
        window: u32,
        /// Whether to borrow the tensors where the fabric can.
        borrow: bool,
    },
    /// From now on so many in advance.
    Window {
        /// Which wish.
        id: u64,
        /// How many.
        window: u32,
    },
    /// Not any more.
    Ended {
        /// Which wish.
        id: u64,
    },
}

impl<P: Port> RemotePath for Engine<P, RemoteHandler> {
    fn send(&self, key: TensorKey, value: Value) -> Result<(), Error> {
        Ok(self.submit(RemoteCommand::Send { key, value })?)
    }

    fn receive(
        &self,
        peer: PeerIndex,
        key: TensorKey,
        destination: Destination,
        waiter: Waiter,
    ) -> Result<(), Error> {
        Ok(self.submit(RemoteCommand::Receive { peer, key, destination, waiter })?)
    }

    fn send_all(&self, values: Reused<BatchSend>) -> Result<(), Error> {
        Ok(self.submit(RemoteCommand::SendAll(values))?)
    }

    fn receive_all(&self, receives: ReceiveAll) -> Result<(), Error> {
        Ok(self.submit(RemoteCommand::ReceiveAll(receives))?)
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
        Ok(Engine::progress(self)?)
    }

    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        Ok(Engine::wait(self, deadline, done)?)
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

/// On a poller that is not usable any more every call has failed already; there is nothing to end.
fn ignore_end(_: Result<(), Unusable>) {}
