//! The receiving machine, arrival by arrival.

use super::*;
use Arrival::*;

fn run(receiver: &mut Receiver, arrivals: &[Arrival]) -> Vec<ReceiverAction> {
    arrivals.iter().map(|arrival| receiver.arrive(*arrival).expect("allowed")).collect()
}

#[test]
fn a_known_tensor_takes_one_answer() {
    for answer in [Landed { bytes: 8 }, Dead, Response, Loan, Stashed, Error] {
        let mut receiver = Receiver::new(Some(8));
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Deliver]);
        assert!(receiver.arrive(answer).is_err(), "{answer:?} twice");
    }
}

#[test]
fn an_unknown_tensor_takes_a_re_request() {
    let mut receiver = Receiver::new(None);
    assert_eq!(run(&mut receiver, &[Meta]), [ReceiverAction::Allocate]);
    receiver.allocated(8);
    assert_eq!(run(&mut receiver, &[Landed { bytes: 8 }]), [ReceiverAction::Deliver]);
}

#[test]
fn a_write_that_was_not_granted_or_has_another_length_is_refused() {
    assert!(Receiver::new(None).arrive(Landed { bytes: 0 }).is_err());
    assert!(Receiver::new(Some(8)).arrive(Landed { bytes: 7 }).is_err());
    let mut cancelled = Receiver::new(Some(8));
    cancelled.cancel();
    assert!(cancelled.arrive(Landed { bytes: 9 }).is_err());
}

#[test]
fn a_cancel_before_the_match_leaves_the_value_with_the_sender() {
    let mut receiver = Receiver::new(Some(8));
    assert_eq!(receiver.cancel(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut receiver, &[CancelAck]), [ReceiverAction::FinishCancelled]);
}

#[test]
fn a_value_that_overtakes_the_cancel_goes_to_the_waiter() {
    for answer in [Landed { bytes: 8 }, Dead, Response, Loan, Stashed, Error] {
        let mut receiver = Receiver::new(Some(8));
        receiver.cancel();
        let actions = run(&mut receiver, &[answer, CancelAck]);
        assert_eq!(actions, [ReceiverAction::DeliverAndKeep, ReceiverAction::Free]);
    }
}

#[test]
fn meta_data_that_meets_a_cancel_is_ignored() {
    let mut receiver = Receiver::new(None);
    receiver.cancel();
    let actions = run(&mut receiver, &[Meta, CancelAck]);
    assert_eq!(actions, [ReceiverAction::None, ReceiverAction::FinishCancelled]);
}

#[test]
fn cancelling_twice_sends_one_cancel() {
    let mut receiver = Receiver::new(None);
    assert_eq!(receiver.cancel(), ReceiverAction::SendCancel);
    assert_eq!(receiver.cancel(), ReceiverAction::None);
}

#[test]
fn no_room_for_the_tensor_cancels_the_request() {
    let mut receiver = Receiver::new(None);
    run(&mut receiver, &[Meta]);
    assert_eq!(receiver.no_room(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut receiver, &[CancelAck]), [ReceiverAction::FinishCancelled]);
}

#[test]
fn a_standing_request_without_room_can_be_cancelled() {
    let mut receiver = Receiver::standing(Some(4));
    assert_eq!(run(&mut receiver, &[Meta]), [ReceiverAction::Allocate]);
    assert_eq!(receiver.cancel(), ReceiverAction::SendCancel);
    assert!(receiver.clone().arrive(Landed { bytes: 4 }).is_err(), "nothing is granted any more");
    assert_eq!(run(&mut receiver, &[CancelAck]), [ReceiverAction::FinishCancelled]);
}

#[test]
fn an_answer_for_a_value_that_left_the_stash_repeats_the_request() {
    let mut receiver = Receiver::new(Some(8));
    assert_eq!(run(&mut receiver, &[NotStashed, NotStashed]), [ReceiverAction::AskOnceMore; 2]);
    receiver.cancel();
    assert_eq!(
        run(&mut receiver, &[NotStashed, CancelAck]),
        [ReceiverAction::None, ReceiverAction::FinishCancelled]
    );
}

#[test]
fn an_unsent_request_ends_without_a_message() {
    let mut receiver = Receiver::unsent();
    assert!(receiver.clone().arrive(Response).is_err());
    assert_eq!(receiver.cancel(), ReceiverAction::FinishCancelled);
    let mut receiver = Receiver::unsent();
    receiver.asked(Some(8));
    assert!(!receiver.is_unsent());
    assert_eq!(run(&mut receiver, &[Landed { bytes: 8 }]), [ReceiverAction::Deliver]);
}

#[test]
fn an_early_value_waits_for_the_receive_that_claims_it() {
    for answer in [Landed { bytes: 8 }, Dead, Response, Loan, Stashed, Error] {
        let mut receiver = Receiver::standing(Some(8));
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::StoreEarly]);
        assert!(receiver.clone().arrive(answer).is_err(), "{answer:?} twice");
        assert!(receiver.is_unclaimed());
        assert_eq!(receiver.claim(), ReceiverAction::Deliver);
        let mut receiver = Receiver::standing(Some(8));
        assert_eq!(receiver.claim(), ReceiverAction::None);
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Deliver]);
    }
}

#[test]
fn a_cancelled_standing_request_is_like_any_other() {
    let mut receiver = Receiver::standing(Some(8));
    assert_eq!(receiver.cancel(), ReceiverAction::SendCancel);
    assert!(!receiver.is_unclaimed());
    let actions = run(&mut receiver, &[Landed { bytes: 8 }, CancelAck]);
    assert_eq!(actions, [ReceiverAction::DeliverAndKeep, ReceiverAction::Free]);
    let mut receiver = Receiver::standing(Some(8));
    run(&mut receiver, &[Dead]);
    assert_eq!(receiver.cancel(), ReceiverAction::Free, "nothing more can come");
}

#[test]
fn a_smaller_tensor_needs_its_meta_data_first() {
    let smaller = [MetaBeforeWrite { bytes: 5 }, Landed { bytes: 5 }];
    let mut receiver = Receiver::standing(Some(8));
    assert_eq!(run(&mut receiver, &smaller), [ReceiverAction::None, ReceiverAction::StoreEarly]);
    let mut receiver = Receiver::standing(Some(8));
    receiver.cancel();
    assert_eq!(run(&mut receiver, &smaller), [ReceiverAction::None, ReceiverAction::DeliverAndKeep]);
    let mut receiver = Receiver::standing(Some(8));
    run(&mut receiver, &smaller[..1]);
    assert!(receiver.arrive(Landed { bytes: 8 }).is_err(), "not what was announced");
    assert!(Receiver::standing(Some(8)).arrive(Landed { bytes: 5 }).is_err(), "without meta-data");
    assert!(Receiver::standing(Some(8)).arrive(MetaBeforeWrite { bytes: 9 }).is_err(), "beyond the grant");
    assert!(Receiver::standing(None).arrive(MetaBeforeWrite { bytes: 0 }).is_err(), "nothing was granted");
    assert!(Receiver::new(Some(8)).arrive(MetaBeforeWrite { bytes: 5 }).is_err(), "a plain request");
}

#[test]
fn a_value_with_bytes_counts_only_with_its_checksum() {
    for answer in [Landed { bytes: 8 }, Response, Loan] {
        let mut receiver = Receiver::new(Some(8)).validated(true);
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::AwaitChecksum]);
        for early in [answer, Error, Meta, CancelAck, Dead] {
            assert!(receiver.clone().arrive(early).is_err(), "{early:?} ahead of the checksum");
        }
        assert_eq!(run(&mut receiver, &[Checksum]), [ReceiverAction::Deliver]);
        assert!(receiver.arrive(Checksum).is_err(), "twice");
    }
    for answer in [Dead, Stashed, Error] {
        let mut receiver = Receiver::new(Some(8)).validated(true);
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Deliver], "there are no bytes");
    }
    let mut re_requested = Receiver::new(None).validated(true);
    run(&mut re_requested, &[Meta]);
    re_requested.allocated(8);
    assert_eq!(
        run(&mut re_requested, &[Landed { bytes: 8 }, Checksum]),
        [ReceiverAction::AwaitChecksum, ReceiverAction::Deliver]
    );
}

#[test]
fn a_checksum_without_a_value_or_a_request_for_it_is_refused() {
    assert!(Receiver::new(Some(8)).arrive(Checksum).is_err(), "not asked for");
    assert!(Receiver::new(Some(8)).validated(true).arrive(Checksum).is_err(), "ahead of its value");
    let mut cancelled = Receiver::new(Some(8)).validated(true);
    cancelled.cancel();
    assert!(cancelled.arrive(Checksum).is_err(), "without a value");
}

#[test]
fn a_checksum_comes_before_the_acknowledgement_of_a_cancel() {
    let kept = [ReceiverAction::DeliverAndKeep, ReceiverAction::Free];
    let mut before = Receiver::new(Some(8)).validated(true);
    assert_eq!(before.cancel(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut before, &[Landed { bytes: 8 }]), [ReceiverAction::AwaitChecksum]);
    assert_eq!(before.cancel(), ReceiverAction::None, "once");
    assert_eq!(run(&mut before, &[Checksum, CancelAck]), kept);
    let mut between = Receiver::new(Some(8)).validated(true);
    run(&mut between, &[Landed { bytes: 8 }]);
    assert_eq!(between.cancel(), ReceiverAction::SendCancel);
    assert!(between.clone().arrive(CancelAck).is_err(), "where is the checksum?");
    assert_eq!(run(&mut between, &[Checksum, CancelAck]), kept);
}

#[test]
fn an_early_value_is_stored_with_its_checksum() {
    let standing = || Receiver::standing(Some(8)).validated(true);
    let landed = [Landed { bytes: 8 }];
    let mut receiver = standing();
    run(&mut receiver, &landed);
    assert_eq!(run(&mut receiver, &[Checksum]), [ReceiverAction::StoreEarly]);
    assert_eq!(receiver.claim(), ReceiverAction::Deliver);
    let mut claimed = standing();
    run(&mut claimed, &landed);
    assert_eq!(claimed.claim(), ReceiverAction::None);
    assert_eq!(run(&mut claimed, &[Checksum]), [ReceiverAction::Deliver]);
    let mut cancelled = standing();
    run(&mut cancelled, &landed);
    assert_eq!(cancelled.cancel(), ReceiverAction::SendCancel);
    assert_eq!(
        run(&mut cancelled, &[Checksum, CancelAck]),
        [ReceiverAction::DeliverAndKeep, ReceiverAction::Free]
    );
}

#[test]
fn a_longer_destination_takes_the_named_or_the_announced_tensor() {
    let standing = || Receiver::standing(Some(20)).expecting(8);
    assert_eq!(run(&mut standing(), &[Landed { bytes: 8 }]), [ReceiverAction::StoreEarly]);
    for bytes in [7, 9, 20] {
        assert!(standing().arrive(Landed { bytes }).is_err(), "{bytes} without a word");
        let announced = [MetaBeforeWrite { bytes }, Landed { bytes }];
        assert_eq!(run(&mut standing(), &announced), [ReceiverAction::None, ReceiverAction::StoreEarly]);
    }
    assert!(standing().arrive(MetaBeforeWrite { bytes: 21 }).is_err());
    let mut cancelled = standing();
    cancelled.cancel();
    assert!(cancelled.clone().arrive(Landed { bytes: 20 }).is_err());
    assert_eq!(run(&mut cancelled, &[Landed { bytes: 8 }]), [ReceiverAction::DeliverAndKeep]);
}

#[test]
fn an_acknowledgement_without_a_cancel_is_refused() {
    let error = Receiver::new(None).arrive(CancelAck).expect_err("not cancelled");
    assert!(error.to_string().contains("that waits for its first answer"), "{error}");
}
