//! Edge windows: the exchange of tensors as pure state machines.
//!
//! The receiver of an edge announces the edge to its sender with a number and a credit of W values.
//! The sender sends values up to that credit, each by one record. The receiver holds the values
//! that came in a window of W cells, and matches them with its receives. [`InEdges`] and
//! [`OutEdges`] are the two ends of one direction of a link; [`InEdge`] and [`OutEdge`] are the two
//! ends of one edge.
//!
//! ```text
//! receiver                                   sender
//!   ANNOUNCE (number, key, limit) ────────────▶ may send `limit` values
//!                 ◀──────────────────────────── RECORD (number, n, step, value)
//!   CREDIT (number, limit) ───────────────────▶ may send more: values were taken
//!   NEED (number, step) ──────────────────────▶ a receive waits, and no credit is left
//!                 ◀──────────────────────────── RECORD outside the credit
//!   RETIRE (number) ──────────────────────────▶ the edge is idle
//!                 ◀──────────────────────────── RETIRED: the number is free
//!                 ◀──────────────────────────── STEPS_OVER: no value of these steps follows
//!                 ◀──────────────────────────── FLUSH: the sender waits until its values are taken
//!   CREDIT (number, limit) ───────────────────▶ with each value that is taken
//! ```
//!
//! The messages of a link arrive in the order in which they were sent. A link that can lose them is
//! repaired. Both ends forget the messages under way. The receiver announces its edges again with
//! the number of values that came, and the sender continues from there.
//!
//! The machines have no I/O, clock, thread or memory. Values, keys, waiters and errors are opaque
//! to them. `docs/design/edge-windows.md` has the table of events, states and actions. The module
//! `explore` checks the machines in every interleaving of small cases.

mod in_edge;
mod in_edges;
mod message;
mod out_edge;
mod out_edges;
mod over_steps;
mod slab;
mod step_counts;
mod waiters;

#[cfg(test)]
mod explore;
#[cfg(test)]
mod hostile_tests;

pub use in_edge::{Arrived, Held, InEdge, InState};
pub use in_edges::{InEdges, Incoming};
pub use message::{Record, StepsOver, Taken, ToReceiver, ToSender};
pub use out_edge::OutEdge;
pub use out_edges::OutEdges;
pub use over_steps::REMEMBERED_RANGES;
pub use slab::Slab;
pub use step_counts::StepCounts;

/// The peer did something that the protocol does not allow. The link must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent {0}")]
pub struct WindowViolation(pub &'static str);

/// Bounds of the edges of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowOptions {
    /// Values that a new edge can hold.
    pub first_window: u64,
    /// Values that an edge can hold once it is used much: its window doubles each time that credit
    /// goes back.
    pub usual_window: u64,
    /// Values that an edge can hold at most.
    pub largest_window: u64,
    /// Values that all edges of a direction can hold together. Windows grow to the usual size in
    /// three quarters of it, and beyond that in one eighth. Once new edges have used the rest,
    /// further edges have no window and need each value.
    pub max_cells: u64,
    /// Edges that have a number at a time. An edge beyond that waits until another is retired.
    pub max_edges: u32,
    /// Edges that keep their number while they are idle. Beyond them, each announcement retires
    /// idle edges.
    pub kept_edges: u32,
    /// Values that the receivers of all edges may need at a time, which their sender remembers.
    pub max_needs: u32,
    /// Whether the link can lose messages between the same two lives, and is repaired then.
    pub resends: bool,
}
