//! [`WaitReports`]: which calls wait for which peers, and since when.

use super::{EdgeWait, Lanes, Matching, PeerEdges, PeerIndex, Waiter, WaitingReceive};
use crate::link::{EdgeKey, TensorKey};
use crate::telemetry::FlightEvent;
use crate::wire::{EdgeSide, StepId, TaskId, Time};
use foldhash::{HashMap, fast::RandomState};
use std::fmt;
use std::time::Duration;

/// Waits that the log has of one report, at most.
const LOGGED: usize = 8;

/// Between two looks for edges on which values have begun to wait: shorter waits leave no trace.
const LOOK: Duration = Duration::from_millis(10);

/// Edges on which values wait at a time for which memory is allocated at the start.
const SENDS: usize = 256;

/// A receive that waits for its value, or the values of an edge that wait for their receiver.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// let (step, edge) = (node.step(7)?, node.edge_to("worker", 0, "x")?);
/// let pending = step.receive(&edge).within(Duration::from_secs(10)).begin()?;
/// let waits = node.waits(10)?;
/// let wait = &waits.waits[0];
/// assert_eq!((wait.name(), wait.step, wait.peer()), ("x", 7.into(), node.task()));
/// println!("{wait}");
/// # drop(pending);
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaitReport {
    pub(crate) key: EdgeKey,
    /// Whether values wait here to be sent, or a receive waits for one.
    pub side: EdgeSide,
    /// The step of the receive, or of the oldest value.
    pub step: StepId,
    /// Receives that wait: 1. Or values that wait on the edge.
    pub calls: usize,
    /// For how long the receive has waited. Of values: for how long some have waited on this edge
    /// without a break. Of values in the send queue of the link: for how long nothing has left that
    /// queue. The poller looks at it each sixteenth of `hung_after`, but no more often than each
    /// 10 ms. Zero before the first look.
    pub since: Duration,
    /// Why the receive waits, or the values.
    pub wait: EdgeWait,
}

impl WaitReport {
    /// The task that is waited for.
    pub fn peer(&self) -> &TaskId {
        match self.side {
            EdgeSide::Sender => self.key.name.destination_task(),
            EdgeSide::Receiver => self.key.name.source_task(),
        }
    }

    /// The name of the edge.
    pub fn name(&self) -> &str {
        self.key.name.name()
    }

    /// A receive of this process that waits for a value.
    pub(crate) fn of_receive(key: &TensorKey, begun: Time, now: Time, wait: EdgeWait) -> Self {
        WaitReport {
            key: key.edge.clone(),
            side: EdgeSide::Receiver,
            step: key.step.into(),
            calls: 1,
            since: now.since(begun),
            wait,
        }
    }
}

/// What waits in a node, the longest wait first.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let waits = node.waits(10)?;
/// assert!(waits.waits.is_empty() && waits.left_out == 0, "nothing waits");
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct WaitReports {
    /// As many as were asked for, at most.
    pub waits: Vec<WaitReport>,
    /// Waits beyond those.
    pub left_out: usize,
}

impl WaitReports {
    /// Sorts the waits, and keeps `limit` of them.
    pub(crate) fn cut(&mut self, limit: usize) {
        self.waits.sort_by_key(|wait| std::cmp::Reverse(wait.since));
        self.left_out += self.waits.len().saturating_sub(limit);
        self.waits.truncate(limit);
    }

    /// Adds the waits of another poller.
    pub(crate) fn append(&mut self, other: WaitReports) {
        self.waits.extend(other.waits);
        self.left_out += other.left_out;
    }
}

/// One line, such as `receive of 'x' 0:0, step 7, from w/1: 12.3 s, the sender has not sent a value
/// of the step`.
impl fmt::Display for WaitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EdgeKey { name, frame, iteration } = &self.key;
        let (name, step, peer) = (name.name(), self.step, self.peer());
        match self.side {
            EdgeSide::Receiver => {
                write!(f, "receive of '{name}' {frame}:{iteration}, step {step}, from {peer}: ")?
            }
            EdgeSide::Sender => {
                let values = self.calls;
                write!(f, "{values} values of '{name}' {frame}:{iteration}, step {step} first, to {peer}: ")?;
            }
        }
        write!(f, "{:.1} s, {}", self.since.as_secs_f64(), self.wait)
    }
}

/// One line for each wait.
impl fmt::Display for WaitReports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, wait) in self.waits.iter().enumerate() {
            write!(f, "{}{wait}", if number == 0 { "" } else { "\n" })?;
        }
        match self.left_out {
            0 => Ok(()),
            left_out => write!(f, "\nand {left_out} more"),
        }
    }
}

/// Since when values wait on an edge.
#[derive(Debug)]
struct SendWait {
    since: Time,
    is_logged: bool,
}

/// What [`Matching`] knows of long waits.
#[derive(Debug, Default)]
pub(super) struct LongWaits {
    /// The setting `hung_after`.
    bound: Duration,
    /// The same, and a sixteenth of it.
    report_after: Duration,
    /// When [`Matching::watch_long_waits`] has something to do, whatever becomes of receives.
    pub next: Time,
    /// When edges on which values begin to wait are looked at, not before.
    next_look: Time,
    /// Edges on which values have begun to wait since the last look, by peer and index. An edge may
    /// be there more than once, and may have no value any more.
    begun: Vec<(PeerIndex, u32)>,
    /// The queues whose wait was logged, with its begin.
    logged_queues: HashMap<PeerIndex, Time>,
    /// Edges on which values wait, by peer and index. Some may have none any more.
    sends: HashMap<(PeerIndex, u32), SendWait>,
    /// A lower bound of `since` of all `sends` that were not logged.
    oldest_send: Time,
    /// The next report is not made before.
    quiet_until: Time,
    /// A report that the handler has not told yet.
    report: Option<WaitReports>,
}

impl LongWaits {
    /// Whether values wait on an edge since a time that is known.
    #[inline]
    pub fn has_sends(&self) -> bool {
        !self.sends.is_empty()
    }

    pub fn new(bound: Duration) -> Self {
        LongWaits {
            bound,
            report_after: bound.saturating_add(bound / 16),
            next: Time::NEVER,
            begun: Vec::with_capacity(SENDS),
            sends: HashMap::with_capacity_and_hasher(SENDS, RandomState::default()),
            oldest_send: Time::NEVER,
            ..LongWaits::default()
        }
    }

    /// When a wait that began at this time is reported: a little late, so that one report has the
    /// waits that began together.
    #[inline]
    pub fn due(&self, begun: Time) -> Time {
        begun + self.report_after
    }

    /// When a receive that waits is late, or reported.
    #[inline]
    pub fn due_of(&self, waiter: &Waiter) -> Time {
        waiter.deadline.min(self.due(waiter.begun))
    }

    /// When a wait that began at this time is reported: not before `quiet_until`.
    fn report_at(&self, begun: Time) -> Time {
        self.due(begun).max(self.quiet_until)
    }

    /// When a receive that waits is reported.
    pub fn report_of(&self, waiter: &Waiter) -> Time {
        if waiter.is_logged { Time::NEVER } else { self.report_at(waiter.begun) }
    }

    /// Whether the wait of a queue is to be reported.
    fn is_queue_due(&self, queues: &[(PeerIndex, Time)], now: Time) -> bool {
        let is_logged = |peer, since| self.logged_queues.get(peer) == Some(since);
        queues.iter().any(|(peer, since)| self.due(*since) <= now && !is_logged(peer, since))
    }

    /// Finds the oldest wait of values that was not logged.
    fn find_oldest_send(&mut self) {
        let waits = self.sends.values().filter(|wait| !wait.is_logged);
        self.oldest_send = waits.map(|wait| wait.since).min().unwrap_or(Time::NEVER);
    }
}

impl Matching {
    /// A report of long waits that was not told yet.
    #[inline]
    pub fn take_long_waits(&mut self) -> Option<WaitReports> {
        self.long_waits.report.take()
    }

    /// Something waits for a peer. A later look at the clock notes since when.
    #[cold]
    pub(super) fn note_wait(&mut self) {
        self.long_waits.next = self.long_waits.next.min(self.long_waits.next_look);
    }

    /// Values may have begun to wait on an edge.
    #[cold]
    pub(super) fn note_wait_on(&mut self, peer: PeerIndex, index: u32) {
        self.note_wait();
        let Matching { peers, long_waits: LongWaits { begun, .. }, .. } = self;
        if begun.len() == begun.capacity() {
            begun.sort_unstable();
            begun.dedup();
            begun.retain(|(peer, index)| first_waiting(peers, *peer, *index).is_some());
            // So that the next search is as far away as this one took.
            begun.reserve(begun.len().max(SENDS));
        }
        begun.push((peer, index));
    }

    /// Notes since when values wait on edges on which none waited before.
    fn note_new_sends(&mut self, lanes: &mut impl Lanes, now: Time) {
        let Matching { peers, long_waits, .. } = self;
        let LongWaits { next_look, begun, sends, oldest_send, .. } = long_waits;
        *next_look = now + LOOK;
        for (peer, index) in begun.drain(..) {
            let Some((step, edge)) = first_waiting(peers, peer, index) else { continue };
            sends.entry((peer, index)).or_insert_with(|| {
                lanes.record(peer, FlightEvent::WaitBegan { step, edge });
                *oldest_send = now.min(*oldest_send);
                SendWait { since: now, is_logged: false }
            });
        }
    }

    /// Values of an edge have left, on which some had waited.
    #[cold]
    pub(super) fn note_wait_end(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        index: u32,
        values: usize,
    ) {
        if self.forget_ended_wait(peer, index) {
            lanes.record(peer, FlightEvent::WaitEnded { values: values as u32 });
        }
    }

    /// Forgets since when values wait on an edge, if none do any more. Returns whether some had.
    pub(super) fn forget_ended_wait(&mut self, peer: PeerIndex, index: u32) -> bool {
        let waits = first_waiting(&self.peers, peer, index).is_some();
        !waits && self.long_waits.sends.remove(&(peer, index)).is_some()
    }

    /// Everything that waits, `limit` waits at most.
    pub fn waits(&mut self, lanes: &mut impl Lanes, now: Time, limit: usize) -> WaitReports {
        self.note_new_sends(lanes, now);
        let receives = self.waiting.iter().map(|(_, receive)| self.receive_report(receive, now));
        let mut reports = WaitReports { waits: receives.collect(), left_out: 0 };
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            let (queued, stuck) = (lanes.queued(peer), lanes.stuck_since(peer, now));
            for (index, key, edge) in self.peers[peer.0 as usize].out.indexed_edges() {
                let number = edge.id().map(|id| id.number);
                let queued = number.and_then(|number| queued.get(&number)).copied().unwrap_or_default();
                let waiting = edge.waiting().len();
                // What has left the edge is older than what waits on it.
                let first = edge.waiting().next().filter(|_| queued.count == 0);
                let Some(wait) = self.send_wait(peer, waiting, queued.count, number) else { continue };
                let of_edge = self.long_waits.sends.get(&(peer, index)).filter(|_| waiting > 0);
                let of_link = stuck.filter(|_| queued.count > 0);
                let since = of_edge.map(|wait| wait.since).into_iter().chain(of_link).min();
                reports.waits.push(WaitReport {
                    key: key.clone(),
                    side: EdgeSide::Sender,
                    step: first.map_or(queued.step, |(step, _)| *step).into(),
                    calls: waiting + queued.count,
                    since: now.since(since.unwrap_or(now)),
                    wait,
                });
            }
        }
        reports.cut(limit);
        reports
    }

    fn receive_report(&self, receive: &WaitingReceive, now: Time) -> WaitReport {
        let wait = match receive.landing {
            Some(_) => EdgeWait::Moving,
            None => self.receive_wait(receive.peer, receive.edge).unwrap_or(EdgeWait::NoValue),
        };
        WaitReport::of_receive(&receive.key, receive.waiter.begun, now, wait)
    }

    /// The peers whose send queues have a backlog, and since when nothing has left each queue.
    fn stuck_queues(&self, lanes: &mut impl Lanes, now: Time) -> Vec<(PeerIndex, Time)> {
        self.peer_indices().filter_map(|peer| Some((peer, lanes.stuck_since(peer, now)?))).collect()
    }

    /// Whether the wait of values is to be reported. All are looked at only once the oldest may be
    /// due.
    fn is_send_due(&mut self, now: Time) -> bool {
        let Matching { peers, long_waits, .. } = self;
        if long_waits.report_at(long_waits.oldest_send) > now {
            return false;
        }
        long_waits.sends.retain(|(peer, index), _| first_waiting(peers, *peer, *index).is_some());
        long_waits.find_oldest_send();
        long_waits.report_at(long_waits.oldest_send) <= now
    }

    /// What has waited for longer than the bound. A queue that nothing leaves may have no value.
    fn long_report(&mut self, lanes: &mut impl Lanes, now: Time) -> Option<WaitReports> {
        let mut report = self.waits(lanes, now, usize::MAX);
        report.waits.retain(|wait| wait.since >= self.long_waits.bound);
        report.cut(LOGGED);
        (!report.waits.is_empty()).then_some(report)
    }

    /// Makes a report of what has waited for too long, once for each call.
    #[cold]
    pub(super) fn watch_long_waits(&mut self, lanes: &mut impl Lanes, now: Time, is_receive_due: bool) {
        self.note_new_sends(lanes, now);
        let queues = self.stuck_queues(lanes, now);
        let is_due = is_receive_due || self.is_send_due(now) || self.long_waits.is_queue_due(&queues, now);
        if is_due
            && now >= self.long_waits.quiet_until
            && let Some(report) = self.long_report(lanes, now)
        {
            self.long_waits.report = Some(report);
            self.note_logged(lanes, &queues, now);
        }
        let long_waits = &mut self.long_waits;
        long_waits.next = long_waits.report_at(long_waits.oldest_send);
        if !queues.is_empty() {
            // The next look finds whether anything has left a queue.
            long_waits.next = long_waits.next.min(now + (long_waits.bound / 16).max(LOOK));
        }
    }

    /// Notes that a report was made of what has waited for longer than the bound.
    fn note_logged(&mut self, lanes: &mut impl Lanes, queues: &[(PeerIndex, Time)], now: Time) {
        let Matching { waiting, long_waits, next_deadline, .. } = self;
        let bound = long_waits.bound;
        let is_long = |since: Time| since + bound <= now;
        long_waits.quiet_until = now + bound;
        for (peer, since) in queues.iter().filter(|(_, since)| is_long(*since)) {
            if !lanes.queued(*peer).is_empty() {
                long_waits.logged_queues.insert(*peer, *since);
            }
        }
        *next_deadline = Time::NEVER;
        for (_, WaitingReceive { waiter, .. }) in waiting.iter_mut() {
            waiter.is_logged |= is_long(waiter.begun);
            let next = waiter.deadline.min(long_waits.report_of(waiter));
            *next_deadline = next.min(*next_deadline);
        }
        for wait in long_waits.sends.values_mut() {
            wait.is_logged |= is_long(wait.since);
        }
        long_waits.find_oldest_send();
    }
}

/// The step of the oldest value that waits on an edge, and the number of the edge.
fn first_waiting(peers: &[PeerEdges], peer: PeerIndex, index: u32) -> Option<(StepId, Option<u32>)> {
    let edge = peers[peer.0 as usize].out.edge_at(index)?;
    let (step, _) = edge.waiting().next()?;
    Some(((*step).into(), edge.id().map(|id| id.number)))
}
