//! Loans, asked for or not.

use super::armed::{OWNER, key, warm};
use super::*;
use crate::fabric::{Allowance, OpId};

impl ByHand {
    /// Lends so many bytes, all the same.
    fn loan(&mut self, request: RequestId, bytes: u64, fill: u8) {
        let mut source = self.pool.zeroed(meta(DType::U8, &[bytes]).meta).expect("room");
        source.bytes_mut().fill(fill);
        let RequestId { slot, generation } = request;
        let immediate = Immediate { kind: ImmediateKind::Lend, generation, slot };
        let (id, allowance) = (OpId(1), Allowance::unbounded());
        self.port.lend(self.link, Lane::CONTROL, id, &source.freeze(), allowance, immediate).expect("room");
    }
}

impl Scene {
    /// Asks for a tensor so and lets the peer see the request.
    fn request_as(&mut self, want: Want) -> RequestId {
        self.links.request(self.link, key(1), want, u32::MAX, 77).expect("sent");
        loop {
            if let Message::Request(request) = Message::decode(&self.peer.next()).expect("a message") {
                return request.request;
            }
        }
    }

    /// Checks that the link went down for a reason that contains `part`, and that the waiter is told.
    fn expect_told(&mut self, part: &str) {
        let events = self.events();
        let LinkEvent::Down { failure: LinkFailure::Protocol(why), waiters, .. } = &events[0] else {
            panic!("{part}: {events:?}")
        };
        assert!(why.contains(part), "{why}");
        assert_eq!(waiters.as_slice(), [77]);
        drop(events);
        assert!(self.links.pool().is_empty(), "{part}: nothing leaked");
    }
}

#[test]
fn a_loan_that_was_not_asked_for_ends_the_link_and_tells_the_waiter() {
    for into in [false, true] {
        let mut scene = warm();
        let want = match into {
            true => Want::Into(scene.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room")),
            false => Want::Fresh,
        };
        // Its meta-data is known, as the request names it.
        let request = scene.request_as(want);
        scene.peer.loan(request, 1000, 3);
        scene.expect_told("did not ask to borrow");
    }
}

#[test]
fn a_loan_that_was_not_asked_for_in_advance_ends_the_link() {
    let mut scene = warm();
    let request = scene.arm(5, 1).steps[0].0;
    scene.peer.loan(request, 1000, 3);
    scene.expect_violation("did not ask to borrow");
}

#[test]
fn a_loan_of_what_nobody_knows_ends_the_link_and_tells_the_waiter() {
    let mut scene = scene();
    let request = scene.request_as(Want::Borrow);
    scene.peer.loan(request, 64, 3);
    scene.expect_told("whose meta-data is not known");
}

#[test]
fn a_loan_that_was_asked_for_in_advance_is_copied_for_a_claim_with_memory_of_its_own() {
    let mut scene = warm();
    assert_eq!(scene.links.arm_steps(scene.link, &key(5), 1, true, OWNER).steps, 1);
    let request = scene.peer.armed().steps[0].0;
    let into = scene.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room");
    scene.claim(5, Want::Into(into));
    scene.peer.loan(request, 1000, 3);
    match scene.event() {
        LinkEvent::Arrived { received: Received::Into(filled), .. } => assert_eq!(filled.bytes(), [3; 1000]),
        other => panic!("{other:?}"),
    }
}
