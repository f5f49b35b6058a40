//! Several receives that have begun and have not ended, waited for as one.

use super::Error;
use super::context::Context;
use super::path::CancelAll;
use super::waiter::{CancelReason, Delivery, Outcome};
use crate::engine::GroupReceiver;
use crate::memory::Tensor;
use crate::wire::Time;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long the wait for one poller's part goes on without a look whether another part has failed.
const SLICE: Duration = Duration::from_millis(1);

/// Several receives that have begun.
///
/// Dropping it cancels those that have not ended, without waiting. A value that comes later is for
/// the next receive. Receives that are done have their values, and dropping drops the values: to
/// lose none, [cancel](PendingBatch::cancel), and [wait for each](PendingBatch::wait_each).
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
pub struct PendingBatch {
    context: Arc<Context>,
    receiver: GroupReceiver<Outcome>,
    first: u64,
    deadline: Time,
}

impl fmt::Debug for PendingBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pending = f.debug_struct("PendingBatch");
        pending.field("len", &self.len()).field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

impl PendingBatch {
    pub(super) fn new(
        context: &Arc<Context>,
        receiver: GroupReceiver<Outcome>,
        first: u64,
        deadline: Time,
    ) -> Self {
        PendingBatch { context: context.clone(), receiver, first, deadline }
    }

    /// How many receives they are.
    pub fn len(&self) -> usize {
        self.receiver.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }

    /// Whether [`PendingBatch::wait`] would return at once: every value has come, or one has
    /// failed. Makes no progress by itself: see [`Node::progress`](crate::Node::progress).
    pub fn is_done(&self) -> bool {
        self.receiver.is_done() || self.receiver.has_failed()
    }

    /// Whether every one of them has ended, with a value or without: then
    /// [`PendingBatch::wait_each`] would return at once.
    pub fn have_all_ended(&self) -> bool {
        self.receiver.is_done()
    }

    /// How one of them has ended, by its place among the edges, as soon as it has; `None` before
    /// that, and when it was taken. For who sees to each value as it comes: whoever waits for the
    /// others afterwards is not given, or told, what was taken.
    pub fn take(&mut self, at: usize) -> Option<Result<Delivery<Tensor>, Error>> {
        self.receiver.take(at).map(delivered)
    }

    /// Cancels those that have not ended. Each brings either its value or [`Error::Cancelled`].
    /// Does not wait.
    pub fn cancel(&self) {
        self.cancel_for(CancelReason::Cancelled);
    }

    /// Waits until every value has come, until one has failed, or for the deadline that the
    /// receives began with. The values are in the order of the edges, without those that were
    /// [taken](PendingBatch::take); a failure that was taken ends no wait.
    ///
    /// # Errors
    /// As of [`Step::recv_all`](super::Step::recv_all).
    pub fn wait(self) -> Result<Vec<Delivery<Tensor>>, Error> {
        let mut received = Vec::with_capacity(self.len());
        self.wait_into(&mut received)?;
        Ok(received)
    }

    /// The same, with the values added to a list.
    ///
    /// # Errors
    /// As of [`Step::recv_all`](super::Step::recv_all); the list is as it was then.
    pub fn wait_into(mut self, received: &mut Vec<Delivery<Tensor>>) -> Result<(), Error> {
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

    /// Waits until each of them has ended, and tells how, in the order of the edges, without those
    /// that were [taken](PendingBatch::take).
    pub fn wait_each(mut self) -> Vec<Result<Delivery<Tensor>, Error>> {
        let ended = self.wait_for_end(false);
        let places = 0..self.len();
        let ends = places.filter_map(|at| match &ended {
            Ok(()) => self.delivery(at),
            Err(error) => self.delivery(at).map(|end| end.map_err(|_| error.clone())),
        });
        ends.collect()
    }

    /// The first error that is not just the consequence of another, or the first at all.
    fn why(&mut self) -> Error {
        let mut derived = None;
        for at in 0..self.len() {
            let Some(Err(error)) = self.receiver.take(at).map(|outcome| outcome.0) else { continue };
            if !error.is_derived() {
                return error;
            }
            derived.get_or_insert(error);
        }
        derived.unwrap_or(Error::Stopped)
    }

    /// How one has ended; `None` if that was taken.
    fn delivery(&mut self, at: usize) -> Option<Result<Delivery<Tensor>, Error>> {
        match self.receiver.take(at) {
            Some(outcome) => Some(delivered(outcome)),
            None if self.receiver.is_ready(at) => None,
            None => Some(Err(self.context.broken().unwrap_or(Error::Stopped))),
        }
    }

    /// Waits until all have ended or, if `or_failure`, one has failed.
    fn wait_for_end(&self, or_failure: bool) -> Result<(), Error> {
        self.context.check_home()?;
        if self.wait_until(self.deadline, or_failure)? {
            return Ok(());
        }
        // The pollers end calls at their deadlines by themselves; this is for those of the local
        // table.
        self.cancel_for(CancelReason::Deadline(None));
        let after = 2 * self.context.settings.cancel_grace;
        if self.wait_until(self.context.now() + after, or_failure)? {
            return Ok(());
        }
        Err(self.context.broken().unwrap_or(Error::Stalled { after }))
    }

    /// Waits for one poller's part after the other: each poller wakes those who wait for its own.
    fn wait_until(&self, deadline: Time, or_failure: bool) -> Result<bool, Error> {
        let paths = &self.context.paths;
        let failed = || or_failure && self.receiver.has_failed();
        for part in 0..=paths.count() {
            // The last part is the local table's.
            let path = if part < paths.count() { paths.nth(part) } else { paths.first() };
            let done = || self.receiver.is_subset_done(part) || failed();
            let is_only_one = || self.receiver.is_only_subset(part);
            while !done() {
                let now = self.context.now();
                let until = if is_only_one() { deadline } else { deadline.min(now + SLICE) };
                if !self.context.wait(path, until, &done)? && self.context.now() >= deadline {
                    // There may be other parts.
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

    fn cancel_for(&self, why: CancelReason) {
        if self.context.check_home().is_err() {
            return;
        }
        let cancel = CancelAll { first: self.first, count: self.len() as u64, why };
        let paths = &self.context.paths;
        for part in (0..paths.count()).filter(|part| !self.receiver.is_subset_done(*part)) {
            paths.nth(part).cancel_all(cancel.clone());
        }
        if !self.receiver.is_subset_done(paths.count()) {
            self.context.cancel_all_local(&cancel);
        }
    }
}

fn delivered(outcome: Outcome) -> Result<Delivery<Tensor>, Error> {
    outcome.0?.cast()
}

impl Drop for PendingBatch {
    fn drop(&mut self) {
        if !self.receiver.is_done() {
            self.cancel_for(CancelReason::Dropped);
        }
    }
}
