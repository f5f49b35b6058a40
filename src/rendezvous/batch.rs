//! [`Batch`]: edges that one call sends, or receives, in each step.

use super::context::Context;
use super::edge::{Edge, EdgeEnd};
use super::local::LocalWaiter;
use super::path::{Paths, RemotePath, unusable};
use super::pending::{CallPlace, CancelToken, Receivable};
use super::pending_batch::PendingBatch;
use super::receive::{BatchRef, ReceiveAllBuilder};
use super::sequence::Sequence;
use super::standing::Standing;
use super::step::{Sendable, Step};
use crate::engine::DirectWait;
use crate::link::{Destination, Received, TensorKeyRef, Value};
use crate::matching::{
    BatchReceive, BatchSend, CallId, Delivery, Error, OnPath, Outcome, PeerIndex, ReceiveAll, Waiter, reserve,
};
use crate::matching::{BatchWalk, ReceivesInOrder, WalkEnd};
use crate::memory::{Tensor, TensorMut};
use crate::sync::{GroupPool, GroupSenders, Lists, Reused};
use crate::wire::Time;
use crate::wire::message::Placement;
use std::fmt;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A set of edges whose tensors one call sends, or receives, in each step.
///
/// Thousands of small tensors cost little more than their bytes. The calling thread sends and
/// receives them on the poller itself, or gives the poller one command. Short messages share
/// control slots, and a device or a sleeping peer is notified once. The edges may belong to several
/// peers and to this process. An edge that is in the batch twice stands for two values, in order.
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
    edges: Arc<[Edge]>,
    /// The number of the path of all edges, if they have the same one.
    path: Option<usize>,
    groups: GroupPool<Outcome>,
    standing: Vec<Standing>,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("edges", &self.edges).finish_non_exhaustive()
    }
}

impl Context {
    /// The place of the values of an edge that ends there: the number of a path, or, for the local
    /// table, the number of paths.
    #[inline]
    fn place_of(&self, end: EdgeEnd) -> usize {
        match end {
            EdgeEnd::Here(_) => self.paths.count(),
            EdgeEnd::Peer(peer) => self.paths.number_of(peer).into(),
        }
    }

    /// See [`Node::batch`](crate::Node::batch).
    pub fn batch(self: &Arc<Self>, edges: impl IntoIterator<Item = Edge>) -> Result<Batch, Error> {
        self.check_usable()?;
        Ok(Batch::new(self, edges.into_iter().collect()))
    }
}

impl Batch {
    pub(super) fn new(context: &Arc<Context>, edges: Arc<[Edge]>) -> Self {
        // An edge that does not end here is refused when its receive begins.
        let here = EdgeEnd::Here(context.tag);
        let ends = edges.iter().map(|edge| if edge.destination == here { edge.source } else { here });
        let places: Arc<[u16]> = ends.map(|end| context.place_of(end) as u16).collect();
        let first = places.first().map(|first| usize::from(*first));
        let is_path = |first: &usize| {
            *first < context.paths.count() && places.iter().all(|place| usize::from(*place) == *first)
        };
        Batch {
            context: context.clone(),
            path: first.filter(is_path),
            edges,
            groups: GroupPool::new(places, context.paths.count() + 1),
            standing: Vec::new(),
        }
    }

    /// Makes every edge of the batch [standing](Standing), for as long as the batch exists. The
    /// senders may then send the tensors of `window` coming steps of the sequence, 0 to 256, before
    /// the receives begin. An edge that is in the batch twice has one [`Standing`]. A batch can be
    /// made standing for several sequences.
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
        let standing = standing.collect::<Result<Vec<_>, _>>()?;
        self.standing.extend(standing);
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
            0 => all.send(self.edges.iter()),
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
        self.wait_into(step, timeout, None, received)
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
        self.begin_rest(step, calls, given, iter::empty())
    }

    /// Begins to receive behind the first edges, whose receives have `ended`.
    fn begin_rest<T: Receivable>(
        &self,
        step: &Step,
        calls: BatchCalls,
        given: Option<Reused<TensorMut>>,
        ended: impl Iterator<Item = Outcome>,
    ) -> Result<PendingBatch<T>, Error> {
        let (receiver, mut senders) = self.groups.channels();
        // On an error below, the drop of `pending` cancels the receives that have begun.
        let pending = PendingBatch::new(&self.context, receiver, self.edges.clone(), calls);
        let mut done = 0;
        for (outcome, sender) in ended.zip(&mut senders) {
            sender.send(outcome);
            done += 1;
        }
        self.ask(step, calls, given, (done, senders))?;
        Ok(pending)
    }

    /// Waits for all values, which are added to the empty list. Takes them on the poller itself, if
    /// the edges have the same one and this thread gets it.
    pub(super) fn wait_into<T: Receivable>(
        &self,
        step: &Step,
        timeout: Duration,
        mut given: Option<Reused<TensorMut>>,
        received: &mut Vec<Delivery<T>>,
    ) -> Result<(), Error> {
        let context = &*self.context;
        let Some(path) = self.path.filter(|_| !context.is_local_deadline_due()) else {
            return self.begin(step, timeout, given)?.wait_into(received);
        };
        let calls = self.calls(step, timeout, given.as_ref())?;
        received.reserve(self.edges.len());
        if let Some(given) = &mut given {
            given.reverse();
        }
        let mut receives = Receives { batch: self, step, given: given.as_deref_mut(), received };
        let mut walk = BatchWalk::new(&mut receives);
        let path = context.paths.nth(path);
        let waited = path.receive_batch(&mut walk, timeout, &context.next_deadline);
        let next = walk.into_destination();
        let failure = match waited {
            DirectWait::Ready(WalkEnd::Done) => return Ok(()),
            DirectWait::Ready(WalkEnd::Failed(error)) => Some(*error),
            DirectWait::Ready(WalkEnd::LeftOff) | DirectWait::TimedOut | DirectWait::Elsewhere(_) => None,
            DirectWait::Unusable(why) => {
                received.clear();
                return Err(unusable(why));
            }
        };
        if let Some(given) = &mut given {
            if let (None, Some(Destination::Into(next))) = (&failure, next) {
                given.push(next);
            }
            given.reverse();
        }
        let taken = received.drain(..).map(|delivery| Outcome(Ok(delivery.into_payload())));
        let ended = taken.chain(failure.map(|error| Outcome(Err(error))));
        self.begin_rest(step, calls, given, ended)?.wait_into(received)
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
        let (context, edges) = (self.context.clone(), self.edges.clone());
        // On an error below, the senders are dropped, which ends the group: its pending batch
        // cancels the receives that have begun.
        let senders = self.groups.senders_then(self.context.executor.callback(move |receiver| {
            // Returns at once: all receives have ended, or one has failed.
            done(PendingBatch::new(&context, receiver, edges, calls).wait());
        }));
        self.ask(step, calls, given, (0, senders))?;
        let place = CallPlace::Batch { edges: self.edges.clone(), step: calls.step };
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
        // The edges are those of the batch's node.
        if let Some(edge) = self.edges.first() {
            step.context.check_destination(edge)?;
        }
        if let Some(given) = given.filter(|given| given.len() != self.edges.len()) {
            return Err(self.wrong_count(given.len()));
        }
        let CallId(first) = CallId::take(self.edges.len() as u64);
        let begun = self.context.now();
        Ok(BatchCalls { step: step.id, first, begun, deadline: begun + timeout, timeout })
    }

    /// Begins the receives behind the first `done`. `given` has the tensors of these receives.
    fn ask(
        &self,
        step: &Step,
        calls: BatchCalls,
        mut given: Option<Reused<TensorMut>>,
        (done, senders): (usize, GroupSenders<Outcome>),
    ) -> Result<(), Error> {
        let context = &self.context;
        let mut given = given.as_mut().map(|given| given.drain(..));
        let mut remote = context.lists.receives.take();
        let mut local = context.lists.waiters.take();
        for ((at, edge), sender) in (0..).zip(self.edges.iter()).skip(done).zip(senders) {
            let (id, key) = (CallId(calls.first + at), edge.key(step.id));
            let into = given.as_mut().and_then(Iterator::next);
            match edge.source {
                EdgeEnd::Here(_) => {
                    let BatchCalls { begun, deadline, timeout, .. } = calls;
                    let (permit, cancel_reason, is_logged) = (None, None, false);
                    let waiter =
                        Waiter { permit, id, sender, begun, deadline, timeout, cancel_reason, is_logged };
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
        let BatchCalls { begun, deadline, timeout, .. } = calls;
        dispatch(&context.paths, remote, &context.lists.receive_parts, |path, receives| {
            path.receive_all(ReceiveAll { begun, deadline, timeout, receives })
        })
    }
}

/// The receives of a batch on the poller itself.
struct Receives<'a, T> {
    batch: &'a Batch,
    step: &'a Step,
    /// The tensors of the receives without a destination, last to first.
    given: Option<&'a mut Vec<TensorMut>>,
    received: &'a mut Vec<Delivery<T>>,
}

impl<T: Receivable> ReceivesInOrder for Receives<'_, T> {
    #[inline]
    fn edge(&self, at: usize) -> Option<(PeerIndex, TensorKeyRef<'_>)> {
        let edge = self.batch.edges.get(at)?;
        match edge.source {
            EdgeEnd::Peer(peer) => Some((peer, edge.key_ref(self.step.id))),
            EdgeEnd::Here(_) => None,
        }
    }

    #[inline]
    fn destination(&mut self) -> Destination {
        self.batch.context.destination(self.given.as_mut().and_then(|given| given.pop()))
    }

    #[inline]
    fn deliver(&mut self, received: Received, sender: Placement) {
        // The walk began with this type of tensors.
        if let Ok(delivery) = Delivery::of(received, sender, &self.batch.context.pool).cast() {
            self.received.push(delivery);
        }
    }
}

/// The common parameters of the receives of a batch.
#[derive(Clone, Copy)]
pub(super) struct BatchCalls {
    pub step: u64,
    /// The id of the first receive. The ids of the others follow.
    pub first: u64,
    begun: Time,
    pub deadline: Time,
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
    values: Reused<Value>,
    /// Number of values for peers.
    remote: usize,
    /// The bitwise OR and AND of the edges' places: see [`Context::place_of`]. They are equal if
    /// all edges have one place.
    places: (usize, usize),
    /// Whether a value must be copied or registered before it is sent.
    is_foreign: bool,
}

impl<'a> Values<'a> {
    fn of(step: &'a Step) -> Self {
        let values = step.context.lists.offered.take();
        Values { step, values, remote: 0, places: (0, usize::MAX), is_foreign: false }
    }

    #[inline]
    fn add(&mut self, edge: &Edge, value: Value) -> Result<(), Error> {
        let context = &self.step.context;
        context.check_source(edge)?;
        let place = context.place_of(edge.destination);
        if let EdgeEnd::Peer(peer) = edge.destination {
            context.check_peer(peer)?;
            self.remote += 1;
            self.is_foreign |= !context.is_movable(&value);
        }
        self.places.0 |= place;
        self.places.1 &= place;
        self.values.push(value);
        Ok(())
    }

    /// Sends the values on these edges, which are those of [`Values::add`].
    fn send<'e>(mut self, edges: impl Iterator<Item = &'e Edge> + Clone) -> Result<(), Error> {
        let context = &self.step.context;
        let (count, limit) = (self.remote, context.settings.max_outstanding_sends as usize);
        if count > 0 {
            let too_large = |waiting| Error::BatchTooLarge { values: count, waiting, limit };
            reserve(&context.outstanding, count, limit).map_err(too_large)?;
        }
        // After the checks: a refused batch copies and registers nothing. Before the first send:
        // all values go, or none.
        let begun = self.make_movable(edges.clone()).and_then(|()| self.send_local(edges.clone()));
        if let Err(error) = begun {
            context.outstanding.fetch_sub(count, Ordering::Relaxed);
            return Err(error);
        }
        self.send_remote(edges)
    }

    fn make_movable<'e>(&mut self, edges: impl Iterator<Item = &'e Edge>) -> Result<(), Error> {
        if !self.is_foreign {
            return Ok(());
        }
        edges.zip(self.values.iter_mut()).try_for_each(|(edge, value)| {
            let EdgeEnd::Peer(peer) = edge.destination else { return Ok(()) };
            let foreign = std::mem::replace(value, Value::Dead);
            *value = self.step.movable_value(&edge.key(self.step.id), peer, foreign)?;
            Ok(())
        })
    }

    /// Sends the values for edges within the process. Leaves dead values in their places.
    fn send_local<'e>(&mut self, edges: impl Iterator<Item = &'e Edge>) -> Result<(), Error> {
        if self.remote == self.values.len() {
            return Ok(());
        }
        let Values { step, values, .. } = self;
        let mut local = step.context.lists.values.take();
        let here =
            edges.zip(values.iter_mut()).filter(|(edge, _)| matches!(edge.destination, EdgeEnd::Here(_)));
        local.extend(here.map(|(edge, value)| (edge.key(step.id), std::mem::replace(value, Value::Dead))));
        step.context.send_all_local(step.id, &mut local)
    }

    fn send_remote<'e>(self, edges: impl Iterator<Item = &'e Edge>) -> Result<(), Error> {
        let Values { step, mut values, places: (place, of_all), .. } = self;
        let context = &step.context;
        let mut remote = edges.zip(values.drain(..)).filter_map(|(edge, value)| match edge.destination {
            EdgeEnd::Here(_) => None,
            EdgeEnd::Peer(peer) => Some((peer, edge.key_ref(step.id), value)),
        });
        let is_direct = place == of_all && place < context.paths.count();
        if is_direct && context.paths.nth(place).send_batch(&mut remote).map_err(unusable)? {
            return Ok(());
        }
        let mut sends = context.lists.sends.take();
        sends.extend(remote.map(|(peer, key, value)| {
            let path = context.paths.number_of(peer);
            BatchSend { path, peer, key: key.to_key(), value }
        }));
        dispatch(&context.paths, sends, &context.lists.send_parts, |path, values| path.send_all(values))
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
        let (mut all, mut edges) = (Values::of(self), Vec::new());
        for (edge, value) in values {
            all.add(edge, value.into_value())?;
            edges.push(edge);
        }
        all.send(edges.iter().copied())
    }
}
