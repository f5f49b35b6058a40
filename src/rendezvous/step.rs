//! [`Step`]: sends, aborts and cleanup of one training step.

use super::context::{Context, Tables};
use super::edge::{Edge, EdgeEnd};
use super::local::{DeferredWakeups, LocalWaiter};
use super::path::{DirectSend, unusable};
use crate::link::{TensorKey, Value};
use crate::matching::{Error, PeerIndex, check_live, reserve};
use crate::memory::Tensor;
use crate::wire::{Code, Status, StepId};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One training step, in which tensors are sent and received. Cheap to clone; usable from any
/// thread.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use std::time::Duration;
/// use tensorwire::DType;
/// let step = node.step(1)?;
/// let edge = node.edge_to("worker", 0, "weights")?;
/// step.send(&edge, node.tensor(DType::F32, &[4])?.freeze())?;
/// let tensor = step.recv(&edge, Duration::from_secs(1))?.tensor;
/// assert_eq!(tensor.shape().dims(), [4]);
/// step.cleanup();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Step {
    pub(super) id: u64,
    /// The number of the step among all of the context.
    pub(super) number: u64,
    pub(super) context: Arc<Context>,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Two handles are equal if they refer to the same step of the same node.
impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.context, &other.context)
    }
}

impl Eq for Step {}

impl Step {
    /// As given to `Node::step` or drawn from a sequence.
    pub fn id(&self) -> StepId {
        self.id.into()
    }

    /// Offers a tensor to the destination of the edge. Never blocks. A waiting receive gets the
    /// tensor at once. Else the tensor is kept for a receive until the step is cleaned up. Several
    /// values of one edge arrive in order.
    ///
    /// The tensor leaves at once if the receiver has announced the edge and its window has room.
    /// Otherwise it waits here for the receiver. Over verbs and TCP a large one leaves when a
    /// receive has granted it a destination.
    ///
    /// A tensor outside the pool of this process is copied into the pool first. This applies to
    /// tensors that were borrowed from a peer, and to [`ForeignMemory`](crate::ForeignMemory). The
    /// verbs fabric registers foreign memory instead, which may take long the first time. Strings
    /// and variants are sent like any other tensor: see [`StringTensor`](crate::StringTensor) and
    /// [`VariantTensor`](crate::VariantTensor).
    ///
    /// A value belongs to a task and a step, not to one life of the task. If the receiver dies, the
    /// values that had not left stay for its next life, until the step is cleaned up. Values that
    /// had left are not sent again, also if no receive had taken them. While the receiver is gone,
    /// a send is an error.
    ///
    /// # Errors
    /// If the edge does not start here, or the step or the peer is gone. If the pool has no room
    /// for a copy, or `max_outstanding_sends` is reached. Then the tensor was not sent, and this
    /// handle to it is dropped. [`Step::send_within`] waits for room, and gives the tensor back.
    ///
    /// A tensor that can still be written can't be sent:
    ///
    /// ```compile_fail,E0277
    /// # let node = tensorwire::internals::doc_node();
    /// let edge = node.edge_to("worker", 0, "x").unwrap();
    /// let tensor = node.tensor(tensorwire::DType::F32, &[4]).unwrap();
    /// node.step(1).unwrap().send(&edge, tensor).unwrap(); // wants `tensor.freeze()`
    /// ```
    pub fn send(&self, edge: &Edge, tensor: impl Sendable) -> Result<(), Error> {
        self.offer(edge, tensor.into_value())
    }

    /// Sends a dead value: that of a branch not taken. It carries no data.
    ///
    /// # Errors
    /// Like [`Step::send`].
    pub fn send_dead(&self, edge: &Edge) -> Result<(), Error> {
        self.offer(edge, Value::Dead)
    }

    /// Ends the step for good, as [`Node::cleanup`](crate::Node::cleanup) does.
    pub fn cleanup(&self) {
        self.context.cleanup(self.id);
    }

    fn offer(&self, edge: &Edge, value: Value) -> Result<(), Error> {
        match (edge.source, edge.destination) {
            (EdgeEnd::Here(tag), EdgeEnd::Peer(peer)) if tag == self.context.tag && self.is_live() => {
                let mut tensor = value.into_tensor();
                let path = self.context.paths.of(peer);
                // A poller that is unusable says so again below.
                if tensor.is_some()
                    && let Ok(true) = path.send_short(peer, edge.key_ref(self.id), &mut tensor)
                {
                    return Ok(());
                }
                self.offer_any(edge, Value::of_tensor(tensor))
            }
            _ => self.offer_any(edge, value),
        }
    }

    /// Offers a value that takes more than a record, or finds out why it can't be sent.
    #[inline(never)]
    fn offer_any(&self, edge: &Edge, value: Value) -> Result<(), Error> {
        self.check()?;
        self.context.check_source(edge)?;
        match edge.destination {
            EdgeEnd::Here(_) => self.context.send_local(&edge.key(self.id), value),
            EdgeEnd::Peer(peer) => {
                self.context.check_peer(peer)?;
                self.send_any(peer, edge, value)
            }
        }
    }

    /// Sends a value that takes more than a record.
    fn send_any(&self, peer: PeerIndex, edge: &Edge, mut value: Value) -> Result<(), Error> {
        let limit = self.context.settings.max_outstanding_sends as usize;
        let full = || Error::ResourceExhausted {
            what: "the number of sent tensors that wait for their receivers",
            limit: limit as u64,
            remedy: "wait with Step::send_within until peers catch up, clean steps up, or raise \
                     max_outstanding_sends",
        };
        if self.context.is_movable(&value) {
            match self
                .context
                .paths
                .of(peer)
                .send_direct((peer, edge.key_ref(self.id)), value, limit)
                .map_err(unusable)?
            {
                DirectSend::Sent => return Ok(()),
                DirectSend::Full => return Err(full()),
                DirectSend::Elsewhere(back) => value = back,
            }
        }
        let key = edge.key(self.id);
        reserve(&self.context.outstanding, 1, limit).map_err(|_| full())?;
        // Last, so that a refused send copies and registers nothing.
        let value = self.movable_value(&key, peer, value).inspect_err(|_| {
            self.context.outstanding.fetch_sub(1, Ordering::Relaxed);
        })?;
        self.context.paths.of(peer).send(peer, key, value)
    }

    /// The value in memory that can be sent to this peer.
    pub(super) fn movable_value(
        &self,
        key: &TensorKey,
        peer: PeerIndex,
        value: Value,
    ) -> Result<Value, Error> {
        match value {
            Value::Tensor(tensor) => Ok(Value::Tensor(self.context.movable(key, peer, tensor)?)),
            Value::Dead => Ok(Value::Dead),
        }
    }

    /// Ends all calls of this step, pending and future, with this error. The first abort wins. Once
    /// the step and 256 other aborted steps were cleaned up, calls end with [`Error::StepGone`].
    /// Peers that receive tensors of the step from this process get the error too, marked as
    /// derived, and cut to the [bounds](Status) of a status. [`Error::to_status`] passes on the
    /// error of a peer without a text that grows at each task.
    ///
    /// [`Sequence::abort_from`](crate::Sequence::abort_from) also aborts the steps that follow.
    ///
    /// # Errors
    /// If the status is OK.
    pub fn abort(&self, status: Status) -> Result<(), Error> {
        self.check_abort(&status)?;
        self.context.abort(self.id, status);
        Ok(())
    }

    pub(super) fn check_abort(&self, status: &Status) -> Result<(), Error> {
        if status.code == Code::Ok {
            return Err(Error::AbortWithOk { step: self.id() });
        }
        self.context.check_home()
    }

    /// Whether [`Step::check`] finds nothing. `false` also for a step without a flag.
    #[inline]
    pub(super) fn is_live(&self) -> bool {
        self.context.is_usable() && self.context.flags.is_set(self.number)
    }

    #[inline]
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.is_live() { Ok(()) } else { self.why_unusable() }
    }

    #[cold]
    fn why_unusable(&self) -> Result<(), Error> {
        self.context.check_home()?;
        if let Some(error) = self.context.step_end(self.id, self.number) {
            return Err(error);
        }
        self.context.check_usable()
    }
}

/// A value that can be sent: a [`Tensor`], or a [`Value`], which may be dead.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be sent",
    label = "expected a `Tensor`",
    note = "a `TensorMut` can still be written: freeze it first, with `.freeze()`"
)]
pub trait Sendable: sealed::SealedSendable {
    #[doc(hidden)]
    fn into_value(self) -> Value;
}

impl Sendable for Tensor {
    fn into_value(self) -> Value {
        Value::Tensor(self)
    }
}

impl Sendable for Value {
    fn into_value(self) -> Value {
        self
    }
}

mod sealed {
    #[allow(unnameable_types)] // sealed
    pub trait SealedSendable {}
    impl SealedSendable for super::Tensor {}
    impl SealedSendable for super::Value {}
}

impl Context {
    #[inline]
    pub(super) fn check_source(&self, edge: &Edge) -> Result<(), Error> {
        match edge.source {
            EdgeEnd::Here(tag) if tag == self.tag => Ok(()),
            EdgeEnd::Here(_) => Err(self.of_another_node(edge)),
            EdgeEnd::Peer(_) if *edge.key.name.source_task() == self.me => Err(self.of_another_node(edge)),
            EdgeEnd::Peer(_) => Err(self.wrong_end(
                edge,
                "can't be sent from here: its source is not this task",
                "send on an edge that Node::edge_to made",
            )),
        }
    }

    #[cold]
    fn wrong_end(&self, edge: &Edge, what: &'static str, remedy: &'static str) -> Error {
        Error::WrongEnd { edge: edge.to_string(), what, here: self.me.clone(), remedy }
    }

    #[cold]
    fn of_another_node(&self, edge: &Edge) -> Error {
        let remedy = "use an edge that this node made, by Node::edge_to or Node::edge_from";
        self.wrong_end(edge, "is of a node of another task or cluster than this node", remedy)
    }

    #[inline]
    pub(super) fn check_destination(&self, edge: &Edge) -> Result<(), Error> {
        match edge.destination {
            EdgeEnd::Here(tag) if tag == self.tag => Ok(()),
            EdgeEnd::Here(_) => Err(self.of_another_node(edge)),
            EdgeEnd::Peer(_) if *edge.key.name.destination_task() == self.me => {
                Err(self.of_another_node(edge))
            }
            EdgeEnd::Peer(_) => Err(self.wrong_end(
                edge,
                "can't be received here: its destination is not this task",
                "receive on an edge that Node::edge_from made",
            )),
        }
    }

    /// Calls `body` with the tables if a step is live, and calls have not ended.
    fn with_live_step<R>(&self, step: u64, body: impl FnOnce(&mut Tables) -> R) -> Result<R, Error> {
        let done = self.with_tables(|tables| {
            // Under the lock: a sweep after the end of calls fails every waiter that it finds.
            match check_live(&tables.steps, step).and_then(|()| self.check_usable()) {
                Ok(()) => Ok(body(tables)),
                // What `body` holds may be code of the program, so it is dropped after the lock.
                Err(error) => Err((error, body)),
            }
        });
        done.map_err(|(error, _)| error)
    }

    fn send_local(&self, key: &TensorKey, value: Value) -> Result<(), Error> {
        let wakeups = self.with_live_step(key.step, |tables| tables.local.send(key, value))?;
        self.wake(wakeups);
        Ok(())
    }

    /// Sends all values, or none.
    pub(super) fn send_all_local(
        &self,
        step: u64,
        values: &mut Vec<(TensorKey, Value)>,
    ) -> Result<(), Error> {
        let mut all = DeferredWakeups::default();
        self.with_live_step(step, |tables| {
            values.drain(..).for_each(|(key, value)| all.append(tables.local.send(&key, value)));
        })?;
        self.wake(all);
        Ok(())
    }

    /// Begins all receives, or none.
    pub(super) fn receive_all_local(
        &self,
        step: u64,
        waiters: &mut Vec<(TensorKey, LocalWaiter)>,
    ) -> Result<(), Error> {
        let mut all = DeferredWakeups::default();
        self.with_live_step(step, |tables| {
            waiters.drain(..).for_each(|(key, waiter)| all.append(tables.local.receive(&key, waiter)));
        })?;
        self.wake(all);
        Ok(())
    }

    pub(super) fn receive_local(&self, key: &TensorKey, waiter: LocalWaiter) -> Result<(), Error> {
        let wakeups = self.with_live_step(key.step, |tables| tables.local.receive(key, waiter))?;
        self.wake(wakeups);
        Ok(())
    }
}
