//! What can go wrong with a send or a receive.

use crate::engine::Unusable;
use crate::memory::PoolError;
use crate::wire::{Code, EdgeNameError, LossCause, Status, TaskId, TensorMeta};
use std::sync::Arc;
use std::time::Duration;

/// Why a send or a receive failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call was cancelled; the value, if there is one, is still with its sender.
    #[error("the receive of {key} was cancelled")]
    Cancelled {
        /// What was asked for.
        key: String,
    },
    /// Nothing came in time; the value, if it comes, is still with its sender.
    #[error(
        "nothing was sent for {key} within {after:?}: is its producer running, and does it make progress?"
    )]
    DeadlineExceeded {
        /// What was asked for.
        key: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// The step was aborted, here or at the peer.
    #[error("step {step} was aborted: {status}")]
    Aborted {
        /// The step.
        step: u64,
        /// With what.
        status: Status,
    },
    /// The step was cleaned up, and stays gone.
    #[error("step {step} was cleaned up and can't be used any more: use a new step id")]
    StepGone {
        /// The step.
        step: u64,
    },
    /// Two workers want the same step.
    #[error("step {step} belongs to worker '{owner}', and '{other}' wants it: step ids must be unique")]
    StepTaken {
        /// The step.
        step: u64,
        /// Whose it is.
        owner: String,
        /// Who else wants it.
        other: String,
    },
    /// The peer is gone.
    #[error("peer {peer} (incarnation {incarnation:016x}) was lost: {cause}")]
    PeerLost {
        /// Which.
        peer: TaskId,
        /// Which life of it.
        incarnation: u64,
        /// Why.
        cause: LossCause,
    },
    /// The peer has not been joined.
    #[error("peer {peer} is not connected: call join first, and wait for it")]
    NotConnected {
        /// Which.
        peer: TaskId,
    },
    /// The sender's side failed.
    #[error("{peer} could not send {key}: {status}")]
    Remote {
        /// The sender.
        peer: TaskId,
        /// What was asked for.
        key: String,
        /// What it said.
        status: Status,
    },
    /// What came is not what was sent: in data validation mode (`validate`) each tensor is compared
    /// with its sender's sum. The value is lost; nobody gets it.
    #[error(
        "{key} came from {peer} with {bytes} bytes whose sum is {actual:016x}, and was sent with \
            {sent:016x}: something between \
         the two memories changes bytes. Have the sender send it again; if it comes back, look at memory \
         errors (EDAC, mcelog) \
         and at the NIC's and its bus's error counters on both hosts"
    )]
    Corrupted {
        /// The sender.
        peer: TaskId,
        /// What was asked for, with its step.
        key: String,
        /// Bytes of the tensor.
        bytes: u64,
        /// The sender's sum of them (XXH3, 64 bits).
        sent: u64,
        /// The sum of what came.
        actual: u64,
    },
    /// A value came that does not fit the tensor that was given. It is kept for the next receive.
    #[error("{key} is {sent}, but the tensor given for it is {given}: give one of the same type and shape")]
    ShapeMismatch {
        /// What was asked for.
        key: String,
        /// What was sent.
        sent: Box<TensorMeta>,
        /// What was given.
        given: Box<TensorMeta>,
    },
    /// There is no room in the pool. What a receive was to get is kept for the next one. What a
    /// send was to copy into the pool was not sent, and the sender's handle to it is dropped:
    /// receivers are not told, and go on waiting for another send, their deadline, or the
    /// [abort](super::Step::abort) of the step.
    #[error("no room for {key}: {source}")]
    NoRoom {
        /// Which tensor.
        key: String,
        /// What was asked, and what is free.
        source: Arc<PoolError>,
    },
    /// A limit was reached.
    #[error("{what} is at its limit of {limit}: {remedy}")]
    ResourceExhausted {
        /// What.
        what: &'static str,
        /// How much there can be.
        limit: u64,
        /// What to change.
        remedy: &'static str,
    },
    /// More values were sent at once than may wait for somebody to ask for them.
    #[error(
        "a batch of {values} sends, while {waiting} sent tensors wait that nobody has asked for, is beyond \
            the limit of {limit}: \
         nothing of it was sent; send it in parts, wait until peers catch up, or raise max_outstanding_sends"
    )]
    BatchTooLarge {
        /// How many there are.
        values: usize,
        /// How many wait already.
        waiting: usize,
        /// How many may.
        limit: usize,
    },
    /// A batch has another number of edges.
    #[error(
        "a batch of {edges} edges was given {values} values: give one for each edge, in their order; \
            nothing was sent"
    )]
    WrongCount {
        /// How many it has.
        edges: usize,
        /// How many were given.
        values: usize,
    },
    /// The edge is not well-formed.
    #[error(transparent)]
    EdgeName(#[from] EdgeNameError),
    /// The edge does not start, or end, in this process.
    #[error("{edge} {what}, which is {here}: {remedy}")]
    WrongEnd {
        /// Which edge.
        edge: String,
        /// What is wrong.
        what: &'static str,
        /// This task.
        here: TaskId,
        /// What to change.
        remedy: &'static str,
    },
    /// The edge names a task that is not in the cluster.
    #[error("{edge} names task {task}, which the cluster does not have: its tasks are {members}")]
    UnknownTask {
        /// Which edge.
        edge: String,
        /// The task.
        task: TaskId,
        /// Those that there are.
        members: String,
    },
    /// An edge is asked for in advance twice.
    #[error("{edge} is asked for in advance already: drop that Standing first, or change its window")]
    StandingExists {
        /// Which edge.
        edge: String,
    },
    /// More steps of an edge were to be asked for in advance than one message can ask for.
    #[error(
        "{window} steps can't be asked for in advance, {max} can: a window of 16 costs one control message \
            in eight steps"
    )]
    WindowTooLong {
        /// How many.
        window: u32,
        /// How many there can be.
        max: u32,
    },
    /// An abort needs an error.
    #[error("step {step} can't be aborted with status OK: give the error that ends it")]
    AbortWithOk {
        /// The step.
        step: u64,
    },
    /// A receive was given up, and nobody saw to it: the thread that polls for its peer is held up.
    #[error(
        "a receive was given up, and its poller did nothing for {after:?}: what keeps the thread that polls \
            from its work?"
    )]
    Stalled {
        /// For how long.
        after: Duration,
    },
    /// The node has stopped.
    #[error("the node has stopped")]
    Stopped,
    /// This process was forked from the node's.
    #[error(
        "this process was forked from the one that the node runs in, and has no part in it: exec in the \
            child, or fork before the node is started"
    )]
    Forked,
    /// A thread panicked while it made progress.
    #[error("a thread panicked while it made progress: every call fails from now on")]
    Poisoned,
}

impl From<Unusable> for Error {
    fn from(why: Unusable) -> Self {
        match why {
            Unusable::Poisoned => Error::Poisoned,
            Unusable::Closed => Error::Stopped,
        }
    }
}

impl Error {
    /// The canonical code of this error.
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
            | Error::WrongCount { .. }
            | Error::EdgeName(_)
            | Error::WrongEnd { .. }
            | Error::UnknownTask { .. }
            | Error::WindowTooLong { .. }
            | Error::AbortWithOk { .. } => Code::InvalidArgument,
        }
    }

    /// This error as a status, for [`Step::abort`](super::Step::abort). One that came from a peer
    /// keeps the text of its origin, marked as derived, however many tasks it passes through.
    pub fn to_status(&self) -> Status {
        match self {
            Error::Aborted { status, .. } | Error::Remote { status, .. } => status.clone().into_derived(),
            error => Status::new(error.code(), error.to_string()),
        }
    }

    /// Whether this is only the consequence of another error (a cancellation that an abort caused).
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
    fn a_corrupted_tensor_is_told_with_key_step_and_both_sums() {
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
