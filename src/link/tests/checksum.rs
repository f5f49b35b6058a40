//! Data validation with a hostile peer.

use super::standing::OWNER;
use super::*;
use crate::memory::Tensor;
use crate::wire::message::{StandingStep, StandingSteps};
use crate::wire::{ShortMessage, checksum_of};

const BYTES: [u8; 4] = [1, 2, 3, 4];

fn validating() -> Scene {
    scene_with(LinkSettings {
        small_tensor_bytes: 128,
        max_requests: 16,
        max_routes: 4,
        validate: true,
        protocol: TensorProtocol::Requests,
    })
}

/// Arrivals at the peer.
#[derive(Debug, PartialEq)]
enum Seen {
    Message(Vec<u8>),
    Immediate(ImmediateKind, u64),
    Lent(u64),
}

impl ByHand {
    fn checksum(&mut self, request: RequestId, checksum: u64) {
        self.say(&Message::Checksum { request, checksum });
    }

    fn response(&mut self, request: RequestId, data: &[u8]) {
        let meta = MetaRef::New(meta(DType::U8, &[data.len() as u64]));
        self.say(&Message::Response { request, meta, data });
    }

    /// Lends `bytes` bytes of value `fill`, behind their meta-data.
    fn lend(&mut self, request: RequestId, bytes: u64, fill: u8) {
        let meta = meta(DType::U8, &[bytes]);
        let mut source = self.pool.zeroed(meta.meta.clone()).expect("room");
        source.bytes_mut().fill(fill);
        self.say(&Message::Meta { request, follows: Follows::Loan, meta });
        let RequestId { slot, generation } = request;
        let immediate = Immediate { kind: ImmediateKind::Lend, generation, slot };
        let source = source.freeze();
        let mut permit = Some(crate::fabric::LoanPermit::unbounded());
        self.port
            .lend(
                self.link,
                &mut Some(source.clone()),
                &mut permit,
                &ShortMessage::from_u32(immediate.to_bits()),
            )
            .expect("room");
    }

    /// Requests a tensor with its checksum.
    fn ask_validated(&mut self, slot: u32, borrow: bool, grant: Option<Grant>) {
        let request = RequestId { slot: Slot::new(slot).expect("20 bits"), generation: 0 };
        let (step, frame, iteration, meta_version) = (1, 0, 0, u32::from(grant.is_some()));
        let timeout_ms = u32::MAX;
        self.say(&Message::Request(TensorRequest {
            request,
            route: 1,
            step,
            frame,
            iteration,
            meta_version,
            timeout_ms,
            borrow,
            validate: true,
            grant,
        }));
    }

    fn grant(&mut self, bytes: u64) -> Grant {
        let target = self.pool.tensor(meta(DType::U8, &[bytes]).meta).expect("room");
        self.port.grant(self.link, target).expect("room")
    }

    /// The next arrivals, in their order.
    fn seen(&mut self, count: usize) -> Vec<Seen> {
        let end = Instant::now() + Duration::from_secs(5);
        let mut all = Vec::new();
        while all.len() < count {
            assert!(Instant::now() < end, "no more came than {all:?}");
            self.port.poll(&mut self.completions);
            for (completion, bytes) in self.completions.drain() {
                match completion.event {
                    Event::Message(_) => all.extend(messages_in(bytes).into_iter().map(Seen::Message)),
                    Event::Immediate { immediate, bytes } => all.push(Seen::Immediate(immediate.kind, bytes)),
                    Event::Lent { bytes, .. } => all.push(Seen::Lent(bytes.len() as u64)),
                    _ => {}
                }
            }
            self.completions.clear();
            self.port.post_receives(self.link, 1);
        }
        all
    }
}

impl Scene {
    /// The only event: the value of a waiter.
    fn tensor(&mut self) -> Tensor {
        match self.event() {
            LinkEvent::Arrived { received: Received::Tensor(tensor), .. } => tensor,
            other => panic!("{other:?}"),
        }
    }

    /// The only event: a waiter gets the error of a corrupted value.
    fn corruption(&mut self) -> (u32, Corruption) {
        match self.event() {
            LinkEvent::Failed { waiter, error: RequestError::Corrupted(corruption), .. } => {
                (waiter, corruption)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Drops the waiter of a request, as the drop of its receive does.
    fn drop_waiter(&mut self, id: RequestId) {
        self.links.cancel_request(self.link, id, &mut |_, waiter| {
            *waiter = None;
            CancelDecision::Cancel
        });
    }

    /// Sends standing requests for two steps from 5 on, with unknown meta-data.
    fn post_two(&mut self) -> [RequestId; 2] {
        assert_eq!(self.post_standing(5, 2), 2);
        loop {
            if let Message::StandingRequest(standing) = Message::decode(&self.peer.next()).expect("a message")
            {
                assert!(standing.validate);
                let mut steps = standing.steps.iter().map(|step| step.request);
                return [(); 2].map(|()| steps.next().expect("two"));
            }
        }
    }

    fn claim_step(&mut self, step: u64) {
        self.links.request(self.link, key(step), Destination::Alloc, u32::MAX, step as u32).expect("claimed");
    }

    /// The request that has come, among events of ended sends.
    fn asked(&mut self) -> PeerRequestId {
        let asked = self.events().into_iter().find_map(|event| match event {
            LinkEvent::Requested { peer_request, .. } => Some(peer_request),
            _ => None,
        });
        asked.expect("asked")
    }

    fn nothing(&mut self) {
        let events = self.events();
        assert!(events.is_empty(), "{events:?}");
    }
}

#[test]
fn a_value_is_delivered_with_its_right_checksum() {
    let mut scene = validating();
    let request = scene.request();
    scene.peer.response(request, &BYTES);
    scene.nothing();
    scene.peer.checksum(request, checksum_of(&BYTES));
    assert_eq!(scene.tensor().bytes(), BYTES);
    assert_eq!((scene.count(Counter::ChecksumsVerified), scene.count(Counter::ChecksumMismatches)), (1, 0));
}

#[test]
fn a_value_with_another_checksum_is_an_error_and_is_not_delivered() {
    let mut scene = validating();
    let request = scene.request();
    scene.peer.response(request, &BYTES);
    scene.peer.checksum(request, 7);
    let corruption = Corruption { bytes: 4, sent: 7, actual: checksum_of(&BYTES) };
    assert_eq!(scene.corruption(), (77, corruption));
    assert_eq!((scene.count(Counter::ChecksumsVerified), scene.count(Counter::ChecksumMismatches)), (1, 1));
    let load = scene.links.load();
    assert_eq!((load.requests, load.stashed, load.unresolved), (0, 0, 0));
    assert!(scene.links.pool().is_empty(), "nothing leaked");
}

#[test]
fn a_tensor_of_the_receiver_and_one_that_does_not_fit_are_checked_too() {
    for (len, checksum, fits) in
        [(4, checksum_of(&BYTES), true), (4, 1, true), (5, checksum_of(&BYTES), false), (5, 1, false)]
    {
        let mut scene = validating();
        let into = scene.links.pool().zeroed(meta(DType::U8, &[len]).meta).expect("room");
        let request =
            scene.links.request(scene.link, key(1), Destination::Into(into), u32::MAX, 3).expect("sent");
        scene.peer.response(request, &BYTES);
        scene.nothing();
        scene.peer.checksum(request, checksum);
        match (scene.event(), checksum == 1, fits) {
            (LinkEvent::Arrived { received: Received::Into(given), .. }, false, true) => {
                assert_eq!(given.bytes(), BYTES);
            }
            (LinkEvent::Failed { error: RequestError::ShapeMismatch { .. }, .. }, false, false) => {
                assert_eq!(scene.links.load().stashed, 1, "for whoever is next in line");
            }
            (LinkEvent::Failed { error: RequestError::Corrupted(_), .. }, true, _) => {
                assert_eq!(scene.links.load().stashed, 0);
            }
            (other, ..) => panic!("{len} bytes: {other:?}"),
        }
        assert!(scene.links.pool().is_empty(), "nothing leaked");
    }
}

#[test]
fn a_loan_is_checked_where_it_lies_and_goes_back_if_it_is_wrong() {
    for right in [true, false] {
        let mut scene = validating();
        scene.links.request(scene.link, key(1), Destination::Borrow, u32::MAX, 3).expect("sent");
        let request = loop {
            if let Message::Request(request) = Message::decode(&scene.peer.next()).expect("a message") {
                assert!(request.validate && request.borrow);
                break request.request;
            }
        };
        scene.peer.lend(request, 1000, 9);
        scene.nothing();
        scene.peer.checksum(request, checksum_of(&[9; 1000]) ^ u64::from(!right));
        match right {
            true => assert_eq!(scene.tensor().bytes(), [9; 1000]),
            false => assert_eq!(scene.corruption().1.bytes, 1000),
        }
        let end = Instant::now() + Duration::from_secs(5);
        while !scene.peer.pool.is_empty() {
            assert!(Instant::now() < end, "the loan did not come back");
            scene.links.poll();
            scene.peer.port.poll(&mut scene.peer.completions);
            scene.peer.completions.clear();
        }
    }
}

#[test]
fn a_value_without_bytes_has_no_checksum() {
    let mut scene = validating();
    let request = scene.request();
    scene.peer.immediate(ImmediateKind::Dead, request);
    assert!(matches!(scene.event(), LinkEvent::Arrived { received: Received::Dead(None), .. }));
    let request = scene.request();
    scene.peer.say(&Message::Error { request, status: Status::new(Code::NotFound, "no") });
    assert!(matches!(scene.event(), LinkEvent::Failed { error: RequestError::Remote(_), .. }));
    assert_eq!(scene.count(Counter::ChecksumsVerified), 0);
}

#[test]
fn an_unexpected_checksum_ends_the_link_and_the_waiter() {
    type Say = fn(&mut ByHand, RequestId);
    let cases: [(bool, Say, &str); 6] = [
        (
            false,
            |peer, request| peer.checksum(request, 0),
            "a checksum came for a request that waits for its first answer",
        ),
        (
            true,
            |peer, request| peer.checksum(request, 0),
            "a checksum came for a request that waits for its first answer",
        ),
        (
            true,
            |peer, request| {
                peer.response(request, &BYTES);
                peer.response(request, &BYTES);
            },
            "a tensor response came for a request whose value waits for its checksum",
        ),
        (
            true,
            |peer, request| {
                peer.response(request, &BYTES);
                peer.say(&Message::Error { request, status: Status::new(Code::Internal, "late") });
            },
            "an error status came for a request whose value waits for its checksum",
        ),
        (
            true,
            |peer, request| {
                peer.response(request, &BYTES);
                peer.say(&Message::CancelAck { request });
            },
            "an acknowledgement of a cancel came for a request whose value waits for its checksum",
        ),
        (
            true,
            |peer, request| {
                peer.response(request, &BYTES);
                peer.say_bytes(&[16, 0, 0, 0, 0, 1, 2, 3]);
            },
            "a message of type 16 ends after 8 bytes, in its checksum",
        ),
    ];
    for (validate, say, part) in cases {
        let settings = LinkSettings {
            small_tensor_bytes: 128,
            max_requests: 16,
            max_routes: 4,
            validate,
            protocol: TensorProtocol::Requests,
        };
        let mut scene = scene_with(settings);
        let request = scene.request();
        say(&mut scene.peer, request);
        scene.expect_told(part);
    }
}

#[test]
fn a_checksum_for_a_slot_that_is_free_or_used_again_is_dropped_and_counted() {
    let mut scene = validating();
    let request = scene.request();
    let stale = RequestId { generation: request.generation.wrapping_sub(1), ..request };
    let beyond = RequestId { slot: Slot::new(1_000_000).expect("20 bits"), ..request };
    for id in [stale, beyond] {
        scene.peer.checksum(id, 1);
        scene.nothing();
    }
    scene.peer.response(request, &BYTES);
    scene.peer.checksum(request, checksum_of(&BYTES));
    scene.peer.checksum(request, checksum_of(&BYTES));
    assert_eq!(scene.tensor().bytes(), BYTES, "a second checksum is for a slot that is free");
    assert_eq!(scene.count(Counter::StaleGenerations), 3);
}

#[test]
fn a_missing_checksum_ends_with_the_link_or_the_waiter() {
    let mut lost = validating();
    let request = lost.request();
    lost.peer.response(request, &BYTES);
    lost.nothing();
    lost.peer.say_bytes(&[99]);
    let events = lost.events();
    assert!(matches!(&events[0], LinkEvent::Down { waiters, .. } if *waiters == [77]), "{events:?}");
    drop(events);
    assert!(lost.links.pool().is_empty(), "nobody got it");
    let mut patient = validating();
    let request = patient.request();
    patient.peer.response(request, &BYTES);
    patient.nothing();
    patient.links.cancel_request(patient.link, request, &mut |_, _| CancelDecision::Cancel);
    assert_eq!(Message::decode(&patient.peer.next()), Ok(Message::Cancel { request }));
    patient.peer.say(&Message::CancelAck { request });
    patient.expect_violation("whose value waits for its checksum");
}

#[test]
fn a_waiter_that_cancels_before_the_checksum_gets_the_value() {
    for right in [true, false] {
        let mut scene = validating();
        let request = scene.request();
        scene.peer.response(request, &BYTES);
        scene.nothing();
        scene.links.cancel_request(scene.link, request, &mut |_, _| CancelDecision::Cancel);
        scene.peer.checksum(request, checksum_of(&BYTES) ^ u64::from(!right));
        scene.peer.say(&Message::CancelAck { request });
        match right {
            true => assert_eq!(scene.tensor().bytes(), BYTES),
            false => assert_eq!(scene.corruption().0, 77),
        }
        let load = scene.links.load();
        assert_eq!((load.requests, load.stashed, load.unresolved), (0, 0, 0));
    }
}

#[test]
fn the_next_receive_gets_the_error_of_a_value_that_was_corrupted_without_a_waiter() {
    let mut scene = validating();
    let request = scene.request();
    scene.peer.response(request, &BYTES);
    scene.nothing();
    scene.drop_waiter(request);
    scene.links.request(scene.link, key(1), Destination::Alloc, u32::MAX, 78).expect("blocked");
    assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
    scene.peer.checksum(request, 1);
    scene.nothing();
    assert!(scene.links.pool().is_empty(), "the bytes are gone");
    let stash_id = match Message::decode(&scene.peer.next()).expect("a message") {
        Message::Return { stash_id, step: 1, .. } => stash_id,
        other => panic!("{other:?}"),
    };
    scene.peer.say(&Message::CancelAck { request });
    scene.nothing();
    let request = match Message::decode(&scene.peer.next()).expect("a message") {
        Message::Request(request) => request.request,
        other => panic!("{other:?}"),
    };
    scene.peer.say(&Message::Stashed { request, stash_id });
    assert_eq!(scene.corruption(), (78, Corruption { bytes: 4, sent: 1, actual: checksum_of(&BYTES) }));
    let load = scene.links.load();
    assert_eq!((load.requests, load.stashed, load.unresolved), (0, 0, 0), "told once");
}

#[test]
fn the_next_receive_gets_the_error_of_a_corrupted_value_whose_link_ended() {
    let mut scene = validating();
    let [first, _] = scene.post_two();
    scene.peer.response(first, &BYTES);
    scene.peer.checksum(first, 1);
    scene.nothing();
    scene.peer.say_bytes(&[99]);
    let events = scene.events();
    assert!(
        matches!(
            &events[0],
            LinkEvent::Orphaned { value: StashedValue::Corrupted(_), key, .. } if key.step == 5
        ),
        "{events:?}"
    );
}

#[test]
fn standing_requests_are_checked_claimed_or_not() {
    let mut scene = validating();
    let [first, second] = scene.post_two();
    scene.peer.response(first, &BYTES);
    scene.nothing();
    scene.claim_step(5);
    scene.nothing();
    scene.peer.checksum(first, checksum_of(&BYTES));
    assert_eq!(scene.tensor().bytes(), BYTES);
    scene.peer.response(second, &BYTES);
    scene.peer.checksum(second, 3);
    scene.nothing();
    scene.claim_step(6);
    assert_eq!(scene.corruption().0, 6);
    let load = scene.links.load();
    assert_eq!((load.requests, load.stashed, load.standing), (0, 0, 0));
}

#[test]
fn a_repeated_standing_request_is_checked_like_any_other() {
    let mut scene = validating();
    let [first, _] = scene.post_two();
    scene.claim_step(5);
    let status = Status::new(Code::Unavailable, "as many as it takes");
    scene.peer.say(&Message::Error { request: first, status });
    scene.nothing();
    match Message::decode(&scene.peer.next()).expect("a message") {
        Message::Request(TensorRequest { request, step: 5, validate, .. }) => {
            assert_eq!((request, validate), (first, true));
        }
        other => panic!("{other:?}"),
    }
    scene.peer.response(first, &BYTES);
    scene.nothing();
    scene.peer.checksum(first, 1);
    assert_eq!(scene.corruption().0, 5);
}

#[test]
fn a_standing_request_cancelled_between_value_and_checksum_is_in_line_again() {
    let mut scene = validating();
    let [first, second] = scene.post_two();
    scene.peer.response(first, &BYTES);
    scene.nothing();
    scene.links.withdraw_standing(scene.link, &key(0), 100, OWNER);
    for request in [first, second] {
        assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
    }
    scene.peer.checksum(first, checksum_of(&BYTES));
    scene.peer.say(&Message::CancelAck { request: first });
    scene.peer.say(&Message::CancelAck { request: second });
    scene.nothing();
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::Return { step: 5, .. })));
    let load = scene.links.load();
    assert_eq!((load.requests, load.stashed, load.unresolved, load.standing), (0, 1, 0, 0));
}

fn checksum_message(slot: u32, checksum: u64) -> Seen {
    let request = RequestId { slot: Slot::new(slot).expect("20 bits"), generation: 0 };
    let mut bytes = Vec::new();
    Message::Checksum { request, checksum }.encode(&mut bytes);
    Seen::Message(bytes)
}

fn kind(seen: &Seen) -> u8 {
    match seen {
        Seen::Message(bytes) => bytes[0],
        _ => 0,
    }
}

#[test]
fn the_checksum_follows_every_answer_with_bytes_and_no_other() {
    let mut scene = scene_with(LinkSettings {
        small_tensor_bytes: 128,
        max_requests: 16,
        max_routes: 4,
        validate: false,
        protocol: TensorProtocol::Requests,
    });
    scene.peer.route(1, 1, HERE, THERE);
    let serve = |scene: &mut Scene, bytes: Option<u64>| {
        let peer_request = scene.asked();
        let value = bytes.map_or(Value::Dead, |bytes| {
            let mut tensor = scene.links.pool().tensor(meta(DType::U8, &[bytes]).meta).expect("room");
            tensor.bytes_mut().fill(bytes as u8);
            Value::Tensor(tensor.freeze())
        });
        scene.links.serve(peer_request, value, 1);
    };
    // In the response.
    scene.peer.ask_validated(0, false, None);
    serve(&mut scene, Some(9));
    let seen = scene.peer.seen(2);
    assert_eq!((kind(&seen[0]), &seen[1]), (8, &checksum_message(0, checksum_of(&[9; 9]))));
    // Meta-data first, and the write after the re-request.
    scene.peer.ask_validated(1, false, None);
    serve(&mut scene, Some(1000));
    assert_eq!(kind(&scene.peer.seen(1)[0]), 6);
    let grant = scene.peer.grant(1000);
    let request = RequestId { slot: Slot::new(1).expect("20 bits"), generation: 0 };
    scene.peer.say(&Message::ReRequest { request, grant });
    scene.events();
    let checksum = checksum_of(&[1000_u32 as u8; 1000]);
    assert_eq!(
        scene.peer.seen(2),
        [Seen::Immediate(ImmediateKind::Plain, 1000), checksum_message(1, checksum)]
    );
    // A loan behind its meta-data.
    scene.peer.ask_validated(2, true, None);
    serve(&mut scene, Some(2000));
    let seen = scene.peer.seen(3);
    let checksum = checksum_of(&[2000_u32 as u8; 2000]);
    assert_eq!((kind(&seen[0]), &seen[1..]), (6, &[Seen::Lent(2000), checksum_message(2, checksum)][..]));
    // A standing request: meta-data, write, checksum.
    let grant = scene.peer.grant(4000);
    let mut steps = Vec::new();
    let request = RequestId { slot: Slot::new(3).expect("20 bits"), generation: 0 };
    StandingStep { request, key: grant.key, offset: grant.offset }.put(&mut steps, true);
    scene.peer.say(&Message::StandingRequest(crate::wire::message::StandingRequest {
        route: 1,
        first_step: 1,
        frame: 0,
        iteration: 0,
        meta_version: 9,
        borrow: false,
        validate: true,
        room: Some((grant.region, grant.len)),
        steps: StandingSteps::new(&steps, true),
    }));
    serve(&mut scene, Some(3000));
    let seen = scene.peer.seen(3);
    let checksum = checksum_of(&[3000_u32 as u8; 3000]);
    assert_eq!(kind(&seen[0]), 6);
    assert_eq!(seen[1..], [Seen::Immediate(ImmediateKind::Plain, 3000), checksum_message(3, checksum)]);
    // Dead values and errors have no bytes. A receiver that does not ask for a checksum gets none.
    scene.peer.ask_validated(4, false, None);
    serve(&mut scene, None);
    scene.peer.ask_validated(5, false, None);
    let peer_request = scene.asked();
    scene.links.refuse(peer_request, Status::new(Code::NotFound, "no"));
    scene.peer.ask(6, 1);
    serve(&mut scene, Some(9));
    scene.peer.ask(7, 1);
    let peer_request = scene.asked();
    assert!(scene.links.serve_stashed(peer_request, 1, 1));
    let seen = scene.peer.seen(4);
    assert_eq!(seen[0], Seen::Immediate(ImmediateKind::Dead, 0));
    assert_eq!(seen[1..].iter().map(kind).collect::<Vec<_>>(), [11, 8, 14]);
}
