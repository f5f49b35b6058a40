//! The receives of a step, and their builders.

use super::Step;
use super::batch::Batch;
use super::edge::{Edge, EdgeEnd};
use super::local::LocalWaiter;
use super::path::{DirectEnd, unusable};
use super::pending::{CallPlace, CancelToken, Pending, Receivable, SealedPayload};
use super::pending_batch::PendingBatch;
use crate::engine::DirectWait;
use crate::link::{Destination, DirectReceive, Received, placement_of};
use crate::matching::{CallId, Delivery, Error, NewReceive, Outcome, Payload, ReceivePermit, Waiter};
use crate::memory::{Tensor, TensorMut};
use crate::sync::{OneshotSender, Reused};
use crate::wire::Time;
use std::borrow::Borrow;
use std::marker::PhantomData;
use std::time::Duration;

impl Step {
    /// Waits for a tensor, for `timeout` at most. [`Step::receive`] has more options.
    ///
    /// # Errors
    /// If nothing came in time, the step was aborted, the peer was lost, or the sender failed. If
    /// `max_requests` receives from the peer are outstanding.
    pub fn recv(&self, edge: &Edge, timeout: Duration) -> Result<Delivery<Tensor>, Error> {
        let mut receive = DirectReceive::Waiting(self.context.destination(None));
        let waited = self.wait_direct(edge, &mut receive, timeout);
        match receive {
            DirectReceive::Received(Received::Tensor(tensor), sender) => {
                let receiver = placement_of(&tensor);
                Ok(Delivery { tensor, is_dead: false, sender, receiver })
            }
            other => self.recv_after(edge, timeout, waited, other),
        }
    }

    /// Ends a receive whose direct wait brought no tensor.
    #[cold]
    fn recv_after(
        &self,
        edge: &Edge,
        timeout: Duration,
        waited: DirectWait<DirectEnd>,
        receive: DirectReceive,
    ) -> Result<Delivery<Tensor>, Error> {
        match waited {
            DirectWait::Ready(Err(error)) => Err(self.context.losses.failed(*error)),
            DirectWait::TimedOut => Err(self.timed_out(edge, timeout)),
            DirectWait::Unusable(why) => Err(unusable(why)),
            DirectWait::Ready(Ok(())) => match receive {
                DirectReceive::Received(received, sender) => {
                    Delivery::of(received, sender, &self.context.pool).cast()
                }
                DirectReceive::Waiting(_) => self.receive(edge).within(timeout).wait_as_waiter(),
            },
            DirectWait::Elsewhere(since) => {
                ReceiveBuilder { since, ..self.receive(edge) }.within(timeout).wait_as_waiter()
            }
        }
    }

    /// Waits on the poller of the peer, if this thread gets it. The receive gets its value if the
    /// wait is ready without an error.
    #[inline]
    fn wait_direct(
        &self,
        edge: &Edge,
        receive: &mut DirectReceive,
        timeout: Duration,
    ) -> DirectWait<DirectEnd> {
        let EdgeEnd::Peer(peer) = edge.source else { return DirectWait::Elsewhere(None) };
        let context = &*self.context;
        if context.is_local_deadline_due() {
            return DirectWait::Elsewhere(None);
        }
        if !self.may_receive(edge)
            && let Err(error) = self.check_receive(edge)
        {
            return DirectWait::Ready(Err(Box::new(error)));
        }
        let (path, key) = (context.paths.of(peer), edge.key_ref(self.id));
        path.receive_direct(peer, key, receive, timeout, &context.next_deadline)
    }

    /// Whether [`Step::check_receive`] finds no error. `false` decides nothing.
    #[inline]
    fn may_receive(&self, edge: &Edge) -> bool {
        self.is_live() && edge.destination == EdgeEnd::Here(self.context.tag)
    }

    #[cold]
    fn check_receive(&self, edge: &Edge) -> Result<(), Error> {
        self.check()?;
        self.context.check_destination(edge)
    }

    #[cold]
    fn timed_out(&self, edge: &Edge, after: Duration) -> Error {
        Error::DeadlineExceeded { key: edge.key(self.id).to_string(), after }
    }

    /// Receives a tensor if there is one now; `None` if not. No value is lost: a tensor that is
    /// sent later is for the next receive. Earlier receives of the same edge and step come first.
    ///
    /// Within the process this call checks the local table. For an edge from a peer it first makes
    /// progress once.
    ///
    /// The call takes a tensor that has arrived, and asks for none: the sender of a known edge
    /// sends by itself. The first receive of an edge, by whichever call, makes the edge known to
    /// its sender. So does a [`Standing`](super::Standing). If tensors of other steps use up the
    /// window of the edge, the call asks for one of this step, for a later call.
    ///
    /// Over verbs and TCP a tensor that does not travel in its message has arrived when its sender
    /// offers it. The call then waits until the tensor is written, for `cancel_grace` at most.
    ///
    /// Over gRPC calls the call asks the sender, and waits for its answer for `cancel_grace` at
    /// most.
    ///
    /// # Errors
    /// If the step was aborted, the peer was lost, or the sender failed. If `max_requests` receives
    /// from the peer are outstanding.
    pub fn try_recv(&self, edge: &Edge) -> Result<Option<Delivery<Tensor>>, Error> {
        let receive = ReceiveBuilder { is_try: true, ..self.receive(edge) };
        // A forked child must not poll the links of its parent.
        receive.check()?;
        if let EdgeEnd::Peer(peer) = edge.source {
            self.context.paths.of(peer).progress()?;
        }
        let pending = receive.begin()?;
        let tried = match edge.source {
            EdgeEnd::Here(_) => pending.cancel_and_wait(),
            EdgeEnd::Peer(_) => pending.wait(),
        };
        match tried {
            Ok(delivery) => Ok(Some(delivery)),
            Err(Error::Cancelled { .. } | Error::DeadlineExceeded { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets up the receive of one tensor, with a timeout ([`within`](ReceiveBuilder::within)) and a
    /// destination ([`into`](ReceiveBuilder::into)). Then [`wait`](ReceiveBuilder::wait) for the
    /// tensor, [`begin`](ReceiveBuilder::begin) and wait or await it later, or pass it to a
    /// callback with [`then`](ReceiveBuilder::then).
    pub fn receive<'a>(&'a self, edge: &'a Edge) -> ReceiveBuilder<'a> {
        ReceiveBuilder {
            step: self,
            edge,
            timeout: None,
            into: None,
            is_try: false,
            since: None,
            receives: PhantomData,
        }
    }

    /// Waits for the values of all edges, for `timeout` at most. The values are in the order of the
    /// edges; dead values are among them. An edge that is listed twice takes two values, in order.
    /// A [`Batch`] does the same for edges that are the same in each step, at a lower cost.
    ///
    /// The limit `max_requests` refuses none of these receives, and they do not count towards it.
    /// The deadline holds for all receives.
    ///
    /// # Errors
    /// As soon as one receive fails, with an error of [`Step::recv`] that names the edge. Of
    /// several errors, the first in the order of the edges that is not derived from another. Then
    /// the other receives are cancelled: values that have come are dropped, and later ones are for
    /// the next receive. To lose no value, use [`PendingBatch::wait_each`].
    pub fn recv_all<E: Borrow<Edge>>(
        &self,
        edges: &[E],
        timeout: Duration,
    ) -> Result<Vec<Delivery<Tensor>>, Error> {
        self.receive_all(edges).within(timeout).wait()
    }

    /// Waits for the tensors of all these edges, none of which may be dead.
    ///
    /// # Errors
    /// Like [`Step::recv_all`], and [`Error::Dead`] names the first edge whose value is dead. The
    /// values of the other edges are dropped then.
    pub fn fetch<E: Borrow<Edge>>(&self, edges: &[E], timeout: Duration) -> Result<Vec<Tensor>, Error> {
        let received = self.recv_all(edges, timeout)?;
        let alive = received.into_iter().zip(edges).map(|(delivery, edge)| match delivery.is_dead {
            true => Err(Error::Dead { key: edge.borrow().key(self.id).to_string() }),
            false => Ok(delivery.tensor),
        });
        alive.collect()
    }

    /// Sets up the receive of the values of all edges, as [`Step::receive`] does for one.
    pub fn receive_all<E: Borrow<Edge>>(&self, edges: &[E]) -> ReceiveAllBuilder<'_> {
        let edges = edges.iter().map(|edge| edge.borrow().clone()).collect();
        ReceiveAllBuilder::new(self, BatchRef::Own(Batch::new(&self.context, edges)))
    }
}

/// A receive of one tensor that has not begun. [`Step::receive`] makes it.
///
/// ```
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let node = tensorwire::internals::doc_node();
/// let (step, edge) = (node.step(1)?, node.edge_to("worker", 0, "weights")?);
/// step.send(&edge, node.tensor(DType::F32, &[4])?.freeze())?;
/// let mine = node.tensor(DType::F32, &[4])?;
/// let filled = step.receive(&edge).within(Duration::from_secs(1)).into(mine).wait()?.tensor;
/// assert_eq!(filled.meta().bytes(), 16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a receive begins with `begin`, `wait` or `then`"]
#[derive(Debug)]
pub struct ReceiveBuilder<'a, T = Tensor> {
    step: &'a Step,
    edge: &'a Edge,
    timeout: Option<Duration>,
    into: Option<TensorMut>,
    /// Whether the receive takes a value that has come, and waits for no other
    /// ([`Step::try_recv`]).
    is_try: bool,
    /// The begin of the wait, if the receive was tried before.
    since: Option<Time>,
    receives: PhantomData<fn() -> T>,
}

impl<'a> ReceiveBuilder<'a, Tensor> {
    /// Receives into this tensor, which the delivery returns filled. The sent tensor must have the
    /// same element type and shape. If the receive can't begin, the tensor is dropped.
    pub fn into(self, tensor: TensorMut) -> ReceiveBuilder<'a, TensorMut> {
        let ReceiveBuilder { step, edge, timeout, is_try, since, .. } = self;
        ReceiveBuilder { step, edge, timeout, is_try, since, into: Some(tensor), receives: PhantomData }
    }
}

impl<T: Receivable> ReceiveBuilder<'_, T> {
    /// Sets the timeout of the receive. The default is the setting `recv_timeout`.
    pub fn within(self, timeout: Duration) -> Self {
        ReceiveBuilder { timeout: Some(timeout), ..self }
    }

    /// Begins to receive, and returns at once.
    ///
    /// # Errors
    /// If the edge does not end here or the step is gone. If `max_requests` receives from the peer
    /// are outstanding, with [`Error::ResourceExhausted`].
    pub fn begin(self) -> Result<Pending<T>, Error> {
        let permit = self.admit()?;
        let (receiver, sender) = self.step.context.calls.channel();
        let (token, deadline) = self.submit(permit, sender)?;
        Ok(Pending::new(token, receiver, deadline))
    }

    /// Waits until the tensor is there.
    ///
    /// # Errors
    /// Like [`Step::recv`].
    pub fn wait(mut self) -> Result<Delivery<T>, Error> {
        let Step { context, .. } = self.step;
        let timeout = self.timeout.unwrap_or(context.settings.recv_timeout);
        let mut receive = DirectReceive::Waiting(context.destination(self.into.take()));
        match self.step.wait_direct(self.edge, &mut receive, timeout) {
            DirectWait::Ready(Err(error)) => return Err(context.losses.failed(*error)),
            DirectWait::TimedOut => return Err(self.step.timed_out(self.edge, timeout)),
            DirectWait::Unusable(why) => return Err(unusable(why)),
            DirectWait::Ready(Ok(())) => {}
            DirectWait::Elsewhere(since) => self.since = since,
        }
        match receive {
            DirectReceive::Received(received, sender) => {
                return Delivery::of(received, sender, &context.pool).cast();
            }
            DirectReceive::Waiting(Destination::Into(given)) => self.into = Some(given),
            DirectReceive::Waiting(_) => {}
        }
        self.wait_as_waiter()
    }

    fn wait_as_waiter(self) -> Result<Delivery<T>, Error> {
        self.begin()?.wait_as_waiter()
    }

    /// Begins to receive. The callback thread calls `done` with the tensor or with the error, never
    /// on the stack of the caller, and outside every lock. In inline mode some thread must make
    /// progress meanwhile, with any blocking call or with
    /// [`Node::progress`](crate::Node::progress).
    ///
    /// # Errors
    /// Like [`ReceiveBuilder::begin`]; then `done` is not called. If the step ends or the node
    /// stops during the call, this error may be returned and `done` be called with an error, too.
    pub fn then(
        self,
        done: impl FnOnce(Result<Delivery<T>, Error>) + Send + 'static,
    ) -> Result<CancelToken, Error> {
        let permit = self.admit()?;
        // Not the context, which holds the callback: a cycle would keep both.
        let losses = self.step.context.losses.clone();
        let done = move |outcome| done(losses.delivered(outcome));
        let sender = OneshotSender::callback(self.step.context.executor.callback(done));
        self.submit(permit, sender).map(|(token, _)| token)
    }

    /// Checks that the receive may begin. A receive from a peer gets a permit.
    fn admit(&self) -> Result<Option<ReceivePermit>, Error> {
        self.check()?;
        match self.edge.source {
            EdgeEnd::Here(_) => Ok(None),
            EdgeEnd::Peer(peer) => self.step.context.receive_limit.admit(peer).map(Some),
        }
    }

    #[inline]
    fn check(&self) -> Result<(), Error> {
        match self.step.may_receive(self.edge) {
            true => Ok(()),
            false => self.step.check_receive(self.edge),
        }
    }

    fn submit(
        self,
        permit: Option<ReceivePermit>,
        sender: OneshotSender<Outcome>,
    ) -> Result<(CancelToken, Time), Error> {
        let context = &self.step.context;
        let id = CallId::take(1);
        let (timeout, wait) = match self.is_try {
            // The wait for a tensor that is offered.
            true => (Duration::ZERO, context.settings.cancel_grace),
            false => [self.timeout.unwrap_or(context.settings.recv_timeout); 2].into(),
        };
        let begun = self.since.unwrap_or_else(|| context.now());
        let (deadline, cancel_reason, is_logged) = (begun + wait, None, false);
        let waiter = Waiter { permit, id, sender, begun, deadline, timeout, cancel_reason, is_logged };
        let key = self.edge.key(self.step.id);
        let place = match self.edge.source {
            EdgeEnd::Here(_) => {
                context.receive_local(&key, LocalWaiter { waiter, into: self.into })?;
                CallPlace::Local(key)
            }
            EdgeEnd::Peer(peer) => {
                let destination = context.destination(self.into);
                let mut new = Some(NewReceive { key, destination, waiter });
                let waiter = context.paths.of(peer).receive(peer, &mut new)?;
                CallPlace::Remote { peer, waiter }
            }
        };
        Ok((CancelToken { context: context.clone(), id, place }, deadline))
    }
}

impl<P> Delivery<P> {
    /// The delivery as its receive got it.
    pub(super) fn into_payload(self) -> Delivery<Payload>
    where
        P: Receivable,
    {
        let Delivery { tensor, is_dead, sender, receiver } = self;
        let SealedPayload(tensor) = tensor.into_payload();
        Delivery { tensor, is_dead, sender, receiver }
    }

    /// The delivery with the tensor type of its receive. The builder fixes the type, so the cast
    /// never fails.
    pub(super) fn cast<T: Receivable>(self) -> Result<Delivery<T>, Error>
    where
        SealedPayload: From<P>,
    {
        let Delivery { tensor, is_dead, sender, receiver } = self;
        let Some(tensor) = T::from_payload(tensor.into()) else { return Err(Error::Stopped) };
        Ok(Delivery { tensor, is_dead, sender, receiver })
    }
}

/// A receive of many tensors that has not begun. [`Step::receive_all`] and [`Batch::receive`] make
/// it.
///
/// ```
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let node = tensorwire::internals::doc_node();
/// let step = node.step(1)?;
/// let edges = [node.edge_to("worker", 0, "a")?, node.edge_to("worker", 0, "b")?];
/// let pending = step.receive_all(&edges).within(Duration::from_secs(1)).begin()?;
/// for edge in &edges {
///     step.send(edge, node.tensor(DType::F32, &[4])?.freeze())?;
/// }
/// assert_eq!(pending.wait()?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "receives begin with `begin`, `wait` or `then`"]
#[derive(Debug)]
pub struct ReceiveAllBuilder<'a, T = Tensor> {
    step: &'a Step,
    batch: BatchRef<'a>,
    timeout: Option<Duration>,
    into: Option<Reused<TensorMut>>,
    receives: PhantomData<fn() -> T>,
}

/// The batch of a receive: the user's, or one made for this receive.
#[derive(Debug)]
pub(super) enum BatchRef<'a> {
    User(&'a Batch),
    Own(Batch),
}

impl<'a> ReceiveAllBuilder<'a> {
    pub(super) fn new(step: &'a Step, batch: BatchRef<'a>) -> Self {
        ReceiveAllBuilder { step, batch, timeout: None, into: None, receives: PhantomData }
    }

    /// Receives into these tensors, one for each edge in the order of the edges. The deliveries
    /// return them filled. Each sent tensor must have the element type and shape of the tensor of
    /// its edge.
    ///
    /// If a sent tensor differs, the receive of its edge fails with [`Error::ShapeMismatch`]. The
    /// sent tensor goes back in line for the next receive, and the memory of the given tensor goes
    /// back to its pool. So does the memory of each tensor whose receive fails or can't begin.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tensorwire::DType;
    /// # let node = tensorwire::internals::doc_node();
    /// let step = node.step(1)?;
    /// let edges = [node.edge_from("worker", 0, "a")?, node.edge_from("worker", 0, "b")?];
    /// let weights = node.batch(edges)?;
    /// for edge in weights.edges() {
    ///     step.send(edge, node.tensor(DType::F32, &[4])?.freeze())?;
    /// }
    /// let mine = [node.tensor(DType::F32, &[4])?, node.tensor(DType::F32, &[4])?];
    /// let filled = weights.receive(&step).within(Duration::from_secs(1)).into(mine).wait()?;
    /// assert_eq!(filled[1].tensor.as_slice::<f32>()?.len(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into(self, tensors: impl IntoIterator<Item = TensorMut>) -> ReceiveAllBuilder<'a, TensorMut> {
        let ReceiveAllBuilder { step, batch, timeout, .. } = self;
        let mut into = step.context.lists.given.take();
        into.extend(tensors);
        ReceiveAllBuilder { step, batch, timeout, into: Some(into), receives: PhantomData }
    }
}

impl<T: Receivable> ReceiveAllBuilder<'_, T> {
    /// Sets the timeout of all receives. The default is the setting `recv_timeout`.
    pub fn within(self, timeout: Duration) -> Self {
        ReceiveAllBuilder { timeout: Some(timeout), ..self }
    }

    /// Begins to receive, and returns at once.
    ///
    /// # Errors
    /// If an edge does not end here or the step is gone. If the number of given tensors is not the
    /// number of edges. Then no receive has begun.
    pub fn begin(mut self) -> Result<PendingBatch<T>, Error> {
        let into = self.into.take();
        self.batch().begin(self.step, self.timeout(), into)
    }

    /// Waits until every tensor is there, or one receive has failed.
    ///
    /// # Errors
    /// Like [`Step::recv_all`].
    pub fn wait(mut self) -> Result<Vec<Delivery<T>>, Error> {
        let into = self.into.take();
        let mut received = Vec::new();
        self.batch().wait_into(self.step, self.timeout(), into, &mut received)?;
        Ok(received)
    }

    /// Begins to receive. The callback thread calls `done` once, with all values in the order of
    /// the edges. As soon as one receive has failed, it passes an error of [`Step::recv_all`]
    /// instead. The rules of [`ReceiveBuilder::then`] hold.
    ///
    /// The token cancels the receives that have not ended. `done` is then called with
    /// [`Error::Cancelled`], or with the values if all have come.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tensorwire::DType;
    /// # let node = tensorwire::internals::doc_node();
    /// let step = node.step(1)?;
    /// let edges = [node.edge_to("worker", 0, "a")?, node.edge_to("worker", 0, "b")?];
    /// let (sender, values) = std::sync::mpsc::channel();
    /// step.receive_all(&edges).within(Duration::from_secs(1)).then(move |received| {
    ///     sender.send(received.map(|deliveries| deliveries.len())).ok();
    /// })?;
    /// for edge in &edges {
    ///     step.send(edge, node.tensor(DType::F32, &[4])?.freeze())?;
    /// }
    /// assert_eq!(values.recv()??, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Like [`ReceiveAllBuilder::begin`]. If the step ends during the call, this error may be
    /// returned and `done` be called with an error, too.
    pub fn then(
        mut self,
        done: impl FnOnce(Result<Vec<Delivery<T>>, Error>) + Send + 'static,
    ) -> Result<CancelToken, Error> {
        let into = self.into.take();
        self.batch().begin_then(self.step, self.timeout(), into, done)
    }

    fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(self.step.context.settings.recv_timeout)
    }

    fn batch(&self) -> &Batch {
        match &self.batch {
            BatchRef::User(batch) => batch,
            BatchRef::Own(batch) => batch,
        }
    }
}
