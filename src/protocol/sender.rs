//! The serving side.

use super::Violation;

/// The part of a request that decides how it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderRequest {
    /// Bytes of the granted destination, if the request has one.
    pub granted: Option<u64>,
    /// The version of the meta-data that the receiver has cached; 0 for none.
    pub meta_version: u32,
    /// Whether the receiver accepts a loan.
    pub borrow: bool,
    /// Whether it is a standing request: any tensor that fits the destination is written there.
    pub standing: bool,
}

/// The facts about the matched value that decide the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderValue {
    /// Whether it is a dead value: that of a branch not taken.
    pub dead: bool,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// The version of its meta-data.
    pub meta_version: u32,
    /// Whether it is small enough for a response.
    pub fits_response: bool,
    /// Whether the peer can borrow it in place.
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
    /// The meta-data, or its meta-data slot if the receiver remembers it, followed by a write with
    /// immediate to the start of the granted destination.
    MetaThenWrite,
    /// A loan. If the request did not name the meta-data, the meta-data or its slot comes first.
    Lend {
        /// Whether the request did not name the meta-data.
        meta_first: bool,
    },
    /// The meta-data. The value stays pinned until the re-request.
    Meta,
}

/// What to do about a cancel. `CANCEL_ACK` is sent in every case, behind everything that was posted
/// for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelAction {
    /// Remove the waiting request from the table.
    Withdraw,
    /// Put the pinned value back in line, at its old place.
    PutBack,
}

/// One request on the serving side. Its complete answer ends the machine: a cancel that comes later
/// is only acknowledged.
#[derive(Clone, Debug)]
pub struct Sender {
    asked: SenderRequest,
    state: SenderState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SenderState {
    /// Waits for a value.
    Matching,
    /// The meta-data was sent, and a value of this many bytes is pinned.
    Pinned { bytes: u64 },
}

impl Sender {
    /// A request that has just come.
    pub fn new(asked: SenderRequest) -> Self {
        Sender { asked, state: SenderState::Matching }
    }

    /// Whether the receiver accepts a loan.
    pub fn would_borrow(&self) -> bool {
        self.asked.borrow
    }

    /// A value was matched. Every answer but [`SenderAnswer::Meta`] ends the request.
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

    /// The receiver has sent a re-request with a grant of this many bytes. The value is written,
    /// which ends the request.
    ///
    /// # Errors
    /// If no value is pinned for the request, or the grant has another length.
    pub fn re_requested(&mut self, granted: u64) -> Result<(), Violation> {
        match self.state {
            SenderState::Pinned { bytes } if bytes == granted => Ok(()),
            SenderState::Pinned { .. } => Err(Violation {
                what: "a re-request with a grant of another length",
                state: "that has a pinned value",
            }),
            SenderState::Matching => {
                Err(Violation { what: "a re-request", state: "that has no meta-data yet" })
            }
        }
    }

    /// The receiver has cancelled the request.
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
            "a larger destination, and known meta-data"
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
    fn a_re_request_must_grant_the_pinned_length() {
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
    fn a_cancel_withdraws_a_waiter_and_puts_a_pinned_value_back() {
        let mut sender = Sender::new(SenderRequest { granted: None, ..ASKED });
        assert_eq!(sender.cancelled(), CancelAction::Withdraw);
        sender.matched(VALUE);
        assert_eq!(sender.cancelled(), CancelAction::PutBack);
    }
}
