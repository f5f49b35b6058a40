//! [`Edge`]: where tensors are sent and received.

use crate::link::{TensorKey, TensorKeyRef};
use crate::matching::PeerIndex;
use crate::wire::EdgeName;
use std::fmt;
use std::sync::Arc;

/// A place where the graph is cut: source, destination, name, frame and iteration.
///
/// An edge names tasks, not processes: it stays valid when a task's process is started again. Cheap
/// to clone.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let edge = node.edge_to("worker", 0, "gradient")?;
/// assert_eq!(edge.name(), "gradient");
/// let in_loop = edge.at(0, 3);
/// assert_ne!(edge, in_loop);
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    pub(super) name: Arc<EdgeName>,
    pub(super) frame: u64,
    pub(super) iteration: u64,
    pub(super) source: EdgeEnd,
    pub(super) destination: EdgeEnd,
}

/// The process at one end of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum EdgeEnd {
    Here,
    Peer(PeerIndex),
}

impl Edge {
    /// The same edge in another frame and iteration of a loop.
    #[must_use]
    pub fn at(&self, frame: u64, iteration: u64) -> Edge {
        Edge { frame, iteration, ..self.clone() }
    }

    /// The device that sends.
    pub fn source(&self) -> &str {
        self.name.source()
    }

    /// The device that receives.
    pub fn destination(&self) -> &str {
        self.name.destination()
    }

    /// As given to `edge_to` or `edge_from`. Tells edges of the same two devices apart.
    pub fn name(&self) -> &str {
        self.name.name()
    }

    pub(super) fn key(&self, step: u64) -> TensorKey {
        self.key_ref(step).to_key()
    }

    #[inline]
    pub(super) fn key_ref(&self, step: u64) -> TensorKeyRef<'_> {
        TensorKeyRef { edge: &self.name, step, frame: self.frame, iteration: self.iteration }
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}:{}", self.name, self.frame, self.iteration)
    }
}

impl fmt::Debug for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
