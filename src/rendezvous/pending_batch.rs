//! [`PendingBatch`]: several receives that have begun, with one wait.

use super::batch::BatchCalls;
use super::context::Context;
use super::edge::Edge;
use super::pending::{CallPlace, CancelToken, Receivable};
use crate::matching::{CallId, CancelAll, CancelReason, Delivery, Error, Outcome};
use crate::memory::Tensor;
use crate::sync::{GroupReceiver, is_waking};
use crate::wire::Time;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

/// How long the wait for one poller's subset goes on before the other subsets are checked.
const SLICE: Duration = Duration::from_millis(1);

/// Several receives that have begun.
///
/// Dropping it cancels the receives that have not ended, without waiting. A value that comes later
/// is for the next receive. The values of receives that are done are dropped. To lose none,
/// [cancel](PendingBatch::cancel), then [wait for each](PendingBatch::wait_each).
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let (step, edge) = (node.step(1)?, node.edge_to("worker", 0, "x")?);
/// # let tensor = node.tensor(DType::F32, &[4])?.freeze();
/// let pending = step.receive_all(&[&edge, &edge]).within(Duration::from_secs(1)).begin()?;
/// step.send_all([(&edge, tensor.clone()), (&edge, tensor)])?;
/// assert_eq!(pending.wait()?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping pending receives cancels them"]
pub struct PendingBatch<T = Tensor> {
    context: Arc<Context>,
    receiver: GroupReceiver<Outcome>,
    edges: Arc<[Edge]>,
    /// The step and the id of the first receive.
    step: u64,
    first: u64,
    deadline: Time,
    receives: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for PendingBatch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pending = f.debug_struct("PendingBatch");
        let is_done = self.receiver.is_done();
        pending.field("len", &self.receiver.len()).field("is_done", &is_done).finish_non_exhaustive()
    }
}

impl<T: Receivable> PendingBatch<T> {
    pub(super) fn new(
        context: &Arc<Context>,
        receiver: GroupReceiver<Outcome>,
        edges: Arc<[Edge]>,
        calls: BatchCalls,
    ) -> Self {
        let BatchCalls { step, first, deadline, .. } = calls;
        PendingBatch {
            context: context.clone(),
            receiver,
            edges,
            step,
            first,
            deadline,
            receives: PhantomData,
        }
    }

    /// The number of receives, ended ones included.
    pub fn len(&self) -> usize {
        self.receiver.len()
    }

    /// Whether the batch has no edges.
    pub fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }

    /// Whether [`PendingBatch::wait`] would return at once: every value has come, or one has
    /// failed. Makes no progress by itself: see [`Node::progress`](crate::Node::progress).
    pub fn is_done(&self) -> bool {
        self.receiver.is_done() || self.receiver.has_failed()
    }

    /// Whether every receive has ended, with a value or an error. Then [`PendingBatch::wait_each`]
    /// returns at once.
    pub fn have_all_ended(&self) -> bool {
        self.receiver.is_done()
    }

    /// Takes the outcome of the receive on edge number `at`. `None` before the receive has ended,
    /// and after its outcome was taken. Later waits leave out outcomes that were taken.
    pub fn take(&mut self, at: usize) -> Option<Result<Delivery<T>, Error>> {
        self.receiver.take(at).map(|outcome| self.context.losses.delivered(outcome))
    }

    /// Cancels the receives that have not ended. Each ends with its value or with
    /// [`Error::Cancelled`]. Does not wait.
    pub fn cancel(&self) {
        self.cancel_for(CancelReason::Cancelled);
    }

    /// Waits until every value has come, one receive has failed, or the deadline has passed. The
    /// values are in the order of the edges, without those that were [taken](PendingBatch::take).
    /// A failure that was taken ends no wait.
    ///
    /// # Errors
    /// Like [`Step::recv_all`](super::Step::recv_all).
    pub fn wait(self) -> Result<Vec<Delivery<T>>, Error> {
        let mut received = Vec::with_capacity(self.len());
        self.wait_into(&mut received)?;
        Ok(received)
    }

    /// Like [`PendingBatch::wait`], with the values appended to `received`.
    ///
    /// # Errors
    /// Like [`Step::recv_all`](super::Step::recv_all); then `received` is unchanged.
    pub fn wait_into(mut self, received: &mut Vec<Delivery<T>>) -> Result<(), Error> {
        self.wait_for_end(true)?;
        if self.receiver.has_failed() {
            return Err(self.why());
        }
        let before = received.len();
        for at in 0..self.len() {
            match self.delivery(at) {
                Some(Ok(delivery)) => received.push(delivery),
                Some(Err(error)) => {
                    received.truncate(before);
                    return Err(error);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Waits until every receive has ended. The outcomes are in the order of the edges, without
    /// those that were [taken](PendingBatch::take).
    pub fn wait_each(mut self) -> Vec<Result<Delivery<T>, Error>> {
        let ended = self.wait_for_end(false);
        let places = 0..self.len();
        let ends = places.filter_map(|at| match &ended {
            Ok(()) => self.delivery(at),
            Err(error) => self.delivery(at).map(|end| end.map_err(|_| error.clone())),
        });
        ends.collect()
    }

    /// The first error that is not derived from another, or else the first error.
    fn why(&mut self) -> Error {
        let mut derived = None;
        for at in 0..self.len() {
            let Some(Err(error)) = self.take(at) else { continue };
            if !error.is_derived() {
                return error;
            }
            derived.get_or_insert(error);
        }
        derived.unwrap_or(Error::Stopped)
    }

    /// The outcome of one receive; `None` if it was taken.
    fn delivery(&mut self, at: usize) -> Option<Result<Delivery<T>, Error>> {
        match self.receiver.take(at) {
            Some(outcome) => Some(self.context.losses.delivered(outcome)),
            None if self.receiver.is_ready(at) => None,
            None => Some(Err(self.context.broken().unwrap_or(Error::Stopped))),
        }
    }

    /// Waits until all receives have ended or, if `or_failure`, one has failed.
    fn wait_for_end(&self, or_failure: bool) -> Result<(), Error> {
        self.context.check_home()?;
        if self.wait_until(self.deadline, or_failure)? {
            return Ok(());
        }
        // Pollers end calls at their deadlines. This cancellation is for the local table.
        self.cancel_for(CancelReason::Deadline(None));
        let after = 2 * self.context.settings.cancel_grace;
        if self.wait_until(self.context.now() + after, or_failure)? {
            return Ok(());
        }
        Err(self.context.broken().unwrap_or(Error::Stalled { after }))
    }

    /// Waits for the subset of one poller after the other, as a poller wakes only its own waiters.
    fn wait_until(&self, deadline: Time, or_failure: bool) -> Result<bool, Error> {
        let paths = &self.context.paths;
        let failed = || or_failure && self.receiver.has_failed();
        for part in 0..=paths.count() {
            // The last subset belongs to the local table.
            let path = if part < paths.count() { paths.nth(part) } else { paths.first() };
            let done = || self.receiver.is_subset_done(part) || failed();
            let is_only_one = || self.receiver.is_only_subset(part);
            while !done() {
                let now = self.context.now();
                let until = if is_only_one() { deadline } else { deadline.min(now + SLICE) };
                if !self.context.wait(path, until, &done)? && self.context.now() >= deadline {
                    // Other subsets may have ended meanwhile.
                    return Ok(self.receiver.is_done() || failed());
                }
                if self.context.broken().is_some() {
                    return Ok(true);
                }
            }
            if failed() {
                return Ok(true);
            }
        }
        Ok(true)
    }
}

impl<T> PendingBatch<T> {
    fn cancel_for(&self, why: CancelReason) {
        if self.context.check_home().is_err() {
            return;
        }
        if is_waking() {
            let place = CallPlace::Batch { edges: self.edges.clone(), step: self.step };
            let token = CancelToken { context: self.context.clone(), id: CallId(self.first), place };
            return token.cancel_for(why);
        }
        let cancel = CancelAll { first: self.first, count: self.receiver.len() as u64, why };
        let paths = &self.context.paths;
        for part in (0..paths.count()).filter(|part| !self.receiver.is_subset_done(*part)) {
            paths.nth(part).cancel_all(cancel.clone());
        }
        if !self.receiver.is_subset_done(paths.count()) {
            self.context.cancel_all_local(&self.edges, self.step, &cancel);
        }
    }
}

impl<T> Drop for PendingBatch<T> {
    fn drop(&mut self) {
        if !self.receiver.is_done() {
            self.cancel_for(CancelReason::Dropped);
        }
    }
}
