//! What the receiving machine does with each arrival.

use super::*;
use Arrival::*;

fn run(receiver: &mut Receiver, arrivals: &[Arrival]) -> Vec<ReceiverAction> {
    arrivals.iter().map(|arrival| receiver.arrive(*arrival).expect("allowed")).collect()
}

#[test]
fn a_known_tensor_takes_one_answer() {
    for answer in [Landed { bytes: 8 }, Dead, Response, Loan, Held, Error] {
        let mut receiver = Receiver::new(Some(8));
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Deliver]);
        assert!(receiver.arrive(answer).is_err(), "{answer:?} twice");
    }
}

#[test]
fn an_unknown_tensor_is_asked_for_again() {
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
    cancelled.give_up();
    assert!(cancelled.arrive(Landed { bytes: 9 }).is_err());
}

#[test]
fn a_cancel_before_the_match_leaves_the_value_with_the_sender() {
    let mut receiver = Receiver::new(Some(8));
    assert_eq!(receiver.give_up(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut receiver, &[CancelAck]), [ReceiverAction::FinishCancelled]);
}

#[test]
fn a_value_that_overtakes_the_cancel_goes_to_the_waiter() {
    for answer in [Landed { bytes: 8 }, Dead, Response, Loan, Held, Error] {
        let mut receiver = Receiver::new(Some(8));
        receiver.give_up();
        let actions = run(&mut receiver, &[answer, CancelAck]);
        assert_eq!(actions, [ReceiverAction::DeliverAndKeep, ReceiverAction::Free]);
    }
}

#[test]
fn meta_data_that_meets_a_cancel_is_ignored() {
    let mut receiver = Receiver::new(None);
    receiver.give_up();
    let actions = run(&mut receiver, &[Meta, CancelAck]);
    assert_eq!(actions, [ReceiverAction::None, ReceiverAction::FinishCancelled]);
}

#[test]
fn giving_up_twice_sends_one_cancel() {
    let mut receiver = Receiver::new(None);
    assert_eq!(receiver.give_up(), ReceiverAction::SendCancel);
    assert_eq!(receiver.give_up(), ReceiverAction::None);
}

#[test]
fn no_room_for_the_tensor_cancels_the_request() {
    let mut receiver = Receiver::new(None);
    run(&mut receiver, &[Meta]);
    assert_eq!(receiver.no_room(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut receiver, &[CancelAck]), [ReceiverAction::FinishCancelled]);
}

#[test]
fn a_standing_request_without_room_can_be_given_up() {
    let mut receiver = Receiver::armed(Some(4));
    assert_eq!(run(&mut receiver, &[Meta]), [ReceiverAction::Allocate]);
    assert_eq!(receiver.give_up(), ReceiverAction::SendCancel);
    assert!(receiver.clone().arrive(Landed { bytes: 4 }).is_err(), "nothing is granted any more");
    assert_eq!(run(&mut receiver, &[CancelAck]), [ReceiverAction::FinishCancelled]);
}

#[test]
fn a_void_answer_has_the_request_sent_once_more() {
    let mut receiver = Receiver::new(Some(8));
    assert_eq!(run(&mut receiver, &[NotHeld, NotHeld]), [ReceiverAction::AskOnceMore; 2]);
    receiver.give_up();
    assert_eq!(
        run(&mut receiver, &[NotHeld, CancelAck]),
        [ReceiverAction::None, ReceiverAction::FinishCancelled]
    );
}

#[test]
fn a_request_that_was_not_sent_ends_without_a_word_to_the_peer() {
    let mut receiver = Receiver::held_back();
    assert!(receiver.clone().arrive(Response).is_err());
    assert_eq!(receiver.give_up(), ReceiverAction::FinishCancelled);
    let mut receiver = Receiver::held_back();
    receiver.asked(Some(8));
    assert!(!receiver.is_held_back());
    assert_eq!(run(&mut receiver, &[Landed { bytes: 8 }]), [ReceiverAction::Deliver]);
}

#[test]
fn what_comes_for_a_standing_request_waits_for_whoever_claims_it() {
    for answer in [Landed { bytes: 8 }, Dead, Response, Loan, Held, Error] {
        let mut receiver = Receiver::armed(Some(8));
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Park]);
        assert!(receiver.clone().arrive(answer).is_err(), "{answer:?} twice");
        assert!(receiver.is_unclaimed());
        assert_eq!(receiver.claim(), ReceiverAction::Deliver);
        let mut receiver = Receiver::armed(Some(8));
        assert_eq!(receiver.claim(), ReceiverAction::None);
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Deliver]);
    }
}

#[test]
fn a_standing_request_that_is_given_up_is_like_any_other() {
    let mut receiver = Receiver::armed(Some(8));
    assert_eq!(receiver.give_up(), ReceiverAction::SendCancel);
    assert!(!receiver.is_unclaimed());
    let actions = run(&mut receiver, &[Landed { bytes: 8 }, CancelAck]);
    assert_eq!(actions, [ReceiverAction::DeliverAndKeep, ReceiverAction::Free]);
    let mut receiver = Receiver::armed(Some(8));
    run(&mut receiver, &[Dead]);
    assert_eq!(receiver.give_up(), ReceiverAction::Free, "nothing more can come");
}

#[test]
fn a_smaller_tensor_comes_to_a_standing_request_behind_its_meta_data_alone() {
    let smaller = [MetaBeforeWrite { bytes: 5 }, Landed { bytes: 5 }];
    let mut receiver = Receiver::armed(Some(8));
    assert_eq!(run(&mut receiver, &smaller), [ReceiverAction::None, ReceiverAction::Park]);
    let mut receiver = Receiver::armed(Some(8));
    receiver.give_up();
    assert_eq!(run(&mut receiver, &smaller), [ReceiverAction::None, ReceiverAction::DeliverAndKeep]);
    let mut receiver = Receiver::armed(Some(8));
    run(&mut receiver, &smaller[..1]);
    assert!(receiver.arrive(Landed { bytes: 8 }).is_err(), "not what was announced");
    assert!(Receiver::armed(Some(8)).arrive(Landed { bytes: 5 }).is_err(), "without meta-data");
    assert!(Receiver::armed(Some(8)).arrive(MetaBeforeWrite { bytes: 9 }).is_err(), "beyond the grant");
    assert!(Receiver::armed(None).arrive(MetaBeforeWrite { bytes: 0 }).is_err(), "nothing was granted");
    assert!(Receiver::new(Some(8)).arrive(MetaBeforeWrite { bytes: 5 }).is_err(), "a plain request");
}

#[test]
fn a_value_with_bytes_counts_only_once_its_sum_has_come() {
    for answer in [Landed { bytes: 8 }, Response, Loan] {
        let mut receiver = Receiver::new(Some(8)).validated(true);
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::AwaitSum]);
        for early in [answer, Error, Meta, CancelAck, Dead] {
            assert!(receiver.clone().arrive(early).is_err(), "{early:?} ahead of the sum");
        }
        assert_eq!(run(&mut receiver, &[Sum]), [ReceiverAction::Deliver]);
        assert!(receiver.arrive(Sum).is_err(), "twice");
    }
    for answer in [Dead, Held, Error] {
        let mut receiver = Receiver::new(Some(8)).validated(true);
        assert_eq!(run(&mut receiver, &[answer]), [ReceiverAction::Deliver], "there are no bytes");
    }
    let mut asked_again = Receiver::new(None).validated(true);
    run(&mut asked_again, &[Meta]);
    asked_again.allocated(8);
    assert_eq!(
        run(&mut asked_again, &[Landed { bytes: 8 }, Sum]),
        [ReceiverAction::AwaitSum, ReceiverAction::Deliver]
    );
}

#[test]
fn a_sum_that_nobody_asked_for_or_without_a_value_is_refused() {
    assert!(Receiver::new(Some(8)).arrive(Sum).is_err(), "not asked for");
    assert!(Receiver::new(Some(8)).validated(true).arrive(Sum).is_err(), "ahead of its value");
    let mut cancelled = Receiver::new(Some(8)).validated(true);
    cancelled.give_up();
    assert!(cancelled.arrive(Sum).is_err(), "without a value");
}

#[test]
fn a_sum_comes_ahead_of_the_acknowledgement_whenever_the_waiter_gives_up() {
    let kept = [ReceiverAction::DeliverAndKeep, ReceiverAction::Free];
    let mut before = Receiver::new(Some(8)).validated(true);
    assert_eq!(before.give_up(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut before, &[Landed { bytes: 8 }]), [ReceiverAction::AwaitSum]);
    assert_eq!(before.give_up(), ReceiverAction::None, "once");
    assert_eq!(run(&mut before, &[Sum, CancelAck]), kept);
    let mut between = Receiver::new(Some(8)).validated(true);
    run(&mut between, &[Landed { bytes: 8 }]);
    assert_eq!(between.give_up(), ReceiverAction::SendCancel);
    assert!(between.clone().arrive(CancelAck).is_err(), "where is the sum?");
    assert_eq!(run(&mut between, &[Sum, CancelAck]), kept);
}

#[test]
fn a_standing_request_parks_its_value_once_the_sum_has_come() {
    let armed = || Receiver::armed(Some(8)).validated(true);
    let landed = [Landed { bytes: 8 }];
    let mut receiver = armed();
    run(&mut receiver, &landed);
    assert_eq!(run(&mut receiver, &[Sum]), [ReceiverAction::Park]);
    assert_eq!(receiver.claim(), ReceiverAction::Deliver);
    let mut claimed = armed();
    run(&mut claimed, &landed);
    assert_eq!(claimed.claim(), ReceiverAction::None);
    assert_eq!(run(&mut claimed, &[Sum]), [ReceiverAction::Deliver]);
    let mut given_up = armed();
    run(&mut given_up, &landed);
    assert_eq!(given_up.give_up(), ReceiverAction::SendCancel);
    assert_eq!(run(&mut given_up, &[Sum, CancelAck]), [ReceiverAction::DeliverAndKeep, ReceiverAction::Free]);
}

#[test]
fn in_a_longer_destination_lands_what_was_named_or_what_is_announced() {
    let armed = || Receiver::armed(Some(20)).expecting(8);
    assert_eq!(run(&mut armed(), &[Landed { bytes: 8 }]), [ReceiverAction::Park]);
    for bytes in [7, 9, 20] {
        assert!(armed().arrive(Landed { bytes }).is_err(), "{bytes} without a word");
        let announced = [MetaBeforeWrite { bytes }, Landed { bytes }];
        assert_eq!(run(&mut armed(), &announced), [ReceiverAction::None, ReceiverAction::Park]);
    }
    assert!(armed().arrive(MetaBeforeWrite { bytes: 21 }).is_err());
    let mut given_up = armed();
    given_up.give_up();
    assert!(given_up.clone().arrive(Landed { bytes: 20 }).is_err());
    assert_eq!(run(&mut given_up, &[Landed { bytes: 8 }]), [ReceiverAction::DeliverAndKeep]);
}

#[test]
fn an_acknowledgement_that_nobody_asked_for_is_refused() {
    let error = Receiver::new(None).arrive(CancelAck).expect_err("not cancelled");
    assert!(error.to_string().contains("that waits for its first answer"), "{error}");
}
