//! The exchange of specification 3 as pure state machines: told what happened, they say what to do.
//!
//! No I/O, no clock, no threads, no memory: a machine never sees a tensor, only its size. One [`Receiver`]
//! exists for each request on the side that asked, one [`Sender`] on the side that was asked.
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
//!                 ◀─────────────────────────── CANCEL_ACK, behind everything posted for the request
//!   RETURN ───────────────────────────────────▶ nobody took the answer: its value is in line again
//! ```
//!
//! A receiver that validates says so in its request. Right behind each answer with bytes then comes `CHECKSUM`, and the value
//! counts as come only with that.
//!
//! Standing requests are requests that are made in advance, many at a time; what comes for one waits until it is claimed:
//!
//! ```text
//!   STANDING_REQUEST (one for each step) ────▶ each waits for its value
//!                 ◀─────────────────────────── write + immediate                   done, once claimed
//!                 ◀─────────────────────────── META_DATA_RESPONSE, write + immediate (changed, and fits)
//!                 ◀─────────────────────────── write + immediate that names meta-data told before
//! ```
//!
//! A value whose receiver is gone when it comes, or does not want it as it is, stays where it has come to; what goes back is
//! its place in line. So there is one line for a key, at the sender, and whoever is next in it gets the value that was sent first.

#[cfg(test)]
mod explore;
mod receiver;
mod sender;

pub use receiver::{Arrival, Receiver, ReceiverAction};
pub use sender::{CancelAction, Sender, SenderAnswer, SenderRequest, SenderValue};

/// The peer did what the exchange does not allow in this state; the link can't be trusted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} came for a request {state}")]
pub struct Violation {
    /// What came.
    pub what: &'static str,
    /// The state in which it came.
    pub state: &'static str,
}
