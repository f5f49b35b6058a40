//! [`Edge`]: where tensors are sent and received.

use crate::link::{EdgeKey, TensorKey, TensorKeyRef};
use crate::matching::{Members, PeerIndex};
use crate::wire::TaskId;
use foldhash::fast::FixedState;
use std::cmp::Ordering;
use std::fmt;
use std::hash::BuildHasher;

/// A place where the graph is cut: source, destination, name, frame and iteration.
///
/// An edge names tasks, not processes: it stays valid when a task's process is started again. It is
/// for the nodes of the task and the cluster whose node made it. Cheap to clone.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let edge = node.edge_to("worker", 0, "gradient")?;
/// assert_eq!(edge.name(), "gradient");
/// let in_loop = edge.at(0, 3);
/// assert_ne!(edge, in_loop);
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Edge {
    pub(super) key: EdgeKey,
    pub(super) source: EdgeEnd,
    pub(super) destination: EdgeEnd,
}

/// The process at one end of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum EdgeEnd {
    Here(NodeTag),
    Peer(PeerIndex),
}

/// Tells the nodes of a process apart by their tasks and clusters. An index of a peer has a meaning
/// for one of them alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeTag(u32);

impl NodeTag {
    pub fn of(me: &TaskId, members: &Members) -> Self {
        let hash = FixedState::with_seed(0).hash_one((me, members.all()));
        NodeTag(hash as u32)
    }
}

impl Edge {
    /// The same edge in another frame and iteration of a loop.
    #[must_use]
    pub fn at(&self, frame: u64, iteration: u64) -> Edge {
        let key = EdgeKey { name: self.key.name.clone(), frame, iteration };
        Edge { key, ..*self }
    }

    /// The device that sends.
    pub fn source(&self) -> &str {
        self.key.name.source()
    }

    /// The device that receives.
    pub fn destination(&self) -> &str {
        self.key.name.destination()
    }

    /// As given to `edge_to` or `edge_from`. Tells edges of the same two devices apart.
    pub fn name(&self) -> &str {
        self.key.name.name()
    }

    pub(super) fn key(&self, step: u64) -> TensorKey {
        self.key_ref(step).to_key()
    }

    #[inline]
    pub(super) fn key_ref(&self, step: u64) -> TensorKeyRef<'_> {
        TensorKeyRef { edge: &self.key, step }
    }
}

impl Ord for Edge {
    fn cmp(&self, other: &Self) -> Ordering {
        let place = |edge: &Edge| (edge.key.frame, edge.key.iteration, edge.source, edge.destination);
        self.key.name.cmp(&other.key.name).then_with(|| place(self).cmp(&place(other)))
    }
}

impl PartialOrd for Edge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EdgeKey { name, frame, iteration } = &self.key;
        write!(f, "{name} {frame}:{iteration}")
    }
}

impl fmt::Debug for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
