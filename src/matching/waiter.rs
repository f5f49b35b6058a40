//! A receive that waits for its tensor, and its outcome.

use super::{Error, ReceivePermit};
use crate::link::{Destination, Received, TensorKey, placement_of, placement_of_mut};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::sync::{Canceled, OneshotSender};
use crate::wire::Time;
use crate::wire::message::Placement;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The value that a receive returns, and where it lay.
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
    /// The tensor. For a dead value: an empty tensor, or the tensor of the caller, untouched.
    pub tensor: T,
    /// Whether the value is dead: that of a branch not taken.
    pub is_dead: bool,
    /// Where the tensor lay at the sender.
    pub sender: Placement,
    /// Where the tensor lies here.
    pub receiver: Placement,
}

/// The tensor of a [`Delivery`], before it is cast to the type of the caller.
#[derive(Debug)]
#[allow(unnameable_types)] // of an internal trait
pub enum Payload {
    /// A tensor of the pool, borrowed, or empty for a dead value.
    Tensor(Tensor),
    /// The caller's tensor.
    Into(TensorMut),
}

impl Delivery<Payload> {
    /// The delivery of a value. An empty tensor of the pool stands for a dead one.
    #[inline]
    pub(crate) fn of(received: Received, sender: Placement, pool: &Pool) -> Self {
        let (tensor, is_dead) = match received {
            Received::Tensor(tensor) => (Payload::Tensor(tensor), false),
            Received::Into(given) => (Payload::Into(given), false),
            Received::Dead(None) => (Payload::Tensor(pool.empty()), true),
            Received::Dead(Some(given)) => (Payload::Into(given), true),
        };
        let receiver = match &tensor {
            Payload::Tensor(tensor) => placement_of(tensor),
            Payload::Into(given) => placement_of_mut(given),
        };
        Delivery { tensor, is_dead, sender, receiver }
    }
}

/// The result of a receive.
#[derive(Debug)]
pub(crate) struct Outcome(pub Result<Delivery<Payload>, Error>);

impl Canceled for Outcome {
    fn canceled() -> Self {
        Outcome(Err(Error::Stopped))
    }

    fn is_failure(&self) -> bool {
        self.0.is_err()
    }
}

/// Names a call for its cancellation. Unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId(pub(crate) u64);

/// Ids that a thread takes at once, so that most of them take no locked instruction.
const ID_BLOCK: u64 = 1 << 12;

thread_local! {
    /// The first id that this thread has taken and not used, and the one behind the last.
    static OWN_IDS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

impl CallId {
    /// The first of `count` ids in a row, which nothing else in the process has.
    #[inline]
    pub(crate) fn take(count: u64) -> CallId {
        let (first, end) = OWN_IDS.get();
        if end - first < count {
            return CallId::take_of_block(count);
        }
        OWN_IDS.set((first + count, end));
        CallId(first)
    }

    #[cold]
    fn take_of_block(count: u64) -> CallId {
        static TAKEN: AtomicU64 = AtomicU64::new(0);
        let block = count.max(ID_BLOCK);
        let first = TAKEN.fetch_add(block, Ordering::Relaxed);
        OWN_IDS.set((first + count, first + block));
        CallId(first)
    }
}

/// A call, and where it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallHandle {
    pub(crate) id: CallId,
    /// The number of its receive at the poller, if the handle was told it. It may be the number of
    /// another receive by now. Other calls are found by their id.
    pub(crate) waiter: Option<u32>,
}

impl From<CallId> for CallHandle {
    fn from(id: CallId) -> Self {
        CallHandle { id, waiter: None }
    }
}

/// The reason why a waiter stops to wait.
#[derive(Clone, Debug)]
pub(crate) enum CancelReason {
    /// The program cancelled the receive.
    Cancelled,
    /// The deadline has passed, after this timeout; `None` for the timeout of the receive.
    Deadline(Option<Duration>),
    /// The handle was dropped. A value that still comes is for the next receive.
    Dropped,
}

/// A receive that has not begun.
#[derive(Debug)]
pub struct NewReceive {
    /// The key of the tensor.
    pub key: TensorKey,
    /// Where the tensor goes.
    pub destination: Destination,
    /// Told the outcome once.
    pub waiter: Waiter,
}

/// A receive that waits: the sending end of its one-shot channel, and its deadline.
#[derive(Debug)]
pub struct Waiter {
    /// Its permit. `None` for receives of batches and within the process, which need none.
    pub(crate) permit: Option<ReceivePermit>,
    pub(crate) id: CallId,
    pub(crate) sender: OneshotSender<Outcome>,
    /// The begin of the wait.
    pub(crate) begun: Time,
    /// The end of the wait.
    pub(crate) deadline: Time,
    /// The timeout of the caller, for the error.
    pub(crate) timeout: Duration,
    /// Set once the receive was cancelled.
    pub(crate) cancel_reason: Option<CancelReason>,
    /// Whether the log says that the wait is long.
    pub(crate) is_logged: bool,
}

impl Waiter {
    /// Sends the result to the caller.
    pub(crate) fn complete(self, result: Result<Delivery<Payload>, Error>) {
        // First: the thread that gets the result may begin the next receive.
        drop(self.permit);
        self.sender.send(Outcome(result));
    }

    /// Ends a cancelled waiter with the error of its reason.
    pub(crate) fn fail_cancelled(self, key: &TensorKey) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::thread;

    #[test]
    fn no_two_calls_of_any_threads_have_one_id() {
        const COUNTS: [u64; 4] = [1, 3, ID_BLOCK - 1, 2 * ID_BLOCK];
        let taken = || {
            let rounds = (0..8).flat_map(|_| COUNTS);
            rounds.flat_map(|count| (CallId::take(count).0..).take(count as usize)).collect::<Vec<_>>()
        };
        let threads = [(); 3].map(|()| thread::spawn(taken));
        let ids: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect();
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len());
    }
}
