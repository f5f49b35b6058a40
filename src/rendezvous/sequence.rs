//! [`Sequence`]: steps with consecutive ids.

use super::step::Step;
use crate::matching::Error;
use crate::wire::{Status, StepId};

/// Steps with the ids base, base + 1, and so on (specification 2.5a). The node remembers
/// without limit which steps of a sequence were cleaned up.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let sequence = node.sequence(1 << 40);
/// let step = node.step(sequence.step(0))?;
/// assert_eq!(step.id().get(), 1 << 40);
/// step.cleanup();
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[must_use = "a sequence does nothing until its steps are used"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    pub(super) base: u64,
}

impl Sequence {
    /// The id of step `n` of the sequence. The first step is step 0.
    ///
    /// # Panics
    /// If `base + n` exceeds 2^64 - 1.
    pub fn step(&self, n: u64) -> StepId {
        self.base.checked_add(n).expect("a sequence has no step beyond 2^64-1").into()
    }

    /// Aborts `step` and every later step of the sequence, as [`Step::abort`] does: those that have
    /// begun now, and each other one as it begins. So a trainer that fails ends all of its
    /// pipelined steps by one call.
    ///
    /// * [`Node::step`](crate::Node::step) returns a later step of the range as usual. Its calls
    ///   fail with [`Error::Aborted`] and `status`. It is cleaned up like any other step.
    /// * Peers that receive from this process hear of the range at once. Their receives fail with
    ///   the status, marked as derived, also for steps that this process never begins. The steps of
    ///   the peers go on: each task aborts its own.
    /// * A step that was aborted before keeps its status in this process.
    /// * The range ends where the next sequence begins that this node has declared. It stays
    ///   aborted for as long as the node lives, and so does a sequence that is declared in the
    ///   range later. A trainer that goes on after the failure declares the next sequence first, or
    ///   uses ids below the range.
    ///
    /// ```
    /// # let node = tensorwire::internals::doc_node();
    /// use tensorwire::{Code, Status};
    /// let sequence = node.sequence(1 << 40);
    /// let next = node.sequence(2 << 40);
    /// let steps = [0, 1, 2].map(|n| node.step(sequence.step(n)).unwrap());
    /// sequence.abort_from(&steps[1], Status::new(Code::DataLoss, "the loss is NaN"))?;
    /// let edge = node.edge_to("worker", 0, "loss")?;
    /// steps[0].send_dead(&edge)?;
    /// assert_eq!(steps[2].send_dead(&edge).unwrap_err().code(), Code::DataLoss);
    /// let later = node.step(sequence.step(7))?;
    /// assert_eq!(later.send_dead(&edge).unwrap_err().code(), Code::DataLoss);
    /// node.step(next.step(0))?.send_dead(&edge)?;
    /// # Ok::<(), tensorwire::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the status is OK, `step` is not of this sequence, or its node has not declared the
    /// sequence.
    pub fn abort_from(&self, step: &Step, status: Status) -> Result<(), Error> {
        step.check_abort(&status)?;
        step.context.abort_from(self.base, step.id, status)
    }
}
