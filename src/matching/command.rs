//! The commands of the users and of the node to a poller, and their data.

use super::{
    CallHandle, CallId, CancelReason, EdgeReports, Error, NewReceive, Outcome, Untaken, WaitReports,
};
use crate::link::{Destination, TensorKey, Value};
use crate::sync::{OneshotSender, Reused};
use crate::telemetry::FlightLog;
use crate::wire::{Generation, Incarnation, LossCause, Status, TaskId, Time};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

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

/// Called when a new link works in both directions, or has failed.
pub type ProbeCallback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Called with the values that were sent and not taken, and with the number of losses so far.
pub type UntakenCallback = Box<dyn FnOnce(Untaken, u64) + Send>;

/// A command of a user or of the node to the poller.
pub enum RemoteCommand<L> {
    /// Adds a new link.
    Attach {
        /// Index in the table of peers.
        peer: PeerIndex,
        /// Which of the links with the peer.
        tag: LinkTag,
        /// Connected by the fabric, and not probed yet.
        link: L,
        /// Called when the link works in both directions, or has failed.
        done: ProbeCallback,
    },
    /// Both sides have probed a link: calls may use it from now on.
    Ready {
        /// Index in the table of peers.
        peer: PeerIndex,
        /// Which of the links with the peer.
        tag: LinkTag,
    },
    /// Closes a link. Other links with the peer stay.
    Lose {
        /// Index in the table of peers.
        peer: PeerIndex,
        /// Which of the links with the peer.
        tag: LinkTag,
        /// Goes into the errors of the calls that wait for the peer.
        cause: LossCause,
    },
    /// An incarnation of a peer has ended, whether it was ever linked or not. The tag is that
    /// of the last link with it that existed or was planned.
    Gone(PeerEnd),
    /// Ends every call, because another poller has found a fatal loss.
    End {
        /// The error of every call.
        error: Error,
    },
    /// Sends a value to a peer.
    Send {
        /// The receiving peer.
        peer: PeerIndex,
        /// The key of the value.
        key: TensorKey,
        /// A tensor, or a dead value.
        value: Value,
    },
    /// Begins a receive from a peer.
    Receive {
        /// The sending peer.
        peer: PeerIndex,
        /// Its key and destination, and who is told the outcome.
        receive: NewReceive,
    },
    /// Sends several values.
    SendAll(Reused<BatchSend>),
    /// Begins several receives.
    ReceiveAll(ReceiveAll),
    /// Cancels several calls.
    CancelAll(CancelAll),
    /// Cancels a call.
    Cancel(Cancel),
    /// A step changed its state.
    Step(StepChange),
    /// Changes a standing edge.
    Standing(StandingChange),
    /// Reports the edges, `limit` of them at most.
    Edges {
        /// Edges that are reported one by one.
        limit: usize,
        /// Called with the reports.
        done: Box<dyn FnOnce(EdgeReports) + Send>,
    },
    /// Reports what waits, `limit` waits at most.
    Waits {
        /// Waits that are reported one by one.
        limit: usize,
        /// Called with the reports.
        done: Box<dyn FnOnce(WaitReports) + Send>,
    },
    /// Reports the flight records of the links.
    FlightLogs(Box<dyn FnOnce(Vec<FlightLog>) + Send>),
    /// Reports the values that were sent and not taken.
    Untaken {
        /// Whether receivers are asked to tell what they take from now on.
        asks: bool,
        /// The losses so far when the caller asked first; `None` for the first time.
        since: Option<u64>,
        /// Called with the report, and with the number of losses so far.
        done: UntakenCallback,
    },
    /// Says whether everything that was posted is at the hosts of its peers.
    IsFlushed(Box<dyn FnOnce(bool) + Send>),
    /// Reports how much there is to do.
    #[cfg(any(test, feature = "sim"))]
    Load(Box<dyn FnOnce(RemoteLoad) + Send>),
}

/// How much a poller keeps for the rendezvous, for tests that wait until nothing is left.
#[cfg(any(test, feature = "sim"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteLoad {
    /// Messages and transfers of all links of the poller.
    pub links: crate::link::LinkLoad,
    /// Receives that wait.
    pub waiting: usize,
    /// Values that have not left.
    pub values: usize,
    /// Needs of peers that are not answered.
    pub needs: usize,
    /// Values that came and were not taken.
    pub held: usize,
}

/// An item of a batch that goes to one of the paths.
pub trait OnPath {
    /// The number of the path, from 0 on.
    fn path(&self) -> u16;
}

/// A value of a batch.
#[derive(Debug)]
pub struct BatchSend {
    pub(crate) path: u16,
    pub(crate) peer: PeerIndex,
    pub(crate) key: TensorKey,
    pub(crate) value: Value,
}

/// One edge of a batch, with the place of its result.
#[derive(Debug)]
pub struct BatchReceive {
    pub(crate) path: u16,
    pub(crate) peer: PeerIndex,
    pub(crate) id: CallId,
    pub(crate) key: TensorKey,
    pub(crate) destination: Destination,
    pub(crate) sender: OneshotSender<Outcome>,
}

/// The receives of a batch.
#[derive(Debug)]
pub struct ReceiveAll {
    pub(crate) begun: Time,
    pub(crate) deadline: Time,
    pub(crate) timeout: Duration,
    pub(crate) receives: Reused<BatchReceive>,
}

impl OnPath for BatchSend {
    fn path(&self) -> u16 {
        self.path
    }
}

impl OnPath for BatchReceive {
    fn path(&self) -> u16 {
        self.path
    }
}

/// The cancellation of one call, and its reason.
#[derive(Clone, Debug)]
pub struct Cancel {
    pub(crate) call: CallHandle,
    pub(crate) why: CancelReason,
}

/// The cancellation of `count` calls from id `first` on, and its reason.
#[derive(Clone, Debug)]
pub struct CancelAll {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) why: CancelReason,
}

impl CancelAll {
    /// The cancellation of one of the calls.
    pub(crate) fn one(&self, id: u64) -> Cancel {
        Cancel { call: CallId(id).into(), why: self.why.clone() }
    }
}

/// A change of a step, for the pollers.
#[derive(Clone, Debug)]
pub enum StepChange {
    /// A sequence was declared.
    Sequence {
        /// The id of the first step.
        base: u64,
    },
    /// Steps were aborted. Those that begin later are aborted too.
    Aborted {
        /// The ids of the steps: one, or those of a sequence from one on.
        steps: RangeInclusive<u64>,
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
        /// Tensors that may come before their receives.
        window: u32,
    },
    /// Later windows have another number of steps.
    Window {
        /// The id of the standing request.
        id: u64,
        /// Tensors that may come before their receives from now on.
        window: u32,
    },
    /// The standing request ends.
    Ended {
        /// The id of the standing request.
        id: u64,
    },
}

/// The loss of a peer.
#[derive(Clone, Debug)]
pub struct LostPeer {
    /// Index in the table of peers.
    pub peer: PeerIndex,
    /// The link that has ended, or the last one that was planned.
    pub tag: LinkTag,
    /// The error of calls that need the peer.
    pub error: Error,
    /// Values at most that had left for the peer and are lost with it.
    pub values: u64,
    /// The flight records of the link; `None` if there was none.
    pub flight: Option<FlightLog>,
}

/// The end of a peer, and its cause.
#[derive(Clone, Debug)]
pub struct PeerEnd {
    /// Index in the table of peers.
    pub peer: PeerIndex,
    /// The incarnation, and its last link.
    pub tag: LinkTag,
    /// Goes into the errors of the calls that wait for the peer.
    pub cause: LossCause,
}

/// Observes the links with peers. No method may block.
pub trait PeerObserver: Send + Sync {
    /// A link with this incarnation of the peer is up: both sides have said so.
    fn up(&self, peer: PeerIndex, tag: LinkTag);
    /// A peer was lost: its link was up and has ended, or its incarnation has ended before a link
    /// was up.
    fn down(&self, lost: &LostPeer);
    /// A link had failed before both sides said that it is up. No call has used it.
    fn failed_before_ready(&self, peer: PeerIndex, tag: LinkTag);
    /// The last end of each peer that has left, died or fallen silent, in the order in which the
    /// node was told. The commands about them may still be queued.
    fn told_ends(&self) -> Vec<PeerEnd> {
        Vec::new()
    }
    /// The error of the first end that the node was told before this loss. There is none if nothing
    /// was wrong with that end, or a poller has reported it. The peer may belong to another poller.
    fn first_cause(&self, of: &LostPeer) -> Option<Error> {
        let _ = of;
        None
    }
    /// Calls have waited for longer than `hung_after`.
    fn hung(&self, waits: &WaitReports) {
        let _ = waits;
    }
}
