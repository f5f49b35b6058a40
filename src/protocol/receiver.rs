//! The requesting side.

use super::Violation;
use crate::mutants::{Mutant, is_on};

/// Anything that can come for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A write with immediate: the whole tensor has landed.
    Landed {
        /// Bytes of the write.
        bytes: u64,
    },
    /// An immediate that says that the value is dead.
    Dead,
    /// A response with the tensor inside.
    Response,
    /// A loan of the tensor.
    Loan,
    /// The sender's meta-data: the request had no destination, or one that does not fit.
    Meta,
    /// The sender's meta-data, followed by a loan.
    MetaBeforeLoan,
    /// The sender's meta-data for a standing request, followed by the write.
    MetaBeforeWrite {
        /// Bytes of the tensor.
        bytes: u64,
    },
    /// `STASHED_RESPONSE`: the next value in line is in the stash of this side, where it was found.
    Stashed,
    /// `STASHED_RESPONSE` for a value that has left the stash.
    NotStashed,
    /// The checksum of the value that has come.
    Checksum,
    /// `ERROR_STATUS`: the sender has failed.
    Error,
    /// `CANCEL_ACK`: nothing more will come.
    CancelAck,
}

/// What to do about an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Nothing.
    None,
    /// Allocate a destination for the meta-data, then call [`Receiver::allocated`] or
    /// [`Receiver::no_room`].
    Allocate,
    /// Hand the value or the error to the waiter. The slot is free.
    Deliver,
    /// Keep the value in the slot until its checksum has come.
    AwaitChecksum,
    /// Keep the value or the error in the slot: no receive has claimed the standing request yet.
    StoreEarly,
    /// Hand the value or the error to the waiter. The slot stays in use until the cancel is
    /// acknowledged.
    DeliverAndKeep,
    /// Send the same `TENSOR_REQUEST` again: the last answer named a value that is gone.
    AskOnceMore,
    /// Send `CANCEL`.
    SendCancel,
    /// Tell the waiter that its call was cancelled. The slot is free.
    FinishCancelled,
    /// Nothing for the waiter, which has its answer. The slot is free.
    Free,
}

/// One request on the requesting side.
#[derive(Clone, Debug)]
pub struct Receiver {
    state: ReceiverState,
    claim: StandingClaim,
    /// Whether a value counts only with its checksum.
    validates: bool,
    /// Bytes of the tensor that a standing request names. Its destination may be longer.
    expected: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StandingClaim {
    /// A plain request, made for a waiter.
    Plain,
    /// A standing request without a waiter.
    Unclaimed,
    /// A standing request that a receive has claimed, or that was cancelled.
    Claimed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceiverState {
    /// Not sent yet.
    Unsent,
    /// Sent, with a destination of this many bytes granted, or none.
    Requested {
        granted: Option<u64>,
    },
    /// The meta-data has come; a destination is being allocated.
    Allocating,
    /// Sent again, with a destination of this many bytes.
    ReRequested {
        granted: u64,
    },
    /// Cancelled; the acknowledgement is still to come.
    Cancelling {
        granted: Option<u64>,
    },
    /// The value has come; its checksum is still to come.
    Unverified {
        cancelled: bool,
    },
    /// The value has come after the cancel; the acknowledgement is still to come.
    Overtaken,
    /// The value or the error is in the slot, until a receive claims it.
    Early,
    Done,
}

impl ReceiverState {
    fn name(self) -> &'static str {
        match self {
            ReceiverState::Unsent => "that was not sent yet",
            ReceiverState::Requested { .. } => "that waits for its first answer",
            ReceiverState::Allocating => "that is being allocated for",
            ReceiverState::ReRequested { .. } => "that waits for its write",
            ReceiverState::Cancelling { .. } => "that was cancelled",
            ReceiverState::Unverified { .. } => "whose value waits for its checksum",
            ReceiverState::Overtaken => "whose value had come",
            ReceiverState::Early => "whose answer had come",
            ReceiverState::Done => "that was done",
        }
    }
}

impl Receiver {
    /// A request that was just sent. `granted` is the length of its destination, if it has one.
    pub fn new(granted: Option<u64>) -> Self {
        Receiver {
            state: ReceiverState::Requested { granted },
            claim: StandingClaim::Plain,
            validates: false,
            expected: None,
        }
    }

    /// A standing request that was just sent, without a waiter. `granted` is the length of its
    /// destination, if it has one.
    pub fn standing(granted: Option<u64>) -> Self {
        Receiver {
            state: ReceiverState::Requested { granted },
            claim: StandingClaim::Unclaimed,
            validates: false,
            expected: None,
        }
    }

    /// The same request with `validates` set: whether a value with bytes counts only with its
    /// checksum.
    #[must_use]
    pub fn validated(self, validates: bool) -> Self {
        Receiver { validates, ..self }
    }

    /// Whether it asks for checksums.
    pub fn validates(&self) -> bool {
        self.validates
    }

    /// The same request for a tensor of `bytes` bytes. The destination is at least as long.
    #[must_use]
    pub fn expecting(self, bytes: u64) -> Self {
        Receiver { expected: Some(bytes), ..self }
    }

    /// Whether it is a standing request that was neither claimed nor cancelled.
    pub fn is_unclaimed(&self) -> bool {
        self.claim == StandingClaim::Unclaimed
    }

    /// Whether it was made as a standing request.
    pub fn is_standing(&self) -> bool {
        self.claim != StandingClaim::Plain
    }

    /// A receive claims the standing request. Returns [`ReceiverAction::Deliver`] if the value or
    /// the error is there.
    pub fn claim(&mut self) -> ReceiverAction {
        debug_assert!(self.is_unclaimed());
        self.claim = StandingClaim::Claimed;
        match self.state {
            ReceiverState::Early => self.done(),
            _ => ReceiverAction::None,
        }
    }

    /// A request that is not sent yet. [`Receiver::asked`] marks it as sent.
    pub fn unsent() -> Self {
        Receiver {
            state: ReceiverState::Unsent,
            claim: StandingClaim::Plain,
            validates: false,
            expected: None,
        }
    }

    /// Whether the request is not sent yet.
    pub fn is_unsent(&self) -> bool {
        self.state == ReceiverState::Unsent
    }

    /// The unsent request is sent now. `granted` is the length of its destination, if it has one.
    pub fn asked(&mut self, granted: Option<u64>) {
        debug_assert_eq!(self.state, ReceiverState::Unsent);
        self.state = ReceiverState::Requested { granted };
    }

    /// Handles an arrival for the request.
    ///
    /// # Errors
    /// If the arrival is not allowed in this state.
    pub fn arrive(&mut self, arrival: Arrival) -> Result<ReceiverAction, Violation> {
        match self.state {
            ReceiverState::Requested { granted } => self.first_answer(granted, arrival),
            ReceiverState::ReRequested { granted } => self.second_answer(granted, arrival),
            ReceiverState::Cancelling { granted } => self.while_cancelling(granted, arrival),
            ReceiverState::Unverified { cancelled } if arrival == Arrival::Checksum => {
                Ok(self.verified(cancelled))
            }
            ReceiverState::Overtaken if arrival == Arrival::CancelAck => {
                self.state = ReceiverState::Done;
                Ok(ReceiverAction::Free)
            }
            ReceiverState::Unsent
            | ReceiverState::Allocating
            | ReceiverState::Unverified { .. }
            | ReceiverState::Overtaken
            | ReceiverState::Early
            | ReceiverState::Done => Err(self.violation(arrival)),
        }
    }

    fn first_answer(&mut self, granted: Option<u64>, arrival: Arrival) -> Result<ReceiverAction, Violation> {
        match arrival {
            Arrival::Landed { bytes } if self.lands(granted, bytes) => Ok(self.value_arrived(false)),
            Arrival::Response | Arrival::Loan => Ok(self.value_arrived(false)),
            Arrival::Dead | Arrival::Stashed | Arrival::Error => Ok(self.done()),
            Arrival::NotStashed => Ok(ReceiverAction::AskOnceMore),
            Arrival::Meta => {
                self.state = ReceiverState::Allocating;
                Ok(ReceiverAction::Allocate)
            }
            Arrival::MetaBeforeLoan => Ok(ReceiverAction::None),
            Arrival::MetaBeforeWrite { bytes } if self.fits(granted, bytes) => {
                (self.state, self.expected) = (ReceiverState::Requested { granted: Some(bytes) }, None);
                Ok(ReceiverAction::None)
            }
            Arrival::Landed { .. }
            | Arrival::MetaBeforeWrite { .. }
            | Arrival::Checksum
            | Arrival::CancelAck => Err(self.violation(arrival)),
        }
    }

    fn second_answer(&mut self, granted: u64, arrival: Arrival) -> Result<ReceiverAction, Violation> {
        match arrival {
            Arrival::Landed { bytes } if granted == bytes => Ok(self.value_arrived(false)),
            Arrival::Error => Ok(self.done()),
            _ => Err(self.violation(arrival)),
        }
    }

    fn while_cancelling(
        &mut self,
        granted: Option<u64>,
        arrival: Arrival,
    ) -> Result<ReceiverAction, Violation> {
        match arrival {
            Arrival::Landed { bytes } if !self.lands(granted, bytes) => Err(self.violation(arrival)),
            // The sender answered before the cancel reached it: the value goes to the waiter.
            Arrival::Landed { .. } | Arrival::Response | Arrival::Loan => Ok(self.value_arrived(true)),
            Arrival::Dead | Arrival::Stashed | Arrival::Error => Ok(self.overtaken()),
            // That answer had no value, and the cancel is on its way.
            Arrival::NotStashed => Ok(ReceiverAction::None),
            // The sender puts the value back when the cancel reaches it.
            Arrival::Meta | Arrival::MetaBeforeLoan => Ok(ReceiverAction::None),
            Arrival::MetaBeforeWrite { bytes } if self.fits(granted, bytes) => {
                (self.state, self.expected) = (ReceiverState::Cancelling { granted: Some(bytes) }, None);
                Ok(ReceiverAction::None)
            }
            Arrival::MetaBeforeWrite { .. } | Arrival::Checksum => Err(self.violation(arrival)),
            Arrival::CancelAck => {
                self.state = ReceiverState::Done;
                Ok(ReceiverAction::FinishCancelled)
            }
        }
    }

    /// A destination of this many bytes was allocated and granted. `TENSOR_RE_REQUEST` is sent
    /// next.
    pub fn allocated(&mut self, bytes: u64) {
        debug_assert_eq!(self.state, ReceiverState::Allocating);
        (self.state, self.expected) = (ReceiverState::ReRequested { granted: bytes }, None);
    }

    /// No destination could be allocated, or the given one does not fit: the value must stay with
    /// the sender.
    pub fn no_room(&mut self) -> ReceiverAction {
        debug_assert_eq!(self.state, ReceiverState::Allocating);
        self.state = ReceiverState::Cancelling { granted: None };
        ReceiverAction::SendCancel
    }

    /// Cancels the request: the waiter has given up, or a standing request is not needed any more.
    pub fn cancel(&mut self) -> ReceiverAction {
        if self.claim == StandingClaim::Unclaimed {
            self.claim = StandingClaim::Claimed;
        }
        let granted = match self.state {
            ReceiverState::Early => {
                self.state = ReceiverState::Done;
                return ReceiverAction::Free;
            }
            ReceiverState::Unsent => {
                self.state = ReceiverState::Done;
                return ReceiverAction::FinishCancelled;
            }
            ReceiverState::Requested { granted } => granted,
            ReceiverState::ReRequested { granted } => Some(granted),
            // No request is open at the sender. The acknowledgement shows that the checksum is not
            // missing.
            ReceiverState::Unverified { cancelled: false } => {
                self.state = ReceiverState::Unverified { cancelled: true };
                return ReceiverAction::SendCancel;
            }
            // There is no destination yet.
            ReceiverState::Allocating => None,
            _ => return ReceiverAction::None,
        };
        self.state = ReceiverState::Cancelling { granted };
        ReceiverAction::SendCancel
    }

    /// Whether a write of `bytes` bytes may land in the destination without new meta-data.
    fn lands(&self, granted: Option<u64>, bytes: u64) -> bool {
        granted.map(|granted| self.expected.unwrap_or(granted)) == Some(bytes)
    }

    /// Whether a tensor of `bytes` bytes may be announced for the destination, which may be longer.
    fn fits(&self, granted: Option<u64>, bytes: u64) -> bool {
        self.claim != StandingClaim::Plain && granted.is_some_and(|granted| bytes <= granted)
    }

    /// A value with bytes has come.
    fn value_arrived(&mut self, cancelled: bool) -> ReceiverAction {
        if self.validates && !is_on(Mutant::DeliveredBeforeChecksum) {
            self.state = ReceiverState::Unverified { cancelled };
            return ReceiverAction::AwaitChecksum;
        }
        self.verified(cancelled)
    }

    fn verified(&mut self, cancelled: bool) -> ReceiverAction {
        if cancelled { self.overtaken() } else { self.done() }
    }

    fn overtaken(&mut self) -> ReceiverAction {
        self.state = ReceiverState::Overtaken;
        ReceiverAction::DeliverAndKeep
    }

    fn done(&mut self) -> ReceiverAction {
        if self.claim == StandingClaim::Unclaimed {
            self.state = ReceiverState::Early;
            return ReceiverAction::StoreEarly;
        }
        self.state = ReceiverState::Done;
        ReceiverAction::Deliver
    }

    fn violation(&self, arrival: Arrival) -> Violation {
        let what = match arrival {
            Arrival::Landed { .. } => "a write of another length than was granted",
            Arrival::Dead => "a dead tensor",
            Arrival::Response => "a tensor response",
            Arrival::Loan => "a loan",
            Arrival::Meta | Arrival::MetaBeforeLoan => "meta-data",
            Arrival::MetaBeforeWrite { .. } => "meta-data before a write that was not granted",
            Arrival::Stashed | Arrival::NotStashed => "a stashed response",
            Arrival::Checksum => "a checksum",
            Arrival::Error => "an error status",
            Arrival::CancelAck => "an acknowledgement of a cancel",
        };
        Violation { what, state: self.state.name() }
    }
}

#[cfg(test)]
mod tests;
