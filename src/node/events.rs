//! [`Node::events`]: joins, losses and returns of the other members, for programs that watch them.

use super::process::Node;
use crate::engine::Executor;
use crate::matching::LostPeer;
use crate::memory::ForkGuard;
use crate::rendezvous::Error;
use crate::sync::catch_panic;
use crate::wire::{Generation, Incarnation, LossCause, TaskId};
use futures_core::Stream;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

/// Events that a node keeps for readers. A reader that falls further behind misses some.
const KEPT: usize = 256;

/// Events of one member that the log has in this time, at most. A link that breaks again and again
/// does not fill the disk.
const MAX_LOGGED: usize = 20;
const LOG_TIME: Duration = Duration::from_secs(10);

/// Flight records that the log has of a lost link, at most.
const LOGGED_RECORDS: usize = 16;

/// A member has joined, was lost, or has come back.
///
/// ```
/// use tensorwire::{NodeEvent, NodeEventKind};
///
/// /// What an operator wants to read.
/// fn line(event: &NodeEvent) -> String {
///     match &event.kind {
///         NodeEventKind::Lost(error) => format!("{error}: {}", event.advice()),
///         _ => event.to_string(),
///     }
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NodeEvent {
    /// Counts the events of this node, from 1 on.
    pub number: u64,
    /// Events right before this one that this reader has missed, as it was too slow.
    pub missed: u64,
    /// The time of the host's clock.
    pub at: SystemTime,
    /// The same, after the start of the node.
    pub since_start: Duration,
    /// The member that it is about.
    pub peer: TaskId,
    /// Which life of the member.
    pub incarnation: Incarnation,
    /// The number of the link with it.
    pub generation: Generation,
    /// What has happened.
    pub kind: NodeEventKind,
}

/// What has happened to a member.
///
/// ```
/// use tensorwire::{Node, NodeEventKind};
///
/// /// The losses that this node has seen so far.
/// fn losses(node: &Node) -> usize {
///     let mut events = node.events();
///     let seen = std::iter::from_fn(|| events.try_next());
///     seen.filter(|event| matches!(event.kind, NodeEventKind::Lost(_))).count()
/// }
/// # let node = tensorwire::internals::doc_node();
/// # assert_eq!(losses(&node), 0);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum NodeEventKind {
    /// Its first link with this node is up.
    Joined,
    /// It is linked again, after a loss or with a new link. The incarnation tells a new life.
    Returned,
    /// It was lost, with the error of the calls that need it. [`LossCause::is_clean`] tells a stop
    /// with nothing wrong.
    Lost(Error),
}

impl NodeEvent {
    /// What the operator of this node can do about it; empty if there is nothing to do.
    pub fn advice(&self) -> &'static str {
        match &self.kind {
            NodeEventKind::Lost(Error::PeerLost { cause, .. }) => advice(cause),
            _ => "",
        }
    }
}

/// An event that the log is to have.
pub(super) struct LoggedEvent {
    event: NodeEvent,
    /// The log leaves out the next events of the member.
    is_last: bool,
}

impl fmt::Display for LoggedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.event.fmt(f)?;
        if self.is_last {
            write!(
                f,
                "; its next events are left out for up to {LOG_TIME:?}, and Node::events has the last ones"
            )?;
        }
        Ok(())
    }
}

impl LoggedEvent {
    /// Logs a loss in one line: when, who, why, and what to do. Its flight records follow in
    /// another one, if something was wrong.
    pub(super) fn log(&self, me: &TaskId, lost: &LostPeer, is_fatal: bool) {
        let values = lost.values;
        let mut line = format!("{me}: {self}");
        if values > 0 {
            line += &format!("; at most {values} values that had left for it are lost");
        }
        if is_fatal {
            line += "; every call fails from now on (peer_loss = fail_all)";
        }
        match self.event.advice() {
            "" => tracing::info!("{line}"),
            advice => {
                tracing::warn!("{line}. What to do: {advice}");
                if let Some(flight) = &lost.flight {
                    let first = flight.records.len().saturating_sub(LOGGED_RECORDS);
                    let last: Vec<String> = flight.records[first..].iter().map(ToString::to_string).collect();
                    tracing::warn!("{me}: the last records of that link: {}", last.join("; "));
                }
            }
        }
    }
}

fn advice(cause: &LossCause) -> &'static str {
    match cause {
        LossCause::Died(_) => {
            "read its own log, and start it again unless it runs: it is linked again by itself"
        }
        LossCause::Left(_) if cause.is_clean() => "",
        LossCause::Left(_) => "mend the cause in its words, and start it again",
        LossCause::Silent { .. } => {
            "look whether its process is stopped, its host swaps or the network to it is down; raise \
             silence_bound if it may be silent for longer"
        }
        LossCause::Protocol(_) => "run the same release on all members; if they do, report it with both logs",
        LossCause::Network(_) => {
            "look at the device, its port and the switch; the link is made again by itself"
        }
        LossCause::Local(_) => "raise the limit in the cause, for this process",
        LossCause::Closed(_) => "read the log of the peer; the link is made again by itself",
    }
}

/// One line: when, who and why.
impl fmt::Display for NodeEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeEvent { since_start, peer, incarnation, generation, kind, .. } = self;
        write!(f, "{:.3} s after the start: ", since_start.as_secs_f64())?;
        match kind {
            NodeEventKind::Joined => {
                write!(f, "{peer} joined (incarnation {incarnation}, link {generation})")
            }
            NodeEventKind::Returned => {
                write!(f, "{peer} came back (incarnation {incarnation}, link {generation})")
            }
            NodeEventKind::Lost(Error::PeerLost { cause, .. }) => {
                write!(f, "{peer} was lost (incarnation {incarnation}, link {generation}): {cause}")
            }
            NodeEventKind::Lost(error) => write!(f, "{error}"),
        }
    }
}

/// The events of a node, and those who read them.
pub(super) struct EventHistory {
    started: Instant,
    state: Mutex<HistoryState>,
    changed: Condvar,
}

#[derive(Default)]
struct HistoryState {
    kept: VecDeque<NodeEvent>,
    /// Events so far.
    count: u64,
    /// Members that have joined once.
    joined: HashSet<TaskId>,
    /// When the last events of each member were logged, since the start.
    logged: HashMap<TaskId, Vec<Duration>>,
    /// Tasks that wait for the next event, by the number of their stream.
    wakers: HashMap<u64, Waker>,
    /// Streams so far.
    streams: u64,
    callbacks: Vec<Arc<EventCallback>>,
    /// Runs callbacks and wakers.
    executor: Option<Executor>,
    is_over: bool,
}

impl HistoryState {
    /// Notes an event of a member for the log, and returns how many others the log has of late.
    /// With [`MAX_LOGGED`] it gets no more.
    fn log(&mut self, peer: &TaskId, since_start: Duration) -> usize {
        let logged = self.logged.entry(peer.clone()).or_default();
        logged.retain(|at| *at + LOG_TIME > since_start);
        let recent = logged.len();
        if recent < MAX_LOGGED {
            logged.push(since_start);
        }
        recent
    }
}

type EventFunction = Box<dyn FnMut(NodeEvent) + Send>;

struct EventCallback {
    is_scheduled: AtomicBool,
    /// The events that it has got or missed, and the function.
    reader: Mutex<(u64, EventFunction)>,
}

/// A peer and one of its links, for an event.
pub(super) struct EventPeer {
    pub peer: TaskId,
    pub incarnation: Incarnation,
    pub generation: Generation,
}

impl EventHistory {
    pub fn new() -> Arc<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(EventHistory { started: Instant::now(), state, changed })
    }

    fn state(&self) -> MutexGuard<'_, HistoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs callbacks and wakers on this executor from now on.
    pub fn run_on(&self, executor: &Executor) {
        self.state().executor = Some(executor.clone());
    }

    /// A link is up. Returns what the log is to have. `None` if the node stops: that is no news.
    pub fn up(self: &Arc<Self>, of: EventPeer) -> Option<LoggedEvent> {
        let is_first = self.state().joined.insert(of.peer.clone());
        self.add(of, if is_first { NodeEventKind::Joined } else { NodeEventKind::Returned })
    }

    /// A peer was lost. Returns what the log is to have. `None` if the node stops: peers close
    /// their links then.
    pub fn lost(self: &Arc<Self>, of: EventPeer, error: Error) -> Option<LoggedEvent> {
        self.add(of, NodeEventKind::Lost(error))
    }

    fn add(self: &Arc<Self>, of: EventPeer, kind: NodeEventKind) -> Option<LoggedEvent> {
        let EventPeer { peer, incarnation, generation } = of;
        let (at, since_start) = (SystemTime::now(), self.started.elapsed());
        let mut state = self.state();
        if state.is_over {
            return None;
        }
        state.count += 1;
        let number = state.count;
        let recent = state.log(&peer, since_start);
        let event = NodeEvent { number, missed: 0, at, since_start, peer, incarnation, generation, kind };
        if state.kept.len() == KEPT {
            state.forget_one();
        }
        state.kept.push_back(event.clone());
        self.tell(state);
        (recent < MAX_LOGGED).then(|| LoggedEvent { event, is_last: recent + 1 == MAX_LOGGED })
    }

    /// There are no more events.
    pub fn end(self: &Arc<Self>) {
        let mut state = self.state();
        state.is_over = true;
        // A callback may hold handles of the node, so it is dropped, and not under the lock.
        let (callbacks, executor) = (std::mem::take(&mut state.callbacks), state.executor.clone());
        self.tell(state);
        if let Some(executor) = executor {
            executor.run(move || drop(callbacks));
        }
    }

    /// Wakes the readers. Their code runs on the executor: this thread may hold a poller.
    fn tell(self: &Arc<Self>, mut state: MutexGuard<'_, HistoryState>) {
        let wakers = std::mem::take(&mut state.wakers);
        let callbacks = state.callbacks.clone();
        let executor = state.executor.clone();
        drop(state);
        self.changed.notify_all();
        let Some(executor) = executor else { return };
        if !wakers.is_empty() {
            executor.run(move || wakers.into_values().for_each(wake));
        }
        callbacks.into_iter().for_each(|callback| self.schedule(&executor, callback));
    }

    fn schedule(self: &Arc<Self>, executor: &Executor, callback: Arc<EventCallback>) {
        if callback.is_scheduled.swap(true, Ordering::AcqRel) {
            return;
        }
        let history = self.clone();
        executor.run(move || {
            // Before the look: an event that comes after it schedules the next one.
            callback.is_scheduled.store(false, Ordering::Release);
            let mut reader = callback.reader.lock().unwrap_or_else(PoisonError::into_inner);
            let (next, call) = &mut *reader;
            loop {
                let Some(event) = history.state().take(next) else { return };
                let number = event.number;
                if catch_panic(|| call(event)).is_none() {
                    tracing::error!("a callback for events of the node panicked at event {number}");
                }
            }
        });
    }
}

/// Wakes a task. A panic of its waker costs no other task its wake-up.
fn wake(waker: Waker) {
    if catch_panic(|| waker.wake()).is_none() {
        tracing::error!("the waker of a task that waits for events of the node panicked");
    }
}

impl HistoryState {
    /// Forgets the oldest event of a member that has most, so that no member hides another one.
    fn forget_one(&mut self) {
        if let Some(at) = self.least_missed() {
            self.kept.remove(at);
        }
    }

    /// Where the oldest event of a member with most events is.
    fn least_missed(&self) -> Option<usize> {
        let mut counts: HashMap<&TaskId, usize> = HashMap::new();
        for event in &self.kept {
            *counts.entry(&event.peer).or_default() += 1;
        }
        let most = counts.values().max();
        self.kept.iter().position(|event| counts.get(&event.peer) == most)
    }

    /// The first event that is kept behind the first `seen` ones.
    fn take(&mut self, seen: &mut u64) -> Option<NodeEvent> {
        let at = self.kept.partition_point(|event| event.number <= *seen);
        let event = self.kept.get(at)?.clone();
        let missed = event.number - 1 - *seen;
        *seen = event.number;
        Some(NodeEvent { missed, ..event })
    }
}

impl Node {
    /// Joins, losses and returns of the other members: those that there were since the start, and
    /// then those to come. Any number of readers may exist, and each gets every event.
    ///
    /// The result is an iterator that waits for the next event. [`Events::wait`] has a timeout,
    /// [`Events::then`] calls a function, and [`Events::stream`] is for `async` code.
    ///
    /// The node keeps 256 events. A further one takes the place of the oldest event of the member
    /// that has most. So a reader that falls behind misses some, and [`NodeEvent::missed`] counts
    /// them. A reader does not make progress: in inline mode a death is seen by a call of the
    /// program, or else by a heartbeat.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # let node = tensorwire::internals::doc_node();
    /// let mut events = node.events();
    /// assert!(events.wait(Duration::from_millis(1)).is_none(), "it has no peers");
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| events.for_each(|event| println!("{event}; {}", event.advice())));
    ///     node.stop() // ends the iterator
    /// })?;
    /// # Ok::<(), tensorwire::NodeError>(())
    /// ```
    pub fn events(&self) -> Events {
        Events { history: self.events.clone(), seen: 0, fork_guard: self.fork_guard }
    }
}

/// A reader of the [events of a node](Node::events). As an iterator it waits for the next event,
/// and ends with the node.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let events = node.events();
/// node.stop()?;
/// assert_eq!(events.count(), 0, "a node without peers has no events");
/// # Ok::<(), tensorwire::NodeError>(())
/// ```
pub struct Events {
    history: Arc<EventHistory>,
    /// Events that were read or missed.
    seen: u64,
    fork_guard: ForkGuard,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("seen", &self.seen).finish_non_exhaustive()
    }
}

impl Events {
    /// The next event, if there is one already.
    pub fn try_next(&mut self) -> Option<NodeEvent> {
        self.wait(Duration::ZERO)
    }

    /// The next event, which may take `timeout` to come. `None` after the timeout, or if the node
    /// has stopped and there are no more.
    pub fn wait(&mut self, timeout: Duration) -> Option<NodeEvent> {
        if self.fork_guard.in_child() {
            return None;
        }
        let end = Instant::now().checked_add(timeout);
        let mut state = self.history.state();
        loop {
            if let Some(event) = state.take(&mut self.seen) {
                return Some(event);
            }
            let left =
                end.map_or(Duration::from_secs(3600), |end| end.saturating_duration_since(Instant::now()));
            if state.is_over || left.is_zero() {
                return None;
            }
            state = self.history.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the node has stopped. Events that were not read yet can still be.
    pub fn is_over(&self) -> bool {
        self.fork_guard.in_child() || self.history.state().is_over
    }

    /// Has the callback thread call `callback` with each event, until the node stops. A callback
    /// that blocks holds up the callbacks of receives. A panic in it costs that event alone.
    pub fn then(self, callback: impl FnMut(NodeEvent) + Send + 'static) {
        if self.fork_guard.in_child() {
            return;
        }
        let reader = Mutex::new((self.seen, Box::new(callback) as _));
        let callback = Arc::new(EventCallback { is_scheduled: AtomicBool::new(false), reader });
        let mut state = self.history.state();
        if state.is_over {
            return;
        }
        state.callbacks.push(callback.clone());
        let executor = state.executor.clone();
        drop(state);
        if let Some(executor) = executor {
            self.history.schedule(&executor, callback);
        }
    }

    /// The same events as a `Stream` of the crate `futures-core`, for any executor.
    pub fn stream(self) -> EventStream {
        if self.fork_guard.in_child() {
            return EventStream { events: self, number: 0 };
        }
        let mut state = self.history.state();
        state.streams += 1;
        let number = state.streams;
        drop(state);
        EventStream { events: self, number }
    }
}

impl Iterator for Events {
    type Item = NodeEvent;

    fn next(&mut self) -> Option<NodeEvent> {
        self.wait(Duration::MAX)
    }
}

/// The [events of a node](Node::events) as a `Stream`. It ends with the node.
///
/// ```
/// # use std::pin::Pin;
/// # use std::task::{Context, Poll, Waker};
/// use futures_core::Stream;
/// # let node = tensorwire::internals::doc_node();
/// let mut events = node.events().stream();
/// let mut context = Context::from_waker(Waker::noop());
/// assert!(Pin::new(&mut events).poll_next(&mut context).is_pending());
/// node.stop()?;
/// assert!(matches!(Pin::new(&mut events).poll_next(&mut context), Poll::Ready(None)));
/// # Ok::<(), tensorwire::NodeError>(())
/// ```
#[derive(Debug)]
pub struct EventStream {
    events: Events,
    number: u64,
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if self.events.fork_guard.in_child() {
            return;
        }
        // A waker is code of the program, so it is dropped after the lock.
        let waker = self.events.history.state().wakers.remove(&self.number);
        drop(waker);
    }
}

impl Stream for EventStream {
    type Item = NodeEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<NodeEvent>> {
        let EventStream { events: Events { history, seen, fork_guard }, number } = &mut *self;
        if fork_guard.in_child() {
            return Poll::Ready(None);
        }
        let mut state = history.state();
        if let Some(event) = state.take(seen) {
            return Poll::Ready(Some(event));
        }
        if state.is_over {
            return Poll::Ready(None);
        }
        let earlier = state.wakers.insert(*number, context.waker().clone());
        drop(state);
        drop(earlier);
        Poll::Pending
    }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
