//! The paths to other processes: one per poller.

use crate::engine::{DirectTake, DirectWait, Engine, Unusable, WaitLimit};
use crate::fabric::{Port, ShortTake};
use crate::link::{DirectReceive, Links, TensorKey, TensorKeyRef, Value};
use crate::matching::{
    BatchSend, CallHandle, Cancel, CancelAll, EdgeReports, Error, NewReceive, PeerIndex, ReceiveAll,
    RemoteCommand, StandingChange, StepChange, Untaken, WaitReports,
};
use crate::matching::{BatchWalk, ExpectedRecord, OfEdge, WalkEnd, WindowHandler};
use crate::memory::Tensor;
use crate::sync::Reused;
use crate::telemetry::FlightLog;
use crate::wire::{AtomicTime, Time};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The paths of all pollers. Each peer belongs to one of them, by its index.
#[derive(Clone)]
pub struct Paths(Arc<[Box<dyn RemotePath>]>);

impl Paths {
    /// The paths in the order of the pollers.
    ///
    /// # Panics
    /// If `paths` is empty or longer than 65,535.
    pub fn new(paths: Vec<Box<dyn RemotePath>>) -> Self {
        assert!(!paths.is_empty() && paths.len() <= usize::from(u16::MAX), "{} paths", paths.len());
        Paths(paths.into())
    }

    /// The number of the path of a peer among `count` paths, from 0 on.
    pub fn index_of(peer: PeerIndex, count: usize) -> usize {
        // Most nodes have one poller, and a division is slow.
        if count == 1 { 0 } else { peer.0 as usize % count }
    }

    /// The number of the path of a peer, from 0 on.
    #[inline]
    pub fn number_of(&self, peer: PeerIndex) -> u16 {
        // `new` has checked that the count fits.
        Self::index_of(peer, self.0.len()) as u16
    }

    /// The path of a peer.
    #[inline]
    pub fn of(&self, peer: PeerIndex) -> &dyn RemotePath {
        match &*self.0 {
            [only] => &**only,
            _ => self.nth(self.number_of(peer).into()),
        }
    }

    /// The number of paths.
    #[inline]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The path with number `nth`, from 0 on.
    #[inline]
    pub fn nth(&self, nth: usize) -> &dyn RemotePath {
        &*self.0[nth]
    }

    /// The path for calls without a peer.
    #[inline]
    pub fn first(&self) -> &dyn RemotePath {
        &*self.0[0]
    }

    /// All paths, in the order of the pollers.
    pub fn all(&self) -> impl Iterator<Item = &dyn RemotePath> {
        self.0.iter().map(|path| &**path)
    }
}

/// The outcome of [`RemotePath::send_direct`].
#[derive(Debug)]
pub enum DirectSend {
    /// The value has left, or waits for its receiver.
    Sent,
    /// As many values wait as may. The value is dropped.
    Full,
    /// The value must be sent by a command.
    Elsewhere(Value),
}

/// The end of a receive on the poller itself. Boxed, so that no layer moves a large error.
pub type DirectEnd = Result<(), Box<Error>>;

/// The path to the tensors of other processes, over one poller.
///
/// A path whose poller the calling thread can't take has no direct sends and receives. Its calls
/// are commands, as the default methods say.
pub trait RemotePath: Send + Sync {
    /// Sends a value to a peer.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send(&self, peer: PeerIndex, key: TensorKey, value: Value) -> Result<(), Error>;

    /// Sends a tensor on the poller itself, if nothing else has to be done for it. Returns whether
    /// it did. A tensor that is lent is taken.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send_short(
        &self,
        _peer: PeerIndex,
        _key: TensorKeyRef<'_>,
        _tensor: &mut Option<Tensor>,
    ) -> Result<bool, Unusable> {
        Ok(false)
    }

    /// Sends a value on the poller itself, without a command. The value does not count as
    /// outstanding yet, and `limit` values can be.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send_direct(
        &self,
        _of: (PeerIndex, TensorKeyRef<'_>),
        value: Value,
        _limit: usize,
    ) -> Result<DirectSend, Unusable> {
        Ok(DirectSend::Elsewhere(value))
    }

    /// Waits for a tensor of a peer on the poller itself, without a command, until `leave_at` at
    /// most. A receive that is ready without an error has got its value, or must begin as a waiter.
    fn receive_direct(
        &self,
        _peer: PeerIndex,
        _key: TensorKeyRef<'_>,
        _receive: &mut DirectReceive,
        _timeout: Duration,
        _leave_at: &AtomicTime,
    ) -> DirectWait<DirectEnd> {
        DirectWait::Elsewhere(None)
    }

    /// Walks over the edges of a batch on the poller itself, without a command, until `leave_at`
    /// at most.
    fn receive_batch(
        &self,
        _walk: &mut BatchWalk<'_>,
        _timeout: Duration,
        _leave_at: &AtomicTime,
    ) -> DirectWait<WalkEnd> {
        DirectWait::Elsewhere(None)
    }

    /// Begins the receive that `new` holds, and takes it. Returns the number of its waiter, if the
    /// handle of the call must have it: see [`CallHandle`].
    ///
    /// # Errors
    /// If the poller is closed or poisoned. Then the receive may still be in `new`.
    fn receive(&self, peer: PeerIndex, new: &mut Option<NewReceive>) -> Result<Option<u32>, Error>;

    /// Waits on the poller itself for the end of a receive that has begun, until `is_over`,
    /// `deadline` or `leave_at` at most. The receive may go on to wait. If this thread takes the
    /// value, `receive` gets it, and the channel of the call stays empty.
    fn wait_for_call(
        &self,
        _call: CallHandle,
        _receive: &mut DirectReceive,
        _deadline: Time,
        _leave_at: &AtomicTime,
        _is_over: &dyn Fn() -> bool,
    ) {
    }

    /// Sends the values of a batch on the poller itself, without a command. The values count as
    /// outstanding. Returns whether it did. If not, it has taken no value.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send_batch(&self, _values: &mut dyn Iterator<Item = OfEdge<'_, Value>>) -> Result<bool, Unusable> {
        Ok(false)
    }

    /// Sends several values to peers.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn send_all(&self, values: Reused<BatchSend>) -> Result<(), Error>;

    /// Begins to receive several tensors of peers.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn receive_all(&self, receives: ReceiveAll) -> Result<(), Error>;

    /// Cancels a call, unless it has ended.
    fn cancel(&self, call: Cancel);

    /// Cancels several calls, except those that have ended.
    fn cancel_all(&self, calls: CancelAll);

    /// Passes on the change of a step.
    fn step(&self, change: StepChange);

    /// Ends a step for good.
    fn clean_up(&self, step: u64);

    /// Passes on the change of a standing request.
    fn standing(&self, change: StandingChange);

    /// Reports the edges, `limit` of them at most.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn edges(&self, limit: usize) -> Result<EdgeReports, Error>;

    /// Reports what waits, `limit` waits at most.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn waits(&self, limit: usize) -> Result<WaitReports, Error>;

    /// Reports the flight records of the links.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn flight_logs(&self) -> Result<Vec<FlightLog>, Error>;

    /// Reports the values that were sent and not taken, and the number of losses so far. `asks`
    /// makes the receivers tell what they take from now on. The values that were lost after the
    /// first `since` losses are among the reported ones.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn untaken(&self, asks: bool, since: Option<u64>) -> Result<(Untaken, u64), Error>;

    /// Whether everything that has left is at the hosts of its peers.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn is_flushed(&self) -> Result<bool, Error>;

    /// Makes progress once. Returns the number of completions.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn progress(&self) -> Result<usize, Error>;

    /// Makes progress until `done` or until `deadline`. Returns the last value of `done`.
    ///
    /// # Errors
    /// If the poller is closed or poisoned.
    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error>;

    /// Wakes the waiting threads, which check `done` again. Called after an event outside this
    /// path.
    fn nudge(&self);

    /// Ends every call with this error, if the loss of a peer is fatal.
    fn end(&self, error: Error);

    /// The time of the clock of this path.
    fn now(&self) -> Time;
}

impl<P: Port> RemotePath for Arc<Engine<P, WindowHandler>> {
    fn send(&self, peer: PeerIndex, key: TensorKey, value: Value) -> Result<(), Error> {
        self.submit(RemoteCommand::Send { peer, key, value }).map_err(unusable)
    }

    fn send_short(
        &self,
        peer: PeerIndex,
        key: TensorKeyRef<'_>,
        tensor: &mut Option<Tensor>,
    ) -> Result<bool, Unusable> {
        let mut is_sent = false;
        self.try_direct(|handler, links| {
            is_sent = handler.with(links, |matching, lanes| matching.send_short(lanes, (peer, key), tensor));
        })?;
        Ok(is_sent)
    }

    fn send_direct(
        &self,
        of: (PeerIndex, TensorKeyRef<'_>),
        value: Value,
        limit: usize,
    ) -> Result<DirectSend, Unusable> {
        let mut outcome = DirectSend::Elsewhere(value);
        let mut waits = false;
        self.try_direct(|handler, links| {
            let taken = std::mem::replace(&mut outcome, DirectSend::Sent);
            let DirectSend::Elsewhere(value) = taken else { return };
            match handler.with(links, |matching, lanes| matching.send_now(lanes, of, value, limit)) {
                Ok(waiting) => waits = waiting,
                Err(_) => outcome = DirectSend::Full,
            }
        })?;
        if waits {
            // The peer's credit may have come.
            Engine::progress(self)?;
        }
        Ok(outcome)
    }

    fn receive_direct(
        &self,
        peer: PeerIndex,
        key: TensorKeyRef<'_>,
        receive: &mut DirectReceive,
        timeout: Duration,
        leave_at: &AtomicTime,
    ) -> DirectWait<DirectEnd> {
        let take = DirectTensor { of: (peer, key), receive, expected: None };
        self.wait_direct(WaitLimit::After(timeout), leave_at, take)
    }

    fn receive_batch(
        &self,
        walk: &mut BatchWalk<'_>,
        timeout: Duration,
        leave_at: &AtomicTime,
    ) -> DirectWait<WalkEnd> {
        self.wait_direct(WaitLimit::After(timeout), leave_at, DirectBatch(walk))
    }

    fn receive(&self, peer: PeerIndex, new: &mut Option<NewReceive>) -> Result<Option<u32>, Error> {
        let mut waits = None;
        self.try_direct(|handler, links| waits = handler.receive(links, peer, new)).map_err(unusable)?;
        let Some(receive) = new.take() else { return Ok(waits) };
        self.submit(RemoteCommand::Receive { peer, receive }).map_err(unusable).map(|()| None)
    }

    fn wait_for_call(
        &self,
        call: CallHandle,
        receive: &mut DirectReceive,
        deadline: Time,
        leave_at: &AtomicTime,
        is_over: &dyn Fn() -> bool,
    ) {
        self.wait_direct(WaitLimit::At(deadline), leave_at, DirectCall { call, receive, is_over });
    }

    fn send_batch(&self, values: &mut dyn Iterator<Item = OfEdge<'_, Value>>) -> Result<bool, Unusable> {
        self.try_direct(|handler, links| handler.send_batch(links, values))
    }

    fn send_all(&self, values: Reused<BatchSend>) -> Result<(), Error> {
        self.submit(RemoteCommand::SendAll(values)).map_err(unusable)
    }

    fn receive_all(&self, receives: ReceiveAll) -> Result<(), Error> {
        self.submit(RemoteCommand::ReceiveAll(receives)).map_err(unusable)
    }

    fn cancel(&self, call: Cancel) {
        ignore_end(self.submit(RemoteCommand::Cancel(call)));
    }

    fn cancel_all(&self, calls: CancelAll) {
        ignore_end(self.submit(RemoteCommand::CancelAll(calls)));
    }

    fn step(&self, change: StepChange) {
        ignore_end(self.submit(RemoteCommand::Step(change)));
    }

    fn clean_up(&self, step: u64) {
        let mut is_done = false;
        ignore_end(
            self.try_direct(|handler, links| {
                handler.with(links, |matching, lanes| matching.clean_up(lanes, step));
                is_done = true;
            })
            .map(drop),
        );
        if !is_done {
            self.step(StepChange::CleanedUp { step });
        }
    }

    fn standing(&self, change: StandingChange) {
        ignore_end(self.submit(RemoteCommand::Standing(change)));
    }

    fn edges(&self, limit: usize) -> Result<EdgeReports, Error> {
        let reports = Arc::new(OnceLock::new());
        let told = reports.clone();
        let done = Box::new(move |all| drop(told.set(all)));
        self.submit(RemoteCommand::Edges { limit, done }).map_err(unusable)?;
        RemotePath::wait(self, Time::NEVER, &|| reports.get().is_some())?;
        Ok(reports.get().cloned().unwrap_or_default())
    }

    fn waits(&self, limit: usize) -> Result<WaitReports, Error> {
        let reports = Arc::new(OnceLock::new());
        let told = reports.clone();
        let done = Box::new(move |all| drop(told.set(all)));
        self.submit(RemoteCommand::Waits { limit, done }).map_err(unusable)?;
        RemotePath::wait(self, Time::NEVER, &|| reports.get().is_some())?;
        Ok(reports.get().cloned().unwrap_or_default())
    }

    fn flight_logs(&self) -> Result<Vec<FlightLog>, Error> {
        let logs = Arc::new(OnceLock::new());
        let told = logs.clone();
        let done = Box::new(move |all| drop(told.set(all)));
        self.submit(RemoteCommand::FlightLogs(done)).map_err(unusable)?;
        RemotePath::wait(self, Time::NEVER, &|| logs.get().is_some())?;
        Ok(logs.get().cloned().unwrap_or_default())
    }

    fn untaken(&self, asks: bool, since: Option<u64>) -> Result<(Untaken, u64), Error> {
        let untaken = Arc::new(OnceLock::new());
        let told = untaken.clone();
        let done = Box::new(move |values, losses| drop(told.set((values, losses))));
        self.submit(RemoteCommand::Untaken { asks, since, done }).map_err(unusable)?;
        RemotePath::wait(self, Time::NEVER, &|| untaken.get().is_some())?;
        Ok(untaken.get().cloned().unwrap_or_default())
    }

    fn is_flushed(&self) -> Result<bool, Error> {
        let answer = Arc::new(OnceLock::new());
        let told = answer.clone();
        let done = Box::new(move |is_flushed| _ = told.set(is_flushed));
        self.submit(RemoteCommand::IsFlushed(done)).map_err(unusable)?;
        RemotePath::wait(self, Time::NEVER, &|| answer.get().is_some())?;
        Ok(answer.get().copied().unwrap_or_default())
    }

    fn progress(&self) -> Result<usize, Error> {
        Engine::progress(self).map_err(unusable)
    }

    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        Engine::wait(self, deadline, done).map_err(unusable)
    }

    fn nudge(&self) {
        Engine::nudge(self);
    }

    fn end(&self, error: Error) {
        ignore_end(self.submit(RemoteCommand::End { error }));
    }

    fn now(&self) -> Time {
        Engine::now(self)
    }
}

/// A receive on the poller itself.
struct DirectTensor<'a> {
    of: (PeerIndex, TensorKeyRef<'a>),
    receive: &'a mut DirectReceive,
    expected: Option<ExpectedRecord>,
}

impl<P: Port> DirectTake<P, WindowHandler> for DirectTensor<'_> {
    type Taken = DirectEnd;

    #[inline(always)] // on the short path
    fn take_next(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> Option<Self::Taken> {
        let taken =
            handler.with(links, |matching, lanes| matching.receive_short(lanes, self.of, self.receive));
        (taken == Some(ShortTake::Taken(()))).then_some(Ok(()))
    }

    fn take(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> Option<Self::Taken> {
        let DirectTensor { of, receive, expected } = self;
        handler.receive_any(links, *of, receive, expected)
    }

    #[inline]
    fn take_short(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> ShortTake<Self::Taken> {
        let Some(expected) = &self.expected else { return ShortTake::Other };
        handler.with(links, |matching, lanes| matching.take_short(lanes, expected, self.receive)).map(Ok)
    }

    fn goes_elsewhere(&self, taken: &DirectEnd) -> bool {
        taken.is_ok() && matches!(self.receive, DirectReceive::Waiting(_))
    }
}

/// A receive that has begun, on the poller itself.
struct DirectCall<'a> {
    call: CallHandle,
    receive: &'a mut DirectReceive,
    is_over: &'a dyn Fn() -> bool,
}

impl<P: Port> DirectTake<P, WindowHandler> for DirectCall<'_> {
    type Taken = ();

    #[inline(always)] // on the short path
    fn take_next(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> Option<()> {
        (self.take_short(handler, links) == ShortTake::Taken(())).then_some(())
    }

    fn take(&mut self, _: &mut WindowHandler, _: &mut Links<P>) -> Option<()> {
        // A command or a poll may have ended it.
        (self.is_over)().then_some(())
    }

    #[inline]
    fn take_short(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> ShortTake<()> {
        handler.with(links, |matching, lanes| matching.end_short(lanes, self.call, self.receive))
    }
}

/// The receives of a batch on the poller itself.
struct DirectBatch<'a, 'b>(&'a mut BatchWalk<'b>);

impl<P: Port> DirectTake<P, WindowHandler> for DirectBatch<'_, '_> {
    type Taken = WalkEnd;

    fn take(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> Option<WalkEnd> {
        handler.with(links, |matching, lanes| matching.walk(lanes, self.0))
    }

    #[inline]
    fn take_short(&mut self, handler: &mut WindowHandler, links: &mut Links<P>) -> ShortTake<WalkEnd> {
        handler.with(links, |matching, lanes| matching.walk_short(lanes, self.0))
    }
}

/// The error of a call on an engine that is unusable.
pub(super) fn unusable(why: Unusable) -> Error {
    match why {
        Unusable::Poisoned => Error::Poisoned,
        Unusable::Closed => Error::Stopped,
    }
}

/// Ignores an unusable poller, which has failed every call already.
fn ignore_end(_: Result<(), Unusable>) {}
