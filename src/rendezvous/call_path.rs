//! The path by calls: a [`RemotePath`] without a poller, over gRPC (specification 9).
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // off the data path of every fabric

use super::call_flights::CallFlights;
use super::path::RemotePath;
use crate::engine::Clock;
use crate::link::{TensorKey, Value};
use crate::matching::recv_tensor::{AskedRequest, CallLink, IDLE_GRACE, RecvTensors, RequestAnswer};
use crate::matching::{
    BatchReceive, BatchSend, Cancel, CancelAll, EdgeReports, Error, LinkTag, LostPeer, Members, NewReceive,
    PeerIndex, PeerObserver, ReceiveAll, StandingChange, StepChange, Untaken, WaitReports, Waiter,
};
use crate::sync::Reused;
use crate::telemetry::{Counter, Counters, FlightEvent, FlightLog};
use crate::wire::{Incarnation, LossCause, Status, TaskId, Time};
use bytes::Bytes;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The longest sleep of a wait. Every event wakes it earlier.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

/// The tensors of a process that travels by calls. Calls of any thread change it under one lock,
/// and sleep until an answer has come.
pub struct CallPath {
    state: Mutex<RecvTensors>,
    clock: Arc<dyn Clock>,
    observer: Arc<dyn PeerObserver>,
    /// The last loss of each peer that has not come back.
    losses: Mutex<Vec<Option<LinkTag>>>,
    flights: Mutex<CallFlights>,
    /// Counts what waiting threads may wait for.
    events: Mutex<u64>,
    happened: Condvar,
    /// When [`CallPath::keep_deadlines`] looks next.
    next_look: Mutex<Time>,
    look_earlier: Condvar,
    is_closed: AtomicBool,
}

/// Locks. No code panics while it holds one of these locks, but for a bug.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CallPath {
    /// A path to all members, which are without a link.
    pub fn new(
        state: RecvTensors,
        members: Members,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn PeerObserver>,
    ) -> Self {
        let (peers, times) = (members.all().len(), clock.clone());
        let flights = CallFlights::new(members, Arc::new(move || times.now()));
        CallPath {
            flights: Mutex::new(flights),
            state: Mutex::new(state),
            clock,
            observer,
            losses: Mutex::new(vec![None; peers]),
            events: Mutex::new(0),
            happened: Condvar::new(),
            next_look: Mutex::new(Time::NEVER),
            look_earlier: Condvar::new(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// What the path counts, for any reader.
    pub fn counters(&self) -> Arc<Counters> {
        lock(&self.state).counters().counters()
    }

    /// Changes the state, then gives the outcomes of ended receives to their callers.
    fn with<R>(&self, change: impl FnOnce(&mut RecvTensors) -> R) -> R {
        let (result, ended) = {
            let mut state = lock(&self.state);
            (change(&mut state), state.take_ended())
        };
        if !ended.is_empty() {
            ended.into_iter().for_each(|ended| ended.send());
            self.nudge();
        }
        result
    }

    /// The same for a call that needs a path that is open.
    fn with_open<R>(&self, change: impl FnOnce(&mut RecvTensors) -> R) -> Result<R, Error> {
        self.check_open()?;
        Ok(self.with(change))
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.is_closed.load(Ordering::Acquire) { Err(Error::Stopped) } else { Ok(()) }
    }

    /// A peer asks for a value.
    pub fn asked(&self, from: (PeerIndex, Incarnation), request: AskedRequest<'_>, answer: RequestAnswer) {
        self.with(|state| state.asked(from, request, answer));
    }

    /// Requests of a peer have ended: see [`RecvTensors::finished`].
    pub fn finished(&self, from: (PeerIndex, Incarnation), finished: &[u64], given_up: &[u64]) {
        self.with(|state| finished.iter().for_each(|id| state.finished(from, *id, false)));
        for id in given_up {
            // Its value may be the answer to another request, with a checksum of all its bytes.
            self.with(|state| state.finished(from, *id, true));
            lock(&self.flights).record(from.0, FlightEvent::GiveUpCame { request: *id });
        }
        self.nudge();
    }

    /// See [`RecvTensors::clean_up_peer`].
    pub fn clean_up_peer(&self, from: (PeerIndex, Incarnation), id: u64) {
        self.with(|state| state.clean_up_peer(from, id));
    }

    /// The answer to a request of this process has come.
    pub fn answered(&self, request: (PeerIndex, u64), answer: Result<(Vec<u8>, Vec<Bytes>), Status>) {
        if answer.is_err() {
            let (peer, request) = request;
            lock(&self.flights).record(peer, FlightEvent::RequestFailed { request });
        }
        self.with(|state| state.answered(request, answer));
    }

    /// The peer has no value for a try of this process.
    pub fn tried(&self, peer: PeerIndex, id: u64) {
        self.with(|state| state.tried(peer, id));
    }

    /// A peer has heard that a request was given up.
    pub fn withdrawn(&self, peer: PeerIndex, id: u64) {
        self.with(|state| state.withdrawn(peer, id));
        lock(&self.flights).record(peer, FlightEvent::GaveUp { request: id });
    }

    /// A link with a peer is up.
    pub fn up(&self, peer: PeerIndex, link: CallLink) {
        lock(&self.losses)[peer.0 as usize] = None;
        self.with(|state| state.up(peer, link));
        lock(&self.flights).up(peer, link.tag);
        self.observer.up(peer, link.tag);
        self.nudge();
    }

    /// A link with a peer has ended, or a life of it without a link. Each life is reported once.
    pub fn lost(&self, peer: PeerIndex, name: &TaskId, tag: LinkTag, cause: LossCause) {
        {
            let mut losses = lock(&self.losses);
            let known = &mut losses[peer.0 as usize];
            let is_old =
                |lost: &LinkTag| lost.incarnation == tag.incarnation || lost.generation > tag.generation;
            if known.as_ref().is_some_and(is_old) {
                return;
            }
            *known = Some(tag);
        }
        let error = Error::PeerLost { peer: name.clone(), incarnation: tag.incarnation, cause };
        let (values, ended) = {
            let mut state = lock(&self.state);
            if state.is_over(peer, tag) {
                return;
            }
            (state.lost(peer, &error), state.take_ended())
        };
        let flight = lock(&self.flights).end(peer).filter(|log| log.generation == tag.generation);
        // Who hears of the loss may send at once, and that send must fail.
        self.observer.down(&LostPeer { peer, tag, error, values, flight });
        ended.into_iter().for_each(|ended| ended.send());
        self.nudge();
    }

    /// Ends the waits whose deadlines pass, until the path is closed. Blocks.
    pub fn keep_deadlines(&self) {
        while !self.is_closed.load(Ordering::Acquire) {
            let now = self.clock.now();
            let (next, long) = self.with(|state| {
                let long = state.take_long_waits(now);
                (state.expire(now), long)
            });
            if let Some(waits) = long {
                self.observer.hung(&waits);
            }
            let mut next_look = lock(&self.next_look);
            // A receive that has begun meanwhile has set it.
            *next_look = next.min(*next_look);
            while !self.is_closed.load(Ordering::Acquire) && self.clock.now() < *next_look {
                let sleep = LONGEST_SLEEP.min(next_look.since(self.clock.now()));
                let woken = self.look_earlier.wait_timeout(next_look, sleep);
                next_look = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            *next_look = Time::NEVER;
        }
    }

    /// The path ends: every call fails from now on.
    pub fn close(&self) {
        self.with(|state| state.end(&Error::Stopped));
        self.is_closed.store(true, Ordering::Release);
        drop(lock(&self.next_look));
        self.look_earlier.notify_all();
        self.nudge();
    }

    /// Has [`CallPath::keep_deadlines`] look at `at`, if not earlier.
    fn look_at(&self, at: Time) {
        let mut next_look = lock(&self.next_look);
        if at < *next_look {
            *next_look = at;
            self.look_earlier.notify_one();
        }
    }
}

impl RemotePath for Arc<CallPath> {
    fn send(&self, peer: PeerIndex, key: TensorKey, value: Value) -> Result<(), Error> {
        let now = self.clock.now();
        self.with_open(|state| state.send(peer, &key, value, now))
    }

    fn receive(&self, peer: PeerIndex, new: &mut Option<NewReceive>) -> Result<Option<u32>, Error> {
        let Some(receive) = new.take() else { return Ok(None) };
        let Waiter { begun, deadline, .. } = receive.waiter;
        let hung = self.with_open(|state| {
            state.receive(peer, receive, true);
            begun + state.logged_after()
        })?;
        self.look_at(deadline.min(hung));
        Ok(None)
    }

    fn send_all(&self, mut values: Reused<BatchSend>) -> Result<(), Error> {
        let now = self.clock.now();
        self.with_open(|state| {
            state.counters().increment(Counter::Batches);
            for BatchSend { peer, key, value, .. } in values.drain(..) {
                state.send(peer, &key, value, now);
            }
        })
    }

    fn receive_all(&self, batch: ReceiveAll) -> Result<(), Error> {
        let ReceiveAll { begun, deadline, timeout, mut receives } = batch;
        let hung = self.with_open(|state| {
            state.counters().increment(Counter::Batches);
            for BatchReceive { peer, id, key, destination, sender, .. } in receives.drain(..) {
                let (permit, cancel_reason, is_logged) = (None, None, false);
                let waiter =
                    Waiter { permit, id, sender, begun, deadline, timeout, cancel_reason, is_logged };
                state.receive(peer, NewReceive { key, destination, waiter }, false);
            }
            begun + state.logged_after()
        })?;
        self.look_at(deadline.min(hung));
        Ok(())
    }

    fn cancel(&self, call: Cancel) {
        self.with(|state| state.cancel(&call));
        self.look_at(self.clock.now() + IDLE_GRACE);
    }

    fn cancel_all(&self, calls: CancelAll) {
        self.with(|state| state.cancel_all(&calls));
        self.look_at(self.clock.now() + IDLE_GRACE);
    }

    fn step(&self, change: StepChange) {
        if let StepChange::Aborted { steps, .. } = &change {
            let (first, last) = ((*steps.start()).into(), (*steps.end()).into());
            lock(&self.flights).record_all(FlightEvent::Aborted { first, last });
        }
        self.with(|state| state.step_changed(change));
    }

    fn clean_up(&self, step: u64) {
        self.step(StepChange::CleanedUp { step });
    }

    /// Nothing is sent before it is asked for, so there is no window.
    fn standing(&self, _change: StandingChange) {}

    fn edges(&self, limit: usize) -> Result<EdgeReports, Error> {
        self.with_open(|state| state.edges(limit))
    }

    fn waits(&self, limit: usize) -> Result<WaitReports, Error> {
        let now = self.clock.now();
        self.with_open(|state| state.waits(now, limit))
    }

    fn flight_logs(&self) -> Result<Vec<FlightLog>, Error> {
        self.check_open().map(|()| lock(&self.flights).logs())
    }

    fn untaken(&self, _asks: bool, since: Option<u64>) -> Result<(Untaken, u64), Error> {
        self.with_open(|state| state.untaken(since))
    }

    fn is_flushed(&self) -> Result<bool, Error> {
        self.with_open(|state| state.is_flushed())
    }

    /// The thread of the bootstrap service makes the progress.
    fn progress(&self) -> Result<usize, Error> {
        self.check_open().map(|()| 0)
    }

    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        loop {
            let seen = *lock(&self.events);
            if done() {
                return Ok(true);
            }
            self.check_open()?;
            let now = self.clock.now();
            if now >= deadline {
                return Ok(false);
            }
            let mut events = lock(&self.events);
            if *events == seen {
                let sleep = LONGEST_SLEEP.min(deadline.since(now));
                events = self.happened.wait_timeout(events, sleep).unwrap_or_else(PoisonError::into_inner).0;
            }
            drop(events);
        }
    }

    fn nudge(&self) {
        CallPath::nudge(self);
    }

    fn end(&self, error: Error) {
        self.with(|state| state.end(&error));
    }

    fn now(&self) -> Time {
        self.clock.now()
    }
}

impl CallPath {
    fn nudge(&self) {
        let mut events = lock(&self.events);
        *events = events.wrapping_add(1);
        self.happened.notify_all();
    }
}
