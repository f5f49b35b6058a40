//! The side that was asked.

use super::Violation;

/// What a request said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderRequest {
    /// Bytes that the requester has granted, if any.
    pub granted: Option<u64>,
    /// The version of the meta-data that it has cached; 0 for none.
    pub meta_version: u32,
    /// Whether it would borrow.
    pub borrow: bool,
    /// Whether it is a standing request: a tensor that fits what was granted is written there, whatever its meta-data.
    pub standing: bool,
}

/// What the sender knows of the value that matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderValue {
    /// Whether it is the value of a branch not taken.
    pub dead: bool,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// The version of its meta-data.
    pub meta_version: u32,
    /// Whether it is small enough for its response.
    pub fits_response: bool,
    /// Whether the peer can borrow it where it lies.
    pub lendable: bool,
}

impl SenderValue {
    /// The value of a branch not taken.
    pub const DEAD: SenderValue =
        SenderValue { dead: true, bytes: 0, meta_version: 0, fits_response: false, lendable: false };
}

/// How to answer a request whose value is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenderAnswer {
    /// A zero-byte write whose immediate says that the value is dead.
    Dead,
    /// The bytes inside a response.
    Response,
    /// A write with immediate to the granted destination.
    Write,
    /// The meta-data, or word of which it is if the receiver remembers it, and right behind it a write with immediate to the
    /// start of the granted destination.
    MetaThenWrite,
    /// The meta-data, or word of which it is, if its request did not name it; then a loan.
    Lend {
        /// Whether the request did not name it.
        meta_first: bool,
    },
    /// The meta-data; the value is kept until the receiver asks again.
    Meta,
}

/// What to do about a cancel. `CANCEL_ACK` is sent in every case, behind all that was posted for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelAction {
    /// Take the waiting request out of the table.
    Withdraw,
    /// Put the kept value back, first in line.
    PutBack,
}

/// One request, from the side that was asked. It ends with its answer: a request that has been answered whole
/// has no machine any more, and a cancel for it is only acknowledged.
#[derive(Clone, Debug)]
pub struct Sender {
    asked: SenderRequest,
    state: SenderState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SenderState {
    /// Waits for the value.
    Matching,
    /// Meta-data sent; keeps a value of this many bytes.
    Pinned { bytes: u64 },
}

impl Sender {
    /// A request that just came.
    pub fn new(asked: SenderRequest) -> Self {
        Sender { asked, state: SenderState::Matching }
    }

    /// Whether the receiver would borrow.
    pub fn would_borrow(&self) -> bool {
        self.asked.borrow
    }

    /// The value is there. Every answer but [`SenderAnswer::Meta`] ends the request.
    pub fn matched(&mut self, value: SenderValue) -> SenderAnswer {
        debug_assert_eq!(self.state, SenderState::Matching);
        if value.dead {
            return SenderAnswer::Dead;
        }
        if value.fits_response {
            return SenderAnswer::Response;
        }
        let known = self.asked.meta_version == value.meta_version;
        if self.asked.borrow && value.lendable {
            return SenderAnswer::Lend { meta_first: !known };
        }
        let fits = match self.asked.standing {
            true => self.asked.granted.is_some_and(|granted| value.bytes <= granted),
            false => self.asked.granted == Some(value.bytes),
        };
        if known && fits {
            return SenderAnswer::Write;
        }
        if self.asked.standing && fits {
            return SenderAnswer::MetaThenWrite;
        }
        self.state = SenderState::Pinned { bytes: value.bytes };
        SenderAnswer::Meta
    }

    /// The receiver asked again, granting this many bytes. The value is written, which ends the request.
    ///
    /// # Errors
    /// If no value is kept for the request, or the grant has not its length.
    pub fn re_requested(&mut self, granted: u64) -> Result<(), Violation> {
        match self.state {
            SenderState::Pinned { bytes } if bytes == granted => Ok(()),
            SenderState::Pinned { .. } => Err(Violation {
                what: "a re-request with a grant of another length",
                state: "that keeps a value",
            }),
            SenderState::Matching => {
                Err(Violation { what: "a re-request", state: "that has no meta-data yet" })
            }
        }
    }

    /// The receiver gave up.
    pub fn cancelled(&self) -> CancelAction {
        match self.state {
            SenderState::Matching => CancelAction::Withdraw,
            SenderState::Pinned { .. } => CancelAction::PutBack,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: SenderRequest =
        SenderRequest { granted: Some(1000), meta_version: 3, borrow: false, standing: false };
    const VALUE: SenderValue =
        SenderValue { dead: false, bytes: 1000, meta_version: 3, fits_response: false, lendable: true };

    #[test]
    fn known_meta_data_and_a_grant_that_fits_mean_one_write() {
        assert_eq!(Sender::new(ASKED).matched(VALUE), SenderAnswer::Write);
    }

    #[test]
    fn changed_meta_data_or_no_grant_mean_meta_data_first() {
        let newer = SenderValue { meta_version: 4, ..VALUE };
        assert_eq!(Sender::new(ASKED).matched(newer), SenderAnswer::Meta);
        let nothing = SenderRequest { granted: None, meta_version: 0, ..ASKED };
        let mut sender = Sender::new(nothing);
        assert_eq!(sender.matched(VALUE), SenderAnswer::Meta);
        assert_eq!(sender.re_requested(1000), Ok(()));
    }

    #[test]
    fn what_fits_the_destination_of_a_standing_request_is_written_behind_its_meta_data() {
        let standing = SenderRequest { standing: true, ..ASKED };
        assert_eq!(Sender::new(standing).matched(VALUE), SenderAnswer::Write);
        let roomy = SenderRequest { granted: Some(5000), ..standing };
        assert_eq!(
            Sender::new(roomy).matched(VALUE),
            SenderAnswer::Write,
            "room for more than that is known"
        );
        assert_eq!(
            Sender::new(SenderRequest { standing: false, ..roomy }).matched(VALUE),
            SenderAnswer::Meta
        );
        for bytes in [0, 999, 1000] {
            let newer = SenderValue { meta_version: 4, bytes, ..VALUE };
            assert_eq!(Sender::new(standing).matched(newer), SenderAnswer::MetaThenWrite);
        }
        let larger = SenderValue { meta_version: 4, bytes: 1001, ..VALUE };
        assert_eq!(Sender::new(standing).matched(larger), SenderAnswer::Meta);
        let bare = SenderRequest { granted: None, ..standing };
        assert_eq!(Sender::new(bare).matched(VALUE), SenderAnswer::Meta);
    }

    #[test]
    fn a_re_request_must_grant_the_kept_length() {
        let mut sender = Sender::new(SenderRequest { granted: None, ..ASKED });
        assert!(sender.re_requested(1000).is_err(), "before the meta-data");
        sender.matched(VALUE);
        assert!(sender.re_requested(999).is_err());
    }

    #[test]
    fn a_dead_value_is_a_zero_byte_write_whatever_was_asked() {
        assert_eq!(Sender::new(ASKED).matched(SenderValue::DEAD), SenderAnswer::Dead);
    }

    #[test]
    fn a_small_value_rides_in_the_response() {
        let small = SenderValue { fits_response: true, bytes: 8, ..VALUE };
        assert_eq!(Sender::new(ASKED).matched(small), SenderAnswer::Response);
    }

    #[test]
    fn a_borrower_gets_a_loan_with_the_meta_data_it_lacks() {
        let borrower = SenderRequest { borrow: true, granted: None, ..ASKED };
        assert_eq!(Sender::new(borrower).matched(VALUE), SenderAnswer::Lend { meta_first: false });
        let newer = SenderValue { meta_version: 4, ..VALUE };
        assert_eq!(Sender::new(borrower).matched(newer), SenderAnswer::Lend { meta_first: true });
        let elsewhere = SenderValue { lendable: false, ..VALUE };
        assert_eq!(Sender::new(borrower).matched(elsewhere), SenderAnswer::Meta);
    }

    #[test]
    fn a_cancel_withdraws_a_waiter_and_puts_a_kept_value_back() {
        let mut sender = Sender::new(SenderRequest { granted: None, ..ASKED });
        assert_eq!(sender.cancelled(), CancelAction::Withdraw);
        sender.matched(VALUE);
        assert_eq!(sender.cancelled(), CancelAction::PutBack);
    }
}
