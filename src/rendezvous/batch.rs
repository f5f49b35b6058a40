//! [`Batch`]: edges that one call sends, or receives, in each step.

use super::context::Context;
use super::edge::{Edge, EdgeEnd};
use super::local::LocalWaiter;
use super::path::{Paths, RemotePath};
use super::pending::{CallPlace, CancelToken, Receivable};
use super::pending_batch::PendingBatch;
use super::receive::{BatchRef, ReceiveAllBuilder};
use super::sequence::Sequence;
use super::standing::Standing;
use super::step::{Sendable, Step};
use crate::link::{TensorKey, Value};
use crate::matching::{
    BatchReceive, BatchSend, CallId, Delivery, Error, OnPath, Outcome, ReceiveAll, Waiter, reserve,
};
use crate::memory::{Tensor, TensorMut};
use crate::sync::{GroupPool, GroupSenders, Lists, Reused};
use crate::wire::Time;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A set of edges whose tensors one call sends, or receives, in each step.
///
/// Thousands of small tensors cost little more than their bytes. The poller gets them in one
/// command, short messages share control slots, and a device or a sleeping peer is notified once.
/// The edges may belong to several peers and to this process. An edge that is in the batch twice
/// stands for two values, in order.
///
/// Make a batch once for many steps. In steady state its calls allocate nothing, except for edges
/// within the process and for the list that [`Batch::recv`] returns (see [`Batch::recv_many`]). For
/// edges that change in each step there are [`Step::send_all`] and [`Step::recv_all`].
///
/// ```no_run
/// # use std::time::Duration;
/// # use tensorwire::{DType, Error, Node};
/// # fn train(node: &Node, steps: u64) -> Result<(), Box<dyn std::error::Error>> {
/// let names = (0..10_000).map(|n| format!("grad/{n}"));
/// let out = names.clone().map(|name| node.edge_to("ps", 0, &name));
/// let edges: Result<Vec<_>, Error> = out.collect();
/// let gradients = node.batch(edges?)?;
/// let edges: Result<Vec<_>, Error> = names.map(|name| node.edge_from("ps", 0, &name)).collect();
/// let weights = node.batch(edges?)?;
/// let mut received = Vec::new();
/// for n in 0..steps {
///     let step = node.step(n)?;
///     let tensors = (0..10_000).map(|_| node.tensor(DType::F32, &[2]));
///     let tensors = tensors.map(|tensor| tensor.map(|tensor| tensor.freeze()));
///     let tensors: Result<Vec<_>, _> = tensors.collect();
///     gradients.send(&step, tensors?)?;
///     weights.recv_many(&step, Duration::from_secs(10), &mut received)?;
///     node.cleanup(n);
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "a batch does nothing until its edges are sent or received on"]
pub struct Batch {
    context: Arc<Context>,
    edges: Box<[Edge]>,
    groups: GroupPool<Outcome>,
    standing: Vec<Standing>,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("edges", &self.edges).finish_non_exhaustive()
    }
}

impl Context {
    /// See [`Node::batch`](crate::Node::batch).
    pub(crate) fn batch(self: &Arc<Self>, edges: impl IntoIterator<Item = Edge>) -> Result<Batch, Error> {
        self.check_usable()?;
        Ok(Batch::new(self, edges.into_iter().collect()))
    }
}

impl Batch {
    pub(super) fn new(context: &Arc<Context>, edges: Box<[Edge]>) -> Self {
        let paths = context.paths.count();
        let part = |edge: &Edge| match edge.source {
            // The subset behind the last path belongs to the local table.
            EdgeEnd::Here => paths as u16,
            EdgeEnd::Peer(peer) => context.paths.number_of(peer),
        };
        let parts: Arc<[u16]> = edges.iter().map(part).collect();
        Batch {
            context: context.clone(),
            edges,
            groups: GroupPool::new(parts, paths + 1),
            standing: Vec::new(),
        }
    }

    /// Makes every edge of the batch [standing](Standing), for as long as the batch exists. The
    /// senders may then send the tensors of `window` coming steps of the sequence, 0 to 256, before
    /// the receives begin. An edge that is in the batch twice has one [`Standing`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tensorwire::DType;
    /// # let node = tensorwire::internals::doc_node();
    /// let sequence = node.sequence(1 << 40);
    /// let edges = [node.edge_from("worker", 0, "a")?, node.edge_from("worker", 0, "b")?];
    /// let weights = node.batch(edges)?.standing(sequence, 16)?;
    /// for n in 0..3 {
    ///     let step = node.step(sequence.step(n))?;
    ///     for edge in weights.edges() {
    ///         step.send(edge, node.tensor(DType::F32, &[4])?.freeze())?;
    ///     }
    ///     assert_eq!(weights.recv(&step, Duration::from_secs(1))?.len(), 2);
    ///     step.cleanup();
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Like [`Node::standing`](crate::Node::standing), for the first edge that can't stand. Then no
    /// edge of the batch stands.
    pub fn standing(mut self, sequence: Sequence, window: u32) -> Result<Batch, Error> {
        let mut edges: Vec<&Edge> = self.edges.iter().collect();
        edges.sort_unstable();
        edges.dedup();
        let standing = edges.into_iter().map(|edge| self.context.standing(edge, sequence, window));
        self.standing = standing.collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// The edges, in the order of the values.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Sends one value on each edge, in the order of the edges, like [`Step::send_all`].
    ///
    /// # Errors
    /// Like [`Step::send_all`], and if the number of values is not the number of edges.
    pub fn send<V: Sendable>(&self, step: &Step, values: impl IntoIterator<Item = V>) -> Result<(), Error> {
        step.check()?;
        let mut all = Values::of(step);
        let mut values = values.into_iter();
        for (at, edge) in self.edges.iter().enumerate() {
            let Some(value) = values.next() else { return Err(self.wrong_count(at)) };
            all.add(edge, value.into_value())?;
        }
        match values.count() {
            0 => all.send(),
            more => Err(self.wrong_count(self.edges.len() + more)),
        }
    }

    fn wrong_count(&self, values: usize) -> Error {
        Error::WrongCount { edges: self.edges.len(), values }
    }

    /// Waits for the values of all edges, for `timeout` at most, like [`Step::recv_all`]. The
    /// values are in the order of the edges.
    ///
    /// # Errors
    /// Like [`Step::recv_all`].
    pub fn recv(&self, step: &Step, timeout: Duration) -> Result<Vec<Delivery<Tensor>>, Error> {
        let mut received = Vec::with_capacity(self.edges.len());
        self.recv_many(step, timeout, &mut received)?;
        Ok(received)
    }

    /// Like [`Batch::recv`], into a list, which is emptied first. A list that is used again is not
    /// allocated again.
    ///
    /// # Errors
    /// Like [`Step::recv_all`]; then the list is empty.
    pub fn recv_many(
        &self,
        step: &Step,
        timeout: Duration,
        received: &mut Vec<Delivery<Tensor>>,
    ) -> Result<(), Error> {
        received.clear();
        self.begin(step, timeout, None)?.wait_into(received)
    }

    /// Sets up the receive of the values of all edges, as [`Step::receive_all`] does.
    pub fn receive<'a>(&'a self, step: &'a Step) -> ReceiveAllBuilder<'a> {
        ReceiveAllBuilder::new(step, BatchRef::User(self))
    }

    pub(super) fn begin<T: Receivable>(
        &self,
        step: &Step,
        timeout: Duration,
        given: Option<Reused<TensorMut>>,
    ) -> Result<PendingBatch<T>, Error> {
        let calls = self.calls(step, timeout, given.as_ref())?;
        let (receiver, senders) = self.groups.channels();
        // On an error below, the drop of `pending` cancels the receives that have begun.
        let pending = PendingBatch::new(&self.context, receiver, calls.first, calls.deadline);
        self.ask(step, calls, given, senders)?;
        Ok(pending)
    }

    /// Begins to receive. The callback thread calls `done`.
    pub(super) fn begin_then<T: Receivable>(
        &self,
        step: &Step,
        timeout: Duration,
        given: Option<Reused<TensorMut>>,
        done: impl FnOnce(Result<Vec<Delivery<T>>, Error>) + Send + 'static,
    ) -> Result<CancelToken, Error> {
        let calls = self.calls(step, timeout, given.as_ref())?;
        let context = self.context.clone();
        // On an error below, the senders are dropped, which ends the group: its pending batch
        // cancels the receives that have begun.
        let senders = self.groups.senders_then(self.context.executor.callback(move |receiver| {
            // Returns at once: all receives have ended, or one has failed.
            done(PendingBatch::new(&context, receiver, calls.first, calls.deadline).wait());
        }));
        self.ask(step, calls, given, senders)?;
        let place = CallPlace::Batch { count: self.edges.len() as u64 };
        Ok(CancelToken { context: self.context.clone(), id: CallId(calls.first), place })
    }

    /// Checks that the receives may begin, and numbers them.
    fn calls(
        &self,
        step: &Step,
        timeout: Duration,
        given: Option<&Reused<TensorMut>>,
    ) -> Result<BatchCalls, Error> {
        step.check()?;
        self.edges.iter().try_for_each(|edge| self.context.check_destination(edge))?;
        if let Some(given) = given.filter(|given| given.len() != self.edges.len()) {
            return Err(self.wrong_count(given.len()));
        }
        let first = self.context.next_call.fetch_add(self.edges.len() as u64, Ordering::Relaxed);
        Ok(BatchCalls { first, deadline: self.context.now() + timeout, timeout })
    }

    fn ask(
        &self,
        step: &Step,
        calls: BatchCalls,
        mut given: Option<Reused<TensorMut>>,
        senders: GroupSenders<Outcome>,
    ) -> Result<(), Error> {
        let context = &self.context;
        let mut given = given.as_mut().map(|given| given.drain(..));
        let mut remote = context.lists.receives.take();
        let mut local = context.lists.waiters.take();
        for ((at, edge), sender) in (0..).zip(&self.edges).zip(senders) {
            let (id, key) = (CallId(calls.first + at), edge.key(step.id));
            let into = given.as_mut().and_then(Iterator::next);
            match edge.source {
                EdgeEnd::Here => {
                    let BatchCalls { deadline, timeout, .. } = calls;
                    let waiter = Waiter { permit: None, id, sender, deadline, timeout, cancel_reason: None };
                    local.push((key, LocalWaiter { waiter, into }));
                }
                EdgeEnd::Peer(peer) => {
                    let path = context.paths.number_of(peer);
                    let destination = context.destination(into);
                    remote.push(BatchReceive { path, peer, id, key, destination, sender });
                }
            }
        }
        if !local.is_empty() {
            context.receive_all_local(step.id, &mut local)?;
        }
        let (deadline, timeout) = (calls.deadline, calls.timeout);
        dispatch(&context.paths, remote, &context.lists.receive_parts, |path, receives| {
            path.receive_all(ReceiveAll { deadline, timeout, receives })
        })
    }
}

/// The common parameters of the receives of a batch.
#[derive(Clone, Copy)]
struct BatchCalls {
    /// The id of the first receive. The ids of the others follow.
    first: u64,
    deadline: Time,
    timeout: Duration,
}

/// Passes to each path its part of a list.
fn dispatch<T: OnPath>(
    paths: &Paths,
    mut list: Reused<T>,
    parts: &Lists<Reused<T>>,
    mut give: impl FnMut(&dyn RemotePath, Reused<T>) -> Result<(), Error>,
) -> Result<(), Error> {
    let Some(first) = list.first().map(OnPath::path) else { return Ok(()) };
    if list.iter().all(|one| one.path() == first) {
        return give(paths.nth(first.into()), list);
    }
    let mut parts = parts.take();
    parts.extend((0..paths.count()).map(|_| list.another()));
    for one in list.drain(..) {
        parts[usize::from(one.path())].push(one);
    }
    let mut parts = parts.drain(..).enumerate().filter(|(_, part)| !part.is_empty());
    parts.try_for_each(|(path, part)| give(paths.nth(path), part))
}

/// Values that are sent together. Each value is checked before the first one is sent.
struct Values<'a> {
    step: &'a Step,
    remote: Reused<BatchSend>,
    local: Reused<(TensorKey, Value)>,
}

impl<'a> Values<'a> {
    fn of(step: &'a Step) -> Self {
        let lists = &step.context.lists;
        Values { step, remote: lists.sends.take(), local: lists.values.take() }
    }

    fn add(&mut self, edge: &Edge, value: Value) -> Result<(), Error> {
        let context = &self.step.context;
        context.check_source(edge)?;
        let key = edge.key(self.step.id);
        match edge.destination {
            EdgeEnd::Here => self.local.push((key, value)),
            EdgeEnd::Peer(peer) => {
                context.check_peer(peer)?;
                self.remote.push(BatchSend { path: context.paths.number_of(peer), peer, key, value });
            }
        }
        Ok(())
    }

    fn send(self) -> Result<(), Error> {
        let Values { step, mut remote, mut local } = self;
        let context = &step.context;
        let (count, limit) = (remote.len(), context.settings.max_outstanding_sends as usize);
        if count > 0 {
            let too_large = |waiting| Error::BatchTooLarge { values: count, waiting, limit };
            reserve(&context.outstanding, count, limit).map_err(too_large)?;
        }
        // After the checks: a refused batch copies and registers nothing. Before the first send:
        // all values go, or none.
        let made_ready: Result<(), Error> = remote.iter_mut().try_for_each(|sending| {
            let value = std::mem::replace(&mut sending.value, Value::Dead);
            sending.value = step.movable_value(&sending.key, value)?;
            Ok(())
        });
        let begun = made_ready.and_then(|()| match local.is_empty() {
            true => Ok(()),
            false => context.send_all_local(step.id, &mut local),
        });
        if let Err(error) = begun {
            context.outstanding.fetch_sub(count, Ordering::Relaxed);
            return Err(error);
        }
        dispatch(&context.paths, remote, &context.lists.send_parts, |path, values| path.send_all(values))
    }
}

impl Step {
    /// Sends several tensors by one call, to any peers and to this process. Never blocks. A
    /// [`Batch`] does the same for edges that are the same in each step, and allocates nothing.
    ///
    /// All values are sent, or none: each is checked like a [`Step::send`] before the first is
    /// sent. Several values of one edge arrive in their order here.
    ///
    /// # Errors
    /// Like [`Step::send`], for the first value that can't be sent, and if the batch is beyond
    /// `max_outstanding_sends`.
    pub fn send_all<'e, V: Sendable>(
        &self,
        values: impl IntoIterator<Item = (&'e Edge, V)>,
    ) -> Result<(), Error> {
        self.check()?;
        let mut all = Values::of(self);
        for (edge, value) in values {
            all.add(edge, value.into_value())?;
        }
        all.send()
    }
}
