//! [`WaitReports`]: which calls wait for which peers, and since when.

use super::{EdgeWait, Lanes, Matching, PeerIndex, Waiter, WaitingReceive};
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
    /// When values that begin to wait are looked for, not before.
    pub next_look: Time,
    /// The queues whose wait was logged, with its begin.
    logged_queues: HashMap<PeerIndex, Time>,
    /// Edges on which values wait, by peer and index. Some may have none any more.
    sends: HashMap<(PeerIndex, u32), SendWait>,
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
        let sends = HashMap::with_capacity_and_hasher(SENDS, RandomState::default());
        let report_after = bound.saturating_add(bound / 16);
        LongWaits { bound, report_after, sends, ..LongWaits::default() }
    }

    /// When a wait that began at this time is reported: a little late, so that one report has the
    /// waits that began together.
    #[inline]
    pub fn due(&self, begun: Time) -> Time {
        begun + self.report_after
    }

    /// When a receive that waits is late, or reported.
    #[inline]
    pub fn next_look(&self, waiter: &Waiter) -> Time {
        waiter.deadline.min(self.due(waiter.begun))
    }
}

impl Matching {
    /// A report of long waits that was not told yet.
    #[inline]
    pub fn take_long_waits(&mut self) -> Option<WaitReports> {
        self.long_waits.report.take()
    }

    /// Notes since when values wait on edges on which none waited before.
    fn note_new_sends(&mut self, lanes: &mut impl Lanes, now: Time) {
        self.long_waits.next_look = now + LOOK;
        for (peer, entry) in (0..).map(PeerIndex).zip(&self.peers) {
            for (index, edge) in entry.out.pending() {
                let Some((step, _)) = edge.waiting().next() else { continue };
                self.long_waits.sends.entry((peer, index)).or_insert_with(|| {
                    let (step, edge) = ((*step).into(), edge.id().map(|id| id.number));
                    lanes.record(peer, FlightEvent::WaitBegan { step, edge });
                    SendWait { since: now, is_logged: false }
                });
            }
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
        let edge = self.peers[peer.0 as usize].out.edge_at(index);
        let waits = edge.is_some_and(|edge| edge.waiting().len() > 0);
        !waits && self.long_waits.sends.remove(&(peer, index)).is_some()
    }

    /// Forgets edges on which no value waits any more.
    fn forget_ended_waits(&mut self) {
        let Matching { peers, long_waits, .. } = self;
        long_waits.sends.retain(|(peer, index), _| {
            let edge = peers[peer.0 as usize].out.edge_at(*index);
            edge.is_some_and(|edge| edge.waiting().len() > 0)
        });
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

    /// Whether a wait is to be reported.
    fn is_any_due(&self, queues: &[(PeerIndex, Time)], now: Time) -> bool {
        let LongWaits { sends, logged_queues, .. } = &self.long_waits;
        let due = |since: Time| self.long_waits.due(since) <= now;
        let mut receives = self.waiting.iter().map(|(_, receive)| &receive.waiter);
        receives.any(|waiter| !waiter.is_logged && due(waiter.begun))
            || sends.values().any(|wait| !wait.is_logged && due(wait.since))
            || queues.iter().any(|(peer, since)| due(*since) && logged_queues.get(peer) != Some(since))
    }

    /// What has waited for longer than the bound. A queue that nothing leaves may have no value.
    fn long_report(&mut self, lanes: &mut impl Lanes, now: Time) -> Option<WaitReports> {
        let mut report = self.waits(lanes, now, usize::MAX);
        report.waits.retain(|wait| wait.since >= self.long_waits.bound);
        report.cut(LOGGED);
        (!report.waits.is_empty()).then_some(report)
    }

    /// Makes a report of what has waited for too long, once for each call. Returns when the next
    /// one is due.
    #[cold]
    pub(super) fn watch_long_waits(&mut self, lanes: &mut impl Lanes, now: Time) -> Time {
        self.note_new_sends(lanes, now);
        self.forget_ended_waits();
        let bound = self.long_waits.bound;
        let is_long = |since: Time| since + bound <= now;
        let queues = self.stuck_queues(lanes, now);
        if self.is_any_due(&queues, now)
            && now >= self.long_waits.quiet_until
            && let Some(report) = self.long_report(lanes, now)
        {
            self.long_waits.report = Some(report);
            self.long_waits.quiet_until = now + bound;
            for (peer, since) in queues.iter().filter(|(_, since)| is_long(*since)) {
                if !lanes.queued(*peer).is_empty() {
                    self.long_waits.logged_queues.insert(*peer, *since);
                }
            }
            for (_, receive) in self.waiting.iter_mut().filter(|(_, receive)| is_long(receive.waiter.begun)) {
                receive.waiter.is_logged = true;
            }
            for wait in self.long_waits.sends.values_mut().filter(|wait| is_long(wait.since)) {
                wait.is_logged = true;
            }
        }
        let receives = self.waiting.iter().filter(|(_, receive)| !receive.waiter.is_logged);
        let receives = receives.map(|(_, receive)| receive.waiter.begun);
        let sends = self.long_waits.sends.values().filter(|wait| !wait.is_logged).map(|wait| wait.since);
        let next = receives.chain(sends).min().map_or(Time::NEVER, |since| self.long_waits.due(since));
        let next = if next == Time::NEVER { next } else { next.max(self.long_waits.quiet_until) };
        // The next look finds whether anything has left a queue.
        if queues.is_empty() { next } else { next.min(now + (bound / 16).max(LOOK)) }
    }
}
