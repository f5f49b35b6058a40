//! The side that asked.

use super::Violation;
use crate::mutants::{Mutant, is_on};

/// What can come for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A write with immediate has landed: the tensor, whole.
    Landed {
        /// Bytes that the immediate's write carried.
        bytes: u64,
    },
    /// A zero-byte write that says the value is dead.
    Dead,
    /// The tensor inside a response.
    Response,
    /// A loan of the tensor.
    Loan,
    /// The sender's meta-data: the destination did not fit, or there was none.
    Meta,
    /// The sender's meta-data, with a loan behind it.
    MetaBeforeLoan,
    /// The sender's meta-data for a standing request, with the write behind it.
    MetaBeforeWrite {
        /// Bytes of the tensor.
        bytes: u64,
    },
    /// The sender's word that the next value in line is one that this side holds itself, and it does.
    Stashed,
    /// The same word, for a value that is not held here any more.
    NotStashed,
    /// The sum of what has come.
    Checksum,
    /// The sender failed.
    Error,
    /// Nothing more will come.
    CancelAck,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Nothing.
    None,
    /// Allocate for the meta-data, then call [`Receiver::allocated`] or [`Receiver::no_room`].
    Allocate,
    /// Hand the value, or the error, to the waiter; the slot is free.
    Deliver,
    /// Keep the value in the slot: it may be handed to nobody before its sum has come.
    AwaitChecksum,
    /// Keep the value, or the error, in the slot: nobody has claimed the standing request yet.
    StoreEarly,
    /// Hand the value, or the error, to the waiter; the slot stays in use until the cancel is acknowledged.
    DeliverAndKeep,
    /// Send `TENSOR_REQUEST` once more, under the same name: the answer to the last one was void.
    AskOnceMore,
    /// Send `CANCEL`.
    SendCancel,
    /// Tell the waiter that its call ended as it wished, without a value; the slot is free.
    FinishCancelled,
    /// The waiter has been told already; the slot is free.
    Free,
}

/// One request, from the side that asked.
#[derive(Clone, Debug)]
pub struct Receiver {
    state: ReceiverState,
    claim: StandingClaim,
    /// Whether a value counts only once its sum has come.
    validates: bool,
    /// Bytes of the tensor that a standing request names, whose destination may be longer.
    expected: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StandingClaim {
    /// A plain request: it was made for its waiter.
    Plain,
    /// A standing request that nobody waits for yet.
    Unclaimed,
    /// A standing request that has got its waiter, or has been given up.
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
    /// Has the meta-data, is making room.
    Allocating,
    /// Sent again, with a destination of this many bytes.
    ReRequested {
        granted: u64,
    },
    /// Gave up; the sender has not acknowledged it yet.
    Cancelling {
        granted: Option<u64>,
    },
    /// The value has come, and waits for its sum.
    Unverified {
        cancelled: bool,
    },
    /// The value came all the same; the acknowledgement is still to come.
    Overtaken,
    /// What was asked for is in the slot, until somebody claims it.
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
            ReceiverState::Cancelling { .. } => "that was given up",
            ReceiverState::Unverified { .. } => "whose value waits for its sum",
            ReceiverState::Overtaken => "whose value had come",
            ReceiverState::Early => "whose answer had come",
            ReceiverState::Done => "that was done",
        }
    }
}

impl Receiver {
    /// A request that was just sent, with `granted` bytes of destination if it carried a grant.
    pub fn new(granted: Option<u64>) -> Self {
        Receiver {
            state: ReceiverState::Requested { granted },
            claim: StandingClaim::Plain,
            validates: false,
            expected: None,
        }
    }

    /// A standing request that was just sent, with `granted` bytes of destination if it has one. It has no waiter.
    pub fn standing(granted: Option<u64>) -> Self {
        Receiver {
            state: ReceiverState::Requested { granted },
            claim: StandingClaim::Unclaimed,
            validates: false,
            expected: None,
        }
    }

    /// The same, whether or not it asks for sums: a value that has bytes then counts only once its sum has come.
    #[must_use]
    pub fn validated(self, validates: bool) -> Self {
        Receiver { validates, ..self }
    }

    /// Whether it asks for sums.
    pub fn validates(&self) -> bool {
        self.validates
    }

    /// The same, for a tensor of `bytes` bytes, of which its destination has as many at least.
    #[must_use]
    pub fn expecting(self, bytes: u64) -> Self {
        Receiver { expected: Some(bytes), ..self }
    }

    /// Whether nobody has claimed the standing request, and nobody has given it up.
    pub fn is_unclaimed(&self) -> bool {
        self.claim == StandingClaim::Unclaimed
    }

    /// Whether it was made as a standing request.
    pub fn is_standing(&self) -> bool {
        self.claim != StandingClaim::Plain
    }

    /// A waiter takes the standing request. [`ReceiverAction::Deliver`] if what it asked for has come.
    pub fn claim(&mut self) -> ReceiverAction {
        debug_assert!(self.is_unclaimed());
        self.claim = StandingClaim::Claimed;
        match self.state {
            ReceiverState::Early => self.done(),
            _ => ReceiverAction::None,
        }
    }

    /// A request that is not sent yet: [`Receiver::asked`] says when it is.
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

    /// The request that was held back was sent, with `granted` bytes of destination if it carried a grant.
    pub fn asked(&mut self, granted: Option<u64>) {
        debug_assert_eq!(self.state, ReceiverState::Unsent);
        self.state = ReceiverState::Requested { granted };
    }

    /// Something came for the request.
    ///
    /// # Errors
    /// If it may not come now.
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
            // The sender had answered before the cancel reached it: the value goes to the waiter.
            Arrival::Landed { .. } | Arrival::Response | Arrival::Loan => Ok(self.value_arrived(true)),
            Arrival::Dead | Arrival::Stashed | Arrival::Error => Ok(self.overtaken()),
            // There was no value in that answer, and the cancel is on its way.
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

    /// Room for the meta-data was made: `TENSOR_RE_REQUEST` is sent with a grant of this many bytes.
    pub fn allocated(&mut self, bytes: u64) {
        debug_assert_eq!(self.state, ReceiverState::Allocating);
        (self.state, self.expected) = (ReceiverState::ReRequested { granted: bytes }, None);
    }

    /// No room could be made for the meta-data, or the destination that was given has another one: the
    /// value must stay with the sender.
    pub fn no_room(&mut self) -> ReceiverAction {
        debug_assert_eq!(self.state, ReceiverState::Allocating);
        self.state = ReceiverState::Cancelling { granted: None };
        ReceiverAction::SendCancel
    }

    /// The waiter gives up, or a standing request is given up by who made it.
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
            // Nothing was asked for any more; the acknowledgement shows that the sum is not missing.
            ReceiverState::Unverified { cancelled: false } => {
                self.state = ReceiverState::Unverified { cancelled: true };
                return ReceiverAction::SendCancel;
            }
            // No room was made for it.
            ReceiverState::Allocating => None,
            _ => return ReceiverAction::None,
        };
        self.state = ReceiverState::Cancelling { granted };
        ReceiverAction::SendCancel
    }

    /// Whether a tensor of so many bytes may land in what was granted, without any word of its meta-data.
    fn lands(&self, granted: Option<u64>, bytes: u64) -> bool {
        granted.map(|granted| self.expected.unwrap_or(granted)) == Some(bytes)
    }

    /// Whether a tensor may come that has fewer bytes than were granted for it.
    fn fits(&self, granted: Option<u64>, bytes: u64) -> bool {
        self.claim != StandingClaim::Plain && granted.is_some_and(|granted| bytes <= granted)
    }

    /// A value with bytes has come.
    fn value_arrived(&mut self, cancelled: bool) -> ReceiverAction {
        if self.validates && !is_on(Mutant::DeliveredBeforeSum) {
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
            Arrival::Stashed | Arrival::NotStashed => "word of a value that is held here",
            Arrival::Checksum => "a sum",
            Arrival::Error => "an error status",
            Arrival::CancelAck => "an acknowledgement of a cancel",
        };
        Violation { what, state: self.state.name() }
    }
}

#[cfg(test)]
mod tests;
