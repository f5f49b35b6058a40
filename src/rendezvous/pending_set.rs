//! [`PendingSet`]: a wait for any of several receives.

use super::context::Context;
use super::pending::{Pending, Receivable};
use crate::matching::{Delivery, Error};
use crate::memory::Tensor;
use crossbeam_queue::SegQueue;
use std::fmt;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

/// How long the wait on one poller goes on before the other pollers are polled.
const SLICE: Duration = Duration::from_micros(100);

/// Pending receives, of which [`PendingSet::wait_any`] returns the first one that has ended.
///
/// Each receive has an index in the set. The receives end in any order and are returned in this
/// order, so that none waits behind others. The rest goes on. A wait costs the same however many
/// receives are in the set.
///
/// Dropping the set cancels its receives, as dropping each [`Pending`] does.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use std::time::Duration;
/// use tensorwire::{DType, PendingSet};
/// let step = node.step(1)?;
/// let edges = [node.edge_from("worker", 0, "a")?, node.edge_from("worker", 0, "b")?];
/// let mut set = PendingSet::new();
/// for edge in &edges {
///     set.insert(step.receive(edge).begin()?);
/// }
/// // The second edge has its tensor first.
/// step.send(&edges[1], node.tensor(DType::F32, &[4])?.freeze())?;
/// let (index, received) = set.wait_any(Duration::from_secs(1)).expect("within a second");
/// assert_eq!(index, 1);
/// assert_eq!(received?.tensor.shape().dims(), [4]);
/// // The other receive goes on, and nothing has come for it.
/// assert!(set.len() == 1 && set.wait_any(Duration::ZERO).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping pending receives cancels them"]
pub struct PendingSet<T = Tensor> {
    entries: Vec<Entry<T>>,
    /// The indices of entries without a receive.
    free: Vec<usize>,
    pollers: Vec<PollerOfSet>,
    ended: Arc<SegQueue<usize>>,
}

/// A place of the set.
struct Entry<T> {
    pending: Option<Pending<T>>,
    waker: Waker,
}

/// The task that an entry stands for: it notes that the receive has ended.
struct NoteEnd {
    index: usize,
    ended: Arc<SegQueue<usize>>,
}

/// A poller that the receives of the set need.
#[derive(Clone)]
struct PollerOfSet {
    context: Arc<Context>,
    path: usize,
    /// The number of its receives in the set.
    receives: usize,
}

impl Wake for NoteEnd {
    fn wake(self: Arc<Self>) {
        self.ended.push(self.index);
    }
}

impl<T> fmt::Debug for PendingSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingSet").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<T> Default for PendingSet<T> {
    fn default() -> Self {
        PendingSet { entries: Vec::new(), free: Vec::new(), pollers: Vec::new(), ended: Arc::default() }
    }
}

impl<T> PendingSet<T> {
    /// A set without receives.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of receives in the set. Those that [`PendingSet::wait_any`] has returned are not
    /// in the set any more.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether no receive is in the set.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: Receivable> PendingSet<T> {
    /// Adds a receive, and returns its index. The first receives have the indices 0, 1 and so on.
    /// The index of a receive that was returned is used again, the latest first.
    pub fn insert(&mut self, mut pending: Pending<T>) -> usize {
        let index = self.free.pop().unwrap_or_else(|| self.add_entry());
        self.count_poller(&pending);
        let entry = &mut self.entries[index];
        pending.notify(&entry.waker);
        if pending.is_done() {
            // The result may have come before its waker. An index that is noted twice does no harm.
            self.ended.push(index);
        }
        entry.pending = Some(pending);
        index
    }

    /// Waits until one of the receives has ended, for `timeout` at most, and makes progress
    /// meanwhile. Takes the receive out of the set. Returns its index, and its value or error.
    ///
    /// Returns `None` if no receive has ended in time, and at once if the set is empty. Each
    /// receive ends at its own deadline, too. If the node can't be used any more, each call returns
    /// its error for one of the receives.
    pub fn wait_any(&mut self, timeout: Duration) -> Option<(usize, Result<Delivery<T>, Error>)> {
        let clock = self.pollers.first()?.context.clone();
        let deadline = clock.now() + timeout;
        loop {
            for at in 0..self.pollers.len() {
                if let Some(ended) = self.take_ended() {
                    return Some(ended);
                }
                let left = deadline.since(clock.now());
                let limit = if self.pollers.len() == 1 { left } else { left.min(SLICE) };
                if let Err(error) = self.wait_on(at, limit) {
                    return self.fail_one(at, error);
                }
            }
            if let Some(ended) = self.take_ended() {
                return Some(ended);
            }
            if clock.now() >= deadline {
                return None;
            }
        }
    }

    /// Waits on one poller until some receive has ended, for `limit` at most.
    fn wait_on(&self, at: usize, limit: Duration) -> Result<(), Error> {
        let PollerOfSet { context, path, .. } = &self.pollers[at];
        context.check_home()?;
        // Each node has a clock of its own.
        let until = context.now() + limit;
        context.wait(context.paths.nth(*path), until, &|| !self.ended.is_empty())?;
        match context.broken() {
            Some(error) if self.ended.is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes out the receive that has ended first.
    fn take_ended(&mut self) -> Option<(usize, Result<Delivery<T>, Error>)> {
        while let Some(index) = self.ended.pop() {
            if self.entries[index].pending.as_ref().is_some_and(Pending::is_done) {
                return Some((index, self.remove(index)?.result()));
            }
        }
        None
    }

    /// Takes out a receive of a poller that can't be used any more.
    fn fail_one(&mut self, at: usize, error: Error) -> Option<(usize, Result<Delivery<T>, Error>)> {
        let is_of_it = |pending| self.poller_of(pending) == Some(at);
        let index = self.entries.iter().position(|entry| entry.pending.as_ref().is_some_and(is_of_it))?;
        drop(self.remove(index));
        Some((index, Err(error)))
    }

    fn remove(&mut self, index: usize) -> Option<Pending<T>> {
        let pending = self.entries[index].pending.take()?;
        self.free.push(index);
        if let Some(at) = self.poller_of(&pending) {
            self.pollers[at].receives -= 1;
            if self.pollers[at].receives == 0 {
                self.pollers.swap_remove(at);
            }
        }
        Some(pending)
    }

    fn add_entry(&mut self) -> usize {
        let index = self.entries.len();
        let waker = Waker::from(Arc::new(NoteEnd { index, ended: self.ended.clone() }));
        self.entries.push(Entry { pending: None, waker });
        index
    }

    fn count_poller(&mut self, pending: &Pending<T>) {
        match self.poller_of(pending) {
            Some(at) => self.pollers[at].receives += 1,
            None => {
                let (context, path) = pending.poller();
                self.pollers.push(PollerOfSet { context: context.clone(), path, receives: 1 });
            }
        }
    }

    fn poller_of(&self, pending: &Pending<T>) -> Option<usize> {
        let (context, path) = pending.poller();
        let is_it = |poller: &PollerOfSet| poller.path == path && Arc::ptr_eq(&poller.context, context);
        self.pollers.iter().position(is_it)
    }
}
