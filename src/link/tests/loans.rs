//! Loans, requested or not.

use super::standing::{OWNER, warm};
use super::*;
use crate::fabric::LoanPermit;
use crate::wire::{MetaSlot, ShortMessage};

impl ByHand {
    /// Lends `bytes` bytes of value `fill`.
    fn loan(&mut self, request: RequestId, bytes: u64, fill: u8) {
        self.loan_as(ImmediateKind::Lend, request, bytes, fill);
    }

    fn loan_as(&mut self, kind: ImmediateKind, request: RequestId, bytes: u64, fill: u8) {
        let mut source = self.pool.zeroed(meta(DType::U8, &[bytes]).meta).expect("room");
        source.bytes_mut().fill(fill);
        let RequestId { slot, generation } = request;
        let immediate = Immediate { kind, generation, slot };
        let mut permit = Some(LoanPermit::unbounded());
        self.port
            .lend(
                self.link,
                &mut Some(source.freeze()),
                &mut permit,
                &ShortMessage::from_u32(immediate.to_bits()),
            )
            .expect("room");
    }
}

#[test]
fn a_loan_without_a_request_for_it_ends_the_link_and_the_waiter() {
    for into in [false, true] {
        let mut scene = warm();
        let destination = if into { scene.own_memory() } else { Destination::Alloc };
        // Its meta-data is known: the request names it.
        let request = scene.request_as(destination);
        scene.peer.loan(request, 1000, 3);
        scene.expect_told("did not ask to borrow");
    }
}

#[test]
fn a_loan_for_a_standing_request_that_does_not_borrow_ends_the_link() {
    let mut scene = warm();
    let request = scene.post(5, 1).steps[0].0;
    scene.peer.loan(request, 1000, 3);
    scene.expect_violation("did not ask to borrow");
}

#[test]
fn a_loan_with_unknown_meta_data_ends_the_link_and_the_waiter() {
    let mut scene = scene();
    let request = scene.request_as(Destination::Borrow);
    scene.peer.loan(request, 64, 3);
    scene.expect_told("whose meta-data is not known");
}

#[test]
fn a_loan_for_a_standing_request_is_copied_into_the_claims_tensor() {
    let mut scene = warm();
    assert_eq!(scene.links.post_standing(scene.link, &key(5), 1, true, OWNER).steps, 1);
    let request = scene.peer.standing().steps[0].0;
    let into = scene.own_memory();
    scene.claim(5, into);
    scene.peer.loan(request, 1000, 3);
    match scene.event() {
        LinkEvent::Arrived { received: Received::Into(filled), .. } => assert_eq!(filled.bytes(), [3; 1000]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn meta_data_of_an_unrequested_loan_end_the_link_and_the_waiter() {
    for into in [false, true] {
        let mut scene = warm();
        let destination = if into { scene.own_memory() } else { Destination::Alloc };
        let request = scene.request_as(destination);
        // They would fit the grant.
        let other = VersionedMeta { version: 2, ..meta(DType::F32, &[250]) };
        scene.peer.say(&Message::Meta { request, follows: Follows::Loan, meta: other });
        scene.expect_told("meta-data of a loan came for a request that did not ask to borrow");
    }
}

/// A scene in which a loan of the edge was requested and the tensor was written.
fn unlent() -> Scene {
    let mut scene = warm();
    let (request, grant) = scene.post_to_borrow(5);
    assert_eq!(grant, None, "what is lent has no destination");
    scene.claim(5, Destination::Borrow);
    scene.peer.say(&Message::Meta { request, follows: Follows::ReRequest, meta: meta(DType::U8, &[1000]) });
    assert!(scene.events().is_empty());
    let grant = match Message::decode(&scene.peer.next()).expect("a message") {
        Message::ReRequest { grant, .. } => grant,
        other => panic!("{other:?}"),
    };
    scene.peer.write(request, grant, 1000, 5);
    assert_eq!(scene.arrived(5).bytes(), [5; 1000]);
    scene
}

impl Scene {
    /// A tensor of the waiter for the edge.
    fn own_memory(&self) -> Destination {
        Destination::Into(self.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room"))
    }

    fn post_to_borrow(&mut self, step: u64) -> (RequestId, Option<Grant>) {
        assert_eq!(self.links.post_standing(self.link, &key(step), 1, true, OWNER).steps, 1);
        self.peer.standing().steps[0]
    }
}

#[test]
fn after_a_refused_loan_standing_requests_have_a_destination_and_may_still_get_a_loan() {
    let mut scene = unlent();
    let (request, grant) = scene.post_to_borrow(6);
    scene.peer.write(request, grant.expect("one is written at once"), 1000, 6);
    scene.claim(6, Destination::Borrow);
    assert_eq!(scene.arrived(6).bytes(), [6; 1000]);
    let (request, grant) = scene.post_to_borrow(7);
    assert!(grant.is_some());
    scene.peer.loan(request, 1000, 7);
    scene.claim(7, Destination::Borrow);
    assert_eq!(scene.arrived(7).bytes(), [7; 1000]);
    assert!(scene.links.pool().is_empty(), "the destination went back");
    assert!(scene.post_to_borrow(8).1.is_some(), "one loan is not yet many");
}

#[test]
fn meta_data_of_a_cancelled_loan_are_remembered() {
    let mut scene = warm();
    let (request, _) = scene.post_to_borrow(5);
    let (next, _) = scene.post_to_borrow(6);
    scene.links.withdraw_standing(scene.link, &key(5), 6, OWNER);
    assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
    let other = VersionedMeta { version: 2, ..meta(DType::U8, &[60, 5]) };
    scene.peer.say(&Message::Meta { request, follows: Follows::Loan, meta: other });
    scene.peer.say(&Message::CancelAck { request });
    assert!(scene.events().is_empty());
    scene.peer.loan_as(ImmediateKind::LendAs(MetaSlot::of(2)), next, 300, 6);
    scene.claim(6, Destination::Borrow);
    assert_eq!(scene.arrived(6).shape().dims(), [60, 5]);
}

#[test]
fn a_write_that_is_not_as_long_as_the_tensor_that_was_told_ends_the_link() {
    for dims in [500, 1016] {
        let mut scene = unlent();
        let (request, grant) = scene.post_to_borrow(6);
        let other = VersionedMeta { version: 2, ..meta(DType::U8, &[dims]) };
        scene.peer.say(&Message::Meta { request, follows: Follows::Loan, meta: other });
        scene.peer.write(request, grant.expect("granted"), 1000, 6);
        scene.expect_violation(&format!("a write of 1000 bytes landed for a tensor of {dims}"));
    }
}
