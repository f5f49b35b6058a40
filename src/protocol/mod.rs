//! The exchange of specification 3 as pure state machines. A machine is told what happened and
//! returns what to do.
//!
//! The machines have no I/O, clock, thread or memory: a machine never sees a tensor, only its size.
//! One [`Receiver`] exists for each request on the requesting side, one [`Sender`] on the serving
//! side.
//!
//! ```text
//! receiver                                   sender
//!   TENSOR_REQUEST ───────────────────────────▶ look up, or wait for the value
//!                 ◀─────────────────────────── TENSOR_RESPONSE (small)            done
//!                 ◀─────────────────────────── write + immediate (meta-data known) done
//!                 ◀─────────────────────────── META_DATA_RESPONSE, loan            done
//!                 ◀─────────────────────────── META_DATA_RESPONSE (unknown or changed)
//!   TENSOR_RE_REQUEST ────────────────────────▶
//!                 ◀─────────────────────────── write + immediate                   done
//!                 ◀─────────────────────────── STASHED_RESPONSE (the value is here) done
//!   CANCEL ───────────────────────────────────▶ value stays or is put back
//!                 ◀─────────────────────────── CANCEL_ACK, after all posts for the request
//!   RETURN ───────────────────────────────────▶ nobody took the answer: its value is in line again
//! ```
//!
//! A receiver that validates asks for checksums in its request. `CHECKSUM` then follows each answer
//! with bytes, and the value counts as received only with its checksum.
//!
//! Standing requests are sent before their steps begin, many in one message. A value that comes for
//! one waits until a receive claims the request:
//!
//! ```text
//!   STANDING_REQUEST (one for each step) ────▶ each waits for its value
//!                 ◀─────────────────────────── write + immediate            done, once claimed
//!                 ◀─────────────────────────── META_DATA_RESPONSE, write + immediate (changed)
//!                 ◀─────────────────────────── write + immediate (meta-data known)
//! ```
//!
//! A value whose receiver is gone, or whose shape does not fit, stays in the stash of the receiving
//! side. Only its place in line goes back (`RETURN`). So each key has one line, at the sender, and
//! the next receive gets the value that was sent first.

#[cfg(test)]
mod explore;
mod receiver;
mod sender;
pub mod window;

pub use receiver::{Arrival, Receiver, ReceiverAction};
pub use sender::{CancelAction, Sender, SenderAnswer, SenderRequest, SenderValue};

/// The peer did something that the exchange does not allow in this state. The link must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} came for a request {state}")]
pub struct Violation {
    /// The arrival, in words.
    pub what: &'static str,
    /// The state of the request, in words.
    pub state: &'static str,
}
