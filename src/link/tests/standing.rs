//! Standing requests with a hostile peer.

use super::*;
use crate::memory::Tensor;
use crate::wire::MetaSlot;
use crate::wire::message::{StandingStep, StandingSteps};

/// The owner of the tests' standing requests.
pub(super) const OWNER: u64 = 7;

/// The parts of a `STANDING_REQUEST` that the peer sees.
#[derive(Debug)]
pub(super) struct Seen {
    first_step: u64,
    pub meta_version: u32,
    pub steps: Vec<(RequestId, Option<Grant>)>,
}

impl ByHand {
    /// Sends a `STANDING_REQUEST` for these slots, beginning with step `first_step`.
    pub(super) fn post(&mut self, route: u32, first_step: u64, slots: &[u32], grant: Option<Grant>) {
        let mut bytes = Vec::new();
        for slot in slots {
            let request = RequestId { slot: Slot::new(*slot).expect("20 bits"), generation: 0 };
            let (key, offset) = grant.map_or((0, 0), |grant| (grant.key, grant.offset));
            StandingStep { request, key, offset }.put(&mut bytes, grant.is_some());
        }
        self.say(&Message::StandingRequest(crate::wire::message::StandingRequest {
            route,
            first_step,
            frame: 0,
            iteration: 0,
            meta_version: 1,
            borrow: false,
            validate: false,
            room: grant.map(|grant| (grant.region, grant.len)),
            steps: StandingSteps::new(&bytes, grant.is_some()),
        }));
    }

    /// The next `STANDING_REQUEST`.
    pub(super) fn standing(&mut self) -> Seen {
        loop {
            if let Message::StandingRequest(standing) = Message::decode(&self.next()).expect("a message") {
                let steps = standing.steps.iter().map(|step| (step.request, standing.grant(&step))).collect();
                return Seen { first_step: standing.first_step, meta_version: standing.meta_version, steps };
            }
        }
    }

    /// Writes `bytes` bytes of value `fill` to a grant.
    pub(super) fn write(&mut self, request: RequestId, grant: Grant, bytes: u64, fill: u8) {
        self.write_as(ImmediateKind::Plain, request, grant, bytes, fill);
    }

    pub(super) fn write_as(
        &mut self,
        kind: ImmediateKind,
        request: RequestId,
        grant: Grant,
        bytes: u64,
        fill: u8,
    ) {
        let mut source = self.pool.zeroed(meta(DType::U8, &[bytes]).meta).expect("room");
        source.bytes_mut().fill(fill);
        let immediate = Immediate { kind, generation: request.generation, slot: request.slot };
        let source: Tensor = source.freeze();
        let target = Grant { len: bytes, ..grant };
        let posted = self.port.write(self.link, &source, bytes, &target, Some(immediate));
        posted.expect("room");
    }
}

pub(super) fn roomy() -> Scene {
    scene_with(LinkSettings {
        small_tensor_bytes: 128,
        max_requests: 16,
        max_routes: 4,
        validate: false,
        protocol: TensorProtocol::Requests,
    })
}

/// A scene in which the meta-data of the edge is known: 1,000 bytes, version 1.
pub(super) fn warm() -> Scene {
    let mut scene = roomy();
    let request = scene.request();
    scene.peer.say(&Message::Meta { request, follows: Follows::ReRequest, meta: meta(DType::U8, &[1000]) });
    assert!(scene.events().is_empty());
    let grant = match Message::decode(&scene.peer.next()).expect("a message") {
        Message::ReRequest { grant, .. } => grant,
        other => panic!("{other:?}"),
    };
    scene.peer.write(request, grant, 1000, 1);
    assert!(matches!(scene.event(), LinkEvent::Arrived { .. }));
    scene
}

impl Scene {
    pub(super) fn post_standing(&mut self, first: u64, count: u32) -> u32 {
        self.links.post_standing(self.link, &key(first), count, false, OWNER).steps
    }

    pub(super) fn post(&mut self, first: u64, count: u32) -> Seen {
        assert_eq!(self.post_standing(first, count), count);
        self.peer.standing()
    }

    pub(super) fn claim(&mut self, step: u64, destination: Destination) -> RequestId {
        let before = self.links.load().requests;
        let id =
            self.links.request(self.link, key(step), destination, u32::MAX, step as u32).expect("claimed");
        assert!(self.links.load().requests <= before, "nothing new was asked for");
        id
    }

    /// The tensor that has come for a step.
    pub(super) fn arrived(&mut self, step: u64) -> Tensor {
        match self.event() {
            LinkEvent::Arrived { waiter, received: Received::Tensor(tensor), .. } => {
                assert_eq!(u64::from(waiter), step);
                tensor
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_write_for_a_step_goes_to_the_receive_that_claims_it() {
    let mut scene = warm();
    let seen = scene.post(5, 3);
    assert_eq!((seen.first_step, seen.meta_version, seen.steps.len()), (5, 1, 3));
    scene.claim(6, Destination::Alloc);
    // Out of order, and one before its claim.
    for (at, fill) in [(2, 7), (1, 6), (0, 5)] {
        let (request, grant) = seen.steps[at];
        scene.peer.write(request, grant.expect("a destination"), 1000, fill);
    }
    assert!(scene.arrived(6).bytes().iter().all(|byte| *byte == 6));
    assert_eq!(scene.links.load().standing, 2);
    for step in [5, 7] {
        scene.claim(step, Destination::Alloc);
        assert!(scene.arrived(step).bytes().iter().all(|byte| u64::from(*byte) == step));
    }
    assert_eq!((scene.links.load().requests, scene.links.load().standing), (0, 0));
    assert_eq!(scene.count(Counter::StandingClaimed), 3);
}

#[test]
fn a_second_receive_of_a_claimed_step_sends_a_plain_request() {
    let mut scene = warm();
    scene.post(5, 1);
    scene.claim(5, Destination::Alloc);
    scene.links.request(scene.link, key(5), Destination::Alloc, u32::MAX, 50).expect("sent");
    assert!(
        matches!(Message::decode(&scene.peer.next()), Ok(Message::Request(request)) if request.step == 5)
    );
}

#[test]
fn a_claim_with_a_tensor_gets_the_value_copied_into_it() {
    let mut scene = warm();
    let seen = scene.post(5, 3);
    let given =
        |scene: &Scene, bytes| scene.links.pool().zeroed(meta(DType::U8, &[bytes]).meta).expect("room");
    let into = given(&scene, 1000);
    let address = into.as_ptr();
    scene.claim(5, Destination::Into(into));
    scene.peer.write(seen.steps[0].0, seen.steps[0].1.expect("granted"), 1000, 3);
    match scene.event() {
        LinkEvent::Arrived { received: Received::Into(filled), .. } => {
            assert_eq!(filled.as_ptr(), address);
            assert!(filled.bytes().iter().all(|byte| *byte == 3));
        }
        other => panic!("{other:?}"),
    }
    // A tensor that does not fit: its value is in line again.
    scene.peer.write(seen.steps[1].0, seen.steps[1].1.expect("granted"), 1000, 4);
    assert!(scene.events().is_empty());
    let into = given(&scene, 7);
    scene.claim(6, Destination::Into(into));
    assert!(matches!(scene.event(), LinkEvent::Failed { error: RequestError::ShapeMismatch { .. }, .. }));
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::Return { step: 6, .. })));
    // A dead value leaves the given tensor unchanged.
    scene.peer.immediate(ImmediateKind::Dead, seen.steps[2].0);
    let into = given(&scene, 7);
    assert!(scene.events().is_empty());
    scene.claim(7, Destination::Into(into));
    assert!(matches!(scene.event(), LinkEvent::Arrived { received: Received::Dead(Some(_)), .. }));
}

#[test]
fn a_smaller_tensor_takes_the_destination_over_with_its_own_meta_data() {
    let mut scene = warm();
    let seen = scene.post(5, 1);
    let (request, grant) = seen.steps[0];
    let smaller = VersionedMeta { version: 2, ..meta(DType::U8, &[30, 10]) };
    scene.peer.say(&Message::Meta { request, follows: Follows::Write, meta: smaller });
    scene.peer.write(request, grant.expect("granted"), 300, 9);
    scene.claim(5, Destination::Alloc);
    let tensor = scene.arrived(5);
    assert_eq!(tensor.shape().dims(), [30, 10]);
    assert!(tensor.bytes().len() == 300 && tensor.bytes().iter().all(|byte| *byte == 9));
    drop(tensor);
    // Later standing requests expect the new size, and have room for both.
    let seen = scene.post(6, 1);
    assert_eq!((seen.meta_version, seen.steps[0].1.map(|grant| grant.len)), (2, Some(1000)));
    let (request, grant) = seen.steps[0];
    scene.peer.write(request, grant.expect("granted"), 300, 8);
    scene.claim(6, Destination::Alloc);
    assert_eq!(scene.arrived(6).shape().dims(), [30, 10]);
}

#[test]
fn a_tensor_whose_meta_data_were_told_before_comes_with_their_place_alone() {
    let mut scene = warm();
    let seen = scene.post(5, 3);
    let smaller = VersionedMeta { version: 2, ..meta(DType::U8, &[30, 10]) };
    let (request, grant) = seen.steps[0];
    scene.peer.say(&Message::Meta { request, follows: Follows::Write, meta: smaller });
    scene.peer.write(request, grant.expect("granted"), 300, 5);
    assert!(scene.events().is_empty());
    // The requests name version 1, which the second tensor has; the third has version 2.
    let (request, grant) = seen.steps[1];
    scene.peer.write(request, grant.expect("granted"), 1000, 6);
    let (request, grant) = seen.steps[2];
    let kind = ImmediateKind::PlainAs(MetaSlot::of(2));
    scene.peer.write_as(kind, request, grant.expect("granted"), 300, 7);
    for (step, dims) in [(5, &[30, 10][..]), (6, &[1000]), (7, &[30, 10])] {
        scene.claim(step, Destination::Alloc);
        let tensor = scene.arrived(step);
        assert_eq!(tensor.shape().dims(), dims);
        assert!(tensor.bytes().iter().all(|byte| u64::from(*byte) == step));
    }
    assert_eq!(scene.post(8, 1).meta_version, 2, "that of the last one that came");
    assert_eq!(scene.count(Counter::ReRequests), 0);
}

#[test]
fn unknown_or_unfitting_meta_data_end_the_link() {
    let mut unknown = warm();
    let (request, grant) = unknown.post(5, 1).steps[0];
    unknown.peer.write_as(ImmediateKind::PlainAs(MetaSlot::of(2)), request, grant.expect("granted"), 300, 7);
    unknown.expect_violation("at place 2, was never told");
    let mut short = warm();
    let (request, grant) = short.post(5, 1).steps[0];
    short.peer.write_as(ImmediateKind::PlainAs(MetaSlot::of(1)), request, grant.expect("granted"), 300, 7);
    short.expect_violation("of another length than was granted");
    let mut plain = warm();
    let request = plain.links.request(plain.link, key(5), Destination::Alloc, u32::MAX, 5).expect("sent");
    let grant = match Message::decode(&plain.peer.next()).expect("a message") {
        Message::Request(TensorRequest { grant: Some(grant), .. }) => grant,
        other => panic!("{other:?}"),
    };
    plain.peer.write_as(ImmediateKind::PlainAs(MetaSlot::of(1)), request, grant, 1000, 7);
    plain.expect_violation("before a write that was not granted");
    let mut nothing = warm();
    let request = nothing.post(5, 1).steps[0].0;
    nothing.peer.immediate(ImmediateKind::LendAs(MetaSlot::of(1)), request);
    nothing.expect_violation("without a loan");
}

#[test]
fn meta_data_before_a_write_without_a_grant_end_the_link() {
    let mut plain = roomy();
    let request = plain.request();
    plain.peer.say(&Message::Meta { request, follows: Follows::Write, meta: meta(DType::U8, &[1]) });
    plain.expect_violation("before a write that was not granted");
    let mut large = warm();
    let seen = large.post(5, 1);
    let larger = VersionedMeta { version: 2, ..meta(DType::U8, &[1001]) };
    large.peer.say(&Message::Meta { request: seen.steps[0].0, follows: Follows::Write, meta: larger });
    large.expect_violation("before a write that was not granted");
}

#[test]
fn an_error_waits_for_the_claim_of_its_step() {
    let mut scene = warm();
    let seen = scene.post(5, 2);
    let status = Status::new(Code::NotFound, "gone there");
    scene.peer.say(&Message::Error { request: seen.steps[0].0, status: status.clone() });
    assert!(scene.events().is_empty());
    scene.claim(5, Destination::Alloc);
    let failed = scene.event();
    assert!(
        matches!(&failed, LinkEvent::Failed { error: RequestError::Remote(said), .. } if *said == status)
    );
}

#[test]
fn a_stashed_value_that_does_not_fit_stays_when_its_sender_has_forgotten_it() {
    let mut scene = warm();
    let seen = scene.post(5, 1);
    scene.peer.write(seen.steps[0].0, seen.steps[0].1.expect("granted"), 1000, 5);
    assert!(scene.events().is_empty());
    scene.links.withdraw_standing(scene.link, &key(0), 100, OWNER);
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::Return { step: 5, .. })));
    let seen = scene.post(5, 1);
    scene.peer.say(&Message::Error { request: seen.steps[0].0, status: Status::new(Code::NotFound, "over") });
    assert!(scene.events().is_empty());
    let into = scene.links.pool().zeroed(meta(DType::U8, &[7]).meta).expect("room");
    scene.claim(5, Destination::Into(into));
    assert!(matches!(scene.event(), LinkEvent::Failed { error: RequestError::ShapeMismatch { .. }, .. }));
    assert_eq!(scene.links.load().stashed, 1);
    scene.peer.port.poll(&mut scene.peer.completions);
    assert_eq!(scene.peer.completions.drain().count(), 0, "nothing goes back for what was not given");
}

#[test]
fn early_values_go_back_in_line_when_their_edge_ends() {
    let mut scene = warm();
    let seen = scene.post(5, 2);
    scene.peer.write(seen.steps[0].0, seen.steps[0].1.expect("granted"), 1000, 5);
    assert!(scene.events().is_empty());
    scene.links.withdraw_standing(scene.link, &key(5), 7, OWNER);
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::Return { step: 5, stash_id: 0, .. })));
    let cancelled = scene.peer.next();
    assert_eq!(Message::decode(&cancelled), Ok(Message::Cancel { request: seen.steps[1].0 }));
    let load = scene.links.load();
    assert_eq!((load.standing, load.requests, load.stashed, load.unresolved), (0, 1, 1, 1));
    // A value that overtakes the cancel goes back as well.
    scene.peer.write(seen.steps[1].0, seen.steps[1].1.expect("granted"), 1000, 6);
    assert!(scene.events().is_empty());
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::Return { step: 6, stash_id: 1, .. })));
    scene.peer.say(&Message::CancelAck { request: seen.steps[1].0 });
    assert!(scene.events().is_empty());
    assert_eq!((scene.links.load().requests, scene.links.load().unresolved), (0, 0));
}

#[test]
fn the_end_of_a_step_ends_its_standing_requests() {
    let mut scene = warm();
    let seen = scene.post(5, 3);
    scene.peer.write(seen.steps[0].0, seen.steps[0].1.expect("granted"), 1000, 5);
    assert!(scene.events().is_empty());
    scene.links.cancel_requests(scene.link, &mut |key, _| {
        if key.step < 7 { CancelDecision::Abandon } else { CancelDecision::Keep }
    });
    let cancelled = scene.peer.next();
    assert_eq!(Message::decode(&cancelled), Ok(Message::Cancel { request: seen.steps[1].0 }));
    assert!(scene.count(Counter::CancelsSent) == 1, "what has come needs none");
    scene.peer.say(&Message::CancelAck { request: seen.steps[1].0 });
    assert!(scene.events().is_empty());
    assert_eq!((scene.links.load().standing, scene.links.load().requests), (1, 1));
}

#[test]
fn early_values_of_an_ended_link_are_for_the_next_receive() {
    let mut scene = warm();
    let seen = scene.post(5, 2);
    scene.peer.write(seen.steps[0].0, seen.steps[0].1.expect("granted"), 1000, 5);
    assert!(scene.events().is_empty());
    scene.peer.say_bytes(&[99]);
    let events = scene.events();
    assert!(matches!(&events[0], LinkEvent::Orphaned { key, .. } if key.step == 5), "{events:?}");
    assert!(matches!(&events[1], LinkEvent::Down { waiters, .. } if waiters.is_empty()), "{events:?}");
    drop(events);
    assert!(scene.links.pool().is_empty());
}

#[test]
fn standing_requests_leave_room_for_others() {
    let mut scene = warm();
    assert_eq!(scene.post_standing(5, 16), 8, "half of the slots");
    assert_eq!(scene.post_standing(13, 1), 0);
    assert_eq!(scene.peer.standing().steps.len(), 8);
    scene.links.withdraw_standing(scene.link, &key(0), 100, OWNER);
    let mut large = scene_with(LinkSettings {
        small_tensor_bytes: 128,
        max_requests: 100,
        max_routes: 4,
        validate: false,
        protocol: TensorProtocol::Requests,
    });
    let request = large.request();
    large.peer.say(&Message::Meta {
        request,
        follows: Follows::ReRequest,
        meta: meta(DType::U8, &[100_000]),
    });
    assert!(large.events().is_empty());
    assert_eq!(large.post_standing(5, 16), 2, "a quarter of the pool of 1 MiB");
    assert_eq!(large.post_standing(7, 16), 0);
}

#[test]
fn a_withdrawal_leaves_the_requests_of_other_owners() {
    let mut scene = warm();
    scene.post(5, 2);
    let standing = scene.links.post_standing(scene.link, &key(7), 2, false, OWNER + 1);
    assert_eq!(standing, StandingPosted { steps: 2, no_room: false });
    // Once as a range that is searched step by step, and once as a range that is longer than the
    // number of requests.
    for (first, until) in [(5, 9), (0, 1000)] {
        scene.links.withdraw_standing(scene.link, &key(first), until, OWNER);
        assert_eq!(scene.links.load().standing, 2);
    }
    scene.links.withdraw_standing(scene.link, &key(0), 1000, OWNER + 1);
    assert_eq!(scene.links.load().standing, 0);
}

#[test]
fn a_step_has_one_standing_request() {
    let mut scene = warm();
    scene.post(5, 2);
    assert_eq!(scene.post_standing(6, 2), 0);
    assert_eq!(scene.post_standing(4, 2), 1, "up to the one that is standing");
}

#[test]
fn a_window_is_as_many_requests_at_its_sender() {
    let mut scene = roomy();
    scene.peer.route(1, 1, HERE, THERE);
    scene.peer.post(1, 40, &[3, 5], Some(Grant { region: 0, key: 1, offset: 64, len: 1000 }));
    let events = scene.events();
    let asked: Vec<_> = events
        .iter()
        .map(|event| match event {
            LinkEvent::Requested { peer_request, key, timeout_ms: u32::MAX, standing: true } => {
                (peer_request.request.slot.index(), key.step)
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(asked, [(3, 40), (5, 41)]);
    assert_eq!(scene.links.load().peer_requests, 2);
}

#[test]
fn invalid_windows_end_the_link() {
    let mut unknown = roomy();
    unknown.peer.post(5, 0, &[0], None);
    unknown.expect_violation("names route 5");
    let mut twice = roomy();
    twice.peer.route(1, 1, HERE, THERE);
    twice.peer.post(1, 0, &[2, 2], None);
    twice.expect_violation("request slot 2 (generation 0) is in use");
    let mut used = roomy();
    used.peer.route(1, 1, HERE, THERE);
    used.peer.ask(2, 1);
    used.peer.post(1, 0, &[2], None);
    used.expect_violation("request slot 2 (generation 0) is in use");
    let mut endless = roomy();
    endless.peer.route(1, 1, HERE, THERE);
    let mut bytes = vec![15, 0, 1, 0, 0, 0];
    bytes.extend([u64::MAX, 0, 0].iter().flat_map(|number| number.to_le_bytes()));
    bytes.extend([0; 12]);
    endless.peer.say_bytes(&bytes);
    endless.expect_violation("2 as its number of steps");
}

#[test]
fn a_window_beyond_the_limit_is_refused_step_by_step_and_leaves_room_for_others() {
    let mut scene = scene();
    scene.peer.route(1, 1, HERE, THERE);
    scene.peer.post(1, 0, &[0, 1, 2, 3, 4], None);
    assert_eq!(scene.events().len(), 3, "three of four");
    for slot in [3, 4] {
        match Message::decode(&scene.peer.next()).expect("a message") {
            Message::Error { request, status } => {
                assert_eq!((request.slot.index(), status.code), (slot, Code::Unavailable));
            }
            other => panic!("{other:?}"),
        }
    }
    scene.peer.ask(3, 1);
    assert_eq!(scene.events().len(), 1, "a plain one has room");
    scene.peer.ask(4, 1);
    assert!(scene.events().is_empty());
    let status = match Message::decode(&scene.peer.next()).expect("a message") {
        Message::Error { status, .. } => status,
        other => panic!("{other:?}"),
    };
    assert_eq!(status.code, Code::ResourceExhausted);
    // A request that has ended makes room for another.
    let request = RequestId { slot: Slot::new(0).expect("20 bits"), generation: 0 };
    scene.peer.say(&Message::Cancel { request });
    scene.peer.post(1, 9, &[5], None);
    assert!(matches!(&scene.events()[..], [LinkEvent::Withdrawn { .. }, LinkEvent::Requested { .. }]));
}

#[test]
fn a_forged_grant_is_refused_by_the_receiver() {
    let mut scene = roomy();
    scene.peer.route(1, 1, HERE, THERE);
    scene.peer.post(1, 0, &[0], Some(Grant { region: 7, key: 9, offset: u64::MAX, len: 1000 }));
    let LinkEvent::Requested { peer_request, .. } = scene.event() else { panic!("not asked") };
    let tensor = scene.links.pool().zeroed(meta(DType::U8, &[900]).meta).expect("room").freeze();
    assert!(matches!(scene.links.serve(peer_request, Value::Tensor(tensor), 1), ServeOutcome::Posted));
    scene.peer.port.poll(&mut scene.peer.completions);
    let bad =
        scene.peer.completions.drain().any(|(completion, _)| matches!(completion.event, Event::Down(_)));
    assert!(bad, "nothing was written anywhere");
}
