//! Tensors that are offered, and written to the destinations of their receives.

use super::*;
use crate::link::windows::OfferedTensor;
use crate::memory::tests::foreign::given;
use crate::wire::Slot;
use std::collections::{HashMap, HashSet};

/// The transfers of a fabric that offers tensors, at their receiver.
#[derive(Default)]
pub struct Offers {
    pub is_on: bool,
    offered: HashMap<u32, Tensor>,
    granted: VecDeque<(Immediate, u32, TensorMut)>,
    next: u32,
    /// Why the next destination is refused.
    refused: Option<LandingRefused>,
    /// Edges whose next tensor has a destination.
    ready: HashSet<EdgeId>,
}

impl Offers {
    pub fn offer(&mut self, tensor: Tensor) -> OfferedTensor {
        self.next += 1;
        let told = Arc::new(ToldMeta { meta: tensor.meta().clone(), sender: placement_of(&tensor) });
        let checksum = Some(checksum_of(tensor.bytes()));
        self.offered.insert(self.next, tensor);
        OfferedTensor { told, checksum, offer: self.next }
    }

    pub fn land(&mut self, offer: u32, target: TensorMut) -> Result<Immediate, (LandingRefused, TensorMut)> {
        assert!(self.offered.contains_key(&offer), "offer {offer} is answered twice");
        if let Some(why) = self.refused.take() {
            return Err((why, target));
        }
        let landing = Immediate { slot: Slot::new(offer).expect("few"), generation: 0 };
        self.granted.push_back((landing, offer, target));
        Ok(landing)
    }

    pub fn decline(&mut self, offer: u32) {
        assert!(self.offered.remove(&offer).is_some(), "offer {offer} is answered twice");
    }

    pub fn make_ready(&mut self, edge: EdgeId) {
        self.ready.insert(edge);
    }

    pub fn withdraw(&mut self, edge: EdgeId) {
        self.ready.remove(&edge);
    }

    /// Writes the oldest tensor that has a destination.
    pub fn write(&mut self) -> Option<(Immediate, TensorMut)> {
        let (landing, offer, mut target) = self.granted.pop_front()?;
        let source = self.offered.remove(&offer).expect("offered");
        target.bytes_mut().copy_from_slice(source.bytes());
        Some((landing, target))
    }

    /// Bytes of all destinations.
    pub fn granted_bytes(&self) -> u64 {
        self.granted.iter().map(|(.., target)| target.meta().bytes()).sum()
    }

    pub fn clear(&mut self) {
        self.offered.clear();
        self.granted.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.offered.is_empty() && self.granted.is_empty()
    }
}

/// The message as it arrives: the fabric lends or offers the tensor.
pub fn arrival(
    message: ToReceiver<Value, WindowRefusal>,
    offers: &mut Offers,
) -> ToReceiver<WindowArrival, WindowRefusal> {
    match message {
        ToReceiver::Record(Record { edge, n, step, answers_need, value }) => {
            let value = match value {
                Value::Tensor(tensor) if offers.is_on => WindowArrival::Offered(offers.offer(tensor)),
                Value::Tensor(tensor) => WindowArrival::Ready(ReadyValue::Tensor(arrived(tensor))),
                Value::Dead => WindowArrival::Ready(ReadyValue::Dead),
            };
            ToReceiver::Record(Record { edge, n, step, answers_need, value })
        }
        ToReceiver::Refused { edge, error } => ToReceiver::Refused { edge, error },
        ToReceiver::Retired { edge } => ToReceiver::Retired { edge },
        ToReceiver::StepsOver(over) => ToReceiver::StepsOver(over),
        ToReceiver::Flush { edge } => ToReceiver::Flush { edge },
    }
}

fn arrived(tensor: Tensor) -> ArrivedTensor {
    let told = Arc::new(ToldMeta { meta: tensor.meta().clone(), sender: placement_of(&tensor) });
    let checksum = Some(checksum_of(tensor.bytes()));
    ArrivedTensor { told, checksum, bytes: ArrivedBytes::Landed(tensor) }
}

impl Pair {
    /// As [`Pair::new`], over a fabric that offers tensors.
    pub fn offering(window: u64) -> Pair {
        let mut pair = Pair::new(window);
        pair.sides.iter_mut().for_each(|side| side.lanes.offers.is_on = true);
        pair
    }

    fn offers(&mut self) -> &mut Offers {
        &mut self.sides[RECEIVER].lanes.offers
    }

    /// Whether the receiver has granted a destination ahead.
    pub fn has_destination(&mut self) -> bool {
        !self.offers().ready.is_empty()
    }

    /// Delivers all messages, and writes no tensor.
    fn run_messages(&mut self) {
        let has_message =
            |side: &Side| !side.lanes.to_sender.is_empty() || !side.lanes.to_receiver.is_empty();
        while let Some(from) = self.sides.iter().position(has_message) {
            self.deliver(from);
        }
    }

    /// Offers a value that no receive waits for. The edge is announced before.
    fn hold_offer(&mut self, number: u32) {
        let call = self.receive("x", 1);
        self.run();
        give_up(self, &call);
        self.send("x", 1, number);
        self.run();
    }

    /// The number in a value that is there, or on its way.
    fn receive_at_once(&mut self, name: &str, step: u64) -> u32 {
        let mut call = self.receive(name, step);
        self.run();
        call.number()
    }

    /// A receive of a value that is on its way to it.
    fn on_its_way(&mut self, number: u32) -> Call {
        self.send("x", 1, number);
        let call = self.receive("x", 1);
        self.run_messages();
        assert!(call.waits(), "the tensor has not landed");
        call
    }
}

fn give_up(pair: &mut Pair, call: &Call) {
    let cancel = Cancel { call: call.of, why: CancelReason::Cancelled };
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    assert!(matching.cancel(lanes, &cancel));
}

#[test]
fn each_offered_tensor_lands_in_its_receive() {
    for refused in [None, Some(LandingRefused::Unreachable)] {
        let mut pair = Pair::offering(2);
        let given = pair.tensor(RECEIVER, 0, 8);
        let place = given.bytes().as_ptr();
        let mut into = pair.begin("x", 1, Destination::Into(given), SOON);
        let mut other = pair.receive("x", 1);
        pair.offers().refused = refused;
        pair.send("x", 1, 10);
        pair.send("x", 1, 20);
        pair.run();
        let Some(Ok(Payload::Into(tensor))) = into.outcome() else { panic!("not in the given tensor") };
        assert_eq!((number_in(tensor.bytes()), tensor.bytes().as_ptr()), (10, place));
        drop(tensor);
        assert_eq!(other.number(), 20);
        pair.end(1..=1);
    }
}

#[test]
fn a_tensor_whose_receive_gives_up_is_the_first_of_its_step() {
    for is_landed_first in [false, true] {
        let mut pair = Pair::offering(2);
        let mut first = pair.on_its_way(10);
        pair.send("x", 1, 20);
        pair.run_messages();
        give_up(&mut pair, &first);
        assert!(matches!(first.error(), Error::Cancelled { .. }));
        if is_landed_first {
            pair.run();
        }
        let [mut second, mut third] = [(); 2].map(|()| pair.receive("x", 1));
        pair.run();
        assert_eq!((second.number(), third.number()), (10, 20));
        pair.end(1..=1);
    }
}

#[test]
fn offered_tensors_of_an_ended_step_are_declined() {
    for side in [SENDER, RECEIVER] {
        let mut pair = Pair::offering(2);
        pair.hold_offer(10);
        pair.step(side, StepChange::CleanedUp { step: 1 });
        pair.run();
        assert!(pair.offers().is_empty(), "the sender keeps the tensor");
        pair.end(1..=1);
    }
}

/// As for a handle that is dropped: the value can overtake the command that cancels the receive.
#[test]
fn a_value_that_comes_after_its_receive_was_dropped_is_for_the_next_receive() {
    for mut pair in [Pair::new(2), Pair::offering(2)] {
        let given = || Destination::Into(pair.tensor(RECEIVER, 0, 8));
        for destination in [Destination::Alloc, given(), given()] {
            let first = pair.begin("x", 1, destination, SOON);
            let mut second = pair.receive("x", 1);
            pair.run();
            let of = first.of;
            drop(first);
            [10, 20].into_iter().for_each(|number| pair.send("x", 1, number));
            pair.run();
            assert_eq!((second.number(), pair.receive_at_once("x", 1)), (10, 20));
            let late = Cancel { call: of, why: CancelReason::Dropped };
            let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
            assert!(!matching.cancel(lanes, &late), "the receive has ended");
        }
        pair.end(1..=1);
    }
}

#[test]
fn a_tensor_that_lands_after_its_receive_was_dropped_is_for_the_next_receive() {
    for is_given in [false, true] {
        let mut pair = Pair::offering(2);
        pair.send("x", 1, 10);
        let destination = match is_given {
            true => Destination::Into(pair.tensor(RECEIVER, 0, 8)),
            false => Destination::Alloc,
        };
        let first = pair.begin("x", 1, destination, SOON);
        pair.run_messages();
        assert!(first.waits(), "the tensor has not landed");
        drop(first);
        pair.run();
        assert_eq!(pair.receive_at_once("x", 1), 10);
        pair.end(1..=1);
    }
}

#[test]
fn memory_that_a_caller_gave_to_a_receive_is_not_that_of_the_next_one() {
    for is_dropped in [false, true] {
        let mut pair = Pair::offering(2);
        let (owner, given) = given(&pair.sides[RECEIVER].lanes.pool, 8);
        pair.send("x", 1, 10);
        let first = pair.begin("x", 1, Destination::Into(given), SOON);
        pair.run_messages();
        assert!(first.waits(), "the tensor has not landed");
        match is_dropped {
            true => drop(first),
            false => give_up(&mut pair, &first),
        }
        pair.run();
        assert_eq!(Arc::strong_count(&owner), 1, "the memory is the caller's");
        assert_eq!(pair.receive_at_once("x", 1), 10);
        pair.end(1..=1);
    }
}

#[test]
fn a_waiting_receive_takes_over_what_another_has_left() {
    let mut pair = Pair::offering(2);
    let first = pair.on_its_way(10);
    let mut second = pair.receive("x", 1);
    give_up(&mut pair, &first);
    pair.run();
    assert_eq!(second.number(), 10);
    pair.end(1..=1);
}

#[test]
fn an_offered_tensor_that_does_not_fit_is_for_the_next_receive() {
    let mut pair = Pair::offering(2);
    let given = pair.tensor(RECEIVER, 0, 9);
    let mut mismatch = pair.begin("x", 1, Destination::Into(given), SOON);
    pair.send("x", 1, 10);
    pair.run();
    assert!(matches!(mismatch.error(), Error::ShapeMismatch { .. }));
    let mut next = pair.receive("x", 1);
    pair.run();
    assert_eq!(next.number(), 10);
    pair.end(1..=1);
}

#[test]
fn a_tensor_that_does_not_fit_stays_ahead_of_one_that_is_on_its_way() {
    let mut pair = Pair::offering(4);
    let [first, second] = [10, 20].map(|number| pair.on_its_way(number));
    give_up(&mut pair, &first);
    pair.run_messages();
    assert!(pair.deliver(SENDER), "the first tensor lands");
    let given = pair.tensor(RECEIVER, 0, 9);
    let mut mismatch = pair.begin("x", 1, Destination::Into(given), SOON);
    assert!(matches!(mismatch.error(), Error::ShapeMismatch { .. }));
    give_up(&mut pair, &second);
    assert_eq!([(); 2].map(|()| pair.receive_at_once("x", 1)), [10, 20]);
    pair.end(1..=1);
}

#[test]
fn the_end_of_a_step_fails_receives_whose_tensors_are_on_their_way() {
    let aborted = StepChange::Aborted { steps: 1..=1, status: Status::new(Code::Internal, "why") };
    for change in [StepChange::CleanedUp { step: 1 }, aborted] {
        let mut pair = Pair::offering(2);
        let mut call = pair.on_its_way(10);
        pair.step(RECEIVER, change);
        assert!(!call.waits() && call.outcome().expect("ended").is_err());
        pair.run();
        pair.end(1..=1);
    }
}

#[test]
fn a_loss_fails_receives_whose_tensors_are_on_their_way() {
    let mut pair = Pair::offering(2);
    let mut call = pair.on_its_way(10);
    pair.send("x", 1, 20);
    pair.run_messages();
    pair.lose();
    assert!(matches!(call.error(), Error::Stopped));
    pair.up();
    let mut next = pair.receive("x", 1);
    pair.run();
    assert!(next.waits(), "what was offered is lost with the link");
    pair.send("x", 1, 30);
    pair.run();
    assert_eq!(next.number(), 30);
    pair.end(1..=1);
}

#[test]
fn a_receive_on_a_link_that_is_about_to_end_waits_for_the_end() {
    for is_there in [false, true] {
        let mut pair = Pair::offering(2);
        if is_there {
            let call = pair.receive("x", 1);
            pair.run();
            give_up(&mut pair, &call);
            pair.send("x", 1, 10);
            pair.run();
        }
        pair.offers().refused = Some(LandingRefused::Down);
        let mut call = pair.receive("x", 1);
        if !is_there {
            pair.send("x", 1, 10);
            pair.run();
        }
        assert!(call.waits(), "the loss is not known yet");
        pair.lose();
        assert!(matches!(call.error(), Error::Stopped));
        pair.up();
        pair.end(1..=1);
    }
}

#[test]
fn a_receive_of_an_offer_is_found_by_its_call() {
    for is_down in [true, false] {
        let mut pair = Pair::offering(2);
        pair.hold_offer(10);
        pair.offers().refused = is_down.then_some(LandingRefused::Down);
        let mut call = pair.receive("x", 1);
        assert!(call.waits() && call.of.waiter.is_none(), "its handle has no number");
        give_up(&mut pair, &call);
        assert!(matches!(call.error(), Error::Cancelled { .. }));
        pair.lose();
        pair.up();
        pair.end(1..=1);
    }
}

#[test]
fn a_receive_that_waits_has_a_destination_granted_ahead() {
    let mut pair = Pair::offering(2);
    let first = pair.receive("x", 1);
    pair.run();
    assert!(!pair.has_destination(), "no tensor of the edge is known");
    pair.send("x", 1, 10);
    pair.run();
    drop(first);
    let given = pair.tensor(RECEIVER, 0, 8);
    let into = pair.begin("x", 2, Destination::Into(given), SOON);
    assert!(!pair.has_destination(), "the tensor is for a given one");
    give_up(&mut pair, &into);
    let mut calls = [2, 3].map(|step| pair.receive("x", step));
    assert!(pair.has_destination());
    // An offer crosses it. Its receive gets the tensor, and the destination is for the other one.
    pair.send("x", 2, 20);
    pair.run();
    assert!(calls[0].number() == 20 && pair.has_destination());
    calls[0] = pair.receive("x", 2);
    give_up(&mut pair, &calls[0]);
    assert!(pair.has_destination(), "another receive waits");
    pair.step(RECEIVER, StepChange::CleanedUp { step: 3 });
    assert!(!pair.has_destination(), "no receive waits");
    let late = pair.begin("x", 4, Destination::Alloc, Duration::from_nanos(1));
    assert!(pair.has_destination());
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    matching.expire(lanes, Time::NEVER);
    assert!(!late.waits() && !pair.has_destination());
    let _step_over = pair.receive("x", 5);
    assert!(pair.has_destination());
    pair.step(SENDER, StepChange::CleanedUp { step: 5 });
    pair.run();
    assert!(!pair.has_destination(), "its receive has failed");
    pair.end(1..=5);
}

#[test]
fn a_receive_whose_destination_is_not_granted_fails_and_the_next_one_gets_the_tensor() {
    let full = (LandingRefused::Full { limit: 1 }, "at its limit of 1: wait");
    let too_long = (LandingRefused::TooLong { limit: 2 }, "rdma_memory_windows");
    for (refused, said) in [full, too_long] {
        let mut pair = Pair::offering(2);
        pair.offers().refused = Some(refused);
        let mut call = pair.receive("x", 1);
        pair.send("x", 1, 10);
        pair.run();
        let error = call.error();
        assert!(
            matches!(error, Error::ResourceExhausted { .. }) && error.to_string().contains(said),
            "{error}"
        );
        let mut next = pair.receive("x", 1);
        pair.run();
        assert_eq!(next.number(), 10);
        pair.end(1..=1);
    }
}

#[test]
fn a_receive_without_room_names_the_peer_that_has_not_written() {
    let mut pair = Pair::offering(2);
    let mut first = pair.on_its_way(10);
    let taken: Vec<_> = std::iter::from_fn(|| pair.try_tensor(RECEIVER, 8).ok()).collect();
    let mut call = pair.receive("x", 1);
    pair.send("x", 1, 20);
    pair.run_messages();
    let error = call.error();
    let Error::NoRoom { granted: Some(granted), .. } = &error else { panic!("{error}") };
    assert_eq!(**granted, GrantedBytes { peer: TaskId::new("a", 0).expect("a task"), bytes: 8 });
    assert!(
        error.to_string().ends_with(
            "; 8 bytes are the destinations of tensors that a/0 \
         has not written yet"
        ),
        "{error}"
    );
    drop(taken);
    let mut next = pair.receive("x", 1);
    pair.run();
    assert_eq!((first.number(), next.number()), (10, 20));
    pair.end(1..=1);
}

#[test]
fn a_direct_receive_leaves_an_offered_tensor_to_a_waiter() {
    let mut pair = Pair::offering(2);
    pair.hold_offer(10);
    let (mut receive, mut expected) = (DirectReceive::Waiting(Destination::Alloc), None);
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    let of = (TO_SENDER, key("x", 1));
    let now = matching.receive_now(lanes, (of.0, of.1.borrowed(), true), &mut receive, &mut expected);
    assert!(matches!((now, receive), (Some(Ok(())), DirectReceive::Waiting(_))));
    let mut waiter = pair.receive("x", 1);
    pair.run();
    assert_eq!(waiter.number(), 10);
    pair.end(1..=1);
}

#[test]
fn a_fatal_loss_ends_receives_whose_tensors_are_on_their_way() {
    let mut pair = Pair::offering(2);
    let mut call = pair.on_its_way(10);
    pair.sides[RECEIVER].matching.end(&Error::Stopped);
    assert!(matches!(call.error(), Error::Stopped));
    pair.run();
    pair.end(1..=1);
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, assert_found};
    assert_found(Mutant::DestinationNotWithdrawn, a_receive_that_waits_has_a_destination_granted_ahead);
    assert_found(Mutant::LandingDropped, a_tensor_whose_receive_gives_up_is_the_first_of_its_step);
    for found in [
        a_value_that_comes_after_its_receive_was_dropped_is_for_the_next_receive,
        a_tensor_that_lands_after_its_receive_was_dropped_is_for_the_next_receive,
    ] {
        assert_found(Mutant::ValueToNobody, found);
    }
    assert_found(Mutant::OfferNotDeclined, offered_tensors_of_an_ended_step_are_declined);
}
