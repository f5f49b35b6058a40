//! The errors of sends and receives.

use crate::memory::PoolError;
use crate::wire::{Code, EdgeNameError, Incarnation, LossCause, Status, StepId, TaskId, TensorMeta};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the pool for tensors that a peer has offered, and not written yet.
///
/// ```
/// use tensorwire::{Error, GrantedBytes};
///
/// fn who_holds_the_pool(error: &Error) -> Option<String> {
///     let Error::NoRoom { granted, .. } = error else { return None };
///     let GrantedBytes { peer, bytes, .. } = granted.as_deref()?;
///     Some(format!("{peer} has not written {bytes} bytes"))
/// }
/// # assert_eq!(who_holds_the_pool(&Error::Stopped), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrantedBytes {
    /// The task that is to write.
    pub peer: TaskId,
    /// Of all its destinations.
    pub bytes: u64,
}

impl fmt::Display for GrantedBytes {
    /// As the end of a sentence about the pool.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GrantedBytes { peer, bytes } = self;
        write!(f, "; {bytes} bytes are the destinations of tensors that {peer} has not written yet")
    }
}

/// The reason why a send or a receive failed.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use std::time::Duration;
/// use tensorwire::{Code, Error};
/// let edge = node.edge_from("worker", 0, "never sent")?;
/// let error = node.step(1)?.recv(&edge, Duration::from_millis(1)).unwrap_err();
/// assert_eq!(error.code(), Code::DeadlineExceeded);
/// match error {
///     Error::DeadlineExceeded { key, after } => println!("{key} has not come within {after:?}"),
///     Error::PeerLost { peer, cause, .. } => println!("{peer} is gone: {cause}"),
///     other => return Err(other),
/// }
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The receive was cancelled. A value of the sender stays with the sender.
    #[error("the receive of {key} was cancelled")]
    Cancelled {
        /// The key of the receive.
        key: String,
    },
    /// No value came in time. A later value stays with the sender.
    #[error(
        "nothing was sent for {key} within {after:?}: is its producer running, and does it make progress?"
    )]
    DeadlineExceeded {
        /// The key of the receive.
        key: String,
        /// The timeout of the receive.
        after: Duration,
    },
    /// The step was aborted in this process. An abort at the sender arrives as [`Error::Remote`].
    #[error("step {step} was aborted: {status}")]
    Aborted {
        /// The id of the step.
        step: StepId,
        /// The error of the abort.
        status: Status,
    },
    /// The step was cleaned up.
    #[error("step {step} was cleaned up and can't be used any more: use a new step id")]
    StepGone {
        /// The id of the step.
        step: StepId,
    },
    /// Two workers want the same step.
    #[error("step {step} belongs to worker '{owner}', and '{other}' wants it: step ids must be unique")]
    StepTaken {
        /// The id of the step.
        step: StepId,
        /// The worker that owns the step.
        owner: String,
        /// The worker that tried to begin the step.
        other: String,
    },
    /// The peer was lost.
    #[error("peer {peer} (incarnation {incarnation}) was lost: {cause}")]
    PeerLost {
        /// The lost task.
        peer: TaskId,
        /// The life of the task that was lost.
        incarnation: Incarnation,
        /// The reason of the loss.
        cause: LossCause,
    },
    /// The peer has not been joined.
    #[error("peer {peer} is not connected: call join first, and wait for it")]
    NotConnected {
        /// The task that is not connected.
        peer: TaskId,
    },
    /// The sender's side failed. After an abort there the status is that of the abort, marked as
    /// derived: [`Error::is_derived`] is true.
    #[error(
        "{peer} could not send {key}: {}{status}",
        if .status.derived { "the step was aborted there: " } else { "" }
    )]
    Remote {
        /// The sender.
        peer: TaskId,
        /// The key of the receive.
        key: String,
        /// The error of the sender.
        status: Status,
    },
    /// A tensor arrived with another checksum than it was sent with. The setting `validate`
    /// compares them. The value is dropped.
    #[error(
        "{key} came from {peer} with {bytes} bytes with the checksum {actual:016x}, and was sent \
         with {sent:016x}: something between the two memories changes bytes. Have the sender send it again; \
         if the error comes back, look at memory errors (EDAC, mcelog) and at the error counters of the NIC \
         and its bus on both hosts"
    )]
    Corrupted {
        /// The sender.
        peer: TaskId,
        /// The key of the receive, with its step.
        key: String,
        /// The length of the tensor in bytes.
        bytes: u64,
        /// The checksum of the sender (XXH3, 64 bits).
        sent: u64,
        /// The checksum of the bytes that arrived.
        actual: u64,
    },
    /// A value of [`Step::fetch`](crate::Step::fetch) is dead.
    #[error("{key} is dead: its branch was not taken, so there is no tensor; recv_all returns dead values")]
    Dead {
        /// The key of the dead value.
        key: String,
    },
    /// The sent value has another type or shape than the tensor of the receive. The value is kept
    /// for the next receive.
    #[error("{key} is {sent}, but the tensor given for it is {given}: give one of the same type and shape")]
    ShapeMismatch {
        /// The key of the receive.
        key: String,
        /// Type and shape of the sent value.
        sent: Box<TensorMeta>,
        /// Type and shape of the tensor of the receive.
        given: Box<TensorMeta>,
    },
    /// The pool has no room. The value of a receive is kept for the next receive. A send that needs
    /// a copy in the pool was not done, and its handle to the tensor is dropped. Receivers are not
    /// told: they wait for another send, their deadline, or the [abort](crate::Step::abort) of the
    /// step.
    #[error("no room for {key}: {source}{}", .granted.as_ref().map(ToString::to_string).unwrap_or_default())]
    NoRoom {
        /// The key of the tensor.
        key: String,
        /// The size of the allocation, and the free memory.
        source: Arc<PoolError>,
        /// Of the peers with the poller of this receive, the one with the most such bytes. `None`
        /// if there is none, for sends, and over gRPC.
        granted: Option<Box<GrantedBytes>>,
    },
    /// A limit was reached.
    #[error("{what} is at its limit of {limit}: {remedy}")]
    ResourceExhausted {
        /// The counted things, such as receives.
        what: &'static str,
        /// Sends, receives or destinations that can be outstanding.
        limit: u64,
        /// The change that avoids the error.
        remedy: &'static str,
    },
    /// A batch of sends is beyond `max_outstanding_sends`.
    #[error(
        "a batch of {values} sends, while {waiting} sent tensors wait for their receivers, is beyond the \
         limit of {limit}: nothing of it was sent; send it in parts, wait until peers catch up, or raise \
         max_outstanding_sends"
    )]
    BatchTooLarge {
        /// The number of values in the batch.
        values: usize,
        /// The number of values that wait for their receivers.
        waiting: usize,
        /// The setting `max_outstanding_sends`.
        limit: usize,
    },
    /// The number of values to send, or of tensors to fill, is not the number of edges of the
    /// batch.
    #[error(
        "a batch of {edges} edges was given {values} values: give one for each edge, in their order; \
         nothing was sent or received"
    )]
    WrongCount {
        /// The number of edges.
        edges: usize,
        /// The number of values or tensors.
        values: usize,
    },
    /// The edge is not well-formed.
    #[error(transparent)]
    EdgeName(#[from] EdgeNameError),
    /// The edge does not start, or end, in this process.
    #[error("{edge} {what}, which is {here}: {remedy}")]
    WrongEnd {
        /// As text: source device, destination device, name, frame and iteration.
        edge: String,
        /// The failed operation and its condition.
        what: &'static str,
        /// This task.
        here: TaskId,
        /// The change that avoids the error.
        remedy: &'static str,
    },
    /// The edge names a task that is not in the cluster.
    #[error("{edge} names task {task}, which the cluster does not have: its tasks are {members}")]
    UnknownTask {
        /// As text: source device, destination device, name, frame and iteration.
        edge: String,
        /// Job and number from a device name of the edge.
        task: TaskId,
        /// All tasks of the cluster.
        members: String,
    },
    /// The edge has a [`Standing`](crate::Standing) already.
    #[error("{edge} has a Standing already: drop it first, or change its window")]
    StandingExists {
        /// As text: source device, destination device, name, frame and iteration.
        edge: String,
    },
    /// The window of a standing request is longer than a window can be.
    #[error(
        "a standing request can't have a window of {window} tensors: give {max} at most; with a window of \
         64 the receiver sends one message for 32 tensors"
    )]
    WindowTooLong {
        /// The window of the call, in tensors.
        window: u32,
        /// The longest window, in tensors.
        max: u32,
    },
    /// A step was aborted with status OK.
    #[error("step {step} can't be aborted with status OK: give the error that ends it")]
    AbortWithOk {
        /// The id of the step.
        step: StepId,
    },
    /// The first step of an abort of several is not of their sequence.
    #[error(
        "steps can't be aborted from step {step} on: the sequence has the steps {first} to {last}; give a \
         step of the sequence"
    )]
    NotOfSequence {
        /// The id of the step.
        step: StepId,
        /// The first step of the sequence.
        first: StepId,
        /// The last step of the sequence.
        last: StepId,
    },
    /// A sequence was used on a node that has not declared it.
    #[error(
        "steps of the sequence from {base} on can't be aborted: the node of the step has not declared the \
         sequence; declare it there with Node::sequence"
    )]
    UndeclaredSequence {
        /// The id of its first step.
        base: StepId,
    },
    /// A receive was cancelled or reached its deadline, and its poller did not end it within
    /// 2 x `cancel_grace`.
    #[error(
        "a receive was cancelled or reached its deadline, and its poller did not end it within {after:?}: \
         find the code that keeps the polling thread from polling"
    )]
    Stalled {
        /// The time for which the call waited for its end: 2 x `cancel_grace`.
        after: Duration,
    },
    /// The node has stopped.
    #[error("the node has stopped: its calls fail from now on; start a new node")]
    Stopped,
    /// This process was forked from the node's.
    #[error(
        "this process was forked from the process of the node, and can't use the node: exec in the child, or \
         fork before the node is started"
    )]
    Forked,
    /// A thread panicked while it made progress.
    #[error(
        "a thread panicked while it made progress: every call fails from now on; read the panic's message, \
         and start the process again"
    )]
    Poisoned,
}

impl Error {
    /// The error of a receive beyond `max_requests`.
    pub(crate) fn too_many_receives(max: u32) -> Self {
        Error::ResourceExhausted {
            what: "the number of receives outstanding with a peer",
            limit: max.into(),
            remedy: "raise max_requests, or wait for some first",
        }
    }

    /// The error of a receive over gRPC calls from a peer that does not hear that others ended.
    pub(crate) fn too_many_given_up(limit: usize) -> Self {
        Error::ResourceExhausted {
            what: "the number of receives that ended early, and that the peer has not heard of,",
            limit: limit as u64,
            remedy: "wait until the peer answers calls",
        }
    }

    /// The error of a receive whose destination can't be granted.
    pub(crate) fn too_many_grants(max: u32) -> Self {
        Error::ResourceExhausted {
            what: "the number of destinations that one peer may write to at a time, which the fabric sets,",
            limit: max.into(),
            remedy: "wait for some receives from that peer first",
        }
    }

    /// The error of a receive whose destination is longer than the link can grant.
    pub(crate) fn too_long_for_grant(max: u64) -> Self {
        Error::ResourceExhausted {
            what: "the bytes of a tensor that one memory window of the device lets the peer write",
            limit: max,
            remedy: "send the tensor in parts, or set rdma_memory_windows to off",
        }
    }

    /// The canonical code of this error, as gRPC defines them.
    pub fn code(&self) -> Code {
        match self {
            Error::Cancelled { .. } => Code::Cancelled,
            Error::DeadlineExceeded { .. } => Code::DeadlineExceeded,
            Error::Aborted { status, .. } | Error::Remote { status, .. } => status.code,
            Error::StepGone { .. } => Code::NotFound,
            Error::StepTaken { .. } | Error::StandingExists { .. } => Code::AlreadyExists,
            Error::PeerLost { .. } | Error::NotConnected { .. } | Error::Stopped | Error::Stalled { .. } => {
                Code::Unavailable
            }
            Error::Forked => Code::FailedPrecondition,
            Error::NoRoom { .. } | Error::ResourceExhausted { .. } | Error::BatchTooLarge { .. } => {
                Code::ResourceExhausted
            }
            Error::Poisoned => Code::Internal,
            Error::Corrupted { .. } => Code::DataLoss,
            Error::ShapeMismatch { .. }
            | Error::Dead { .. }
            | Error::WrongCount { .. }
            | Error::EdgeName(_)
            | Error::WrongEnd { .. }
            | Error::UnknownTask { .. }
            | Error::WindowTooLong { .. }
            | Error::AbortWithOk { .. }
            | Error::NotOfSequence { .. }
            | Error::UndeclaredSequence { .. } => Code::InvalidArgument,
        }
    }

    /// This error as a status, for [`Step::abort`](crate::Step::abort). The error of a peer keeps
    /// the text of its origin and is marked as derived, however many tasks it passes through.
    pub fn to_status(&self) -> Status {
        match self {
            Error::Aborted { status, .. } | Error::Remote { status, .. } => status.clone().into_derived(),
            error => Status::new(error.code(), error.to_string()),
        }
    }

    /// Whether this is the consequence of another error, such as the abort of a peer.
    pub fn is_derived(&self) -> bool {
        match self {
            Error::Aborted { status, .. } | Error::Remote { status, .. } => status.derived,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corrupted_tensor_is_told_with_key_step_and_both_checksums() {
        let (peer, key) =
            (TaskId::new("ps", 3).expect("a job name"), "a -> b 'w1' 0:0 of step 41".to_owned());
        let error = Error::Corrupted { peer, key, bytes: 4096, sent: 0xABC, actual: 0xDEF };
        let text = error.to_string();
        for part in
            ["'w1' 0:0 of step 41", "ps/3", "4096 bytes", "0000000000000abc", "0000000000000def", "EDAC"]
        {
            assert!(text.contains(part), "{text}");
        }
        assert!(error.code() == Code::DataLoss && !error.is_derived());
    }
}
