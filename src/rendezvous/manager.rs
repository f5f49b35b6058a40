//! The rendezvous of a process: makes edges and steps, ends them, and makes progress.
#![allow(clippy::disallowed_types)] // the process's own tables, once per step

use super::Error;
use super::edge::{Edge, EdgeEnd};
use super::ended::Ends;
use super::foreign::Foreign;
use super::local::{DeferredWakeups, Local, LocalWaiter};
use super::losses::{Losses, PeerStatus};
use super::path::{Cancel, CancelAll, LinkTag, Members, Paths, PeerIndex, RemotePath, StepChange};
use super::remote::{BatchReceive, BatchSend};
use super::reuse::{Lists, Reused};
use super::sequence::Sequence;
use super::step::Step;
use super::steps::{BeginError, Steps};
use super::waiter::Outcome;
use crate::engine::{Executor, OneshotPool};
use crate::fabric::Registrar;
use crate::link::{TensorKey, Value};
use crate::memory::{ForkGuard, Pool};
use crate::telemetry::Snapshot;
use crate::wire::{EdgeName, Status, TaskId, Time};
use foldhash::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a wait for something that nobody announces sleeps at most.
const SLICE: Duration = Duration::from_millis(1);

/// How the rendezvous behaves.
#[derive(Clone, Debug)]
pub struct RendezvousSettings {
    /// Values sent that nobody has asked for: more are refused.
    pub max_outstanding_sends: u32,
    /// How long a receive waits if its caller does not say.
    pub recv_timeout: Duration,
    /// How long a call that gave up waits for its peer's word.
    pub cancel_grace: Duration,
    /// Whether a receive without a destination borrows where the fabric can.
    pub borrow: bool,
}

/// The rendezvous of a process.
pub struct Rendezvous {
    pub(super) shared: Arc<Shared>,
}

/// What all steps, edges and calls share.
pub struct Shared {
    pub(super) me: TaskId,
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
    pub(super) next_call: AtomicU64,
    next_expiry: AtomicU64,
    tables: Mutex<Tables>,
    losses: Arc<Losses>,
}

/// The lists in which batches are handed over.
pub(super) struct BatchLists {
    pub sends: Lists<BatchSend>,
    pub receives: Lists<BatchReceive>,
    /// One for each path.
    pub send_parts: Lists<Reused<BatchSend>>,
    pub receive_parts: Lists<Reused<BatchReceive>>,
    /// Within the process.
    pub values: Lists<(TensorKey, Value)>,
    pub waiters: Lists<(TensorKey, LocalWaiter)>,
}

impl BatchLists {
    /// For batches that are split among so many paths.
    fn new(paths: usize) -> Self {
        // Those of some threads' batches at a time, and of one for each path.
        const BATCHES: usize = 16;
        let parts = BATCHES + 2 * paths;
        BatchLists {
            sends: Lists::new(parts),
            receives: Lists::new(parts),
            send_parts: Lists::new(BATCHES),
            receive_parts: Lists::new(BATCHES),
            values: Lists::new(BATCHES),
            waiters: Lists::new(BATCHES),
        }
    }
}

/// The process's own tables. Held for moments, never while user code runs.
#[derive(Default)]
pub(super) struct Tables {
    pub steps: Steps,
    pub local: Local,
    /// Edges with a [`Standing`](super::Standing), with the first steps of their sequences.
    pub standing: HashSet<TensorKey>,
    ends: Ends,
}

impl Rendezvous {
    /// The rendezvous of `me`, with paths to the other members.
    #[allow(clippy::too_many_arguments)] // each is a different thing that the node has
    pub fn new(
        me: TaskId,
        members: Members,
        paths: impl Into<Paths>,
        pool: Pool,
        executor: Executor,
        outstanding: Arc<AtomicUsize>,
        losses: Arc<Losses>,
        settings: RendezvousSettings,
    ) -> Self {
        let paths = paths.into();
        let shared = Shared {
            me,
            members,
            settings,
            calls: OneshotPool::new(4096),
            lists: BatchLists::new(paths.count()),
            paths,
            executor,
            pool,
            foreign: Arc::default(),
            fork_guard: ForkGuard::new(),
            outstanding,
            next_call: AtomicU64::new(0),
            next_expiry: AtomicU64::new(Time::NEVER.as_nanos()),
            tables: Mutex::default(),
            losses,
        };
        Rendezvous { shared: Arc::new(shared) }
    }

    /// Has memory outside the pool registered by `registrar` when it is sent. The first one counts.
    pub fn register_by(&self, registrar: Arc<dyn Registrar>) {
        self.shared.foreign.register_by(registrar);
    }

    /// What the calls have counted, which is not a poller's: tensors outside the pool.
    pub fn counted(&self) -> Snapshot {
        self.shared.foreign.counted()
    }

    /// An edge between two devices of the cluster, in frame 0 and iteration 0.
    ///
    /// # Errors
    /// If a name is not well-formed (specification 2.2), or a device is of a task that the cluster
    /// does not have.
    pub fn edge(&self, source: &str, destination: &str, name: &str) -> Result<Edge, Error> {
        self.shared.check_home()?;
        let name = EdgeName::new(source, destination, name)?;
        let source = self.end_of(&name, name.source_task())?;
        let destination = self.end_of(&name, name.destination_task())?;
        Ok(Edge { name: Arc::new(name), frame: 0, iteration: 0, source, destination })
    }

    fn end_of(&self, edge: &EdgeName, task: &TaskId) -> Result<EdgeEnd, Error> {
        if *task == self.shared.me {
            return Ok(EdgeEnd::Here);
        }
        match self.shared.members.index(task) {
            Some(peer) => Ok(EdgeEnd::Peer(peer)),
            None => Err(Error::UnknownTask {
                edge: edge.to_string(),
                task: task.clone(),
                members: format!("{:?}", self.shared.members.all()),
            }),
        }
    }

    /// Begins a step for a worker, or finds it.
    ///
    /// # Errors
    /// If it belongs to another worker, or was cleaned up.
    pub fn step(&self, id: u64, worker: &Arc<str>) -> Result<Step, Error> {
        self.shared.check_usable()?;
        let (live, ended) = {
            let mut tables = self.shared.tables();
            let is_new = tables.steps.begin(id, worker).map_err(|error| match error {
                BeginError::Gone => Error::StepGone { step: id },
                BeginError::Taken { owner } => {
                    Error::StepTaken { step: id, owner: owner.to_string(), other: worker.to_string() }
                }
            })?;
            (is_new.then(|| tables.steps.live_count()), tables.ends.of(id))
        };
        if let Some(live) = live {
            if Steps::is_warning_due(live) {
                tracing::warn!(
                    live,
                    "steps have begun and were not cleaned up: clean each up when every member is done with it"
                );
            }
            self.shared.change(&StepChange::Begun { step: id, worker: worker.clone() });
        }
        Ok(Step { id, shared: self.shared.clone(), ended })
    }

    /// Declares a run of steps. Every id from `base` on belongs to it, up to the base of the next
    /// sequence: ids that are drawn at random must lie below every base. One that lies in a
    /// sequence works as any other, but after its cleanup it is remembered for ever, not among the
    /// last 4,096 (specification 2.5), and ids below the first step of the sequence that is not
    /// cleaned up are gone. So base 0 leaves no room for random ids at all.
    pub fn sequence(&self, base: u64) -> Sequence {
        if self.shared.check_home().is_ok() {
            self.shared.tables().steps.sequence(base);
            self.shared.change(&StepChange::Sequence { base });
        }
        Sequence { base }
    }

    /// Ends a step for good: its values are dropped, its pending calls fail, and it does not come
    /// back.
    pub fn cleanup(&self, step: u64) {
        self.shared.cleanup(step);
    }

    /// The steps that have begun and were not cleaned up, in no order.
    pub fn live_steps(&self) -> Vec<u64> {
        match self.shared.check_home() {
            Ok(()) => self.shared.tables().steps.live().collect(),
            Err(_) => Vec::new(),
        }
    }

    /// Makes progress once. Returns how many completions there were.
    ///
    /// # Errors
    /// If everything has ended, with what ended it.
    pub fn progress(&self) -> Result<usize, Error> {
        self.shared.check_home()?;
        self.shared.sweep();
        self.shared.check_usable()?;
        self.shared.paths.all().map(RemotePath::progress).sum()
    }

    /// Makes progress, or lets a thread make it, until `done` or until `deadline`; `done` may
    /// become true by anything. Returns whether it is done.
    ///
    /// # Errors
    /// If everything has ended, with what ended it.
    pub fn wait_until(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        self.shared.check_home()?;
        loop {
            self.shared.sweep();
            self.shared.check_usable()?;
            let now = self.shared.now();
            if self.shared.paths.first().wait(deadline.min(now + SLICE), done)? {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
        }
    }

    /// The time now, on the clock of the deadlines.
    pub fn now(&self) -> Time {
        self.shared.now()
    }

    /// Ends every call, pending and future, with this error.
    pub fn end(&self, error: Error) {
        self.shared.losses.end(error.clone());
        self.shared.sweep();
        // The first to end everything gives the reason, here as in the pollers.
        self.shared.paths.all().for_each(|path| path.end(error.clone()));
        self.shared.nudge();
    }

    /// How it stands with a peer.
    pub fn peer_status(&self, peer: PeerIndex) -> PeerStatus {
        match self.shared.check_home() {
            Ok(()) => self.shared.losses.status(peer),
            Err(error) => PeerStatus::Lost(LinkTag { incarnation: 0, generation: 0 }, error),
        }
    }

    /// Keeps everything as it is for good: for a forked child, in which nothing of it may be taken
    /// apart.
    pub fn abandon(&self) {
        std::mem::forget(self.shared.clone());
    }
}

impl Shared {
    pub(super) fn tables(&self) -> MutexGuard<'_, Tables> {
        // A panic can't leave the tables half changed: nothing in there runs user code.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells waiters what they get, outside the lock.
    pub(super) fn wake(&self, wakeups: DeferredWakeups) {
        wakeups.wake();
        self.nudge();
    }

    /// Ends a step for good: its values are dropped, its pending calls fail, and it does not come
    /// back.
    pub(super) fn cleanup(&self, step: u64) {
        if self.check_home().is_err() {
            return;
        }
        let error = Error::StepGone { step };
        let wakeups = {
            let mut tables = self.tables();
            if !tables.steps.cleanup(step) {
                return;
            }
            // An abort before it is the better reason.
            tables.ends.retire(step, error.clone());
            tables.local.end_step(step, &error)
        };
        self.wake(wakeups);
        self.change(&StepChange::CleanedUp { step });
    }

    /// Whether any edge has a [`Standing`](super::Standing).
    pub(super) fn has_standing(&self) -> bool {
        !self.tables().standing.is_empty()
    }

    pub(super) fn cancel_local(&self, key: &TensorKey, cancel: &Cancel) {
        let wakeups = self.tables().local.cancel(key, cancel);
        self.wake(wakeups);
    }

    pub(super) fn cancel_all_local(&self, cancel: &CancelAll) {
        let wakeups = self.tables().local.cancel_all(cancel);
        self.wake(wakeups);
    }

    pub(super) fn abort(&self, step: u64, status: Status) {
        let error = Error::Aborted { step, status: status.clone() };
        let wakeups = {
            let mut tables = self.tables();
            if !tables.steps.abort(step, status.clone()) {
                return;
            }
            tables.ends.end(step, error.clone());
            tables.local.end_step(step, &error)
        };
        self.wake(wakeups);
        self.change(&StepChange::Aborted { step, status });
    }

    /// Tells every poller what has become of a step.
    fn change(&self, change: &StepChange) {
        for path in self.paths.all() {
            path.step(change.clone());
        }
    }

    fn nudge(&self) {
        self.paths.all().for_each(RemotePath::nudge);
    }

    pub(super) fn now(&self) -> Time {
        self.paths.first().now()
    }

    /// Waits on this path until something is done, or everything has ended. Returns whether it is
    /// so.
    pub(super) fn wait(
        &self,
        path: &dyn RemotePath,
        deadline: Time,
        is_done: &dyn Fn() -> bool,
    ) -> Result<bool, Error> {
        let done = || is_done() || self.losses.broken.get().is_some();
        loop {
            // Others wait in the local table, and their time may be over first.
            let next = Time::from_nanos(self.next_expiry.load(Ordering::Relaxed));
            let is_over = path.wait(deadline.min(next), &done)?;
            self.sweep();
            if is_over || done() || self.now() >= deadline {
                return Ok(done());
            }
        }
    }

    /// Ends what the local table holds beyond its time, or beyond everything's end. Takes no lock
    /// while there is nothing to end.
    fn sweep(&self) {
        let wakeups = match self.losses.broken.get() {
            None => {
                let next = self.next_expiry.load(Ordering::Relaxed);
                if next == Time::NEVER.as_nanos() || self.now() < Time::from_nanos(next) {
                    return;
                }
                let mut tables = self.tables();
                let wakeups = tables.local.expire(self.now());
                self.expiry_changed(&tables);
                wakeups
            }
            Some(error) if !self.losses.swept.swap(true, Ordering::AcqRel) => {
                self.tables().local.fail_all(error)
            }
            Some(_) => return,
        };
        self.wake(wakeups);
    }

    /// Notes when the local table must be looked at next.
    pub(super) fn expiry_changed(&self, tables: &Tables) {
        self.next_expiry.store(tables.local.next_deadline().as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn broken(&self) -> Option<Error> {
        self.losses.broken.get().cloned()
    }

    /// Whether this is the process that it was made in. To be asked before any lock is taken: in a
    /// forked child the thread that holds it may not be there.
    pub(super) fn check_home(&self) -> Result<(), Error> {
        if self.fork_guard.in_child() { Err(Error::Forked) } else { Ok(()) }
    }

    pub(super) fn check_usable(&self) -> Result<(), Error> {
        self.check_home()?;
        match self.losses.broken.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub(super) fn check_peer(&self, peer: PeerIndex) -> Result<(), Error> {
        if self.losses.is_up(peer) {
            return Ok(());
        }
        match self.losses.status(peer) {
            PeerStatus::Up(_) => Ok(()),
            PeerStatus::Lost(_, error) => Err(error),
            PeerStatus::Absent => Err(Error::NotConnected { peer: self.members.task(peer).clone() }),
        }
    }
}
