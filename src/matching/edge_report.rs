//! [`EdgeReports`]: which edges wait, and why.

use crate::link::EdgeKey;
use crate::wire::{EdgeSide, TaskId};
use std::fmt;

/// An edge of edge windows: its credit, the calls that wait on it, and its memory.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// for edge in node.edges(10)?.edges {
///     if let Some(reason) = edge.wait {
///         println!("'{}' with {} waits: {reason}", edge.name(), edge.peer());
///     }
/// }
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EdgeReport {
    pub(crate) key: EdgeKey,
    /// Whether this process sends or receives on the edge.
    pub side: EdgeSide,
    /// The number that the receiver has announced; `None` if the edge has none.
    pub number: Option<u32>,
    /// Values that may be sent without being asked for.
    pub credit: u64,
    /// Values that the receiver holds at most. The sender is not told of it: `None` there.
    pub window: Option<u64>,
    /// Values that were sent, or have come, since the announcement.
    pub values: u64,
    /// Values that wait at their sender, or receives that wait for values.
    pub waiting: usize,
    /// Values that have left the edge and wait in the queue of the link. 0 at the receiver.
    pub queued: usize,
    /// Values that have come and that no receive has taken. 0 at the sender.
    pub held: usize,
    /// Values that the receiver needs outside the credit.
    pub needed: usize,
    /// Why the values or receives wait; `None` if none waits.
    pub wait: Option<EdgeWait>,
    /// Memory of the edge in bytes: its name, its cells and its lists.
    pub bytes: u64,
    /// Bytes of the tensors that wait or are held.
    pub tensor_bytes: u64,
}

/// Why values or receives of an edge wait.
///
/// ```
/// use tensorwire::EdgeWait;
/// assert_eq!(EdgeWait::NoCredit.to_string(), "the edge is out of credit");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EdgeWait {
    /// The peer has no link.
    NoLink,
    /// The receiver has not announced the edge: it has not received on it yet, or the edge was
    /// idle.
    NotAnnounced,
    /// The receiver has as many values of the edge as its window holds.
    NoCredit,
    /// The peer takes messages of the link more slowly than they are sent, or has no place for
    /// another loan.
    NoRoom,
    /// As many edges have a number as can have one.
    NoNumber,
    /// The sender has not sent a value of the step.
    NoValue,
    /// The sender writes the value to its destination.
    Moving,
}

/// The edges of a node with its peers: those that wait first, then those with the most memory.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let reports = node.edges(10)?;
/// assert!(reports.edges.is_empty() && reports.left_out == 0, "it has no peers");
/// println!("{reports}");
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct EdgeReports {
    /// As many as were asked for, at most.
    pub edges: Vec<EdgeReport>,
    /// Edges beyond those.
    pub left_out: usize,
    /// Edges that wait, those left out included.
    pub waiting: usize,
    /// Memory of all edges in bytes, those left out included.
    pub bytes: u64,
    /// Memory in bytes of what the links keep for edges: meta-data, and tables of numbers.
    pub link_bytes: u64,
    /// Bytes of all tensors that wait or are held.
    pub tensor_bytes: u64,
}

impl EdgeReport {
    /// The task at the other end.
    pub fn peer(&self) -> &TaskId {
        match self.side {
            EdgeSide::Sender => self.key.name.destination_task(),
            EdgeSide::Receiver => self.key.name.source_task(),
        }
    }

    /// The device that sends.
    pub fn source(&self) -> &str {
        self.key.name.source()
    }

    /// The device that receives.
    pub fn destination(&self) -> &str {
        self.key.name.destination()
    }

    /// Tells edges of the same two devices apart.
    pub fn name(&self) -> &str {
        self.key.name.name()
    }

    /// Number of the loop, 0 outside of loops.
    pub fn frame(&self) -> u64 {
        self.key.frame
    }

    /// Pass of the loop, from 0.
    pub fn iteration(&self) -> u64 {
        self.key.iteration
    }

    fn rank(&self) -> (bool, usize, u64) {
        (self.wait.is_some(), self.waiting + self.queued, self.tensor_bytes + self.bytes)
    }
}

impl EdgeReports {
    /// Counts an edge, and keeps its report if it may be among the first `limit`.
    pub(crate) fn add(&mut self, report: EdgeReport, limit: usize) {
        self.waiting += usize::from(report.wait.is_some());
        self.bytes += report.bytes;
        self.tensor_bytes += report.tensor_bytes;
        self.edges.push(report);
        if self.edges.len() > limit.saturating_mul(2).max(64) {
            self.cut(limit);
        }
    }

    /// Adds the reports of another poller.
    pub(crate) fn append(&mut self, other: EdgeReports) {
        self.edges.extend(other.edges);
        self.left_out += other.left_out;
        self.waiting += other.waiting;
        self.bytes += other.bytes;
        self.link_bytes += other.link_bytes;
        self.tensor_bytes += other.tensor_bytes;
    }

    /// Sorts the reports, and keeps `limit` of them.
    pub(crate) fn cut(&mut self, limit: usize) {
        self.edges.sort_by_key(|report| std::cmp::Reverse(report.rank()));
        self.left_out += self.edges.len().saturating_sub(limit);
        self.edges.truncate(limit);
    }
}

impl fmt::Display for EdgeWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EdgeWait::NoLink => "the peer has no link",
            EdgeWait::NotAnnounced => "the receiver has not announced the edge",
            EdgeWait::NoCredit => "the edge is out of credit",
            EdgeWait::NoRoom => "the peer has no room for the link's messages or loans",
            EdgeWait::NoNumber => "all numbers of edges are taken",
            EdgeWait::Moving => "the sender writes the value",
            EdgeWait::NoValue => "the sender has not sent a value of the step",
        })
    }
}

/// One line, such as `to /job:w/task:1 'x' 0:0: 2 wait (the edge is out of credit), ...`.
impl fmt::Display for EdgeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = match self.side {
            EdgeSide::Sender => "to",
            EdgeSide::Receiver => "from",
        };
        let EdgeKey { name, frame, iteration } = &self.key;
        write!(f, "{direction} {} '{}' {frame}:{iteration}: ", self.peer(), name.name())?;
        if let Some(reason) = self.wait {
            write!(f, "{} wait ({reason}), ", self.waiting + self.queued)?;
        }
        write!(f, "credit {}, ", self.credit)?;
        match (self.window, self.side) {
            (Some(window), _) => write!(f, "window {window}, {} held, {} came", self.held, self.values)?,
            (None, _) => write!(f, "{} sent", self.values)?,
        }
        if self.needed > 0 {
            write!(f, ", {} needed", self.needed)?;
        }
        write!(f, ", {} bytes and {} of tensors", self.bytes, self.tensor_bytes)
    }
}

/// One line for each edge, and one with the sums.
impl fmt::Display for EdgeReports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.edges.iter().try_for_each(|report| writeln!(f, "{report}"))?;
        let EdgeReports { edges, left_out, waiting, bytes, link_bytes, tensor_bytes } = self;
        let count = edges.len() + left_out;
        write!(f, "{count} edges, {left_out} of them not shown: {waiting} wait, ")?;
        write!(f, "{bytes} bytes, {link_bytes} of their links, {tensor_bytes} of tensors")
    }
}
