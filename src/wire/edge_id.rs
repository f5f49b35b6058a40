//! The number of an edge on a link.

/// An edge on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EdgeId {
    /// The number that the receiver chose. The receiver uses it again after the edge was retired.
    pub number: u32,
    /// Grows by one, modulo 2^16, each time the receiver gives the number to an edge.
    pub generation: u16,
}
