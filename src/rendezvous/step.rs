//! One step's rendezvous: the calls that trainers make.

use super::context::Context;
use super::edge::{Edge, EdgeEnd};
use super::ended::StepEnd;
use super::local::{DeferredWakeups, LocalWaiter, check_live};
use super::outstanding::reserve;
use super::{Error, PeerIndex};
use crate::link::{TensorKey, Value};
use crate::memory::Tensor;
use crate::wire::{Code, Status, StepId};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One training step: tensors are sent and received in it. Cheap to clone; usable from any thread.
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
    pub(super) context: Arc<Context>,
    pub(super) ended: StepEnd,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Two handles are equal if they are of one step of one node.
impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.context, &other.context)
    }
}

impl Eq for Step {}

impl Step {
    /// The step's id.
    pub fn id(&self) -> StepId {
        self.id.into()
    }

    /// Offers a tensor to the edge's destination. Never blocks: whoever waits gets it at once, else
    /// it is kept until it is asked for or the step is cleaned up. Several values of one edge are
    /// handed out in order.
    ///
    /// A tensor that lies outside this process's pool is copied into it first: one that was
    /// borrowed from a peer, and [`ForeignMemory`](crate::ForeignMemory) where it is not registered
    /// with a device instead, which may take long the first time. Strings and variants are sent
    /// like any other tensor, made with [`StringTensor`](crate::StringTensor) and
    /// [`VariantTensor`](crate::VariantTensor).
    ///
    /// A value is for a task and a step, not for one life of the task's process. What a receiver
    /// that dies had not asked for, or had not begun to get, stays for its next life until the step
    /// is cleaned up; what was on its way is not sent again. While the receiver is gone a send is
    /// an error.
    ///
    /// # Errors
    /// If the edge does not start here, the step or the peer is gone, there is no room for a copy,
    /// or too many values wait already. The tensor was not sent then, and this handle to it is
    /// dropped.
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

    /// Offers the value of a branch not taken: it travels like any other and carries no data.
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
        self.check()?;
        self.context.check_source(edge)?;
        let key = edge.key(self.id);
        match edge.destination {
            EdgeEnd::Here => self.context.send_local(&key, value),
            EdgeEnd::Peer(peer) => self.send_remote(peer, key, value),
        }
    }

    fn send_remote(&self, peer: PeerIndex, key: TensorKey, value: Value) -> Result<(), Error> {
        self.context.check_peer(peer)?;
        let limit = self.context.settings.max_outstanding_sends as usize;
        reserve(&self.context.outstanding, 1, limit).map_err(|_| Error::ResourceExhausted {
            what: "the number of sent tensors that nobody has asked for",
            limit: limit as u64,
            remedy: "wait until peers catch up, clean steps up, or raise max_outstanding_sends",
        })?;
        // Last: what is refused is neither copied nor registered.
        let value = self.movable_value(&key, value).inspect_err(|_| {
            self.context.outstanding.fetch_sub(1, Ordering::Relaxed);
        })?;
        self.context.paths.of(peer).send(key, value)
    }

    /// The value as it can go to a peer.
    pub(super) fn movable_value(&self, key: &TensorKey, value: Value) -> Result<Value, Error> {
        match value {
            Value::Tensor(tensor) => Ok(Value::Tensor(self.context.movable(key, tensor)?)),
            Value::Dead => Ok(Value::Dead),
        }
    }

    /// Ends all calls of this step, pending and future, with this error. [`Error::to_status`] makes
    /// one of an error that came from a peer, without its text growing from peer to peer. The first
    /// abort wins. Peers that ask this process for tensors of the step get it too, marked as
    /// derived, whole up to the [bounds](Status) of what travels.
    ///
    /// # Errors
    /// If the status is OK.
    pub fn abort(&self, status: Status) -> Result<(), Error> {
        if status.code == Code::Ok {
            return Err(Error::AbortWithOk { step: self.id });
        }
        self.context.check_home()?;
        self.context.abort(self.id, status);
        Ok(())
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.context.check_home()?;
        if let Some(error) = self.ended.get() {
            return Err(error.clone());
        }
        self.context.check_usable()
    }
}

/// A value that can be sent: a [`Tensor`], or a [`Value`] where dead ones are among them.
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
    pub trait SealedSendable {}
    impl SealedSendable for super::Tensor {}
    impl SealedSendable for super::Value {}
}

impl Context {
    pub(super) fn check_source(&self, edge: &Edge) -> Result<(), Error> {
        if edge.source == EdgeEnd::Here {
            return Ok(());
        }
        Err(Error::WrongEnd {
            edge: edge.to_string(),
            what: "can't be sent from here: its source is not this task",
            here: self.me.clone(),
            remedy: "send on edges whose source device is this task's",
        })
    }

    pub(super) fn check_destination(&self, edge: &Edge) -> Result<(), Error> {
        if edge.destination == EdgeEnd::Here {
            return Ok(());
        }
        Err(Error::WrongEnd {
            edge: edge.to_string(),
            what: "can't be received here: its destination is not this task",
            here: self.me.clone(),
            remedy: "receive on edges whose destination device is this task's",
        })
    }

    fn send_local(&self, key: &TensorKey, value: Value) -> Result<(), Error> {
        let wakeups = {
            let mut tables = self.tables();
            check_live(&tables.steps, key.step)?;
            tables.local.send(key, value)
        };
        self.wake(wakeups);
        Ok(())
    }

    /// All of them at once, or none.
    pub(super) fn send_all_local(
        &self,
        step: u64,
        values: &mut Vec<(TensorKey, Value)>,
    ) -> Result<(), Error> {
        let mut all = DeferredWakeups::default();
        {
            let mut tables = self.tables();
            check_live(&tables.steps, step)?;
            values.drain(..).for_each(|(key, value)| all.append(tables.local.send(&key, value)));
        }
        self.wake(all);
        Ok(())
    }

    /// All of them at once, or none.
    pub(super) fn receive_all_local(
        &self,
        step: u64,
        waiters: &mut Vec<(TensorKey, LocalWaiter)>,
    ) -> Result<(), Error> {
        let mut all = DeferredWakeups::default();
        {
            let mut tables = self.tables();
            check_live(&tables.steps, step)?;
            waiters.drain(..).for_each(|(key, waiter)| all.append(tables.local.receive(&key, waiter)));
            self.expiry_changed(&tables);
        }
        self.wake(all);
        Ok(())
    }

    pub(super) fn receive_local(&self, key: &TensorKey, waiter: LocalWaiter) -> Result<(), Error> {
        let wakeups = {
            let mut tables = self.tables();
            check_live(&tables.steps, key.step)?;
            let wakeups = tables.local.receive(key, waiter);
            self.expiry_changed(&tables);
            wakeups
        };
        self.wake(wakeups);
        Ok(())
    }
}
