//! The same machines with hostile peers, and on long random walks.

use super::*;
use Arrival::{Checksum, Landed, Loan, Response};
use proptest::prelude::*;

fn arrival() -> impl Strategy<Value = Arrival> {
    use Arrival::*;
    prop_oneof![
        (0..3_u64).prop_map(|bytes| Landed { bytes: bytes * 500 }),
        prop_oneof![
            Just(Dead),
            Just(Response),
            Just(Loan),
            Just(Meta),
            Just(MetaBeforeLoan),
            (0..3_u64).prop_map(|bytes| MetaBeforeWrite { bytes: bytes * 500 }),
            Just(Stashed),
            Just(NotStashed),
            Just(Checksum),
            Just(Error),
            Just(CancelAck)
        ],
    ]
}

proptest! {
    /// Whatever a peer sends and when, either it is a violation or the waiter gets exactly one end.
    /// No write lands without a grant.
    #[test]
    fn a_waiter_ends_once_whatever_the_peer_sends(
        granted in proptest::option::of(0..3_u64), room: bool, standing: bool, validates: bool,
        said in proptest::collection::vec((arrival(), 0..4_u8), 0..24),
    ) {
        let mut granted = granted.map(|bytes| bytes * 500);
        let receiver = if standing { Receiver::standing(granted) } else { Receiver::new(granted) };
        let mut receiver = receiver.validated(validates);
        let (mut told, mut freed, mut cancels) = (0, false, 0);
        let (mut early, mut unverified) = (false, false);
        for (arrival, choice) in said {
            let claims = choice == 1 && !freed && receiver.is_unclaimed();
            if claims && receiver.claim() == ReceiverAction::Deliver {
                prop_assert!(early, "nothing had come");
                (told, freed) = (told + 1, true);
            }
            if choice == 0 && !freed {
                match receiver.cancel() {
                    ReceiverAction::SendCancel => cancels += 1,
                    ReceiverAction::Free => freed = true,
                    _ => {}
                }
            }
            let before = granted;
            let Ok(action) = receiver.arrive(arrival) else { break };
            prop_assert!(!freed, "{arrival:?} was taken for a request that was done");
            if let Landed { bytes } = arrival {
                prop_assert_eq!(before, Some(bytes));
            }
            if let Arrival::MetaBeforeWrite { bytes } = arrival {
                prop_assert!(standing && before.is_some_and(|granted| bytes <= granted));
                granted = Some(bytes);
            }
            let awaited = std::mem::take(&mut unverified);
            prop_assert_eq!(arrival == Checksum, awaited, "a checksum comes behind bytes, and nothing else");
            match action {
                ReceiverAction::AwaitChecksum => {
                    let has_bytes = matches!(arrival, Landed { .. } | Response | Loan);
                    prop_assert!(validates && has_bytes);
                    unverified = true;
                }
                ReceiverAction::Deliver => (told, freed) = (told + 1, true),
                ReceiverAction::StoreEarly => {
                    prop_assert!(standing && !early);
                    early = true;
                }
                ReceiverAction::DeliverAndKeep => told += 1,
                ReceiverAction::FinishCancelled => {
                    prop_assert_eq!(cancels, 1);
                    (told, freed) = (told + 1, true);
                }
                ReceiverAction::Free => freed = true,
                ReceiverAction::Allocate if room => {
                    granted = Some(500);
                    receiver.allocated(500);
                }
                ReceiverAction::Allocate => {
                    granted = None;
                    prop_assert_eq!(receiver.no_room(), ReceiverAction::SendCancel);
                    cancels += 1;
                }
                ReceiverAction::None | ReceiverAction::AskOnceMore => {}
                ReceiverAction::SendCancel => prop_assert!(false, "an arrival does not cancel"),
            }
        }
        prop_assert!(told <= 1 && cancels <= 1);
    }

    /// Long random walks: receives follow each other until one gets the value.
    #[test]
    fn a_value_comes_after_any_number_of_cancelled_receives(
        at: usize, choices in proptest::collection::vec(any::<usize>(), 1..60), rounds in 1..5_usize,
    ) {
        let case = cases().nth(at % cases().count()).expect("a case");
        let mut choices = choices.into_iter().cycle();
        let mut world = follow(World::new(case), |_| choices.next().expect("endless"));
        for _ in 0..rounds {
            if world.waiter == Waiter::Got {
                break;
            }
            let again = World { may_cancel: true, ..world.next_receive() };
            world = follow(again, |_| choices.next().expect("endless"));
        }
        if world.waiter != Waiter::Got {
            world = follow(world.next_receive(), |_| 0);
        }
        prop_assert_eq!(world.waiter, Waiter::Got);
    }
}
