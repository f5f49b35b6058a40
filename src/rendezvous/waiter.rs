//! Whoever waits for a tensor, and what it gets.

use super::Error;
use crate::engine::{Canceled, OneshotSender};
use crate::link::TensorKey;
use crate::memory::{Tensor, TensorMut};
use crate::wire::Time;
use crate::wire::message::Placement;
use std::time::Duration;

/// What a receive brings.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let (step, edge) = (node.step(1)?, node.edge_to("worker", 0, "x")?);
/// # let tensor = node.tensor(DType::F32, &[4])?.freeze();
/// step.send_dead(&edge)?;
/// let delivery = step.recv(&edge, Duration::from_secs(1))?;
/// assert!(delivery.is_dead && delivery.tensor.bytes().is_empty());
/// # drop(tensor);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Delivery<T> {
    /// The tensor. For a dead value: an empty one, or the one that was given, untouched.
    pub tensor: T,
    /// Whether it is the value of a branch not taken.
    pub is_dead: bool,
    /// Where the tensor lay at its sender.
    pub sender: Placement,
    /// Where it lies here.
    pub receiver: Placement,
}

/// What a receive brings, before its caller's type is known.
#[derive(Debug)]
pub(super) enum Payload {
    Tensor(Tensor),
    Into(TensorMut),
}

/// How a receive ended.
#[derive(Debug)]
pub(super) struct Outcome(pub Result<Delivery<Payload>, Error>);

impl Canceled for Outcome {
    fn abandoned() -> Self {
        Outcome(Err(Error::Stopped))
    }

    fn is_failure(&self) -> bool {
        self.0.is_err()
    }
}

/// Names a call, so that it can be cancelled. Unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId(pub(super) u64);

/// Why a waiter stops waiting.
#[derive(Clone, Debug)]
pub(super) enum CancelReason {
    /// Its user cancelled it.
    Cancelled,
    /// Its time is over, after so long; `None` for the time that it began with.
    Deadline(Option<Duration>),
    /// Nobody is there any more to take a value: one that comes all the same is for whoever asks
    /// next.
    Dropped,
}

/// Whoever waits for a tensor.
#[derive(Debug)]
pub struct Waiter {
    pub(super) id: CallId,
    pub(super) sender: OneshotSender<Outcome>,
    /// When it gives up; moved on by the grace once it has.
    pub(super) deadline: Time,
    /// How long it was willing to wait.
    pub(super) timeout: Duration,
    /// Set once it has given up.
    pub(super) cancel_reason: Option<CancelReason>,
}

impl Waiter {
    /// Brings a result.
    pub(super) fn complete(self, result: Result<Delivery<Payload>, Error>) {
        self.sender.send(Outcome(result));
    }

    /// Ends a waiter that gave up, with the error of its reason.
    pub(super) fn fail_cancelled(self, key: &TensorKey) {
        let error = match &self.cancel_reason {
            Some(CancelReason::Deadline(after)) => {
                Error::DeadlineExceeded { key: key.to_string(), after: after.unwrap_or(self.timeout) }
            }
            Some(CancelReason::Cancelled | CancelReason::Dropped) | None => {
                Error::Cancelled { key: key.to_string() }
            }
        };
        self.complete(Err(error));
    }
}
