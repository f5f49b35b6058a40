//! The flight recorder of a link: its last events that are no values.
//!
//! The path of a value never comes here. Whoever records reads the clock, so only what is rare is
//! recorded.

use crate::wire::{Generation, Incarnation, StepId, TaskId, Time};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Records of a link that are kept, but those of waits. Memory for them is allocated with the link.
pub const FLIGHT_RECORDS: usize = 128;

/// Records of waits that are kept: places of their own, as waits may be many and displace the rest.
const WAIT_RECORDS: usize = 8;

/// The clock of flight recorders.
pub type FlightClock = Arc<dyn Fn() -> Time + Send + Sync>;

/// What has happened on a link. An edge is named by its number, as in
/// [`EdgeReport::number`](crate::EdgeReport::number).
///
/// ```
/// use tensorwire::FlightEvent;
/// let event = FlightEvent::NeedCame { edge: 3, step: 7.into() };
/// assert_eq!(event.to_string(), "the peer needs a value of edge 3, step 7");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlightEvent {
    /// The link was attached to its poller, which has sent a ping.
    Attached,
    /// A ping has gone both ways; over gRPC, both sides are ready.
    Up,
    /// Connections of the link broke and were made again.
    Repaired,
    /// The link has ended.
    Down,
    /// This side has announced an edge on which it receives.
    Announced {
        /// The number of the edge.
        edge: u32,
        /// Values that the peer may send.
        limit: u64,
    },
    /// The peer has announced an edge on which it receives.
    AnnouncementCame {
        /// The number of the edge.
        edge: u32,
        /// Values that this side may send.
        limit: u64,
    },
    /// This side has refused to serve an edge of the peer's.
    Refused {
        /// The number of the edge.
        edge: u32,
    },
    /// The peer has refused to serve an edge.
    RefusalCame {
        /// The number of the edge.
        edge: u32,
    },
    /// A value waits, as its edge is out of credit or not announced. A wait of less than 10 ms may
    /// leave no record.
    WaitBegan {
        /// The step of the value.
        step: StepId,
        /// The number of the edge; `None` if it has none yet.
        edge: Option<u32>,
    },
    /// Values that waited have left.
    WaitEnded {
        /// Values that have left at once.
        values: u32,
    },
    /// A receive waits for a value that other steps hold back: this side has asked for it.
    NeedSent {
        /// The number of the edge.
        edge: u32,
        /// The step of the receive.
        step: StepId,
    },
    /// The same of the peer.
    NeedCame {
        /// The number of the edge.
        edge: u32,
        /// The step of the receive.
        step: StepId,
    },
    /// This side gives a number back, which it has announced.
    Retired {
        /// The number of the edge.
        edge: u32,
    },
    /// The peer gives a number back.
    RetirementCame {
        /// The number of the edge.
        edge: u32,
    },
    /// Steps have ended here, by an abort: the peer was told.
    Aborted {
        /// The lowest id of them.
        first: StepId,
        /// The highest id of them.
        last: StepId,
    },
    /// Steps were aborted at the peer.
    AbortCame {
        /// The lowest id of them.
        first: StepId,
        /// The highest id of them.
        last: StepId,
    },
    /// All edges were announced again after a repair of the link.
    Resumed,
    /// Over gRPC: no receive waits any more for the answer to a request, and the peer has heard it.
    GaveUp {
        /// The number of the request.
        request: u64,
    },
    /// Over gRPC: the peer has given a request up.
    GiveUpCame {
        /// The number of the request.
        request: u64,
    },
    /// Over gRPC: the call of a request failed. Its receives have the error.
    RequestFailed {
        /// The number of the request.
        request: u64,
    },
}

/// An event of a link, with its time.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// for log in node.flight_logs()? {
///     for record in &log.records {
///         println!("{:?}: {}", record.at, record.event);
///     }
/// }
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlightRecord {
    /// Time since the node has started its pollers, or its tensor calls.
    pub at: Duration,
    /// What has happened.
    pub event: FlightEvent,
}

/// The last records of one link.
pub struct FlightRecorder {
    link: LastRecords,
    waits: LastRecords,
    /// Records so far.
    count: u64,
    clock: FlightClock,
}

/// The last records of some events, each with its number among all.
struct LastRecords {
    records: Box<[(u64, FlightRecord)]>,
    /// Records so far.
    count: usize,
}

impl LastRecords {
    fn new(kept: usize) -> Self {
        let empty = FlightRecord { at: Duration::ZERO, event: FlightEvent::Attached };
        LastRecords { records: vec![(0, empty); kept].into(), count: 0 }
    }

    fn add(&mut self, number: u64, record: FlightRecord) {
        self.records[self.count % self.records.len()] = (number, record);
        self.count += 1;
    }

    fn kept(&self) -> &[(u64, FlightRecord)] {
        &self.records[..self.count.min(self.records.len())]
    }
}

impl FlightRecorder {
    /// A recorder whose clock says the time of each record.
    pub fn new(clock: FlightClock) -> Self {
        let (link, waits) = (LastRecords::new(FLIGHT_RECORDS), LastRecords::new(WAIT_RECORDS));
        FlightRecorder { link, waits, count: 0, clock }
    }

    /// Records an event. The oldest record of a wait makes room for that of another one, and the
    /// oldest of the others for any other.
    #[cold]
    pub fn record(&mut self, event: FlightEvent) {
        let at = (self.clock)().since(Time::ZERO);
        let records = match event {
            FlightEvent::WaitBegan { .. }
            | FlightEvent::WaitEnded { .. }
            | FlightEvent::GaveUp { .. }
            | FlightEvent::GiveUpCame { .. } => &mut self.waits,
            _ => &mut self.link,
        };
        records.add(self.count, FlightRecord { at, event });
        self.count += 1;
    }

    /// The records, oldest first, and how many other ones there were.
    pub fn records(&self) -> (Vec<FlightRecord>, u64) {
        let mut kept = [self.link.kept(), self.waits.kept()].concat();
        kept.sort_unstable_by_key(|(number, _)| *number);
        let dropped = self.count - kept.len() as u64;
        (kept.into_iter().map(|(_, record)| record).collect(), dropped)
    }
}

impl fmt::Debug for FlightRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlightRecorder").field("count", &self.count).finish_non_exhaustive()
    }
}

impl fmt::Display for FlightEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlightEvent::Attached => f.write_str("the link is attached, and a ping was sent"),
            FlightEvent::Up => f.write_str("both sides are ready"),
            FlightEvent::Repaired => f.write_str("connections broke and were made again"),
            FlightEvent::Down => f.write_str("the link has ended"),
            FlightEvent::Announced { edge, limit } => {
                write!(f, "edge {edge} is announced to the peer, which may send {limit} values")
            }
            FlightEvent::AnnouncementCame { edge, limit } => {
                write!(f, "the peer announces edge {edge}, and takes {limit} values")
            }
            FlightEvent::Refused { edge } => write!(f, "edge {edge} of the peer is refused"),
            FlightEvent::RefusalCame { edge } => write!(f, "the peer refuses edge {edge}"),
            FlightEvent::WaitBegan { step, edge: Some(edge) } => {
                write!(f, "a value of edge {edge}, step {step}, waits for credit")
            }
            FlightEvent::WaitBegan { step, edge: None } => {
                write!(f, "a value of step {step} waits for the announcement of its edge")
            }
            FlightEvent::WaitEnded { values } => write!(f, "values that waited leave: {values}"),
            FlightEvent::NeedSent { edge, step } => {
                write!(f, "a value of edge {edge}, step {step}, is asked for")
            }
            FlightEvent::NeedCame { edge, step } => {
                write!(f, "the peer needs a value of edge {edge}, step {step}")
            }
            FlightEvent::Retired { edge } => write!(f, "the number of edge {edge} is given back"),
            FlightEvent::RetirementCame { edge } => {
                write!(f, "the peer gives the number of edge {edge} back")
            }
            FlightEvent::Aborted { first, last } => write!(f, "steps {first} to {last} are aborted here"),
            FlightEvent::AbortCame { first, last } => {
                write!(f, "steps {first} to {last} are aborted at the peer")
            }
            FlightEvent::Resumed => f.write_str("all edges are announced again"),
            FlightEvent::GaveUp { request } => write!(f, "request {request} is given up"),
            FlightEvent::GiveUpCame { request } => write!(f, "the peer gives request {request} up"),
            FlightEvent::RequestFailed { request } => write!(f, "the call of request {request} failed"),
        }
    }
}

/// One line, such as `1.234567 s: the peer announces edge 3, and takes 2 values`.
impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6} s: {}", self.at.as_secs_f64(), self.event)
    }
}

/// The last records of a link that is up, or of the last one with a peer that has ended.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// node.flight_logs()?.iter().for_each(|log| println!("{log}"));
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FlightLog {
    /// The peer of the link.
    pub peer: TaskId,
    /// Which life of the peer.
    pub incarnation: Incarnation,
    /// The number of the link.
    pub generation: Generation,
    /// Oldest first.
    pub records: Vec<FlightRecord>,
    /// Records that are gone: those of waits are the first to go.
    pub dropped: u64,
}

/// One line for the link, and one for each record.
impl fmt::Display for FlightLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FlightLog { peer, incarnation, generation, records, dropped } = self;
        write!(f, "link {generation} with {peer} (incarnation {incarnation}), {dropped} records are gone")?;
        records.iter().try_for_each(|record| write!(f, "\n  {record}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn the_last_records_are_kept_in_order_and_the_others_are_counted() {
        let ticks = AtomicU64::new(0);
        let clock = Arc::new(move || Time::from_nanos(ticks.fetch_add(1, Ordering::Relaxed)));
        let mut recorder = FlightRecorder::new(clock);
        assert_eq!(recorder.records(), (Vec::new(), 0));
        for edge in 0..FLIGHT_RECORDS as u32 + 3 {
            recorder.record(FlightEvent::Retired { edge });
        }
        let (records, dropped) = recorder.records();
        assert_eq!((records.len(), dropped), (FLIGHT_RECORDS, 3));
        for (at, record) in (3..).zip(&records) {
            assert_eq!(record.at, Duration::from_nanos(at));
            assert_eq!(record.event, FlightEvent::Retired { edge: at as u32 });
        }
    }

    #[test]
    fn waits_displace_earlier_waits_and_nothing_else() {
        let mut recorder = FlightRecorder::new(Arc::new(|| Time::ZERO));
        let begin = |number: usize| FlightEvent::WaitBegan { step: (number as u64).into(), edge: None };
        recorder.record(FlightEvent::Up);
        (0..FLIGHT_RECORDS * 2).for_each(|number| recorder.record(begin(number)));
        recorder.record(FlightEvent::Down);
        let (records, dropped) = recorder.records();
        let events: Vec<_> = records.iter().map(|record| record.event).collect();
        let waits = (FLIGHT_RECORDS * 2 - WAIT_RECORDS..FLIGHT_RECORDS * 2).map(begin);
        let expected: Vec<_> =
            [FlightEvent::Up].into_iter().chain(waits).chain([FlightEvent::Down]).collect();
        assert_eq!((events, dropped), (expected, (FLIGHT_RECORDS * 2 - WAIT_RECORDS) as u64));
    }
}
