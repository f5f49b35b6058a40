//! [`Untaken`]: values that were sent and that no receive is known to have taken.

use super::PeerIndex;
use crate::link::EdgeKey;
use crate::link::TensorKey;
use crate::wire::{EdgeName, TaskId};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// Values that a node has sent and that no receive is known to have taken.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// let edge = node.edge_to("worker", 0, "x")?;
/// node.step(1)?.send_dead(&edge)?;
/// let untaken = node.flush(Duration::ZERO)?;
/// println!("{untaken}");
/// assert_eq!((untaken.edges.len(), untaken.waiting(), untaken.left()), (1, 1, 0));
/// node.cleanup(1);
/// assert!(node.flush(Duration::ZERO)?.is_empty());
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Untaken {
    /// The edges with such values, in the order of their names.
    pub edges: Vec<UntakenEdge>,
    /// Values on their way out: over verbs and TCP those that are offered or being written, and
    /// sends of other threads that have begun. Offered values count as left, too.
    pub moving: usize,
}

/// The values of an edge that no receive is known to have taken.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// for edge in node.flush(std::time::Duration::ZERO)?.edges {
///     println!("'{}' to {}: {} wait, {} left", edge.name(), edge.peer(), edge.waiting, edge.left);
/// }
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UntakenEdge {
    pub(crate) key: EdgeKey,
    /// Values that wait here: for their receive, for credit, or for the return of the peer.
    pub waiting: u64,
    /// Values that have left. The peer holds them for a receive, or they are under way.
    pub left: u64,
    /// Values that had left for a life of the peer that ended while the call waited. They are lost
    /// unless that life had taken them.
    pub lost: u64,
    /// Whether the peer has a link. Without one the waiting values are for its next life.
    pub is_linked: bool,
}

impl UntakenEdge {
    pub(crate) fn new(key: EdgeKey, is_linked: bool) -> Self {
        UntakenEdge { key, waiting: 0, left: 0, lost: 0, is_linked }
    }

    /// The task that receives.
    pub fn peer(&self) -> &TaskId {
        self.key.name.destination_task()
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

    /// The place among the edges. Keys compare by their hashes first.
    fn place(&self) -> (&EdgeName, u64, u64) {
        (&self.key.name, self.key.frame, self.key.iteration)
    }

    /// Whether a receive can still take a value of the edge on the present link.
    fn is_open(&self) -> bool {
        self.is_linked && self.waiting + self.left > 0
    }
}

impl Untaken {
    /// Whether every value was taken, and none was lost during the call. The counter `values_lost`
    /// has the earlier losses, too.
    pub fn is_empty(&self) -> bool {
        self.edges.is_empty() && self.moving == 0
    }

    /// Values of all edges that wait here.
    pub fn waiting(&self) -> u64 {
        self.edges.iter().map(|edge| edge.waiting).sum()
    }

    /// Values of all edges that have left.
    pub fn left(&self) -> u64 {
        self.edges.iter().map(|edge| edge.left).sum()
    }

    /// Values of all edges that are lost.
    pub fn lost(&self) -> u64 {
        self.edges.iter().map(|edge| edge.lost).sum()
    }

    /// Whether no further value can be taken before a peer returns.
    pub(crate) fn is_final(&self) -> bool {
        self.moving == 0 && !self.edges.iter().any(UntakenEdge::is_open)
    }

    /// Adds values that wait within the process. Their keys have their steps.
    pub(crate) fn add_local<'a>(&mut self, values: impl Iterator<Item = &'a TensorKey>) {
        let mut edges = BTreeMap::new();
        for key in values {
            let edge =
                edges.entry(key.edge.clone()).or_insert_with_key(|key| UntakenEdge::new(key.clone(), true));
            edge.waiting += 1;
        }
        self.edges.extend(edges.into_values());
    }

    /// Sorts the edges. An edge that is there twice, because values of it were lost, becomes one.
    pub(crate) fn sort(&mut self) {
        self.edges.sort_by(|a, b| a.place().cmp(&b.place()));
        self.edges.dedup_by(|next, before| {
            let is_same = next.key == before.key;
            if is_same {
                before.waiting += next.waiting;
                before.left += next.left;
                before.lost += next.lost;
                before.is_linked &= next.is_linked;
            }
            is_same
        });
    }
}

/// One line, such as `/job:w/task:1 'x' 0:0: 2 wait, 1 left, 0 lost`.
impl fmt::Display for UntakenEdge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UntakenEdge { key: EdgeKey { name, frame, iteration }, waiting, left, lost, is_linked } = self;
        write!(f, "{} '{}' {frame}:{iteration}: {waiting} wait, {left} left", self.peer(), name.name())?;
        write!(f, ", {lost} lost{}", if *is_linked { "" } else { ", no link" })
    }
}

/// One line for each edge, and one with the sums.
impl fmt::Display for Untaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.edges.iter().try_for_each(|edge| writeln!(f, "{edge}"))?;
        let (waiting, left, lost) = (self.waiting(), self.left(), self.lost());
        write!(f, "{} edges: {waiting} wait, {left} left, {lost} lost, ", self.edges.len())?;
        write!(f, "{} move", self.moving)
    }
}

/// The values of an edge that were lost with a life of its receiver.
#[derive(Debug)]
pub(crate) struct LostEdge {
    pub peer: PeerIndex,
    pub key: EdgeKey,
    pub values: u64,
}

/// Values that were lost with lives of peers, the last ones by edge.
#[derive(Debug, Default)]
pub(crate) struct LostValues {
    edges: VecDeque<LostEdge>,
    /// The number of entries so far, modulo 2^64.
    count: u64,
}

/// Edges whose lost values are remembered.
const REMEMBERED: usize = 1 << 14;

impl LostValues {
    /// Notes the values of an edge.
    pub fn add(&mut self, lost: LostEdge) {
        if self.edges.len() == REMEMBERED {
            self.edges.pop_front();
        }
        self.edges.push_back(lost);
        self.count = self.count.wrapping_add(1);
    }

    /// The number of entries so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The entries after the first `count`, as far as they are remembered.
    pub fn since(&self, count: u64) -> impl Iterator<Item = &LostEdge> {
        let new = self.count.wrapping_sub(count).min(self.edges.len() as u64);
        self.edges.iter().rev().take(new as usize)
    }
}
