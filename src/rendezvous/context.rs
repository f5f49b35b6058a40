//! The rendezvous of a process: makes edges and steps, ends them, and makes progress.

use super::edge::{Edge, EdgeEnd, NodeTag};
use super::foreign::Foreign;
use super::local::{DeferredWakeups, Local, LocalWaiter};
use super::losses::{Losses, PeerStatus};
use super::path::{Paths, RemotePath};
use super::sequence::Sequence;
use super::step::Step;
use super::step_flags::StepFlags;
use crate::engine::Executor;
use crate::fabric::Registrar;
use crate::link::{Destination, EdgeKey, TensorKey, Value};
use crate::matching::{
    BatchReceive, BatchSend, BeginError, Begun, Cancel, CancelAll, EdgeReports, EdgeWait, Error, Members,
    Outcome, PeerIndex, ReceiveLimit, StepChange, StepState, Steps, Untaken, WaitReport, WaitReports,
};
use crate::memory::{ForkGuard, Pool, TensorMut};
use crate::sync::{BiasedMutex, Lists, OneshotPool, Reused, is_waking};
use crate::telemetry::{FlightLog, Snapshot};
use crate::wire::{AtomicTime, EdgeName, Status, StepId, TaskId, Time};
use foldhash::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The longest sleep of a wait whose condition no poller signals.
pub(super) const SLICE: Duration = Duration::from_millis(1);

/// The settings of the calls; the pollers have [`RemoteSettings`](crate::matching::RemoteSettings).
#[derive(Clone, Debug)]
pub struct RendezvousSettings {
    /// The limit of values that were sent and have not left. A send beyond it fails.
    pub max_outstanding_sends: u32,
    /// The limit of receives outstanding with each peer. One more fails when it begins.
    pub max_requests: u32,
    /// The timeout of a receive whose caller gives none.
    pub recv_timeout: Duration,
    /// How long a cancelled call waits for the answer of its peer.
    pub cancel_grace: Duration,
    /// Whether a receive without a destination borrows where the fabric can.
    pub borrow: bool,
}

/// The rendezvous of a process: the state that its steps, batches and calls share.
pub struct Context {
    pub(super) me: TaskId,
    pub(super) tag: NodeTag,
    pub(super) members: Members,
    pub(super) paths: Paths,
    pub(super) settings: RendezvousSettings,
    pub(super) calls: OneshotPool<Outcome>,
    pub(super) lists: BatchLists,
    pub(super) executor: Executor,
    pub(super) pool: Pool,
    pub(super) foreign: Arc<Foreign>,
    fork_guard: ForkGuard,
    pub(super) outstanding: Arc<AtomicUsize>,
    pub(super) receive_limit: ReceiveLimit,
    /// The next deadline of the local table.
    pub(super) next_deadline: Arc<AtomicTime>,
    tables: BiasedMutex<Tables>,
    pub(super) flags: StepFlags,
    pub(super) losses: Arc<Losses>,
}

/// Reused lists in which batches go to the pollers.
pub(super) struct BatchLists {
    pub sends: Lists<BatchSend>,
    pub receives: Lists<BatchReceive>,
    /// One list of sends per path.
    pub send_parts: Lists<Reused<BatchSend>>,
    pub receive_parts: Lists<Reused<BatchReceive>>,
    /// Values of a batch, in the order of its edges.
    pub offered: Lists<Value>,
    /// Values for edges within the process.
    pub values: Lists<(TensorKey, Value)>,
    pub waiters: Lists<(TensorKey, LocalWaiter)>,
    /// The tensors that a batch fills.
    pub given: Lists<TensorMut>,
}

impl BatchLists {
    /// Lists for batches that are split among `paths` paths.
    fn new(paths: usize) -> Self {
        /// Batches of different threads that are under way at one time.
        const BATCHES: usize = 16;
        let parts = BATCHES + 2 * paths;
        BatchLists {
            sends: Lists::new(parts),
            receives: Lists::new(parts),
            send_parts: Lists::new(BATCHES),
            receive_parts: Lists::new(BATCHES),
            offered: Lists::new(BATCHES),
            values: Lists::new(BATCHES),
            waiters: Lists::new(BATCHES),
            given: Lists::new(BATCHES),
        }
    }
}

/// The tables of this process. The lock is held briefly, never while user code runs.
#[derive(Default)]
pub(super) struct Tables {
    pub steps: Steps,
    pub local: Local,
    /// The keys of edges with a [`Standing`](super::Standing), at the first steps of their
    /// sequences.
    pub standing: HashSet<TensorKey>,
}

impl Context {
    /// The context of task `me`, with paths to the other members.
    #[allow(clippy::too_many_arguments)] // each is a different part of a node
    pub fn new(
        me: TaskId,
        members: Members,
        paths: Paths,
        pool: Pool,
        executor: Executor,
        outstanding: Arc<AtomicUsize>,
        losses: Arc<Losses>,
        settings: RendezvousSettings,
    ) -> Arc<Self> {
        let tables = Tables::default();
        Arc::new(Context {
            tag: NodeTag::of(&me, &members),
            me,
            receive_limit: ReceiveLimit::new(members.all().len(), settings.max_requests),
            members,
            settings,
            calls: OneshotPool::new(4096),
            executor,
            pool,
            foreign: Arc::default(),
            lists: BatchLists::new(paths.count()),
            paths,
            fork_guard: ForkGuard::of_this_process(),
            outstanding,
            next_deadline: tables.local.next_deadline(),
            tables: BiasedMutex::new(tables),
            flags: StepFlags::default(),
            losses,
        })
    }

    /// Registers memory outside the pool with `registrar`, if it is sent to a peer of
    /// `sends_registered`. The first registrar counts.
    pub(crate) fn register_by(
        &self,
        registrar: Arc<dyn Registrar>,
        sends_registered: impl Fn(PeerIndex) -> bool + Send + Sync + 'static,
    ) {
        self.foreign.register_by(registrar, Box::new(sends_registered));
    }

    /// The counters of tensors outside the pool, which no poller counts.
    pub(crate) fn counted(&self) -> Snapshot {
        self.foreign.counted()
    }

    /// See [`Node::edge`](crate::Node::edge).
    pub fn edge(&self, source: &str, destination: &str, name: &str) -> Result<Edge, Error> {
        self.check_home()?;
        let name = EdgeName::new(source, destination, name)?;
        let source = self.end_of(&name, name.source_task())?;
        let destination = self.end_of(&name, name.destination_task())?;
        Ok(Edge { key: EdgeKey { name: Arc::new(name), frame: 0, iteration: 0 }, source, destination })
    }

    fn end_of(&self, edge: &EdgeName, task: &TaskId) -> Result<EdgeEnd, Error> {
        if *task == self.me {
            return Ok(EdgeEnd::Here(self.tag));
        }
        match self.members.index(task) {
            Some(peer) => Ok(EdgeEnd::Peer(peer)),
            None => Err(Error::UnknownTask {
                edge: edge.to_string(),
                task: task.clone(),
                members: format!("{:?}", self.members.all()),
            }),
        }
    }

    /// See [`Node::step_of`](crate::Node::step_of).
    #[inline]
    pub fn step(self: &Arc<Self>, id: u64, worker: &Arc<str>) -> Result<Step, Error> {
        if !self.is_usable() {
            self.check_usable()?;
        }
        let (begun, may_be_many) = self.with_tables(|tables| {
            let begun = tables.steps.begin(id, worker);
            if let Ok(Begun { number, is_new: true }) = begun {
                self.flags.set(number);
            }
            (begun, tables.steps.may_be_many())
        });
        let Begun { number, is_new } = begun.map_err(|error| not_begun(id, worker, error))?;
        if is_new && may_be_many {
            self.warn_of_many_steps();
        }
        Ok(Step { id, number, context: self.clone() })
    }

    #[cold]
    fn warn_of_many_steps(&self) {
        let live = self.with_tables(|tables| tables.steps.live_count());
        if Steps::is_warning_due(live) {
            tracing::warn!(
                live,
                "steps have begun and were not cleaned up: clean up each step when all members are done"
            );
        }
    }

    /// See [`Node::sequence`](crate::Node::sequence).
    pub fn sequence(&self, base: u64) -> Sequence {
        if self.check_home().is_ok() {
            self.with_tables(|tables| tables.steps.sequence(base));
            self.change(&StepChange::Sequence { base });
        }
        Sequence { base }
    }

    /// See [`Node::cleanup`](crate::Node::cleanup).
    #[inline]
    pub fn cleanup(&self, step: u64) {
        if self.check_home().is_err() {
            return;
        }
        let has_local = self.with_tables(|tables| {
            self.flags.clear(tables.steps.cleanup(step)?);
            Some(!tables.local.is_empty())
        });
        match has_local {
            None => return,
            Some(true) => self.end_local_step(step),
            Some(false) => {}
        }
        self.paths.all().for_each(|path| path.clean_up(step));
    }

    #[cold]
    fn end_local_step(&self, step: u64) {
        let error = Error::StepGone { step: step.into() };
        let wakeups = self.with_tables(|tables| tables.local.end_step(step, &error));
        self.wake(wakeups);
    }

    /// See [`Node::live_steps`](crate::Node::live_steps).
    pub(crate) fn live_steps(&self) -> Vec<StepId> {
        match self.check_home() {
            Ok(()) => self.with_tables(|tables| tables.steps.live().map(StepId::from).collect()),
            Err(_) => Vec::new(),
        }
    }

    /// See [`Node::edges`](crate::Node::edges).
    pub(crate) fn edges(&self, limit: usize) -> Result<EdgeReports, Error> {
        self.check_home()?;
        let mut all = EdgeReports::default();
        for path in self.paths.all() {
            all.append(path.edges(limit)?);
        }
        all.cut(limit);
        Ok(all)
    }

    /// See [`Node::waits`](crate::Node::waits).
    pub(crate) fn waits(&self, limit: usize) -> Result<WaitReports, Error> {
        self.check_home()?;
        // A thread that holds a poller and waits leaves it to the command, and is seen next time.
        for path in self.paths.all() {
            path.waits(0)?;
        }
        self.wait_until(self.now() + SLICE, &|| false)?;
        let mut all = WaitReports::default();
        for path in self.paths.all() {
            all.append(path.waits(limit)?);
        }
        let now = self.now();
        let local =
            |(key, begun): (&TensorKey, Time)| WaitReport::of_receive(key, begun, now, EdgeWait::NoValue);
        all.waits.extend(self.with_tables(|tables| tables.local.waits().map(local).collect::<Vec<_>>()));
        all.cut(limit);
        Ok(all)
    }

    /// See [`Node::flight_logs`](crate::Node::flight_logs).
    pub(crate) fn flight_logs(&self) -> Result<Vec<FlightLog>, Error> {
        self.check_home()?;
        let mut all = Vec::new();
        for path in self.paths.all() {
            all.extend(path.flight_logs()?);
        }
        Ok(all)
    }

    /// See [`Node::flush`](crate::Node::flush).
    pub fn flush(&self, timeout: Duration) -> Result<Untaken, Error> {
        /// The first wait for the peers. Each later one is twice as long, up to [`SLICE`].
        const FIRST: Duration = Duration::from_micros(50);
        self.check_usable()?;
        let deadline = self.now() + timeout;
        let (mut since, mut slice) = (Vec::new(), FIRST);
        loop {
            let untaken = self.untaken(true, &mut since)?;
            let now = self.now();
            if untaken.is_final() || now >= deadline {
                return Ok(untaken);
            }
            self.wait_until(deadline.min(now + slice), &|| false)?;
            slice = SLICE.min(slice * 2);
        }
    }

    /// The values that were sent and not taken. `since` has the losses of each path at the first
    /// call, and is empty before.
    pub(crate) fn untaken(&self, asks: bool, since: &mut Vec<u64>) -> Result<Untaken, Error> {
        let mut all = Untaken::default();
        for (at, path) in self.paths.all().enumerate() {
            let (untaken, losses) = path.untaken(asks, since.get(at).copied())?;
            if at == since.len() {
                since.push(losses);
            }
            all.edges.extend(untaken.edges);
        }
        let outstanding = self.outstanding.load(Ordering::Relaxed) as u64;
        all.moving = outstanding.saturating_sub(all.waiting()) as usize;
        self.with_tables(|tables| all.add_local(tables.local.values().map(|(key, _)| key)));
        all.sort();
        Ok(all)
    }

    /// Whether everything that has left is at the hosts of its peers.
    pub(crate) fn is_flushed(&self) -> Result<bool, Error> {
        self.paths.all().try_fold(true, |all, path| Ok(all && path.is_flushed()?))
    }

    /// See [`Node::progress`](crate::Node::progress).
    pub fn progress(&self) -> Result<usize, Error> {
        self.check_home()?;
        self.sweep();
        self.check_usable()?;
        self.paths.all().map(RemotePath::progress).sum()
    }

    /// Makes progress once on one path, and ends late waits of the local table.
    pub(super) fn progress_on(&self, path: &dyn RemotePath) -> Result<(), Error> {
        self.sweep();
        path.progress().map(drop)
    }

    /// Runs `call`, on the callback thread if this thread runs a waker. That thread may hold a
    /// poller, and a command could find the queue of the poller full.
    pub(super) fn outside_pollers(&self, call: impl FnOnce() + Send + 'static) {
        if is_waking() { self.executor.run(call) } else { call() }
    }

    /// Makes progress until `done`, which any thread may cause, or `deadline`; returns `done`.
    pub(crate) fn wait_until(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        self.check_home()?;
        loop {
            self.sweep();
            self.check_usable()?;
            let now = self.now();
            if self.paths.first().wait(deadline.min(now + SLICE), done)? {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
        }
    }

    /// The time of the clock that deadlines refer to.
    pub(crate) fn now(&self) -> Time {
        self.paths.first().now()
    }

    /// Fails every call, pending and future, with this error.
    pub(crate) fn end(&self, error: Error) {
        self.losses.end(error.clone());
        self.sweep();
        // The first end gives the reason, here as in the pollers.
        self.paths.all().for_each(|path| path.end(error.clone()));
        self.nudge();
    }

    /// Whether a peer is linked, or why it is lost.
    pub fn peer_status(&self, peer: PeerIndex) -> PeerStatus {
        match self.check_home() {
            Ok(()) => self.losses.status(peer),
            Err(error) => PeerStatus::Lost(None, error),
        }
    }

    /// Calls `body` with the tables, which it may not ask for again.
    #[inline]
    pub(super) fn with_tables<R>(&self, body: impl FnOnce(&mut Tables) -> R) -> R {
        // A panic can't leave the tables half changed: no user code runs under the lock.
        self.tables.with(body)
    }

    /// The error of calls by a handle of a step, if the step has ended. An earlier abort counts.
    #[cold]
    pub(super) fn step_end(&self, step: u64, number: u64) -> Option<Error> {
        let state = self.with_tables(|tables| {
            let state = tables.steps.state_of(step, number);
            if state == StepState::Live {
                // Another step had its flag when this one began.
                self.flags.set(number);
            }
            state
        });
        match state {
            StepState::Live | StepState::NotBegun => None,
            StepState::Aborted(status) => Some(Error::Aborted { step: step.into(), status }),
            StepState::Gone => Some(Error::StepGone { step: step.into() }),
        }
    }

    /// Wakes waiters. The caller has released the tables.
    pub(super) fn wake(&self, wakeups: DeferredWakeups) {
        wakeups.wake();
        self.nudge();
    }

    pub(super) fn cancel_local(&self, key: &TensorKey, cancel: &Cancel) {
        let wakeups = self.with_tables(|tables| tables.local.cancel(key, cancel));
        self.wake(wakeups);
    }

    /// Ends those receives of a batch on edges within the process that still wait.
    pub(super) fn cancel_all_local(&self, edges: &[Edge], step: u64, cancel: &CancelAll) {
        let is_local = |edge: &Edge| matches!(edge.source, EdgeEnd::Here(_));
        let mut calls = (cancel.first..).zip(edges).filter(|(_, edge)| is_local(edge)).peekable();
        if calls.peek().is_none() {
            return;
        }
        let mut all = DeferredWakeups::default();
        self.with_tables(|tables| {
            calls.for_each(|(id, edge)| all.append(tables.local.cancel(&edge.key(step), &cancel.one(id))));
        });
        self.wake(all);
    }

    pub(super) fn abort(&self, step: u64, status: Status) {
        let error = Error::Aborted { step: step.into(), status: status.clone() };
        let aborted = self.with_tables(|tables| {
            self.flags.clear(tables.steps.abort(step, status.clone())?);
            Some(tables.local.end_step(step, &error))
        });
        let Some(wakeups) = aborted else { return };
        self.wake(wakeups);
        self.change(&StepChange::Aborted { steps: step..=step, status });
    }

    /// See [`Sequence::abort_from`].
    pub(super) fn abort_from(&self, base: u64, step: u64, status: Status) -> Result<(), Error> {
        let aborted = self.with_tables(|tables| {
            let undeclared = || Error::UndeclaredSequence { base: base.into() };
            let steps = tables.steps.steps_of(base).ok_or_else(undeclared)?;
            if !steps.contains(&step) {
                let (first, last) = ((*steps.start()).into(), (*steps.end()).into());
                return Err(Error::NotOfSequence { step: step.into(), first, last });
            }
            let steps = step..=*steps.end();
            let mut wakeups = DeferredWakeups::default();
            for (step, number) in tables.steps.abort_all(&steps, &status) {
                self.flags.clear(number);
                let error = Error::Aborted { step: step.into(), status: status.clone() };
                wakeups.append(tables.local.end_step(step, &error));
            }
            Ok((steps, wakeups))
        });
        let (steps, wakeups) = aborted?;
        self.wake(wakeups);
        self.change(&StepChange::Aborted { steps, status });
        Ok(())
    }

    /// Passes the change of a step to every poller.
    fn change(&self, change: &StepChange) {
        for path in self.paths.all() {
            path.step(change.clone());
        }
    }

    fn nudge(&self) {
        self.paths.all().for_each(RemotePath::nudge);
    }

    /// Waits on `path` until `is_done`, the end of every call, or `deadline`. Returns whether one
    /// of the first two is the case.
    pub(super) fn wait(
        &self,
        path: &dyn RemotePath,
        deadline: Time,
        is_done: &dyn Fn() -> bool,
    ) -> Result<bool, Error> {
        let done = || is_done() || self.losses.broken.get().is_some();
        loop {
            // A waiter in the local table may have an earlier deadline, also one that begins later.
            let next = self.next_deadline.get();
            path.wait(deadline.min(next), &|| done() || self.next_deadline.get() < next)?;
            self.sweep();
            if done() || self.now() >= deadline {
                return Ok(done());
            }
        }
    }

    /// Fails the waiters of the local table whose deadline has passed, or all of them once every
    /// call has ended. Takes no lock if there is nothing to fail.
    fn sweep(&self) {
        let wakeups = match self.losses.broken.get() {
            None if self.is_local_deadline_due() => {
                self.with_tables(|tables| tables.local.expire(self.now()))
            }
            None => return,
            Some(error) if !self.losses.swept.swap(true, Ordering::AcqRel) => {
                self.with_tables(|tables| tables.local.fail_all(error))
            }
            Some(_) => return,
        };
        self.wake(wakeups);
    }

    /// Whether the deadline of a waiter of the local table may have passed. A sweep ends it.
    #[inline]
    pub(super) fn is_local_deadline_due(&self) -> bool {
        let next = self.next_deadline.get();
        next != Time::NEVER && self.now() >= next
    }

    /// Where a receive wants its tensor.
    #[inline]
    pub(super) fn destination(&self, into: Option<TensorMut>) -> Destination {
        match into {
            Some(given) => Destination::Into(given),
            None if self.settings.borrow => Destination::Borrow,
            None => Destination::Alloc,
        }
    }

    /// The fatal loss or the stop that has ended every call.
    pub(crate) fn broken(&self) -> Option<Error> {
        self.losses.broken.get().cloned()
    }

    /// Fails in a forked child. Called before any lock is taken: the thread that holds the lock may
    /// not exist in the child.
    pub(super) fn check_home(&self) -> Result<(), Error> {
        if self.fork_guard.in_child() { Err(Error::Forked) } else { Ok(()) }
    }

    /// Whether [`Context::check_usable`] finds nothing.
    #[inline]
    pub(super) fn is_usable(&self) -> bool {
        !self.fork_guard.in_child() && self.losses.broken.get().is_none()
    }

    pub(super) fn check_usable(&self) -> Result<(), Error> {
        self.check_home()?;
        match self.losses.broken.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Whether a peer is linked. Takes no lock.
    #[inline]
    pub(super) fn is_up(&self, peer: PeerIndex) -> bool {
        self.losses.is_up(peer)
    }

    #[inline]
    pub(super) fn check_peer(&self, peer: PeerIndex) -> Result<(), Error> {
        if self.is_up(peer) { Ok(()) } else { self.check_lost_peer(peer) }
    }
}

#[cold]
fn not_begun(id: u64, worker: &str, error: BeginError) -> Error {
    match error {
        BeginError::Gone => Error::StepGone { step: id.into() },
        BeginError::Taken { owner } => {
            Error::StepTaken { step: id.into(), owner: owner.to_string(), other: worker.to_owned() }
        }
    }
}
