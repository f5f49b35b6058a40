//! [`Pending`]: a receive that has begun.

use super::context::Context;
use super::edge::Edge;
use super::path::RemotePath;
use crate::link::{Destination, DirectReceive, TensorKey};
use crate::matching::{
    CallHandle, CallId, Cancel, CancelAll, CancelReason, Delivery, Error, Outcome, Payload, PeerIndex,
};
use crate::memory::{Tensor, TensorMut};
use crate::sync::OneshotReceiver;
use crate::wire::Time;
use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

/// The place where a call waits: the local table, or the poller of a peer. The calls of a batch may
/// wait in all of these places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallPlace {
    Local(TensorKey),
    /// `waiter` is the number of the receive there, if it is known.
    Remote {
        peer: PeerIndex,
        waiter: Option<u32>,
    },
    Batch {
        edges: Arc<[Edge]>,
        step: u64,
    },
}

/// Cancels one receive, or all receives of one call, from any thread. It may outlive the receives,
/// and then has no effect.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// # let (step, edge) = (node.step(1)?, node.edge_to("worker", 0, "x")?);
/// use tensorwire::Error;
/// let pending = step.receive(&edge).within(Duration::from_secs(1)).begin()?;
/// let token = pending.cancel_token();
/// std::thread::spawn(move || token.cancel());
/// assert!(matches!(pending.wait(), Err(Error::Cancelled { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct CancelToken {
    pub(super) context: Arc<Context>,
    pub(super) id: CallId,
    pub(super) place: CallPlace,
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("call", &self.id).finish_non_exhaustive()
    }
}

impl CancelToken {
    /// Cancels each receive that has not ended. The receive ends with its value or with
    /// [`Error::Cancelled`]. Does not wait.
    pub fn cancel(&self) {
        self.cancel_for(CancelReason::Cancelled);
    }

    pub(super) fn cancel_for(&self, why: CancelReason) {
        if self.context.check_home().is_err() {
            return;
        }
        let token = self.clone();
        self.context.outside_pollers(move || token.cancel_now(why));
    }

    fn cancel_now(&self, why: CancelReason) {
        let id = self.id;
        match &self.place {
            CallPlace::Local(key) => self.context.cancel_local(key, &Cancel { call: id.into(), why }),
            CallPlace::Remote { peer, waiter } => {
                let call = CallHandle { id, waiter: *waiter };
                self.context.paths.of(*peer).cancel(Cancel { call, why });
            }
            CallPlace::Batch { edges, step } => {
                let cancel = CancelAll { first: id.0, count: edges.len() as u64, why };
                self.context.paths.all().for_each(|path| path.cancel_all(cancel.clone()));
                self.context.cancel_all_local(edges, *step, &cancel);
            }
        }
    }

    /// The number of the path whose progress the receive needs.
    fn path_number(&self) -> usize {
        match self.place {
            CallPlace::Local(_) | CallPlace::Batch { .. } => 0,
            CallPlace::Remote { peer, .. } => self.context.paths.number_of(peer).into(),
        }
    }

    fn path(&self) -> &dyn RemotePath {
        self.context.paths.nth(self.path_number())
    }
}

/// A tensor type that a receive can return.
pub trait Receivable: Sized {
    #[doc(hidden)]
    fn from_payload(payload: SealedPayload) -> Option<Self>;
    #[doc(hidden)]
    fn into_payload(self) -> SealedPayload;
}

/// The tensor of a receive. Only this crate can make one.
#[derive(Debug)]
#[allow(unnameable_types)] // sealed
pub struct SealedPayload(pub(super) Payload);

impl From<Payload> for SealedPayload {
    fn from(payload: Payload) -> Self {
        SealedPayload(payload)
    }
}

impl Receivable for Tensor {
    fn from_payload(SealedPayload(payload): SealedPayload) -> Option<Self> {
        match payload {
            Payload::Tensor(tensor) => Some(tensor),
            Payload::Into(_) => None,
        }
    }

    fn into_payload(self) -> SealedPayload {
        SealedPayload(Payload::Tensor(self))
    }
}

impl Receivable for TensorMut {
    fn from_payload(SealedPayload(payload): SealedPayload) -> Option<Self> {
        match payload {
            Payload::Into(given) => Some(given),
            Payload::Tensor(_) => None,
        }
    }

    fn into_payload(self) -> SealedPayload {
        SealedPayload(Payload::Into(self))
    }
}

/// A receive that has begun.
///
/// Dropping it cancels the receive, without waiting. A value that comes later is for the next
/// receive. A destination that was given stays allocated until the peer can't write to it any more.
/// A receive that is done has its value, and dropping it drops the value: to lose none, cancel with
/// the [token](Pending::cancel_token) and wait.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let (step, edge) = (node.step(1)?, node.edge_to("worker", 0, "x")?);
/// # let tensor = node.tensor(DType::F32, &[4])?.freeze();
/// let pending = step.receive(&edge).within(Duration::from_secs(1)).begin()?;
/// step.send(&edge, tensor)?;
/// assert!(pending.is_done());
/// assert_eq!(pending.wait()?.tensor.shape().dims(), [4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # As a future
///
/// A `Pending` is a [`Future`] with the output of [`Pending::wait`], for any executor. The receive
/// has begun before the first poll. Dropping the future cancels the receive as above.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// # use tensorwire::DType;
/// # let (step, edge) = (node.step(1)?, node.edge_to("worker", 0, "x")?);
/// # let tensor = node.tensor(DType::F32, &[4])?.freeze();
/// let runtime = tokio::runtime::Builder::new_current_thread().build()?;
/// runtime.block_on(async {
///     let pending = step.receive(&edge).within(Duration::from_secs(1)).begin()?;
///     step.send(&edge, tensor)?;
///     assert_eq!(pending.await?.tensor.shape().dims(), [4]);
///     Ok::<(), tensorwire::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The thread that makes the progress which ends the receive wakes the task. A poll of the future
/// makes progress once itself. In the poll modes adaptive and dedicated the background poller makes
/// the rest.
///
/// In inline mode nobody makes progress unless some thread calls tensorwire, and a task that waits
/// sleeps for ever. There the program calls [`Node::progress`](crate::Node::progress) again and
/// again: on a thread of its own, or in a loop of its executor. Other blocking calls of any thread
/// make progress, too.
///
/// The deadline of the receive ends the future. For an edge within the process a call of some
/// thread must notice the deadline, in every poll mode.
///
/// The waker runs while its thread holds the poller. It may schedule its task, and must not wait.
#[must_use = "dropping a pending receive cancels it"]
pub struct Pending<T> {
    token: CancelToken,
    receiver: OneshotReceiver<Outcome>,
    deadline: Time,
    wants: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pending = f.debug_struct("Pending");
        pending
            .field("call", &self.token.id)
            .field("is_done", &self.receiver.is_done())
            .finish_non_exhaustive()
    }
}

impl<T: Receivable> Pending<T> {
    pub(super) fn new(token: CancelToken, receiver: OneshotReceiver<Outcome>, deadline: Time) -> Self {
        Pending { token, receiver, deadline, wants: PhantomData }
    }

    /// Whether [`Pending::wait`] would return at once. Makes no progress by itself: see
    /// [`Node::progress`](crate::Node::progress).
    pub fn is_done(&self) -> bool {
        self.receiver.is_done()
    }

    /// A token that cancels this receive, from another thread than the waiting one.
    #[must_use]
    pub fn cancel_token(&self) -> CancelToken {
        self.token.clone()
    }

    /// Waits until the tensor is there or the deadline that the receive began with has passed.
    ///
    /// # Errors
    /// The reason why the receive ended without a value.
    pub fn wait(self) -> Result<Delivery<T>, Error> {
        match self.wait_short(self.deadline) {
            Some(received) => received,
            None => self.wait_as_waiter(),
        }
    }

    /// As [`Pending::wait`], after a wait on the poller itself.
    pub(super) fn wait_as_waiter(self) -> Result<Delivery<T>, Error> {
        let deadline = self.deadline;
        self.wait_until(deadline, None)
    }

    /// Waits for `timeout` at most; then the receive is cancelled. Makes progress once at least.
    ///
    /// # Errors
    /// The reason why the receive ended without a value.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Delivery<T>, Error> {
        let deadline = self.token.context.now() + timeout;
        if deadline >= self.deadline {
            return self.wait();
        }
        match self.wait_short(deadline) {
            Some(received) => received,
            None => self.wait_until(deadline, Some(timeout)),
        }
    }

    fn wait_until(mut self, deadline: Time, given: Option<Duration>) -> Result<Delivery<T>, Error> {
        let context = &self.token.context;
        context.check_home()?;
        // The deadline of another receive, within the process, is looked for in any case.
        let must_wait = !self.is_done() || context.is_local_deadline_due();
        if must_wait && !context.wait(self.token.path(), deadline, &|| self.receiver.is_done())? {
            // A poller ends a call at the deadline of the receive. This cancellation is for an
            // earlier deadline, and for calls of the local table, which no poller watches.
            return self.end(CancelReason::Deadline(given));
        }
        self.take()
    }

    /// Waits on the poller itself, as far as nothing else is to be done for the value. `None` if
    /// the receive goes on to wait, or its channel has the result.
    fn wait_short(&self, deadline: Time) -> Option<Result<Delivery<T>, Error>> {
        let CancelToken { context, id, place: CallPlace::Remote { peer, waiter } } = &self.token else {
            return None;
        };
        let is_over = || self.is_done() || !context.is_usable();
        if is_over() || context.is_local_deadline_due() {
            return None;
        }
        let (call, leave_at) = (CallHandle { id: *id, waiter: *waiter }, &context.next_deadline);
        let mut receive = DirectReceive::Waiting(Destination::Alloc);
        context.paths.of(*peer).wait_for_call(call, &mut receive, deadline, leave_at, &is_over);
        let DirectReceive::Received(received, sender) = receive else { return None };
        Some(Delivery::of(received, sender, &context.pool).cast())
    }

    /// Cancels the receive, and waits for its end.
    pub(super) fn cancel_and_wait(mut self) -> Result<Delivery<T>, Error> {
        self.token.context.check_home()?;
        self.end(CancelReason::Cancelled)
    }

    /// The context and the number of the path whose progress the receive needs.
    pub(super) fn poller(&self) -> (&Arc<Context>, usize) {
        (&self.token.context, self.token.path_number())
    }

    /// Has `task` woken at the end. A receive that has ended before the call may wake nobody.
    pub(super) fn notify(&mut self, task: &Waker) {
        self.receiver.wake_when_done(task);
    }

    /// The result of a receive that has ended.
    pub(super) fn result(mut self) -> Result<Delivery<T>, Error> {
        self.take()
    }

    fn end(&mut self, why: CancelReason) -> Result<Delivery<T>, Error> {
        self.token.cancel_for(why);
        let context = &self.token.context;
        let after = 2 * context.settings.cancel_grace;
        if !context.wait(self.token.path(), context.now() + after, &|| self.receiver.is_done())? {
            return Err(context.broken().unwrap_or(Error::Stalled { after }));
        }
        self.take()
    }

    fn take(&mut self) -> Result<Delivery<T>, Error> {
        let context = &self.token.context;
        match self.receiver.take() {
            Some(outcome) => context.losses.delivered(outcome),
            None => Err(context.broken().unwrap_or(Error::Stopped)),
        }
    }

    /// Returns whether the receive has ended. If not, `task` is woken at the end.
    fn poll_once(&mut self, task: &Waker) -> Result<bool, Error> {
        let context = &self.token.context;
        context.check_home()?;
        if self.is_done() {
            return Ok(true);
        }
        context.progress_on(self.token.path())?;
        self.receiver.wake_when_done(task);
        match context.broken() {
            _ if self.receiver.is_done() => Ok(true),
            Some(error) => Err(error),
            None => Ok(false),
        }
    }
}

impl<T: Receivable> Future for Pending<T> {
    type Output = Result<Delivery<T>, Error>;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        match self.poll_once(task.waker()) {
            Ok(true) => Poll::Ready(self.take()),
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if !self.receiver.is_done() {
            self.receiver.wake_nobody();
            self.token.cancel_for(CancelReason::Dropped);
        }
        // A call that this thread could cancel at once is done now.
        self.token.context.calls.take_back(&mut self.receiver);
    }
}
